"""Products with FP8 weights against XLA's with bfloat16 ones: all four of a dense layer, one after another.

  python -m benchmarks.fp8_products                          the shapes of a few models, 1 to 8192 tokens, on one Hopper GPU
  python -m benchmarks.fp8_products --model llama-3.1-8b --csv rows.csv

Kernel times by the profiler, microseconds a layer; the weights of several layers take turns, so none are in the L2. The
floor is what is larger: the bytes of the FP8 weights at the roof, a large reduction measured in the same run, or the
products at 800 TFLOP/s. `error`: of our result against XLA's with the same weights, norm over norm. "dynamic": where tokens
are more than 64, they in FP8 too, what makes them so included. "norms": the two residual additions of a layer with the
norms after them, their results in FP8, a kernel each; "apart": XLA's kernels and one that quantises.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_timing import kernels_of
from benchmarks.measured import main_of_rows
from benchmarks.shapes import SHAPES
from models.config import ModelConfig
from pallas_kernels import fp8_products as fp8
from pallas_kernels.norms import rms_norm

MODELS = ("llama-3.1-8b", "qwen3-4b", "gemma-3-12b")
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 2048, 2048 + 32, 8192)
LEAST_BYTES = 256e6  # of the weights that take turns
TENSOR_CORES = 800.0  # TFLOP/s


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer's products for so many tokens."""

    model: str
    tokens: int


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(depth, columns) of a dense layer's products."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    columns = config.num_kv_heads * (config.group_size + 2) * config.head_dim
    return {
        "qkv": (hidden, columns),
        "attn_out": (heads, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }


@functools.cache
def weights_of(depth: int, columns: int) -> tuple[list[fp8.Fp8Weights], list[jax.Array]]:
    """Several in FP8, and as many in bfloat16."""
    count = max(2, int(np.ceil(LEAST_BYTES / (depth * columns))))
    drawn = fp8.random(np.random.default_rng(0), depth, columns, depth**-0.5)
    packed = [drawn]
    packed += [
        fp8.Fp8Weights(jnp.roll(packed[0].codes, n, axis=0), packed[0].scales) for n in range(1, count)
    ]
    return packed, [widened(x) for x in packed]


@jax.jit
def widened(weights: fp8.Fp8Weights) -> jax.Array:
    return (fp8.unpack(weights.codes).astype(jnp.float32) * weights.scales).astype(jnp.bfloat16)


def products_us(product: Callable[..., jax.Array], x: jax.Array, weights: list[Any]) -> float:
    """Time of one of the products of x with each of `weights`."""
    run = jax.jit(lambda x, weights: [product(x, w) for w in weights])
    return sum(map(sum, kernels_of(run, (x, weights)).values())) / len(weights)


def dynamic_us(x: jax.Array, weights: list[fp8.Fp8Weights]) -> float:
    """Time of one of the products of x in FP8 too, and of bringing it there."""
    quantise = jax.jit(fp8.quantise_tokens)
    return sum(map(sum, kernels_of(quantise, (x,)).values())) + products_us(
        fp8.fp8_products, quantise(x), weights
    )


def added_norm_apart(
    x: jax.Array, weight: jax.Array, *, added: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, fp8.Fp8Tokens]:
    x = x + added
    return x, fp8.quantise_tokens(rms_norm(x, weight, eps, offset))


def norms_us(norm: Callable[..., Any], tokens: int, config: ModelConfig) -> float:
    """Time of two, each of which adds to what the one before gave."""
    x, *added = jax.random.normal(jax.random.key(2), (9, tokens, config.hidden_size), jnp.bfloat16)

    @jax.jit
    def run(x: jax.Array, added: list[jax.Array], weight: jax.Array) -> list[fp8.Fp8Tokens]:
        found = []
        for h in added:
            x, codes = norm(x, weight, added=h, eps=config.norm_eps, offset=config.norm_offset)
            found.append(codes)
        return found

    weight = jnp.ones(config.hidden_size, jnp.bfloat16)
    return 2 * sum(map(sum, kernels_of(run, (x, added, weight)).values())) / len(added)


def error_of(got: jax.Array, want: jax.Array) -> float:
    a, b = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def measure(row: Row, roof: float) -> dict[str, Any]:
    result: dict[str, Any] = {"us": 0.0, "floor us": 0.0, "bfloat16 us": 0.0}
    errors, narrow = [0.0, 0.0], row.tokens >= fp8.LEAST_NARROW
    dynamic = 0.0
    for name, (depth, columns) in matrices(SHAPES[row.model]).items():
        packed, wide = weights_of(depth, columns)
        x = jax.random.normal(jax.random.key(1), (row.tokens, depth), jnp.bfloat16)
        result[name] = products_us(fp8.fp8_products, x, packed)
        result["us"] += result[name]
        result["bfloat16 us"] += products_us(jnp.matmul, x, wide)
        result["floor us"] += max(
            depth * columns / roof / 1e3, 2e-6 * row.tokens * depth * columns / TENSOR_CORES
        )
        theirs = jnp.matmul(x, wide[0])
        errors[0] = max(errors[0], error_of(fp8.fp8_products(x, packed[0]), theirs))
        if narrow:
            dynamic += dynamic_us(x, packed)
            errors[1] = max(errors[1], error_of(fp8.fp8_products(fp8.quantise_tokens(x), packed[0]), theirs))
    result |= {
        "of floor": result["us"] / result["floor us"],
        "times as fast": result["bfloat16 us"] / result["us"],
    }
    result |= {"error": errors[0], "dynamic us": None, "dynamic times as fast": None, "dynamic error": None}
    result |= {"norms us": None, "norms apart us": None}
    if narrow:
        result["norms us"] = norms_us(fp8.normed_tokens, row.tokens, SHAPES[row.model])
        result["norms apart us"] = norms_us(added_norm_apart, row.tokens, SHAPES[row.model])
        result["dynamic us"] = dynamic
        result["dynamic times as fast"] = result["bfloat16 us"] / dynamic
        result["dynamic error"] = errors[1]
    return result


def main(argv: list[str] | None = None) -> None:
    rows = [Row(name, tokens) for name in MODELS for tokens in TOKENS]
    main_of_rows(__doc__, rows, measure, argv)


if __name__ == "__main__":
    main()
