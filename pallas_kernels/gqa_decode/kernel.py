"""The Hopper kernel of gqa_decode in Pallas Mosaic GPU: partial attention of each item, and the merge of cut units.

Tokens lie on wgmma's M axis and the query heads of a group on N (padded to 8), so that few heads cost few columns:
S^T = K Q^T, O^T = V^T P^T. Sums and maxima over tokens cross the warps of a warpgroup through a scratch of which there
is one a CTA: therefore one computing warpgroup a CTA, and two CTAs on each SM. What a unit's items gave is merged by
the CTA that is done last with one of them (grid_sync.py), or all of them merge a slice each (merge_slices.py); the
interpreter, which cannot run that, merges in a kernel of its own. NOTES.md has the design and figures.
Dimension keys beyond the contract's: A parts, U units, I items (see split.py), W fields of a part's record, H queries
of a unit, padded: column s * G + g is head g of query token s; R rows of a partial result; C all rows of queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grid_sync import arrive, arrive_and_wait, last_to_arrive
from pallas_kernels.merge_slices import Form, merge_slice
from pallas_kernels.split import Field, num_items, unit_pages
from pallas_kernels.stale_rows import clear_rows

PAGE_TOKENS = 64
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_TILE = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value a query
_TURNED = plgpu.Layout.WGMMA_TRANSPOSED
_NEVER = -1e30  # a finite "minus infinity": the difference of two of them is 0, not NaN
_GROUP_ITEMS = 16  # items that are merged at once; those of a unit with more are merged in groups first
# How a unit is merged in slices: loads in flight are all that counts.
_SLICES = (Form(2, 2, 8, 128), Form(4, 4, 4, 128), Form(8, 8, 2, 128), Form(16, 16, 1, 128), Form(1 << 30, 32, 1, 128))
_SUM_ROWS = 4  # of a partial result, for its base-2 sums: one is used, four keep results 128 bytes apart
_WARPGROUPS = 2
_COMPUTE, _COPY = range(_WARPGROUPS)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    parts: int = 264  # CTAs, two for each of 132 SMs
    stages: int = 3  # pages in flight a CTA
    min_pages: int = 4  # of a part
    align: bool = True  # units of one size are cut evenly or not at all
    # Who merges a unit: the part that is "last", all its parts in "slices" (all must run at once: one CTA an SM and no
    # more; head dimension 128 or 256), or a "kernel" of its own.
    merge: Literal["last", "slices", "kernel"] = "last"


class Item(NamedTuple):
    """One unit's pages in a part. `turn`: of the item in its part; `before`: pages of the part's earlier items."""

    turn: jax.Array
    unit: jax.Array
    start: jax.Array
    end: jax.Array
    before: jax.Array
    tokens: jax.Array  # length of the unit's row


def decode(
    q_CE: jax.Array,
    k_PKE: jax.Array,
    v_PKE: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    record_AW: jax.Array,
    words: jax.Array,
    merge_U2: jax.Array,
    *,
    shape: tuple[int, int, int, int, int],
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """[B, S, N, G, E] in q's dtype.

    q_CE: the queries of a unit lie together, `unit_rows` for each, H in all at least.
    k_PKE, v_PKE: page * N + head is the first axis. record_AW: see split.records. words: `num_words` int32 zeros.
    merge_U2: items of each unit and the number of the first. shape: the output's.
    """
    B, S, N, G, E = shape
    H, dtype, stages = padded(S * G), q_CE.dtype, tuning.stages
    items = num_items(tuning.parts, B * N)
    merge = tuning.merge if interpret is None else "kernel"
    part_shape = (items, E + _SUM_ROWS, H)
    parts = [part_shape] if merge != "slices" else [(items, H, E), (items, H)]
    ring_bytes = 2 * stages * PAGE_TOKENS * E * jnp.dtype(dtype).itemsize
    slots = min(_GROUP_ITEMS, ring_bytes // (4 * math.prod(part_shape[1:])))
    sizes = {
        "kv_heads": N,
        "group": G,
        "tokens": S,
        "heads": H,
        "head_dim": E,
        "stages": stages,
        "slots": slots,
        "items": items,
        "query_rows": q_CE.shape[0],
        "scale": scale * math.log2(math.e),
        "merge": merge,
        # The interpreter knows no accumulator that is carried in; on the GPU any other form spills registers.
        "carried": interpret is None,
    }

    def gqa_decode_kernel(*refs: Any, ring: Any, **scratch: Any) -> None:
        names = ("record_AW", "table_BM", "length_B", "q_CE", "k_PKE", "v_PKE", "words", "out")
        names += ("part_IRH",) if merge != "slices" else ("part_IHE", "lse_IH")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        (r.k_SKE, r.v_SKE), *r.merge_JRH = ring if merge == "last" else (ring,)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == _COMPUTE)(lambda: _compute(r))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    pages = tuple(plgpu.SMEM((stages, PAGE_TOKENS, E), dtype, transforms=_SWIZZLED) for _ in range(2))
    merge_JRH = plgpu.SMEM((slots, *part_shape[1:]), jnp.float32)
    call = plgpu.kernel(
        gqa_decode_kernel,
        out_type=(
            jax.ShapeDtypeStruct(shape, dtype),
            *(jax.ShapeDtypeStruct(part, jnp.float32) for part in parts),
        ),
        scratch_types={
            # Partial results are merged where pages were, when the part is through with its pages.
            "ring": plgpu.RefUnion(pages, merge_JRH) if merge == "last" else pages,
            "q_HE": plgpu.SMEM((H, E), dtype, transforms=_SWIZZLED),
            "p_HK": plgpu.SMEM((H, PAGE_TOKENS), dtype, transforms=_SWIZZLED),
            "o_HE": plgpu.SMEM((H, E), dtype),
            "k_full": plgpu.Barrier(num_barriers=stages),
            "v_full": plgpu.Barrier(num_barriers=stages),
            "kv_free": plgpu.Barrier(num_barriers=stages),
            "merge_full": plgpu.Barrier(num_barriers=slots),
        },
        grid=(tuning.parts,),
        grid_names=("part",),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out, *partial = call(record_AW, table_BM, length_B, q_CE, k_PKE, v_PKE, words)
    return _merge(out, partial[0], merge_U2, sizes, interpret=interpret) if merge == "kernel" else out


def padded(queries: int) -> int:
    """Columns of wgmma that the queries of a unit take."""
    return queries + -queries % 8


def unit_rows(tokens: int, group: int) -> int:
    """Rows of `q_CE` that a unit has: of several query tokens a multiple of 8, of one as many as there are heads."""
    return group if tokens == 1 else padded(tokens * group)


def num_words(parts: int, units: int) -> int:
    """Words that `decode` meets at: one for each group of items, one for each unit."""
    return 2 * num_items(parts, units)


def _for_each_item(r: SimpleNamespace, visit: Callable[[Item], None]) -> tuple[jax.Array, jax.Array]:
    """Visits the items of the part. Returns the number of its items and of its pages."""
    part = lax.axis_index("part")
    first, last = r.record_AW[part, Field.FIRST_UNIT], r.record_AW[part, Field.LAST_UNIT]
    first_page, end_page = r.record_AW[part, Field.FIRST_PAGE], r.record_AW[part, Field.END_PAGE]

    def step(unit: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        index, pages, tokens = state
        # The next unit's length is read before this one is worked on.
        next_tokens = r.length_B[_row(r, jnp.minimum(unit + 1, last))]
        start = jnp.where(unit == first, first_page, 0)
        end = jnp.where(unit == last, end_page, unit_pages(tokens, PAGE_TOKENS))
        visit(Item(index, unit, start, end, pages, tokens))
        return index + 1, pages + end - start, next_tokens

    state = (jnp.int32(0), jnp.int32(0), r.record_AW[part, Field.FIRST_TOKENS])
    index, pages, _ = lax.fori_loop(first, last + 1, step, state)
    return index, pages


def _row(r: SimpleNamespace, unit: jax.Array) -> jax.Array:
    return lax.div(unit, jnp.int32(r.kv_heads))


def _head(r: SimpleNamespace, unit: jax.Array) -> jax.Array:
    return lax.rem(unit, jnp.int32(r.kv_heads))


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: pages, `stages` ahead. The first ones are named by the record: no table is read first."""
    part = lax.axis_index("part")
    ids = [r.record_AW[part, Field.IDS + i] for i in range(r.stages)]
    last_page = r.k_PKE.shape[0] // r.kv_heads - 1

    def fetch(page_id: jax.Array, unit: jax.Array, stage: Any) -> None:
        place = page_id * r.kv_heads + _head(r, unit)
        plgpu.copy_gmem_to_smem(r.k_PKE.at[place], r.k_SKE.at[stage], r.k_full.at[stage])
        plgpu.copy_gmem_to_smem(r.v_PKE.at[place], r.v_SKE.at[stage], r.v_full.at[stage])

    def visit(item: Item) -> None:
        known = jnp.where(item.turn == 0, jnp.minimum(item.end - item.start, r.stages), 0)
        for stage, page_id in enumerate(ids):
            pl.when(stage < known)(lambda page_id=page_id, stage=stage: fetch(page_id, item.unit, stage))

        def page(index: jax.Array, page_id: jax.Array) -> jax.Array:
            # The next id is read before this page waits for its stage: its latency hides behind the wait.
            next_id = r.table_BM[_row(r, item.unit), jnp.minimum(index + 1, item.end - 1)]
            step = item.before + index - item.start
            stage = lax.rem(step, jnp.int32(r.stages))
            pl.when(step >= r.stages)(lambda: plgpu.barrier_wait(r.kv_free.at[stage]))
            # An empty row's entry may be anything.
            fetch(jnp.clip(page_id, 0, last_page), item.unit, stage)
            return next_id

        begin = item.start + known
        first_id = r.table_BM[_row(r, item.unit), jnp.minimum(begin, item.end - 1)]
        lax.fori_loop(begin, item.end, page, first_id)

    _, pages = _for_each_item(r, visit)

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(pages - r.stages, 0), pages)
    def _(step: jax.Array) -> None:
        plgpu.barrier_wait(r.kv_free.at[lax.rem(step, jnp.int32(r.stages))])


def _constant(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _compute(r: SimpleNamespace) -> None:
    """The computing warpgroup: softmax over the pages of each item, its running maximum kept in base 2."""
    part = lax.axis_index("part")
    last_unit = r.record_AW[part, Field.LAST_UNIT]
    of_first, of_last = (
        tuple(r.record_AW[part, field + i] for i in range(2)) for field in (Field.FIRST_ITEMS, Field.LAST_ITEMS)
    )

    def visit(item: Item) -> None:
        offset = _load_queries(r, item.unit)

        def page(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            stage = lax.rem(item.before + index - item.start, jnp.int32(r.stages))
            return _page(r, stage, item.tokens - index * PAGE_TOKENS, state)

        state = (
            _constant(0.0, (r.head_dim, r.heads), _TILE),
            _constant(_NEVER, (r.heads,), _COLUMN),
            _constant(0.0, (PAGE_TOKENS, r.heads), _TILE),
        )
        acc_EH, max_H, sum_KH = lax.fori_loop(item.start, item.end, page, state)
        sum_H = sum_KH.sum(axis=0)
        # A query that sees no token (its row is shorter than the query tokens) gives zeros.
        share_H = jnp.where(max_H > _NEVER, 1.0 / sum_H, 0.0)
        acc_EH = acc_EH * lax.broadcast_in_dim(share_H, acc_EH.shape, [1])
        cut = jnp.where(item.unit == last_unit, of_last[0], jnp.where(item.turn == 0, of_first[0], 1)) > 1
        pl.when(jnp.logical_not(cut))(lambda: _store_heads(r, acc_EH, item.unit, offset))
        pl.when(cut)(lambda: _store_partial(r, acc_EH, max_H + jnp.log2(sum_H), part + item.unit))

    _for_each_item(r, visit)
    first_unit = r.record_AW[part, Field.FIRST_UNIT]
    goes_on = (first_unit < last_unit) & (of_first[0] > 1)
    ends = (first_unit <= last_unit) & (of_last[0] > 1)
    if r.merge == "last":
        pl.when(goes_on)(lambda: _close(r, first_unit, *of_first))
        pl.when(ends)(lambda: _close(r, last_unit, *of_last))
    elif r.merge == "slices":
        pl.when(goes_on)(lambda: arrive(r.words.at[of_first[1]]))
        pl.when(ends)(lambda: _close_in_slices(r, last_unit, *of_last))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load_queries(r: SimpleNamespace, unit: jax.Array) -> jax.Array:
    """Into shared memory: the queries of a unit, and as many rows beside them as make up H. Returns where they begin.

    Through registers, since a tiled copy by the copy engine would need a group of a multiple of 8.
    """
    offset = _offset(r, unit)
    start = unit * unit_rows(r.tokens, r.group) - offset
    r.q_HE.T[...] = plgpu.load(r.q_CE.at[pl.ds(start, r.heads)].T, layout=_TURNED, optimized=False)
    plgpu.commit_smem()
    return offset


def _offset(r: SimpleNamespace, unit: jax.Array) -> Any:
    """Of a unit's first query in the H rows that are read: not 0 where these would end past the last row of all."""
    rows = unit_rows(r.tokens, r.group)
    return jnp.maximum(unit * rows + (r.heads - r.query_rows), 0) if rows < r.heads else 0


def _page(r: SimpleNamespace, stage: jax.Array, live: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """One page of an item; live: tokens from this page's first one to the row's end, so 64 and more is a whole page.

    sum_KH stays a tile, one sum for each place of a page: it is summed over tokens once an item.
    """
    acc_EH, max_H, sum_KH = state
    tile = (PAGE_TOKENS, r.heads)
    plgpu.barrier_wait(r.k_full.at[stage])

    def scores(out: Any) -> jax.Array:
        plgpu.wgmma(out, r.k_SKE.at[stage], r.q_HE.T)
        return out[...]

    score_KH = pl.run_scoped(scores, plgpu.ACC(tile, jnp.float32)) * r.scale
    token_KH = plgpu.broadcasted_iota(jnp.int32, tile, 0, layout=_TILE)
    if r.tokens > 1:  # query token s does not see the S - 1 - s tokens after it
        column_KH = plgpu.broadcasted_iota(jnp.int32, tile, 1, layout=_TILE)
        token_KH = token_KH + (r.tokens - 1) - lax.div(column_KH, jnp.full_like(column_KH, r.group))
    score_KH = jnp.where(token_KH < live, score_KH, _NEVER)
    new_max_H = jnp.maximum(max_H, score_KH.max(axis=0))
    keep_H = jnp.exp2(max_H - new_max_H)
    weight_KH = jnp.exp2(score_KH - lax.broadcast_in_dim(new_max_H, tile, [1]))
    sum_KH = sum_KH * lax.broadcast_in_dim(keep_H, tile, [1]) + weight_KH
    r.p_HK.T[...] = plgpu.layout_cast(weight_KH.astype(r.p_HK.dtype), _TURNED)
    acc_EH = acc_EH * lax.broadcast_in_dim(keep_H, acc_EH.shape, [1])
    plgpu.barrier_wait(r.v_full.at[stage])

    @pl.when(live < PAGE_TOKENS)
    def _() -> None:
        clear_rows(r.v_SKE.at[stage], live, native=r.carried)

    plgpu.commit_smem()

    def add(out: Any) -> None:
        plgpu.wgmma(out, r.v_SKE.at[stage].T, r.p_HK.T)

    if r.carried:
        acc_EH = pl.run_state(add)(plgpu.ACC.init(acc_EH))
    else:
        acc_EH += pl.run_scoped(lambda out: (add(out), out[...])[1], plgpu.ACC(acc_EH.shape, jnp.float32))
    plgpu.barrier_arrive(r.kv_free.at[stage])
    return acc_EH, new_max_H, sum_KH


def _store_heads(r: SimpleNamespace, value_EH: jax.Array, unit: jax.Array, offset: jax.Array) -> None:
    """Transposes a tile through shared memory and writes a unit's queries to the output; `offset`: their first row."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the unit before
    r.o_HE.T[...] = plgpu.layout_cast(value_EH.astype(r.o_HE.dtype), _TURNED)
    plgpu.commit_smem()
    for token in range(r.tokens):
        rows = r.o_HE.at[pl.ds(offset + token * r.group, r.group)]
        plgpu.copy_smem_to_gmem(rows, r.out.at[_row(r, unit), token, _head(r, unit)])


def _store_partial(r: SimpleNamespace, acc_EH: jax.Array, sum_H: jax.Array, slot: jax.Array) -> None:
    if r.merge == "slices":
        r.part_IHE.at[slot].T[...] = plgpu.layout_cast(acc_EH, _TURNED)
        r.lse_IH.at[slot][...] = sum_H
        return
    r.part_IRH.at[slot, pl.ds(0, r.head_dim)][...] = acc_EH
    r.part_IRH.at[slot, r.head_dim][...] = sum_H


def _close(r: SimpleNamespace, unit: jax.Array, items: jax.Array, first: jax.Array) -> None:
    """Says that this part's item of a unit is done; who says so last merges the unit, or its group of items.

    items, first: of the unit, their number and the first one's slot. Results of groups lie at their first items', and
    whoever has merged the last group merges them. Always in order of slots: a result does not depend on who was last.
    """
    mine = lax.axis_index("part") + unit - first
    group = lax.div(mine, jnp.int32(_GROUP_ITEMS))
    start = first + group * _GROUP_ITEMS
    count = jnp.minimum(items - group * _GROUP_ITEMS, _GROUP_ITEMS)

    @pl.when(last_to_arrive(r.words.at[start], count, async_reads=True))
    def _() -> None:
        acc_EH, sum_H = _combine(r, start, count, 1)

        @pl.when(items <= _GROUP_ITEMS)
        def _() -> None:
            _store_heads(r, acc_EH, unit, _offset(r, unit))

        @pl.when(items > _GROUP_ITEMS)
        def _() -> None:
            _store_partial(r, acc_EH, sum_H, start)
            groups = lax.div(items + (_GROUP_ITEMS - 1), jnp.int32(_GROUP_ITEMS))

            @pl.when(last_to_arrive(r.words.at[r.items + first], groups, async_reads=True))
            def _() -> None:
                _store_heads(r, _combine(r, first, groups, _GROUP_ITEMS)[0], unit, _offset(r, unit))


def _close_in_slices(r: SimpleNamespace, unit: jax.Array, items: jax.Array, first: jax.Array) -> None:
    """Waits until all items of this part's last unit are done, then merges a slice of it."""
    part = lax.axis_index("part")
    mergers = r.record_AW[part, Field.LAST_MERGERS]
    queries = pl.ds(_offset(r, unit), r.tokens * r.group)

    def store(query: jax.Array, columns: Any, value: jax.Array) -> None:
        group = jnp.int32(r.group)
        place = (_row(r, unit), lax.div(query, group), _head(r, unit), lax.rem(query, group), columns)
        r.out.at[place][...] = value.astype(r.out.dtype)

    arrive_and_wait(r.words.at[first], items)
    mine = {"first": first, "items": items, "turn": part + unit - first, "turns": mergers}
    partial = (r.part_IHE.at[:, queries], r.lse_IH.at[:, queries])
    merge_slice(*partial, store, heads=r.tokens * r.group, **mine, forms=_SLICES)


def _combine(r: SimpleNamespace, first: jax.Array, count: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """`count` partial results, `stride` slots apart, each weighted by its sum: the same of them all."""
    tile = (r.head_dim, r.heads)
    [merge_JRH] = r.merge_JRH

    def some(turn: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        done = turn * r.slots
        here = jnp.minimum(count - done, r.slots)
        plgpu.commit_smem()  # what was there, pages or results, has been read

        @pl.loop(0, here)
        def _(place: jax.Array) -> None:
            source = r.part_IRH.at[first + (done + place) * stride]
            # Nothing to fill: so it is one plain copy, of any size.
            within = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            plgpu.copy_gmem_to_smem(source, merge_JRH.at[place], r.merge_full.at[place], oob_mode=within)

        def one(place: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc_EH, top_H, total_H = state
            plgpu.barrier_wait(r.merge_full.at[place])
            value_EH = plgpu.load(merge_JRH.at[place, pl.ds(0, r.head_dim)], layout=_TILE, optimized=False)
            sum_H = plgpu.load(merge_JRH.at[place, r.head_dim], layout=_COLUMN, optimized=False)
            new_top_H = jnp.maximum(top_H, sum_H)
            keep_H, weight_H = jnp.exp2(top_H - new_top_H), jnp.exp2(sum_H - new_top_H)
            acc_EH = acc_EH * lax.broadcast_in_dim(keep_H, tile, [1])
            acc_EH += value_EH * lax.broadcast_in_dim(weight_H, tile, [1])
            return acc_EH, new_top_H, total_H * keep_H + weight_H

        return lax.fori_loop(0, here, one, state)

    state = (
        _constant(0.0, tile, _TILE),
        _constant(_NEVER, (r.heads,), _COLUMN),
        _constant(0.0, (r.heads,), _COLUMN),
    )
    turns = lax.div(count + (r.slots - 1), jnp.int32(r.slots))
    acc_EH, top_H, total_H = lax.fori_loop(0, turns, some, state)
    return acc_EH / lax.broadcast_in_dim(total_H, tile, [1]), top_H + jnp.log2(total_H)


def _merge(
    out: jax.Array, part_IRH: jax.Array, merge_U2: jax.Array, sizes: dict[str, Any], *, interpret: Any
) -> jax.Array:
    """Writes into `out`, in place, each unit of more than one item: the merge where the first kernel has none."""
    slots, heads, head_dim = sizes["slots"], sizes["heads"], sizes["head_dim"]

    def gqa_decode_merge(merge_U2: Any, part_IRH: Any, out_ref: Any, **scratch: Any) -> None:
        r = SimpleNamespace(part_IRH=part_IRH, out=out_ref, **scratch, **sizes)
        r.merge_JRH = (r.merge_JRH,)
        unit = lax.axis_index("unit")
        items, first = merge_U2[unit, 0], merge_U2[unit, 1]

        @pl.when(items > 1)
        def _() -> None:
            _store_heads(r, _combine(r, first, items, 1)[0], unit, _offset(r, unit))
            plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        gqa_decode_merge,
        scratch_types={
            "merge_JRH": plgpu.SMEM((slots, *part_IRH.shape[1:]), jnp.float32),
            "o_HE": plgpu.SMEM((heads, head_dim), out.dtype),
            "merge_full": plgpu.Barrier(num_barriers=slots),
        },
        grid=(merge_U2.shape[0],),
        grid_names=("unit",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out_ref = jax.new_ref(out)
    call(merge_U2, part_IRH, out_ref)
    return jax.freeze(out_ref)
