"""Cuts chunks of queries into tiles, heaviest first: takes chunk borders, gives what the prefill kernels work through.

Dimension keys: W tile slots, of which the unused ones come last; Z blocks of packed rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import grid_sync

TILE_TOKENS = 128  # query rows of a tile
# The words of a tile: one line of memory.
KEYS = 0  # tokens that the last live row sees
POSITION = 1  # of row 0 in its request; negative where row 0 lies before the chunk
ROW = 2  # packed row of the tile's row 0
FIRST_LIVE, END_LIVE = 3, 4  # rows first_live .. end_live - 1 of the tile are this tile's to write
CHUNK = 5
BASE = 6  # what a kernel knows of each chunk


class Tiles(NamedTuple):
    """int32. Made from borders only, so that XLA makes it once for all layers of a step."""

    used_1: jax.Array  # tile slots
    tile_W8: jax.Array
    gaps_Z: jax.Array  # rows of no chunk in each block of TILE_TOKENS packed rows
    owned_T: jax.Array  # 1 where a packed row is some chunk's
    next_2: jax.Array  # words that the CTAs of a kernel take their items by, see tile_queue.py


def tile_slots(tokens: int, chunks: int) -> int:
    """Tiles that any chunks can need: whole ones, and a partial one of each chunk."""
    return tokens // TILE_TOKENS + min(tokens, chunks)


def cut_tiles(
    start_R: jax.Array, tokens_R: jax.Array, position_R: jax.Array, *, tokens: int, base_R: jax.Array | None = None
) -> Tiles:
    """tokens: T, at least TILE_TOKENS. base_R: a word of each chunk that its tiles are given, 0 where there is none.

    The tiles with the most keys come first. A tile that would pass the last packed row is moved up, its rows masked.
    """
    chunks = tokens_R.shape[0]
    slot_W = jnp.arange(tile_slots(tokens, chunks), dtype=jnp.int32)
    tiles_R = (tokens_R + TILE_TOKENS - 1) // TILE_TOKENS
    last_R = jnp.cumsum(tiles_R, dtype=jnp.int32)
    chunk_W = (last_R <= slot_W[:, None]).sum(axis=1, dtype=jnp.int32)
    used_W = chunk_W < chunks
    chunk_W = jnp.minimum(chunk_W, chunks - 1)
    offset_W = (slot_W - (last_R - tiles_R)[chunk_W]) * TILE_TOKENS
    wanted_W = start_R[chunk_W] + offset_W
    row_W = jnp.minimum(wanted_W, tokens - TILE_TOKENS)
    moved_W = wanted_W - row_W
    live_W = jnp.where(used_W, jnp.minimum(tokens_R[chunk_W] - offset_W, TILE_TOKENS), 0)
    keys_W = jnp.where(used_W, position_R[chunk_W] + offset_W + live_W, 0)
    words = {
        KEYS: keys_W,
        POSITION: position_R[chunk_W] + offset_W - moved_W,
        ROW: jnp.where(used_W, row_W, 0),
        FIRST_LIVE: moved_W,
        END_LIVE: jnp.where(used_W, moved_W + live_W, 0),
        CHUNK: chunk_W,
    }
    if base_R is not None:
        words[BASE] = base_R[chunk_W]
    tile_W8 = jnp.stack([words.get(word, jnp.zeros_like(keys_W)) for word in range(8)], axis=1)
    gaps_Z, owned_T = _gaps(start_R, tokens_R, tokens)
    next_2 = grid_sync.zero_words(jnp.broadcast_to(tokens_R[:1], (2,)))
    return Tiles(last_R[-1:], tile_W8[jnp.argsort(-keys_W)], gaps_Z, owned_T, next_2)


def _gaps(start_R: jax.Array, tokens_R: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    row_T = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    owned_T = ((row_T >= start_R) & (row_T < start_R + tokens_R)).any(axis=1).astype(jnp.int32)
    padded = jnp.pad(1 - owned_T, (0, -tokens % TILE_TOKENS))
    return padded.reshape(-1, TILE_TOKENS).sum(axis=1, dtype=jnp.int32), owned_T
