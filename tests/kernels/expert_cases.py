"""Tokens routed to experts at random, and what float64 NumPy makes of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    experts: np.ndarray  # i32[T, k], different ones in a row
    x: jax.Array  # [T, E]
    gate_up: jax.Array  # [X, E, 2, F]
    down: jax.Array  # [X, F, 1, E]

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    def expected(self) -> np.ndarray:
        """f64[T, k, E]: each chosen expert's MLP of each token."""
        x, gate_up, down = (np.asarray(a, np.float64) for a in (self.x, self.gate_up, self.down))
        out = np.zeros((*self.experts.shape, x.shape[1]))
        for place in np.ndindex(self.experts.shape):
            expert, row = self.experts[place], x[place[0]]
            gate, up = row @ gate_up[expert, :, 0], row @ gate_up[expert, :, 1]
            out[place] = (gate / (1 + np.exp(-gate)) * up) @ down[expert, :, 0]
        return out


def make_case(
    tokens: int,
    per_token: int,
    num_experts: int,
    hidden: int = 64,
    width: int = 64,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    busy: int | None = None,
) -> Case:
    """`busy`: only so many experts get anything, all others nothing."""
    rng = np.random.default_rng(tokens * 31 + num_experts)
    among = rng.permutation(num_experts)[:busy]
    experts = np.stack([rng.permutation(among)[:per_token] for _ in range(tokens)]).astype(np.int32)

    def normal(shape: tuple[int, ...], fan_in: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * fan_in**-0.5, dtype)

    return Case(
        experts,
        normal((tokens, hidden), 1),
        normal((num_experts, hidden, 2, width), hidden),
        normal((num_experts, width, 1, hidden), width),
    )


def relative_error(got: jax.Array, want: np.ndarray) -> float:
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())
