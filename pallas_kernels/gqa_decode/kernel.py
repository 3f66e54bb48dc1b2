"""The Hopper kernels of gqa_decode in Pallas Mosaic GPU: partial attention of each item, then the merge of items.

Tokens lie on wgmma's M axis and the query heads of a group on N (padded to 8), so that few heads cost few columns:
S^T = K Q^T, O^T = V^T P^T. Sums and maxima over tokens cross the warps of a warpgroup through a scratch of which there
is one a CTA: therefore one computing warpgroup a CTA, and two CTAs on each SM. NOTES.md has the design and figures.
Dimension keys beyond the contract's: A parts, U units, I items (see split.py), H query heads of a unit, padded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.split import Split, num_items, unit_pages

PAGE_TOKENS = 64
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILE = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value a query head
_NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN
_MERGE_ROWS = 64  # of the head dimension, a CTA of the merge
_WARPGROUPS = 2
_COMPUTE, _COPY = range(_WARPGROUPS)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    parts: int = 264  # CTAs, two for each of 132 SMs
    stages: int = 3  # pages in flight a CTA
    min_pages: int = 4  # of a part
    merge_widths: tuple[int, ...] = (16, 8, 2)  # items whose loads the merge keeps in flight, by how many are left
    early_merge: bool = False  # the merge is launched while the first kernel ends (programmatic dependent launch)


def decode(
    q_UHE: jax.Array,
    k_PKE: jax.Array,
    v_PKE: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    split: Split,
    *,
    group: int,
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """[U, G, E] in q's dtype: the whole units from the first kernel, the others merged from their items by the second.

    q_UHE: heads past `group` are padding up to a multiple of 8. k_PKE, v_PKE: page * N + head is the first axis.
    """
    units, heads, head_dim = q_UHE.shape
    items, stages, dtype = num_items(tuning.parts, units), tuning.stages, q_UHE.dtype
    sizes = {
        "kv_heads": units // length_B.shape[0],
        "group": group,
        "heads": heads,
        "head_dim": head_dim,
        "stages": stages,
        "scale": scale * math.log2(math.e),
        "early_merge": tuning.early_merge and interpret is None,
        # The interpreter knows no accumulator that is carried in; on the GPU any other form spills registers.
        "carried": interpret is None,
    }

    def gqa_decode_partial(*refs: Any, **scratch: Any) -> None:
        names = ("first_unit_A", "first_page_A", "last_unit_A", "end_page_A", "table_BM", "length_B")
        names += ("q_UHE", "k_PKE", "v_PKE", "out_UGE", "part_IEH", "lse_IH")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == _COMPUTE)(lambda: _compute(r))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    call = plgpu.kernel(
        gqa_decode_partial,
        out_type=(
            jax.ShapeDtypeStruct((units, group, head_dim), dtype),
            jax.ShapeDtypeStruct((items, head_dim, heads), jnp.float32),
            jax.ShapeDtypeStruct((items, heads), jnp.float32),
        ),
        scratch_types={
            "q_2HE": plgpu.SMEM((2, heads, head_dim), dtype, transforms=_SWIZZLED),
            "k_SKE": plgpu.SMEM((stages, PAGE_TOKENS, head_dim), dtype, transforms=_SWIZZLED),
            "v_SKE": plgpu.SMEM((stages, PAGE_TOKENS, head_dim), dtype, transforms=_SWIZZLED),
            "p_HK": plgpu.SMEM((heads, PAGE_TOKENS), dtype, transforms=_SWIZZLED),
            "o_HE": plgpu.SMEM((heads, head_dim), dtype),
            "q_full": plgpu.Barrier(num_barriers=2),
            "q_free": plgpu.Barrier(num_barriers=2),
            "k_full": plgpu.Barrier(num_barriers=stages),
            "v_full": plgpu.Barrier(num_barriers=stages),
            "kv_free": plgpu.Barrier(num_barriers=stages),
        },
        grid=(tuning.parts,),
        grid_names=("part",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out_UGE, part_IEH, lse_IH = call(*split[:4], table_BM, length_B, q_UHE, k_PKE, v_PKE)
    return _merge(out_UGE, part_IEH, lse_IH, split, tuning=tuning, interpret=interpret)


def _for_each_item(r: SimpleNamespace, visit: Any) -> jax.Array:
    """visit(index of the item in this part, unit, first page, end page, pages before it) for each item of the part.

    Returns the number of pages of the part.
    """
    part = lax.axis_index("part")
    first, last = r.first_unit_A[part], r.last_unit_A[part]

    def item(unit: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        items, pages = done
        whole = unit_pages(r.length_B[lax.div(unit, jnp.int32(r.kv_heads))], PAGE_TOKENS)
        start = jnp.where(unit == first, r.first_page_A[part], 0)
        end = jnp.where(unit == last, r.end_page_A[part], whole)
        visit(items, unit, start, end, pages)
        return items + 1, pages + end - start

    return lax.fori_loop(first, last + 1, item, (jnp.int32(0), jnp.int32(0)))


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: queries of the next item while the last is computed, and pages, `stages` ahead."""

    def visit(index: jax.Array, unit: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array) -> None:
        row = lax.div(unit, jnp.int32(r.kv_heads))
        head = lax.rem(unit, jnp.int32(r.kv_heads))
        side = lax.rem(index, jnp.int32(2))
        pl.when(index >= 2)(lambda: plgpu.barrier_wait(r.q_free.at[side]))
        plgpu.copy_gmem_to_smem(r.q_UHE.at[unit], r.q_2HE.at[side], r.q_full.at[side])
        last_page = r.k_PKE.shape[0] // r.kv_heads - 1

        def page(index: jax.Array, page_id: jax.Array) -> jax.Array:
            # The next id is read before this page waits for its stage: its latency hides behind the wait.
            next_id = r.table_BM[row, jnp.minimum(index + 1, end - 1)]
            step = before + index - start
            stage = lax.rem(step, jnp.int32(r.stages))
            pl.when(step >= r.stages)(lambda: plgpu.barrier_wait(r.kv_free.at[stage]))
            place = jnp.clip(page_id, 0, last_page) * r.kv_heads + head  # an empty row's entry may be anything
            plgpu.copy_gmem_to_smem(r.k_PKE.at[place], r.k_SKE.at[stage], r.k_full.at[stage])
            plgpu.copy_gmem_to_smem(r.v_PKE.at[place], r.v_SKE.at[stage], r.v_full.at[stage])
            return next_id

        lax.fori_loop(start, end, page, r.table_BM[row, start])

    items, pages = _for_each_item(r, visit)
    if r.early_merge:
        plgpu.griddepcontrol_launch_dependents()

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(pages - r.stages, 0), pages)
    def _(step: jax.Array) -> None:
        plgpu.barrier_wait(r.kv_free.at[lax.rem(step, jnp.int32(r.stages))])

    @pl.loop(jnp.maximum(items - 2, 0), items)
    def _(index: jax.Array) -> None:
        plgpu.barrier_wait(r.q_free.at[lax.rem(index, jnp.int32(2))])


def _compute(r: SimpleNamespace) -> None:
    """The computing warpgroup: softmax over the pages of each item, its running maximum kept in base 2."""
    part = lax.axis_index("part")

    def constant(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def visit(index: jax.Array, unit: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array) -> None:
        length = r.length_B[lax.div(unit, jnp.int32(r.kv_heads))]
        side = lax.rem(index, jnp.int32(2))
        plgpu.barrier_wait(r.q_full.at[side])

        def page(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            step = before + index - start
            return _page(r, side, lax.rem(step, jnp.int32(r.stages)), length - index * PAGE_TOKENS, state)

        acc_EH, max_H, sum_KH = lax.fori_loop(
            start,
            end,
            page,
            (
                constant(0.0, (r.head_dim, r.heads), _TILE),
                constant(_NEVER, (r.heads,), _COLUMN),
                constant(0.0, (PAGE_TOKENS, r.heads), _TILE),
            ),
        )
        plgpu.barrier_arrive(r.q_free.at[side])
        sum_H = sum_KH.sum(axis=0)
        acc_EH = acc_EH / lax.broadcast_in_dim(sum_H, acc_EH.shape, [1])
        whole = (start == 0) & (end == unit_pages(length, PAGE_TOKENS))

        @pl.when(whole)
        def _() -> None:
            _store_heads(acc_EH, r.o_HE, r.out_UGE.at[unit])

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            r.part_IEH.at[part + unit][...] = acc_EH
            r.lse_IH.at[part + unit][...] = max_H + jnp.log2(sum_H)

    _for_each_item(r, visit)


def _page(
    r: SimpleNamespace, side: jax.Array, stage: jax.Array, live: jax.Array, state: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """One page of an item; live: tokens from this page's first one to the row's end, so 64 and more is a whole page.

    sum_KH stays a tile, one sum for each place of a page: it is summed over tokens once an item.
    """
    acc_EH, max_H, sum_KH = state
    tile = (PAGE_TOKENS, r.heads)
    plgpu.barrier_wait(r.k_full.at[stage])

    def scores(out: Any) -> jax.Array:
        plgpu.wgmma(out, r.k_SKE.at[stage], r.q_2HE.at[side].T)
        return out[...]

    score_KH = pl.run_scoped(scores, plgpu.ACC(tile, jnp.float32)) * r.scale
    token_KH = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=_TILE)
    score_KH = jnp.where(token_KH < live, score_KH, _NEVER)
    new_max_H = jnp.maximum(max_H, score_KH.max(axis=0))
    keep_H = jnp.exp2(max_H - new_max_H)
    weight_KH = jnp.exp2(score_KH - lax.broadcast_in_dim(new_max_H, tile, [1]))
    sum_KH = sum_KH * lax.broadcast_in_dim(keep_H, tile, [1]) + weight_KH
    weight_KH = plgpu.layout_cast(weight_KH.astype(r.p_HK.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    r.p_HK.T[...] = weight_KH
    acc_EH = acc_EH * lax.broadcast_in_dim(keep_H, acc_EH.shape, [1])
    plgpu.barrier_wait(r.v_full.at[stage])

    @pl.when(live < PAGE_TOKENS)
    def _() -> None:
        # What lies past the end may be NaN, and 0 * NaN is NaN. (Keys need no care: their scores are replaced.)
        for column in range(0, r.head_dim, 64):
            block = r.v_SKE.at[stage, :, pl.ds(column, 64)]
            value = plgpu.load(block, layout=_TILE, optimized=False)
            token = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_TILE)
            block[...] = jnp.where(token < live, value, jnp.zeros_like(value))

    plgpu.commit_smem()

    def add(out: Any) -> None:
        plgpu.wgmma(out, r.v_SKE.at[stage].T, r.p_HK.T)

    if r.carried:
        acc_EH = pl.run_state(add)(plgpu.ACC.init(acc_EH))
    else:
        acc_EH += pl.run_scoped(lambda out: (add(out), out[...])[1], plgpu.ACC(acc_EH.shape, jnp.float32))
    plgpu.barrier_arrive(r.kv_free.at[stage])
    return acc_EH, new_max_H, sum_KH


def _store_heads(value_EH: jax.Array, stage_HE: Any, out_GE: Any) -> None:
    """Transposes a tile through shared memory and writes its first G heads; returns when the stage may be reused."""
    turned = plgpu.layout_cast(value_EH.astype(stage_HE.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    stage_HE.T[...] = turned
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage_HE.at[pl.ds(0, out_GE.shape[0])], out_GE)
    plgpu.wait_smem_to_gmem(0)


def _merge(
    out_UGE: jax.Array, part_IEH: jax.Array, lse_IH: jax.Array, split: Split, *, tuning: Tuning, interpret: Any
) -> jax.Array:
    """Writes into out_UGE, in place, each unit of more than one item: its items weighted by their sums."""
    heads = part_IEH.shape[2]
    tile = (_MERGE_ROWS, heads)

    def gqa_decode_merge(
        first_unit_A: Any, first_item_A: Any, items_A: Any, part_ref: Any, lse_ref: Any, out_ref: Any, stage_HE: Any
    ) -> None:
        part = lax.axis_index("part")
        rows = pl.ds(lax.axis_index("block") * _MERGE_ROWS, _MERGE_ROWS)
        first, count = first_item_A[part], items_A[part]

        if tuning.early_merge and interpret is None:
            plgpu.griddepcontrol_wait()

        def group(width: int, start: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = state
            places = [start + i for i in range(width)]
            # Past the last item its own result is read again, and then weighs nothing.
            read = [first + jnp.minimum(place, count - 1) for place in places]
            values = [plgpu.load(part_ref.at[i, rows], layout=_TILE, optimized=False) for i in read]
            sums = [plgpu.load(lse_ref.at[i], layout=_COLUMN, optimized=False) for i in read]
            sums = [one + jnp.where(place < count, 0.0, _NEVER) for place, one in zip(places, sums, strict=True)]
            new_top = top
            for one in sums:
                new_top = jnp.maximum(new_top, one)
            keep = jnp.exp2(top - new_top)
            acc, total = acc * lax.broadcast_in_dim(keep, tile, [1]), total * keep
            for value, one in zip(values, sums, strict=True):
                weight = jnp.exp2(one - new_top)
                acc += value * lax.broadcast_in_dim(weight, tile, [1])
                total += weight
            return acc, new_top, total

        @pl.when(count > 0)
        def _() -> None:
            state = (
                plgpu.layout_cast(jnp.zeros(tile, jnp.float32), _TILE),
                plgpu.layout_cast(jnp.full((heads,), _NEVER, jnp.float32), _COLUMN),
                plgpu.layout_cast(jnp.zeros((heads,), jnp.float32), _COLUMN),
            )
            # Whole groups of the widest; then one group, as wide as what is left needs.
            widths = tuning.merge_widths
            done = lax.div(count, jnp.int32(widths[0])) * widths[0]
            for width, narrower in zip(widths, (*widths[1:], 0), strict=True):
                left = count - done
                groups = ((left > narrower) & (left <= width)).astype(jnp.int32)
                base = done
                if width == widths[0]:
                    base, groups = jnp.int32(0), groups + lax.div(count, jnp.int32(width))
                state = lax.fori_loop(
                    0, groups, lambda i, state, base=base, width=width: group(width, base + i * width, state), state
                )
            acc, _, total = state
            acc = acc / lax.broadcast_in_dim(total, tile, [1])
            _store_heads(acc, stage_HE, out_ref.at[first_unit_A[part], :, rows])

    call = plgpu.kernel(
        gqa_decode_merge,
        scratch_types=[plgpu.SMEM((heads, _MERGE_ROWS), out_UGE.dtype)],
        grid=(tuning.parts, part_IEH.shape[1] // _MERGE_ROWS),
        grid_names=("part", "block"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out_ref = jax.new_ref(out_UGE)
    call(split.first_unit_A, split.first_item_A, split.items_A, part_IEH, lse_IH, out_ref)
    return jax.freeze(out_ref)
