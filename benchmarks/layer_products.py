"""Whole layers for up to 128 tokens: one kernel from one attention to the next, against products by themselves.

  python -m benchmarks.layer_products                          the shapes of models, 1 to 128 tokens, one Hopper GPU
  python -m benchmarks.layer_products --model llama-3.1-8b --csv rows.csv

Wall time of a layer of eight in a row, us, as in `dense_products`: "one" with the kernel, "apart" as the engine has products
without it, "XLA" with XLA's alone. The floor is the weights' bytes at the roof, measured in the same run. `error`: of all
layers against XLA's, norm over norm. The kernel is asked for on any GPU.
"""

from typing import Any

import numpy as np

from benchmarks.decode_ways import PRODUCTS, on_any_gpu, without
from benchmarks.dense_products import Row, layer_us, model
from benchmarks.measured import main_of_rows
from pallas_kernels import layer_products
from pallas_kernels.layer_products.tuning import TUNING

MODELS = ("llama-3.1-8b", "gemma-3-12b")
TOKENS = (1, 4, 8, 16, 32, 48, 64, 96, 128)


def measure(row: Row, roof: float) -> dict[str, Any]:
    config, params = model(row.model)
    names = ("qkv", "attn_out", "gate_up", "down")
    result: dict[str, Any] = {"floor us": sum(params["layers"][0][n].nbytes for n in names) / roof / 1e3}
    outs = {}
    for how, left_out in (("one", ()), ("apart", (layer_products,)), ("XLA", PRODUCTS)):
        with without(*left_out):  # traced anew: a name is a part of what JAX keeps traces by
            result[f"{how} us"], outs[how] = layer_us(config.replace(name=how), params, row.tokens)
    for how in ("apart", "XLA"):
        result[f"{how} / one"] = result[f"{how} us"] / result["one us"]
    result["error"] = float(np.linalg.norm(outs["one"] - outs["XLA"]) / np.linalg.norm(outs["XLA"]))
    return result


def main(argv: list[str] | None = None) -> None:
    rows = [Row(name, tokens) for name in MODELS for tokens in TOKENS]
    with on_any_gpu(TUNING):
        main_of_rows(__doc__, rows, measure, argv)


if __name__ == "__main__":
    main()
