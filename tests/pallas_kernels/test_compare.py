"""The comparison function: what it measures, what it refuses, and that it can fail."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.compare import check, difference


def test_errors_are_relative() -> None:
    found = difference(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    assert found.norm == pytest.approx(0.1) and found.element == pytest.approx(0.125)
    assert found.worst == (1,) and (found.actual, found.expected) == (4.5, 4.0)


def test_nan_and_inf_on_one_side_are_bad() -> None:
    expected = np.array([1.0, np.nan, np.inf, 2.0])
    assert difference(expected, expected).bad == 0
    found = difference(np.array([1.0, 1.0, -np.inf, np.nan]), expected)
    assert found.bad == 3 and found.worst == (1,)
    with pytest.raises(AssertionError, match="3 places"):
        check(np.array([1.0, 1.0, -np.inf, np.nan], np.float32), expected)


def test_bounds_follow_the_dtype() -> None:
    expected = np.linspace(1, 2, 50)
    check((expected * 1.003).astype(np.float32), expected, "bfloat16", "loose")
    with pytest.raises(AssertionError, match=r"tight: norm error 0.003 .*\(float32\)"):
        check((expected * 1.003).astype(np.float32), expected, label="tight")


def test_zeros_and_nothing() -> None:
    assert difference(np.zeros(3), np.zeros(3)).norm == 0
    assert difference(np.ones(3), np.zeros(3)).norm == np.inf
    assert difference(np.zeros((0, 2)), np.zeros((0, 2))).norm == 0
    with pytest.raises(ValueError, match="shapes differ"):
        difference(np.zeros(2), np.zeros(3))
