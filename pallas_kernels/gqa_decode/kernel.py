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

from pallas_kernels.gqa_decode.split import Split, num_items

PAGE_TOKENS = 64
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILE = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value a query head
_NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN
_WARPGROUPS = 2
_COMPUTE, _COPY = range(_WARPGROUPS)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    parts: int = 264  # CTAs, two for each of 132 SMs
    stages: int = 3  # pages in flight a CTA
    min_pages: int = 2  # of a part
    merge_unroll: int = 8  # items whose loads the merge kernel keeps in flight


def partial_attention(
    q_UHE: jax.Array,
    k_PKE: jax.Array,
    v_PKE: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    split: Split,
    *,
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Normalised output and base-2 log-sum-exp of each item: fp32 [I, E, H] and [I, H].

    k_PKE, v_PKE: pools with page * N + head as their first axis. Numbers that no item has stay unwritten.
    """
    units, heads, head_dim = q_UHE.shape
    items, stages, dtype = num_items(tuning.parts, units), tuning.stages, q_UHE.dtype
    sizes = SimpleNamespace(
        kv_heads=units // length_B.shape[0],
        heads=heads,
        head_dim=head_dim,
        stages=stages,
        scale=scale * math.log2(math.e),
        # The interpreter knows no accumulator that is carried in; on the GPU any other form spills registers.
        carried=interpret is None,
    )

    def gqa_decode_partial(*refs: Any, **scratch: Any) -> None:
        names = ("first_unit_A", "first_page_A", "last_unit_A", "end_page_A", "table_BM", "length_B")
        names += ("q_UHE", "k_PKE", "v_PKE", "o_IEH", "lse_IH")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **vars(sizes))
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == _COMPUTE)(lambda: _compute(r))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    call = plgpu.kernel(
        gqa_decode_partial,
        out_type=(
            jax.ShapeDtypeStruct((items, head_dim, heads), jnp.float32),
            jax.ShapeDtypeStruct((items, heads), jnp.float32),
        ),
        scratch_types={
            "q_2HE": plgpu.SMEM((2, heads, head_dim), dtype, transforms=_SWIZZLED),
            "k_SKE": plgpu.SMEM((stages, PAGE_TOKENS, head_dim), dtype, transforms=_SWIZZLED),
            "v_SKE": plgpu.SMEM((stages, PAGE_TOKENS, head_dim), dtype, transforms=_SWIZZLED),
            "p_HK": plgpu.SMEM((heads, PAGE_TOKENS), dtype, transforms=_SWIZZLED),
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
    return call(*split[:4], table_BM, length_B, q_UHE, k_PKE, v_PKE)


def _for_each_item(r: SimpleNamespace, visit: Any) -> jax.Array:
    """visit(index of the item in this part, unit, first page, end page, pages before it) for each item of the part.

    Returns the number of pages of the part.
    """
    part = lax.axis_index("part")
    first, last = r.first_unit_A[part], r.last_unit_A[part]

    def item(unit: jax.Array, done: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        items, pages = done
        length = r.length_B[lax.div(unit, jnp.int32(r.kv_heads))]
        start = jnp.where(unit == first, r.first_page_A[part], 0)
        end = jnp.where(unit == last, r.end_page_A[part], lax.div(length + (PAGE_TOKENS - 1), jnp.int32(PAGE_TOKENS)))

        @pl.when(end > start)
        def _() -> None:
            visit(items, unit, start, end, pages)

        return items + (end > start).astype(jnp.int32), pages + end - start

    return lax.fori_loop(first, last + 1, item, (jnp.int32(0), jnp.int32(0)))


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: queries of the next item while the last is computed, and pages, `stages` ahead."""

    def visit(index: jax.Array, unit: jax.Array, start: jax.Array, end: jax.Array, before: jax.Array) -> None:
        row = lax.div(unit, jnp.int32(r.kv_heads))
        head = lax.rem(unit, jnp.int32(r.kv_heads))
        side = lax.rem(index, jnp.int32(2))
        pl.when(index >= 2)(lambda: plgpu.barrier_wait(r.q_free.at[side]))
        plgpu.copy_gmem_to_smem(r.q_UHE.at[unit], r.q_2HE.at[side], r.q_full.at[side])

        def page(index: jax.Array, page_id: jax.Array) -> jax.Array:
            # The next id is read before this page waits for its stage: its latency hides behind the wait.
            next_id = r.table_BM[row, jnp.minimum(index + 1, end - 1)]
            step = before + index - start
            stage = lax.rem(step, jnp.int32(r.stages))
            pl.when(step >= r.stages)(lambda: plgpu.barrier_wait(r.kv_free.at[stage]))
            place = page_id * r.kv_heads + head
            plgpu.copy_gmem_to_smem(r.k_PKE.at[place], r.k_SKE.at[stage], r.k_full.at[stage])
            plgpu.copy_gmem_to_smem(r.v_PKE.at[place], r.v_SKE.at[stage], r.v_full.at[stage])
            return next_id

        lax.fori_loop(start, end, page, r.table_BM[row, start])

    items, pages = _for_each_item(r, visit)

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
        item = part + unit
        r.o_IEH.at[item][...] = acc_EH / lax.broadcast_in_dim(sum_H, acc_EH.shape, [1])
        r.lse_IH.at[item][...] = max_H + jnp.log2(sum_H)

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
        value_KE = plgpu.load(r.v_SKE.at[stage], layout=_TILE, optimized=False)
        token_KE = plgpu.broadcasted_iota(jnp.int32, value_KE.shape, 0, layout=_TILE)
        r.v_SKE.at[stage][...] = jnp.where(token_KE < live, value_KE, jnp.zeros_like(value_KE))

    plgpu.commit_smem()

    def add(out: Any) -> None:
        plgpu.wgmma(out, r.v_SKE.at[stage].T, r.p_HK.T)

    if r.carried:
        acc_EH = pl.run_state(add)(plgpu.ACC.init(acc_EH))
    else:
        acc_EH += pl.run_scoped(lambda out: (add(out), out[...])[1], plgpu.ACC(acc_EH.shape, jnp.float32))
    plgpu.barrier_arrive(r.kv_free.at[stage])
    return acc_EH, new_max_H, sum_KH


def merge(
    o_IEH: jax.Array,
    lse_IH: jax.Array,
    split: Split,
    *,
    dtype: jnp.dtype,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """The items of each unit weighted by their sums: [U, H, E] in dtype; a unit without items gives zeros."""
    items, head_dim, heads = o_IEH.shape
    units = split.items_U.shape[0]
    tile = (64, heads)

    def gqa_decode_merge(first_U: Any, items_U: Any, o_ref: Any, lse_ref: Any, out_UHE: Any) -> None:
        unit, block = lax.axis_index("unit"), lax.axis_index("block")
        first, count = first_U[unit], items_U[unit]
        rows = pl.ds(block * 64, 64)

        def group(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = state
            places = [index * tuning.merge_unroll + i for i in range(tuning.merge_unroll)]
            # Past the last item its own result is read again, and then weighs nothing.
            read = [first + jnp.minimum(place, count - 1) for place in places]
            values = [plgpu.load(o_ref.at[i, rows], layout=_TILE, optimized=False) for i in read]
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

        start = (
            plgpu.layout_cast(jnp.zeros(tile, jnp.float32), _TILE),
            plgpu.layout_cast(jnp.full((heads,), _NEVER, jnp.float32), _COLUMN),
            plgpu.layout_cast(jnp.zeros((heads,), jnp.float32), _COLUMN),
        )
        groups = lax.div(count + (tuning.merge_unroll - 1), jnp.int32(tuning.merge_unroll))
        acc, _, total = lax.fori_loop(0, groups, group, start)
        total = jnp.where(total > 0, total, 1.0)
        out = (acc / lax.broadcast_in_dim(total, tile, [1])).astype(out_UHE.dtype)
        out_UHE.at[unit, :, rows].T[...] = out

    call = plgpu.kernel(
        gqa_decode_merge,
        out_type=jax.ShapeDtypeStruct((units, heads, head_dim), dtype),
        grid=(units, head_dim // 64),
        grid_names=("unit", "block"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return call(split.first_item_U, split.items_U, o_IEH, lse_IH)
