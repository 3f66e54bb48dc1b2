"""Named cases of gqa_prefill and their random inputs, for tests, benchmark and tuner alike."""

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
    kv_heads: int
    group: int
    head_dim: int
    page_tokens: int
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.head_dim**-0.5


class PrefillInputs(NamedTuple):
    """The arrays of one call, in the order of the contract."""

    q_TNGE: np.ndarray
    k_PNKE: np.ndarray
    v_PNKE: np.ndarray
    table_RM: np.ndarray
    start_R: np.ndarray
    tokens_R: np.ndarray
    position_R: np.ndarray


# Chunks after two decode rows, with and without a prefix, an unused one in the middle, borders at and beside a page.
MIXED = ((2, 0, 17), (0, 63, 1), (0, 0, 0), (0, 64, 33), (1, 15, 16), (0, 1, 1), (0, 250, 40))
CASES = (
    PrefillCase("mha, mixed", 128, MIXED, kv_heads=2, group=1, head_dim=64, page_tokens=16),
    PrefillCase("group 3, mixed", 128, MIXED, kv_heads=3, group=3, head_dim=64, page_tokens=16),
    PrefillCase("group 8, page 64", 128, MIXED, kv_heads=1, group=8, head_dim=128, page_tokens=64),
    PrefillCase("group 16, page 64", 128, MIXED, kv_heads=1, group=16, head_dim=128, page_tokens=64),
    PrefillCase("one whole prompt", 64, ((0, 0, 64),), kv_heads=2, group=2, head_dim=64, page_tokens=16),
    PrefillCase("longer tiles", 256, ((0, 5, 200), (0, 0, 56)), kv_heads=2, group=2, head_dim=64, page_tokens=64),
    PrefillCase("more chunks than rows", 4, ((0, 3, 1),) * 4 + ((0, 0, 0),) * 4, 1, 2, 64, 16),
    PrefillCase("nobody", 16, ((0, 0, 0), (0, 9, 0)), kv_heads=2, group=2, head_dim=64, page_tokens=16),
    PrefillCase("bf16", 128, MIXED, kv_heads=1, group=16, head_dim=128, page_tokens=64, dtype="bfloat16"),
)


def make_inputs(case: PrefillCase, seed: int) -> PrefillInputs:
    """Random inputs with everything hostile that the contract allows, as in gqa_decode: NaN in all rows nobody owns,

    pages in random order, the pool's last page among them, useless table entries past each end, NaN in the queries of
    rows that belong to no chunk.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    ends = [prefix + tokens for _, prefix, tokens in case.chunks]
    pages_R = [-(-end // case.page_tokens) for end in ends]
    num_pages = sum(pages_R) + 2
    order = rng.permutation(num_pages)
    order = np.roll(order, -int(np.argmax(order)))
    shape = (num_pages, case.kv_heads, case.page_tokens, case.head_dim)
    k_PNKE, v_PNKE = np.full(shape, np.nan, dtype), np.full(shape, np.nan, dtype)
    q_TNGE = np.full((case.tokens, case.kv_heads, case.group, case.head_dim), np.nan, dtype)
    table_RM = rng.choice([0, num_pages, 2**30, int(order[0])], (len(case.chunks), max(*pages_R, 1) + 1))
    start_R = np.zeros(len(case.chunks), np.int32)
    taken, row = 0, 0
    for chunk, (gap, _, tokens) in enumerate(case.chunks):
        start_R[chunk] = row + gap
        row += gap + tokens
        mine = order[taken : taken + pages_R[chunk]]
        taken += len(mine)
        table_RM[chunk, : len(mine)] = mine
        for pool in (k_PNKE, v_PNKE):
            rows_LNE = rng.standard_normal((ends[chunk], case.kv_heads, case.head_dim))
            for index, page in enumerate(mine):
                part = rows_LNE[index * case.page_tokens : (index + 1) * case.page_tokens]
                pool[page, :, : len(part)] = part.transpose(1, 0, 2)
        q_TNGE[start_R[chunk] : row] = rng.standard_normal((tokens, *q_TNGE.shape[1:]))
    _, prefix_R, tokens_R = (np.asarray(column, np.int32) for column in zip(*case.chunks, strict=True))
    return PrefillInputs(q_TNGE, k_PNKE, v_PNKE, table_RM.astype(np.int32), start_R, tokens_R, prefix_R)
