"""The Hopper kernel of mla_decode for many heads: 64 heads a CTA on wgmma's M axis, S = Q K^T, O = P V.

Four warpgroups. One computes scores and weights, a page ahead of the two that each add up half of the 512 columns;
the fourth copies. A page is four boxes of 128 latent columns and one of the rotated key, each with barriers of its own:
scores begin with the first box that has arrived, and a box is refilled once its last reader is done. NOTES.md has the
design and figures. Dimension keys beyond the contract's: A parts, I items (see split.py), M heads of a CTA, J rope
dimensions, S boxes in shared memory, C columns of a box.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    for_each_item,
    for_each_page,
    is_whole,
)
from pallas_kernels.split import Split, num_items

BLOCK_HEADS = 64
_ROW = plgpu.Layout.WGMMA.reduce(1)  # one value a head
_ROPE_DIM = LATENT_DIM - RANK
_BOX = 128
_BOXES = RANK // _BOX  # of a page
_OWN = _BOXES // 2  # of a page, that one of the two adding warpgroups reads
_STAGES = 2  # pages in shared memory
_WARPGROUPS = 4
_LEFT, _RIGHT, _SCORE, _COPY = range(_WARPGROUPS)


def partials(
    q_BHR: jax.Array,
    rope_q_BHJ: jax.Array,
    latent_PKL: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    split: Split,
    *,
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out [B, H, rank] with the whole rows in it; partial results [I, H, rank] and their base-2 sums [I, H], fp32.

    q_BHR, rope_q_BHJ: the two parts of the queries, heads padded to a multiple of 64.
    """
    rows, heads, _ = q_BHR.shape
    items, dtype = num_items(tuning.parts, rows), q_BHR.dtype
    # The interpreter knows no accumulator that is carried in; on the GPU any other form spills registers.
    sizes = {"scale": scale * math.log2(math.e), "registers": tuning.registers, "carried": interpret is None}

    def mla_decode_many_heads(*refs: Any, **scratch: Any) -> None:
        names = ("first_unit_A", "first_page_A", "last_unit_A", "end_page_A", "table_BM", "length_B")
        names += ("q_BHR", "rope_q_BHJ", "latent_PKL", "out_BHR", "part_IHR", "lse_IH")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        r.heads = pl.ds(lax.axis_index("block") * BLOCK_HEADS, BLOCK_HEADS)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup <= _RIGHT)(lambda: _add(r, warpgroup))
        pl.when(warpgroup == _SCORE)(lambda: _score(r))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    call = plgpu.kernel(
        mla_decode_many_heads,
        out_type=(
            jax.ShapeDtypeStruct((rows, heads, RANK), dtype),
            jax.ShapeDtypeStruct((items, heads, RANK), jnp.float32),
            jax.ShapeDtypeStruct((items, heads), jnp.float32),
        ),
        scratch_types={
            "q_MR": plgpu.SMEM((BLOCK_HEADS, RANK), dtype, transforms=SWIZZLED),
            "rope_q_MJ": plgpu.SMEM((BLOCK_HEADS, _ROPE_DIM), dtype, transforms=SWIZZLED),
            "box_SKC": plgpu.SMEM((_STAGES * _BOXES, PAGE_TOKENS, _BOX), dtype, transforms=SWIZZLED),
            "rope_SKJ": plgpu.SMEM((_STAGES, PAGE_TOKENS, _ROPE_DIM), dtype, transforms=SWIZZLED),
            "p_MK": plgpu.SMEM((BLOCK_HEADS, PAGE_TOKENS), dtype, transforms=SWIZZLED),
            "keep_2M": plgpu.SMEM((2, BLOCK_HEADS), jnp.float32),
            "sum_2M": plgpu.SMEM((2, BLOCK_HEADS), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=2),
            "box_full": plgpu.Barrier(num_barriers=_STAGES * _BOXES),
            "box_free": plgpu.Barrier(num_barriers=_STAGES * _BOXES),
            "rope_full": plgpu.Barrier(num_barriers=_STAGES),
            "rope_free": plgpu.Barrier(num_barriers=_STAGES),
            "keep_full": plgpu.Barrier(num_barriers=2),
            "p_full": plgpu.Barrier(),
            "p_free": plgpu.Barrier(num_arrivals=2),
            "sum_full": plgpu.Barrier(num_barriers=2),
        },
        grid=(heads // BLOCK_HEADS, tuning.parts),
        grid_names=("block", "part"),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        interpret=interpret,
        # Maxima and sums go along rows, within a warp: no scratch, and 2 KiB of it would not fit.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return call(*split[:4], table_BM, length_B, q_BHR, rope_q_BHJ, latent_PKL)


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: the boxes of two pages ahead, each as soon as its place is free."""
    plgpu.set_max_registers(r.registers[2], action="decrease")

    def visit(index: jax.Array, row: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array) -> None:
        def page(index: jax.Array, page_id: jax.Array) -> None:
            place = before + index - start
            stage = lax.rem(place, jnp.int32(_STAGES))
            again = place >= _STAGES
            # In the order in which places become free: the rotated key is read by scores alone.
            pl.when(again)(lambda: plgpu.barrier_wait(r.rope_free.at[stage]))
            source = r.latent_PKL.at[page_id, :, pl.ds(RANK, _ROPE_DIM)]
            plgpu.copy_gmem_to_smem(source, r.rope_SKJ.at[stage], r.rope_full.at[stage])
            for box in (0, 2, 1, 3):  # the adding warpgroups go through theirs at the same time
                slot = stage * _BOXES + box
                pl.when(again)(lambda slot=slot: plgpu.barrier_wait(r.box_free.at[slot]))
                source = r.latent_PKL.at[page_id, :, pl.ds(box * _BOX, _BOX)]
                plgpu.copy_gmem_to_smem(source, r.box_SKC.at[slot], r.box_full.at[slot])

        for_each_page(r, row, start, end, page)

    _, pages = for_each_item(r, visit)

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(pages - _STAGES, 0), pages)
    def _(place: jax.Array) -> None:
        stage = lax.rem(place, jnp.int32(_STAGES))
        plgpu.barrier_wait(r.rope_free.at[stage])
        for box in range(_BOXES):
            plgpu.barrier_wait(r.box_free.at[stage * _BOXES + box])


def _score(r: SimpleNamespace) -> None:
    """The scoring warpgroup: weights of each page, and by what earlier sums shrink, to the adding warpgroups."""
    plgpu.set_max_registers(r.registers[1], action="increase" if r.registers[1] > 128 else "decrease")
    part = lax.axis_index("part")

    def visit(index: jax.Array, row: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array) -> None:
        length = r.length_B[row]
        plgpu.copy_gmem_to_smem(r.q_BHR.at[row, r.heads], r.q_MR, r.q_full)
        plgpu.copy_gmem_to_smem(r.rope_q_BHJ.at[row, r.heads], r.rope_q_MJ, r.q_full)
        plgpu.barrier_wait(r.q_full)

        def page(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return _page_weights(r, before + index - start, length - index * PAGE_TOKENS, state)

        start_state = (constant(NEVER, (BLOCK_HEADS,), _ROW), constant(0.0, (BLOCK_HEADS,), _ROW))
        max_M, sum_M = lax.fori_loop(start, end, page, start_state)
        # Two places: of an item of one page, the sums may be here before the adding warpgroups have read the last
        # item's. They have read them when they are done with this item's page, before which the next one's sums do
        # not come.
        turn = lax.rem(index, jnp.int32(2))
        r.sum_2M.at[turn][...] = sum_M
        plgpu.barrier_arrive(r.sum_full.at[turn])

        @pl.when(jnp.logical_not(is_whole(start, end, length)))
        def _() -> None:
            r.lse_IH.at[part + row, r.heads][...] = max_M + jnp.log2(sum_M)

    _, pages = for_each_item(r, visit)
    pl.when(pages > 0)(lambda: plgpu.barrier_wait(r.p_free))


def _page_weights(
    r: SimpleNamespace, place: jax.Array, live: jax.Array, state: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """One page of an item; live: tokens from this page's first one to the row's end, so 64 and more is a whole page."""
    max_M, sum_M = state
    tile = (BLOCK_HEADS, PAGE_TOKENS)
    stage = lax.rem(place, jnp.int32(_STAGES))

    def scores(out: Any) -> jax.Array:
        plgpu.barrier_wait(r.rope_full.at[stage])
        plgpu.wgmma(out, r.rope_q_MJ, r.rope_SKJ.at[stage].T)
        for box in (0, 2, 1, 3):
            slot = stage * _BOXES + box
            plgpu.barrier_wait(r.box_full.at[slot])
            plgpu.wgmma(out, r.q_MR.at[:, pl.ds(box * _BOX, _BOX)], r.box_SKC.at[slot].T)
        return out[...]

    score_MK = pl.run_scoped(scores, plgpu.ACC(tile, jnp.float32)) * r.scale
    plgpu.barrier_arrive(r.rope_free.at[stage])
    token_MK = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=TILE)
    score_MK = jnp.where(token_MK < live, score_MK, NEVER)
    new_max_M = jnp.maximum(max_M, score_MK.max(axis=1))
    keep_M = jnp.exp2(max_M - new_max_M)
    # Given early, so that sums shrink while weights are made. Two places, because the last page's may not be read yet.
    turn = lax.rem(place, jnp.int32(2))
    r.keep_2M.at[turn][...] = keep_M
    plgpu.barrier_arrive(r.keep_full.at[turn])
    weight_MK = jnp.exp2(score_MK - lax.broadcast_in_dim(new_max_M, tile, [0]))
    sum_M = sum_M * keep_M + weight_MK.sum(axis=1)
    weight_MK = weight_MK.astype(r.p_MK.dtype)
    pl.when(place > 0)(lambda: plgpu.barrier_wait(r.p_free))
    r.p_MK[...] = weight_MK
    plgpu.commit_smem()
    plgpu.barrier_arrive(r.p_full)
    return new_max_M, sum_M


def _add(r: SimpleNamespace, side: jax.Array) -> None:
    """One of the two adding warpgroups: weighted values of its half of the columns."""
    plgpu.set_max_registers(r.registers[0], action="increase")
    part = lax.axis_index("part")
    tile = (BLOCK_HEADS, _BOX)

    def visit(index: jax.Array, row: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array) -> None:
        length = r.length_B[row]

        def page(index: jax.Array, accs_MC: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return _page_values(r, side, before + index - start, length - index * PAGE_TOKENS, accs_MC)

        accs_MC = lax.fori_loop(start, end, page, tuple(constant(0.0, tile, TILE) for _ in range(_OWN)))
        turn = lax.rem(index, jnp.int32(2))
        plgpu.barrier_wait(r.sum_full.at[turn])
        sum_M = plgpu.load(r.sum_2M.at[turn], layout=_ROW, optimized=False)
        whole = is_whole(start, end, length)
        for box, acc in enumerate(accs_MC):
            columns = pl.ds((side * _OWN + box) * _BOX, _BOX)
            value = acc / lax.broadcast_in_dim(sum_M, tile, [0])

            @pl.when(whole)
            def _(columns: Any = columns, value: jax.Array = value) -> None:
                r.out_BHR.at[row, r.heads, columns][...] = value.astype(r.out_BHR.dtype)

            @pl.when(jnp.logical_not(whole))
            def _(columns: Any = columns, value: jax.Array = value) -> None:
                r.part_IHR.at[part + row, r.heads, columns][...] = value

    for_each_item(r, visit)


def _page_values(
    r: SimpleNamespace, side: jax.Array, place: jax.Array, live: jax.Array, accs_MC: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """One page of an item, with `live` as in _page_weights."""
    tile = (BLOCK_HEADS, _BOX)
    slots = [lax.rem(place, jnp.int32(_STAGES)) * _BOXES + side * _OWN + box for box in range(_OWN)]
    turn = lax.rem(place, jnp.int32(2))
    plgpu.barrier_wait(r.keep_full.at[turn])
    keep_M = plgpu.load(r.keep_2M.at[turn], layout=_ROW, optimized=False)
    accs_MC = tuple(acc * lax.broadcast_in_dim(keep_M, tile, [0]) for acc in accs_MC)
    plgpu.barrier_wait(r.p_full)
    for slot in slots:
        plgpu.barrier_wait(r.box_full.at[slot])

    @pl.when(live < PAGE_TOKENS)
    def _() -> None:
        for slot in slots:
            clear_stale(r.box_SKC.at[slot], live)
        plgpu.commit_smem()

    def add(outs: tuple[Any, ...]) -> None:
        for out, slot in zip(outs, slots, strict=True):
            plgpu.wgmma(out, r.p_MK, r.box_SKC.at[slot])
        for box, slot in enumerate(slots):
            plgpu.wgmma_wait(_OWN - 1 - box)
            plgpu.barrier_arrive(r.box_free.at[slot])
        plgpu.barrier_arrive(r.p_free)

    return accumulate(add, accs_MC, carried=r.carried)
