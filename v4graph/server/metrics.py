"""Prometheus metrics of the server and its engine, named as vLLM names them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from v4graph.engine.async_engine import AsyncEngine

PREFIX = "v4graph:"
LABEL = "model_name"
# vLLM's names of these two say what runs and waits.
RENAMED = {"num_running": "num_requests_running", "num_waiting": "num_requests_waiting"}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)


class ServerMetrics:
    """Counters of one server; the engine's own figures are read when scraped."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.registry.register(_EngineCollector(engine, model_name))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, [LABEL, *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, [LABEL], registry=self.registry, buckets=buckets)

        self._finished = counter("request_success", "Finished requests.", "finished_reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._first = histogram("time_to_first_token_seconds", "Arrival to first token.", SECONDS)
        self._inter = histogram(
            "inter_token_latency_seconds", "Between two steps that brought tokens.", SECONDS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", SECONDS)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens a request.", TOKENS)
        self._output_size = histogram(
            "request_generation_tokens", "Generated tokens a request.", TOKENS
        )

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def timer(self, num_prompt_tokens: int, arrival: float) -> RequestTimer:
        """Count a request that the engine accepted.

        Args:
            num_prompt_tokens: length of its prompt.
            arrival: `time.perf_counter()` when the HTTP request arrived.
        """
        self._prompt_tokens.labels(self._model).inc(num_prompt_tokens)
        self._prompt_size.labels(self._model).observe(num_prompt_tokens)
        return RequestTimer(self, arrival)

    def _first_token(self, seconds: float) -> None:
        self._first.labels(self._model).observe(seconds)

    def _next_tokens(self, seconds: float) -> None:
        self._inter.labels(self._model).observe(seconds)

    def _end(self, reason: str, seconds: float, num_tokens: int) -> None:
        self._finished.labels(self._model, reason).inc()
        self._e2e.labels(self._model).observe(seconds)
        self._output_size.labels(self._model).observe(num_tokens)

    def _count(self, num_tokens: int) -> None:
        self._generation_tokens.labels(self._model).inc(num_tokens)


class RequestTimer:
    """Times one request from its arrival to its last token."""

    def __init__(self, metrics: ServerMetrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._latest: float | None = None
        self._num_tokens = 0

    def tokens(self, num_tokens: int) -> None:
        """A step brought tokens."""
        if num_tokens == 0:
            return
        now = time.perf_counter()
        if self._latest is None:
            self._metrics._first_token(now - self._arrival)
        else:
            self._metrics._next_tokens(now - self._latest)
        self._latest = now
        self._num_tokens += num_tokens
        self._metrics._count(num_tokens)

    def end(self, reason: str) -> None:
        """The request ended: `stop`, `length`, `abort` (client left) or `error`."""
        self._metrics._end(reason, time.perf_counter() - self._arrival, self._num_tokens)


class _EngineCollector(Collector):
    """Every number of the engine as a gauge; what follows a dot in its name is the cache group."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        values = self._engine.metrics
        healthy = self._gauge("engine_healthy", "1 while the engine thread runs.")
        healthy.add_metric([self._model], float(self._engine.error is None))
        yield healthy
        gauges: dict[str, GaugeMetricFamily] = {}
        for key, value in values.items():
            key, _, group = key.partition(".")
            if key not in gauges:
                name = RENAMED.get(key, f"engine_{key}")
                gauges[key] = self._gauge(name, f"Engine: {key}.", grouped=bool(group))
            labels = [self._model, group] if group else [self._model]
            gauges[key].add_metric(labels, float(value))
        yield from gauges.values()
        usage = self._gauge("kv_cache_usage_perc", "Used part of the pages, 1 is all.", True)
        for key, total in values.items():
            if key.startswith("pages_total."):
                group = key.removeprefix("pages_total.")
                used = values.get(f"pages_used.{group}", 0)
                usage.add_metric([self._model, group], used / total if total else 0.0)
        yield usage

    def _gauge(self, name: str, text: str, grouped: bool = False) -> GaugeMetricFamily:
        labels = [LABEL, "group"] if grouped else [LABEL]
        return GaugeMetricFamily(PREFIX + name, text, labels=labels)
