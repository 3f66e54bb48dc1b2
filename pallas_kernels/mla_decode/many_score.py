"""The scoring warpgroup of many_turns.py: takes a part's queries and pages, gives the weights of each page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.common import NEVER, PAGE_TOKENS, TILE, constant
from pallas_kernels.mla_decode.many_common import (
    BLOCK_QUERIES,
    BOX,
    BOXES,
    ENDS,
    HELD,
    REGISTERS,
    ROW,
    STAGES,
    for_each_item,
    slot_of,
)
from pallas_kernels.mla_decode.work_list import Meeting


def score(r: SimpleNamespace) -> None:
    """The scoring warpgroup: weights of each page, and by what earlier sums shrink, to the adding warpgroups."""
    plgpu.set_max_registers(REGISTERS[1], action="increase" if REGISTERS[1] > 128 else "decrease")
    hidden = _hidden(r)

    def visit(
        item: jax.Array,
        row: jax.Array,
        length_tokens: jax.Array,
        start: jax.Array,
        end: jax.Array,
        before: jax.Array,
        meeting: Meeting,
    ) -> None:
        queries = _take_queries(r, before + item)

        def page(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            done = before + index - start
            live = length_tokens - index * PAGE_TOKENS
            return _page_weights(r, queries, done + item + 1, done, index > start, live, hidden, state)

        start_state = (constant(NEVER, (BLOCK_QUERIES,), ROW), constant(0.0, (BLOCK_QUERIES,), ROW))
        max_M, sum_M = lax.fori_loop(start, end, page, start_state)
        plgpu.barrier_arrive(r.p_full.at[lax.rem(before + end - start - 1, jnp.int32(2))])
        # Three places: of the item before the last but one, all values have been added, so its end has been read.
        turn = lax.rem(item, jnp.int32(ENDS))
        r.sum_3M.at[turn][...] = sum_M

        @pl.when(meeting.items > 1)
        def _() -> None:
            # NEVER, not the logarithm of 0, where nothing was seen: the merge then gives 0, not NaN.
            lse_M = jnp.where(sum_M > 0, max_M + jnp.log2(sum_M), jnp.full_like(sum_M, NEVER))
            r.lse_IQ.at[lax.axis_index("part") + row, r.queries][...] = lse_M

        plgpu.barrier_arrive(r.end_full.at[turn])

    pages = for_each_item(r, visit)[1]

    @pl.loop(jnp.maximum(pages - 2, 0), pages)
    def _(done: jax.Array) -> None:
        plgpu.barrier_wait(r.p_free.at[lax.rem(done, jnp.int32(2))])


def _hidden(r: SimpleNamespace) -> Any:
    """How many of a row's last tokens each query does not see: none for the last query token (and padding)."""
    if r.tokens == 1:
        return 0
    query_M = plgpu.broadcasted_iota(jnp.int32, (BLOCK_QUERIES,), 0, layout=ROW) + r.queries.start
    return sum((query_M < token * r.token_heads).astype(jnp.int32) for token in range(1, r.tokens))


def _take_queries(r: SimpleNamespace, place: jax.Array) -> list[Any]:
    """The queries off the ring, as operands: the rotated part, then boxes in the ring's order."""
    stage = lax.rem(place, jnp.int32(STAGES))
    plgpu.barrier_wait(r.rope_full.at[stage])
    held = [plgpu.load(r.rope_UKJ.at[stage], layout=TILE)]
    slots = [slot_of(place, box) for box in range(BOXES)]
    for box, slot in enumerate(slots):
        plgpu.barrier_wait(r.box_full.at[slot])
        if box < HELD:
            held.append(plgpu.load(r.box_ZKC.at[slot], layout=TILE))
        else:
            for column in range(0, BOX, 64):  # for the sake of registers
                value = plgpu.load(r.box_ZKC.at[slot, :, pl.ds(column, 64)], layout=TILE)
                r.q_MR.at[:, pl.ds((box - HELD) * BOX + column, 64)][...] = value
    if not r.native:
        places = [r.held_MJ, *(r.held_MR.at[:, pl.ds(box * BOX, BOX)] for box in range(HELD))]
        for there, value in zip(places, held, strict=True):
            there[...] = value
        held = places
    plgpu.commit_smem()  # of what is written, for wgmma, and of what is read, for the copies that take its place
    plgpu.barrier_arrive(r.rope_free.at[stage])
    for slot in slots:
        plgpu.barrier_arrive(r.box_free.at[slot])
    return held + [r.q_MR.at[:, pl.ds(box * BOX, BOX)] for box in range(BOXES - HELD)]


def _page_weights(
    r: SimpleNamespace,
    queries: list[Any],
    place: jax.Array,
    done: jax.Array,
    later: jax.Array,
    live: jax.Array,
    hidden: Any,
    state: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """One page of an item, at `place` of the ring, after `done` pages of the part; later: not the item's first.

    live: tokens from this page's first one to the row's end, so 64 and more is a whole page; hidden: see _hidden.
    """
    max_M, sum_M = state
    tile = (BLOCK_QUERIES, PAGE_TOKENS)
    stage = lax.rem(place, jnp.int32(STAGES))
    turn = lax.rem(done, jnp.int32(2))

    def scores(out: Any) -> jax.Array:
        plgpu.barrier_wait(r.rope_full.at[stage])
        plgpu.wgmma(out, queries[0], r.rope_UKJ.at[stage].T)
        for box in range(BOXES):
            slot = slot_of(place, box)
            plgpu.barrier_wait(r.box_full.at[slot])
            plgpu.wgmma(out, queries[1 + box], r.box_ZKC.at[slot].T)
        plgpu.wgmma_wait(1)
        # Now it is the turn of the values of the page before: they would only slow these scores.
        pl.when(later)(lambda: plgpu.barrier_arrive(r.p_full.at[1 - turn]))
        return out[...]

    score_MK = pl.run_scoped(scores, plgpu.ACC(tile, jnp.float32))
    plgpu.barrier_arrive(r.rope_free.at[stage])

    def masked(score_MK: jax.Array) -> jax.Array:
        token_MK = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=TILE)
        live_MK = live - hidden if r.tokens == 1 else lax.broadcast_in_dim(live - hidden, tile, [0])
        return jnp.where(token_MK < live_MK, score_MK, -jnp.inf)

    score_MK = lax.cond(live < PAGE_TOKENS + r.tokens - 1, masked, lambda score_MK: score_MK, score_MK)
    new_max_M = jnp.maximum(max_M, score_MK.max(axis=1) * r.scale)
    keep_M = jnp.exp2(max_M - new_max_M)
    # The values of two pages before, whose places these are, had their turn before these scores.
    pl.when(done >= 2)(lambda: plgpu.barrier_wait(r.p_free.at[turn]))
    # Given early, so that sums shrink while weights are made.
    r.keep_2M.at[turn][...] = keep_M
    plgpu.barrier_arrive(r.keep_full.at[turn])
    weight_MK = jnp.exp2(score_MK * r.scale - lax.broadcast_in_dim(new_max_M, tile, [0]))
    sum_M = sum_M * keep_M + weight_MK.sum(axis=1)
    r.p_2MK.at[turn][...] = weight_MK.astype(r.p_2MK.dtype)
    plgpu.commit_smem()
    return new_max_M, sum_M
