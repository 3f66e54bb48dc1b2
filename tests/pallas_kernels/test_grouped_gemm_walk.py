"""grouped_gemm's walk over the sizes: every row and column in one tile, in the order that the queue hands out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.grouped_gemm import walk
from pallas_kernels.grouped_gemm.kernel import Tuning

# Three groups of experts: no rows, borders inside groups of 8, more than one tile, none in a whole group.
SIZES = (3, 0, 17, 1, 0, 0, 40, 8) + (0,) * 8 + (5, 100, 0, 24, 16, 9, 0, 0)


def items(r: SimpleNamespace, count: int) -> list[tuple[Any, Any]]:
    """(tile, whether there is one) of each number, each found from the number before."""

    @jax.jit
    def look_up(state: walk.Walk, number: jax.Array) -> tuple[walk.Walk, walk.Tile]:
        state = walk.advance(r, state, lax.div(number, jnp.int32(r.columns)))
        return state, walk.place(r, state, *walk.wholes_first(r, state, number), jnp.int32(0))

    state, found = walk.begin(r), []
    for number in range(count):
        state, tile = look_up(state, jnp.int32(number))
        found.append((jax.tree.map(np.asarray, tile), bool(state.group < r.groups)))
    return found


@pytest.mark.parametrize(("columns", "uneven"), [(3, True), (3, False), (1, True), (1, False)])
def test_the_queue_hands_out_every_row_and_column_once(columns: int, uneven: bool) -> None:
    rows = sum(SIZES)
    r = SimpleNamespace(
        size_X=jnp.asarray(SIZES, jnp.int32),
        x_AK=np.zeros((-(-rows // 8) * 8, 1)),
        tuning=Tuning(rows=32),
        columns=columns,
        groups=len(SIZES) // walk.WALK,
        uneven=uneven,
    )
    expert_A = np.repeat(np.arange(len(SIZES)), SIZES)
    written = np.zeros((rows, columns), int)
    short = []  # (group, whether the tile has one block only)
    for tile, there in items(r, 80):
        if not there:
            continue
        assert 0 <= tile.first_live < tile.end_live <= 32 and tile.first_row % 8 == 0
        live = slice(tile.first_row + tile.first_live, tile.first_row + tile.end_live)
        assert (expert_A[live] == tile.expert).all()
        written[live, tile.column] += 1
        assert tile.whole == (not uneven or tile.column < columns - 1)
        short.append((tile.expert // walk.WALK, not tile.whole))
    assert (written == 1).all()
    assert len(short) < 80 and short == sorted(short)  # group by group, tiles of one block last
