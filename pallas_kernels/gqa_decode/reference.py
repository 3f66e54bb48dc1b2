"""gqa_decode in fp32 numpy, one dense softmax a row: what tests and benchmarks compare every implementation with."""

from __future__ import annotations

import numpy as np


def dense(
    q_BNGE: np.ndarray,
    k_PNKE: np.ndarray,
    v_PNKE: np.ndarray,
    table_BM: np.ndarray,
    length_B: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """See the contract; inputs of any float dtype are raised to fp32. Returns fp32 [B, N, G, E]."""
    page_tokens = k_PNKE.shape[2]
    out_BNGE = np.zeros(q_BNGE.shape, np.float32)
    for row, tokens in enumerate(length_B):
        if tokens == 0:
            continue
        pages = table_BM[row, : -(-int(tokens) // page_tokens)]
        k_NLE, v_NLE = (_rows(pool, pages)[:, :tokens] for pool in (k_PNKE, v_PNKE))
        score_NGL = scale * np.asarray(q_BNGE[row], np.float32) @ k_NLE.transpose(0, 2, 1)
        weight_NGL = np.exp(score_NGL - score_NGL.max(axis=-1, keepdims=True))
        out_BNGE[row] = weight_NGL @ v_NLE / weight_NGL.sum(axis=-1, keepdims=True)
    return out_BNGE


def _rows(pool_PNKE: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """[N, L, E] fp32: the named pages one after the other."""
    taken = np.asarray(pool_PNKE[pages], np.float32).transpose(1, 0, 2, 3)
    return taken.reshape(taken.shape[0], -1, taken.shape[3])
