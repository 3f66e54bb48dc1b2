"""What tells whether bits depend on company, on two ops of numpy: one minds its own rows only, the other does not."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.alone import chunks_alone, rows_alone


@pytest.mark.parametrize("company", [0.0, 1.0])
def test_rows(company: float) -> None:
    def op(q_B: np.ndarray, length_B: np.ndarray) -> np.ndarray:
        return np.where(length_B > 0, q_B * length_B + company * (length_B > 0).sum(), 0.0)

    found = rows_alone(op, (np.arange(4.0), np.array([3, 1, 2, 5], np.int32)))
    assert np.isnan(found).all() if company else found.tolist() == [0, 1, 4, 15]


@pytest.mark.parametrize("company", [0.0, 1.0])
def test_chunks(company: float) -> None:
    def op(q_T: np.ndarray, start_R: np.ndarray, tokens_R: np.ndarray, position_R: np.ndarray) -> np.ndarray:
        out_T = np.zeros_like(q_T)
        for start, tokens, position in zip(start_R, tokens_R, position_R, strict=True):
            out_T[start : start + tokens] = q_T[start : start + tokens] + position + company * (tokens_R > 0).sum()
        return out_T

    borders = (np.array([1, 4]), np.array([2, 3]), np.array([10, 20]))
    found = chunks_alone(op, (np.arange(8.0, dtype=np.float32), *borders))
    chunks = found[[1, 2, 4, 5, 6]]
    assert np.isnan(chunks).all() if company else chunks.tolist() == [11, 12, 24, 25, 26]
