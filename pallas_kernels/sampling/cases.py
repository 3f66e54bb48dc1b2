"""Named cases of sampling and their random inputs, for tests and the checks on a GPU alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pallas_kernels.sampling.reference import kept, weights

ALL = 10**6  # a top_k past any vocabulary
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """Sizes and data of one call. filters: top_k, top_p and min_p of each row.

    data: "normal", logits `width` wide, as probabilities or as they are; "integers", weights from 1 to 8, so that
    nearly all tie; "sorted", as normal, the largest first, so that all that is likely lies together.
    """

    name: str
    vocab: int
    filters: tuple[tuple[int, float, float], ...]
    data: str = "normal"
    width: float = 3.0
    logits: bool = False


class SamplingInputs(NamedTuple):
    """The arrays of one call, in the order of the contract."""

    x_BV: np.ndarray
    uniform_B: np.ndarray
    top_k_B: np.ndarray
    top_p_B: np.ndarray
    min_p_B: np.ndarray
    temperature_B: np.ndarray | None


FILTERS = (
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (2, 0.5, 0.0),
    (50, 0.9, 0.0),
    (ALL, 1.0, 0.0),
    (0, 1e-6, 0.0),
    (0, 0.0, 0.0),
    (0, 0.3, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (40, 0.8, 0.02),
    (0, 0.7, 0.3),
)
WIDE = ((0, 0.9, 0.0), (0, 0.5, 0.0), (3000, 1.0, 0.0), (2000, 0.6, 0.0), (500, 0.99, 1e-3), (0, 0.95, 1e-4))
CASES = (
    SamplingCase("one tile", 8192, FILTERS),
    SamplingCase("no multiple of a tile", 9088, FILTERS),
    SamplingCase("no multiple of a chunk", 8200, FILTERS, logits=True),
    SamplingCase("small", 100, FILTERS),
    SamplingCase("logits", 9088, FILTERS, logits=True),
    SamplingCase("flat", 9088, WIDE, width=1.0),
    SamplingCase("flat logits", 9088, WIDE, width=1.0, logits=True),
    SamplingCase("ties", 8960, (*FILTERS, *WIDE), data="integers"),
    SamplingCase("sorted", 9088, (*FILTERS, *WIDE), data="sorted"),
)


def make_inputs(case: SamplingCase, seed: int) -> SamplingInputs:
    """Random inputs in which no rounding decides.

    top_p lies in the middle between two sums of the sorted row, and the uniform number in the middle of the part of
    a kept token of some weight: who adds in fp32 must find what is found by adding in float64.
    """
    rng = np.random.default_rng(seed)
    shape = (len(case.filters), case.vocab)
    if case.data == "integers":
        x_BV = rng.integers(1, 9, shape).astype(np.float64)
        x_BV = np.log(x_BV) if case.logits else x_BV
    else:
        x_BV = case.width * rng.standard_normal(shape)
        x_BV = -np.sort(-x_BV, axis=1) if case.data == "sorted" else x_BV
        if not case.logits:
            x_BV = np.exp(x_BV - x_BV.max(axis=1, keepdims=True))
            x_BV /= x_BV.sum(axis=1, keepdims=True)
    x_BV = x_BV.astype(np.float32)
    temperature = TEMPERATURE if case.logits else None
    uniform_B, top_p_B = np.zeros(shape[0], np.float32), np.zeros(shape[0], np.float32)
    for row, (top_k, top_p, min_p) in enumerate(case.filters):
        weight_V = weights(x_BV[row], temperature)
        top_p_B[row] = _between(x_BV[row], weight_V, top_k, top_p)
        keep_V = kept(x_BV[row], weight_V, top_k, float(top_p_B[row]), min_p)
        kept_V = np.where(keep_V, weight_V, 0)
        running = np.cumsum(kept_V)
        token = rng.choice(np.flatnonzero(kept_V > kept_V.max() / 20))
        uniform_B[row] = (running[token] - weight_V[token] / 2) / running[-1]
    top_k_B = np.array([top_k for top_k, _, _ in case.filters], np.int32)
    min_p_B = np.array([min_p for _, _, min_p in case.filters], np.float32)
    temperature_B = None if temperature is None else np.full(shape[0], temperature, np.float32)
    return SamplingInputs(x_BV, uniform_B, top_k_B, top_p_B, min_p_B, temperature_B)


def _between(x_V: np.ndarray, weight_V: np.ndarray, top_k: int, top_p: float) -> float:
    """A top_p near the given one, in the middle between two sums of the sorted weights that top_k leaves."""
    if not 0 < top_p < 1:
        return top_p
    weight_V = np.where(kept(x_V, weight_V, top_k, 1.0, 0.0), weight_V, 0)
    # Equal elements stay together: only the sums before a smaller one count.
    value, count = np.unique(weight_V, return_counts=True)
    running = np.concatenate(((0,), np.cumsum((value * count)[::-1])))
    enough = min(np.searchsorted(running, top_p * running[-1]), len(running) - 1)
    return (running[max(enough - 1, 0)] + running[enough]) / 2 / running[-1]
