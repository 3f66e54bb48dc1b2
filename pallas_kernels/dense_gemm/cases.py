"""Named cases of dense_gemm and their random inputs, for tests and checks alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DenseCase:
    """Sizes of one call."""

    name: str
    rows: int
    columns: int
    inner: int
    dtype: str = "float32"
    out_dtype: str | None = None  # None: as dtype


class DenseInputs(NamedTuple):
    """The arrays of one call, in the order of the reference."""

    x_TK: np.ndarray
    w_NK: np.ndarray


CASES = (
    DenseCase("one row", 1, 24, 40),
    DenseCase("a few", 5, 24, 40),
    DenseCase("bf16", 16, 128, 192, dtype="bfloat16"),
    DenseCase("bf16 to fp32", 3, 96, 64, dtype="bfloat16", out_dtype="float32"),
    DenseCase("many rows", 130, 64, 64, dtype="bfloat16"),
)


def make_inputs(case: DenseCase, seed: int) -> DenseInputs:
    """Random inputs, of which each result is about 1."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    x_TK = rng.standard_normal((case.rows, case.inner), np.float32)
    w_NK = rng.standard_normal((case.columns, case.inner), np.float32) / np.sqrt(case.inner)
    return DenseInputs(x_TK.astype(dtype), w_NK.astype(dtype))
