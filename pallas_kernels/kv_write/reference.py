"""kv_write in numpy, one row at a time: what every implementation is compared with, bit for bit."""

from __future__ import annotations

import numpy as np


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
