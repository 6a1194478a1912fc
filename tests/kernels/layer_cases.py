"""A layer's products, for the interpreter and a GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_program import as_on_hopper
from models.config import ModelConfig
from pallas_kernels import fp8_products as fp8
from pallas_kernels import layer_products as lp
from pallas_kernels.gates import Gate
from tests.kernels.expert_cases import relative_error


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens, numbers from attention, of the residual stream, behind the gates, and of the next layer's heads."""

    tokens: int
    attended: int
    width: int
    inner: int
    heads: int = 0
    gate: Gate = "silu"
    offset: float = 0.0
    dtype: str = "bfloat16"
    post_norms: bool = False
    fp8: bool = False
    seed: int = 0

    def arrays(self, zeros: bool = False) -> tuple[jax.Array, jax.Array, lp.LayerWeights]:
        """Attention's result, the residual stream and weights."""
        rng = np.random.default_rng(self.tokens + 1000 * self.seed)

        def draw(*shape: int, scale: float = 1.0) -> jax.Array:
            if zeros:
                return jnp.zeros(shape, self.dtype)
            return jnp.asarray(rng.standard_normal(shape) * scale, self.dtype)

        def matrix(depth: int, columns: int) -> Any:
            if self.fp8:
                weights = fp8.random(rng, depth, columns, depth**-0.5)
                return weights._replace(scales=weights.scales * rng.uniform(0.5, 1.5, columns))
            return draw(depth, columns, scale=depth**-0.5)

        width, inner = self.width, self.inner
        weights = lp.LayerWeights(
            matrix(self.attended, width), draw(width) + 1, matrix(width, 2 * inner), matrix(inner, width)
        )
        if self.post_norms:
            weights = weights._replace(out_post=draw(width) + 1, down_post=draw(width) + 1)
        if self.heads:
            weights = weights._replace(next_norm=draw(width) + 1, heads=matrix(width, self.heads))
        return draw(self.tokens, self.attended), draw(self.tokens, width), weights


def count_kernels(arrays: tuple[Any, ...], layers: int, **how: Any) -> int:
    """Kernels of different text that so many layers one after another are, lowered for a GPU."""

    def run(
        counts: jax.Array, attended: jax.Array, x: jax.Array, weights: Any
    ) -> tuple[jax.Array, jax.Array]:
        counters = lp.counters_of(counts)
        for _ in range(layers):
            x, heads = lp.layer_products(attended, x, weights, counters, eps=1e-5, **how)
            assert heads is not None
            attended = heads[:, : attended.shape[1]]
        return x, heads

    with as_on_hopper():
        traced = jax.jit(run).trace(jax.ShapeDtypeStruct((4,), jnp.int32), *arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("kernel_hash")


def columns_of(config: ModelConfig) -> tuple[int, int, int, int]:
    """As `LayerWeights.columns`, of a model's layers."""
    queries, kv = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    return queries, config.hidden_size, config.intermediate_size, queries + 2 * kv


def in_float32(array: jax.Array) -> jax.Array:
    """But for codes."""
    return array if jnp.issubdtype(array.dtype, jnp.integer) else array.astype(jnp.float32)


def check_layer(
    case: Any,
    tuning: lp.Tuning | None = None,
    interpret: Any = None,
    repeats: int = 0,
    routing: lp.Routing | None = None,
) -> None:
    """The kernel against float32 products of the same numbers, and as often the same bits. `routing`: of experts."""
    arrays = case.arrays()
    how: dict[str, Any] = {"gate": case.gate, "eps": 1e-5, "offset": case.offset, "routing": routing}
    run = jax.jit(
        lambda *arrays: lp.layer_products(
            *arrays, lp.counters_of(jnp.arange(3)), **how, tuning=tuning, interpret=interpret
        )
    )
    outs = run(*arrays)
    exact = lp.layer_products_reference(*jax.tree.map(in_float32, arrays), **how)
    assert (outs[1] is None) == (case.heads == 0)
    for out, expected, columns in zip(outs, exact, (case.width, case.heads), strict=True):
        if out is not None:
            assert out.shape == (case.tokens, columns) and out.dtype == case.dtype
            assert relative_error(out, expected) < {"bfloat16": 2.0**-6, "float16": 2.0**-9}[case.dtype]
    for _ in range(repeats):
        jax.tree.map(np.testing.assert_array_equal, run(*arrays), outs)
