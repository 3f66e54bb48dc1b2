"""gqa_prefill in fp32 numpy, one dense causal softmax a chunk: what every implementation is compared with."""

from __future__ import annotations

import numpy as np


def dense(
    q_TNGE: np.ndarray,
    k_PNKE: np.ndarray,
    v_PNKE: np.ndarray,
    table_RM: np.ndarray,
    start_R: np.ndarray,
    tokens_R: np.ndarray,
    position_R: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """See the contract; inputs of any float dtype are raised to fp32. Returns fp32 [T, N, G, E]."""
    page_tokens = k_PNKE.shape[2]
    out_TNGE = np.zeros(q_TNGE.shape, np.float32)
    for chunk, tokens in enumerate(tokens_R):
        rows = slice(start_R[chunk], start_R[chunk] + tokens)
        end = int(position_R[chunk] + tokens)
        pages = table_RM[chunk, : -(-end // page_tokens)]
        k_NLE, v_NLE = (_rows(pool, pages)[:, :end] for pool in (k_PNKE, v_PNKE))
        q_NGTE = np.asarray(q_TNGE[rows], np.float32).transpose(1, 2, 0, 3)
        score_NGTL = scale * q_NGTE @ k_NLE[:, None].transpose(0, 1, 3, 2)
        visible_TL = np.arange(end) <= position_R[chunk] + np.arange(tokens)[:, None]
        score_NGTL = np.where(visible_TL, score_NGTL, -np.inf)
        weight_NGTL = np.exp(score_NGTL - score_NGTL.max(axis=-1, keepdims=True, initial=-1e30))
        out_NGTE = weight_NGTL @ v_NLE[:, None] / weight_NGTL.sum(axis=-1, keepdims=True)
        out_TNGE[rows] = out_NGTE.transpose(2, 0, 1, 3)
    return out_TNGE


def _rows(pool_PNKE: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """[N, L, E] fp32: the named pages one after the other."""
    taken = np.asarray(pool_PNKE[pages], np.float32).transpose(1, 0, 2, 3)
    return taken.reshape(taken.shape[0], -1, taken.shape[3])
