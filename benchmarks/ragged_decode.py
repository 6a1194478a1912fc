"""Ragged decode attention: KV bytes per second over the read roof of the same run, on shapes of real models.

  python -m benchmarks.ragged_decode                 22 rows on one Hopper GPU
  python -m benchmarks.ragged_decode --grid          five models, retention 1.0 to 0.25, 1K to 128K, 1 to 128 requests
  python -m benchmarks.ragged_decode --all           every one of these combinations: half an hour
  python -m benchmarks.ragged_decode --divisions     four ways to divide the work, also between requests of different lengths
  python -m benchmarks.ragged_decode --skew          five models' ragged budgets against equal ones of the same bytes
  python -m benchmarks.ragged_decode --empty         slots that hold nothing beside one request
  python -m benchmarks.ragged_decode --plan          the plan of a step of 32 layers
  python -m benchmarks.ragged_decode --bytes         pages of bytes against the same entries in bfloat16

`--csv FILE --minutes 8` stops in time, and the same command goes on where it stopped. Kernel times come from the profiler,
with the L2 swept before every call. `goal` is 6 us plus the bytes at 0.99 of the roof.
"ragged": budgets of heads are lognormal (sigma 0.8) around the retention; "equal": the same bytes, all heads alike.
`--divisions`: `X` is the kernel's time; `X / best` adds the planning of one layer of 32, which is nothing for uniform splits
and the split map. "one long": one request has half of all tokens (128K at most); "lognormal": sigma 1, also 128K at most.
`python -m benchmarks.ragged_decode_baselines` compares with FlashInfer, PyTorch and others.
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax

from benchmarks import ragged_divisions
from benchmarks.gpu_timing import read_roof
from benchmarks.measured import add_options, measure_rows, of_model
from benchmarks.ragged_inputs import Inputs, Pools, kernel_us, make_inputs
from benchmarks.ragged_rows import (
    DEFAULT_ROWS,
    DIVISION_ROWS,
    EMPTY_ROWS,
    GRID_ROWS,
    SKEW_ROWS,
    Row,
    all_rows,
)


def of_roof(x: Inputs, roof: float) -> dict[str, float]:
    """The kernel's time, and its bytes per second over `roof`, GB/s."""
    us, least = kernel_us(x)
    bytes_us = x.kv_bytes / roof / 1e3
    return {
        "MB": x.kv_bytes / 1e6,
        "us": us,
        "least": least,
        "GB/s": x.kv_bytes / us / 1e3,
        "roof GB/s": roof,
        "of roof": bytes_us / us,
        "goal us": 6 + bytes_us / 0.99,
        "over bytes": us - bytes_us / 0.99,
    }


def measure(row: Row, pools: Pools, roof: float) -> dict[str, Any]:
    return of_roof(make_inputs(row, pools), roof)


def measure_divisions(row: Row, pools: Pools, roof: float) -> dict[str, Any]:
    x = make_inputs(row, pools)
    return {"MB": x.kv_bytes / 1e6, "roof GB/s": roof} | ragged_divisions.measure(x)


def measure_empty(row: Row, pools: Pools, roof: float) -> dict[str, Any]:
    """Beside the same requests without the empty slots."""
    alone = kernel_us(make_inputs(dataclasses.replace(row, slots=0), pools))[0]
    result = of_roof(make_inputs(row, pools), roof)
    return result | {"without empty slots": alone, "times as long": result["us"] / alone}


def measure_skew(row: Row, pools: Pools, roof: float) -> dict[str, Any]:
    """Beside the same requests whose heads are all alike."""
    equal = kernel_us(make_inputs(dataclasses.replace(row, skew="equal"), pools))[0]
    result = of_roof(make_inputs(row, pools), roof)
    return result | {"equal us": equal, "times equal": result["us"] / equal}


def measure_bytes(row: Row, pools: tuple[Pools, Pools], roof: float) -> dict[str, Any]:
    """`pools` of bytes, and of bfloat16."""
    result: dict[str, Any] = of_roof(make_inputs(row, pools[0]), roof)
    wide = kernel_us(make_inputs(row, pools[1]))[0]
    return result | {"bfloat16 us": wide, "times as fast": wide / result["us"]}


def show_plans() -> None:
    for requests in (1, 32, 128):
        us, kernels = ragged_divisions.device_plan_us(requests)
        print(
            f"plan of 32 layers of 8 heads, {requests} requests: {us:.0f} us in {kernels} kernels", flush=True
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    for name in ("grid", "all", "divisions", "skew", "empty", "plan"):
        which.add_argument("--" + name, action="store_true")
    parser.add_argument("--bytes", action="store_true", help="pages of bytes; with --grid and --all too")
    add_options(parser)
    options = parser.parse_args(argv)
    if options.bytes and (options.divisions or options.skew or options.empty or options.plan):
        parser.error("--bytes goes with the default rows, --grid and --all")
    if options.plan:
        show_plans()
        return
    rows = (
        all_rows() if options.all
        else GRID_ROWS if options.grid
        else DIVISION_ROWS if options.divisions
        else SKEW_ROWS if options.skew
        else EMPTY_ROWS if options.empty
        else DEFAULT_ROWS
    )  # fmt: skip
    chosen = of_model(rows, options.model)
    roof = 0.0 if options.list else read_roof()
    print(f"{jax.devices()[0].device_kind}, read roof {roof:.0f} GB/s", flush=True)
    # They may have a page or two more.
    twins = [dataclasses.replace(row, skew="equal") for row in chosen if options.skew]
    pools: Any = Pools([*chosen, *twins], packed=options.bytes)
    if options.bytes:
        pools = pools, Pools(chosen)
    each: Any = (
        measure_divisions if options.divisions
        else measure_skew if options.skew
        else measure_empty if options.empty
        else measure_bytes if options.bytes
        else measure
    )  # fmt: skip
    measure_rows(rows, functools.partial(each, pools=pools, roof=roof), options)


if __name__ == "__main__":
    main()
