"""Tokens routed to experts at random, and what float64 NumPy makes of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import expert_products as ep
from pallas_kernels import fp8_products as fp8
from pallas_kernels.expert_products import mxfp4
from tests.one_program import in_one

LIMIT = 0.7  # cuts off some of these gates and ups


@dataclasses.dataclass(frozen=True)
class Case:
    experts: np.ndarray  # i32[T, k], different ones in a row
    x: jax.Array  # [T, E]
    gate_up: jax.Array | fp8.Fp8Weights  # [X, E, 2, F], or packed
    down: jax.Array | fp8.Fp8Weights  # [X, F, 1, E], or packed
    gate_up_bias: jax.Array | None  # [X, 2, F]
    down_bias: jax.Array | None  # [X, 1, E]
    limit: float | None

    @property
    def num_experts(self) -> int:
        return len(jax.tree.leaves(self.gate_up)[0])

    def expected(self) -> np.ndarray:
        """f64[T, k, E]: each chosen expert's MLP of each token."""
        x, gate_up, down = (
            np.asarray(in_one(_plain, a), np.float64) for a in (self.x, self.gate_up, self.down)
        )
        gate_up_bias, down_bias = (
            np.zeros((self.num_experts, 1, 1)) if a is None else np.asarray(a, np.float64)
            for a in (self.gate_up_bias, self.down_bias)
        )
        out = np.zeros((*self.experts.shape, x.shape[1]))
        for place in np.ndindex(self.experts.shape):
            expert, row = self.experts[place], x[place[0]]
            gate, up = np.einsum("e,epf->pf", row, gate_up[expert]) + gate_up_bias[expert]
            if self.limit is None:
                h = gate / (1 + np.exp(-gate)) * up
            else:
                gate = np.minimum(gate, self.limit)
                h = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -self.limit, self.limit) + 1)
            out[place] = h @ down[expert, :, 0] + down_bias[expert, 0]
        return out

    def products(
        self, products: Callable[..., jax.Array], plan: ep.ExpertPlan | ep.DirectPlan, **options: Any
    ) -> jax.Array:
        """[T, k, E]: the same by two calls of a function like `expert_products`."""
        h = products(
            plan.given(self.x), self.gate_up, plan, bias=self.gate_up_bias, limit=self.limit, **options
        )
        h = products(h, self.down, plan, bias=self.down_bias, **options)
        return self._chosen(h, plan)

    def errors_in_fp8(
        self, products: Callable[..., jax.Array], plan: ep.ExpertPlan, **options: Any
    ) -> list[float]:
        """Of both products of rows in FP8, relative to the reference's of the same codes."""
        h, errors = plan.given(in_one(fp8.quantise_tokens_reference, self.x)), []
        of_each = (self.gate_up, self.gate_up_bias, self.limit), (self.down, self.down_bias, None)
        for weights, bias, limit in of_each:
            with jax.default_matmul_precision("float32"):
                want = in_one(ep.expert_products_reference, h, weights, plan=plan, bias=bias, limit=limit)
            found = products(h, weights, plan, bias=bias, limit=limit, **options)
            assert found.dtype.itemsize == 2
            errors.append(relative_error(*(self._chosen(a, plan) for a in (found, want))))
            h = in_one(fp8.quantise_tokens_reference, want)
        return errors

    def _chosen(self, h: jax.Array, plan: ep.ExpertPlan | ep.DirectPlan) -> jax.Array:
        return in_one(
            lambda h: jnp.stack([plan.chosen(h, j) for j in range(self.experts.shape[1])], axis=1), h
        )


def make_case(
    tokens: int,
    per_token: int,
    num_experts: int,
    hidden: int = 64,
    width: int = 64,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    busy: int | None = None,
    like_gpt_oss: bool = False,
    packed: str | None = None,
) -> Case:
    """`busy`: only so many experts get anything, all others nothing; `like_gpt_oss`: with biases and a limit.

    `packed`: the weights are in "mxfp4" or "fp8", of many scales.
    """
    rng = np.random.default_rng(tokens * 31 + num_experts)
    among = rng.permutation(num_experts)[:busy]
    experts = np.stack([rng.permutation(among)[:per_token] for _ in range(tokens)]).astype(np.int32)

    def normal(shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jnp.asarray((rng.standard_normal(shape) * fan_in**-0.5).astype(dtype))

    def weights(parts: int, depth: int, columns: int) -> jax.Array | fp8.Fp8Weights:
        if packed == "fp8":
            factors = rng.lognormal(0, 1, (num_experts, parts, 1, columns)).astype(np.float32)
            matrices = normal((num_experts, parts, depth, columns), depth).astype(jnp.float32) * factors
            return jax.jit(jax.vmap(jax.vmap(fp8.quantise)))(matrices)
        if packed is None:
            return normal((num_experts, depth, parts, columns), depth)
        blocks = rng.integers(0, 256, (num_experts, parts, columns, depth // 32, 16)).astype(np.uint8)
        scales = rng.integers(118, 124, blocks.shape[:-1]).astype(np.uint8)
        return jax.jit(mxfp4.pack)(blocks, scales)

    return Case(
        experts,
        normal((tokens, hidden), 1),
        weights(2, hidden, width),
        weights(1, width, hidden),
        normal((num_experts, 2, width), 1) if like_gpt_oss else None,
        normal((num_experts, 1, hidden), 1) if like_gpt_oss else None,
        LIMIT if like_gpt_oss else None,
    )


def _plain(weights: jax.Array | fp8.Fp8Weights) -> jax.Array:
    """[X, depth, parts, columns], of packed weights too."""
    if isinstance(weights, fp8.Fp8Weights):
        values = jax.vmap(jax.vmap(fp8.unpack))(weights.codes).astype(jnp.float32)
        return (values * weights.scales[:, :, None]).swapaxes(1, 2)
    return mxfp4.unpack(weights).swapaxes(1, 2) if weights.ndim == 6 else weights


def random_rows(count: int, size: int, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """(x [2 count, size], rows of it i32[count])"""
    rng = np.random.default_rng(count + size)
    x = jnp.asarray(rng.standard_normal((2 * count, size)), dtype)
    return x, jnp.asarray(rng.integers(0, len(x), count).astype(np.int32))


def relative_error(got: jax.Array, want: np.ndarray | jax.Array) -> float:
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())
