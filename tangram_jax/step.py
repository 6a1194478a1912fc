"""The engine's two steps as pure functions: a prefill chunk that compresses as it goes, and a decode step.

Both are one function, `step`, over flat tokens: a chunk of one request and one token of each of several others share
the model's matrix products. The pool is only read while the layers run and written once at the end, for all layers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.config import ModelConfig
from models.transformer import forward
from tangram_jax.attention import ChunkAttention, DecodeAttention
from tangram_jax.cache import Cache
from tangram_jax.chunk_scores import ChunkScores
from tangram_jax.compress import Candidates, Slots, append, candidates, read_tail, select, write
from tangram_jax.pages import StepPages
from tangram_jax.plan import CachePlan
from tangram_jax.scorers import Scorer


class Chunk(NamedTuple):
    """The next tokens of one row. Arrays of the host or the device."""

    row: Any  # i32[]
    tokens: Any  # i32[T], padded
    valid: Any  # i32[]: how many are, at least 1


class Decode(NamedTuple):
    """One new token for each of several rows."""

    rows: Any  # i32[B]; a number of no row is an empty slot
    tokens: Any  # i32[B]


def step(
    params: Any,
    config: ModelConfig,
    plan: CachePlan,
    scorer: Scorer,
    cache: Cache,
    chunk: Chunk | None,
    decode: Decode | None,
    *,
    all_logits: bool = False,
) -> tuple[jax.Array, Cache]:
    """Run a chunk, a batch of decode tokens, or both, and update the cache.

    Returns (logits f32[R, V], cache): the logits after the chunk's last valid token first (with `all_logits` those of
    all T chunk tokens), then those of the B decode tokens. The rows' pages must be reserved; no row may be in both.
    """
    if decode:
        rows = jnp.asarray(decode.rows)  # a negative one would be counted from the end
        is_row = (rows >= 0) & (rows < cache.num_rows)
        decode = Decode(jnp.where(is_row, rows, cache.num_rows), jnp.asarray(decode.tokens))
    # On a GPU one token alone gets an empty slot beside it: XLA computes two tokens' norm in one kernel, one's in two.
    alone = decode is not None and not chunk and decode.rows.shape[0] == 1 and jax.default_backend() == "gpu"
    if alone and decode:
        decode = Decode(jnp.append(decode.rows, cache.num_rows), jnp.append(decode.tokens, 0))
    tokens, positions, logits_at = _flatten(cache, chunk, decode, all_logits)
    size = 0 if chunk is None else chunk.tokens.shape[0]
    before = _chunk_state(plan, cache, chunk) if chunk else None
    slots = _decode_state(plan, cache, decode) if decode else None
    heads = (config.num_kv_heads, config.group_size, config.head_dim)
    dtype = params["embed"].dtype
    if before:
        pages = _step_pages(plan, cache, before.row[None], before.lengths[None])
        chunk_attention = ChunkAttention((size, *heads), dtype, pages)
    if slots:
        pages = _step_pages(plan, cache, slots.rows, slots.lengths)
        decode_attention = DecodeAttention((len(slots.rows), *heads), dtype, pages)

    kept: list[tuple[jax.Array, jax.Array]] = []  # per layer: the chunk's keys and values
    new: list[jax.Array] = []  # per layer: qkv of the decode tokens
    scores = ChunkScores(plan, config, scorer, before.what, before.tail_kv) if before else None

    def finite(x: jax.Array) -> jax.Array:
        # What attention masks it still multiplies, by zero: a NaN in the pool would be in other requests' outputs.
        return jnp.where(jnp.isfinite(x.astype(cache.pool.dtype)), x, 0)

    def attend(state: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
        by_head = q.reshape(q.shape[0], *heads)
        out = []
        if before and scores:
            chunk_k, chunk_v = finite(k[:size]), finite(v[:size])
            kept.append((chunk_k, chunk_v))
            attended, lse = chunk_attention(layer, by_head[:size], chunk_k, chunk_v, config.attention_scale)
            out.append(attended)
            with jax.named_scope("score"):
                scores.add(layer, q[:size], chunk_k, chunk_v, lse.reshape(size, config.num_heads))
        if slots:
            # Side by side: on a GPU one kernel rotates and writes all three, and attention and appending read them there.
            new_kv = (finite(x[size:])[:, :, None] for x in (k, v))
            qkv = jnp.concatenate([by_head[size:], *new_kv], axis=2)
            new.append(qkv)
            out.append(decode_attention(layer, qkv, config.attention_scale))
        joined = out[0] if len(out) == 1 else jnp.concatenate(out)
        return joined.astype(q.dtype).reshape(len(joined), config.num_heads, config.head_dim), state

    logits, _ = forward(params, config, tokens, positions, attend, (), logits_at=logits_at)
    # The write must come after the last read: without this order XLA keeps a copy of the whole pool to read from.
    kept, new, logits = lax.optimization_barrier((kept, new, logits))
    if before and scores:
        keys, values = [k for k, _ in kept], [v for _, v in kept]
        with jax.named_scope("keep"):
            order = select(plan, cache, before.what, scores.result())
            cache = write(plan, cache, before.what, order, before.tail_kv, keys, values)
    if slots:
        with jax.named_scope("append"):
            cache = append(plan, cache, slots, new)
    return logits[:1] if alone else logits, cache


def prefill_chunk(
    params: Any,
    model_config: ModelConfig,
    plan: CachePlan,
    cache: Cache,
    *,
    scorer: Scorer,
    row: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Run the next `count` of `tokens` i32[T] of `row` and compress the row to plan.lengths of its new token count.

    Returns (logits f32[V] after the last valid token, cache). Jit it with `model_config`, `plan` and `scorer` static
    and the cache donated. Reserve pages for the row's new token count first.
    """
    chunk = Chunk(jnp.asarray(row), jnp.asarray(tokens), jnp.asarray(count))
    logits, cache = step(params, model_config, plan, scorer, cache, chunk, None)
    return logits[0], cache


def decode_step(
    params: Any,
    model_config: ModelConfig,
    plan: CachePlan,
    cache: Cache,
    *,
    rows: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Append `tokens` i32[B] to `rows` i32[B] (a number of no row is an empty slot) and return logits f32[B, V].

    Jit it with `model_config` and `plan` static and the cache donated. Each row's tail must be reserved, and may not hold
    more than the cache's `max_tail` tokens: the next chunk, which compresses the row, would lose some of what is kept.
    """
    return step(params, model_config, plan, _NO_SCORER, cache, None, Decode(rows, tokens))


_NO_SCORER: Any = None


def _step_pages(plan: CachePlan, cache: Cache, rows: jax.Array, lengths: jax.Array) -> StepPages:
    """Of `rows` i32[B], whose groups hold `lengths` i32[B, M] entries."""
    return StepPages(
        cache.pool,
        cache.table,
        rows,
        lengths[:, plan.group_of],
        cache.layout.first[plan.group_of],
        plan.column_of,
    )


class _ChunkState(NamedTuple):
    row: jax.Array  # i32[]
    lengths: jax.Array  # i32[M]
    what: Candidates
    tail_kv: jax.Array  # [2, M, Hp, W, D]


def _decode_state(plan: CachePlan, cache: Cache, decode: Decode) -> Slots:
    tokens = cache.tokens.at[decode.rows].get(mode="fill", fill_value=0)
    tail = cache.tail.at[decode.rows].get(mode="fill", fill_value=0)
    there = (decode.rows < cache.num_rows)[:, None]
    return Slots(
        rows=decode.rows,
        lengths=jnp.where(there, plan.lengths(tokens) + tail[:, None], 0),
    )


def _chunk_state(plan: CachePlan, cache: Cache, chunk: Chunk) -> _ChunkState:
    size = chunk.tokens.shape[0]
    what = candidates(plan, cache, chunk.row, size, chunk.valid)
    return _ChunkState(
        row=jnp.asarray(chunk.row),
        lengths=plan.lengths(cache.tokens[chunk.row]) + cache.tail[chunk.row],
        what=what,
        tail_kv=read_tail(plan, cache, chunk.row),
    )


def _flatten(
    cache: Cache, chunk: Chunk | None, decode: Decode | None, all_logits: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Flat tokens, their true positions, and the rows whose logits are wanted."""
    before = cache.tokens + cache.tail
    tokens, positions, logits_at = [], [], []
    size = 0
    if chunk:
        size = chunk.tokens.shape[0]
        tokens.append(chunk.tokens)
        positions.append(before[chunk.row] + np.arange(size))
        logits_at.append(np.arange(size) if all_logits else jnp.asarray(chunk.valid - 1)[None])
    if decode:
        tokens.append(decode.tokens)
        positions.append(before.at[decode.rows].get(mode="fill", fill_value=0))
        logits_at.append(size + np.arange(decode.rows.shape[0]))
    if not tokens:
        raise ValueError("a step needs a chunk, decode tokens, or both")
    return jnp.concatenate(tokens), jnp.concatenate(positions), jnp.concatenate(logits_at)
