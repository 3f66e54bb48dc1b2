"""sampling in numpy, by a sort and in float64: what tests and benchmarks compare every implementation with."""

from __future__ import annotations

import numpy as np


def sort_based(
    x_BV: np.ndarray,
    uniform_B: np.ndarray,
    top_k_B: np.ndarray,
    top_p_B: np.ndarray,
    min_p_B: np.ndarray,
    temperature_B: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """See the contract. Returns tokens and the number of kept elements, int32 [B] each."""
    token_B = np.zeros(len(x_BV), np.int32)
    kept_B = np.zeros(len(x_BV), np.int32)
    for row in range(len(x_BV)):
        temperature = None if temperature_B is None else float(temperature_B[row])
        weight_V = weights(x_BV[row], temperature)
        if not 0 < weight_V.sum() < np.inf:
            continue
        keep_V = kept(x_BV[row], weight_V, int(top_k_B[row]), float(top_p_B[row]), float(min_p_B[row]))
        running_V = np.cumsum(np.where(keep_V, weight_V, 0))
        token_B[row] = np.searchsorted(running_V, float(uniform_B[row]) * running_V[-1], side="right")
        kept_B[row] = keep_V.sum()
    return token_B, kept_B


def weights(x_V: np.ndarray, temperature: float | None) -> np.ndarray:
    """float64 weights of a row of probabilities, or of logits."""
    x_V = x_V.astype(np.float64)
    if temperature is None:
        return x_V
    peak = x_V.max()
    return np.exp((x_V - (peak if np.isfinite(peak) else 0)) / temperature)


def kept(x_V: np.ndarray, weight_V: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool [V]: what the filters leave of a row; equal elements stay or go together."""
    keep_V = np.ones(len(x_V), bool)
    if 0 < top_k < len(x_V):
        keep_V &= x_V >= np.partition(x_V, len(x_V) - top_k)[len(x_V) - top_k]
    if top_p < 1:
        left = np.flatnonzero(keep_V)
        left = left[np.argsort(-x_V[left], kind="stable")]
        running = np.cumsum(weight_V[left])
        enough = np.searchsorted(running, top_p * running[-1], side="left")
        keep_V &= x_V >= x_V[left[min(enough, len(left) - 1)]]
    return keep_V & (weight_V >= min_p * weight_V.max())
