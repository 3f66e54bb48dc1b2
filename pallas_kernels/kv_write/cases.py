"""Named cases of kv_write and their random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels.rotary import Rotary


@dataclass(frozen=True, slots=True)
class WriteCase:
    """Sizes of one call. dropped: rows at the end that name no page of the pool."""

    name: str
    rows: int
    dropped: int
    kv_heads: int
    group: int
    head_dim: int
    rotary: Rotary
    bias: bool = False
    eps: float | None = None
    page_tokens: int = 64
    dtype: str = "bfloat16"


class WriteInputs(NamedTuple):
    """The arrays of one call, in the order of the implementations."""

    k_PNKE: np.ndarray
    v_PNKE: np.ndarray
    qkv_TNSE: np.ndarray
    cos_TC: np.ndarray
    sin_TC: np.ndarray
    page_T: np.ndarray
    offset_T: np.ndarray
    bias_NSE: np.ndarray | None
    scales_2E: tuple[np.ndarray, ...]


CASES = (
    WriteCase("glm-4: interleaved half, bias", 5, 1, 2, 16, 128, Rotary(64, interleaved=True), bias=True),
    WriteCase("glm-4.5: half, norm", 3, 1, 8, 12, 128, Rotary(64), eps=1e-5),
    WriteCase("llama: mha", 2, 0, 32, 1, 128, Rotary(128)),
    WriteCase("one row, 40 heads", 1, 0, 40, 1, 128, Rotary(128)),
    WriteCase("nobody", 2, 2, 2, 4, 64, Rotary(64)),
    WriteCase("odd heads, norm and bias", 3, 1, 3, 3, 64, Rotary(64), bias=True, eps=1e-6),
    WriteCase("quarter of 64, interleaved, norm", 4, 2, 4, 2, 64, Rotary(16, interleaved=True), eps=1e-6),
    WriteCase("quarter of 128", 3, 1, 1, 7, 128, Rotary(32)),
    WriteCase("whole, interleaved", 3, 1, 1, 8, 64, Rotary(64, interleaved=True), bias=True),
)


def make_inputs(case: WriteCase, seed: int) -> WriteInputs:
    """Random rows for random places, the pool's last row among them; pools are NaN where nobody writes."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    N, S, E, C = case.kv_heads, case.group + 2, case.head_dim, case.rotary.dims // 2
    P = -(-case.rows // case.page_tokens) + 1
    place_T = rng.permutation(P * case.page_tokens - 1)[: case.rows]
    place_T[:1] = P * case.page_tokens - 1
    page_T, offset_T = place_T // case.page_tokens, place_T % case.page_tokens
    page_T[case.rows - case.dropped :] = np.resize([P, 2**30, -1], case.dropped)
    angle_TC = rng.uniform(-3, 3, (case.rows, C))
    pool = np.full((P, N, case.page_tokens, E), np.nan, dtype)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    return WriteInputs(
        pool,
        pool.copy(),
        random(case.rows, N, S, E),
        np.cos(angle_TC).astype(np.float32),
        np.sin(angle_TC).astype(np.float32),
        page_T.astype(np.int32),
        offset_T.astype(np.int32),
        random(N, S, E) if case.bias else None,
        () if case.eps is None else (random(E), random(E)),
    )
