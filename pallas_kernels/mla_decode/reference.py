"""mla_decode in fp32 numpy, one dense softmax a row: what tests and benchmarks compare every implementation with."""

from __future__ import annotations

import numpy as np


def dense(
    q_BHL: np.ndarray,
    latent_PKL: np.ndarray,
    table_BM: np.ndarray,
    length_B: np.ndarray,
    *,
    rank: int,
    scale: float,
) -> np.ndarray:
    """See the contract; inputs of any float dtype are raised to fp32. Returns fp32 [B, H, rank]."""
    page_tokens, latent_dim = latent_PKL.shape[1:]
    out_BHR = np.zeros((*q_BHL.shape[:2], rank), np.float32)
    for row, tokens in enumerate(length_B):
        if tokens == 0:
            continue
        pages = table_BM[row, : -(-int(tokens) // page_tokens)]
        latent_CL = np.asarray(latent_PKL[pages], np.float32).reshape(-1, latent_dim)[:tokens]
        score_HC = scale * np.asarray(q_BHL[row], np.float32) @ latent_CL.T
        weight_HC = np.exp(score_HC - score_HC.max(axis=-1, keepdims=True))
        out_BHR[row] = weight_HC @ latent_CL[:, :rank] / weight_HC.sum(axis=-1, keepdims=True)
    return out_BHR
