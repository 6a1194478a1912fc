"""The engine's two steps as pure functions: a prefill chunk that compresses as it goes, and a decode step.

Both are one function, `step`, over flat tokens: chunks of some requests and one token of each of several others share
the model's matrix products. The pool is only read while the layers run and written once at the end, for all layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from models.config import ModelConfig
from models.params import check_params
from models.products import EndOfLayer, layer_tuning, wanted_multiple
from models.transformer import forward
from pallas_kernels import dense_products, fp8_products
from pallas_kernels.decode_layer import Heads, Made
from pallas_kernels.layer_products import Tuning
from tangram_jax import cuda_graphs
from tangram_jax.cache import Cache, check_model, check_plan, with_pages
from tangram_jax.chunk_scores import check_scorer
from tangram_jax.drafts import DraftLayers
from tangram_jax.packed import Packed, PackedLayers, Places, chunks_of, starts_of
from tangram_jax.plan import CachePlan
from tangram_jax.row_numbers import whole
from tangram_jax.scorers import Scorer
from tangram_jax.step_layers import Chunk, ChunkLayers, Decode, DecodeLayers


def step(
    params: Any,
    config: ModelConfig,
    plan: CachePlan,
    scorer: Scorer,
    cache: Cache,
    chunk: Chunk | Packed | list[Chunk] | None,
    decode: Decode | None,
    *,
    all_logits: bool = False,
) -> tuple[jax.Array, Cache]:
    """Run chunks of one or several rows, a batch of decode tokens, or both, and update the cache.

    Returns (logits f32[R, V], cache): the logits after each chunk's last valid token first (with `all_logits` those of
    all T tokens of each), then those of the B decode tokens, or with drafts of the B * S, row by row; those of an empty
    chunk or slot, and of tokens beyond a row's count, mean nothing. No row may be there twice. The rows' pages must be
    reserved, for at most the cache's `max_tokens` and `max_tail`: a row without them is left out, as an empty slot is.

    Raises ValueError on nothing to run, on arrays of other shapes, on a cache of another plan, parameters of or a plan for
    another model, `all_logits` of packed chunks and, outside of jit, tokens beyond the vocabulary and rows that are there
    twice; TypeError on what is no scorer, chunk or `Decode`, and on tokens, rows and counts that are no whole numbers.
    """
    check_model(plan, config)
    check_plan(plan, cache)
    check_params(params, config)
    if cache.pool.shape[1:] != plan.page_shape(config.head_dim, cache.pool.dtype):
        raise ValueError(
            f"the cache is not for model {config.name}, whose heads have {config.head_dim} numbers: "
            "give init_cache its config"
        )
    cache = jax.tree.map(jnp.asarray, cache)  # one that was stored may be of NumPy's arrays
    chunks = chunks_of(chunk, decode)
    if all_logits and any(isinstance(part, Packed) for part in chunks):
        raise ValueError(
            "of packed chunks only the last logits are there: run them apart, as a list of chunks"
        )
    if chunks:
        check_scorer(scorer)
    chunks = [_placed(part, plan, cache) for part in chunks]
    empty = 0  # tokens of empty slots
    if decode:
        decode = _decode_placed(decode, plan, cache)
        beside = sum(part.tokens.shape[0] for part in chunks)
        each = 1 if decode.tokens.ndim == 1 else decode.tokens.shape[1]
        more = _missing_slots(config, beside + decode.tokens.size, each, params.get("links"))
        decode, empty = _with_empty(decode, more, cache), more * each
    _check_rows(
        [part.rows if isinstance(part, Packed | Decode) else part.row for part in (*chunks, decode) if part],
        cache,
    )
    tokens, positions, places, there = _flatten(cache, chunks, decode, all_logits)
    wanted = len(places) - empty
    # Of decode tokens alone those of all: the head might have one token alone otherwise, see `_missing_slots`.
    logits_at = places[:wanted] if chunks else None
    ends = np.cumsum([part.tokens.shape[0] for part in chunks], dtype=int).tolist()
    dtype = params["embed"].dtype
    of_chunks = [
        PackedLayers(plan, config, scorer, cache, part, dtype)
        if isinstance(part, Packed)
        else ChunkLayers(plan, config, scorer, cache, part, dtype)
        for part in chunks
    ]
    of_decode: DecodeLayers | DraftLayers | None = None
    if decode and decode.tokens.ndim == 2:
        of_decode = DraftLayers(plan, config, cache, decode.rows, _there(decode, cache), dtype)
    elif decode:
        of_decode = DecodeLayers(plan, config, cache, decode.rows, dtype, empty=empty)

    attend = _Attention(config, [*of_chunks, of_decode] if of_decode else [*of_chunks], ends)
    logits, _ = forward(params, config, tokens, positions, attend, (), logits_at=logits_at, there=there)
    kept = [part.kept for part in of_chunks]
    new = of_decode.new if of_decode else []
    # The writes must come after the last read: without this order XLA keeps copies of the whole pool and the tails.
    kept, new, logits, tail = lax.optimization_barrier((kept, new, logits, cache.tail))
    cache = replace(cache, tail=tail)
    for part, what in zip(of_chunks, kept, strict=True):
        cache = part.write(cache, what)
    if of_decode:
        cache = of_decode.append(cache, new)
    return logits[:wanted], cache


class _Attention:
    """What the model calls: each part of the step attends for its own tokens."""

    def __init__(self, config: ModelConfig, parts: Sequence[Any], ends: Sequence[int]) -> None:
        """`ends` of the tokens of all parts but the last, or of all."""
        self._parts, self._ends = parts, ends
        self._heads = config.num_kv_heads, config.group_size, config.head_dim

    def __call__(
        self, state: Any, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        by_head = q.reshape(len(q), *self._heads)
        out = []
        for part, start, end in zip(self._parts, [0, *self._ends], [*self._ends, len(q)], strict=False):
            out.append(part(layer, by_head[start:end], k[start:end], v[start:end], sinks))
        joined = out[0] if len(out) == 1 else jnp.concatenate(out)
        return joined.astype(q.dtype).reshape(q.shape), state

    def makes_heads(self) -> bool:
        """See `models.made_heads.AttendHeads`: where all tokens are those of a decode step."""
        (part, *others) = self._parts
        return not others and isinstance(part, DecodeLayers) and part.makes_heads()

    def of_heads(self, state: Any, layer: int, heads: Heads, made: Made, sinks: Any) -> tuple[jax.Array, Any]:
        """See `models.made_heads.AttendHeads`."""
        out = self._parts[0].of_heads(layer, heads, made, sinks)
        return out.reshape(len(out), -1), state

    def reaches_the_end(self, tuning: Tuning) -> bool:
        """See `models.whole_layers.AttendToTheEnd`: where all tokens are those of a decode step."""
        (part, *others) = self._parts
        return not others and isinstance(part, DecodeLayers) and part.reaches_the_end(tuning)

    def to_the_end(
        self, state: Any, layer: int, heads: Heads, made: Made, sinks: Any, end: EndOfLayer
    ) -> tuple[tuple[jax.Array, jax.Array], Any]:
        """See `models.whole_layers.AttendToTheEnd`."""
        return self._parts[0].to_the_end(layer, heads, made, sinks, end), state


def compiler_options(devices: int = 1, *, linked: bool = False, alone: bool = False) -> dict[str, str] | None:
    """For `jax.jit` of a step, or of a program over several devices.

    Without XLA's search for what could be computed twice to save memory: on a GPU it counts the donated pool once more for
    every kernel that writes into it, and where that is more than there is it warns and has a few small results computed
    again, which saves nothing.

    `alone`: a step of decode tokens without a chunk. On one GPU its CUDA graph has kernels side by side that do not depend
    on each other, as the plan and the first heads. Kernels whose CTAs wait for each other must not be: each may get a part
    of the multiprocessors. In a decode step each of these depends on the one before; with a chunk that is not said. (What
    ours write of their operands, counters, is safe: XLA counts all that a custom call is given as written by it.)

    Over several GPUs all-reduces are NCCL's, within the CUDA graph of what is around them. XLA's own kernels for small ones
    are in none, so that the host starts four pieces a layer one after another. But a graph with something of NCCL's is
    recorded anew in every step: `linked` GPUs ("links" in the parameters, see `TensorParallel.linked`) have none in theirs.
    """
    if jax.default_backend() != "gpu":
        return None
    options = {"xla_disable_hlo_passes": "rematerialization"}
    if devices > 1:
        options |= {
            "xla_gpu_experimental_use_collective_kernels": "",
            "xla_gpu_enable_command_buffer": cuda_graphs.IN_GRAPHS + ("" if linked else ",COLLECTIVES"),
        }
    elif alone:
        options |= cuda_graphs.SIDE_BY_SIDE
    return options


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
    and the cache donated, and with `tangram_jax.compiler_options()`. Reserve pages for the row's new token count first.
    """
    # 64-bit numbers of NumPy's as they are: they are looked at before they are cut.
    chunk = Chunk(row, tokens, count)
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

    Jit it with `model_config` and `plan` static and the cache donated, and on a GPU with
    `tangram_jax.compiler_options(alone=True)`, which makes a step some microseconds shorter. No row may be there twice. Each
    row's tail must be reserved. Left out is a row without pages for its token, or whose tail has `max_tail` tokens of the
    cache already: the next chunk, which compresses it, would lose some of what is kept.
    """
    return step(params, model_config, plan, _NO_SCORER, cache, None, Decode(rows, tokens))


_NO_SCORER: Any = None


def _missing_slots(config: ModelConfig, tokens: int, each: int, links: Any = None) -> int:
    """How many slots of `each` tokens a step of `tokens` lacks on a GPU: empty ones, which attention leaves out.

    XLA computes the norm of two tokens in one kernel, that of one in two, and pads tokens for FP8 weights in kernels of
    their own. More than eight, but not many tokens have kernels for their products if they are a multiple of eight.
    """
    if jax.default_backend() != "gpu":
        return 0
    if config.weights_fp8:
        return -(-(-tokens % fp8_products.LEAST_TOKENS) // each)
    multiple = wanted_multiple(tokens, config, links)
    if multiple > 1:
        more = next((n for n in range(multiple) if (tokens + n * each) % multiple == 0), 0)
        return more if tokens + more * each <= dense_products.MOST_TOKENS else 0
    return int(tokens == 1 and not (config.num_experts and layer_tuning(1, config)))


def _with_empty(decode: Decode, empty: int, cache: Cache) -> Decode:
    """`decode` and so many empty slots."""
    if not empty:
        return decode
    rows = jnp.pad(decode.rows, (0, empty), constant_values=cache.num_rows)
    tokens = jnp.pad(decode.tokens, ((0, empty), *[(0, 0)] * (decode.tokens.ndim - 1)))
    return Decode(rows, tokens, None if decode.counts is None else jnp.pad(decode.counts, (0, empty)))


def _there(decode: Decode, cache: Cache) -> jax.Array:
    """bool, as `decode.tokens`: those of a row, and of the row's count."""
    there = decode.rows < cache.num_rows
    if decode.tokens.ndim == 1:
        return there
    size = decode.tokens.shape[1]
    counts = size if decode.counts is None else decode.counts[:, None]
    return there[:, None] & (np.arange(size) < counts)


def _check_rows(rows: Sequence[jax.Array], cache: Cache) -> None:
    """Raises ValueError where one is there twice. Traced ones pass, as nothing can be raised for them."""
    known = [np.ravel(x) for x in rows if not isinstance(x, jax.core.Tracer)]
    numbers, counts = np.unique(np.concatenate([np.zeros(0, np.int32), *known]), return_counts=True)
    twice = numbers[(counts > 1) & (numbers < cache.num_rows)]
    if twice.size:
        raise ValueError(
            f"row {twice[0]} is there twice: run one part of its tokens after the other, or several tokens as those of "
            "Decode, [B, S]"
        )


def _decode_placed(decode: Decode, plan: CachePlan, cache: Cache) -> Decode:
    """With the rows alone that have pages for their tokens."""
    rows, tokens = cache.known(decode.rows), whole("tokens", decode.tokens)
    counts = None if decode.counts is None else whole("counts", decode.counts)
    shapes = [None if x is None else [*x.shape] for x in (tokens, rows, counts)]
    right = rows.ndim == 1 and tokens.ndim in (1, 2) and tokens.size and len(tokens) == len(rows)
    if not right or (counts is not None and counts.shape != rows.shape):
        raise ValueError(
            "decode tokens {}, rows {} and counts {}: expected [B] or [B, S], [B], and [B] or None".format(
                *shapes
            )
        )
    size = tokens.shape[1] if tokens.ndim == 2 else 1
    new = size if counts is None else jnp.clip(counts, 0, size)
    if tokens.ndim == 1 and counts is not None:
        rows, counts = jnp.where(new > 0, rows, cache.num_rows), None
    of = cache.row(rows)
    return Decode(with_pages(plan, cache, rows, (of.tokens, of.tail + new)), tokens, counts)


def _placed(chunk: Chunk | Packed, plan: CachePlan, cache: Cache) -> Chunk | Packed:
    """With as many tokens as there can be, and the rows alone that have some, and pages for them."""
    packed = isinstance(chunk, Packed)
    given = (chunk.rows, chunk.counts) if isinstance(chunk, Packed) else (chunk.row, chunk.valid)
    tokens, rows, counts = whole("tokens", chunk.tokens), cache.known(given[0]), whole("counts", given[1])
    if tokens.ndim != 1 or not tokens.size or rows.ndim != packed or counts.shape != rows.shape:
        raise ValueError(
            f"tokens {[*tokens.shape]}, rows {[*rows.shape]} and counts {[*counts.shape]} of a chunk: expected [T] and "
            + ("[S] twice" if packed else "a number twice")
        )
    rows, counts = jnp.atleast_1d(rows), jnp.maximum(jnp.atleast_1d(counts), 0)
    counts = jnp.clip(len(tokens) - starts_of(counts), 0, counts)
    of = cache.row(rows)
    after = of.tokens + of.tail + counts, jnp.zeros_like(of.tail)
    rows = with_pages(plan, cache, rows, (of.tokens, of.tail), after)
    rows = jnp.where(counts > 0, rows, cache.num_rows)
    return Packed(rows, tokens, counts) if packed else Chunk(rows[0], tokens, jnp.maximum(counts[0], 1))


def _flatten(
    cache: Cache, chunks: list[Chunk | Packed], decode: Decode | None, all_logits: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Flat tokens, their true positions, the rows whose logits are wanted, and which tokens are no padding."""
    before = cache.tokens + cache.tail
    tokens: list[Any] = []
    positions: list[Any] = []
    logits_at: list[Any] = []
    there: list[Any] = []
    start = 0
    for chunk in chunks:
        at = np.arange(chunk.tokens.shape[0])
        tokens.append(chunk.tokens)
        if isinstance(chunk, Packed):
            places = Places(chunk, cache)
            positions.append(places.positions)
            logits_at.append(start + places.last)
            there.append(places.there)
            start += len(at)
            continue
        positions.append(before.at[chunk.row].get(mode="fill", fill_value=0) + at)
        logits_at.append(start + (at if all_logits else jnp.asarray(chunk.valid - 1)[None]))
        there.append(at < chunk.valid)
        start += len(at)
    if decode:
        first = before.at[decode.rows].get(mode="fill", fill_value=0)
        if decode.tokens.ndim == 2:
            first = first[:, None] + np.arange(decode.tokens.shape[1])
        tokens.append(decode.tokens.reshape(-1))
        positions.append(first.reshape(-1))
        logits_at.append(start + np.arange(decode.tokens.size))
        there.append(_there(decode, cache).reshape(-1))
    if not tokens:
        raise ValueError("a step needs a chunk, decode tokens, or both")
    flat = [jnp.concatenate(x) for x in (tokens, positions, logits_at, there)]
    return flat[0], flat[1], flat[2], flat[3]
