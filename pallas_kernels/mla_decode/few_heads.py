"""The Hopper kernel of mla_decode for few heads: tokens on wgmma's M axis, heads on N: 16 heads cost 16 columns.

S^T = K Q^T, O^T = V^T P^T. One computing warpgroup a CTA, because a maximum over M crosses its warps through a scratch
of which a CTA has one; one CTA an SM; a ring of thirds of pages (64 tokens x 192 columns), so that what has been used
is refilled while the rest of its page is not. The parts of a row meet and merge it, or a second kernel does (merge.py).
NOTES.md has the design and figures.
Dimension keys beyond the contract's: A parts, I items (see split.py), W words of a record, H the heads of all query
tokens, padded, J rope dimensions, Z slots of the ring, C columns of a third, V columns of a third that are values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grid_sync
from pallas_kernels.merge_slices import Form, merge_slice
from pallas_kernels.mla_decode.common import (
    LATENT_DIM,
    NEVER,
    PAGE_TOKENS,
    RANK,
    SWIZZLED,
    TILE,
    Tuning,
    accumulate,
    constant,
    for_each_page,
)
from pallas_kernels.mla_decode.merge import merge
from pallas_kernels.mla_decode.work_list import Meeting, record, records
from pallas_kernels.split import Split, num_items, unit_pages
from pallas_kernels.stale_rows import clear_rows

_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value a head
_THIRDS = 3
_WIDTH = LATENT_DIM // _THIRDS
_VALUES = tuple(min(_WIDTH, RANK - third * _WIDTH) for third in range(_THIRDS))  # value columns of each third
_COMPUTE, _COPY = range(2)
# How a row's parts are merged. 64 registers of loads in flight, or 33: latency is all that counts here.
_MERGES = (Form(2, 2, 8, 512), Form(4, 4, 4, 512), Form(8, 8, 2, 512), Form(16, 16, 1, 512), Form(1 << 30, 33, 1, 128))


def decode(
    q_BHR: jax.Array,
    rope_q_BHJ: jax.Array,
    latent_PKL: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    split: Split,
    *,
    queries: int,
    tokens: int,
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """out [B, queries, rank].

    q_BHR, rope_q_BHJ: the two parts of the queries, `tokens` of them for each head, token by token; past `queries` is
    padding, up to a multiple of 8 and to 16.
    """
    rows, padded, _ = q_BHR.shape
    items, slots, dtype = num_items(tuning.parts, rows), tuning.slots, q_BHR.dtype
    sizes = {
        "heads": padded,
        "tokens": tokens,
        "token_heads": queries // tokens,
        "slots": slots,
        "scale": scale * math.log2(math.e),
        # The interpreter knows no accumulator that is carried in; on the GPU any other form spills registers. Nor does
        # it know how CTAs meet.
        "carried": interpret is None,
        "fused": tuning.fused and interpret is None,
    }

    def mla_decode_few_heads(*refs: Any, **scratch: Any) -> None:
        names = ("record_AW", "words_B", "table_BM", "length_B", "q_BHR", "rope_q_BHJ", "latent_PKL")
        names += ("out_BHR", "part_IHR", "lse_IH")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == _COMPUTE)(lambda: _compute(r))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    call = plgpu.kernel(
        mla_decode_few_heads,
        out_type=(
            jax.ShapeDtypeStruct((rows, queries, RANK), dtype),
            jax.ShapeDtypeStruct((items, padded, RANK), jnp.float32),
            jax.ShapeDtypeStruct((items, padded), jnp.float32),
        ),
        scratch_types={
            "q_HR": plgpu.SMEM((padded, RANK), dtype, transforms=SWIZZLED),
            "rope_q_HJ": plgpu.SMEM((padded, LATENT_DIM - RANK), dtype, transforms=SWIZZLED),
            "ring_ZKC": plgpu.SMEM((slots, PAGE_TOKENS, _WIDTH), dtype, transforms=SWIZZLED),
            "p_HK": plgpu.SMEM((padded, PAGE_TOKENS), dtype, transforms=SWIZZLED),
            "o_HV": tuple(plgpu.SMEM((padded, values), dtype) for values in _VALUES),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "full": plgpu.Barrier(num_barriers=slots),
            "free": plgpu.Barrier(num_barriers=slots),
        },
        grid=(tuning.parts,),
        grid_names=("part",),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    lists = (records(length_B, split, page_tokens=PAGE_TOKENS), grid_sync.zero_words(length_B), table_BM, length_B)
    out_BHR, part_IHR, lse_IH = call(*lists, q_BHR, rope_q_BHJ, latent_PKL)
    return out_BHR if sizes["fused"] else merge(out_BHR, part_IHR, lse_IH, split, tuning=tuning, interpret=interpret)


def for_each_item(r: SimpleNamespace, visit: Callable[..., None]) -> jax.Array:
    """visit(row, its tokens, first page, end page, pages before, meeting) for each item of a part; gives its pages."""
    mine = record(r.record_AW, lax.axis_index("part"))

    def item(row: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        before, start, end, length = state
        # The next row's length is read early: its latency hides behind this row. Nor does a start wait for a length.
        next_length = r.length_B[jnp.minimum(row + 1, mine.last)]
        meetings = zip(mine.at_first, mine.at_last, Meeting(1, 0, 1), strict=True)
        meeting = [jnp.where(row == mine.first, a, jnp.where(row == mine.last, b, c)) for a, b, c in meetings]
        visit(row, length, start, end, before, Meeting(*meeting))
        next_end = jnp.where(row + 1 == mine.last, mine.last_end, unit_pages(next_length, PAGE_TOKENS))
        return before + end - start, jnp.int32(0), next_end, next_length

    start = (jnp.int32(0), mine.first_page, mine.first_end, mine.first_length)
    return lax.fori_loop(mine.first, mine.last + 1, item, start)[0]


def _slot(r: SimpleNamespace, page: jax.Array, third: int) -> jax.Array:
    """Where a third of the part's n-th page lies in the ring."""
    return lax.rem(page * _THIRDS + third, jnp.int32(r.slots))


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: thirds of pages, as far ahead as the ring allows."""

    def visit(row: jax.Array, _: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array, *_more: Any) -> None:
        def page(index: jax.Array, page_id: jax.Array) -> None:
            for third in range(_THIRDS):
                place = before + index - start
                slot = _slot(r, place, third)
                pl.when(place * _THIRDS + third >= r.slots)(lambda slot=slot: plgpu.barrier_wait(r.free.at[slot]))
                source = r.latent_PKL.at[page_id, :, pl.ds(third * _WIDTH, _WIDTH)]
                plgpu.copy_gmem_to_smem(source, r.ring_ZKC.at[slot], r.full.at[slot])

        for_each_page(r, row, start, end, page)

    pages = for_each_item(r, visit)

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(pages * _THIRDS - r.slots, 0), pages * _THIRDS)
    def _(piece: jax.Array) -> None:
        plgpu.barrier_wait(r.free.at[lax.rem(piece, jnp.int32(r.slots))])


def _compute(r: SimpleNamespace) -> None:
    """The computing warpgroup: softmax over the pages of each item, its running maximum kept in base 2."""
    part = lax.axis_index("part")

    def visit(
        row: jax.Array, tokens: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array, meeting: Meeting
    ) -> None:
        plgpu.copy_gmem_to_smem(r.q_BHR.at[row], r.q_HR, r.q_full)
        plgpu.copy_gmem_to_smem(r.rope_q_BHJ.at[row], r.rope_q_HJ, r.q_full)
        plgpu.barrier_wait(r.q_full)

        def page(index: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            return _page(r, before + index - start, tokens - index * PAGE_TOKENS, state)

        state = (
            tuple(constant(0.0, (values, r.heads), TILE) for values in _VALUES),
            constant(NEVER, (r.heads,), _COLUMN),
            constant(0.0, (PAGE_TOKENS, r.heads), TILE),
        )
        accs_VH, max_H, sum_KH = lax.fori_loop(start, end, page, state)
        sum_H = sum_KH.sum(axis=0)
        accs_VH = tuple(acc / lax.broadcast_in_dim(sum_H, acc.shape, [1]) for acc in accs_VH)
        if r.tokens > 1:
            # A query token that would stand before the row's first sees nothing: its weights are all alike.
            sees_VH = [tokens > hidden_tokens(r, acc.shape) for acc in accs_VH]
            none_VH = [constant(0.0, acc.shape, TILE) for acc in accs_VH]
            accs_VH = tuple(map(jnp.where, sees_VH, accs_VH, none_VH))

        @pl.when(meeting.items == 1)
        def _() -> None:
            heads = pl.ds(0, r.out_BHR.shape[1])
            for acc, stage in zip(accs_VH, r.o_HV, strict=True):
                stage.T[...] = turned(acc, stage.dtype)
            plgpu.commit_smem()
            for third, stage in enumerate(r.o_HV):
                plgpu.copy_smem_to_gmem(stage.at[heads], r.out_BHR.at[row, :, _values(third)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(meeting.items > 1)
        def _() -> None:
            for third, acc in enumerate(accs_VH):
                r.part_IHR.at[part + row, :, _values(third)].T[...] = turned(acc, jnp.float32)
            r.lse_IH.at[part + row][...] = max_H + jnp.log2(sum_H)
            if r.fused:
                _meet(r, row, part - meeting.begin, meeting)

    for_each_item(r, visit)


def _meet(r: SimpleNamespace, row: jax.Array, turn: jax.Array, meeting: Meeting) -> None:
    """Merges a slice of a row once all of its parts have come, if this part has one."""

    def store(head: jax.Array, columns: Any, value: jax.Array) -> None:
        r.out_BHR.at[row, head, columns][...] = value.astype(r.out_BHR.dtype)

    @pl.when(turn < meeting.mergers)
    def _() -> None:
        grid_sync.arrive_and_wait(r.words_B.at[row], meeting.items)
        place = {"first": meeting.begin + row, "items": meeting.items, "turn": turn, "turns": meeting.mergers}
        merge_slice(r.part_IHR, r.lse_IH, store, heads=r.out_BHR.shape[1], **place, forms=_MERGES)

    @pl.when(turn >= meeting.mergers)
    def _() -> None:
        grid_sync.arrive(r.words_B.at[row])


def _page(r: SimpleNamespace, place: jax.Array, live: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """One page of an item; live: tokens from this page's first one to the row's end, so 64 and more is a whole page.

    sum_KH stays a tile, one sum for each place of a page: it is summed over tokens once an item.
    """
    accs_VH, max_H, sum_KH = state
    tile = (PAGE_TOKENS, r.heads)
    slots = [_slot(r, place, third) for third in range(_THIRDS)]

    def scores(out: Any) -> jax.Array:
        for third, slot in enumerate(slots):
            plgpu.barrier_wait(r.full.at[slot])
            plgpu.wgmma(out, r.ring_ZKC.at[slot, :, pl.ds(0, _VALUES[third])], r.q_HR.at[:, _values(third)].T)
        rope = r.ring_ZKC.at[slots[-1], :, pl.ds(_VALUES[-1], LATENT_DIM - RANK)]
        plgpu.wgmma(out, rope, r.rope_q_HJ.T)
        return out[...]

    score_KH = pl.run_scoped(scores, plgpu.ACC(tile, jnp.float32)) * r.scale
    token_KH = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=TILE)
    score_KH = jnp.where(token_KH < live - hidden_tokens(r, tile), score_KH, NEVER)
    new_max_H = jnp.maximum(max_H, score_KH.max(axis=0))
    keep_H = jnp.exp2(max_H - new_max_H)
    weight_KH = jnp.exp2(score_KH - lax.broadcast_in_dim(new_max_H, tile, [1]))
    sum_KH = sum_KH * lax.broadcast_in_dim(keep_H, tile, [1]) + weight_KH
    weight_KH = plgpu.layout_cast(weight_KH.astype(r.p_HK.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    r.p_HK.T[...] = weight_KH
    accs_VH = tuple(acc * lax.broadcast_in_dim(keep_H, acc.shape, [1]) for acc in accs_VH)

    @pl.when(live < PAGE_TOKENS)
    def _() -> None:
        for slot in slots:
            clear_rows(r.ring_ZKC.at[slot], live, native=r.carried)

    plgpu.commit_smem()

    def add(outs: tuple[Any, ...]) -> None:
        for out, slot, values in zip(outs, slots, _VALUES, strict=True):
            plgpu.wgmma(out, r.ring_ZKC.at[slot, :, pl.ds(0, values)].T, r.p_HK.T)
        for third, slot in enumerate(slots):
            plgpu.wgmma_wait(_THIRDS - 1 - third)
            plgpu.barrier_arrive(r.free.at[slot])

    return accumulate(add, accs_VH, carried=r.carried), new_max_H, sum_KH


def hidden_tokens(r: SimpleNamespace, tile: tuple[int, int]) -> Any:
    """How many of a row's last tokens each column does not see: none for the last query token (and padding)."""
    if r.tokens == 1:
        return 0
    column = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=TILE)
    later = r.tokens - 1
    return sum((column < token * r.token_heads).astype(jnp.int32) for token in range(1, later + 1))


def _values(third: int) -> Any:
    """The value columns of a third."""
    return pl.ds(third * _WIDTH, _VALUES[third])


def turned(acc_VH: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """In the layout in which the transposed array is stored."""
    return plgpu.layout_cast(acc_VH.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
