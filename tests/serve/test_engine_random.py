"""Random requests to the real engine over a tiny model, with too little memory of every kind.

Requests that keep all say what dense attention says, whatever others keep, and however often they were preempted, pushed
out to host memory, brought back, forked, or left by their clients. At the end nothing is held, and the engine lives.
"""

import itertools
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from models.config import ModelConfig
from tests.serve.tiny_engine import PAGES, Asked, TinyEngine, dense_logits, tiny_engine, tokens_of
from tests.simulated import on_simulated_devices

REPEATED = 50  # a token


def random_prompt(random: np.random.Generator, asked: list[Asked]) -> list[int]:
    """A new one, one that begins as others do, or the next turn of a conversation, maybe edited."""
    done = [a for a in asked if all(answer.finish_reason == "length" for answer in a.answers)]
    kind = random.random()
    if done and kind < 0.55:
        old = done[-1 - random.integers(min(4, len(done)))]
        answer = old.answers[random.integers(old.request.n)]
        text = [*old.request.prompt_ids, *answer.tokens]
        if random.random() < 0.3:
            text = text[: random.integers(1, len(text) + 1)]
        text += tokens_of(int(random.integers(1, 20)), int(random.integers(99)))
    elif kind < 0.75:
        document = tokens_of(120, int(random.integers(2)))
        text = [*document, *tokens_of(int(random.integers(1, 30)), int(random.integers(99)))]
    else:
        text = tokens_of(int(random.integers(1, 190)), int(random.integers(99)))
    return text[:215]


def simulate(tiny: TinyEngine, seed: int, bursts: int, case: "Case") -> list[Asked]:
    """`bursts` of up to 5 requests, some left by their clients; all have ended, or never will.

    Where there are drafts, some say one token alone: what else the model says hardly ever comes as it came before.
    """
    random = np.random.default_rng(seed)
    asked: list[Asked] = []
    for _ in range(bursts):
        first, left = len(asked), False
        with tiny.held():
            for _ in range(random.integers(1, 6)):
                prompt = random_prompt(random, asked)
                repeats = case.drafts and random.random() < 0.15
                asked.append(
                    tiny.ask(
                        prompt,
                        int(random.choice([1, 1, 1, 3])),
                        retention=case.retentions[random.integers(len(case.retentions))],
                        max_tokens=int(random.integers(1, 256 - len(prompt))),
                        prompt_logprobs=0 if random.random() < 0.1 else None,
                        logit_bias={REPEATED: 100.0} if repeats else {},
                    )
                )
        while random.random() < 0.4:
            asked[random.integers(first, len(asked))].abort(None if random.random() < 0.5 else 0)
            left = True
        if not left and random.random() < 0.6:
            asked[-1].wait()
    tiny.settle()
    return asked


def behind(prompt: list[int], tokens: list[int], config: ModelConfig) -> float:
    """By how much the worst of `tokens` is not the likeliest after those before it."""
    logits = dense_logits([*prompt, *tokens], config)[len(prompt) - 1 : -1]
    return float((logits.max(axis=1) - np.take_along_axis(logits, np.array(tokens)[:, None], 1)[:, 0]).max())


@dataclass(frozen=True)
class Case:
    kind: str
    retentions: tuple[float | None, ...] = (None,)  # that requests ask for
    host_bytes: int = 600_000  # of some three long rows
    fails: bool = False  # every 97th step
    drafts: int = 0
    devices: int = 1
    heads_per_page: int = 2  # one is what servers choose for budgets like those of "gpu"
    within: float = 1e-3  # of the likeliest token's logit, a whole cache's answers

    def is_exact(self, asked: Asked) -> bool:
        return self.kind not in ("ragged", "gpu") or asked.request.retention == 1.0


CASES = {
    "retentions of their own": Case("ragged", (1.0, 1.0, None, 0.2, 1e-9)),
    "failing steps": Case("ragged", (1.0, 0.3), fails=True),
    "no host memory": Case("ragged", (1.0, 0.1), host_bytes=0),
    "rings": Case("gemma2"),
    "drafts": Case("ragged", (1.0, 1.0, None, 0.2), drafts=3),
}
# What bfloat16 leaves open: of logits with a deviation of about one half.
ON_GPUS = {
    "one": Case("gpu", (1.0, 1.0, None, 0.2, 1e-9), within=0.1),
    "failing steps": Case("gpu", (1.0, 0.3), fails=True, within=0.1),
    "drafts": Case("gpu", (1.0, 1.0, None, 0.2), drafts=3, within=0.1),
    "a head a page": Case("gpu", (1.0, 1.0, None, 0.2, 1e-9), heads_per_page=1, within=0.1),
    "a head a page, with drafts": Case("gpu", (1.0, None, 0.2), drafts=3, heads_per_page=1, within=0.1),
    "two": Case("gpu", (1.0, 1.0, None, 0.2), devices=2, within=0.1),
    "two, with drafts": Case("gpu", (1.0, 1.0, None, 0.2), devices=2, drafts=3, within=0.1),
}


def check(case: Case, seed: int, bursts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = int(np.random.default_rng([seed, 1]).integers(145, 180))  # a row has 128 at most, with rings 144
    if case.kind == "gpu":
        pages //= case.heads_per_page  # of twice as many tokens, and as many heads or half
    if seed % 2:  # rows that keep everything are compressed as if they did not
        monkeypatch.setattr("serve.rows.Rows.keeps_all", lambda *_: False)
    monkeypatch.setattr("serve.limits.ROOM", 4)  # so that a generation soon needs more of them
    with tiny_engine(
        case.kind,
        pages=pages,
        max_stored=2,
        least_shared=24,
        host_bytes=case.host_bytes,
        drafts=case.drafts,
        devices=case.devices,
        heads_per_page=case.heads_per_page,
    ) as tiny:
        step, count = tiny.runner._step, itertools.count(1)

        def failing(*args, **kwargs):
            if next(count) % 97 == 0:
                raise RuntimeError("the device failed")
            return step(*args, **kwargs)

        with monkeypatch.context() as patch:
            if case.fails:
                patch.setattr(tiny.runner, "_step", failing)
            requests = simulate(tiny, seed, bursts, case)
        for asked in requests:
            for answer in asked.answers:
                assert case.fails or answer.finish_reason != "error"
                if asked.request.sampling.logit_bias:
                    assert set(answer.tokens) <= {REPEATED}
                    whole = len(answer.tokens) == asked.request.sampling.max_tokens
                    assert whole or answer.finish_reason != "length"
                elif answer.finish_reason == "length" and case.is_exact(asked):
                    config = tiny.runner.config
                    assert behind(asked.request.prompt_ids, answer.tokens, config) < case.within
        store = tiny.engine._scheduler.offload.store
        assert store.used == sum(block.nbytes for s in store for block in s.saved) <= store.limit
        tiny.forget()
        cache = tiny.runner.cache
        assert int(cache.num_free) == PAGES
        assert not any(x.any() for x in (cache.owners, cache.tokens, cache.tail))
        assert len(tiny.answer(tokens_of(30), max_tokens=2).tokens) == 2
        stats = tiny.engine.stats()
        assert stats.preemptions_total and stats.prefix_hit_tokens_total
        assert bool(stats.restored_tokens_total) == bool(case.host_bytes)
        assert bool(stats.accepted_tokens_total) == bool(case.drafts)


@pytest.mark.parametrize(
    "name", ["failing steps", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rings", "drafts"))]
)
def test_random_requests(name, monkeypatch):
    check(CASES[name], 0, 10, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("name", CASES)
def test_random_requests_for_longer(name, seed, monkeypatch):
    check(CASES[name], seed, 30, monkeypatch)


def check_two_devices() -> None:
    with pytest.MonkeyPatch.context() as patch:
        check(Case("ragged", (1.0, 1.0, None, 0.2), devices=2), 0, 10, patch)


@pytest.mark.slow  # `test_engine_parallel` answers over two devices by default
def test_random_requests_over_two_devices():
    on_simulated_devices(__file__, "check_two_devices", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ON_GPUS)
def test_random_requests_on_gpus(name, seed, monkeypatch, caplog):
    case = ON_GPUS[name]
    if jax.device_count() < case.devices:
        pytest.skip(f"needs {case.devices} GPUs")
    check(case, seed, 30, monkeypatch)
    assert case.fails or not caplog.records  # nothing was left to XLA with a warning
