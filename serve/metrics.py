"""Prometheus metrics, with vLLM's names under the prefix `tangram:`.

Counters and gauges of the engine are read from `EngineStats` at each scrape; latencies are observed here, because they
are what the client sees.
"""

import os
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from serve.request import DriftStats, EngineProtocol, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"

# Name without prefix, field of EngineStats, help.
_GAUGES = (
    ("num_requests_running", "requests_running", "Requests in the running batch"),
    ("num_requests_waiting", "requests_waiting", "Requests that wait for pages or a slot"),
    ("kv_pages_used", "pages_used", "KV pages owned by running requests or stored sessions"),
    ("kv_pages_total", "pages_total", "KV pages in the pool"),
    ("kv_pages_stored", "pages_stored", "KV pages owned by stored sessions alone"),
    ("kv_page_bytes", "page_bytes", "Size of one KV page in bytes"),
    ("stored_sessions", "stored_sessions", "Compressed conversations kept for reuse"),
    ("offloaded_sessions", "host_sessions", "Compressed conversations kept in host memory"),
    ("offload_bytes", "host_bytes", "Bytes that they take there"),
    ("offload_limit_bytes", "host_bytes_total", "Bytes that they may take there"),
    (
        "compilations_after_warmup",
        "compilations_after_warmup",
        "XLA compilations since the warm-up: must be 0",
    ),
    ("retention_target", "retention_target", "Kept fraction of the KV cache that the budgets aim at"),
    ("retention_reached", "retention_reached", "KV entries held, as a fraction of full KV"),
)
_COUNTERS = (
    (
        "prompt_tokens",
        "prompt_tokens_total",
        "Prompt tokens of requests that began to answer, cached ones included",
    ),
    (
        "prefilled_tokens",
        "prefilled_tokens_total",
        "Tokens run in chunks: prompts but for what was cached, and what runs again",
    ),
    ("generation_tokens", "generation_tokens_total", "Tokens generated"),
    ("prefix_cache_queries", "prefix_query_tokens_total", "Prompt tokens looked up among stored prefixes"),
    ("prefix_cache_hits", "prefix_hit_tokens_total", "Prompt tokens found in stored prefixes"),
    ("num_preemptions", "preemptions_total", "Requests whose pages were taken back"),
    ("tail_compressions", "tail_compressions_total", "Uncompressed tails compressed during decode"),
    ("spec_decode_num_drafts", "drafts_total", "Times that drafts of a choice were verified"),
    ("spec_decode_num_draft_tokens", "draft_tokens_total", "Tokens drafted"),
    ("spec_decode_num_accepted_tokens", "accepted_tokens_total", "Tokens drafted that were right"),
    ("kv_offloaded_tokens", "offloaded_tokens_total", "Tokens of conversations copied to host memory"),
    ("kv_offloaded_bytes", "offloaded_bytes_total", "Bytes of these copies"),
    ("kv_restored_tokens", "restored_tokens_total", "Tokens of conversations brought back from host memory"),
    ("kv_restored_bytes", "restored_bytes_total", "Bytes of these copies"),
    ("engine_steps", "steps_total", "Steps of the engine"),
)
# The same of DriftStats, where prompts are measured (--drift-interval).
_DRIFT_GAUGES = (
    ("drift_measuring", "measuring", "1 while prompts are measured, 0 after a failure"),
    (
        "drift_alarm",
        "alarm",
        "1 while live prompts overflow calibrated budgets more than calibration's texts",
    ),
    ("drift_statistic", "statistic", "Mean overflow of calibrated budgets over the last prompts measured"),
    ("drift_threshold", "threshold", "Above it the alarm goes off"),
    ("budget_overflow", "overflow", "Entries wanted beyond budgets in service, of all entries wanted"),
    ("budget_overflow_heads", "overflowing_heads", "Fraction of heads that want more than their budget"),
)
_DRIFT_COUNTERS = (
    ("drift_prompts_measured", "measured_total", "Prompts measured"),
    ("drift_prompts_too_short", "too_short_total", "Prompts shorter than a sample of calibration"),
)
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
_INTERVALS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_TOKENS = tuple(float(2**i) for i in range(0, 21, 2))


class _EngineCollector(Collector):
    """The engine's numbers as they were asked for last."""

    def __init__(self, engine: EngineProtocol, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self.stats = EngineStats()

    def describe(self) -> list[Metric]:
        return []  # so that registering does not collect

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        for name, attribute, help_text in _GAUGES:
            value = getattr(stats, attribute)
            if value is not None:
                yield self._gauge(name, help_text, value)
        held = max(stats.pages_used - stats.pages_stored, 0)  # as in vLLM: what can be evicted is free
        usage = held / stats.pages_total if stats.pages_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Fraction of KV pages that requests hold, 0 to 1", usage)
        yield self._gauge("engine_ready", "1 after the warm-up, while the engine lives", self._engine.ready)
        if stats.drift:
            yield from self._drift(stats.drift)
        for name, attribute, help_text in _COUNTERS:
            counter = CounterMetricFamily(f"tangram:{name}", help_text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(stats, attribute))
            yield counter

    def _drift(self, drift: DriftStats) -> Iterator[Metric]:
        for name, attribute, help_text in _DRIFT_GAUGES:
            value = getattr(drift, attribute)
            if value is not None:
                yield self._gauge(name, help_text, value)
        layers = GaugeMetricFamily(
            "tangram:budget_overflow_layer",
            "Entries that the heads of a layer want beyond their budgets, of all that they want",
            labels=["model_name", "layer"],
        )
        for layer, value in drift.layer_overflow.items():
            layers.add_metric([self._model_name, str(layer)], value)
        yield layers
        for name, attribute, help_text in _DRIFT_COUNTERS:
            counter = CounterMetricFamily(f"tangram:{name}", help_text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(drift, attribute))
            yield counter

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"tangram:{name}", help_text, labels=["model_name"])
        gauge.add_metric([self._model_name], float(value))
        return gauge


class Metrics:
    """A registry of its own for each app, so that several can live in one process."""

    def __init__(self, engine: EngineProtocol, model_name: str, pid: int | None = None) -> None:
        """`pid`: of the engine's process, if it is another one."""
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._engine = _EngineCollector(engine, model_name)
        self._others = CollectorRegistry()  # of which each process knows all
        ProcessCollector(pid=lambda: pid or os.getpid(), registry=self._others)
        self._others.register(self._engine)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(
                f"tangram:{name}", help_text, ["model_name"], buckets=buckets, registry=self.registry
            )
            return family.labels(model_name)

        self._first = histogram("time_to_first_token_seconds", "From request to first token", _SECONDS)
        self._between = histogram(
            "inter_token_latency_seconds", "From token to token of a choice", _INTERVALS
        )
        self._whole = histogram("e2e_request_latency_seconds", "From request to last token", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generation = histogram("request_generation_tokens", "Tokens generated for a choice", _TOKENS)
        self._finished = Counter(
            "tangram:request_success",
            "Choices finished, by reason (stop, length)",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._grammars = Counter(
            "tangram:structured_requests",
            "Requests for an answer of a given form, by its kind",
            ["model_name", "kind"],
            registry=self.registry,
        )
        self._responses = Counter(
            "tangram:http_responses",
            "HTTP responses by route and status",
            ["route", "status"],
            registry=self.registry,
        )

    def request_timer(self) -> "RequestTimer":
        """Starts the clock of one HTTP request."""
        return RequestTimer(self)

    def count_grammar(self, kind: str) -> None:
        self._grammars.labels(self._model_name, kind).inc()

    def count_response(self, route: str, status: int) -> None:
        """`route` must be the route's pattern, not the path: paths are unbounded."""
        self._responses.labels(route, str(status)).inc()

    def expose(self, stats: EngineStats) -> bytes:
        """The text of /metrics; `stats`: of the engine."""
        self._engine.stats = stats
        registry = self.registry
        # All processes of a server write their counts there, where the library finds them.
        if MULTIPROCESS in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(self._others) + generate_latest(registry)


class RequestTimer:
    """Latencies of one HTTP request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._last: dict[tuple[int, int], float] = {}

    def token(self, prompt: int, choice: int, now: float) -> None:
        """A token of a choice arrived from the engine at `now` (time.monotonic)."""
        last = self._last.get((prompt, choice))
        if last is None:
            self._metrics._first.observe(now - self._start)
        else:
            self._metrics._between.observe(now - last)
        self._last[prompt, choice] = now

    def choice_finished(self, reason: str, num_tokens: int) -> None:
        self._metrics._finished.labels(self._metrics._model_name, reason).inc()
        self._metrics._generation.observe(num_tokens)

    def finished(self, prompt_tokens: int) -> None:
        self._metrics._whole.observe(time.monotonic() - self._start)
        self._metrics._prompt.observe(prompt_tokens)
