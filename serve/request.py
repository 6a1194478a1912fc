"""What the HTTP layer and the engine say to each other: plain host values, no arrays, no HTTP.

The engine sees token ids alone. Text (detokenisation, stop strings, echo) belongs to the HTTP layer, which
calls `EngineProtocol.abort(request_id, choice)` when a stop string of a choice is found.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from serve.grammar import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The HTTP layer has checked every range given here.

    With a seed every choice is reproducible, and choices differ from each other (e.g. seed + choice). That holds where all
    is kept. Under compression what a head keeps depends on how its prompt was cut into chunks, and that on what was found
    stored and on whether others decoded meanwhile.
    """

    max_tokens: int  # >= 1, and len(prompt_ids) + max_tokens <= max_model_len
    temperature: float = 1.0  # >= 0; exactly 0.0 means greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # in [0, 1]
    seed: int | None = None  # any signed 64-bit integer; None: the engine chooses
    presence_penalty: float = 0.0  # in [-2, 2]
    frequency_penalty: float = 0.0  # in [-2, 2]
    repetition_penalty: float = 1.0  # in [1e-6, 10]
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # at most 300 tokens, each in [-100, 100]
    min_tokens: int = 0  # no EOS and no stop token before so many tokens; <= max_tokens
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # at most 16, beside the model's EOS ids
    logprobs: int | None = None  # top logprobs a token, 0..20; 0: the chosen token's only; None: off
    prompt_logprobs: int | None = None  # the same for prompt tokens (echo)
    grammar: Grammar | None = None  # what is generated follows it, before ignore_eos and min_tokens


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt and `n` choices of it, numbered 0..n-1."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    retention: float | None = None  # the kept fraction of its KV cache; None: the server's budgets


class PromptLogprob(NamedTuple):
    """Log-probability of one prompt token given those before it, and the likeliest tokens there."""

    logprob: float
    top_logprobs: list[tuple[int, float]]


@dataclass(slots=True, kw_only=True)
class TokenOutput:
    """One generated token of one choice, or the end of the choice, or both.

    A choice ends with exactly one output whose `finish_reason` is set; it carries the last token too where
    there is one. "stop" means that `token_id` is an EOS or stop token, which is counted but not shown. After
    `abort(request_id, choice)` an output with "abort" may follow or not; what comes late is ignored.
    Where a grammar is at its end, "stop" comes in an output of its own without a token: the last one is a part of the text.
    """

    choice: int = 0
    token_id: int | None = None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None  # (token id, log-probability), likeliest first
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # on the first output of choice 0: prompt tokens whose KV entries were reused
    prompt_logprobs: list[PromptLogprob | None] | None = None  # on the first of choice 0; begins with None
    error: str | None = None  # with finish_reason "error": what went wrong, shown to the client
    bad_grammar: bool = False  # with "error": the grammar, so the request, is at fault, not the engine


OutputCallback = Callable[[TokenOutput], None]
TokenCallback = Callable[[int, int], None]  # of a choice: a token


def as_outputs(on_output: OutputCallback) -> TokenCallback:
    """For who wants tokens as outputs."""
    return lambda choice, token: on_output(TokenOutput(choice=choice, token_id=token))


@dataclass(frozen=True, kw_only=True)
class DriftStats:
    """What live prompts want beyond the budgets of the heads, over the last ones measured. None: not known (yet)."""

    measuring: bool = True  # False once a measurement has failed
    measured_total: int = 0
    too_short_total: int = 0  # prompts that were shorter than a sample of calibration
    overflow: float | None = None  # entries wanted beyond budgets in service / all entries wanted
    overflowing_heads: float | None = None  # share of heads that want more than they have
    layer_overflow: Mapping[int, float] = field(default_factory=dict)  # as `overflow`, by layer
    statistic: float | None = None  # overflow of calibrated budgets, at the calibrated retention
    threshold: float | None = None  # above it, the alarm
    alarm: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot for /metrics. Counters (`*_total`) count from the start of the engine."""

    requests_running: int = 0
    requests_waiting: int = 0
    pages_used: int = 0  # owned by running requests or stored sessions
    pages_total: int = 0
    page_bytes: int = 0
    stored_sessions: int = 0
    pages_stored: int = 0  # the part of pages_used that stored sessions alone own (can be evicted)
    prompt_tokens_total: int = 0
    prefilled_tokens_total: int = 0  # run in chunks: prompts but for what was cached, and what runs again
    generation_tokens_total: int = 0
    prefix_query_tokens_total: int = 0  # prompt tokens looked up among stored prefixes
    prefix_hit_tokens_total: int = 0  # prompt tokens found there and not prefilled again
    preemptions_total: int = 0
    tail_compressions_total: int = 0
    drafts_total: int = 0  # times that drafts of a choice were verified
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0  # of those
    steps_total: int = 0
    host_sessions: int = 0  # rows in host memory, and the bytes that they take there
    host_bytes: int = 0
    host_bytes_total: int = 0  # that they may take
    offloaded_tokens_total: int = 0  # copied there before their pages were given up
    offloaded_bytes_total: int = 0
    restored_tokens_total: int = 0  # brought back
    restored_bytes_total: int = 0
    compilations_after_warmup: int = 0  # must stay 0
    retention_target: float | None = None
    retention_reached: float | None = None  # entries held / entries of full KV, over the tokens held now
    drift: DriftStats | None = None  # None: not asked for


class RequestRejected(ValueError):
    """`submit` refuses this request for good (e.g. it needs more pages than the pool has): HTTP 400, for a field of it."""

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


class EngineUnavailable(RuntimeError):
    """The engine cannot take any request now (queue full, shutting down, dead): HTTP 503."""


class EngineProtocol(Protocol):
    """What the HTTP layer needs of an engine. All methods return at once.

    One of this process is thread-safe; one of another is used on an event loop.
    """

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus generation, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""

    @property
    def ready(self) -> bool:
        """Warm-up is done and the engine thread is alive."""

    def submit(
        self, request: GenerationRequest, on_output: OutputCallback, on_token: TokenCallback | None = None
    ) -> Awaitable[None] | None:
        """Queue a request; `on_output` is then called, from the engine's thread if it has one, in order within a choice.

        If there is `on_token`, it is called instead where an output would be a token and nothing else, as most are: an
        engine has thousands of them to hand over while a GPU waits.
        Raises RequestRejected or EngineUnavailable; then nothing is ever called. An engine elsewhere gives something to
        await, which raises them.
        """

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Stop a choice, or all choices; what they hold may be kept for the next turn. Others' ids are ignored."""

    def stats(self) -> Awaitable[EngineStats] | EngineStats:
        """Counters and gauges as of now."""
