"""Named cases of latent_write and their random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels.rotary import Rotary


@dataclass(frozen=True, slots=True)
class WriteCase:
    """Sizes of one call. dropped: rows at the end that name no page of the pool. nope_dim: of a head, does not turn."""

    name: str
    rows: int
    dropped: int
    heads: int
    nope_dim: int
    q_rank: int = 0  # columns before the latent's
    rank: int = 512
    rotary: Rotary = Rotary(64, interleaved=True)
    eps: float = 1e-6
    page_tokens: int = 64
    dtype: str = "bfloat16"


class WriteInputs(NamedTuple):
    """The arrays of one call, in the order of the contract."""

    latent_PKL: np.ndarray
    down_TW: np.ndarray
    scale_R: np.ndarray
    q_THE: np.ndarray
    cos_TC: np.ndarray
    sin_TC: np.ndarray
    page_T: np.ndarray
    offset_T: np.ndarray


CASES = (
    WriteCase("deepseek-v2-lite", 5, 1, heads=16, nope_dim=128),
    WriteCase("deepseek-v3", 3, 0, heads=128, nope_dim=128, q_rank=1536),
    WriteCase("glm-4.7-flash: 20 heads, halves", 6, 2, heads=20, nope_dim=192, q_rank=768, rotary=Rotary(64)),
    WriteCase("one row, one head", 1, 0, heads=1, nope_dim=64),
    WriteCase("nobody", 2, 2, heads=8, nope_dim=128),
)


def make_inputs(case: WriteCase, seed: int) -> WriteInputs:
    """Random rows for random places, the pool's last row among them; the pool is NaN where nobody writes."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    P = -(-case.rows // case.page_tokens) + 1
    place_T = rng.permutation(P * case.page_tokens - 1)[: case.rows]
    place_T[:1] = P * case.page_tokens - 1
    page_T, offset_T = place_T // case.page_tokens, place_T % case.page_tokens
    page_T[case.rows - case.dropped :] = np.resize([P, 2**30, -1], case.dropped)
    angle_TC = rng.uniform(-3, 3, (case.rows, case.rotary.dims // 2))
    latent_dim = case.rank + case.rotary.dims

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    return WriteInputs(
        np.full((P, case.page_tokens, latent_dim), np.nan, dtype),
        random(case.rows, case.q_rank + latent_dim),
        random(case.rank),
        random(case.rows, case.heads, case.nope_dim + case.rotary.dims),
        np.cos(angle_TC).astype(np.float32),
        np.sin(angle_TC).astype(np.float32),
        page_T.astype(np.int32),
        offset_T.astype(np.int32),
    )
