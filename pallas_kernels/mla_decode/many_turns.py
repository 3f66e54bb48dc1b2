"""The Hopper kernel of mla_decode for many queries a row: 64 of them a CTA on wgmma's M axis, S = Q K^T, O = P V.

Four warpgroups: one computes scores and weights, two add up half of the 512 columns each, one copies. Scores of a page
and values of the page before take turns on the tensor cores, so that a page's softmax hides behind the values of the
page before. Half of the queries stay in the scoring warpgroup's registers; that leaves room for two and a half pages,
a ring of boxes of 128 columns that are refilled as soon as their one last reader is done. Queries come through the
same ring, as one page more at the head of an item. NOTES.md has the design and figures.
Dimension keys beyond the contract's: Q queries of a row (heads of all its query tokens, padded), A parts, W words of a
record, I items (see split.py), M queries of a CTA, J rope dimensions, Z boxes in shared memory, C columns of a box,
U stages of the rotated part.
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

from pallas_kernels import grid_sync
from pallas_kernels.mla_decode.common import PAGE_TOKENS, RANK, SWIZZLED, Tuning, for_each_page
from pallas_kernels.mla_decode.many_add import add
from pallas_kernels.mla_decode.many_common import (
    BLOCK_QUERIES,
    BOX,
    BOXES,
    ENDS,
    HELD,
    ORDER,
    REGISTERS,
    ROPE_DIM,
    SLOTS,
    STAGES,
    for_each_item,
    slot_of,
)
from pallas_kernels.mla_decode.many_score import score
from pallas_kernels.mla_decode.merge import merge
from pallas_kernels.mla_decode.work_list import records
from pallas_kernels.split import Split, num_items

_WARPGROUPS = 4
_LEFT, _RIGHT, _SCORE, _COPY = range(_WARPGROUPS)


def decode(
    q_BQR: jax.Array,
    rope_q_BQJ: jax.Array,
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
    """out [B, Q, rank], with Q padded as it came.

    q_BQR, rope_q_BQJ: the two parts of the queries, `tokens` of them for each head, token by token; past `queries` is
    padding, up to a multiple of 64. All CTAs must be resident at once: parts times blocks of 64 queries is 132 at most.
    """
    rows, padded, _ = q_BQR.shape
    items, dtype = num_items(tuning.parts, rows), q_BQR.dtype
    blocks = padded // BLOCK_QUERIES
    twins = tuning.multicast and blocks % 2 == 0
    sizes = {
        "tokens": tokens,
        "token_heads": queries // tokens,
        "scale": scale * math.log2(math.e),
        "shared": {"collective_axes": "twin"} if twins else {},
        # The interpreter knows neither an accumulator that is carried in (any other form spills registers on the GPU)
        # nor an operand in registers, nor how CTAs meet: there a second kernel merges.
        "native": interpret is None,
    }

    def mla_decode_many_turns(*refs: Any, **scratch: Any) -> None:
        names = ("record_AW", "words_NB", "table_BM", "length_B", "q_BQR", "rope_q_BQJ", "latent_PKL")
        names += ("out_BQR", "part_IQR", "lse_IQ")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        r.block = lax.axis_index("pair") * 2 + lax.axis_index("twin") if twins else lax.axis_index("block")
        r.queries = pl.ds(r.block * BLOCK_QUERIES, BLOCK_QUERIES)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup <= _RIGHT)(lambda: add(r, warpgroup))
        pl.when(warpgroup == _SCORE)(lambda: score(r))
        pl.when(warpgroup == _COPY)(lambda: _copy(r))

    call = plgpu.kernel(
        mla_decode_many_turns,
        out_type=(
            jax.ShapeDtypeStruct((rows, padded, RANK), dtype),
            jax.ShapeDtypeStruct((items, padded, RANK), jnp.float32),
            jax.ShapeDtypeStruct((items, padded), jnp.float32),
        ),
        scratch_types=_scratch(dtype, native=interpret is None, twins=twins),
        grid=(blocks // 2 if twins else blocks, tuning.parts),
        grid_names=("pair" if twins else "block", "part"),
        cluster=(2,) if twins else (),
        cluster_names=("twin",) if twins else (),
        num_threads=_WARPGROUPS,
        thread_name="warpgroup",
        interpret=interpret,
        # Maxima and sums go along rows, within a warp: no scratch, and 2 KiB of it would not fit.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    words_NB = grid_sync.zero_words(jnp.broadcast_to(length_B, (blocks, rows)))
    lists = (records(length_B, split, page_tokens=PAGE_TOKENS), words_NB, table_BM, length_B)
    out_BQR, part_IQR, lse_IQ = call(*lists, q_BQR, rope_q_BQJ, latent_PKL)
    return out_BQR if interpret is None else merge(out_BQR, part_IQR, lse_IQ, split, tuning=tuning, interpret=interpret)


def _scratch(dtype: Any, *, native: bool, twins: bool) -> dict[str, Any]:
    """Shared memory: 230,656 bytes and the barriers."""

    def tiles(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)

    def free(count: int) -> Any:
        """What twins share may be replaced when both have read it."""
        if twins:
            return plgpu.ClusterBarrier(collective_axes=("twin",), num_barriers=count)
        return plgpu.Barrier(num_barriers=count)

    held = {} if native else {"held_MR": tiles(BLOCK_QUERIES, HELD * BOX), "held_MJ": tiles(BLOCK_QUERIES, ROPE_DIM)}
    return held | {
        "q_MR": tiles(BLOCK_QUERIES, RANK - HELD * BOX),
        "box_ZKC": tiles(SLOTS, PAGE_TOKENS, BOX),
        "rope_UKJ": tiles(STAGES, PAGE_TOKENS, ROPE_DIM),
        "p_2MK": tiles(2, BLOCK_QUERIES, PAGE_TOKENS),
        "keep_2M": plgpu.SMEM((2, BLOCK_QUERIES), jnp.float32),
        "sum_3M": plgpu.SMEM((ENDS, BLOCK_QUERIES), jnp.float32),
        "box_full": plgpu.Barrier(num_barriers=SLOTS),
        "box_free": free(SLOTS),
        "rope_full": plgpu.Barrier(num_barriers=STAGES),
        "rope_free": free(STAGES),
        "keep_full": plgpu.Barrier(num_barriers=2),
        "p_full": plgpu.Barrier(num_barriers=2),
        "p_free": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "end_full": plgpu.Barrier(num_barriers=ENDS),
    }


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: boxes as far ahead as the ring allows."""
    plgpu.set_max_registers(REGISTERS[2], action="decrease")

    def fetch(place: jax.Array, latent_XR: Any, rope_XJ: Any, shared: dict[str, str]) -> None:
        stage = lax.rem(place, jnp.int32(STAGES))
        pl.when(place >= STAGES)(lambda: plgpu.barrier_wait(r.rope_free.at[stage]))
        plgpu.copy_gmem_to_smem(rope_XJ, r.rope_UKJ.at[stage], r.rope_full.at[stage], **shared)
        for box, block in enumerate(ORDER):
            slot = slot_of(place, box)
            again = place * BOXES + box >= SLOTS
            pl.when(again)(lambda slot=slot: plgpu.barrier_wait(r.box_free.at[slot]))
            source = latent_XR(pl.ds(block * BOX, BOX))
            plgpu.copy_gmem_to_smem(source, r.box_ZKC.at[slot], r.box_full.at[slot], **shared)

    def visit(
        item: jax.Array, row: jax.Array, _: Any, start: jax.Array, end: jax.Array, before: Any, *_more: Any
    ) -> None:
        base = before + item
        fetch(base, lambda columns: r.q_BQR.at[row, r.queries, columns], r.rope_q_BQJ.at[row, r.queries], {})

        def page(index: jax.Array, page_id: jax.Array) -> None:
            rope = r.latent_PKL.at[page_id, :, pl.ds(RANK, ROPE_DIM)]
            fetch(base + 1 + index - start, lambda columns: r.latent_PKL.at[page_id, :, columns], rope, r.shared)

        for_each_page(r, row, start, end, page)

    items, pages = for_each_item(r, visit)
    places = items + pages

    # Every completion of a barrier must have been waited for when a kernel ends.
    @pl.loop(jnp.maximum(places - STAGES, 0), places)
    def _(place: jax.Array) -> None:
        plgpu.barrier_wait(r.rope_free.at[lax.rem(place, jnp.int32(STAGES))])

    @pl.loop(jnp.maximum(places * BOXES - SLOTS, 0), places * BOXES)
    def _(box: jax.Array) -> None:
        plgpu.barrier_wait(r.box_free.at[lax.rem(box, jnp.int32(SLOTS))])
