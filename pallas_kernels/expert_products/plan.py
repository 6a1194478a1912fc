"""Which rows go to which expert: rows sorted by expert, and blocks of them that one tile of the product takes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.expert_products.tuning import ALIGN

COMPARED = 256  # rows whose experts are compared pair by pair; a sort would be dozens of kernels on a GPU
i32 = jnp.int32


class ExpertPlan(NamedTuple):
    """Rows of T tokens, k experts each, M of them with the gaps that alignment leaves."""

    position: jax.Array  # i32[T, k]: the row of a token's j-th expert; 0 where it has none
    token: jax.Array  # i32[M]: the token of a row; of a gap any
    expert: jax.Array  # i32[most blocks]: whose block it is; there are as many as `ends` says last
    first: jax.Array  # i32[X]: an expert's first row, a multiple of 8
    counts: jax.Array  # i32[X]: its rows
    ends: jax.Array  # i32[X]: blocks of all experts up to it
    block: int  # rows of a block

    def place(self, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(expert, first row, rows) of a block. The rows are those of the gap too: a multiple of 8."""
        return place(number, self.expert, self.first, self.counts, self.ends, self.block)


def place(number: Any, expert: Any, first: Any, counts: Any, ends: Any, block: int) -> tuple[Any, Any, Any]:
    """`ExpertPlan.place`, from its arrays or references to them."""
    whose = expert[number]
    held = _up(counts[whose], ALIGN)
    within = (number - ends[whose]) * block + _up(held, block)
    return whose, first[whose] + within, jnp.minimum(held - within, block)


def _up(x: Any, multiple: int) -> Any:
    return lax.div(x + (multiple - 1), i32(multiple)) * multiple


def num_rows(tokens: int, per_token: int, num_experts: int) -> int:
    """M: rows that hold T tokens' k experts each, every expert's aligned."""
    rows = tokens * per_token
    return -(-(rows + min(rows, num_experts) * (ALIGN - 1)) // ALIGN) * ALIGN


def plan_experts(experts: jax.Array, num_experts: int, block: int) -> ExpertPlan:
    """Sorts i32[T, k] experts of tokens; blocks have up to `block` rows (a multiple of 8) of one expert.

    The number `num_experts` stands for none: no row is made for it.
    """
    tokens, per_token = experts.shape
    rows = tokens * per_token
    size = num_rows(tokens, per_token, num_experts)
    most = min(rows, num_experts) + rows // block
    flat = experts.reshape(-1).astype(i32)
    ranks, counts = _ranks(flat, num_experts)
    # Sums up to an expert by comparisons: one kernel on a GPU for both.
    number = lax.iota(i32, num_experts)
    first = jnp.sum(jnp.where(number < number[:, None], _up(counts, ALIGN), 0), axis=1, dtype=i32)
    ends = jnp.sum(jnp.where(number <= number[:, None], _up(counts, block) // block, 0), axis=1, dtype=i32)
    there = flat < num_experts
    position = first[jnp.minimum(flat, num_experts - 1)] + ranks
    number_of_token = np.repeat(np.arange(tokens, dtype=np.int32), per_token)
    token = jnp.zeros(size, i32).at[jnp.where(there, position, size)].set(number_of_token, mode="drop")
    position = jnp.where(there, position, 0)
    expert = jnp.sum(ends <= lax.iota(i32, most)[:, None], axis=1, dtype=i32)
    return ExpertPlan(position.reshape(tokens, per_token), token, expert, first, counts, ends, block)


def _ranks(flat: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """(how many earlier rows have the same expert i32[rows], rows of each expert i32[X])."""
    rows = flat.shape[0]
    size = min(rows, COMPARED)
    parts = jnp.pad(flat, (0, -rows % size), constant_values=num_experts).reshape(-1, size)
    same = parts[:, :, None] == parts[:, None, :]
    earlier = lax.iota(i32, size)[:, None] > lax.iota(i32, size)
    within = jnp.sum(same & earlier, axis=2, dtype=i32)
    counts = jnp.sum(parts[:, :, None] == lax.iota(i32, num_experts), axis=1, dtype=i32)  # [parts, X]
    before = jnp.cumsum(counts, axis=0) - counts
    ranks = within + jnp.take_along_axis(before, jnp.minimum(parts, num_experts - 1), axis=1)
    return ranks.reshape(-1)[:rows], counts.sum(0)
