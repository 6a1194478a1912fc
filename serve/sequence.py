"""One choice of one request on its way through the engine, and what the host knows of its row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from serve.grammar import GrammarState
from serve.pages import Holding
from serve.prompt_lookup import PromptLookup
from serve.request import GenerationRequest, OutputCallback, PromptLogprob, SamplingParams, TokenCallback


class Phase(Enum):
    WAITING = auto()  # no row
    RUNNING = auto()  # has a row; prefills or decodes
    CLOSING = auto()  # ended; results of dispatched steps are still to come
    ENDED = auto()


@dataclass(eq=False)
class RowState:
    """The host's mirror of one row: its numbers in the cache and the pages."""

    row: int
    holding: Holding
    budgets: np.ndarray  # i32[M], of the plan (the same object) or of its own
    compressed: int = 0  # tokens under the plan's law
    tail: int = 0  # tokens since, kept whole; negative after a rollback into the window

    @property
    def cached(self) -> int:
        return self.compressed + self.tail

    def like(self, other: "RowState") -> bool:
        """Whether its pages hold as much, kept by the same law."""
        same = (self.compressed, self.tail) == (other.compressed, other.tail)
        return same and self.budgets is other.budgets


@dataclass(eq=False)
class Sequence:
    """`tokens` are the prompt and what was generated and read; `in_flight` counts sampled tokens not read yet."""

    request: GenerationRequest
    choice: int
    on_output: OutputCallback
    seed: int
    arrival: int
    budgets: np.ndarray  # i32[M]: what its rows are compressed under
    tokens: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    state: RowState | None = None
    room: int = 0  # tail tokens that the reserved pages have room for
    in_flight: int = 0
    parent: "Sequence | None" = None  # the choice whose prompt this one forks
    cached_tokens: int | None = None  # prompt tokens that its first row had from a stored session
    prompt_logprobs: list[PromptLogprob | None] | None = None
    keep: bool = True  # store the row when the sequence ends
    continued: bool = False  # its row was a stored conversation's
    # Counts of tokens at which a copy is stored, and the prompt that waits for it; None: for those that may come.
    borders: dict[int, "Sequence | None"] = field(default_factory=dict)
    due: bool = False  # its tail is to be compressed
    announced: bool = False  # the first output was sent
    grammar: GrammarState | None = None  # it has seen every token that was read
    lookup: PromptLookup | None = None  # where its drafts come from, once it may have some
    on_token: TokenCallback | None = None
    hand_over: TokenCallback | None = None  # takes its tokens while nothing else may have to be said of them
    stops: frozenset[int] = frozenset()  # tokens that may end it
    # Of the request, where every step looks them up for every token.
    sampling: SamplingParams = field(init=False)
    prompt_length: int = field(init=False)
    most_tokens: int = field(init=False)
    _array: np.ndarray | None = None
    _prompt_array: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.sampling, self.prompt_length = self.request.sampling, len(self.request.prompt_ids)
        self.most_tokens = self.prompt_length + self.sampling.max_tokens
        if not self.tokens:
            self.tokens = self.request.prompt_ids  # of all choices, until there are more: it may be long
        if self.sampling.prompt_logprobs is not None and self.choice == 0:
            self.prompt_logprobs = [None] * len(self.tokens)

    @property
    def token_array(self) -> np.ndarray:
        """`tokens` as i32, made anew only when there are more: a long prompt that waits is looked up in every step."""
        if self._array is None or len(self._array) != len(self.tokens):
            self._array = np.asarray(self.tokens, np.int32)
        return self._array

    @property
    def prompt_array(self) -> np.ndarray:
        """The prompt as i32."""
        if self._prompt_array is None:
            self._prompt_array = np.asarray(self.request.prompt_ids, np.int32)
        return self._prompt_array

    @property
    def generated(self) -> int:
        """Tokens sampled, those not read yet included."""
        return len(self.tokens) - self.prompt_length + self.in_flight

    @property
    def unsure(self) -> bool:
        """Whether drafts are under way: until they are read, `in_flight` and the row's tail count them all as right."""
        return self.lookup is not None and bool(self.lookup.sent)

    @property
    def to_feed(self) -> int:
        """Tokens that are not in the cache: 1 means decode, more means prefill."""
        assert self.state is not None
        return len(self.tokens) + self.in_flight - self.state.cached

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.sampling.max_tokens - self.generated

    @property
    def may_decode(self) -> bool:
        """Whether there is one token to feed, sampled here, and more are wanted."""
        state = self.state
        if state is None:
            return False
        # As `to_feed`, `left` and `generated` say; spelt out, because every step asks all that run.
        tokens = len(self.tokens) + self.in_flight
        one = tokens == state.compressed + state.tail + 1
        return one and self.prompt_length < tokens < self.most_tokens

    def decodes(self, max_tail: int) -> bool:
        """Whether its next token is sampled by a decode step; false where its tail is to be compressed first."""
        state = self.state
        return state is not None and not self.due and 0 <= state.tail < max_tail and self.may_decode

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and self.generated == 0

    def continues(self, before: "Sequence") -> bool:
        """Whether it could take over the row of `before`, which has generated something."""
        count = before.prompt_length
        return before.state is not None and self.tokens[:count] == before.tokens[:count]


@dataclass(frozen=True)
class ChunkWork:
    """The next tokens of one sequence; `last` if its next token is sampled after them."""

    sequence: Sequence
    tokens: np.ndarray  # i32[count]
    start: int  # position of the first
    last: bool
    next_tokens: np.ndarray | None = None  # i32[count], for prompt logprobs: the tokens that follow


@dataclass(frozen=True)
class Work:
    """One engine step: one chunk, or several short ones; or none, and decode only, with drafts or without."""

    chunks: list[ChunkWork]
    decode: list[Sequence]
    drafts: Mapping[Sequence, np.ndarray] = field(default_factory=dict)  # i32[n] of those that have some

    @property
    def scores_prompt(self) -> bool:
        """Whether it is a chunk of a prompt whose log-probabilities are wanted, which runs alone."""
        return any(chunk.next_tokens is not None for chunk in self.chunks)
