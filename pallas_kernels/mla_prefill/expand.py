"""The Hopper kernel of mla_prefill that expands latents: pages in, keys (nope part) and values of some heads out.

Each CTA has an equal share of all (128 scratch rows, head) units, the heads of the same rows one after the other, so
that the rows' latents stay in shared memory while the heads' weights pass by. Two warpgroups compute 64 rows each, a
third copies. What is expanded are the live rows only, whatever the scratch could hold.
Dimension keys beyond the contract's: S stages, J rows of a warpgroup, C columns of a 64-wide chunk, X chunks of the
rank, I output columns of a piece, Z scratch rows, N nope dimensions.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_prefill.common import PAGE_TOKENS, Tuning
from pallas_kernels.mla_prefill.tiles import BLOCK_ROWS, Expansion
from pallas_kernels.tile_attention import COLUMNS, COPY, ROWS, SWIZZLED, TILE

_STAGE_COLUMNS = 128  # of the rank, in flight: weights of 64 KB


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("scratch_rows", "tuning", "interpret"))
def expand(
    latent_PKL: jax.Array,
    key_up_HNR: jax.Array,
    value_up_HVR: jax.Array,
    table_RM: jax.Array,
    pass_1: jax.Array,
    where: Expansion,
    *,
    scratch_rows: int,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Keys without their rope part [Z, N] and values [Z, V] of the heads of a pass, in the latents' dtype.

    Row `head in the pass * rows of a head + base_R[chunk] + token`. Of the values, rows past a chunk's end are zeros up
    to the next multiple of 128; other rows of no token may be anything.
    """
    heads, nope_dim, rank = key_up_HNR.shape
    value_dim, dtype = value_up_HVR.shape[1], latent_PKL.dtype
    together = nope_dim + value_dim <= 256  # the widest product
    pieces = (("key", "value"),) if together else (("key",), ("value",))
    width = nope_dim + value_dim if together else max(nope_dim, value_dim)
    ctas, columns = tuning.ctas, tuning.up_columns
    chunks, stages = rank // columns, _STAGE_COLUMNS // columns

    def mla_prefill_expand(*refs: Any, **scratch: Any) -> None:
        names = ("sizes_3", "base_R", "context_R", "chunk_Y", "table_RM", "pass_1", "latent_PKL", "up_key", "up_value")
        r = SimpleNamespace(**dict(zip((*names, "out_key", "out_value"), refs, strict=True)), **scratch)
        r.native, r.pieces, r.columns, r.stages = interpret is None, pieces, columns, stages
        r.chunks, r.steps = chunks, len(pieces) * chunks
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        r.first_head = r.pass_1[0] * r.sizes_3[1]
        r.heads = jnp.clip(heads - r.first_head, 0, r.sizes_3[1])
        units = lax.div(r.sizes_3[0], jnp.int32(BLOCK_ROWS)) * r.heads
        share = lax.div(units, jnp.int32(ctas))
        rest = units - share * ctas
        r.start = cta * share + jnp.minimum(cta, rest)
        r.end = r.start + share + (cta < rest).astype(jnp.int32)
        pl.when((r.end > r.start) & (warpgroup < COPY))(lambda: _compute(r, warpgroup))
        pl.when((r.end > r.start) & (warpgroup == COPY))(lambda: _copy(r))

    def operand(*shape: int) -> Any:
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
        return plgpu.SMEM((*shape, columns), dtype, transforms=transforms)

    call = plgpu.kernel(
        mla_prefill_expand,
        out_type=(
            jax.ShapeDtypeStruct((scratch_rows, nope_dim), dtype),
            jax.ShapeDtypeStruct((scratch_rows, value_dim), dtype),
        ),
        scratch_types={
            "rows_XJC": operand(chunks, BLOCK_ROWS),
            "up_SIC": operand(stages, width),
            "out_2SJC": plgpu.SMEM((2, 2, ROWS, COLUMNS), dtype, transforms=SWIZZLED),
            "rows_full": plgpu.Barrier(num_arrivals=BLOCK_ROWS // PAGE_TOKENS, num_barriers=chunks),
            "rows_free": plgpu.Barrier(num_arrivals=2, num_barriers=chunks),
            "up_full": plgpu.Barrier(num_arrivals=len(pieces[0]), num_barriers=stages),
            "up_free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )
    return call(*where, table_RM, pass_1, latent_PKL, key_up_HNR, value_up_HVR)


def _unit(r: SimpleNamespace, unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Block of scratch rows and head within the pass; whether the rows are new, and whether this is their last unit."""
    block = lax.div(unit, r.heads)
    head = unit - block * r.heads
    return block, head, (unit == r.start) | (head == 0), (unit + 1 == r.end) | (head + 1 == r.heads)


def _copy(r: SimpleNamespace) -> None:
    """The copying warpgroup: a block's latents once, the weights of each unit."""
    if r.native:
        plgpu.set_max_registers(40, action="decrease")

    @pl.loop(r.start, r.end)
    def _(unit: jax.Array) -> None:
        block, head, is_new, _ = _unit(r, unit)
        chunk = r.chunk_Y[block]
        first = lax.div(block * BLOCK_ROWS - r.base_R[chunk], jnp.int32(PAGE_TOKENS))
        # The last block may reach past the request's pages, where entries may be anything.
        indices = [jnp.minimum(first + i, r.table_RM.shape[1] - 1) for i in range(BLOCK_ROWS // PAGE_TOKENS)]
        pages = [jnp.clip(r.table_RM[chunk, i], 0, r.latent_PKL.shape[0] - 1) for i in indices]
        for piece, parts in enumerate(r.pieces):

            @pl.loop(0, r.chunks)
            def _(i: jax.Array, piece: int = piece, parts: tuple[str, ...] = parts) -> None:
                columns = pl.ds(pl.multiple_of(i * r.columns, r.columns), r.columns)
                if piece == 0:

                    @pl.when(is_new)
                    def _() -> None:
                        pl.when(unit > r.start)(lambda: plgpu.barrier_wait(r.rows_free.at[i]))
                        for j, page in enumerate(pages):
                            place = r.rows_XJC.at[i, pl.ds(j * PAGE_TOKENS, PAGE_TOKENS)]
                            plgpu.copy_gmem_to_smem(r.latent_PKL.at[page, :, columns], place, r.rows_full.at[i])

                step = (unit - r.start) * r.steps + piece * r.chunks + i
                stage = lax.rem(step, jnp.int32(r.stages))
                pl.when(step >= r.stages)(lambda: plgpu.barrier_wait(r.up_free.at[stage]))
                row = 0
                for part in parts:
                    up = getattr(r, f"up_{part}")
                    place = r.up_SIC.at[stage, pl.ds(row, up.shape[1])]
                    plgpu.copy_gmem_to_smem(up.at[r.first_head + head, :, columns], place, r.up_full.at[stage])
                    row += up.shape[1]

    # Every completion of a barrier must have been waited for when a kernel ends.
    for i in range(r.stages):
        plgpu.barrier_wait(r.up_free.at[i])
    for i in range(r.chunks):
        plgpu.barrier_wait(r.rows_free.at[i])


def _compute(r: SimpleNamespace, side: jax.Array) -> None:
    """A computing warpgroup: its 64 rows of each unit."""
    if r.native:
        plgpu.set_max_registers(232, action="increase")

    @pl.loop(r.start, r.end)
    def _(unit: jax.Array) -> None:
        block, head, is_new, is_last = _unit(r, unit)
        chunk = r.chunk_Y[block]
        live = r.context_R[chunk] - (block * BLOCK_ROWS - r.base_R[chunk]) - side * ROWS
        for piece, parts in enumerate(r.pieces):
            widths = [getattr(r, f"up_{part}").shape[1] for part in parts]
            first_step = (unit - r.start) * r.steps + piece * r.chunks

            def product(
                acc: Any, piece: int = piece, width: int = sum(widths), first_step: jax.Array = first_step
            ) -> jax.Array:
                for i in range(r.chunks):
                    stage = lax.rem(first_step + i, jnp.int32(r.stages))
                    if piece == 0:
                        pl.when(is_new)(lambda i=i: plgpu.barrier_wait(r.rows_full.at[i]))
                    plgpu.barrier_wait(r.up_full.at[stage])
                    rows = r.rows_XJC.at[i, pl.ds(pl.multiple_of(side * ROWS, ROWS), ROWS)]
                    plgpu.wgmma(acc, rows, r.up_SIC.at[stage, pl.ds(0, width)].T)
                    if i > 0:
                        plgpu.wgmma_wait(1)
                        plgpu.barrier_arrive(r.up_free.at[lax.rem(first_step + i - 1, jnp.int32(r.stages))])
                found = acc[...]
                plgpu.barrier_arrive(r.up_free.at[lax.rem(first_step + r.chunks - 1, jnp.int32(r.stages))])
                return found

            found_JI = pl.run_scoped(product, plgpu.ACC((ROWS, sum(widths)), jnp.float32))
            if piece == len(r.pieces) - 1:

                @pl.when(is_last)
                def _() -> None:
                    for i in range(r.chunks):
                        plgpu.barrier_arrive(r.rows_free.at[i])

            row = pl.multiple_of(head * r.sizes_3[0] + block * BLOCK_ROWS + side * ROWS, ROWS)
            column = 0
            for part, width in zip(parts, widths, strict=True):
                part_JI = found_JI[:, column : column + width]
                _store(r, side, getattr(r, f"out_{part}"), row, part_JI, live if part == "value" else None)
                column += width

    plgpu.wait_smem_to_gmem(0)


def _store(
    r: SimpleNamespace, side: jax.Array, out: Any, row: jax.Array, part_JI: jax.Array, live: jax.Array | None
) -> None:
    """64 columns at a time; rows from `live` on become zeros: they may be NaN, and a weight of 0 does not undo that."""
    if live is not None:
        token = plgpu.broadcasted_iota(jnp.int32, part_JI.shape, 0, layout=TILE)
        part_JI = jnp.where(token < live, part_JI, jnp.zeros_like(part_JI))
    for i, column in enumerate(range(0, part_JI.shape[1], COLUMNS)):
        place = r.out_2SJC.at[side, i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        place[...] = part_JI[:, column : column + COLUMNS].astype(r.out_2SJC.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(place, out.at[pl.ds(row, ROWS), pl.ds(column, COLUMNS)])
