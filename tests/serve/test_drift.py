"""Measuring live prompts: as calibration does, at most once in an interval, beside an engine that it cannot end."""

import contextlib
import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from calibrate.drift import LEAST, WINDOW, grouped, overflow
from calibrate.measure import calibrate_ratios
from calibrate.run import calibrate
from calibrate.samples import TextSample
from models.registry import LoadedModel
from models.testing import random_params, tiny_tokenizer
from serve.args import ConfigError, ServeConfig
from serve.build import build_engine
from serve.drift import DriftMonitor, Recipe, measuring_bytes
from serve.metrics import Metrics
from serve.request import DriftStats, EngineStats
from serve.runner import COMPILE_EVENT
from serve.watched import WatchedEngine
from tangram_jax.plan import CachePlan
from tangram_jax.profile import BudgetProfile
from tangram_jax.scorers import get_scorer
from tests.serve.fake_device import FakeRunner
from tests.serve.loop import make_limits, make_plan
from tests.serve.tiny_engine import CONFIG, PARAMS, TinyEngine, tokens_of

SAMPLE = 64
SAMPLES = [TextSample("random", "", np.asarray(tokens_of(SAMPLE, seed), np.int32)) for seed in range(24)]


@pytest.fixture(scope="module")
def profile():
    """Of random prompts."""
    return calibrate(PARAMS, CONFIG, get_scorer("snapkv", window=16), SAMPLES, retention=0.4).profile


def monitor_of(profile, *, retention=None, interval=0.0, clock=time.monotonic):
    served = profile if retention is None else dataclasses.replace(profile, retention=retention).normalized()
    plan = CachePlan.build(served, heads_per_page=2, page_size=8, min_entries=0, scaled=profile)
    return DriftMonitor(CONFIG, plan, Recipe.of(profile, 256), interval=interval, clock=clock)


def constant(monitor, shares):
    """A monitor that measures nothing and finds `shares` f[R, L, K]."""
    monitor._measure = lambda params, tokens: np.asarray(shares, np.float32)
    return monitor


class Device(FakeRunner):
    """A device without tensors; the weights are for the monitor."""

    params = PARAMS

    def claim(self):
        pass

    def check_sampling(self, params):
        del params


@contextlib.contextmanager
def watched_engine(monitor):
    """An engine with a monitor, and the text of its metrics."""
    limits = make_limits(max_model_len=256)
    engine = WatchedEngine(Device(make_plan(), limits, 2000), limits, monitor, num_pages=1000)
    engine.start()
    try:
        yield (
            TinyEngine(engine, engine._runner),
            lambda: Metrics(engine, "tiny").expose(engine.stats()).decode(),
        )
    finally:
        engine.stop()


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)


def test_a_server_that_ends_waits_for_no_measurement(profile):
    """Neither for the one under way nor for the one that waits."""
    monitor, begun, over = monitor_of(profile, interval=0), threading.Event(), threading.Event()
    measured = []

    def measure(tokens):
        measured.append(tokens)
        begun.set()
        over.wait(30)

    monitor.measure = measure
    monitor.start()
    prompt = SAMPLES[0].tokens.tolist()
    assert monitor.offer(prompt) and begun.wait(30) and monitor.offer(prompt)
    started = time.monotonic()
    monitor.stop()
    assert time.monotonic() - started < 10
    over.set()
    monitor._thread.join(30)
    assert not monitor._thread.is_alive() and len(measured) == 1


def test_a_sample_of_calibration_measures_as_it_did_then(profile):
    monitor = monitor_of(profile)
    monitor.warm_up(PARAMS)
    for sample in SAMPLES[:3]:
        monitor.measure(sample.tokens)
    np.testing.assert_array_equal(np.stack(monitor._comparable), profile.ratios[:3].astype(np.float64))
    stats = monitor.stats()
    plan = CachePlan.build(profile, heads_per_page=2, page_size=8)
    budgets = grouped(profile.budgets, plan.group_of)
    assert stats.overflow == pytest.approx(overflow(profile.ratios[:3], budgets).mean())
    assert stats.measured_total == 3 and stats.statistic is None and not stats.alarm
    assert set(stats.layer_overflow) == {0, 1}


def test_a_sample_measures_alike_with_sinks_and_a_window_of_its_own(profile):
    """Those of today were taken whatever the profile said, and the alarm was for ever on."""
    scorer = get_scorer("snapkv", window=16)
    ratios = calibrate_ratios(PARAMS, CONFIG, SAMPLES[0].tokens, scorer, 0.4, sinks=0, window=20)
    provenance = {**profile.provenance, "sinks": 0, "window": 20}
    monitor = monitor_of(BudgetProfile.from_ratios(np.stack([ratios] * 20), 0.4, provenance=provenance))
    monitor.warm_up(PARAMS)
    monitor.measure(SAMPLES[0].tokens)
    np.testing.assert_array_equal(monitor._comparable[0], np.asarray(ratios, np.float64))
    for fault in ({"sinks": -1}, {"window": 64}, {"window": "wide"}):
        with pytest.raises(ConfigError, match="does not say how it was measured"):
            Recipe.of(dataclasses.replace(profile, provenance={**provenance, **fault}), 256)
    default = Recipe.of(
        dataclasses.replace(profile, provenance={"method": "snapkv", "sample_tokens": 64}), 256
    )
    assert (default.sinks, default.window) == (4, 32)


def test_overflow_is_of_budgets_in_service(profile):
    """Shares and budgets by hand: one of eight heads wants 0.1 more than it has."""
    lower = monitor_of(dataclasses.replace(profile, budgets=np.full((2, 4), 0.4), ratios=None))
    shares = np.full((2, 4), 0.4)
    shares[1] = [0.5, 0.3, 0.4, 0.4]
    constant(lower, shares[None]).measure(SAMPLES[0].tokens)
    stats = lower.stats()
    assert stats.overflow == pytest.approx(0.1 / 3.2, rel=1e-5)
    assert stats.overflowing_heads == 1 / 8
    assert stats.layer_overflow == {0: 0.0, 1: pytest.approx(0.1 / 1.6, rel=1e-5)}


def test_another_retention_in_service_is_measured_beside_that_of_calibration(profile):
    monitor = monitor_of(profile, retention=0.2)
    monitor.warm_up(PARAMS)
    monitor.measure(SAMPLES[5].tokens)
    np.testing.assert_array_equal(monitor._comparable[0], profile.ratios[5].astype(np.float64))
    np.testing.assert_allclose(monitor._served[0].mean(axis=1), 0.2, atol=0.01)


def test_alarm_begins_and_ends_once(profile, caplog):
    monitor = monitor_of(profile)
    ordinary, much = profile.ratios[:1], np.clip(profile.ratios[:1], 0.1, 0.1)
    much[..., np.argmin(profile.budgets[0])] = 1.0
    caplog.set_level("INFO", "tangram.drift")
    alarms = []
    for shares in [ordinary] * LEAST + [much] * WINDOW + [ordinary] * 2 * WINDOW:
        constant(monitor, shares).measure(SAMPLES[0].tokens)
        alarms.append(monitor.stats().alarm)
    assert not any(alarms[:LEAST]) and alarms[LEAST + WINDOW - 1] and not alarms[-1]
    begin, end = [record.getMessage() for record in caplog.records]
    assert f"layer 0 head {much[0, 0].argmax()} (by " in begin and "--texts DIR" in begin
    assert "Drift has ended" in end
    assert len(monitor._comparable) == WINDOW
    stats = monitor.stats()
    assert stats.statistic is not None and stats.statistic <= stats.threshold


def test_at_most_one_prompt_an_interval_and_only_long_ones(profile):
    now = [100.0]
    monitor = monitor_of(profile, interval=10.0, clock=lambda: now[0])
    seen = monitor._waiting
    assert not monitor.offer(tokens_of(SAMPLE - 1)) and monitor.stats().too_short_total == 1
    prompt = tokens_of(200)
    assert monitor.offer(prompt) and not monitor.offer(prompt)
    stretch = seen.get().tolist()
    assert any(prompt[i : i + SAMPLE] == stretch for i in range(137))
    now[0] += 9.9
    assert not monitor.offer(prompt)
    now[0] += 0.2
    begun = [CONFIG.bos_token_id, *prompt]
    assert monitor.offer(begun)
    assert seen.get()[0] == CONFIG.bos_token_id
    now[0] += 20
    assert monitor.offer(prompt)
    now[0] += 20
    assert not monitor.offer(prompt)  # the one before still waits


def test_drift_end_to_end(profile):
    """Prompts like calibration's, others until the alarm, and the first again; nothing is compiled on the way."""
    monitor = monitor_of(profile)
    compiled = []

    def note(event, *_, **__):
        if event == COMPILE_EVENT:
            compiled.append(event)

    with watched_engine(monitor) as (tiny, metrics):
        jax.monitoring.register_event_duration_secs_listener(note)

        def ask(prompt):
            before = monitor.stats().measured_total
            tiny.answer(prompt, max_tokens=1, settle=False)
            until(lambda: monitor.stats().measured_total > before)

        for seed in range(LEAST):
            ask(tokens_of(SAMPLE, 100 + seed))
        assert not monitor.stats().alarm and 'tangram:drift_alarm{model_name="tiny"} 0.0' in metrics()
        for seed in range(WINDOW):
            ask([50] * 40 + tokens_of(SAMPLE - 40, seed))
        text = metrics()
        assert 'tangram:drift_alarm{model_name="tiny"} 1.0' in text
        assert f'tangram:drift_prompts_measured_total{{model_name="tiny"}} {LEAST + WINDOW}.0' in text
        for name in ("drift_statistic", "drift_threshold", "budget_overflow", "budget_overflow_heads"):
            assert f"tangram:{name}{{" in text
        assert 'tangram:budget_overflow_layer{layer="1",model_name="tiny"}' in text
        for seed in range(WINDOW):
            ask(tokens_of(SAMPLE, 200 + seed))
        assert not monitor.stats().alarm
        assert not compiled
        jax.monitoring.unregister_event_duration_listener(note)
    assert not monitor._thread.is_alive()


def test_the_engine_outlives_a_failing_measurement(profile, caplog):
    def broken(params, tokens):
        raise RuntimeError("no memory")

    for when in ("warm-up", "later", "not a number"):
        monitor = monitor_of(profile)
        caplog.clear()
        if when == "warm-up":
            monitor._measure = broken
        elif when == "not a number":
            constant(monitor, np.full((1, 2, 4), np.nan))
        with watched_engine(monitor) as (tiny, metrics):
            if when == "later":
                monitor._measure = broken
            assert tiny.answer(tokens_of(100), max_tokens=3, settle=False).finish_reason
            until(lambda monitor=monitor: not monitor.stats().measuring)
            assert tiny.answer(tokens_of(101), max_tokens=3, settle=False).finish_reason
            assert tiny.engine.ready and 'tangram:drift_measuring{model_name="tiny"} 0.0' in metrics()
        (record,) = [r for r in caplog.records if r.name == "tangram.drift"]
        assert "cannot be measured any more" in record.getMessage()
        assert monitor.stats().measured_total == 0


def test_where_prompts_cannot_be_compared(profile, tmp_path):
    model = LoadedModel(CONFIG, PARAMS, tiny_tokenizer(), "tiny")

    def fault(**options):
        with pytest.raises(ConfigError) as error:
            build_engine(
                ServeConfig(drift_interval=60, max_num_seqs=1, **options), model, dtype=np.dtype("float32")
            )
        return str(error.value)

    assert "give a --profile" in fault()
    assert "give a --profile" in fault(retention=0.5)
    path = str(tmp_path / "p.npz")
    BudgetProfile(budgets=profile.budgets, retention=0.4, provenance={"method": "snapkv"}).save(path)
    assert "does not say how it was measured" in fault(profile=path)
    BudgetProfile(
        budgets=profile.budgets, retention=0.4, provenance={"method": "h2o", "sample_tokens": 9}
    ).save(path)
    assert "unknown scorer 'h2o'" in fault(profile=path)
    for edit, part in (
        ({"method": None}, "unknown scorer 'None'"),
        ({"sample_tokens": 36}, "samples of 36 tokens, of which 36 are not ranked"),
        ({"sample_tokens": float("inf")}, "infinity"),
    ):
        made = {"method": "snapkv", "sample_tokens": 64} | edit
        BudgetProfile(budgets=profile.budgets, retention=0.4, provenance=made).save(path)
        assert part in fault(profile=path)
    profile.save(path)
    assert "samples have 64 tokens, more than a prompt can have here (63)" in fault(
        profile=path, max_model_len=64
    )
    for length, advice in ((100, "with --sample-tokens 50"), (40, "or raise --max-model-len")):
        made = profile.provenance | {"sample_tokens": 200}
        dataclasses.replace(profile, provenance=made).save(path)
        assert advice in fault(profile=path, max_model_len=length)
    # The same where it is the pool that has no room for longer prompts.
    longer = profile.provenance | {"sample_tokens": 1000}
    dataclasses.replace(profile, provenance=longer).save(path)
    assert "samples have 1000 tokens, more than a prompt can have here (" in fault(
        profile=path, num_pages=100
    )
    with pytest.raises(ConfigError, match="nothing to watch where --retention 1"):
        ServeConfig(drift_interval=60, retention=1.0)
    with pytest.raises(ConfigError, match="--drift-interval is -1"):
        ServeConfig(drift_interval=-1)


def test_the_server_is_watched_where_it_is_asked_for(profile, tmp_path, caplog):
    """And what its profile was measured on is looked at."""
    profile.save(tmp_path / "p.npz")

    def build(params, **options):
        model = LoadedModel(CONFIG, params, tiny_tokenizer(), "tiny")
        served = {
            "profile": str(tmp_path / "p.npz"),
            "scorer": "snapkv",
            "max_num_seqs": 1,
            "num_pages": 4000,
        }
        return build_engine(ServeConfig(**served, **options), model, dtype=np.dtype("float32")).engine

    assert not isinstance(build(PARAMS), WatchedEngine) and not caplog.records
    watched = build(PARAMS, drift_interval=60, retention=0.3)
    assert watched.stats().drift == DriftStats() and not caplog.records
    build(random_params(CONFIG, 1))
    (record,) = caplog.records
    assert "measured on another model than tiny is now" in record.getMessage()


def test_few_samples_give_telemetry_and_no_alarm(profile, caplog):
    monitor = constant(
        monitor_of(dataclasses.replace(profile, ratios=profile.ratios[:5])), profile.ratios[:1]
    )
    assert "of 5 samples" in caplog.text and "--samples 20 or more" in caplog.text
    for _ in range(LEAST):
        monitor.measure(SAMPLES[0].tokens)
    stats = monitor.stats()
    assert stats.overflow is not None and stats.statistic is None and not stats.alarm


def test_stats_without_drift():
    assert EngineStats().drift is None and DriftStats().overflow is None
    assert measuring_bytes(CONFIG, 1536, 4) > 4 * CONFIG.num_heads * 256 * 1536
