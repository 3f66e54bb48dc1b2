"""gqa_decode in fp32 numpy, one dense softmax a query token: what all is compared with."""

from __future__ import annotations

import numpy as np


def dense(
    q: np.ndarray,
    k_PNKE: np.ndarray,
    v_PNKE: np.ndarray,
    table_BM: np.ndarray,
    length_B: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """See the contract; inputs of any float dtype are raised to fp32. Returns fp32, of q's shape."""
    page_tokens = k_PNKE.shape[2]
    q_BSNGE = np.asarray(q if q.ndim == 5 else q[:, None], np.float32)
    out_BSNGE = np.zeros(q_BSNGE.shape, np.float32)
    for row, tokens in enumerate(length_B):
        pages = table_BM[row, : -(-int(tokens) // page_tokens)]
        k_NLE, v_NLE = (_rows(pool, pages) for pool in (k_PNKE, v_PNKE))
        for token in range(q_BSNGE.shape[1]):
            visible = int(tokens) - q_BSNGE.shape[1] + 1 + token
            if visible <= 0:
                continue
            score_NGL = scale * q_BSNGE[row, token] @ k_NLE[:, :visible].transpose(0, 2, 1)
            weight_NGL = np.exp(score_NGL - score_NGL.max(axis=-1, keepdims=True))
            out_BSNGE[row, token] = weight_NGL @ v_NLE[:, :visible] / weight_NGL.sum(axis=-1, keepdims=True)
    return out_BSNGE.reshape(q.shape)


def _rows(pool_PNKE: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """[N, L, E] fp32: the named pages one after the other."""
    taken = np.asarray(pool_PNKE[pages], np.float32).transpose(1, 0, 2, 3)
    return taken.reshape(taken.shape[0], -1, taken.shape[3])
