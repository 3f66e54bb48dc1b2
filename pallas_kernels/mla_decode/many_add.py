"""The two adding warpgroups of many_turns.py: take the weights of each page, give each half of the weighted values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grid_sync
from pallas_kernels.merge_slices import Form, merge_slice
from pallas_kernels.mla_decode.common import PAGE_TOKENS, TILE, accumulate, constant
from pallas_kernels.mla_decode.many_common import BLOCK_QUERIES, BOX, ENDS, OWN, REGISTERS, ROW, for_each_item, slot_of
from pallas_kernels.mla_decode.work_list import Meeting
from pallas_kernels.stale_rows import clear_rows

# How a row's parts are merged. Few loads at once: with more, ptxas finds no registers for the queries in the loop.
_MERGES = (Form(4, 4, 2, 512), Form(1 << 30, 8, 1, 512))


def add(r: SimpleNamespace, side: jax.Array) -> None:
    """One of the two adding warpgroups: weighted values of its half of the columns."""
    plgpu.set_max_registers(REGISTERS[0], action="increase")
    tile = (BLOCK_QUERIES, BOX)

    def visit(
        item: jax.Array,
        row: jax.Array,
        length_tokens: jax.Array,
        start: jax.Array,
        end: jax.Array,
        before: jax.Array,
        meeting: Meeting,
    ) -> None:
        def page(index: jax.Array, accs_MC: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            done = before + index - start
            return _page_values(r, side, done + item + 1, done, length_tokens - index * PAGE_TOKENS, accs_MC)

        accs_MC = lax.fori_loop(start, end, page, tuple(constant(0.0, tile, TILE) for _ in range(OWN)))
        turn = lax.rem(item, jnp.int32(ENDS))
        plgpu.barrier_wait(r.end_full.at[turn])
        sum_M = plgpu.load(r.sum_3M.at[turn], layout=ROW, optimized=False)
        # An empty row, or a query token that would stand before the row's first one, has seen nothing.
        share_M = jnp.where(sum_M > 0, 1.0 / sum_M, jnp.zeros_like(sum_M))
        _store(r, side, row, accs_MC, share_M, meeting)

    for_each_item(r, visit)


def _store(
    r: SimpleNamespace,
    side: jax.Array,
    row: jax.Array,
    accs_MC: tuple[jax.Array, ...],
    share_M: jax.Array,
    meeting: Meeting,
) -> None:
    """The end of an item: its row's output if it is the whole row, else partial results, which its parts merge."""
    part = lax.axis_index("part")
    for box, acc in enumerate(accs_MC):
        columns = pl.ds((side * OWN + box) * BOX, BOX)
        value = acc * lax.broadcast_in_dim(share_M, acc.shape, [0])

        @pl.when(meeting.items == 1)
        def _(columns: Any = columns, value: jax.Array = value) -> None:
            r.out_BQR.at[row, r.queries, columns][...] = value.astype(r.out_BQR.dtype)

        @pl.when(meeting.items > 1)
        def _(columns: Any = columns, value: jax.Array = value) -> None:
            r.part_IQR.at[part + row, r.queries, columns][...] = value

    if r.native:
        pl.when(meeting.items > 1)(lambda: _meet(r, side, row, part - meeting.begin, meeting))


def _meet(r: SimpleNamespace, side: jax.Array, row: jax.Array, turn: jax.Array, meeting: Meeting) -> None:
    """Merges a slice of a row once all of its parts have come, if this part has one; of which each side has half."""
    word = r.words_NB.at[r.block, row]
    out_QR = r.out_BQR.at[row, r.queries]

    def store(query: jax.Array, columns: Any, value: jax.Array) -> None:
        out_QR.at[query, columns][...] = value.astype(r.out_BQR.dtype)

    @pl.when(turn < meeting.mergers)
    def _() -> None:
        grid_sync.arrive_and_wait(word, 2 * meeting.items)
        place = {"first": meeting.begin + row, "items": meeting.items}
        turns = {"turn": 2 * turn + side, "turns": 2 * meeting.mergers}
        mine = (r.part_IQR.at[:, r.queries], r.lse_IQ.at[:, r.queries])
        merge_slice(*mine, store, heads=BLOCK_QUERIES, **place, **turns, forms=_MERGES)

    @pl.when(turn >= meeting.mergers)
    def _() -> None:
        grid_sync.arrive(word)


def _page_values(
    r: SimpleNamespace, side: jax.Array, place: jax.Array, done: jax.Array, live: jax.Array, accs: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """One page of an item, at `place` of the ring, after `done` pages of the part.

    live: tokens from this page's first one to the row's end, so 64 and more is a whole page.
    """
    slots = [slot_of(place, side + 2 * box) for box in range(OWN)]
    turn = lax.rem(done, jnp.int32(2))
    plgpu.barrier_wait(r.keep_full.at[turn])
    keep_M = plgpu.load(r.keep_2M.at[turn], layout=ROW, optimized=False)
    accs = tuple(acc * lax.broadcast_in_dim(keep_M, acc.shape, [0]) for acc in accs)
    # The scoring warpgroup has seen all boxes of the page: no wait for them is needed here.
    plgpu.barrier_wait(r.p_full.at[turn])

    @pl.when(live < PAGE_TOKENS)
    def _() -> None:
        for slot in slots:
            clear_rows(r.box_ZKC.at[slot], live, native=r.native)
        plgpu.commit_smem()

    def product(outs: tuple[Any, ...]) -> None:
        for out, slot in zip(outs, slots, strict=True):
            plgpu.wgmma(out, r.p_2MK.at[turn], r.box_ZKC.at[slot])
        for box, slot in enumerate(slots):
            plgpu.wgmma_wait(OWN - 1 - box)
            plgpu.barrier_arrive(r.box_free.at[slot])
        plgpu.barrier_arrive(r.p_free.at[turn])

    return accumulate(product, accs, carried=r.native)
