"""Ragged decode attention against what others make of the same entries, kernel times of one run in microseconds.

  python -m benchmarks.ragged_decode_baselines --csv FILE --minutes 8        again and again, until no row is left
  python -m benchmarks.ragged_decode_baselines --model GPT-OSS-20B --peers "FlashInfer,XLA gather"

The rows of `benchmarks.ragged_decode --grid`, and more of Llama-3.1-8B with equal lengths. Every (request, KV head) is a
sequence of its own for all of:
* FlashInfer: paged batch decode on tensor cores, where installed; on equal lengths also with a request's heads in one
  page, its ordinary use ("joint": the better of its two layouts). Its plan is made on the host for every set of
  lengths, i.e. for every layer if heads differ; ours once per step for all 32 layers, on the device ("with plans");
* FlashAttention-3, where installed;
* Pallas-Triton: JAX's paged attention, in blocks of 128 entries, or fewer where they do not fit;
* XLA gather: pages gathered to the longest head, then two products and a softmax;
* SDPA: PyTorch's scaled_dot_product_attention over dense keys and values, no pages (equal lengths only).

The L2 is swept before every call. An operation of several kernels counts with their sum, without the gaps between them.
`X/ours` is X's time over that of our kernel. GPT-OSS's sinks are in our time alone.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import ragged_peers, torch_peers
from benchmarks.gpu_timing import read_roof
from benchmarks.measured import DoesNotFitError, add_options, measure_rows, of_model
from benchmarks.ragged_divisions import LAYERS, device_plan_us
from benchmarks.ragged_inputs import Inputs, Pools, kernel_us, make_inputs
from benchmarks.ragged_rows import GRID_ROWS, Row

ROWS = sorted(
    dict.fromkeys(
        [
            *(
                Row("Llama-3.1-8B", requests, context, retention, skew)
                for requests, context in ((1, 8192), (16, 8192), (64, 8192), (64, 32768), (4, 102400))
                for retention, skew in ((0.25, "ragged"), (0.25, "equal"), (1.0, "equal"))
            ),
            Row("Llama-3.1-8B", 32, 8192, 1.0, "equal"),
            Row("Llama-3.1-8B", 1, 32768, 1.0, "equal"),
            *GRID_ROWS,
        ]
    ),
    key=lambda row: row.page != 64,  # a pool has pages of one size
)
MOST_GB = 20  # of a row: the others copy its entries, and one of them gathers them to the longest head
MODULES = {"FlashInfer": "flashinfer", "FlashAttention-3": "flash_attn_interface", "SDPA": "torch"}


def _flashinfer(x: Inputs, equal: bool) -> dict[str, Any]:
    return torch_peers.flashinfer_us(x, equal)


def _flash_attention_3(x: Inputs, equal: bool) -> dict[str, Any]:
    return torch_peers.flash_attention_3_us(x)


def _sdpa(x: Inputs, equal: bool) -> dict[str, Any]:
    return {"SDPA": torch_peers.sdpa_us(x) if equal else None}


def _triton(x: Inputs, equal: bool) -> dict[str, Any]:
    return {"Pallas-Triton": ragged_peers.triton_us(ragged_peers.flat(x))}


def _gather(x: Inputs, equal: bool) -> dict[str, Any]:
    return {"XLA gather": ragged_peers.gather_us(ragged_peers.flat(x))}


PEERS: dict[str, Callable[[Inputs, bool], dict[str, Any]]] = {
    "FlashInfer": _flashinfer,
    "FlashAttention-3": _flash_attention_3,
    "SDPA": _sdpa,
    "Pallas-Triton": _triton,
    "XLA gather": _gather,
}
TIMES = ("FlashInfer", "FlashInfer joint", "FlashAttention-3", "SDPA", "Pallas-Triton", "XLA gather")


class Measure:
    """Microseconds of ours and of every peer of a row."""

    def __init__(self, pools: Pools, peers: list[str], roof: float) -> None:
        self._pools, self._peers, self._roof = pools, peers, roof
        self._failed: set[tuple[str, int]] = set()  # peer and head dimension

    def __call__(self, row: Row) -> dict[str, Any]:
        if row.kv_gigabytes > MOST_GB:
            raise DoesNotFitError(f"{row.kv_gigabytes:.0f} GB and their copies: no more than {MOST_GB} here")
        x = make_inputs(row, self._pools)
        equal = bool((x.lengths == x.lengths[0, 0]).all())
        ours, plan = kernel_us(x)[0], device_plan_us(*x.lengths.shape)[0] / LAYERS
        result: dict[str, Any] = {
            "MB": x.kv_bytes / 1e6,
            "roof GB/s": self._roof,
            "ours": ours,
            "our plan": plan,
        }
        for name in self._peers:
            if (name, x.shape.head_dim) in self._failed:
                continue
            try:
                result |= PEERS[name](x, equal)
            except Exception as error:  # a peer that fails is reported, the others are still measured
                if "out of memory" not in str(error).lower():
                    self._failed.add((name, x.shape.head_dim))
                print(f"{name}: {row}: {type(error).__name__} {str(error)[-1500:]}", flush=True)
        return result | ratios(result)


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """X/ours of all that were measured, and of the fastest of them."""
    ours = result["ours"]
    over = {f"{name}/ours": result[name] / ours for name in TIMES if result.get(name)}
    if over:
        over["fastest/ours"] = min(over.values())
    if result.get("FlashInfer"):
        over["with plans"] = (result["FlashInfer"] + result["its plan"]) / (ours + result["our plan"])
    return over


def peers_of(names: str | None) -> list[str]:
    """Those that are asked for and installed. Raises SystemExit for a name that is no peer."""
    wanted = list(PEERS) if names is None else [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in PEERS]:
        raise SystemExit(f"no peer {', '.join(unknown)}: there are {', '.join(PEERS)}")
    return [name for name in wanted if name not in MODULES or torch_peers.installed(MODULES[name])]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", help=f"only some of: {', '.join(PEERS)}")
    add_options(parser)
    options = parser.parse_args(argv)
    peers = peers_of(options.peers)
    pools = Pools([row for row in of_model(ROWS, options.model) if row.kv_gigabytes <= MOST_GB])
    roof = 0.0 if options.list else read_roof()
    print(
        f"{jax.devices()[0].device_kind}, read roof {roof:.0f} GB/s, against {', '.join(peers)}", flush=True
    )
    measure_rows(ROWS, Measure(pools, peers, roof), options)


if __name__ == "__main__":
    main()
