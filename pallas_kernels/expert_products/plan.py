"""Which rows go to which expert, and the blocks of them that one tile of the product takes.

Rows are sorted by expert; of very few tokens each row goes to its expert directly.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.expert_products.tuning import ALIGN
from pallas_kernels.fp8_products import Fp8Tokens

COMPARED = 256  # rows whose experts are compared pair by pair; a sort would be dozens of kernels on a GPU
i32 = jnp.int32
Gather = Callable[[jax.Array, jax.Array], jax.Array]


class SortedBlocks(NamedTuple):
    """Of rows that are sorted by expert: arrays, or a kernel's references to them."""

    expert: Any  # i32[most blocks]: whose block it is; there are as many as `ends` says last
    first: Any  # i32[X]: an expert's first row, a multiple of 8
    counts: Any  # i32[X]: its rows
    ends: Any  # i32[X]: blocks of all experts up to it

    def total(self) -> Any:
        return self.ends[self.ends.shape[0] - 1]

    def products(self, given: int) -> int:
        """Rows of the products of so many."""
        return given

    def of_tokens(self, given: int) -> bool:
        """Whether they are the tokens themselves."""
        return False

    def tile(self, number: Any, columns: int) -> tuple[Any, Any]:
        """(Block, column) of a kernel's tile: the columns of a block one after another."""
        return lax.div(number, i32(columns)), lax.rem(number, i32(columns))

    def place(self, number: Any, block: int) -> tuple[Any, Any, Any]:
        """(Expert, first row, rows) of a block. The rows are those of the gap too: a multiple of 8."""
        whose = self.expert[number]
        held = up(self.counts[whose], ALIGN)
        within = (number - self.ends[whose]) * block + up(held, block)
        return whose, self.first[whose] + within, jnp.minimum(held - within, block)

    def token(self, row: Any) -> Any:
        raise NotImplementedError("the token of a sorted row")


class DirectBlocks(NamedTuple):
    """The same of rows that each are a block, token by token."""

    expert: Any  # i32[T * k]
    ends: Any  # i32[T]: tokens that are there, of all up to it

    @property
    def per_token(self) -> int:
        return self.expert.shape[0] // self.ends.shape[0]

    def total(self) -> Any:
        """Blocks of the tokens that are there."""
        return self.ends[self.ends.shape[0] - 1] * self.per_token

    def products(self, given: int) -> int:
        return self.expert.shape[0] * ALIGN

    def of_tokens(self, given: int) -> bool:
        return given == self.ends.shape[0]

    def tile(self, number: Any, columns: int) -> tuple[Any, Any]:
        """A column of all blocks, then the next: tokens read an expert that they share at one time."""
        total = self.total()
        return lax.rem(number, total), lax.div(number, total)

    def place(self, number: Any, block: int) -> tuple[Any, Any, int]:
        """Of a block of the tokens that are there."""
        nth = lax.div(number, i32(self.per_token))
        token = sum(((self.ends[t] <= nth).astype(i32) for t in range(self.ends.shape[0] - 1)), i32(0))
        at = token * self.per_token + lax.rem(number, i32(self.per_token))
        return self.expert[at], at * ALIGN, ALIGN

    def token(self, row: Any) -> Any:
        """Whose it is."""
        return lax.div(row, i32(self.per_token * ALIGN))


class ExpertPlan(NamedTuple):
    """Rows of T tokens, k experts each, sorted by expert: M of them with the gaps that alignment leaves."""

    position: jax.Array  # i32[T, k]: the row of a token's j-th expert; 0 where it has none
    # i32[M]: of a row, of a gap any; None where the rows are made already (`dispatch`).
    token: jax.Array | None
    blocks: SortedBlocks
    block: int  # rows of a block

    def given(self, x: jax.Array | Fp8Tokens, gather: Gather | None = None) -> Any:
        """Of tokens [T, E] what is multiplied: their rows [M, E], which `gather` takes if not XLA."""
        assert self.token is not None
        if isinstance(x, Fp8Tokens):
            return Fp8Tokens(self.given(x.codes, gather), x.scales[self.token], len(self.token))
        return x[self.token] if gather is None else gather(x, self.token)

    def chosen(self, h: jax.Array, j: int) -> jax.Array:
        """Of products [M, E] those of each token's j-th expert: [T, E]."""
        return h[self.position[:, j]]


class DirectPlan(NamedTuple):
    """Few tokens T, k experts each: every row is a block of its own, the first of 8 rows. Nothing is sorted or copied."""

    blocks: DirectBlocks
    block: int = ALIGN

    def given(self, x: jax.Array | Fp8Tokens, gather: Gather | None = None) -> Any:
        """What is multiplied: the tokens themselves."""
        return x

    def chosen(self, h: jax.Array, j: int) -> jax.Array:
        """Of products [T * k * 8, E] those of each token's j-th expert: [T, E]; of tokens that are not there anything."""
        return h[j * ALIGN :: self.blocks.per_token * ALIGN]


def up(x: Any, multiple: int) -> Any:
    """To the next multiple."""
    return lax.div(x + (multiple - 1), i32(multiple)) * multiple


def num_rows(tokens: int, per_token: int, num_experts: int) -> int:
    """M: rows that hold T tokens' k experts each, every expert's aligned."""
    rows = tokens * per_token
    return -(-(rows + min(rows, num_experts) * (ALIGN - 1)) // ALIGN) * ALIGN


def most_blocks(rows: int, num_experts: int, block: int) -> int:
    """Blocks that so many rows may have, however they are dealt."""
    return min(rows, num_experts) + rows // block


def plan_experts(experts: jax.Array, num_experts: int, block: int) -> ExpertPlan:
    """Sorts i32[T, k] experts of tokens; blocks have up to `block` rows (a multiple of 8) of one expert.

    The number `num_experts` stands for none: no row is made for it.
    """
    tokens, per_token = experts.shape
    rows = tokens * per_token
    size = num_rows(tokens, per_token, num_experts)
    most = most_blocks(rows, num_experts, block)
    flat = experts.reshape(-1).astype(i32)
    ranks, counts = _ranks(flat, num_experts)
    # Sums up to an expert by comparisons: one kernel on a GPU for both.
    number = lax.iota(i32, num_experts)
    first = jnp.sum(jnp.where(number < number[:, None], up(counts, ALIGN), 0), axis=1, dtype=i32)
    ends = jnp.sum(jnp.where(number <= number[:, None], up(counts, block) // block, 0), axis=1, dtype=i32)
    there = flat < num_experts
    position = jnp.where(there, first[jnp.minimum(flat, num_experts - 1)] + ranks, size)
    if rows > COMPARED:  # held, or XLA would add them up anew for every element that is read there
        position = lax.optimization_barrier(position)
    number_of_token = np.repeat(np.arange(tokens, dtype=np.int32), per_token)
    token = jnp.zeros(size, i32).at[position].set(number_of_token, mode="drop")
    position = jnp.where(position < size, position, 0)
    expert = jnp.sum(ends <= lax.iota(i32, most)[:, None], axis=1, dtype=i32)
    blocks = SortedBlocks(expert, first, counts, ends)
    return ExpertPlan(position.reshape(tokens, per_token), token, blocks, block)


def plan_directly(experts: jax.Array, there: jax.Array | None = None) -> DirectPlan:
    """Of i32[T, k] experts of tokens, of which bool[T] says which are there. No expert is read for the others."""
    number = lax.iota(i32, len(experts))
    ends = number + 1 if there is None else jnp.sum(there & (number <= number[:, None]), axis=1, dtype=i32)
    return DirectPlan(DirectBlocks(experts.reshape(-1).astype(i32), ends))


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
    return ranks.reshape(-1)[:rows], counts.sum(0, dtype=i32)
