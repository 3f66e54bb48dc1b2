"""Rows of sampling whose kept elements are too many for a list: the row is read again and again, three thresholds at a
time, until few elements lie between the bounds; takes a row from select.py, gives it the token.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling.common import (
    CHUNK,
    NEVER,
    Measured,
    draw,
    full,
    key_of,
    load,
    middle_of,
    places,
    search,
    target_of,
    value_of,
    weight_of,
)
from pallas_kernels.sampling.lists import LANES, append

TILE_CHUNKS = 32  # of a tile that is copied at once
_PIECE = (4, CHUNK)  # four elements a thread
_PIECES = TILE_CHUNKS * CHUNK // (4 * LANES)
_BELOW_ALL = float("nan")  # compares false with everything

_SAMPLED = 32  # chunks of a row from which its thresholds are guessed
_EDGE = 0.015  # of the share that is looked for, on both sides: about twice what a sample of 4096 elements is off
_MARGIN = 1 / 16  # of a range, around where a straight line through its ends leads


def token_of_row(r: SimpleNamespace) -> tuple[jax.Array, jax.Array]:
    """The row's token and its number of kept elements."""

    def phase(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, count, mass, _ = state
        for_k = i == 0
        by = _By(for_k, jnp.where(for_k, r.top_k.astype(jnp.float32), r.top_p * mass))
        on = (for_k & r.by_k) | (jnp.logical_not(for_k) & r.by_p)
        return lax.cond(on, lambda: _threshold(r, by, low, count, mass), lambda: state)

    # First top_k's threshold, then top_p's from there on: a loop, so that the code is there once.
    everything = (key_of(jnp.float32(r.lowest)), jnp.int32(r.elements), r.total, jnp.bool_(False))
    low, count, _, on_list = lax.fori_loop(0, 2, phase, everything)
    last = value_of(low)
    return lax.cond(
        on_list & (r.floor <= last),
        lambda: (_draw_with_list(r, last), count),
        lambda: _draw(r, jnp.maximum(last, r.floor)),
    )


class _By(NamedTuple):
    """What a threshold's elements must reach: by number or by mass."""

    number: jax.Array  # bool
    target: jax.Array  # fp32; numbers are below 2^24, so exact

    def of(self, count: jax.Array, mass: jax.Array) -> jax.Array:
        """Which of the two counts."""
        return jnp.where(self.number, count.astype(jnp.float32), mass)

    def enough(self, count: jax.Array, mass: jax.Array) -> jax.Array:
        """True where the target is reached."""
        return self.of(count, mass) >= self.target


def _threshold(
    r: SimpleNamespace, by: _By, low: jax.Array, count: jax.Array, mass: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The largest key from `low` on that is enough; number and mass of the elements from it on; is it of the list?"""
    guessed_low, guessed_high = _guess(r, by, low, by.target / by.of(count, mass))

    def more(state: tuple[jax.Array, ...]) -> jax.Array:
        _, low, high, count, _, count_high, _ = state
        return (low + 1 < high) & (count - count_high > 32 * r.tuning.list_rows)

    def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        turn, low, high, count, mass, count_high, mass_high = state
        # First the guesses of the sample, then around where a straight line would lead, then the range is quartered.
        half = middle_of(low, high)
        quarter, upper = middle_of(low, half), middle_of(half, high)
        wide = high.astype(jnp.float32) - low.astype(jnp.float32)
        top, bottom = by.of(count, mass), by.of(count_high, mass_high)
        line = low + (wide * ((top - by.target) / (top - bottom))).astype(jnp.int32)
        margin = (wide * _MARGIN).astype(jnp.int32) + 1
        half = jnp.where(turn == 0, middle_of(guessed_low, guessed_high), jnp.where(turn == 1, line, half))
        quarter = jnp.where(turn == 0, guessed_low, jnp.where(turn == 1, line - margin, quarter))
        upper = jnp.where(turn == 0, guessed_high, jnp.where(turn == 1, line + margin, upper))
        pivots = [jnp.clip(pivot, low, high - 1) for pivot in (quarter, half, upper)]
        for pivot, found in zip(pivots, _measure(r, [value_of(pivot) for pivot in pivots]), strict=True):
            good = by.enough(*found)
            # Pivots rise: the last good one is the new low, the first bad one the new high.
            count, mass = jnp.where(good, found[0], count), jnp.where(good, found[1], mass)
            low = jnp.where(good, pivot, low)
            lower = jnp.logical_not(good) & (pivot < high)
            count_high, mass_high = jnp.where(lower, found[0], count_high), jnp.where(lower, found[1], mass_high)
            high = jnp.where(lower, pivot, high)
        return turn + 1, low, high, count, mass, count_high, mass_high

    state = (jnp.int32(0), low, r.end, count, mass, jnp.int32(0), jnp.float32(0))
    _, low, high, count, mass, count_high, mass_high = lax.while_loop(more, narrow, state)

    def among_few() -> tuple[jax.Array, ...]:
        _list_between(r, value_of(low), value_of(high))
        x = load(r.value_RL, 1)
        weight = jnp.where(x > NEVER, weight_of(r, x), 0.0)

        def measure(t: jax.Array) -> Measured:
            above = x >= t
            return count_high + above.astype(jnp.int32).sum(), mass_high + jnp.where(above, weight, 0.0).sum()

        best, (best_count, best_mass) = search(
            measure,
            by.enough,
            lambda at_low, at_high: at_low[0] - at_high[0] <= 1,
            low,
            high,
            (count, mass),
            (count_high, mass_high),
        )
        return best, best_count, best_mass, jnp.bool_(True)

    some = (low + 1 < high) & (count - count_high > 1)
    return lax.cond(some, among_few, lambda: (low, count, mass, jnp.bool_(False)))


def _guess(r: SimpleNamespace, by: _By, low: jax.Array, share: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two keys between which the threshold is likely to lie: those of a sample of the row's chunks.

    share: of the number or mass of the elements from `low` on, that those from the threshold on must have.
    """
    step = max(r.chunks // _SAMPLED, 1)
    xs = [load(r.x_BCL.at[r.row, i * step], 1) for i in range(min(_SAMPLED, r.chunks))]
    weights = [jnp.where(by.number, 1.0, weight_of(r, x)) for x in xs]

    def measure(t: jax.Array) -> Measured:
        parts = [jnp.where(x >= t, weight, 0.0) for x, weight in zip(xs, weights, strict=True)]
        return (functools.reduce(operator.add, parts).sum(),)

    whole = measure(value_of(low))

    def reach(share: jax.Array) -> jax.Array:
        key, _ = search(
            measure,
            lambda found: found >= share * whole[0],
            lambda at_low, at_high: at_low[0] - at_high[0] <= _EDGE * whole[0],
            low,
            r.end,
            whole,
            (jnp.float32(0),),
        )
        return key

    return reach(jnp.minimum(share + _EDGE, 1.0)), reach(jnp.maximum(share - _EDGE, 0.0))


def _measure(r: SimpleNamespace, pivots: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """Number and mass of the row's elements from each pivot on."""

    def visit(pieces: list[jax.Array], _: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        new = list(sums)
        for x in pieces:
            weight = weight_of(r, x)
            for i, pivot in enumerate(pivots):
                above = x >= pivot
                new[2 * i] += above.astype(jnp.int32)
                new[2 * i + 1] += jnp.where(above, weight, 0.0)
        return tuple(new)

    zeros = tuple(full(_PIECE, 4, 0, dtype) for _ in pivots for dtype in (jnp.int32, jnp.float32))
    sums = _for_each_tile(r, visit, zeros)
    return [(sums[2 * i].sum(), sums[2 * i + 1].sum()) for i in range(len(pivots))]


def _list_between(r: SimpleNamespace, low: jax.Array, high: jax.Array) -> None:
    """Lists the elements from `low` on and below `high`, which fit into one warp's segment; tile_mass: from high on."""
    r.value_RL[...] = full(r.value_RL.shape, 1, NEVER, jnp.float32)
    r.tile_mass[...] = full(r.tile_mass.shape, 1, 0, jnp.float32)

    def visit(pieces: list[jax.Array], tile: jax.Array, count_T: jax.Array) -> jax.Array:
        above = full(_PIECE, 4, 0, jnp.float32)
        for i, x in enumerate(pieces):
            keep = ((x >= low) & (x < high)).astype(jnp.int32)
            index = places(_PIECE, 4) + (_start(r, tile) * CHUNK + i * 4 * LANES)
            columns = [(r.value_RL, x), (r.index_RL, index)]
            count_T = append(keep, columns, count_T, vec=4, interpreted=r.interpreted)
            above += jnp.where(x >= high, weight_of(r, x), 0.0)
        r.tile_mass[tile] = above.sum()
        return count_T

    _for_each_tile(r, visit, full((LANES,), 1, 0, jnp.int32))
    plgpu.commit_smem()


def _draw_with_list(r: SimpleNamespace, last: jax.Array) -> jax.Array:
    """The token, of the elements from `last` on: those of the list, and those that tile_mass counts."""
    x, index = load(r.value_RL, 1), load(r.index_RL, 1)
    weight = jnp.where(x >= last, weight_of(r, x), 0.0)
    above, place = load(r.tile_mass, 1), places(r.tile_mass.shape, 1)

    def before(tile: jax.Array) -> jax.Array:
        listed = jnp.where(index < tile * (TILE_CHUNKS * CHUNK), weight, 0.0).sum()
        return jnp.where(place < tile, above, 0.0).sum() + listed

    target = target_of(r, before(jnp.int32(r.tiles)))

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = middle_of(low, high)
        good = before(middle) <= target
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    tile, _ = lax.while_loop(lambda ends: ends[0] + 1 < ends[1], halve, (jnp.int32(0), jnp.int32(r.tiles)))
    return _draw_in_tile(r, last, tile, target - before(tile))


def _draw(r: SimpleNamespace, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The token, of the elements from `last` on, and their number, by one more read of the row."""

    def visit(pieces: list[jax.Array], tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        whole, count = state
        mass = full(_PIECE, 4, 0, jnp.float32)
        for x in pieces:
            above = x >= last
            mass += jnp.where(above, weight_of(r, x), 0.0)
            count += above.astype(jnp.int32)
        mass = mass.sum()
        r.tile_mass[tile] = mass
        return whole + mass, count

    whole, count = _for_each_tile(r, visit, (jnp.float32(0), full(_PIECE, 4, 0, jnp.int32)))
    target = target_of(r, whole)

    def find(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tile, before, running = state
        after = running + r.tile_mass[i]
        here = (tile < 0) & (after > target)
        return jnp.where(here, i, tile), jnp.where(here, running, before), after

    tile, before, _ = lax.fori_loop(0, r.tiles, find, (jnp.int32(-1), jnp.float32(0), jnp.float32(0)))
    return _draw_in_tile(r, last, tile, target - before), count.sum()


def _draw_in_tile(r: SimpleNamespace, last: jax.Array, tile: jax.Array, target: jax.Array) -> jax.Array:
    """The token in a tile: where the sum of its elements from `last` on passes the target."""
    start, begin = _start(r, tile), tile * TILE_CHUNKS
    x = load(r.x_BCL.at[r.row, pl.ds(start, TILE_CHUNKS)], 4)
    index = places(x.shape, 4) + start * CHUNK
    weight = jnp.where((x >= last) & (index >= begin * CHUNK), weight_of(r, x), 0.0)
    return draw(weight, index, target, begin * CHUNK)


def _start(r: SimpleNamespace, tile: jax.Array) -> jax.Array:
    """A tile's first chunk; the last tile begins before its first new one, so that it ends with the row."""
    return jnp.minimum(tile * TILE_CHUNKS, r.chunks - TILE_CHUNKS)


def _for_each_tile(r: SimpleNamespace, visit: Callable[[list[jax.Array], jax.Array, Any], Any], state: Any) -> Any:
    """Reads the row through a ring of tiles: visit(its elements in pieces, number of the tile, state) -> state."""
    stages, whole = r.tuning.stages, r.chunks // TILE_CHUNKS

    def copy(tile: jax.Array, slot: jax.Array) -> None:
        chunks = r.x_BCL.at[r.row, pl.ds(_start(r, tile), TILE_CHUNKS)]
        plgpu.copy_gmem_to_smem(chunks, r.tile_SCL.at[slot], r.full.at[slot])

    def step(tile: jax.Array, state: Any, *, masked: bool = False) -> Any:
        slot = lax.rem(tile, jnp.int32(stages))
        plgpu.barrier_wait(r.full.at[slot])
        pieces = [load(r.tile_SCL.at[slot, pl.ds(i * 4, 4)], 4) for i in range(_PIECES)]
        if masked:
            old = (tile * TILE_CHUNKS - _start(r, tile)) * CHUNK  # elements that the tile before had, too
            pieces = [jnp.where(places(_PIECE, 4) >= old - i * 4 * LANES, x, _BELOW_ALL) for i, x in enumerate(pieces)]
        state = visit(pieces, tile, state)
        plgpu.commit_smem()  # all have read the slot before it is filled again
        pl.when(tile + stages < r.tiles)(lambda: copy(tile + stages, slot))
        return state

    for slot in range(min(stages, r.tiles)):
        copy(jnp.int32(slot), jnp.int32(slot))
    state = lax.fori_loop(0, whole, step, state)
    return step(jnp.int32(whole), state, masked=True) if whole < r.tiles else state
