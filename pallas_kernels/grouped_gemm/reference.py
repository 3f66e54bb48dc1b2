"""grouped_gemm in fp32 numpy, row by row's expert: what every implementation is compared with."""

from __future__ import annotations

import numpy as np


def gate_up(x_TD: np.ndarray, row_A: np.ndarray, w_X2FD: np.ndarray, size_X: np.ndarray) -> np.ndarray:
    """fp32 [sum(size), F] of inputs of any float dtype; see the contract."""
    gate_AF = products(x_TD[row_A], w_X2FD[:, 0], size_X)
    up_AF = products(x_TD[row_A], w_X2FD[:, 1], size_X)
    return gate_AF / (1 + np.exp(-gate_AF)) * up_AF


def down(h_AF: np.ndarray, w_XDF: np.ndarray, size_X: np.ndarray, weight_A: np.ndarray) -> np.ndarray:
    """fp32 [sum(size), D]."""
    y_AD = products(h_AF, w_XDF, size_X)
    return y_AD * weight_A[: len(y_AD), None]


def products(x_AK: np.ndarray, w_XNK: np.ndarray, size_X: np.ndarray) -> np.ndarray:
    """fp32 [sum(size), N]: each expert's rows times its weights."""
    ends = np.cumsum(size_X)
    parts = [
        np.asarray(x_AK[end - size : end], np.float32) @ np.asarray(w_NK, np.float32).T
        for w_NK, size, end in zip(w_XNK, size_X, ends, strict=True)
    ]
    return np.concatenate(parts)
