"""The Hopper kernel of gqa_prefill in Pallas Mosaic GPU: query tiles over pages of keys and values.

The loop is tile_attention.py's, which mla_prefill has too; one copy a page. NOTES.md has the design and figures.
Dimension keys beyond the contract's: W tile slots, S stages, L tokens of a key block.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tile_attention, tile_copy
from pallas_kernels.query_tiles import CHUNK, END_LIVE, FIRST_LIVE, KEYS, POSITION, ROW, Tiles
from pallas_kernels.tile_attention import COLUMNS, COPY, SWIZZLED

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    pages: int = 2  # of a key block
    stages: int = 2  # key blocks in flight
    turns: bool = True  # the warpgroups alternate in the tensor cores
    ctas: int = 132  # the multiprocessors
    compute_registers: int = 240
    copy_registers: int = 24


def prefill(
    q_THE: jax.Array,
    k_PKE: jax.Array,
    v_PKE: jax.Array,
    table_RM: jax.Array,
    tiles: Tiles,
    *,
    kv_heads: int,
    scale: float,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """[T, H, E] in q's dtype, zeros for rows of no chunk. k_PKE, v_PKE: page * N + head is the first axis."""
    _, heads, head_dim = q_THE.shape
    block, native = tuning.pages * PAGE_TOKENS, interpret is None
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "value_dim": head_dim,
        "block": block,
        "stages": tuning.stages,
        "scale": scale * math.log2(math.e),
        "turns": tuning.turns,
        "ctas": tuning.ctas,
        "registers": tuning.compute_registers,
        "copy_registers": tuning.copy_registers,
        "page_tokens": PAGE_TOKENS,
        "pool_pages": k_PKE.shape[0] // kv_heads,
        "clean": True,  # values of pages past a request's end may be anything
        "native": native,
        "zero_gaps": True,
    }

    def gqa_prefill_tile(*refs: Any, **scratch: Any) -> None:
        names = (*Tiles._fields, "table_RM", "q_THE", "k_PKE", "v_PKE", "out_THV")
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        tile_attention.views(r)
        r.cta, r.total = lax.axis_index("cta"), r.used_1[0] * heads
        r.look_up, r.start_scores = functools.partial(_look_up, r), functools.partial(_start_scores, r)
        r.fetch_keys = functools.partial(_fetch, r, r.k_PKE, r.k_SLE, r.k_full)
        r.fetch_values = functools.partial(_fetch, r, r.v_PKE, r.v_SLV, r.v_full)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < COPY)(lambda: tile_attention.compute(r, warpgroup))
        pl.when(warpgroup == COPY)(lambda: tile_copy.copy(r))

    scratch_types = tile_attention.scratch(
        q_THE.dtype,
        head_dim=head_dim,
        value_dim=head_dim,
        block=block,
        stages=tuning.stages,
        key_copies=tuning.pages,
        value_copies=tuning.pages,
        native=native,
    )
    scratch_types["k_SLE"] = plgpu.SMEM((tuning.stages, block, head_dim), q_THE.dtype, transforms=SWIZZLED)
    call = plgpu.kernel(
        gqa_prefill_tile,
        out_type=jax.ShapeDtypeStruct(q_THE.shape, q_THE.dtype),
        scratch_types=scratch_types,
        grid=(tuning.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    return call(*tiles, table_RM, q_THE, k_PKE, v_PKE)


def _look_up(r: SimpleNamespace, index: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """An item's words and chunk, and its kv head. The heads of a tile come one after the other: they share pages."""
    there = index < r.total
    index = jnp.clip(index, 0, jnp.maximum(r.total - 1, 0))
    slot = lax.div(index, jnp.int32(r.heads))
    head = index - slot * r.heads
    keys, chunk = r.tile_W8[slot, KEYS], r.tile_W8[slot, CHUNK]
    blocks = jnp.where(there, lax.div(keys + (r.block - 1), jnp.int32(r.block)), 0)
    live = (r.tile_W8[slot, which] for which in (POSITION, ROW, FIRST_LIVE, END_LIVE))
    return (blocks, *live, head, keys), chunk, lax.div(head, jnp.int32(r.heads // r.kv_heads))


def _fetch(
    r: SimpleNamespace,
    pool: Any,
    buffer: Any,
    full: Any,
    stage: jax.Array,
    _block: jax.Array | int,
    pages: tuple[jax.Array, ...],
    kv_head: jax.Array,
) -> None:
    for i, page in enumerate(pages):
        rows = pl.ds(i * PAGE_TOKENS, PAGE_TOKENS)
        plgpu.copy_gmem_to_smem(pool.at[page * r.kv_heads + kv_head], buffer.at[stage, rows], full.at[stage])


def _start_scores(r: SimpleNamespace, side: jax.Array, stage: jax.Array, out: Any) -> None:
    for i in range(r.value_dim // COLUMNS):
        keys = r.k_SLE.at[stage, :, pl.ds(i * COLUMNS, COLUMNS)]
        plgpu.wgmma(out, r.q_2XJC.at[side, i], keys.T)
