"""Named cases of latent_write and their random inputs."""

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
    latent_dim: int
    page_tokens: int
    dtype: str = "float32"


class WriteInputs(NamedTuple):
    """The arrays of one call, in the order of the contract."""

    latent_PKL: np.ndarray
    new_TL: np.ndarray
    page_T: np.ndarray
    offset_T: np.ndarray


CASES = (
    WriteCase("one row", rows=1, dropped=0, num_pages=3, latent_dim=40, page_tokens=16),
    WriteCase("padded", rows=24, dropped=9, num_pages=5, latent_dim=48, page_tokens=16),
    WriteCase("all padded", rows=4, dropped=4, num_pages=2, latent_dim=40, page_tokens=16),
    WriteCase("bf16", rows=64, dropped=3, num_pages=4, latent_dim=576, page_tokens=64, dtype="bfloat16"),
)


def make_inputs(case: WriteCase, seed: int) -> WriteInputs:
    """Random rows for random places, each place once; dropped rows name page P, a far page, or -1."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    place_T = rng.permutation(case.num_pages * case.page_tokens)[: case.rows]
    page_T, offset_T = place_T // case.page_tokens, place_T % case.page_tokens
    page_T[case.rows - case.dropped :] = np.resize([case.num_pages, 2**30, -1], case.dropped)
    shapes = ((case.num_pages, case.page_tokens, case.latent_dim), (case.rows, case.latent_dim))
    latent_PKL, new_TL = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return WriteInputs(latent_PKL, new_TL, page_T.astype(np.int32), offset_T.astype(np.int32))
