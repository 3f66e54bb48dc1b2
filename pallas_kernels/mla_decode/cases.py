"""Named cases of mla_decode and their random inputs, for tests, benchmark and tuner alike."""

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
    heads: int
    page_tokens: int
    rank: int = 512
    rope_dim: int = 64
    dtype: str = "float32"
    tokens: int | None = None  # query tokens of a row; None: queries without an axis for them

    @property
    def scale(self) -> float:
        """Of the scores: DeepSeek's head dimension of 128 + 64, for any sizes."""
        return 192**-0.5


class DecodeInputs(NamedTuple):
    """The arrays of one call, in the order of the contract."""

    q_BHL: np.ndarray
    latent_PKL: np.ndarray
    table_BM: np.ndarray
    length_B: np.ndarray


EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 0, 250)
NEW_TOKENS = (0, 1, 2, 3, 4, 5, 16, 17, 18, 63, 64, 65, 66, 67, 71, 72, 130)  # fewer than there are new ones, too
CASES = (
    DecodeCase("tiny, one head", EDGES, heads=1, page_tokens=16, rank=32, rope_dim=8),
    DecodeCase("tiny, 5 heads", EDGES, heads=5, page_tokens=16, rank=32, rope_dim=16),
    DecodeCase("16 heads, page 64", EDGES, heads=16, page_tokens=64),
    DecodeCase("20 heads, page 16", EDGES, heads=20, page_tokens=16),
    DecodeCase("one long among short", (3, 1, 700, 2, 64), heads=2, page_tokens=64),
    DecodeCase("nobody", (0, 0), heads=2, page_tokens=16, rank=32, rope_dim=8),
    DecodeCase("bf16, 16 heads", EDGES, heads=16, page_tokens=64, dtype="bfloat16"),
    DecodeCase("4 tokens", NEW_TOKENS, heads=3, page_tokens=16, rank=32, rope_dim=8, tokens=4),
    DecodeCase("8 tokens, page 64", NEW_TOKENS, heads=2, page_tokens=64, rank=32, rope_dim=8, tokens=8),
    DecodeCase("an axis of one token", EDGES, heads=2, page_tokens=16, rank=32, rope_dim=8, tokens=1),
)


def make_inputs(case: DecodeCase, seed: int) -> DecodeInputs:
    """Random inputs with everything hostile that the contract allows.

    Pages lie in random order over the pool, its last page among them; every row of the pool that no request owns is
    NaN; table entries past a row's length are out of range or name another request's pages.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    pages_B = [-(-tokens // case.page_tokens) for tokens in case.lengths]
    num_pages, latent_dim = sum(pages_B) + 2, case.rank + case.rope_dim
    order = rng.permutation(num_pages)
    order = np.roll(order, -int(np.argmax(order)))  # the pool's last page belongs to the first request that has any
    latent_PKL = np.full((num_pages, case.page_tokens, latent_dim), np.nan, dtype)
    table_BM = rng.choice([0, num_pages, 2**30, -1, int(order[0])], (len(case.lengths), max(*pages_B, 1) + 1))
    taken = 0
    for row, tokens in enumerate(case.lengths):
        mine = order[taken : taken + pages_B[row]]
        taken += pages_B[row]
        table_BM[row, : len(mine)] = mine
        fill_pages(latent_PKL, mine, rng.standard_normal((tokens, latent_dim)))
    new = () if case.tokens is None else (case.tokens,)
    q_BHL = rng.standard_normal((len(case.lengths), *new, case.heads, latent_dim)).astype(dtype)
    return DecodeInputs(q_BHL, latent_PKL, table_BM.astype(np.int32), np.asarray(case.lengths, np.int32))


def fill_pages(latent_PKL: np.ndarray, pages: np.ndarray, rows_CL: np.ndarray) -> None:
    """Write a request's rows into its pages, in place."""
    page_tokens = latent_PKL.shape[1]
    for index, page in enumerate(pages):
        rows = rows_CL[index * page_tokens : (index + 1) * page_tokens]
        latent_PKL[page, : len(rows)] = rows
