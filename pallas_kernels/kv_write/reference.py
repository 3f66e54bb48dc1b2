"""kv_write in numpy, the rows and their places: what every implementation is compared with."""

from __future__ import annotations

import numpy as np

from pallas_kernels.rotary import Rotary


def dense(
    k_PNKE: np.ndarray,
    v_PNKE: np.ndarray,
    new_k_TNE: np.ndarray,
    new_v_TNE: np.ndarray,
    page_T: np.ndarray,
    offset_T: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """See the contract."""
    k_PNKE, v_PNKE = k_PNKE.copy(), v_PNKE.copy()
    for row, (page, offset) in enumerate(zip(page_T, offset_T, strict=True)):
        if 0 <= page < k_PNKE.shape[0]:
            k_PNKE[page, :, offset] = new_k_TNE[row]
            v_PNKE[page, :, offset] = new_v_TNE[row]
    return k_PNKE, v_PNKE


def rope(
    qkv_TNSE: np.ndarray,
    cos_TC: np.ndarray,
    sin_TC: np.ndarray,
    bias_NSE: np.ndarray | None,
    scales_2E: tuple[np.ndarray, ...],
    *,
    rotary: Rotary,
    eps: float | None,
) -> np.ndarray:
    """The rows [T, N, S, E] before they are written, in fp32 throughout."""
    rows = qkv_TNSE.astype(np.float32)
    if bias_NSE is not None:
        rows = rows + bias_NSE.astype(np.float32)
    turning = rows[:, :, :-1]
    if eps is not None:
        turning = turning / np.sqrt(np.mean(turning**2, axis=-1, keepdims=True) + eps)
        turning[:, :, :-1] *= scales_2E[0].astype(np.float32)
        turning[:, :, -1] *= scales_2E[1].astype(np.float32)
    half = rotary.dims // 2
    first = slice(0, rotary.dims, 2) if rotary.interleaved else slice(0, half)
    second = slice(1, rotary.dims, 2) if rotary.interleaved else slice(half, rotary.dims)
    a, b = turning[..., first], turning[..., second]
    cos, sin = cos_TC[:, None, None], sin_TC[:, None, None]
    turned = turning.copy()
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return np.concatenate((turned, rows[:, :, -1:]), axis=2)
