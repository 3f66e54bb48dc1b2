"""Where the tiles of all experts lie: takes their sizes and a tile's number, gives its rows and columns.

No list of tiles is in memory: who looks one up walks over the sizes, eight experts at once, and goes on from there for
the next one, whose number is larger. A kernel hands in `r`: size_X, x_AK, tuning, columns, groups, uneven.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ALIGN = 8  # rows of a swizzled tile of shared memory
WALK = 8  # experts whose sizes are read at once: a group


class Walk(NamedTuple):
    """A group of experts, and what lies before it and in it."""

    group: jax.Array
    rows_before: jax.Array
    tiles_before: jax.Array
    rows_here: jax.Array
    tiles_here: jax.Array


class Tile(NamedTuple):
    """Where a tile lies; done: steps of this CTA before it."""

    expert: jax.Array
    first_row: jax.Array  # a multiple of 8
    first_live: jax.Array  # rows first_live .. end_live - 1 of the tile are the expert's, and this tile's to write
    end_live: jax.Array
    column: jax.Array  # number of the tile along the columns
    whole: jax.Array  # all its blocks are within the columns, not only the first
    done: jax.Array


def begin(r: SimpleNamespace) -> Walk:
    """The walk at the first group."""
    zero = jnp.int32(0)
    return _open(r, zero, zero, zero)


def advance(r: SimpleNamespace, walk: Walk, row_tile: jax.Array) -> Walk:
    """The walk at the group that a tile of rows is in; past the last group where there is none."""
    return lax.while_loop(
        lambda w: (w.group < r.groups) & (row_tile >= w.tiles_before + w.tiles_here),
        lambda w: _open(r, w.group + 1, w.rows_before + w.rows_here, w.tiles_before + w.tiles_here),
        walk,
    )


def place(r: SimpleNamespace, walk: Walk, left: jax.Array, column: jax.Array, done: jax.Array) -> Tile:
    """Tile of rows `left` of the walk's group. An expert's tiles are of one height, a multiple of 8, R at most."""
    expert = first = size = index = jnp.int32(0)
    tiles = jnp.int32(1)
    for i, one in enumerate(_sizes(r, walk.group, walk.rows_before)):
        mine = (left >= 0) & (left < one[2])
        found = (walk.group * WALK + i, *one, left)
        before = (expert, first, size, tiles, index)
        expert, first, size, tiles, index = (jnp.where(mine, new, old) for new, old in zip(found, before, strict=True))
        left -= one[2]
    aligned = lax.div(first, jnp.int32(ALIGN))  # in units of 8 rows
    units = lax.div(first - aligned * ALIGN + size + (ALIGN - 1), jnp.int32(ALIGN))
    height = lax.div(units + tiles - 1, tiles)
    wanted = aligned + index * height
    # A tile is read whole, also at the end of the rows.
    start = jnp.minimum(wanted, (r.x_AK.shape[0] - r.tuning.rows) // ALIGN)
    return Tile(
        expert=expert,
        first_row=start * ALIGN,
        first_live=jnp.maximum(first, wanted * ALIGN) - start * ALIGN,
        end_live=jnp.minimum(first + size, (wanted + height) * ALIGN) - start * ALIGN,
        column=column,
        whole=is_whole(r, column),
        done=done,
    )


def is_whole(r: SimpleNamespace, column: jax.Array) -> jax.Array:
    """Whether all blocks of a tile are within the columns."""
    return (column < r.columns - 1) | (not r.uneven)


def wholes_first(r: SimpleNamespace, walk: Walk, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tile of rows of the walk's group, and column, of item `number`.

    Columns fastest, as neighbouring CTAs then share rows, and weights with the next ones. Tiles of one block come after
    all whole ones of their group, whose rows are still in the L2: the shortest items last let CTAs end together.
    """
    left = number - walk.tiles_before * r.columns
    wide = r.columns - r.uneven  # tiles of all blocks
    wholes = walk.tiles_here * wide
    row_tile, column = lax.div(left, jnp.int32(max(wide, 1))), lax.rem(left, jnp.int32(max(wide, 1)))
    short = left >= wholes
    return jnp.where(short, left - wholes, row_tile), jnp.where(short, jnp.int32(wide), column)


def _sizes(r: SimpleNamespace, group: jax.Array, rows_before: jax.Array) -> list[tuple[jax.Array, ...]]:
    """(first row, rows, tiles) of each expert of a group. Tiles start at a multiple of 8."""
    R = r.tuning.rows
    found = []
    for i in range(WALK):
        size = r.size_X[jnp.minimum(group, r.groups - 1) * WALK + i]
        span = lax.rem(rows_before, jnp.int32(ALIGN)) + size
        tiles = jnp.where(size > 0, lax.div(span + (R - 1), jnp.int32(R)), 0)
        found.append((rows_before, size, tiles))
        rows_before += size
    return found


def _open(r: SimpleNamespace, group: jax.Array, rows_before: jax.Array, tiles_before: jax.Array) -> Walk:
    rows_here = tiles_here = jnp.int32(0)
    for _, size, tiles in _sizes(r, group, rows_before):
        rows_here, tiles_here = rows_here + size, tiles_here + tiles
    return Walk(group, rows_before, tiles_before, rows_here, tiles_here)
