"""Sampling for the runner: each row's parameters and progress on the device, and the programs that draw tokens."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from models.config import ModelConfig
from serve.buckets import Buckets, pad
from serve.compiling import Program
from serve.handles import TOP_LOGPROBS, Handles, PromptScores
from serve.inputs import Drafts
from serve.program_store import ProgramStore
from serve.request import SamplingParams
from serve.row_changes import SIZES, batches
from serve.sequence import Sequence
from tangram_jax import sampling
from tangram_jax.sampling import FULL, GREEDY, RowParams, SamplerState, Variant
from tangram_jax.sampling_drafts import sample_drafts
from tangram_jax.sampling_filters import mask_words

VARIANTS = (GREEDY, FULL, Variant(num_logprobs=TOP_LOGPROBS))
MASKED = VARIANTS[2]  # of a batch in which a grammar allows some tokens only: one program for all of them


class RowSampler:
    """Samples rows of the cache. Nothing here reads a result."""

    _state: SamplerState

    def __init__(
        self, config: ModelConfig, num_rows: int, device: Any, *, part: int, store: ProgramStore | None = None
    ) -> None:
        """`device`: device or sharding of the state. `part`: tokens of a row that are marked as seen at a time."""
        self._config, self._num_rows, self._device, self._part = config, num_rows, device, part
        self._greedy = np.zeros(num_rows, bool)  # rows that the greedy variant serves
        # The sequences of the last step and what they need: they come again while nothing changes.
        self._last: tuple[list[Sequence | None], Variant] = [], GREEDY
        self._starting: dict[int, RowParams] = {}
        self._marks: dict[int, list[tuple[Any, list[int]]]] = {}  # of these rows: (how, tokens)
        run, run_drafts = sampling.sample, _sample_drafts
        if store:
            run = store.keep("sample", run, _like_sample)
            run_drafts = store.keep("sample drafts", run_drafts, _like_sample_drafts)
        given: Any = {"static_argnames": "variant", "compiler_options": sampling.compiler_options()}
        # What the host reads is copied there as a part of the program: a copy that is asked for takes 0.1 ms to dispatch.
        here = device if isinstance(device, Sharding) else SingleDeviceSharding(device)
        host = here.with_memory_kind("pinned_host")  # a CPU has that kind as well
        # The kind of memory is said of all: otherwise one that the host reads may get what is donated of another kind.
        self.run = jax.jit(run, donate_argnums=1, out_shardings=(*[host] * 4, here), **given)
        self.run_drafts = jax.jit(
            run_drafts, donate_argnums=(1, 2), out_shardings=(*[host] * 5, here, here), **given
        )

    @property
    def state(self) -> SamplerState:
        """Whoever reads it finds all rows begun that are to begin, for which programs may run: only one thread may."""
        if not self._starting:
            return self._state
        starting, marks = self._starting, self._marks
        self._starting, self._marks = {}, {}
        for rows, params in batches(starting, self._num_rows):
            self._state = sampling.set_row(self._state, rows, RowParams.several(params))
        for row, marks_of_row in marks.items():
            for mark, tokens in marks_of_row:
                for part in itertools.batched(tokens, self._part):
                    padded = pad(np.asarray(part, np.int32), self._part)
                    self._state = mark(self._state, np.int32(row), padded, np.int32(len(part)))
        return self._state

    @state.setter
    def state(self, state: SamplerState) -> None:
        self._state = state

    def reset(self) -> SamplerState:
        """Forget every row."""
        self.__dict__.pop("_state", None)
        self._starting, self._marks = {}, {}
        self._last = [], GREEDY
        state = sampling.init_sampler(self._num_rows, self._config.vocab_size)
        self.state = jax.device_put(state, self._device)
        return self.state

    # Rows

    def params(self, p: SamplingParams, *, seed: int = 0, **progress: int) -> RowParams:
        """A request's parameters as the sampler takes them. Raises ValueError on more ids than it has room for."""
        eos = self._config.eos_token_ids
        stops = {*p.stop_token_ids} if p.ignore_eos else {*p.stop_token_ids, *eos}
        return sampling.row_params(
            seed=seed,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            repetition_penalty=p.repetition_penalty,
            min_tokens=p.min_tokens,
            stop_ids=sorted(stops),
            logit_bias=p.logit_bias,
            **progress,
        )

    def start(self, sequence: Sequence) -> None:
        """The sequence has a row from now on."""
        assert sequence.state is not None
        p, row = sequence.sampling, sequence.state.row
        params = self.params(
            p, seed=sequence.seed, num_generated=sequence.generated, last_token=sequence.tokens[-1]
        )
        self._starting[row], self._marks[row] = params, []
        self._greedy[row] = sampling.needed_variant(params) == GREEDY
        # Whole, not chunk by chunk: part of it may never be prefilled here (a stored session, a preemption before).
        if p.repetition_penalty != 1.0:
            self._marks[row].append((sampling.mark_prompt, sequence.tokens[: sequence.prompt_length]))
        if sequence.generated and (p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty):
            self._marks[row].append((sampling.mark_output, sequence.tokens[sequence.prompt_length :]))

    # Tokens

    def sample(
        self,
        logits: jax.Array,
        sequences: list[Sequence | None],
        rows: jax.Array,
        prompt: PromptScores | None = None,
    ) -> Handles:
        """A token of each of `rows` i32[B]; those after the rows of the sequences are padding."""
        masks, variant = self._needs(sequences, len(rows))
        tokens, logprobs, ids, tops, self.state = self.run(logits, self.state, rows, *masks, variant=variant)
        return Handles(sequences, tokens, logprobs, ids, tops, prompt)

    def sample_drafts(
        self,
        logits: jax.Array,
        tail: jax.Array,
        sequences: list[Sequence | None],
        rows: jax.Array,
        drafts: Drafts,
        counts: np.ndarray,
    ) -> tuple[Handles, jax.Array]:
        """The tokens of each of `rows` for as long as its drafts are right; `tail` i32[rows] without those that are not.

        `counts`: the drafts' on the host.
        """
        masks, variant = self._needs(sequences, len(rows))
        tokens, right, logprobs, ids, tops, self.state, tail = self.run_drafts(
            logits, self.state, tail, rows, drafts, *masks, variant=variant
        )
        handles = Handles(sequences, tokens, logprobs, ids, tops, right=right, counts=counts)
        return handles, tail

    def _needs(self, sequences: list[Sequence | None], size: int) -> tuple[tuple[np.ndarray, ...], Variant]:
        """The mask of what grammars allow, if there are any, and the variant of the program."""
        if sequences is self._last[0]:
            return (), self._last[1]
        there = [s for s in sequences if s]
        if any(s.grammar for s in there):
            mask = np.full((size, mask_words(self._config.vocab_size)), 0xFFFFFFFF, np.uint32)
            for i, sequence in enumerate(sequences):
                if sequence and sequence.grammar:
                    mask[i] = sequence.grammar.mask
            return (mask,), MASKED
        variant = FULL
        if any(s.sampling.logprobs is not None for s in there):
            variant = VARIANTS[2]
        elif all(self._greedy[s.state.row] for s in there if s.state is not None):
            variant = GREEDY
        self._last = sequences, variant
        return (), variant

    # Warm-up

    def programs(self, buckets: Buckets) -> Iterator[Program]:
        """All that can run."""
        kinds = [(variant, False) for variant in VARIANTS] + [(MASKED, True)]
        for count in sorted({1, *buckets.batches, 1 + buckets.batches[-1]}):
            for variant, masked in kinds:
                arguments = partial(self.arguments, count, masked=masked)
                name = f"{'masked ' * masked}sampling of {count}"
                yield Program(name, self.run, arguments, {"variant": variant})
        for count in buckets.draft_slots:
            for variant, masked in kinds:
                arguments = partial(self._draft_arguments, count, buckets.drafts, masked=masked)
                name = f"{'masked ' * masked}sampling of {count} with drafts"
                yield Program(name, self.run_drafts, arguments, {"variant": variant})

    def arguments(self, count: int, masked: bool = False) -> tuple[Any, ...]:
        """Of `run`, for no row."""
        return self._logits(count), self.state, *self._no_rows(count), *self._no_masks(count, masked)

    def _draft_arguments(self, count: int, drafts: int, masked: bool) -> tuple[Any, ...]:
        logits = self._logits(count * (1 + drafts))
        tail = jax.device_put(np.zeros(self._num_rows, np.int32), self._device)
        return (
            logits,
            self.state,
            tail,
            *self._no_rows(count),
            jax.device_put(Drafts.none(count, drafts), self._device),
            *self._no_masks(count, masked),
        )

    def warm_marks(self) -> None:
        """Run once what `start` runs."""
        nothing = sampling.row_params(seed=0)
        for size in SIZES:
            rows = np.full(size, self._num_rows, np.int32)
            self.state = sampling.set_row(self.state, rows, RowParams.several([nothing] * size))
        for mark in (sampling.mark_prompt, sampling.mark_output):
            self.state = mark(self.state, np.int32(0), np.zeros(self._part, np.int32), np.int32(0))

    def _logits(self, count: int) -> jax.Array:
        return jax.device_put(np.zeros((count, self._config.vocab_size), np.float32), self._device)

    def _no_rows(self, count: int) -> tuple[jax.Array, ...]:
        return (jax.device_put(np.full(count, self._num_rows, np.int32), self._device),)

    def _no_masks(self, count: int, masked: bool) -> tuple[np.ndarray, ...]:
        return (np.zeros((count, mask_words(self._config.vocab_size)), np.uint32),) if masked else ()


def _sample_drafts(
    logits: jax.Array,
    state: SamplerState,
    tail: jax.Array,
    rows: jax.Array,
    drafts: Drafts,
    mask: jax.Array | None = None,
    *,
    variant: Variant,
) -> tuple[Any, ...]:
    """`sample_drafts`, and the cache's `tail` i32[rows] without the tokens that were drafted wrongly."""
    guesses, counts = jnp.asarray(drafts.tokens), jnp.asarray(drafts.counts)
    tokens, right, *scores, state = sample_drafts(logits, state, rows, guesses, counts, mask, variant=variant)
    return tokens, right, *scores, state, tail.at[rows].add(right - counts, mode="drop")


def _like_sample(logits: Any, state: SamplerState, *rest: Any, variant: Variant) -> Any:
    """The tree structure of what `sampling.sample` returns."""
    scored = None if variant.num_logprobs is None else 0
    return 0, scored, scored, scored, state


def _like_sample_drafts(logits: Any, state: SamplerState, *rest: Any, variant: Variant) -> Any:
    """The tree structure of what `_sample_drafts` returns."""
    token, *scores, state = _like_sample(logits, state, variant=variant)
    return token, 0, *scores, state, 0
