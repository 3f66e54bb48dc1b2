"""Prometheus metrics: takes finished requests' times and the engine's stats, gives a page on a loopback port."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.errors import ConfigError
from jaxserve.request import EngineStats, Finish
from jaxserve.text.front import RequestTimes

LATENCY_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 5)
END_TO_END_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 300, 600, 1800)
METRICS_HOST = "127.0.0.1"
WHOLE = (Finish.STOP.text, Finish.LENGTH.text)


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.stats = EngineStats()
        self.model_name = model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"jaxserve:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self.first_token_s = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", LATENCY_BUCKETS_S
        )
        self.per_token_s = histogram(
            "time_per_output_token_seconds",
            "Mean time between a request's tokens; those of one token have none.",
            TOKEN_BUCKETS_S,
        )
        self.end_to_end_s = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", END_TO_END_BUCKETS_S
        )
        self.queue_s = histogram(
            "request_queue_time_seconds", "From a request's arrival until the engine took it in.", LATENCY_BUCKETS_S
        )
        finished = Counter(
            "jaxserve:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        # every reason is there from the start, so that rates begin at zero
        self.finished = {code.text: finished.labels(model_name, code.text) for code in Finish if code.text}
        self.registry.register(StatsCollector(self))

    def observe(self, times: RequestTimes) -> None:
        """One finished request, counted under how its first choice ended.

        Time to the end and between tokens are those of whole answers: one that its client left would look fast.
        """
        reason = times.finish_reasons[0]
        self.finished[reason].inc()
        if times.queue_s is not None:
            self.queue_s.observe(times.queue_s)
        if times.time_to_first_token_s is not None:
            self.first_token_s.observe(times.time_to_first_token_s)
        if reason in WHOLE:
            self.end_to_end_s.observe(times.e2e_s)
            if times.time_per_output_token_s is not None:
                self.per_token_s.observe(times.time_per_output_token_s)


COUNTERS = (
    ("prompt_tokens", "Prompt tokens, those found in the prefix cache too.", "prompt_tokens_total"),
    ("generation_tokens", "Tokens generated.", "generation_tokens_total"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens_total"),
    ("prefix_cache_hits", "Of those, the ones found there.", "prefix_hit_tokens_total"),
    ("prefix_cache_evictions", "Pages that left the prefix cache for others.", "evicted_pages_total"),
    ("num_preemptions", "Sequences that lost their pages to others.", "preemptions_total"),
    ("failed_steps", "Steps that raised on the device; their requests started over.", "failed_steps_total"),
    (
        "compilations_after_warmup",
        "Compilations after warm-up: each one is a defect.",
        "compilations_after_warmup_total",
    ),
    ("steps", "Engine steps.", "step_count"),
)
GAUGES = (
    ("num_requests_running", "Sequences in the running batch.", "running_requests"),
    ("num_requests_waiting", "Sequences that wait for a slot or pages.", "waiting_requests"),
    ("cache_pages", "Pages of the cache: live + cached + free.", "total_pages"),
    ("cache_pages_live", "Pages that running sequences hold.", "live_pages"),
    ("cache_pages_cached", "Pages kept for reuse, free on demand.", "cached_pages"),
    ("cache_pages_free", "Pages that hold nothing.", "free_pages"),
)


class StatsCollector(Collector):
    """Shows the engine's last stats at scrape time; nothing is copied in between."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Counters and gauges of EngineStats."""
        stats, label = self._metrics.stats, [self._metrics.model_name]
        for name, text, attribute in COUNTERS:
            counter = CounterMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
            counter.add_metric(label, getattr(stats, attribute))
            yield counter
        for name, text, attribute in GAUGES:
            gauge = GaugeMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
            gauge.add_metric(label, getattr(stats, attribute))
            yield gauge


class MetricsEndpoint:
    """The page at http://127.0.0.1:port/metrics, served by threads of its own."""

    def __init__(self, metrics: Metrics, port: int) -> None:
        """Port 0 takes a free one. Raises ConfigError where the port cannot be had."""
        try:
            started = start_http_server(port, addr=METRICS_HOST, registry=metrics.registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port: got {port}, which cannot be opened on {METRICS_HOST} ({error.strerror}), "
                "allowed: a free port, or 0 to take any"
            ) from error
        self._server: WSGIServer = started[0]
        self._thread: threading.Thread = started[1]
        self.port = self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
