"""grouped_gemm in plain XLA: one product a tile of rows of one expert; fits every shape and device.

Never lax.ragged_dot: XLA computes every row with every expert on a CPU, and is far slower still on a GPU.
Dimension keys beyond the contract's: W tiles, B rows of a tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device
from pallas_kernels.grouped_gemm.contract import GroupedGemmShapes

_FEWEST_ROWS, _MOST_ROWS = 8, 128


def why_not(shapes: GroupedGemmShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    x: jax.Array,
    w_XPNK: jax.Array,
    size_X: jax.Array,
    *,
    row_A: jax.Array | None,
    weight_A: jax.Array | None,
    device: Device,
) -> jax.Array:
    """[A, N]: x rows (those that row_A names; else x's own) times their expert's weights.

    P 2: silu of the first product times the second. weight_A: multiplies the fp32 product.
    """
    A = x.shape[0] if row_A is None else row_A.shape[0]
    X, P, N, _ = w_XPNK.shape
    B = tile_rows(A, X)
    expert_W, start_W, used = _tiles(size_X, A, B)
    # Full fp32 products where the inputs are fp32; a GPU would take TF32 otherwise.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT

    def tile(index: jax.Array, out_AN: jax.Array) -> jax.Array:
        start = start_W[index]
        place_B = jnp.minimum(start + jnp.arange(B), A - 1)
        x_BK = x[place_B if row_A is None else row_A[place_B]]
        w_PNK = lax.dynamic_index_in_dim(w_XPNK, expert_W[index], keepdims=False)
        y_BPN = jnp.einsum("bk,pnk->bpn", x_BK, w_PNK, precision=precision, preferred_element_type=jnp.float32)
        y_BN = jax.nn.silu(y_BPN[:, 0]) * y_BPN[:, 1] if P == 2 else y_BPN[:, 0]
        if weight_A is not None:
            y_BN *= weight_A[place_B][:, None]
        # Rows past the tile's expert belong to later tiles, which overwrite them.
        return lax.dynamic_update_slice_in_dim(out_AN, y_BN.astype(x.dtype), start, axis=0)

    # On a GPU a count that the host does not know would be read back before every step of the loop.
    steps = start_W.shape[0] if device.platform == "gpu" else used
    return lax.fori_loop(0, steps, tile, jnp.zeros((A + B, N), x.dtype))[:A]


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: about an expert's share, a power of two."""
    share = -(-rows // experts)
    return max(_FEWEST_ROWS, min(_MOST_ROWS, 1 << (share - 1).bit_length()))


def _tiles(size_X: jax.Array, rows: int, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Expert and first row of each tile in ascending order, and how many are used; the rest write past the rows."""
    slots = rows // tile + min(rows, size_X.shape[0])
    tiles_X = (size_X + tile - 1) // tile
    last_X = jnp.cumsum(tiles_X, dtype=jnp.int32)
    slot_W = jnp.arange(slots, dtype=jnp.int32)
    expert_W = jnp.minimum((last_X <= slot_W[:, None]).sum(axis=1, dtype=jnp.int32), size_X.shape[0] - 1)
    first_X = jnp.cumsum(size_X, dtype=jnp.int32) - size_X
    start_W = first_X[expert_W] + (slot_W - (last_X - tiles_X)[expert_W]) * tile
    return expert_W, jnp.where(slot_W < last_X[-1], start_W, rows), last_X[-1]
