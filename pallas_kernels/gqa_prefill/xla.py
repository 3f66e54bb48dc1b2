"""gqa_prefill in plain XLA: chunks are cut into query tiles, and waves of tiles go through the key-block loop together.

Only waves that hold work run, and each runs only to the end of its longest tile; memory is that of one wave. Besides
the contract's dimension keys: X tiles of a wave, Q query tokens of a tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blockwise import attend
from pallas_kernels.device import Device
from pallas_kernels.gqa_prefill.contract import GqaPrefillShapes

# Query tokens that a wave holds: enough to fill a GPU; on a CPU one tile at a time wastes least.
_WAVE_TOKENS = {"cpu": 0, "gpu": 2048}


def why_not(shapes: GqaPrefillShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    q_TNGE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    table_RM: jax.Array,
    start_R: jax.Array,
    tokens_R: jax.Array,
    position_R: jax.Array,
    *,
    scale: float,
    device: Device,
) -> jax.Array:
    """See the contract."""
    T = q_TNGE.shape[0]
    Q = tile_tokens(T)
    tiles_R = (tokens_R + Q - 1) // Q
    last_R = jnp.cumsum(tiles_R)
    most_tiles = T // Q + min(T, table_RM.shape[0])  # whole tiles, and a partial one of each chunk
    kind = "gpu" if device.platform == "gpu" else "cpu"
    X = max(1, min(most_tiles, _WAVE_TOKENS[kind] // Q))

    def wave(index: jax.Array, out_TNGE: jax.Array) -> jax.Array:
        tile_X = index * X + jnp.arange(X)
        chunk_X = jnp.minimum(jnp.searchsorted(last_R, tile_X, side="right"), table_RM.shape[0] - 1)
        first_X = (tile_X - (last_R - tiles_R)[chunk_X]) * Q  # within its chunk
        offset_XQ = first_X[:, None] + jnp.arange(Q)
        live_XQ = (offset_XQ < tokens_R[chunk_X][:, None]) & (tile_X < last_R[-1])[:, None]
        row_XQ = jnp.where(live_XQ, start_R[chunk_X][:, None] + offset_XQ, T)
        visible_XQ = jnp.where(live_XQ, position_R[chunk_X][:, None] + offset_XQ + 1, 0)
        q_XQNGE = q_TNGE.at[row_XQ].get(mode="clip")
        tile_out = attend(q_XQNGE, k_PNKE, v_PNKE, table_RM[chunk_X], visible_XQ, scale=scale, device=device)
        return out_TNGE.at[row_XQ].set(tile_out, mode="drop")

    waves = (last_R[-1] + X - 1) // X
    return lax.fori_loop(0, waves, wave, jnp.zeros_like(q_TNGE))


def tile_tokens(tokens: int) -> int:
    """Query tokens of a tile: short ones waste least on short chunks, long ones re-read keys least."""
    if tokens <= 128:
        return 16
    return 64 if tokens <= 1024 else 128
