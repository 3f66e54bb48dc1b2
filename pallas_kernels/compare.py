"""The one comparison of all kernel tests and benchmarks: takes a result and an fp32 reference, gives the error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Per dtype of the result: (largest allowed norm error, largest allowed element error), as defined in Difference.
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (5e-3, 2e-2), "float16": (1e-3, 5e-3)}


@dataclass(frozen=True, slots=True)
class Difference:
    """norm: |a - b| / |b| over the whole array; element: max |a - b| / max |b|; bad: places where NaN or Inf differ."""

    norm: float
    element: float
    worst: tuple[int, ...]
    actual: float
    expected: float
    bad: int


def difference(actual: np.ndarray, expected: np.ndarray) -> Difference:
    """How far `actual` is from `expected` (same shape, any float dtypes). Two arrays of zeros differ by 0."""
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} against {expected.shape}")
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if not a.size:
        return Difference(0.0, 0.0, (), 0.0, 0.0, 0)
    finite = np.isfinite(a) & np.isfinite(b)
    same_special = (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))
    wrong = ~finite & ~same_special
    gap = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
    size = np.abs(np.where(finite, b, 0))
    # A coordinate where only one side is NaN or Inf is worse than any finite gap.
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(wrong, np.inf, gap)), a.shape))
    norm, scale = float(np.linalg.norm(size)), float(size.max())
    return Difference(
        norm=_ratio(float(np.linalg.norm(gap)), norm),
        element=_ratio(float(gap.max()), scale),
        worst=worst,
        actual=float(a[worst]),
        expected=float(b[worst]),
        bad=int(wrong.sum()),
    )


def check(actual: np.ndarray, expected: np.ndarray, dtype: str | None = None, label: str = "") -> Difference:
    """Raise AssertionError where the error exceeds the bound of `dtype` (default: of `actual`); it names the place."""
    name = dtype or str(actual.dtype)
    found = difference(actual, expected)
    norm, element = BOUNDS[name]
    if found.bad or found.norm > norm or found.element > element:
        raise AssertionError(
            f"{label or 'result'}: norm error {found.norm:.3g} (bound {norm:.3g}), element error {found.element:.3g} "
            f"(bound {element:.3g}), {found.bad} places where only one side is NaN or Inf; "
            f"worst at {found.worst}: got {found.actual:.6g}, expected {found.expected:.6g} ({name})"
        )
    return found


def _ratio(gap: float, scale: float) -> float:
    if scale:
        return gap / scale
    return 0.0 if gap == 0 else float("inf")
