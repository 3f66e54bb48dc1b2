"""latent_write in numpy, one row at a time: what every implementation is compared with, bit for bit."""

from __future__ import annotations

import numpy as np


def dense(latent_PKL: np.ndarray, new_TL: np.ndarray, page_T: np.ndarray, offset_T: np.ndarray) -> np.ndarray:
    """See the contract."""
    latent_PKL = latent_PKL.copy()
    for row, (page, offset) in enumerate(zip(page_T, offset_T, strict=True)):
        if 0 <= page < latent_PKL.shape[0]:
            latent_PKL[page, offset] = new_TL[row]
    return latent_PKL
