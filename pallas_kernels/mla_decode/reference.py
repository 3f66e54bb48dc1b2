"""mla_decode in fp32 numpy, one dense softmax a query token: what tests and benchmarks compare with."""

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
    """See the contract; inputs of any float dtype are raised to fp32. Returns fp32 [B, H, rank] or [B, S, H, rank]."""
    page_tokens, latent_dim = latent_PKL.shape[1:]
    q_BSHL = q_BHL if q_BHL.ndim == 4 else q_BHL[:, None]
    out_BSHR = np.zeros((*q_BSHL.shape[:3], rank), np.float32)
    for row, tokens in enumerate(length_B):
        pages = table_BM[row, : -(-int(tokens) // page_tokens)]
        latent_CL = np.asarray(latent_PKL[pages], np.float32).reshape(-1, latent_dim)
        for token in range(q_BSHL.shape[1]):
            visible = int(tokens) - q_BSHL.shape[1] + 1 + token
            if visible <= 0:
                continue
            score_HC = scale * np.asarray(q_BSHL[row, token], np.float32) @ latent_CL[:visible].T
            weight_HC = np.exp(score_HC - score_HC.max(axis=-1, keepdims=True))
            total_H1 = weight_HC.sum(axis=-1, keepdims=True)
            out_BSHR[row, token] = weight_HC @ latent_CL[:visible, :rank] / total_H1
    return out_BSHR.reshape(*q_BHL.shape[:-1], rank)
