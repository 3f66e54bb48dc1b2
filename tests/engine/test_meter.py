"""Times of the engine's steps: who waited for whom."""

from __future__ import annotations

import pytest

from jaxserve.engine.meter import SMOOTHING, Meter


def test_a_step_dispatched_ahead_leaves_no_gap() -> None:
    meter = Meter(0.0)
    meter.result(dispatched_s=1.0, ready_s=1.010)
    meter.result(dispatched_s=1.005, ready_s=1.020)
    assert meter.gap_us == 0.0 and meter.device_us == pytest.approx(10_000)


def test_a_step_dispatched_late_leaves_one() -> None:
    meter = Meter(0.0)
    meter.result(dispatched_s=1.0, ready_s=1.010)
    meter.result(dispatched_s=1.012, ready_s=1.022)
    assert meter.gap_us == pytest.approx(SMOOTHING * 2_000)
    assert meter.device_us == pytest.approx(10_000)


def test_having_nothing_to_do_is_no_gap() -> None:
    meter = Meter(0.0)
    meter.result(dispatched_s=1.0, ready_s=1.010)
    meter.idle(2.0)
    meter.result(dispatched_s=9.0, ready_s=9.010)
    assert meter.gap_us == 0.0 and meter.heartbeat_s == 2.0
    meter.result(dispatched_s=9.011, ready_s=9.020)
    assert meter.gap_us == pytest.approx(SMOOTHING * 1_000)
