"""Named cases of gqa_decode and their random inputs, for tests, benchmark and tuner alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Sizes of one call. lengths: tokens in the cache of each row, 0 for a padded row."""

    name: str
    lengths: tuple[int, ...]
    kv_heads: int
    group: int
    head_dim: int
    page_tokens: int
    dtype: str = "float32"
    tokens: int | None = None  # query tokens of a row; None: queries without an axis for them

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.head_dim**-0.5


class DecodeInputs(NamedTuple):
    """The arrays of one call, in the order of the contract."""

    q: np.ndarray
    k_PNKE: np.ndarray
    v_PNKE: np.ndarray
    table_BM: np.ndarray
    length_B: np.ndarray


EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 0, 250)
NEW_TOKENS = (0, 1, 2, 3, 4, 5, 16, 17, 18, 63, 64, 65, 66, 67, 71, 72, 130)  # fewer than there are new ones, too
CASES = (
    DecodeCase("mha, page 16", EDGES, kv_heads=4, group=1, head_dim=64, page_tokens=16),
    DecodeCase("group 3, page 16", EDGES, kv_heads=3, group=3, head_dim=64, page_tokens=16),
    DecodeCase("group 8, page 64", EDGES, kv_heads=2, group=8, head_dim=128, page_tokens=64),
    DecodeCase("group 16, page 64", EDGES, kv_heads=2, group=16, head_dim=128, page_tokens=64),
    DecodeCase("one long among short", (3, 1, 700, 2, 64), kv_heads=2, group=4, head_dim=64, page_tokens=64),
    DecodeCase("nobody", (0, 0), kv_heads=2, group=2, head_dim=64, page_tokens=16),
    DecodeCase("bf16 group 16", EDGES, kv_heads=2, group=16, head_dim=128, page_tokens=64, dtype="bfloat16"),
    DecodeCase("bf16 mha", EDGES, kv_heads=4, group=1, head_dim=64, page_tokens=64, dtype="bfloat16"),
    DecodeCase("4 tokens", NEW_TOKENS, kv_heads=2, group=3, head_dim=64, page_tokens=16, tokens=4),
    DecodeCase("8 tokens, page 64", NEW_TOKENS, kv_heads=1, group=2, head_dim=64, page_tokens=64, tokens=8),
    DecodeCase("an axis of one token", EDGES, kv_heads=2, group=2, head_dim=64, page_tokens=16, tokens=1),
)


def make_inputs(case: DecodeCase, seed: int) -> DecodeInputs:
    """Random inputs with everything hostile that the contract allows.

    Pages lie in random order over the pool, its last page among them; every row of the pools that no request owns is
    NaN; table entries past a row's length are out of range or name another request's pages.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    pages_B = [-(-tokens // case.page_tokens) for tokens in case.lengths]
    num_pages = sum(pages_B) + 2
    order = rng.permutation(num_pages)
    order = np.roll(order, -int(np.argmax(order)))  # the pool's last page belongs to the first request that has any
    shape = (num_pages, case.kv_heads, case.page_tokens, case.head_dim)
    k_PNKE, v_PNKE = np.full(shape, np.nan, dtype), np.full(shape, np.nan, dtype)
    table_BM = rng.choice([0, num_pages, 2**30, int(order[0])], (len(case.lengths), max(*pages_B, 1) + 1))
    taken = 0
    for row, tokens in enumerate(case.lengths):
        mine = order[taken : taken + pages_B[row]]
        taken += pages_B[row]
        table_BM[row, : len(mine)] = mine
        for pool in (k_PNKE, v_PNKE):
            fill_pages(pool, mine, rng.standard_normal((tokens, case.kv_heads, case.head_dim)))
    new = () if case.tokens is None else (case.tokens,)
    q = rng.standard_normal((len(case.lengths), *new, case.kv_heads, case.group, case.head_dim)).astype(dtype)
    return DecodeInputs(q, k_PNKE, v_PNKE, table_BM.astype(np.int32), np.asarray(case.lengths, np.int32))


def fill_pages(pool_PNKE: np.ndarray, pages: np.ndarray, rows_LNE: np.ndarray) -> None:
    """Write a request's rows into its pages, in place."""
    page_tokens = pool_PNKE.shape[2]
    for index, page in enumerate(pages):
        rows = rows_LNE[index * page_tokens : (index + 1) * page_tokens]
        pool_PNKE[page, :, : len(rows)] = rows.transpose(1, 0, 2)
