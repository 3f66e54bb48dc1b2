"""Hung is not busy: the pulse is judged by heartbeats with work pending."""

from __future__ import annotations

from jaxserve.server.health import Pulse


def test_b087_a_hung_step_with_work_is_not_healthy() -> None:
    pulse = Pulse(step_timeout_s=120.0)
    pulse.work(True, 10.0)
    pulse.beat(20.0)
    assert pulse.why_hung(139.0) is None
    assert "141 s" in (pulse.why_hung(161.0) or "")


def test_b087_an_idle_engine_is_healthy_for_ever_and_a_new_request_starts_the_clock() -> None:
    pulse = Pulse(step_timeout_s=120.0)
    pulse.beat(0.0)
    assert pulse.why_hung(1e6) is None
    pulse.work(True, 1e6)
    assert pulse.why_hung(1e6 + 119) is None
    assert pulse.why_hung(1e6 + 121) is not None
    pulse.work(False, 1e6 + 122)
    assert pulse.why_hung(1e6 + 500) is None


def test_b087_long_prefills_under_full_load_are_healthy() -> None:
    pulse = Pulse(step_timeout_s=120.0)
    pulse.work(True, 0.0)
    for second in range(1000):
        if second % 10 == 0:
            pulse.beat(float(second))
        pulse.work(True, float(second))
        assert pulse.why_hung(float(second)) is None


def test_b087_a_compilation_is_busy_not_hung() -> None:
    pulse = Pulse(step_timeout_s=120.0)
    pulse.work(True, 0.0)
    pulse.busy("compiling mixed[2048]", 1.0)
    assert pulse.why_hung(600.0) is None
    pulse.busy(None, 600.0)
    assert pulse.why_hung(719.0) is None
    assert pulse.why_hung(721.0) is not None


def test_beats_do_not_go_back() -> None:
    pulse = Pulse(step_timeout_s=10.0)
    pulse.work(True, 0.0)
    pulse.beat(50.0)
    pulse.beat(5.0)
    assert pulse.why_hung(59.0) is None
