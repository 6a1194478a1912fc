"""Sampling where a step has verified drafts: a token is drawn after each of them for as long as drafts and draws agree.

A draft that was not drawn at random is to be accepted with the probability that the model gives it, which is what drawing a
token and comparing does. So what comes out is distributed as without drafts, and with a seed it is the same: the draw of a
token depends on the request's seed and on how many it has generated.
"""

import jax.numpy as jnp
from jax import Array

from tangram_jax.sampling import FULL, SamplerState, Variant, sample


def sample_drafts(
    logits: Array,
    state: SamplerState,
    rows: Array,
    drafts: Array,
    counts: Array,
    mask: Array | None = None,
    *,
    variant: Variant = FULL,
) -> tuple[Array, Array, Array | None, Array | None, Array | None, SamplerState]:
    """Choose the next tokens of each of `rows` i32[B] from `logits` f32[B * S, V] after its token and its S - 1 `drafts`.

    Of `drafts` i32[B, S - 1] the first counts[b] - 1 are there, `counts` i32[B]. Returns (tokens i32[B, S], right i32[B],
    logprobs f32[B, S], top_ids i32[B, S, Kt], top_logprobs f32[B, S, Kt], state): the first right[b] tokens are row b's
    next, at least one, and all but the last of them are its drafts; the others mean nothing. `state` has counted those.
    Everything else is as in `sample`; `mask` is of the first token, for a row without drafts.
    """
    size = drafts.shape[1] + 1
    by_row = logits.reshape(-1, size, logits.shape[-1])
    alive, right = jnp.ones(rows.shape, bool), jnp.zeros(rows.shape, jnp.int32)
    columns: list[tuple[Array | None, ...]] = []
    for at in range(size):
        # A row that is done is none any more: nothing of it is counted.
        these = jnp.where(alive, rows, state.num_rows)
        token, *scores, state = sample(by_row[:, at], state, these, None if at else mask, variant=variant)
        columns.append((token, *scores))
        right += alive
        if at < size - 1:
            alive &= (token == drafts[:, at]) & (at + 1 < counts)
    tokens, logprobs, ids, tops = (
        None if column[0] is None else jnp.stack(column, 1) for column in zip(*columns, strict=True)
    )
    assert tokens is not None
    return tokens, right, logprobs, ids, tops, state
