"""Named cases of mla_prefill and their random inputs, for tests, benchmark and tuner alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """Sizes of one call. chunks: (gap, prefix, tokens) = free packed rows before it, its cached tokens, its own."""

    name: str
    tokens: int  # T, packed rows
    chunks: tuple[tuple[int, int, int], ...]
    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    page_tokens: int
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        """Of the scores."""
        return (self.nope_dim + self.rope_dim) ** -0.5


class PrefillInputs(NamedTuple):
    """The arrays of one call, in the order of the contract."""

    q_THE: np.ndarray
    latent_PKL: np.ndarray
    key_up_HNR: np.ndarray
    value_up_HVR: np.ndarray
    table_RM: np.ndarray
    start_R: np.ndarray
    tokens_R: np.ndarray
    position_R: np.ndarray


# Chunks after two decode rows, with and without a prefix, an unused one in the middle, borders at and beside a page.
MIXED = ((2, 0, 17), (0, 63, 1), (0, 0, 0), (0, 64, 33), (1, 15, 16), (0, 1, 1), (0, 250, 40))
TINY = {"nope_dim": 16, "rope_dim": 8, "value_dim": 16, "rank": 32}
DEEPSEEK = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128, "rank": 512}
GLM_FLASH = {"nope_dim": 192, "rope_dim": 64, "value_dim": 256, "rank": 512}
CASES = (
    PrefillCase("tiny, one head", 128, MIXED, heads=1, page_tokens=16, **TINY),
    PrefillCase("tiny, 5 heads", 128, MIXED, heads=5, page_tokens=16, **TINY | {"rope_dim": 16, "value_dim": 24}),
    PrefillCase("deepseek, 2 heads", 128, MIXED, heads=2, page_tokens=64, **DEEPSEEK),
    PrefillCase("deepseek, 16 heads", 64, ((2, 15, 20), (1, 0, 30)), heads=16, page_tokens=16, **DEEPSEEK),
    PrefillCase("glm flash, 20 heads", 64, ((2, 15, 20), (1, 0, 30)), heads=20, page_tokens=64, **GLM_FLASH),
    PrefillCase("several tiles", 256, ((0, 5, 200), (0, 0, 56)), heads=2, page_tokens=64, **TINY),
    PrefillCase("more chunks than rows", 4, ((0, 3, 1),) * 4 + ((0, 0, 0),) * 4, heads=2, page_tokens=16, **TINY),
    PrefillCase("nobody", 16, ((0, 0, 0), (0, 9, 0)), heads=2, page_tokens=16, **TINY),
    PrefillCase("bf16", 128, MIXED, heads=2, page_tokens=64, dtype="bfloat16", **DEEPSEEK),
)


def make_inputs(case: PrefillCase, seed: int) -> PrefillInputs:
    """Random inputs with everything hostile that the contract allows, as in mla_decode: NaN in all rows nobody owns,

    pages in random order, the pool's last page among them, useless table entries past each end, NaN in the queries of
    rows that belong to no chunk.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    ends = [prefix + tokens for _, prefix, tokens in case.chunks]
    pages_R = [-(-end // case.page_tokens) for end in ends]
    num_pages, latent_dim = sum(pages_R) + 2, case.rank + case.rope_dim
    order = rng.permutation(num_pages)
    order = np.roll(order, -int(np.argmax(order)))
    latent_PKL = np.full((num_pages, case.page_tokens, latent_dim), np.nan, dtype)
    q_THE = np.full((case.tokens, case.heads, case.nope_dim + case.rope_dim), np.nan, dtype)
    table_RM = rng.choice([0, num_pages, 2**30, -1, int(order[0])], (len(case.chunks), max(*pages_R, 1) + 1))
    start_R = np.zeros(len(case.chunks), np.int32)
    taken, row = 0, 0
    for chunk, (gap, _, tokens) in enumerate(case.chunks):
        start_R[chunk] = row + gap
        row += gap + tokens
        mine = order[taken : taken + pages_R[chunk]]
        taken += len(mine)
        table_RM[chunk, : len(mine)] = mine
        rows_CL = rng.standard_normal((ends[chunk], latent_dim))
        for index, page in enumerate(mine):
            part = rows_CL[index * case.page_tokens : (index + 1) * case.page_tokens]
            latent_PKL[page, : len(part)] = part
        q_THE[start_R[chunk] : row] = rng.standard_normal((tokens, *q_THE.shape[1:]))
    # Of the size that keeps a key of about unit length a dimension, as trained weights do.
    shapes = ((case.heads, case.nope_dim, case.rank), (case.heads, case.value_dim, case.rank))
    key_up_HNR, value_up_HVR = ((rng.standard_normal(shape) * case.rank**-0.5).astype(dtype) for shape in shapes)
    _, prefix_R, tokens_R = (np.asarray(column, np.int32) for column in zip(*case.chunks, strict=True))
    table_RM = table_RM.astype(np.int32)
    return PrefillInputs(q_THE, latent_PKL, key_up_HNR, value_up_HVR, table_RM, start_R, tokens_R, prefix_R)
