"""Named cases of kv_write and their random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class WriteCase:
    """Sizes of one call. dropped: rows at the end that name no page of the pool."""

    name: str
    rows: int
    dropped: int
    num_pages: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str = "float32"


class WriteInputs(NamedTuple):
    """The arrays of one call, in the order of the contract."""

    k_PNKE: np.ndarray
    v_PNKE: np.ndarray
    new_k_TNE: np.ndarray
    new_v_TNE: np.ndarray
    page_T: np.ndarray
    offset_T: np.ndarray


CASES = (
    WriteCase("one row", rows=1, dropped=0, num_pages=3, kv_heads=2, head_dim=64, page_tokens=16),
    WriteCase("padded", rows=24, dropped=9, num_pages=5, kv_heads=3, head_dim=64, page_tokens=16),
    WriteCase("all padded", rows=4, dropped=4, num_pages=2, kv_heads=1, head_dim=64, page_tokens=16),
    WriteCase("bf16", rows=64, dropped=3, num_pages=4, kv_heads=2, head_dim=128, page_tokens=64, dtype="bfloat16"),
)


def make_inputs(case: WriteCase, seed: int) -> WriteInputs:
    """Random rows for random places, each place once; dropped rows name page P, a far page, or -1."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    pool = (case.num_pages, case.kv_heads, case.page_tokens, case.head_dim)
    place_T = rng.permutation(case.num_pages * case.page_tokens)[: case.rows]
    page_T, offset_T = place_T // case.page_tokens, place_T % case.page_tokens
    nowhere = np.resize([case.num_pages, 2**30, -1], case.dropped)
    page_T[case.rows - case.dropped :] = nowhere
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in (pool, pool, *[(case.rows, *pool[1::2])] * 2)]
    return WriteInputs(*arrays, page_T.astype(np.int32), offset_T.astype(np.int32))
