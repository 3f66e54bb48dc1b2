"""latent_write in numpy, the rows and their places: what every implementation is compared with."""

from __future__ import annotations

import numpy as np

from pallas_kernels.rotary import Rotary


def dense(latent_PKL: np.ndarray, new_TL: np.ndarray, page_T: np.ndarray, offset_T: np.ndarray) -> np.ndarray:
    """See the contract."""
    latent_PKL = latent_PKL.copy()
    for row, (page, offset) in enumerate(zip(page_T, offset_T, strict=True)):
        if 0 <= page < latent_PKL.shape[0]:
            latent_PKL[page, offset] = new_TL[row]
    return latent_PKL


def rope(
    down_TW: np.ndarray,
    scale_R: np.ndarray,
    q_THE: np.ndarray,
    cos_TC: np.ndarray,
    sin_TC: np.ndarray,
    *,
    rotary: Rotary,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The turned part of the queries, and the rows [T, L] before they are written, in fp32 throughout."""
    rank = scale_R.shape[0]
    row_TL = down_TW[:, down_TW.shape[1] - rank - rotary.dims :].astype(np.float32)
    latent, key = row_TL[:, :rank], row_TL[:, rank:]
    latent = latent / np.sqrt(np.mean(latent**2, axis=1, keepdims=True) + eps) * scale_R.astype(np.float32)
    turned = _turn(q_THE[:, :, q_THE.shape[2] - rotary.dims :].astype(np.float32), cos_TC, sin_TC, rotary)
    return turned, np.concatenate((latent, _turn(key[:, None], cos_TC, sin_TC, rotary)[:, 0]), axis=1)


def _turn(x_THC: np.ndarray, cos_TC: np.ndarray, sin_TC: np.ndarray, rotary: Rotary) -> np.ndarray:
    """All dimensions turn."""
    half = rotary.dims // 2
    first = slice(0, None, 2) if rotary.interleaved else slice(0, half)
    second = slice(1, None, 2) if rotary.interleaved else slice(half, None)
    cos, sin, turned = cos_TC[:, None], sin_TC[:, None], x_THC.copy()
    a, b = x_THC[..., first], x_THC[..., second]
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return turned
