"""sampling's second kernel: takes the chunks' maxima and masses, reads the few chunks that matter, gives tokens.

One CTA of one warpgroup a row. whole_row.py has what is done for rows that keep too many elements for a list.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sampling.common import (
    CHUNK,
    INFINITE,
    LEAST,
    NEVER,
    PARAMS,
    Tuning,
    draw,
    full,
    key_of,
    load,
    places,
    search,
    target_of,
    value_of,
    weight_of,
)
from pallas_kernels.sampling.lists import LANES, WARPS, append, listed
from pallas_kernels.sampling.whole_row import TILE_CHUNKS, token_of_row

_SLOTS = 4  # chunks of each warp's list in flight
_TOO_MANY = 1 << 30


def select(
    x_BCL: jax.Array,
    max_BC: jax.Array,
    mass_BC: jax.Array,
    numbers: tuple[jax.Array, ...],
    *,
    vocab: int,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Tokens and numbers of kept elements, int32 [B] each.

    max_BC, mass_BC: of chunk_stats. numbers, [B] each: uniform, top_k, top_p, min_p, and for logits log2(e) /
    temperature; for logits min_p is log(min_p) * temperature. vocab: elements of a row that are no filler.
    """
    rows, chunks, _ = x_BCL.shape
    padded, tiles = max_BC.shape[1], -(-chunks // TILE_CHUNKS)
    names = ("uniform_B", "top_k_B", "top_p_B", "min_p_B", "scale_B")[: len(numbers)]

    def sampling_select(*refs: Any, **scratch: Any) -> None:
        named = zip(("x_BCL", "max_BC", "mass_BC", *names, "token_B", "kept_B"), refs, strict=True)
        r = SimpleNamespace(**dict(named), **scratch, row=lax.axis_index("row"))
        r.chunks, r.padded, r.tiles, r.tuning, r.interpreted = chunks, padded, tiles, tuning, interpret is not None
        token, kept = _token(r)
        r.token_B[r.row] = token
        r.kept_B[r.row] = jnp.minimum(kept, vocab)  # where all pass, the filler was counted

    out = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return plgpu.kernel(
        sampling_select,
        out_type=(out, out),
        scratch_types={
            "chunk_RL": plgpu.SMEM((padded // LANES, LANES), jnp.int32),
            "value_RL": plgpu.SMEM((tuning.list_rows, LANES), jnp.float32),
            "index_RL": plgpu.SMEM((tuning.list_rows, LANES), jnp.int32),
            "tile_SCL": plgpu.SMEM((tuning.stages, TILE_CHUNKS, CHUNK), jnp.float32),
            "tile_mass": plgpu.SMEM((-(-tiles // LANES) * LANES,), jnp.float32),
            "full": plgpu.Barrier(num_barriers=tuning.stages),
        },
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
        compiler_params=PARAMS,
    )(x_BCL, max_BC, mass_BC, *numbers)


def _token(r: SimpleNamespace) -> tuple[jax.Array, jax.Array]:
    """The row's token and its number of kept elements."""
    place = places((r.padded,), 1)
    maxima = jnp.where(place < r.chunks, load(r.max_BC.at[r.row], 1), NEVER)
    masses = jnp.where(place < r.chunks, load(r.mass_BC.at[r.row], 1), 0.0)
    r.scale = r.scale_B[r.row] if hasattr(r, "scale_B") else None
    r.peak = maxima.max()
    if r.scale is not None:
        masses = masses * weight_of(r, jnp.maximum(maxima, LEAST))
    r.total, r.elements = masses.sum(), r.chunks * CHUNK
    r.top_k, r.top_p, min_p = r.top_k_B[r.row], r.top_p_B[r.row], r.min_p_B[r.row]
    r.by_k, r.by_p = (r.top_k > 0) & (r.top_k < r.elements), r.top_p < 1.0
    # lowest: of all elements. floor: what min_p keeps. end: a key above all.
    r.lowest, r.floor = (0.0, r.peak * min_p) if r.scale is None else (NEVER, r.peak + min_p)
    r.end = key_of(r.peak) + 1

    # A heavy branch is the one taken where the condition is true: the other is lowered twice.
    def filtered() -> tuple[jax.Array, jax.Array]:
        low, likely = _first_threshold(r, maxima, masses)
        largest = lax.cond(likely, lambda: _fill_lists(r, maxima, place, low), lambda: jnp.int32(_TOO_MANY))
        few, many = r.tuning.few_rows, r.tuning.list_rows
        branch = jnp.where(largest <= 32 * few, 0, jnp.where(largest <= 32 * many, 1, 2))
        found, token, kept = lax.switch(
            branch,
            [
                lambda: _token_of_list(r, few, low),
                lambda: _token_of_list(r, many, low),
                lambda: (jnp.bool_(False), jnp.int32(0), jnp.int32(0)),
            ],
        )
        return lax.cond(jnp.logical_not(found), lambda: token_of_row(r), lambda: (token, kept))

    def some_token() -> tuple[jax.Array, jax.Array]:
        some_filter = r.by_k | r.by_p | (r.floor > r.lowest)
        return lax.cond(some_filter, filtered, lambda: (_token_of_chunks(r, masses, place), jnp.int32(r.elements)))

    return lax.cond((r.total > 0) & (r.total < INFINITE), some_token, lambda: (jnp.int32(0), jnp.int32(0)))


def _first_threshold(r: SimpleNamespace, maxima: jax.Array, masses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A value from which on all that is kept can be listed, and whether it is likely to be one.

    Maxima are elements: where so many of them reach a value, or so much mass, at least as many elements do.
    """
    wanted = jnp.where(r.by_k, r.top_k, min(r.tuning.guess, r.chunks))
    target = jnp.where(r.by_k, INFINITE, r.top_p * r.total)
    peaks = jnp.where(maxima > NEVER, weight_of(r, maxima), 0.0)

    def measure(t: jax.Array) -> tuple[jax.Array, jax.Array]:
        above = maxima >= t
        return above.astype(jnp.int32).sum(), jnp.where(above, peaks, 0.0).sum()

    low, _ = search(
        measure,
        lambda count, mass: (count >= wanted) | (mass >= target),
        lambda at_low, _: at_low[0] <= wanted + (wanted >> 3),
        key_of(jnp.where(maxima > NEVER, maxima, r.peak).min()),
        r.end,
        (jnp.int32(r.padded), jnp.float32(0)),
        (jnp.int32(0), jnp.float32(0)),
    )
    low = value_of(low)
    likely = (wanted <= r.chunks) & (jnp.where(maxima >= low, masses, 0.0).sum() >= jnp.where(r.by_k, 0.0, target))
    # Without top_k nothing below min_p's floor need be looked at; with min_p alone the floor is the threshold.
    only_floor = jnp.logical_not(r.by_k | r.by_p)
    low = jnp.where(r.by_k, low, jnp.where(only_floor, r.floor, jnp.maximum(low, r.floor)))
    return low, likely | (jnp.logical_not(r.by_k) & (low <= r.floor))


def _fill_lists(r: SimpleNamespace, maxima: jax.Array, place: jax.Array, low: jax.Array) -> jax.Array:
    """Lists the row's elements from `low` on; gives back the largest number that a warp found."""
    r.chunk_RL[...] = full(r.chunk_RL.shape, 1, -1, jnp.int32)
    r.value_RL[...] = full(r.value_RL.shape, 1, NEVER, jnp.float32)
    nobody = full((LANES,), 1, 0, jnp.int32)
    wanted = (maxima >= low).astype(jnp.int32)
    count_T = append(wanted, [(r.chunk_RL, place)], nobody, vec=1, interpreted=r.interpreted)
    plgpu.commit_smem()
    inside = places((CHUNK,), 1)

    def some(i: jax.Array, count_T: jax.Array) -> jax.Array:
        loaded = []
        for slot in range(_SLOTS):
            for warp in range(WARPS):
                chunk = r.chunk_RL[listed(i * _SLOTS + slot, warp)]
                least = jnp.where(chunk >= 0, low, INFINITE)
                chunk = jnp.maximum(chunk, 0)
                loaded.append((load(r.x_BCL.at[r.row, chunk], 1), inside + chunk * CHUNK, least))
        for x, index, least in loaded:
            columns = [(r.value_RL, x), (r.index_RL, index)]
            count_T = append((x >= least).astype(jnp.int32), columns, count_T, vec=1, interpreted=r.interpreted)
        return count_T

    count_T = lax.fori_loop(0, lax.div(count_T.max() + (_SLOTS - 1), jnp.int32(_SLOTS)), some, nobody)
    plgpu.commit_smem()
    return count_T.max()


def _token_of_list(r: SimpleNamespace, rows: int, low: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether the list's first `rows` hold all that is kept; if so, the token and the number kept."""
    x, index = load(r.value_RL.at[pl.ds(0, rows)], 1), load(r.index_RL.at[pl.ds(0, rows)], 1)
    weight = jnp.where(x > NEVER, weight_of(r, x), 0.0)

    def count(t: jax.Array) -> jax.Array:
        return (x >= t).astype(jnp.int32).sum()

    def mass(t: jax.Array) -> jax.Array:
        return jnp.where(x >= t, weight, 0.0).sum()

    nothing = (jnp.int32(0), jnp.float32(0))
    by_k, (n_k,) = search(
        lambda t: (count(t),),
        lambda found: found >= r.top_k,
        lambda at_low, _: (at_low[0] == r.top_k) | jnp.logical_not(r.by_k),
        key_of(low),
        r.end,
        (count(low),),
        nothing[:1],
    )
    within = mass(value_of(by_k))
    target = r.top_p * jnp.where(r.by_k, within, r.total)
    reached = within >= target
    by_p, _ = search(
        lambda t: (count(t), mass(t)),
        lambda _, found: found >= target,
        lambda at_low, at_high: (at_low[0] - at_high[0] <= 1) | jnp.logical_not(r.by_p & reached),
        by_k,
        r.end,
        (n_k, within),
        nothing,
    )
    last = jnp.maximum(value_of(by_p), r.floor)
    weight = jnp.where(x >= last, weight, 0.0)
    token = draw(weight, index, target_of(r, weight.sum()), jnp.int32(0))
    return r.by_k | jnp.logical_not(r.by_p) | reached | (low <= r.floor), token, count(last)


def _token_of_chunks(r: SimpleNamespace, masses: jax.Array, place: jax.Array) -> jax.Array:
    """Nothing is left out: the chunk, then the element in it."""
    target = target_of(r, r.total)
    chunk = draw(masses, place, target, jnp.int32(0))
    before = jnp.where(place < chunk, masses, 0.0).sum()
    weight = weight_of(r, load(r.x_BCL.at[r.row, chunk], 1))
    return draw(weight, places((CHUNK,), 1) + chunk * CHUNK, target - before, chunk * CHUNK)
