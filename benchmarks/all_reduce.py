"""All-reduces of the tokens of a step between the GPUs of one host: ours against NCCL's and XLA's own.

  python -m benchmarks.all_reduce                  over all GPUs
  python -m benchmarks.all_reduce --devices 2 --columns 8192

Wall time of one in a row of many in one program, each of what the one before gave, less that of the row without them. NCCL's
are recorded in CUDA graphs and XLA's are not, as each is fastest (see `tangram_jax.compiler_options`). "with norm" adds
the residual and normalises: XLA in kernels of its own after the all-reduce, ours in the same one.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_timing import check_gpu
from models.sharding import tensor_mesh
from pallas_kernels import all_reduce
from pallas_kernels.norms import rms_norm
from tangram_jax.step import compiler_options

IN_A_ROW = 64
EPS = 1e-5
MESH = PartitionSpec("tensor")


def nothing(share: jax.Array, x: jax.Array, weight: jax.Array, links: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(share)


def by_xla(share: jax.Array, x: jax.Array, weight: jax.Array, links: jax.Array) -> jax.Array:
    return jax.lax.psum(share, "tensor")


def by_xla_with_norm(share: jax.Array, x: jax.Array, weight: jax.Array, links: jax.Array) -> jax.Array:
    return rms_norm(x + jax.lax.psum(share, "tensor"), weight, EPS)


def ours(share: jax.Array, x: jax.Array, weight: jax.Array, links: jax.Array) -> jax.Array:
    return all_reduce.all_reduce(share, links)


def ours_with_norm(share: jax.Array, x: jax.Array, weight: jax.Array, links: jax.Array) -> jax.Array:
    return all_reduce.added_norm(x, share, weight, links, eps=EPS)[1]


class Chain:
    """Rows of all-reduces of [T, columns], compiled for the GPUs of a mesh."""

    def __init__(self, devices: int, rows: int, columns: int) -> None:
        self._mesh, self._devices = tensor_mesh(devices), devices
        links = all_reduce.links_of(tuple(self._mesh.devices.flat))
        if links is None:
            raise SystemExit("These GPUs do not reach each other's memory, so there is nothing to compare.")
        place = NamedSharding(self._mesh, MESH)
        x = jax.device_put(np.ones((devices, rows, columns), jnp.bfloat16), place)
        self._given = x, jax.device_put(np.ones((devices, columns), jnp.bfloat16), place), links

    def us(self, one: Callable[..., jax.Array], options: dict[str, str] | None) -> float:
        """Of one of the row."""

        def on_one(x: jax.Array, weight: jax.Array, links: jax.Array) -> jax.Array:
            total = x[0]
            for _ in range(IN_A_ROW):  # the sum of the shares is what came
                share = total * jnp.asarray(1 / self._devices, total.dtype)
                total = one(share, total, weight[0], links[0])
            return total[None]

        over = jax.shard_map(on_one, mesh=self._mesh, in_specs=MESH, out_specs=MESH, check_vma=False)
        program = jax.jit(over).lower(*self._given).compile(options)
        x, weight, links = self._given
        jax.block_until_ready(program(x, weight, all_reduce.in_passing(links)))
        times = []
        for _ in range(7):
            began = time.perf_counter()
            jax.block_until_ready(program(*self._given))
            times.append(time.perf_counter() - began)
        return float(np.median(times)) / IN_A_ROW * 1e6


def measure(devices: int, rows: int, columns: int) -> dict[str, Any]:
    chain = Chain(devices, rows, columns)
    nccl, linked = compiler_options(devices), compiler_options(devices, linked=True)
    without = chain.us(nothing, linked)
    us = {
        "ours": chain.us(ours, linked),
        "NCCL": chain.us(by_xla, nccl),
        "XLA": chain.us(by_xla, None),
        "ours with norm": chain.us(ours_with_norm, linked),
        "NCCL with norm": chain.us(by_xla_with_norm, nccl),
        "XLA with norm": chain.us(by_xla_with_norm, None),
    }
    return {"rows": rows, "columns": columns} | {name: round(t - without, 2) for name, t in us.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, help="default: all")
    parser.add_argument("--rows", type=int, nargs="*", default=[2, 32, 256, 2048])
    parser.add_argument("--columns", type=int, nargs="*", default=[4096, 8192])
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    check_gpu()
    devices = args.devices or jax.device_count()
    kind = jax.devices()[0].device_kind
    rows = [measure(devices, rows, columns) for columns, rows in itertools.product(args.columns, args.rows)]
    table = Table("tokens", "columns", *list(rows[0])[2:], "NCCL/ours", "with norm")
    for row in rows:
        ratios = row["NCCL"] / row["ours"], row["NCCL with norm"] / row["ours with norm"]
        table.add_row(*map(str, row.values()), *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=160).print(f"{devices} x {kind}, us of one of {IN_A_ROW} in a row", table)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"device": kind, "devices": devices, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
