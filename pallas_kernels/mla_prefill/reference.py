"""mla_prefill in fp32 numpy, one dense causal softmax a chunk: what every implementation is compared with."""

from __future__ import annotations

import numpy as np


def dense(
    q_THE: np.ndarray,
    latent_PKL: np.ndarray,
    key_up_HNR: np.ndarray,
    value_up_HVR: np.ndarray,
    table_RM: np.ndarray,
    start_R: np.ndarray,
    tokens_R: np.ndarray,
    position_R: np.ndarray,
    *,
    scale: float,
) -> np.ndarray:
    """See the contract; inputs of any float dtype are raised to fp32. Returns fp32 [T, H, V]."""
    page_tokens, latent_dim = latent_PKL.shape[1:]
    heads, _, rank = key_up_HNR.shape
    key_up_HNR, value_up_HVR = (np.asarray(up, np.float32) for up in (key_up_HNR, value_up_HVR))
    out_THV = np.zeros((*q_THE.shape[:2], value_up_HVR.shape[1]), np.float32)
    for chunk, tokens in enumerate(tokens_R):
        if tokens == 0:
            continue
        rows = slice(start_R[chunk], start_R[chunk] + tokens)
        end = int(position_R[chunk] + tokens)
        pages = table_RM[chunk, : -(-end // page_tokens)]
        latent_CL = np.asarray(latent_PKL[pages], np.float32).reshape(-1, latent_dim)[:end]
        shared_HCP = np.broadcast_to(latent_CL[:, rank:], (heads, end, latent_dim - rank))
        key_HCE = np.concatenate([latent_CL[:, :rank] @ key_up_HNR.transpose(0, 2, 1), shared_HCP], axis=-1)
        value_HCV = latent_CL[:, :rank] @ value_up_HVR.transpose(0, 2, 1)
        q_HTE = np.asarray(q_THE[rows], np.float32).transpose(1, 0, 2)
        score_HTC = scale * q_HTE @ key_HCE.transpose(0, 2, 1)
        visible_TC = np.arange(end) <= position_R[chunk] + np.arange(tokens)[:, None]
        score_HTC = np.where(visible_TC, score_HTC, -np.inf)
        weight_HTC = np.exp(score_HTC - score_HTC.max(axis=-1, keepdims=True))
        out_HTV = weight_HTC @ value_HCV / weight_HTC.sum(axis=-1, keepdims=True)
        out_THV[rows] = out_HTV.transpose(1, 0, 2)
    return out_THV
