"""The Hopper attention kernel of mla_prefill in Pallas Mosaic GPU: query tiles over expanded keys and values.

The loop is tile_attention.py's, which gqa_prefill has too. Keys come in two parts: the expanded one from scratch rows,
the shared rope part from the latent pages themselves. NOTES.md has the design and figures.
Dimension keys beyond the contract's: W tile slots, S stages, L tokens of a key block, C columns of a 64-wide chunk,
Z scratch rows, N nope dimensions.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tile_attention, tile_copy
from pallas_kernels.mla_prefill.common import PAGE_TOKENS, Tuning
from pallas_kernels.query_tiles import BASE, CHUNK, END_LIVE, FIRST_LIVE, KEYS, POSITION, ROW, Tiles
from pallas_kernels.tile_attention import COLUMNS, COPY, SWIZZLED


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scale", "tuning", "interpret"))
def attend(
    q_THE: jax.Array,
    latent_PKL: jax.Array,
    key_ZN: jax.Array,
    value_ZV: jax.Array,
    table_RM: jax.Array,
    pass_1: jax.Array,
    tiles: Tiles,
    sizes_3: jax.Array,
    *,
    scale: float,
    tuning: Tuning,
    into_THV: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """[T, H, V] in q's dtype, of the heads of a pass; zeros for rows of no chunk in pass 0.

    key_ZN, value_ZV: as `expand` leaves them for that pass. sizes_3: see tiles.py. into_THV: the array to write the
    result into, in place.
    """
    _, heads, head_dim = q_THE.shape
    value_dim, nope_dim = value_ZV.shape[1], key_ZN.shape[1]
    block, stages, native = tuning.block, tuning.stages, interpret is None
    sizes = {
        "heads": heads,
        "nope_dim": nope_dim,
        "rope_at": latent_PKL.shape[2] - (head_dim - nope_dim),
        "value_dim": value_dim,
        "block": block,
        "stages": stages,
        "scale": scale * math.log2(math.e),
        "turns": tuning.turns,
        "ctas": tuning.ctas,
        "registers": tuning.compute_registers,
        "copy_registers": tuning.copy_registers,
        "page_tokens": PAGE_TOKENS,
        "pool_pages": latent_PKL.shape[0],
        "clean": False,  # values past a request's end are zeros
        "native": native,
    }

    def mla_prefill_tile(*refs: Any, **scratch: Any) -> None:
        names = ("sizes_3", "table_RM", "pass_1", "q_THE", "latent_PKL", "key_ZN", "value_ZV", "out_THV")
        names = (*Tiles._fields, *names)
        r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch, **sizes)
        tile_attention.views(r)
        r.cta = lax.axis_index("cta")
        r.first_head = r.pass_1[0] * r.sizes_3[1]
        r.total = r.used_1[0] * jnp.clip(heads - r.first_head, 0, r.sizes_3[1])
        r.zero_gaps = r.pass_1[0] == 0
        r.look_up, r.start_scores = functools.partial(_look_up, r), functools.partial(_start_scores, r)
        r.fetch_keys, r.fetch_values = functools.partial(_fetch_keys, r), functools.partial(_fetch_values, r)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < COPY)(lambda: tile_attention.compute(r, warpgroup))
        pl.when(warpgroup == COPY)(lambda: tile_copy.copy(r))

    scratch_types = tile_attention.scratch(
        q_THE.dtype,
        head_dim=head_dim,
        value_dim=value_dim,
        block=block,
        stages=stages,
        key_copies=1 + block // PAGE_TOKENS,
        value_copies=1,
        native=native,
    )
    scratch_types |= {
        "k_SLN": plgpu.SMEM((stages, block, nope_dim), q_THE.dtype, transforms=SWIZZLED),
        "rope_SLC": plgpu.SMEM((stages, block, COLUMNS), q_THE.dtype, transforms=SWIZZLED),
    }
    call = plgpu.kernel(
        mla_prefill_tile,
        out_type=jax.ShapeDtypeStruct((*q_THE.shape[:2], value_dim), q_THE.dtype) if into_THV is None else (),
        scratch_types=scratch_types,
        grid=(tuning.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    arrays = (*tiles, sizes_3, table_RM, pass_1, q_THE, latent_PKL, key_ZN, value_ZV)
    if into_THV is None:
        return call(*arrays)
    out = jax.new_ref(into_THV)
    call(*arrays, out)
    return jax.freeze(out)


def _look_up(r: SimpleNamespace, index: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """An item's words and chunk, and the scratch row of its request's first token."""
    there = index < r.total
    index = jnp.clip(index, 0, jnp.maximum(r.total - 1, 0))
    # A section is all tiles of some heads: as many as the L2 cache can hold the keys and values of.
    in_section = r.used_1[0] * r.sizes_3[2]
    section = lax.div(index, jnp.maximum(in_section, 1))
    index = index - section * in_section
    slot = lax.div(index, r.sizes_3[2])
    pass_head = section * r.sizes_3[2] + index - slot * r.sizes_3[2]
    keys, chunk, base = (r.tile_W8[slot, which] for which in (KEYS, CHUNK, BASE))
    blocks = jnp.where(there, lax.div(keys + (r.block - 1), jnp.int32(r.block)), 0)
    live = (r.tile_W8[slot, which] for which in (POSITION, ROW, FIRST_LIVE, END_LIVE))
    return (blocks, *live, r.first_head + pass_head), chunk, pass_head * r.sizes_3[0] + base


def _rows(r: SimpleNamespace, block: jax.Array | int, first_row: jax.Array) -> Any:
    return pl.ds(pl.multiple_of(first_row + block * r.block, r.block), r.block)


def _fetch_keys(
    r: SimpleNamespace,
    stage: jax.Array,
    block: jax.Array | int,
    pages: tuple[jax.Array, ...],
    first_row: jax.Array,
) -> None:
    plgpu.copy_gmem_to_smem(r.key_ZN.at[_rows(r, block, first_row)], r.k_SLN.at[stage], r.k_full.at[stage])
    for i, page in enumerate(pages):
        part = r.latent_PKL.at[page, :, pl.ds(r.rope_at, COLUMNS)]
        place = r.rope_SLC.at[stage, pl.ds(i * PAGE_TOKENS, PAGE_TOKENS)]
        plgpu.copy_gmem_to_smem(part, place, r.k_full.at[stage])


def _fetch_values(
    r: SimpleNamespace,
    stage: jax.Array,
    block: jax.Array | int,
    _pages: tuple[jax.Array, ...],
    first_row: jax.Array,
) -> None:
    plgpu.copy_gmem_to_smem(r.value_ZV.at[_rows(r, block, first_row)], r.v_SLV.at[stage], r.v_full.at[stage])


def _start_scores(r: SimpleNamespace, side: jax.Array, stage: jax.Array, out: Any) -> None:
    for i in range(r.nope_dim // COLUMNS):
        keys = r.k_SLN.at[stage, :, pl.ds(i * COLUMNS, COLUMNS)]
        plgpu.wgmma(out, r.q_2XJC.at[side, i], keys.T)
    plgpu.wgmma(out, r.q_2XJC.at[side, r.nope_dim // COLUMNS], r.rope_SLC.at[stage].T)
