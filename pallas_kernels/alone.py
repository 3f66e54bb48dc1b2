"""Whether a row's or chunk's bits depend on its company: takes a compiled op and its inputs, gives results to compare.

Both give the result of all together, NaN where a bit differs from what each gives by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def chunks_alone(call: Callable[..., Any], inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Of a prefill op: each chunk at the first packed rows. inputs: queries first, start, tokens and position last."""
    q, *pools, start_R, tokens_R, position_R = inputs
    together = np.asarray(call(*inputs), np.float32)
    for chunk, (start, tokens) in enumerate(zip(start_R.tolist(), tokens_R.tolist(), strict=True)):
        rows = slice(start, start + tokens)
        only_q = np.full_like(q, np.nan)
        only_q[:tokens] = q[rows]
        only_R = np.where(np.arange(len(tokens_R)) == chunk, tokens_R, 0).astype(np.int32)
        alone = np.asarray(call(only_q, *pools, np.zeros_like(start_R), only_R, position_R), np.float32)
        together[rows] = np.where(alone[:tokens] == together[rows], together[rows], np.nan)
    return together


def rows_alone(call: Callable[..., Any], inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Of a decode op: some rows, the others empty. inputs: lengths last."""
    *arrays, length_B = inputs
    together = np.asarray(call(*inputs), np.float32)
    for row in range(0, len(length_B), max(1, len(length_B) // 8)):
        only_B = np.where(np.arange(len(length_B)) == row, length_B, 0).astype(np.int32)
        alone = np.asarray(call(*arrays, only_B), np.float32)[row]
        together[row] = np.where(alone == together[row], alone, np.nan)
    return together
