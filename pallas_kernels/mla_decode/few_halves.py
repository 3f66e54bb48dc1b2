"""A second form of few_heads.py, with two computing warpgroups: each owns half of a page's columns.

It makes half of the products of a score, which the two exchange, and half of the values; so each reads its own half of
a page only, and the way from a page's arrival to its place's release is half as long. NOTES.md says what is measured.
Dimension keys as in few_heads.py; Z pages in shared memory, C columns of a half page, V those that are values.
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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels import grid_sync
from pallas_kernels.mla_decode.common import (
    LATENT_DIM,
    NEVER,
    PAGE_TOKENS,
    RANK,
    SWIZZLED,
    TILE,
    Tuning,
    accumulate,
    clear_stale,
    constant,
    for_each_page,
)
from pallas_kernels.mla_decode.few_heads import for_each_item, hidden_tokens, turned
from pallas_kernels.mla_decode.few_merge import Form, merge_slice
from pallas_kernels.mla_decode.merge import merge
from pallas_kernels.mla_decode.work_list import Meeting, records
from pallas_kernels.split import Split, num_items

_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value a head
_SIDES = 2
_LEFT, _RIGHT, _COPY = range(3)
_OWN = RANK // _SIDES  # value columns of a half page
_WIDTHS = (_OWN, LATENT_DIM - _OWN)  # columns of the halves: the right one has the rotated key
_STAGED = _OWN // 2  # columns of a result that go to the output at once
_STAGES = 2  # pages in shared memory
_REGISTERS = (232, 40)  # of a thread of the computing and the copying warpgroups
_FORMS = (Form(2, 2, 8, _OWN), Form(8, 8, 2, _OWN), Form(16, 16, 1, _OWN), Form(1 << 30, 33, 1, _OWN // 2))
_SCRATCH = 512  # floats: two registers of each thread cross a warpgroup's warps at once


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
    """As few_heads.decode."""
    rows, padded, _ = q_BHR.shape
    items, dtype = num_items(tuning.parts, rows), q_BHR.dtype
    sizes = {
        "heads": padded,
        "tokens": tokens,
        "token_heads": queries // tokens,
        "scale": scale * math.log2(math.e),
        # The interpreter knows no accumulator that is carried in; on the GPU any other form spills registers. Nor does
        # it know inline code.
        "native": interpret is None,
        "fused": tuning.fused and interpret is None,
    }

    def mla_decode_few_halves(*refs: Any, **scratch: Any) -> None:
        names = ("record_AW", "words_2B", "table_BM", "length_B", "q_BHR", "rope_q_BHJ", "latent_PKL")
        names += ("out_BHR", "part_IHR", "lse_2IH")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == _LEFT)(lambda: _compute(r, _LEFT))
        pl.when(warpgroup == _RIGHT)(lambda: _compute(r, _RIGHT))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    def each_side(make: Callable[[int], Any]) -> tuple[Any, ...]:
        return tuple(make(side) for side in range(_SIDES))

    call = plgpu.kernel(
        mla_decode_few_halves,
        out_type=(
            jax.ShapeDtypeStruct((rows, queries, RANK), dtype),
            jax.ShapeDtypeStruct((items, padded, RANK), jnp.float32),
            jax.ShapeDtypeStruct((_SIDES, items, padded), jnp.float32),
        ),
        scratch_types={
            "q_HR": plgpu.SMEM((padded, RANK), dtype, transforms=SWIZZLED),
            "rope_q_HJ": plgpu.SMEM((padded, LATENT_DIM - RANK), dtype, transforms=SWIZZLED),
            "half_ZKC": each_side(
                lambda side: plgpu.SMEM((_STAGES, PAGE_TOKENS, _WIDTHS[side]), dtype, transforms=SWIZZLED)
            ),
            "swap_KH": each_side(lambda _: plgpu.SMEM((PAGE_TOKENS, padded), jnp.float32)),
            "p_HK": each_side(lambda _: plgpu.SMEM((padded, PAGE_TOKENS), dtype, transforms=SWIZZLED)),
            "o_HV": each_side(lambda _: plgpu.SMEM((padded, _STAGED), dtype)),
            "scratch": each_side(lambda _: plgpu.SMEM((_SCRATCH,), jnp.float32)),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "q_free": plgpu.Barrier(),
            "full": each_side(lambda _: plgpu.Barrier(num_barriers=_STAGES)),
            "free": each_side(lambda _: plgpu.Barrier(num_barriers=_STAGES)),
            "swap_full": each_side(lambda _: plgpu.Barrier()),
            "swap_free": each_side(lambda _: plgpu.Barrier()),
        },
        grid=(tuning.parts,),
        grid_names=("part",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        # No reduction of Pallas' own goes over warps, see _over_tokens.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    words_2B = grid_sync.zero_words(jnp.broadcast_to(length_B, (_SIDES, rows)))
    lists = (records(length_B, split, page_tokens=PAGE_TOKENS), words_2B, table_BM, length_B)
    out_BHR, part_IHR, lse_2IH = call(*lists, q_BHR, rope_q_BHJ, latent_PKL)
    if sizes["fused"]:
        return out_BHR
    return merge(out_BHR, part_IHR, lse_2IH[0], split, tuning=tuning, interpret=interpret)


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: halves of pages, as far ahead as there is room."""
    plgpu.set_max_registers(_REGISTERS[1], action="decrease")

    def visit(row: jax.Array, _: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array, *_more: Any) -> None:
        def page(index: jax.Array, page_id: jax.Array) -> None:
            place = before + index - start
            stage = lax.rem(place, jnp.int32(_STAGES))
            for side in range(_SIDES):
                pl.when(place >= _STAGES)(lambda side=side: plgpu.barrier_wait(r.free[side].at[stage]))
                source = r.latent_PKL.at[page_id, :, pl.ds(side * _OWN, _WIDTHS[side])]
                plgpu.copy_gmem_to_smem(source, r.half_ZKC[side].at[stage], r.full[side].at[stage])

        for_each_page(r, row, start, end, page)

    pages = for_each_item(r, visit)

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(pages - _STAGES, 0), pages)
    def _(place: jax.Array) -> None:
        for side in range(_SIDES):
            plgpu.barrier_wait(r.free[side].at[lax.rem(place, jnp.int32(_STAGES))])


def _compute(r: SimpleNamespace, side: int) -> None:
    """A computing warpgroup: softmax over the pages of each item, its running maximum kept in base 2.

    Both compute the same weights, bit for bit, from the same sums of two halves.
    """
    part = lax.axis_index("part")
    plgpu.set_max_registers(_REGISTERS[0], action="increase")

    def visit(
        row: jax.Array, tokens: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array, meeting: Meeting
    ) -> None:
        if side == _LEFT:
            plgpu.copy_gmem_to_smem(r.q_BHR.at[row], r.q_HR, r.q_full)
            plgpu.copy_gmem_to_smem(r.rope_q_BHJ.at[row], r.rope_q_HJ, r.q_full)
        plgpu.barrier_wait(r.q_full)

        def page(index: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            return _page(r, side, before + index - start, tokens - index * PAGE_TOKENS, state)

        state = (
            tuple(constant(0.0, (_STAGED, r.heads), TILE) for _ in range(_OWN // _STAGED)),
            constant(NEVER, (r.heads,), _COLUMN),
            constant(0.0, (PAGE_TOKENS, r.heads), TILE),
        )
        accs_VH, max_H, sum_KH = lax.fori_loop(start, end, page, state)
        # The queries are read, before the left side copies the next ones.
        (plgpu.barrier_arrive if side == _RIGHT else plgpu.barrier_wait)(r.q_free)
        sum_H = _over_tokens(r, side, "add", sum_KH)
        accs_VH = tuple(acc / lax.broadcast_in_dim(sum_H, acc.shape, [1]) for acc in accs_VH)
        if r.tokens > 1:
            # A query token that would stand before the row's first sees nothing: its weights are all alike.
            sees_VH = tokens > hidden_tokens(r, (_STAGED, r.heads))
            none_VH = constant(0.0, (_STAGED, r.heads), TILE)
            accs_VH = tuple(jnp.where(sees_VH, acc, none_VH) for acc in accs_VH)

        @pl.when(meeting.items == 1)
        def _() -> None:
            _store(r, side, row, accs_VH)

        @pl.when(meeting.items > 1)
        def _() -> None:
            for acc, columns in zip(accs_VH, _columns(side), strict=True):
                r.part_IHR.at[part + row, :, columns].T[...] = turned(acc, jnp.float32)
            r.lse_2IH.at[side, part + row][...] = max_H + jnp.log2(sum_H)
            if r.fused:
                _meet(r, side, row, part - meeting.begin, meeting)

    pages = for_each_item(r, visit)
    pl.when(pages > 0)(lambda: plgpu.barrier_wait(r.swap_free[side]))


def _page(r: SimpleNamespace, side: int, place: jax.Array, live: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
    """One page of an item; live: tokens from this page's first one to the row's end, so 64 and more is a whole page.

    sum_KH stays a tile, one sum for each place of a page: it is summed over tokens once an item.
    """
    accs_VH, max_H, sum_KH = state
    tile = (PAGE_TOKENS, r.heads)
    stage = lax.rem(place, jnp.int32(_STAGES))
    half_KC = r.half_ZKC[side].at[stage]
    plgpu.barrier_wait(r.full[side].at[stage])
    score_KH = _swap(r, side, place, _half_scores(r, side, half_KC)) * r.scale
    token_KH = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=TILE)
    score_KH = jnp.where(token_KH < live - hidden_tokens(r, tile), score_KH, NEVER)
    new_max_H = jnp.maximum(max_H, _over_tokens(r, side, "max", score_KH))
    keep_H = jnp.exp2(max_H - new_max_H)
    weight_KH = jnp.exp2(score_KH - lax.broadcast_in_dim(new_max_H, tile, [1]))
    sum_KH = sum_KH * lax.broadcast_in_dim(keep_H, tile, [1]) + weight_KH
    r.p_HK[side].T[...] = turned(weight_KH, r.p_HK[side].dtype)
    accs_VH = tuple(acc * lax.broadcast_in_dim(keep_H, acc.shape, [1]) for acc in accs_VH)
    pl.when(live < PAGE_TOKENS)(lambda: clear_stale(half_KC.at[:, pl.ds(0, _OWN)], live))
    plgpu.commit_smem()

    def add(outs: tuple[Any, ...]) -> None:
        for index, out in enumerate(outs):
            plgpu.wgmma(out, half_KC.at[:, pl.ds(index * _STAGED, _STAGED)].T, r.p_HK[side].T)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(r.free[side].at[stage])

    return accumulate(add, accs_VH, carried=r.native), new_max_H, sum_KH


def _half_scores(r: SimpleNamespace, side: int, half_KC: Any) -> jax.Array:
    """The products of a side's own columns."""

    def products(out: Any) -> jax.Array:
        plgpu.wgmma(out, half_KC.at[:, pl.ds(0, _OWN)], r.q_HR.at[:, pl.ds(side * _OWN, _OWN)].T)
        if side == _RIGHT:
            plgpu.wgmma(out, half_KC.at[:, pl.ds(_OWN, LATENT_DIM - RANK)], r.rope_q_HJ.T)
        return out[...]

    return pl.run_scoped(products, plgpu.ACC((PAGE_TOKENS, r.heads), jnp.float32))


def _swap(r: SimpleNamespace, side: int, place: jax.Array, own_KH: jax.Array) -> jax.Array:
    """own_KH and the other side's, added."""
    other = 1 - side
    pl.when(place > 0)(lambda: plgpu.barrier_wait(r.swap_free[side]))
    r.swap_KH[side][...] = own_KH
    plgpu.barrier_arrive(r.swap_full[side])
    plgpu.barrier_wait(r.swap_full[other])
    other_KH = plgpu.load(r.swap_KH[other], layout=TILE, optimized=False)
    plgpu.barrier_arrive(r.swap_free[other])
    return own_KH + other_KH


def _over_tokens(r: SimpleNamespace, side: int, kind: str, value_KH: jax.Array) -> jax.Array:
    """The maximum or sum over tokens of each head.

    It crosses warps through shared memory. Pallas' own reductions share one scratch a CTA, in which two warpgroups
    would overwrite each other: here each has its own.
    """
    if not r.native:
        return value_KH.max(axis=0) if kind == "max" else value_KH.sum(axis=0)

    def reduce(_: Any, value: mgpu.FragmentedArray, scratch: ir.Value) -> mgpu.FragmentedArray:
        return value.reduce(kind, 0, scratch)

    result = plgpu.ShapeDtypeStruct((r.heads,), jnp.float32, layout=_COLUMN)
    inline: Any = plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()), return_type=result)
    return inline(reduce)(value_KH, r.scratch[side])


def _store(r: SimpleNamespace, side: int, row: jax.Array, accs_VH: tuple[jax.Array, ...]) -> None:
    """Writes a side's columns of a whole row."""
    stage_HV = r.o_HV[side]
    for acc, columns in zip(accs_VH, _columns(side), strict=True):
        stage_HV.T[...] = turned(acc, stage_HV.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stage_HV.at[pl.ds(0, r.out_BHR.shape[1])], r.out_BHR.at[row, :, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _meet(r: SimpleNamespace, side: int, row: jax.Array, turn: jax.Array, meeting: Meeting) -> None:
    """Merges a slice of a side's columns of a row once all of its parts have come, if this part has one."""
    word = r.words_2B.at[side, row]

    @pl.when(turn < meeting.mergers)
    def _() -> None:
        grid_sync.arrive_and_wait(word, meeting.items)
        columns = pl.ds(side * _OWN, _OWN)
        own = SimpleNamespace(
            out_BHR=r.out_BHR.at[:, :, columns], part_IHR=r.part_IHR.at[:, :, columns], lse_IH=r.lse_2IH.at[side]
        )
        merge_slice(own, row, meeting.begin + row, meeting.items, turn, meeting.mergers, _FORMS)

    pl.when(turn >= meeting.mergers)(lambda: grid_sync.arrive(word))


def _columns(side: int) -> tuple[Any, ...]:
    """The value columns of a side, as they are stored."""
    return tuple(pl.ds(start, _STAGED) for start in range(side * _OWN, (side + 1) * _OWN, _STAGED))
