"""Cuts chunks into query tiles, heaviest first: takes chunk borders, gives the kernel its work list.

Dimension keys: W tile slots, of which the unused ones have no live row; Z blocks of packed rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """The work list, int32 [W] each. Made from borders only, so that XLA makes it once for all layers of a step."""

    chunk_W: jax.Array
    row_W: jax.Array  # packed row of the tile's row 0
    position_W: jax.Array  # of row 0 in its request; negative where row 0 lies before the chunk
    first_live_W: jax.Array  # rows first_live .. end_live - 1 of the tile are this tile's to write
    end_live_W: jax.Array
    keys_W: jax.Array  # tokens that the last live row sees


def tile_slots(tokens: int, chunks: int, tile_tokens: int) -> int:
    """Tiles that any chunks can need: whole ones, and a partial one of each chunk."""
    return tokens // tile_tokens + min(tokens, chunks)


def cut_tiles(
    start_R: jax.Array, tokens_R: jax.Array, position_R: jax.Array, *, tokens: int, tile_tokens: int
) -> Tiles:
    """tokens: T, at least tile_tokens. A tile that would pass the last packed row is moved up, its rows masked."""
    slot_W = jnp.arange(tile_slots(tokens, tokens_R.shape[0], tile_tokens), dtype=jnp.int32)
    tiles_R = (tokens_R + tile_tokens - 1) // tile_tokens
    last_R = jnp.cumsum(tiles_R, dtype=jnp.int32)
    chunk_W = (last_R <= slot_W[:, None]).sum(axis=1, dtype=jnp.int32)
    used_W = chunk_W < tokens_R.shape[0]
    chunk_W = jnp.minimum(chunk_W, tokens_R.shape[0] - 1)
    offset_W = (slot_W - (last_R - tiles_R)[chunk_W]) * tile_tokens
    wanted_W = start_R[chunk_W] + offset_W
    row_W = jnp.minimum(wanted_W, tokens - tile_tokens)
    moved_W = wanted_W - row_W
    live_W = jnp.where(used_W, jnp.minimum(tokens_R[chunk_W] - offset_W, tile_tokens), 0)
    keys_W = jnp.where(used_W, position_R[chunk_W] + offset_W + live_W, 0)
    order_W = jnp.argsort(-keys_W)  # the longest first: what starts last should end soon
    made = Tiles(
        chunk_W=chunk_W,
        row_W=jnp.where(used_W, row_W, 0),
        position_W=position_R[chunk_W] + offset_W - moved_W,
        first_live_W=moved_W,
        end_live_W=jnp.where(used_W, moved_W + live_W, 0),
        keys_W=keys_W,
    )
    return Tiles(*(field[order_W] for field in made))


class Gaps(NamedTuple):
    """The packed rows of no chunk, int32."""

    rows_Z: jax.Array  # how many a block has
    owned_T: jax.Array  # 1 where a row is some chunk's


def find_gaps(start_R: jax.Array, tokens_R: jax.Array, *, tokens: int, block_rows: int) -> Gaps:
    """tokens: T; the last block may be a short one."""
    row_T = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    owned_T = ((row_T >= start_R) & (row_T < start_R + tokens_R)).any(axis=1).astype(jnp.int32)
    padded = jnp.pad(1 - owned_T, (0, -tokens % block_rows))
    return Gaps(padded.reshape(-1, block_rows).sum(axis=1, dtype=jnp.int32), owned_T)
