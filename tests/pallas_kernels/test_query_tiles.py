"""Query tiles of ragged chunks: every row once, at its position, longest first."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.gqa_prefill.cases import MIXED
from pallas_kernels.query_tiles import (
    BASE,
    CHUNK,
    END_LIVE,
    FIRST_LIVE,
    KEYS,
    POSITION,
    ROW,
    cut_tiles,
    tile_slots,
)

LONG = ((3, 0, 129), (0, 700, 300), (0, 0, 0), (0, 0, 128), (5, 64, 64), (0, 91, 2), (0, 127, 369))


@pytest.mark.parametrize(("tokens", "chunks"), [(128, MIXED), (1000, LONG), (130, ((0, 5, 130),)), (128, ((9, 0, 0),))])
def test_tiles_hold_every_row_once(tokens: int, chunks: tuple[tuple[int, int, int], ...]) -> None:
    """Each row of a chunk is live in one tile, at its position; tiles stay inside the packed rows; longest first."""
    gaps, prefix, count = (np.array(column, np.int32) for column in zip(*chunks, strict=True))
    start = (np.cumsum(gaps + count) - count).astype(np.int32)
    made = cut_tiles(start, count, prefix, tokens=tokens, base_R=np.arange(7, 7 + len(chunks), dtype=np.int32))
    tiles = type(made)(*map(np.asarray, made))
    words = tiles.tile_W8
    assert len(words) == tile_slots(tokens, len(chunks)) >= tiles.used_1[0] == (words[:, KEYS] > 0).sum()
    assert (np.diff(words[:, KEYS]) <= 0).all() and tiles.next_2.tolist() == [0, 0]
    seen: dict[int, tuple[int, int]] = {}
    for tile in words:
        assert 0 <= tile[ROW] <= tokens - 128 and tile[BASE] == 7 + tile[CHUNK]
        for i in range(tile[FIRST_LIVE], tile[END_LIVE]):
            assert 0 <= i < 128 and tile[ROW] + i not in seen
            seen[int(tile[ROW] + i)] = (int(tile[CHUNK]), int(tile[POSITION] + i))
            assert tile[POSITION] + i < tile[KEYS]
    owned = {int(start[r]) + i: (r, int(prefix[r]) + i) for r in range(len(chunks)) for i in range(count[r])}
    assert seen == owned
    free = np.array([row not in owned for row in range(tokens)])
    np.testing.assert_array_equal(tiles.owned_T == 0, free)
    assert tiles.gaps_Z.tolist() == [free[row : row + 128].sum() for row in range(0, tokens, 128)]
