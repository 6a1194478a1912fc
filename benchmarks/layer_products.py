"""Whole layers for up to 128 tokens: one kernel from one attention to the next, against products by themselves.

  python -m benchmarks.layer_products                          the shapes of models, 1 to 128 tokens, one Hopper GPU
  python -m benchmarks.layer_products --model llama-3.1-8b --csv rows.csv

Wall time of a layer of eight in a row, us, as in `dense_products`: "one" with the kernel, "apart" as the engine has products
without it, "XLA" with XLA's alone, which weights in FP8 do not have. The floor is the weights' bytes at the roof, measured
in the same run. `error`: of all layers against those of the last way, norm over norm. The kernel is asked for on any GPU.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from benchmarks.decode_ways import PRODUCTS, on_any_gpu, without
from benchmarks.dense_products import layer_us, model
from benchmarks.measured import main_of_rows
from pallas_kernels import layer_products
from pallas_kernels.layer_products.tuning import TUNING, can_take

MODELS = ("llama-3.1-8b", "gemma-3-12b")
TOKENS = (1, 4, 8, 16, 32, 48, 64, 96, 128)


@dataclasses.dataclass(frozen=True)
class Row:
    """Layers for so many tokens."""

    model: str
    weights: str  # bfloat16 or fp8
    tokens: int


def measure(row: Row, roof: float) -> dict[str, Any]:
    config, params = model(row.model, row.weights == "fp8")
    matrices = [params["layers"][0][name] for name in ("qkv", "attn_out", "gate_up", "down")]
    result: dict[str, Any] = {"floor us": sum(x.nbytes for x in jax.tree.leaves(matrices)) / roof / 1e3}
    outs = {}
    ways = {"one": (), "apart": (layer_products,)} | ({} if config.weights_fp8 else {"XLA": PRODUCTS})
    for how, left_out in ways.items():
        with without(*left_out):  # traced anew: a name is a part of what JAX keeps traces by
            result[f"{how} us"], outs[how] = layer_us(config.replace(name=how), params, row.tokens)
    *_, last = ways
    for how in list(ways)[1:]:
        result[f"{how} / one"] = result[f"{how} us"] / result["one us"]
    result["error"] = float(np.linalg.norm(outs["one"] - outs[last]) / np.linalg.norm(outs[last]))
    return result


def main(argv: list[str] | None = None) -> None:
    rows = [
        Row(name, weights, tokens)
        for name in MODELS
        for weights in ("bfloat16", "fp8")
        for tokens in TOKENS
        if can_take(tokens, weights == "fp8")
    ]
    with on_any_gpu(TUNING):
        main_of_rows(__doc__, rows, measure, argv)


if __name__ == "__main__":
    main()
