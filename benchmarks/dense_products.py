"""Products of some dozens of tokens with 16-bit weights: our kernel against XLA's, by themselves and in whole layers.

  python -m benchmarks.dense_products                          the shapes of a few models, 32 to 160 tokens, one Hopper GPU
  python -m benchmarks.dense_products --model llama-3.1-8b --csv rows.csv

Microseconds a layer. Of each product the kernel times by the profiler, gates and sums of parts included: as the engine has
it without `layer_products`, and XLA's. "layer": wall time of a layer of eight in a row, attention left out (the queries
stand for its result), norms, rotation and residual sums included: "ours" with this kernel, "XLA" with XLA's products only.
The weights of several layers take turns, so none are in the L2. The floor is the weights' bytes at the roof, a large
reduction measured in the same run. `error`: of all layers of ours against XLA's, norm over norm. A layer's time has an
eighth of embedding, last norm and a head of 1,024 columns in it. Where the engine has XLA's products because ours were not
measured on the device, the kernel is asked all the same.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode_step import random_weights
from benchmarks.decode_ways import PRODUCTS, on_any_gpu, without
from benchmarks.gpu_timing import kernels_of
from benchmarks.measured import main_of_rows
from benchmarks.shapes import SHAPES
from models.config import ModelConfig
from models.fp8_weights import with_fp8_weights
from models.products import gated_product, product
from models.transformer import forward
from pallas_kernels import layer_products
from pallas_kernels.dense_products.tuning import TUNING

MODELS = ("llama-3.1-8b", "gemma-3-12b", "qwen3-4b")
TOKENS = (32, 40, 64, 96, 128, 160)
LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """The products of a dense layer for so many tokens."""

    model: str
    tokens: int


@functools.cache
def model(name: str, fp8: bool = False) -> tuple[ModelConfig, Any]:
    """Some layers, their matrices in FP8 if so, and a small vocabulary: the head is no part of it."""
    config = SHAPES[name].replace(num_layers=LAYERS, sliding_layers=(), vocab_size=1024)
    config = with_fp8_weights(config) if fp8 else config
    return config, random_weights(config)


def products_us(config: ModelConfig, params: Any, name: str, tokens: int) -> float:
    """Kernel time of one layer's product of that name, as `models.products` has it."""
    depth = config.num_heads * config.head_dim if name == "attn_out" else config.hidden_size
    depth = config.intermediate_size if name == "down" else depth

    @jax.jit
    def run(x: jax.Array, layers: list[Any]) -> list[jax.Array]:
        if name == "gate_up":
            return [gated_product(x, layer[name], config) for layer in layers]
        return [product(x, layer[name], (layer[name].size // depth,), config) for layer in layers]

    x = jax.random.normal(jax.random.key(1), (tokens, depth), jnp.bfloat16)
    return sum(map(sum, kernels_of(run, (x, params["layers"])).values())) / LAYERS


def queries_as_result(
    state: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    del layer, k, v, sinks
    return q, state


def layer_us(config: ModelConfig, params: Any, tokens: int) -> tuple[float, np.ndarray]:
    """Wall time of a layer, and what all give."""

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        return forward(params, config, tokens, tokens, queries_as_result, ())[0]

    given = jnp.arange(tokens)
    out = run(params, given).block_until_ready()
    return wall_us(lambda: run(params, given)) / LAYERS, np.asarray(out, np.float32)


def wall_us(call: Callable[[], jax.Array], calls: int = 30) -> float:
    """Of one of several calls in a row, the best of four times."""
    best = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        for _ in range(calls):
            out = call()
        out.block_until_ready()
        best = min(best, (time.perf_counter() - began) / calls * 1e6)
    return best


def measure(row: Row, roof: float) -> dict[str, Any]:
    config, params = model(row.model)
    names = ("qkv", "attn_out", "gate_up", "down")
    result: dict[str, Any] = {"floor us": sum(params["layers"][0][n].nbytes for n in names) / roof / 1e3}
    for name in names:
        result[f"{name} us"] = products_us(config, params, name, row.tokens)
        with without(*PRODUCTS):
            result[f"{name} XLA"] = products_us(config, params, name, row.tokens)
    outs = {}
    for how, left_out in (("ours", (layer_products,)), ("XLA", PRODUCTS)):
        with without(*left_out):  # traced anew: a name is a part of what JAX keeps traces by
            result[f"layer {how}"], outs[how] = layer_us(config.replace(name=how), params, row.tokens)
    result["times as fast"] = result["layer XLA"] / result["layer ours"]
    result["error"] = float(np.linalg.norm(outs["ours"] - outs["XLA"]) / np.linalg.norm(outs["XLA"]))
    return result


def main(argv: list[str] | None = None) -> None:
    rows = [Row(name, tokens) for name in MODELS for tokens in TOKENS]
    with on_any_gpu(TUNING):
        main_of_rows(__doc__, rows, measure, argv)


if __name__ == "__main__":
    main()
