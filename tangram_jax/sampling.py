"""Sampling on the device: penalties, temperature, filters, a seed per request, logprobs. Nothing is read back.

A `SamplerState` holds one row for each request. A token depends on its row's logits, parameters, seed and number of
tokens generated, and on nothing else: not on the row, nor on what else is in the batch.

Meaning and order are vLLM's: min_tokens' ban and logit_bias, then penalties (repetition over prompt and output, presence and
frequency over output), a mask of the tokens that a grammar allows, temperature, min-p, top-k, top-p; logprobs are those of
the raw logits.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from tangram_jax.cuda_graphs import IN_GRAPHS
from tangram_jax.row_numbers import known_rows, one_row, whole
from tangram_jax.sampling_filters import argmax, draw, keep_threshold, largest, relative_probs, restrict

MAX_STOP_IDS = 24  # EOS ids and stop ids of a request that min_tokens bans
MAX_BIASES = 300  # tokens with a logit bias in one request
MIN_TEMPERATURE = 1e-5  # below this a row is greedy
_IN_PROMPT = 1 << 15  # bit of SamplerState.seen; the rest counts
_MAX_COUNT = _IN_PROMPT - 1


class Floats(IntEnum):
    """Columns of `SamplerState.floats`."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5


class Ints(IntEnum):
    """Columns of `SamplerState.ints`."""

    TOP_K = 0
    MIN_TOKENS = 1
    GENERATED = 2
    LAST_TOKEN = 3
    BIASES = 4


@struct.dataclass
class SamplerState:
    """What sampling knows of each request. Build it with `init_sampler`; every function returns a new one."""

    floats: Array  # f32[rows, len(Floats)]
    ints: Array  # i32[rows, len(Ints)]
    keys: Array  # u32[rows, 2]: the seed
    stop_ids: Array  # i32[rows, MAX_STOP_IDS]: banned until MIN_TOKENS are generated; V where there is none
    bias_ids: Array  # i32[rows, MAX_BIASES]: the first BIASES count
    biases: Array  # f32[rows, MAX_BIASES]: added to the logits of those
    seen: Array  # u16[rows, V]: times generated, plus _IN_PROMPT if in the prompt; 2 bytes a token for both

    @property
    def num_rows(self) -> int:
        return self.ints.shape[0]

    def known(self, rows: Any) -> Array:
        """See `known_rows`."""
        return known_rows(rows, self.num_rows)

    @property
    def vocab_size(self) -> int:
        return self.seen.shape[1]

    @property
    def last_token(self) -> Array:
        """i32[rows]: the token sampled last (or given to `row_params`), which the next decode step takes in."""
        return self.ints[:, Ints.LAST_TOKEN]

    @property
    def num_generated(self) -> Array:
        """i32[rows]: tokens sampled so far."""
        return self.ints[:, Ints.GENERATED]


class RowParams(NamedTuple):
    """One request's parameters, on the host, as `set_row` takes them. Built by `row_params`, joined by `several`."""

    floats: np.ndarray  # f32[len(Floats)]
    ints: np.ndarray  # i32[len(Ints)]
    key: np.ndarray  # u32[2]
    stop_ids: np.ndarray  # i32[MAX_STOP_IDS]
    bias_ids: np.ndarray  # i32[MAX_BIASES]
    biases: np.ndarray  # f32[MAX_BIASES]

    @classmethod
    def several(cls, params: Sequence["RowParams"]) -> "RowParams":
        """Those of N requests, for `set_row` of N rows: everything with N in front."""
        return cls(*map(np.stack, zip(*params, strict=True)))


@dataclass(frozen=True)
class Variant:
    """What a compiled sampler can do (static). A row asking for more than its batch's variant does is not served it.

    Any variant gives a row that does not need what it leaves out the same token, so a batch runs under the union (`|`)
    of what its rows need, or anything above.
    """

    random: bool = True  # draws; without, every row is greedy
    filters: bool = True  # top-k, top-p, min-p
    penalties: bool = True  # repetition, presence, frequency; only then are generated tokens counted
    biases: bool = True  # logit_bias, and min_tokens' ban
    num_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's; n: of the n most likely too

    def __or__(self, other: "Variant") -> "Variant":
        counts = [v.num_logprobs for v in (self, other) if v.num_logprobs is not None]
        return Variant(
            self.random or other.random,
            self.filters or other.filters,
            self.penalties or other.penalties,
            self.biases or other.biases,
            max(counts, default=None),
        )


GREEDY = Variant(random=False, filters=False, penalties=False, biases=False)
FULL = Variant()


def init_sampler(rows: int, vocab_size: int) -> SamplerState:
    """A state of `rows` greedy rows. Takes 2 * rows * vocab_size bytes and a little."""
    return SamplerState(
        floats=jnp.zeros((rows, len(Floats)), jnp.float32).at[:, Floats.REPETITION].set(1.0),
        ints=jnp.zeros((rows, len(Ints)), jnp.int32),
        keys=jnp.zeros((rows, 2), jnp.uint32),
        stop_ids=jnp.full((rows, MAX_STOP_IDS), vocab_size, jnp.int32),
        bias_ids=jnp.full((rows, MAX_BIASES), vocab_size, jnp.int32),
        biases=jnp.zeros((rows, MAX_BIASES), jnp.float32),
        seen=jnp.zeros((rows, vocab_size), jnp.uint16),
    )


def seed_key(seed: int) -> np.ndarray:
    """u32[2]: the key of a signed 64-bit seed (its two halves), the same with and without 64-bit JAX."""
    bits = seed & 0xFFFF_FFFF_FFFF_FFFF
    return np.array([bits >> 32, bits & 0xFFFF_FFFF], np.uint32)


def row_params(
    *,
    seed: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    logit_bias: Mapping[int, float] = MappingProxyType({}),
    num_generated: int = 0,
    last_token: int = 0,
) -> RowParams:
    """Pack one request's parameters, on the host. Ranges are the server's business; only the numbers of ids are not.

    `temperature` 0 is greedy; `top_k` 0 or -1 is off; `stop_ids` are what `min_tokens` bans; `logit_bias` is added to the
    logits of its tokens. A request that goes on after it lost its row (preemption) passes `num_generated` and
    `last_token`, and `mark_output` for its tokens. Raises ValueError on more than MAX_STOP_IDS stop ids under `min_tokens`,
    or more than MAX_BIASES biases.
    """
    stops = sorted(set(stop_ids)) if min_tokens > num_generated else []
    if len(stops) > MAX_STOP_IDS:
        raise ValueError(f"min_tokens works with at most {MAX_STOP_IDS} stop and EOS ids; got {len(stops)}")
    if len(logit_bias) > MAX_BIASES:
        raise ValueError(f"logit_bias takes at most {MAX_BIASES} tokens; got {len(logit_bias)}")
    floats = {
        Floats.TEMPERATURE: temperature,
        Floats.TOP_P: top_p,
        Floats.MIN_P: min_p,
        Floats.PRESENCE: presence_penalty,
        Floats.FREQUENCY: frequency_penalty,
        Floats.REPETITION: repetition_penalty,
    }
    ints = {
        Ints.TOP_K: max(top_k, 0),
        Ints.MIN_TOKENS: min_tokens,
        Ints.GENERATED: num_generated,
        Ints.LAST_TOKEN: last_token,
        Ints.BIASES: len(logit_bias),
    }
    return RowParams(
        np.array([floats[c] for c in Floats], np.float32),
        np.array([ints[c] for c in Ints], np.int32),
        seed_key(operator.index(seed)),
        _padded_ids(stops, MAX_STOP_IDS),
        _padded_ids(list(logit_bias), MAX_BIASES),
        np.pad(np.fromiter(logit_bias.values(), np.float32), (0, MAX_BIASES - len(logit_bias))),
    )


def _padded_ids(ids: Sequence[int], size: int) -> np.ndarray:
    """i32[size]; after the ids, and for those of no token, comes what is none, and dropped."""
    none = np.iinfo(np.int32).max
    given = np.array([i if 0 <= i < none else none for i in ids], np.int32)
    return np.pad(given, (0, size - len(ids)), constant_values=none)


def needed_variant(params: RowParams, num_logprobs: int | None = None) -> Variant:
    """The least variant that serves a row. On the host."""
    f = params.floats
    random = bool(f[Floats.TEMPERATURE] >= MIN_TEMPERATURE)
    filters = bool(params.ints[Ints.TOP_K] > 0 or f[Floats.TOP_P] < 1 or f[Floats.MIN_P] > 0)
    penalties = bool(f[Floats.PRESENCE] != 0 or f[Floats.FREQUENCY] != 0 or f[Floats.REPETITION] != 1)
    biases = bool(params.ints[Ints.BIASES] or params.ints[Ints.MIN_TOKENS] > params.ints[Ints.GENERATED])
    return Variant(random, random and filters, penalties, biases, num_logprobs)


@partial(jax.jit, donate_argnums=0)
def set_row(state: SamplerState, row: Array, params: RowParams) -> SamplerState:
    """Start a request in `row` i32[]: nothing seen yet. Of a number of no row nothing happens, here and below.

    Or N requests in as many rows i32[N], all different, with the parameters of `RowParams.several`.
    """
    row = state.known(row)
    return SamplerState(
        floats=state.floats.at[row].set(params.floats, mode="drop"),
        ints=state.ints.at[row].set(params.ints, mode="drop"),
        keys=state.keys.at[row].set(params.key, mode="drop"),
        stop_ids=state.stop_ids.at[row].set(params.stop_ids, mode="drop"),
        bias_ids=state.bias_ids.at[row].set(params.bias_ids, mode="drop"),
        biases=state.biases.at[row].set(params.biases, mode="drop"),
        seen=state.seen.at[row].set(jnp.uint16(0), mode="drop"),
    )


@partial(jax.jit, donate_argnums=0)
def mark_prompt(state: SamplerState, row: Array, tokens: Array, count: Array) -> SamplerState:
    """Note that the first `count` of `tokens` i32[T] are in the prompt of `row`, one. Call it chunk by chunk.

    Only a row with a repetition penalty needs it.
    """
    row, at = one_row(row, state.num_rows), _counted(state, tokens, count)
    marked = state.seen.at[row, at].get(mode="fill", fill_value=0) | jnp.uint16(_IN_PROMPT)
    return replace(state, seen=state.seen.at[row, at].set(marked, mode="drop"))


@partial(jax.jit, donate_argnums=0)
def mark_output(state: SamplerState, row: Array, tokens: Array, count: Array) -> SamplerState:
    """Count the first `count` of `tokens` i32[T] as generated by `row`: for a request that lost its row and goes on.

    Only a row with penalties needs it.
    """
    row, at = one_row(row, state.num_rows), _counted(state, tokens, count)
    counted = jnp.zeros(state.vocab_size, jnp.int32).at[at].add(1, mode="drop")
    seen = state.seen[row]
    count = jnp.minimum((seen & jnp.uint16(_MAX_COUNT)) + counted, _MAX_COUNT).astype(jnp.uint16)
    return replace(state, seen=state.seen.at[row].set(count | (seen & jnp.uint16(_IN_PROMPT))))


def _counted(state: SamplerState, tokens: Array, count: Array) -> Array:
    """The first `count` of `tokens`, and V for the others and for what is no token."""
    tokens = whole("tokens", tokens)
    return jnp.where((jnp.arange(tokens.shape[0]) < count) & (tokens >= 0), tokens, state.vocab_size)


def last_tokens(state: SamplerState, rows: Array) -> Array:
    """i32[B]: the tokens sampled last in `rows` i32[B], 0 for a row that does not exist."""
    return state.ints.at[state.known(rows), Ints.LAST_TOKEN].get(mode="fill", fill_value=0)


def compiler_options() -> dict[str, str] | None:
    """For `jax.jit` of a program that samples with filters: keeps its loops on the device.

    The searches behind top-k and top-p end as soon as their rows are decided. By default XLA on a GPU hands the condition of
    such a loop to the host, which waits for all that was dispatched before. As part of a CUDA graph it stays on the device.
    """
    return (
        {"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE,CONDITIONAL"}
        if jax.default_backend() == "gpu"
        else None
    )


def sample(
    logits: Array, state: SamplerState, rows: Array, mask: Array | None = None, *, variant: Variant = FULL
) -> tuple[Array, Array | None, Array | None, Array | None, SamplerState]:
    """Choose the next token of each of `rows` i32[B] (all different, or no row: padding) from `logits` f32[B, V].

    Returns (tokens i32[B], logprobs f32[B], top_ids i32[B, Kt], top_logprobs f32[B, Kt], state); the three in the
    middle are None where `variant.num_logprobs` is. `state` has counted the tokens and holds them as `last_token`.
    Give a padding row a number of no row; its results mean nothing. `variant` is static under jit, which wants
    `compiler_options()`. `mask` u32[B, mask_words(V)] has the bits of the tokens that may come; a row with all bits set is
    sampled as without a mask. A row's token is -1 where the largest of its logits, biased and masked, is NaN or infinite.
    Raises ValueError on arrays of other shapes, and on a mask of another dtype.
    """
    logits, rows = jnp.asarray(logits).astype(jnp.float32), state.known(rows)
    if rows.ndim != 1 or logits.shape != (len(rows), state.vocab_size):
        raise ValueError(
            f"logits {[*logits.shape]} and rows {[*rows.shape]}: expected [B, {state.vocab_size}] and [B]"
        )
    floats = state.floats.at[rows].get(mode="fill", fill_value=0)
    ints = state.ints.at[rows].get(mode="fill", fill_value=0)
    seen = None
    biased = _bias(logits, state, rows, ints) if variant.biases else logits
    if variant.penalties:
        with jax.named_scope("penalties"):
            seen = state.seen.at[rows].get(mode="fill", fill_value=0)
            biased = _penalize(biased, seen, floats)
    if mask is not None:
        biased = restrict(biased, mask)

    with jax.named_scope("greedy"):
        tokens = argmax(biased)  # finds what is no number, too
        lost = ~(jnp.take_along_axis(biased, tokens[:, None], axis=1)[:, 0] < jnp.inf)
    if variant.random:
        greedy = floats[:, Floats.TEMPERATURE] < MIN_TEMPERATURE
        probs = relative_probs(biased, jnp.where(greedy, 1.0, floats[:, Floats.TEMPERATURE]))
        if variant.filters:
            with jax.named_scope("filters"):
                # A greedy row's draw is not used: with top-k 1 it asks for no search.
                top_k = jnp.where(greedy, 1, ints[:, Ints.TOP_K])
                top_p = jnp.where(greedy, 1.0, floats[:, Floats.TOP_P])
                lowest = keep_threshold(probs, top_k, top_p, floats[:, Floats.MIN_P])
                probs = jnp.where(probs >= lowest[:, None], probs, 0.0)
        with jax.named_scope("draw"):
            keys = state.keys.at[rows].get(mode="fill", fill_value=0)
            keys = jax.vmap(jax.random.fold_in)(
                jax.random.wrap_key_data(keys, impl="threefry2x32"), ints[:, Ints.GENERATED]
            )
            tokens = jnp.where(greedy, tokens, draw(probs, keys))

    logprobs: tuple[Any, ...] = (None, None, None)
    if variant.num_logprobs is not None:
        logprobs = token_logprobs(logits, tokens, variant.num_logprobs)
    ints = ints.at[:, Ints.GENERATED].add(1).at[:, Ints.LAST_TOKEN].set(tokens)
    state = replace(state, ints=state.ints.at[rows].set(ints, mode="drop"))
    if seen is not None:
        counted = _count(jnp.take_along_axis(seen, tokens[:, None], axis=1)[:, 0])
        state = replace(state, seen=state.seen.at[rows, tokens].set(counted, mode="drop"))
    return jnp.where(lost, -1, tokens), *logprobs, state


def token_logprobs(logits: Array, tokens: Array, num_top: int) -> tuple[Array, Array, Array]:
    """Natural log-probabilities under `logits` f32[T, V], as they are: no penalties, no temperature, no filters.

    Returns (logprobs f32[T] of `tokens` i32[T], top_ids i32[T, num_top], top_logprobs f32[T, num_top]), the
    likeliest first. For a prompt, row t's token is the one that follows it. `num_top` is static; 0 gives empty arrays.
    """
    with jax.named_scope("logprobs"):
        logits = logits.astype(jnp.float32)
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
        if num_top == 0:
            none = (len(tokens), 0)
            top, top_ids = jnp.zeros(none, jnp.float32), jnp.zeros(none, jnp.int32)
        else:
            top, top_ids = largest(logits, num_top)
        return chosen - total, top_ids.astype(jnp.int32), top - total[:, None]


def _bias(logits: Array, state: SamplerState, rows: Array, ints: Array) -> Array:
    """The rows' logit biases added; -inf for the stop ids of rows that have not generated their min_tokens."""
    vocab = logits.shape[-1]
    batch = jnp.arange(logits.shape[0])[:, None]
    banned = ints[:, Ints.GENERATED] < ints[:, Ints.MIN_TOKENS]

    def ids_of(ids: Array, there: Array) -> Array:
        return jnp.where(there, ids.at[rows].get(mode="fill", fill_value=vocab), vocab)

    with jax.named_scope("bias"):  # without a branch: XLA would copy all logits for it
        ids = ids_of(state.bias_ids, jnp.arange(MAX_BIASES) < ints[:, Ints.BIASES, None])
        biases = state.biases.at[rows].get(mode="fill", fill_value=0)
        logits = logits.at[batch, ids].add(biases, mode="drop")
        return logits.at[batch, ids_of(state.stop_ids, banned[:, None])].set(-jnp.inf, mode="drop")


def _penalize(logits: Array, seen: Array, floats: Array) -> Array:
    """Repetition, frequency and presence penalties: f32[B, V] of logits f32[B, V] and seen u16[B, V]."""
    count = (seen & jnp.uint16(_MAX_COUNT)).astype(jnp.float32)
    repetition = jnp.where(seen > 0, floats[:, Floats.REPETITION, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits -= floats[:, Floats.FREQUENCY, None] * count
    return logits - floats[:, Floats.PRESENCE, None] * (count > 0)


def _count(seen: Array) -> Array:
    """One more in the counting bits, which stay at their maximum."""
    return seen + ((seen & jnp.uint16(_MAX_COUNT)) < _MAX_COUNT).astype(jnp.uint16)
