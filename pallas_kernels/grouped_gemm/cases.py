"""Named cases of grouped_gemm and their random inputs, for tests, checks and benchmark alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class GemmCase:
    """Sizes of one call. sizes: rows of each expert; unused: rows after them, which nobody's expert computes."""

    name: str
    sizes: tuple[int, ...]
    unused: int
    hidden: int
    width: int
    dtype: str = "float32"


class GemmInputs(NamedTuple):
    """The arrays of gate_up and of down; down's rows are random, too."""

    x_TD: np.ndarray
    row_A: np.ndarray
    w_X2FD: np.ndarray
    size_X: np.ndarray
    h_AF: np.ndarray
    w_XDF: np.ndarray
    weight_A: np.ndarray


CASES = (
    GemmCase("one row", (0, 1, 0), 0, 32, 16),
    GemmCase("nobody", (0, 0), 5, 32, 16),
    GemmCase("all to one", (0, 0, 77, 0), 0, 32, 16),
    GemmCase("all to the last", (0, 33), 3, 32, 16),
    GemmCase("ragged", (3, 0, 17, 1, 0, 0, 40, 8, 16, 2), 21, 48, 40),
    GemmCase("one expert", (130,), 1, 32, 16),
    GemmCase("bf16", (5, 0, 64, 1, 30), 28, 256, 64, "bfloat16"),
)


def make_inputs(case: GemmCase, seed: int) -> GemmInputs:
    """Random inputs. NaN is what no result needs: a token, rows and weights of unused rows, experts without rows."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    live, X = sum(case.sizes), len(case.sizes)
    A, tokens = live + case.unused, max(2, live // 2)

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(fan_in)).astype(dtype)

    x_TD = normal(tokens, case.hidden)
    x_TD[-1] = np.nan
    row_A = np.where(np.arange(A) < live, rng.integers(0, tokens - 1, A), tokens - 1)
    h_AF = normal(A, case.width)
    h_AF[live:] = np.nan
    weight_A = np.where(np.arange(A) < live, rng.random(A), np.nan).astype(np.float32)
    w_X2FD = normal(X, 2, case.width, case.hidden, fan_in=case.hidden)
    w_XDF = normal(X, case.hidden, case.width, fan_in=case.width)
    size_X = np.array(case.sizes, np.int32)
    w_X2FD[size_X == 0] = w_XDF[size_X == 0] = np.nan
    return GemmInputs(x_TD, row_A.astype(np.int32), w_X2FD, size_X, h_AF, w_XDF, weight_A)
