"""Zeroes the rows of a block of values that nobody wrote: takes a block in shared memory and its number of live rows.

The last page of a row is rarely full. What lies past its tokens may be NaN, and 0 * NaN is NaN: a weight of 0 is not
enough. (Keys need no care: their scores are replaced.) On the GPU a thread writes 16 bytes at a time, and nothing is
read: a swizzle moves bytes only within the 128 bytes of a row, all of which are zeroed alike.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

COLUMNS = 64  # of 2 bytes: those of a swizzled tile, which has 8 rows
_ROWS = 8
_FORM = (plgpu.TilingTransform((_ROWS, COLUMNS)), plgpu.SwizzleTransform(128))
_TILE_BYTES = _ROWS * COLUMNS * 2
_SCALAR = plgpu.Layout.WG_SPLAT


def clear_rows(block_KE: jax.Ref, live: jax.Array, *, native: bool) -> None:
    """Zeroes rows `live` and beyond, by one warpgroup; the caller commits before its next product.

    Args:
      block_KE: bf16 or fp16 in shared memory, tiled by (8, 64) and swizzled by 128 bytes, all columns of what was
        allocated; rows a multiple of 16, columns of 64.
      live: int32 scalar; below 0 clears all rows, beyond the last none.
      native: False in the interpreter, which has no inline assembly.

    Raises:
      ValueError: the shape does not fit.
    """
    rows, columns = block_KE.shape
    if rows % (2 * _ROWS) or columns % COLUMNS:
        raise ValueError(f"clear_rows: a block of {rows} x {columns}, must be multiples of {2 * _ROWS} x {COLUMNS}.")
    if native:
        _store_zeros(block_KE, live)
        return
    for column in range(0, columns, COLUMNS):
        part = block_KE.at[:, column : column + COLUMNS]
        value = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
        row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(row < live, value, jnp.zeros_like(value))


def _store_zeros(block_KE: jax.Ref, live: jax.Array) -> None:
    rows, columns = block_KE.shape
    text = _ptx(rows // _ROWS, columns // COLUMNS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_FORM), _SCALAR))
    def store(_: object, block: ir.Value, live: mgpu.FragmentedArray) -> None:
        thread = arith.andi(mgpu.thread_idx(), mgpu.c(127, ir.IntegerType.get_signless(32)))
        operands = [mgpu_utils.memref_ptr(block), live.registers.item(), thread]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "l,r,r,~{memory}", has_side_effects=True)

    typed: Any = store  # the decorator's result takes no context
    typed(block_KE, live)


def _ptx(groups: int, tiles: int) -> str:
    """Half a warpgroup takes a group of 8 rows, a thread 16 bytes of each tile. $0 block, $1 live, $2 thread."""
    lines = [
        "{.reg .u32 half, place, row, none; .reg .u64 at; .reg .pred stale; mov.u32 none, 0;",
        "shr.u32 half, $2, 6; and.b32 place, $2, 63;",
        "shr.u32 row, place, 3; mad.lo.u32 row, half, 8, row;",
        f"mul.lo.u32 place, place, 16; mad.lo.u32 place, half, {tiles * _TILE_BYTES}, place;",
        "cvt.u64.u32 at, place; add.u64 at, at, $0;",
    ]
    for pair in range(groups // 2):
        lines.append("setp.ge.s32 stale, row, $1;")
        for tile in range(tiles):
            offset = (2 * pair * tiles + tile) * _TILE_BYTES
            lines.append(f"@stale st.shared.v4.u32 [at+{offset}], {{none, none, none, none}};")
        lines.append(f"add.u32 row, row, {2 * _ROWS};")
    return "\n".join([*lines, "}"])
