"""Metrics with a fake clock: seconds, from the right events, once a request."""

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.request import Cancel, EngineStats, EventBatch, Finish, SamplingParams, TokenRequest
from jaxserve.server.metrics import Metrics, MetricsEndpoint
from jaxserve.text.front import Front
from jaxserve.text.prepare import TextLimits, prepare


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """One sample."""
    found = metrics.registry.get_sample_value(f"jaxserve:{name}", {"model_name": "m", **labels})
    assert found is not None, name
    return found


class FakeClock:
    """Time as the test says."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Played:
    """A front whose events come at chosen times."""

    def __init__(self, metrics: Metrics) -> None:
        self.clock = FakeClock()
        self.front = Front(None, lambda items: self.sent.extend(items), self.clock, metrics.observe)
        self.sent: list[TokenRequest | Cancel] = []

    def submit(self, **sampling: Any) -> None:
        """A request of three tokens."""
        limits = TextLimits(max_model_len=64, vocab_size=100, pool_tokens=64)
        self.front.submit(prepare([1, 2, 3], SamplingParams(**sampling), limits, None), lambda delta: None)

    def token(self, now_s: float, finish: Finish = Finish.NONE, queue_s: float | None = None, choice: int = 0) -> None:
        """One token of a choice."""
        self.clock.now_s = now_s
        handle = self.sent[choice].handle
        batch = EventBatch(np.array([handle]), np.array([5], np.int32), np.array([finish], np.uint8))
        if queue_s is not None:
            batch.queue_s[handle] = queue_s
        self.front.on_events(batch)


def test_b134_latencies_are_seconds_of_the_right_events() -> None:
    """Arrival 0, queued to 0.5, first token 2.0, then 9 tokens at 0.1 s."""
    metrics = Metrics("m")
    played = Played(metrics)
    played.submit(max_tokens=10)
    for at in range(10):
        played.token(2.0 + 0.1 * at, Finish.LENGTH if at == 9 else Finish.NONE, 0.5 if at == 0 else None)
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(2.0)
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "request_queue_time_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "e2e_request_latency_seconds_sum") == pytest.approx(2.9)
    for name in ("time_to_first_token", "time_per_output_token", "request_queue_time", "e2e_request_latency"):
        assert value(metrics, f"{name}_seconds_count") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "time_to_first_token_seconds_bucket", le="1.0") == 0
    assert value(metrics, "time_to_first_token_seconds_bucket", le="2.5") == 1


def test_b134_one_token_has_no_time_per_token() -> None:
    metrics = Metrics("m")
    played = Played(metrics)
    played.submit(max_tokens=1)
    played.token(2.0, Finish.LENGTH, 0.5)
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "time_per_output_token_seconds_count") == 0
    assert value(metrics, "e2e_request_latency_seconds_sum") == pytest.approx(2.0)


def test_b134_a_preempted_request_counts_once() -> None:
    metrics = Metrics("m")
    played = Played(metrics)
    played.submit(max_tokens=5)
    played.token(2.0, queue_s=0.5)
    played.token(5.0, queue_s=3.0)  # it waited again after losing its pages
    played.token(6.0, Finish.LENGTH)
    assert value(metrics, "request_queue_time_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(2.0)
    assert value(metrics, "time_to_first_token_seconds_count") == 1


def test_a_request_of_three_choices_counts_once() -> None:
    metrics = Metrics("m")
    played = Played(metrics)
    played.submit(n=3, max_tokens=2)
    for choice in range(3):
        played.token(1.0, choice=choice)
        played.token(2.0, Finish.LENGTH, choice=choice)
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert value(metrics, f"{name}_seconds_count") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 1


def test_cancelled_requests_count_under_their_reason_only() -> None:
    metrics = Metrics("m")
    played = Played(metrics)
    played.submit(max_tokens=5)
    played.token(1.0)
    (request_id,) = played.front._requests
    played.front.cancel(request_id, Finish.DEADLINE)
    assert value(metrics, "request_success_total", finished_reason="deadline") == 1
    assert value(metrics, "e2e_request_latency_seconds_count") == 0


def test_the_page_shows_the_engines_stats() -> None:
    metrics = Metrics("m")
    metrics.stats = EngineStats(
        running_requests=3, waiting_requests=2, total_pages=10, live_pages=4, cached_pages=1, free_pages=5,
        prompt_tokens_total=70, generation_tokens_total=30, compilations_after_warmup_total=1,
        prefix_query_tokens_total=60, prefix_hit_tokens_total=48, evicted_pages_total=2,
    )  # fmt: skip
    endpoint = MetricsEndpoint(metrics, 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=5) as answer:
            page = answer.read().decode()
    finally:
        endpoint.close()
    for line in (
        'jaxserve:num_requests_running{model_name="m"} 3.0',
        'jaxserve:num_requests_waiting{model_name="m"} 2.0',
        'jaxserve:cache_pages{model_name="m"} 10.0',
        'jaxserve:cache_pages_live{model_name="m"} 4.0',
        'jaxserve:cache_pages_cached{model_name="m"} 1.0',
        'jaxserve:cache_pages_free{model_name="m"} 5.0',
        'jaxserve:prompt_tokens_total{model_name="m"} 70.0',
        'jaxserve:generation_tokens_total{model_name="m"} 30.0',
        'jaxserve:prefix_cache_queries_total{model_name="m"} 60.0',
        'jaxserve:prefix_cache_hits_total{model_name="m"} 48.0',
        'jaxserve:prefix_cache_evictions_total{model_name="m"} 2.0',
        'jaxserve:compilations_after_warmup_total{model_name="m"} 1.0',
        'jaxserve:request_success_total{finished_reason="stop",model_name="m"} 0.0',
    ):
        assert line in page


def test_two_servers_do_not_share_metrics() -> None:
    one, two = Metrics("m"), Metrics("m")
    played = Played(one)
    played.submit(max_tokens=1)
    played.token(1.0, Finish.LENGTH)
    assert value(one, "time_to_first_token_seconds_count") == 1
    assert value(two, "time_to_first_token_seconds_count") == 0


def test_a_taken_metrics_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics-port: got {port}"):
            MetricsEndpoint(Metrics("m"), port)
