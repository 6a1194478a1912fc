"""Measures now and then what the heads want of a live prompt, exactly as calibration did, and sounds the alarm on drift.

It has a thread of its own and a program of its own, shares only the weights with the engine, and cannot end it: what fails
here is logged, and nothing more is measured. Of a prompt it keeps what share each head wanted, no token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from calibrate.drift import (
    LEAST,
    LEAST_SAMPLES,
    LEVEL,
    WINDOW,
    Verdict,
    calibrated_budgets,
    excess,
    heldout_overflow,
    judge,
    overflow,
)
from calibrate.measure import QUERY_BLOCK, SINKS, calibrate_shares, recorded_aside
from models.config import ModelConfig
from serve.args import ConfigError
from serve.request import DriftStats
from tangram_jax.plan import CachePlan
from tangram_jax.profile import BudgetProfile
from tangram_jax.scorers import Scorer, get_scorer

NAMED = 5  # heads in a warning

log = logging.getLogger("tangram.drift")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How calibration measured a sample."""

    scorer: Scorer
    tokens: int
    retention: float
    sinks: int = SINKS
    window: int | None = None

    @classmethod
    def of(cls, profile: BudgetProfile, max_model_len: int) -> Recipe:
        """From a profile as calibrated. Raises ConfigError where live prompts cannot be measured in the same way."""
        found = profile.provenance
        if found.get("method") == "uniform":
            raise ConfigError(
                "--drift-interval compares prompts with a calibrated profile, and here all heads keep the same: leave it "
                "out, or give a --profile (`python -m calibrate` makes one) and a --retention below 1"
            )
        try:
            scorer = get_scorer(str(found["method"]), **found.get("method_options", {}))
            tokens = int(found["sample_tokens"])
            not_ranked = recorded_aside(found, scorer)
            if tokens <= (least := sum(not_ranked.values())):
                raise ValueError(f"samples of {tokens} tokens, of which {least} are not ranked")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"--drift-interval: the profile does not say how it was measured ({error!r}): leave the option out, or "
                "calibrate again with `python -m calibrate`"
            ) from error
        if tokens >= max_model_len:  # a prompt has one token less at least
            fewer = max_model_len // 2
            what = f"calibrate with --sample-tokens {fewer}" if fewer > least else "raise --max-model-len"
            raise ConfigError(
                f"--drift-interval: the profile's samples have {tokens} tokens, more than a prompt can have here "
                f"({max_model_len - 1}): leave the option out, or {what}"
            )
        return cls(scorer=scorer, tokens=tokens, retention=profile.retention, **not_ranked)


def measuring_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """Bytes that measuring a prompt of `tokens` takes beside the weights, roughly: logits of a block of queries (and as
    probabilities, and once more for the scorer), and a few activations.
    """
    logits = 4 * config.num_heads * min(QUERY_BLOCK, tokens) * tokens
    rows = 4 * config.hidden_size + 2 * config.intermediate_size + 3 * config.num_heads * config.head_dim
    return 4 * logits + 2 * tokens * itemsize * rows


class DriftMonitor:
    """`offer` it prompts from any thread; `stats` says what came of them. Other methods belong to the engine's owner."""

    def __init__(
        self,
        config: ModelConfig,
        plan: CachePlan,
        recipe: Recipe,
        *,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval`: seconds between two measurements at least. `plan.scaled` is the profile as calibrated."""
        profile, served = plan.scaled, plan.profile.retention
        self._config, self._recipe, self._interval, self._clock = config, recipe, interval, clock
        self._budgets = plan.group_budgets[plan.group_of]  # in service, where a request asks for nothing else
        retentions = (recipe.retention,) if served == recipe.retention else (recipe.retention, served)
        self._measure = jax.jit(
            partial(
                calibrate_shares,
                config=config,
                scorer=recipe.scorer,
                retentions=retentions,
                sinks=recipe.sinks,
                window=recipe.window,
            )
        )
        self._calibrated: np.ndarray | None = None  # budgets by the samples
        self._calibration: np.ndarray | None = None  # overflow of each sample
        if profile.ratios is None or len(profile.ratios) < LEAST_SAMPLES:
            log.warning(
                "The profile holds the shares of %d samples: overflow is shown, but for an alarm calibrate with "
                "--samples %d or more",
                0 if profile.ratios is None else len(profile.ratios),
                LEAST_SAMPLES,
            )
        else:
            self._calibrated = calibrated_budgets(profile.ratios, profile.alpha, plan.group_of)
            self._calibration = heldout_overflow(profile.ratios, profile.alpha, plan.group_of)
        self._comparable: deque[np.ndarray] = deque(maxlen=WINDOW)  # f64[L, K] at calibration's retention
        self._served: deque[np.ndarray] = deque(maxlen=WINDOW)  # at that of service
        self._random = random.Random(0)
        self._waiting: queue.Queue[np.ndarray | None] = queue.Queue(maxsize=1)
        self._due = -float("inf")
        self._params: Any = None
        self._thread: threading.Thread | None = None
        self._stats = DriftStats()  # written by its own thread alone
        self._too_short = 0

    def stats(self) -> DriftStats:
        """As of the last measurement."""
        return dataclasses.replace(self._stats, too_short_total=self._too_short)

    def warm_up(self, params: Any) -> None:
        """Compile and run once; where that fails, nothing will be measured."""
        self._params = params
        try:
            np.asarray(self._measure(params, tokens=np.zeros(self._recipe.tokens, np.int32)))
        except Exception:
            self._fail()

    def start(self) -> None:
        """After `warm_up`: measure from now on."""
        if self._stats.measuring:
            self._thread = threading.Thread(target=self._run, name="drift", daemon=True)
            self._thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        """Measure no more. What is under way is not waited for: it takes seconds, and nobody reads it any more."""
        if self._thread and self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._waiting.get_nowait()
            with contextlib.suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join(timeout)

    def offer(self, prompt: Sequence[int]) -> bool:
        """Measure a stretch of this prompt, if it is time and the prompt is long enough. Returns at once."""
        count, now = self._recipe.tokens, self._clock()
        if len(prompt) < count:
            self._too_short += 1
            return False
        if now < self._due or not self._stats.measuring or self._waiting.full():
            return False
        # Anywhere in it: many prompts of a service begin alike. A sample of calibration begins as a prompt does.
        start = self._random.randint(0, len(prompt) - count)
        stretch = np.asarray(prompt[start : start + count], np.int32)
        if prompt[0] == self._config.bos_token_id:
            stretch[0] = prompt[0]
        try:
            self._waiting.put_nowait(stretch)
        except queue.Full:  # it stops just now
            return False
        self._due = now + self._interval
        return True

    # Its own thread

    def _run(self) -> None:
        while (tokens := self._waiting.get()) is not None:
            try:
                self.measure(tokens)
            except Exception:
                self._fail()
                return

    def measure(self, tokens: np.ndarray) -> None:
        """Measure i32[n] and take it into the window. Raises FloatingPointError for shares that are not numbers."""
        shares = np.asarray(self._measure(self._params, tokens=tokens), np.float64)
        if np.isnan(shares).any():
            raise FloatingPointError("the scores of a prompt are not numbers")
        self._comparable.append(shares[0])
        self._served.append(shares[-1])
        self._judge()

    def _judge(self) -> None:
        window = np.stack(self._served)
        over = excess(window, self._budgets)
        verdict: Verdict | None = None
        if self._calibration is not None and self._calibrated is not None and len(window) >= LEAST:
            verdict = judge(self._calibration, overflow(np.stack(self._comparable), self._calibrated))
        before, alarm = self._stats.alarm, bool(verdict and verdict.alarm)
        self._stats = dataclasses.replace(
            self._stats,
            measured_total=self._stats.measured_total + 1,
            overflow=float(overflow(window, self._budgets).mean()),
            overflowing_heads=float((over > 0).mean()),
            layer_overflow={
                layer: float(value)
                for layer, value in zip(
                    self._config.full_layers,
                    over.sum((0, 2)) / np.maximum(window.sum((0, 2)), 1e-9),
                    strict=True,
                )
            },
            statistic=verdict.statistic if verdict else None,
            threshold=verdict.threshold if verdict else None,
            alarm=alarm,
        )
        if verdict and alarm and not before:
            log.warning(
                "Drift: %.2f%% of what the heads want is beyond the calibrated budgets, over the last %d prompts measured; "
                "were they like calibration's texts, it would be more than %.2f%% once in %d such windows at most. Most "
                "beyond: %s. "
                "Calibrate with texts like your traffic: python -m calibrate --model %s --texts DIR --out profile.npz, "
                "then start with --profile profile.npz; until then, a higher --retention helps",
                100 * verdict.statistic,
                len(window),
                100 * verdict.threshold,
                round(1 / LEVEL),
                self._worst(),
                self._config.name,
            )
        elif before and not alarm:
            log.warning("Drift has ended: what is measured is like calibration's texts again")

    def _worst(self) -> str:
        """The heads with the largest overflow, in words."""
        assert self._calibrated is not None
        mean = excess(np.stack(self._comparable), self._calibrated).mean(axis=0)
        heads = np.argsort(-mean, axis=None, kind="stable")[:NAMED]
        places = [np.unravel_index(i, mean.shape) for i in heads if mean.reshape(-1)[i] > 0]
        return ", ".join(
            f"layer {self._config.full_layers[layer]} head {head} (by {mean[layer, head]:.2f} on average, has "
            f"{self._calibrated[layer, head]:.2f})"
            for layer, head in places
        )

    def _fail(self) -> None:
        self._stats = dataclasses.replace(self._stats, measuring=False)
        log.exception(
            "Prompts cannot be measured any more: no telemetry of budgets until the server starts again"
        )
