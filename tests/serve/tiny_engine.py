"""A real engine over a tiny model, and a dense reference for what it says. Programs are compiled once per process."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tangram_jax as tj
from models.attention import dense_attend
from models.config import ModelConfig
from models.testing import random_params, tiny_config, tiny_gemma2_config, tiny_gpt_oss_config
from models.transformer import forward
from serve.args import ServeConfig
from serve.buckets import Buckets
from serve.drift import DriftMonitor
from serve.engine import Engine
from serve.limits import Limits
from serve.request import GenerationRequest, SamplingParams, TokenOutput
from serve.runner import Runner
from serve.watched import WatchedEngine
from tangram_jax.sharding import TensorParallel

CONFIG = tiny_config(num_layers=2)
EXPERTS = CONFIG.replace(num_experts=6, experts_per_token=2, expert_size=48, dense_layers=(0,))
# Layer 0 has a window, layer 1 none.
WINDOWS: dict[str, Any] = {"num_layers": 2, "sliding_window": 40, "sliding_layers": (0,)}
GEMMA2, GPT_OSS = tiny_gemma2_config(**WINDOWS), tiny_gpt_oss_config(**WINDOWS)
ON_GPU = CONFIG.replace(hidden_size=256, num_heads=16, head_dim=64)  # in bfloat16: the kernels take it
LENGTH = 256  # tokens of a row at most
WAIT = 300.0  # seconds for what comes at once, unless many tests share a GPU
RUNNING, STORED, MAX_TAIL, PAGES = 4, 3, 48, 1200
HOST = 64 << 20  # bytes of host memory for engines that use any
BUCKETS = Buckets(
    mixed_chunks=(32,),
    largest_chunk=48,
    batches=(RUNNING,),
    prompt_logprobs=32,
    packed_chunks=(32,),
    places=3,
)
BUDGETS = np.array([[0.1, 0.2, 0.4, 0.9], [0.3, 0.15, 0.6, 0.25]], np.float32)


@cache
def params_of(config: ModelConfig) -> Any:
    """The weights of one of the models here."""
    return random_params(config, 0, jnp.bfloat16 if config == ON_GPU else jnp.float32)


PARAMS = params_of(CONFIG)


@cache
def tiny_runner(
    kind: str, drafts: int = 0, devices: int = 1, few: int = 0, heads_per_page: int = 2
) -> Runner:
    """The compiled side of an engine: "full" keeps everything, "ragged" what `BUDGETS` say, clustered per model,
    or up to all of it on demand.

    "experts": as "full", of a model whose layer 1 is a mixture of experts. "gemma2" and "gpt_oss": all of layer 1, and of
    layer 0 what its window shows; "gpt_oss" in 8-bit keys and values. "gpu": as "ragged", of a model for our kernels.
    `drafts`: of each sequence. `few`: rows of logits of chunks beside few decode tokens.
    """
    config = {"experts": EXPERTS, "gemma2": GEMMA2, "gpt_oss": GPT_OSS, "gpu": ON_GPU}.get(kind, CONFIG)
    profile = tj.BudgetProfile.uniform(len(config.full_layers), config.num_kv_heads, 1.0)
    if kind in ("ragged", "gpu"):
        profile = tj.BudgetProfile.from_ratios(BUDGETS[None].repeat(2, 0), retention=0.4, alpha=0.0)
    plan = tj.CachePlan.build(
        profile, heads_per_page=heads_per_page, page_size=16 if kind == "gpu" else 8,
        cluster="layer" if devices > 1 else "model", window=16, min_entries=0,
        sliding=tj.SlidingLayers.of(config, MAX_TAIL), max_retention=float(kind in ("ragged", "gpu")),
    )  # fmt: skip
    return Runner(
        params_of(config),
        config,
        plan,
        tj.get_scorer(ServeConfig().scorer),
        dataclasses.replace(
            BUCKETS, drafts=drafts, draft_slots=(RUNNING,) if drafts else (), few=few, large=32
        ),
        num_pages=PAGES,
        num_rows=RUNNING + STORED,
        max_model_len=LENGTH,
        max_tail=MAX_TAIL,
        cache_dtype={"gpt_oss": jnp.uint8, "gpu": jnp.bfloat16}.get(kind, jnp.float32),
        host_bytes=HOST,
        parallel=TensorParallel.of(config, plan, devices) if devices > 1 else None,
    )


@dataclass
class Answer:
    """What came back for one choice."""

    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [o.token_id for o in self.outputs if o.token_id is not None]

    @property
    def logprobs(self) -> list[float]:
        return [o.logprob for o in self.outputs if o.logprob is not None]

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def cached(self) -> int:
        return self.outputs[0].cached_tokens


class Asked:
    """A request under way."""

    def __init__(self, engine: "TinyEngine", request: GenerationRequest) -> None:
        self._engine, self.request = engine, request
        self.answers = [Answer() for _ in range(request.n)]
        self._changed = threading.Condition()
        engine.engine.submit(request, self._on_output)

    def _on_output(self, output: TokenOutput) -> None:
        with self._changed:
            self.answers[output.choice].outputs.append(output)
            self._changed.notify_all()

    def wait(self, seconds: float = WAIT) -> list[Answer]:
        """All choices, finished."""
        self.until(lambda: all(a.finish_reason for a in self.answers), seconds)
        return self.answers

    def wait_for_tokens(self, count: int, choice: int = 0, seconds: float = WAIT) -> None:
        self.until(lambda: len(self.answers[choice].tokens) >= count, seconds)

    def until(self, condition: Any, seconds: float) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, seconds), "no answer in time"

    def abort(self, choice: int | None = None) -> None:
        self._engine.engine.abort(self.request.request_id, choice)


class TinyEngine:
    """A started engine, and short ways to ask it."""

    def __init__(self, engine: Engine, runner: Runner) -> None:
        self.engine, self.runner, self.plan = engine, runner, runner.plan
        self._ids = itertools.count()

    def ask(self, prompt: list[int], n: int = 1, *, retention: float | None = None, **sampling: Any) -> Asked:
        """Greedy and without an end by EOS unless told otherwise."""
        given: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        request = GenerationRequest(
            request_id=f"r{next(self._ids)}",
            prompt_ids=prompt,
            sampling=SamplingParams(**(given | sampling)),
            n=n,
            retention=retention,
        )
        return Asked(self, request)

    def answer(self, prompt: list[int], *, settle: bool = True, **sampling: Any) -> Answer:
        """The first choice, the engine idle again."""
        asked = self.ask(prompt, **sampling)
        answer = asked.wait()[0]
        if settle:
            self.settle()
        return answer

    @property
    def stored(self) -> int:
        """Stored sessions; only when settled."""
        return self.engine.stats().stored_sessions

    def settle(self) -> None:
        """Wait until nothing runs; only stored sessions own pages then, and nothing was compiled since warm-up."""
        done = threading.Event()

        def look() -> None:
            if self.engine._busy or self.engine._under_way:
                self.engine._tell(look)
            else:
                done.set()

        self.engine._tell(look)
        assert done.wait(WAIT)
        # One more round, so that the snapshot is younger than the last end.
        for _ in range(2):
            done.clear()
            self.engine._tell(done.set)
            assert done.wait(WAIT)
        stats = self.engine.stats()
        assert (stats.requests_running, stats.requests_waiting) == (0, 0)
        assert stats.pages_used == stats.pages_stored
        assert stats.compilations_after_warmup == 0
        self.runner._make_changes()  # pages that are given back only when others are taken
        assert int(self.runner.cache.num_free) >= self.engine._num_pages - stats.pages_used

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The engine waits: what is asked meanwhile it finds at once."""
        gate, held = threading.Event(), threading.Event()

        def wait() -> None:
            held.set()
            gate.wait(WAIT)

        self.engine._tell(wait)
        # Else it might find the first of them in the same round as this, and the others one step later.
        assert held.wait(WAIT)
        try:
            yield
        finally:
            gate.set()

    def forget(self) -> None:
        """Throw all stored sessions away."""
        done = threading.Event()

        def drop() -> None:
            while self.engine._scheduler.rows.evict():
                pass
            done.set()

        self.engine._tell(drop)
        assert done.wait(WAIT)
        self.settle()
        assert self.engine.stats().pages_used == 0


@contextlib.contextmanager
def tiny_engine(
    kind: str = "full",
    *,
    pages: int = PAGES,
    max_stored: int = STORED,
    max_tail: int = MAX_TAIL,
    host_bytes: int = 0,
    least_shared: int = 128,
    drift: DriftMonitor | None = None,
    drafts: int = 0,
    devices: int = 1,
    few: int = 0,
    heads_per_page: int = 2,
) -> Iterator[TinyEngine]:
    """An engine over such a `tiny_runner`, which serves one engine at a time; stopped at the end."""
    runner = tiny_runner(kind, drafts, devices, few, heads_per_page)
    limits = Limits(
        max_running=RUNNING,
        max_stored=max_stored,
        max_model_len=LENGTH,
        max_tail=max_tail,
        max_chunk=BUCKETS.largest_chunk,
        chunks_beside_decode=BUCKETS.mixed_chunks,
        prompt_logprob_chunk=BUCKETS.prompt_logprobs,
        packed_chunks=BUCKETS.packed_chunks,
        packed_places=BUCKETS.places,
        host_bytes=host_bytes,
        least_shared=least_shared,
        drafts=drafts,
        drafting=RUNNING if drafts else 0,
        lookup=(1, 3),  # random tokens are rarely the same twice in a row
    )
    engine = (
        WatchedEngine(runner, limits, drift, num_pages=pages)
        if drift
        else Engine(runner, limits, num_pages=pages)
    )
    engine.start()
    try:
        yield TinyEngine(engine, runner)
    finally:
        engine.stop()
        assert not engine.ready


# The reference


@partial(jax.jit, static_argnums=0)
def _dense(config: ModelConfig, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(LENGTH)
    attend = dense_attend(positions, config=config)
    return forward(params_of(config), config, tokens, positions, attend, ())[0]


def dense_logits(tokens: list[int], config: ModelConfig = CONFIG) -> np.ndarray:
    """f32[n, V]: row i are the logits after token i, by plain causal attention over all tokens."""
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_dense(config, padded))[: len(tokens)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    return wide - peak - np.log(np.exp(wide - peak).sum(-1, keepdims=True))


def greedy(
    prompt: list[int],
    count: int,
    *,
    guess: list[int] | None = None,
    banned: tuple[int, ...] = (),
    banned_until: int = 0,
    penalize: Any = None,
    config: ModelConfig = CONFIG,
) -> list[int]:
    """The greedy continuation: `banned` ids not before `banned_until` tokens, logits through `penalize` if given.

    A `guess` changes nothing but the time: logits of what it has right are all computed at once.
    """
    tokens: list[int] = []
    while len(tokens) < count:
        tried = [*prompt, *tokens, *(guess or [])[len(tokens) : count - 1]]
        for row in dense_logits(tried, config)[len(prompt) + len(tokens) - 1 :]:
            logits = row.astype(np.float64)
            if len(tokens) < banned_until:
                logits[list(banned)] = -np.inf
            if penalize:
                logits = penalize(logits, prompt, list(tokens))
            tokens.append(int(logits.argmax()))
            if tried[len(prompt) : len(prompt) + len(tokens)] != tokens:
                break
    return tokens


def tokens_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt without special tokens."""
    return np.random.default_rng([seed, length]).integers(8, CONFIG.vocab_size, length).tolist()


def ask_all(tiny: "TinyEngine", prompts: list[list[int]], **sampling: Any) -> list[Answer]:
    """Answers of requests that run together."""
    with tiny.held():
        asked = [tiny.ask(prompt, **sampling) for prompt in prompts]
    answers = [a.wait()[0] for a in asked]
    tiny.settle()
    return answers
