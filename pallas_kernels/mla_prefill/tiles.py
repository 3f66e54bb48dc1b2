"""The work list of mla_prefill's native kernels: takes chunk borders, gives query tiles and places of scratch rows.

Dimension keys: W tile slots, of which the unused ones come last; Y blocks of scratch rows of a head; Z blocks of packed
rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE_TOKENS = 128  # query rows of a tile
BLOCK_ROWS = 128  # scratch rows that are expanded together; a chunk's rows begin at a multiple of it
# Keys and values of the heads that are worked on together should stay in the L2 cache, half of which is for them.
_SECTION_BYTES = 24 << 20


# The words of a tile.
KEYS = 0  # tokens that the last live row sees
POSITION = 1  # of row 0 in its request; negative where row 0 lies before the chunk
ROW = 2  # packed row of the tile's row 0
FIRST_LIVE, END_LIVE = 3, 4  # rows first_live .. end_live - 1 of the tile are this tile's to write
CHUNK = 5
BASE = 6  # scratch row of the chunk's token 0


class Work(NamedTuple):
    """int32. Made from borders only, so that XLA makes it once for all layers of a step."""

    sizes_4: jax.Array  # used tile slots, scratch rows of a head, heads of a pass, heads of a section
    base_R: jax.Array  # scratch row of each chunk's token 0
    context_R: jax.Array  # tokens of each chunk's request up to the chunk's end; 0: unused
    chunk_Y: jax.Array
    tile_W8: jax.Array  # one line of memory a tile, see below
    gaps_Z: jax.Array  # rows of no chunk in each block of TILE_TOKENS packed rows
    owned_T: jax.Array  # 1 where a packed row is some chunk's


def tile_slots(tokens: int, chunks: int) -> int:
    """Tiles that any chunks can need: whole ones, and a partial one of each chunk."""
    return tokens // TILE_TOKENS + min(tokens, chunks)


def head_rows(chunks: int, request_tokens: int) -> int:
    """Scratch rows that a head can need: each chunk's whole context."""
    return chunks * -(-request_tokens // BLOCK_ROWS) * BLOCK_ROWS


def plan(
    start_R: jax.Array,
    tokens_R: jax.Array,
    position_R: jax.Array,
    *,
    tokens: int,
    request_tokens: int,
    heads: int,
    row_bytes: int,
    scratch_rows: int,
) -> Work:
    """tokens: T, at least TILE_TOKENS. request_tokens: that a block table can hold. row_bytes: of a scratch row.

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
    context_R = jnp.where(tokens_R > 0, position_R + tokens_R, 0)
    rows_R = (context_R + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    end_R = jnp.cumsum(rows_R, dtype=jnp.int32)
    words = {
        KEYS: keys_W,
        POSITION: position_R[chunk_W] + offset_W - moved_W,
        ROW: jnp.where(used_W, row_W, 0),
        FIRST_LIVE: moved_W,
        END_LIVE: jnp.where(used_W, moved_W + live_W, 0),
        CHUNK: chunk_W,
        BASE: (end_R - rows_R)[chunk_W],
    }
    tile_W8 = jnp.stack([words.get(word, jnp.zeros_like(keys_W)) for word in range(8)], axis=1)
    block_Y = jnp.arange(head_rows(chunks, request_tokens) // BLOCK_ROWS, dtype=jnp.int32)
    chunk_Y = jnp.minimum((end_R <= block_Y[:, None] * BLOCK_ROWS).sum(axis=1, dtype=jnp.int32), chunks - 1)
    return Work(
        jnp.stack([last_R[-1], end_R[-1], *_shares(end_R[-1], heads, row_bytes, scratch_rows)]),
        end_R - rows_R,
        context_R,
        chunk_Y,
        tile_W8[jnp.argsort(-keys_W)],
        *_gaps(start_R, tokens_R, tokens),
    )


def _shares(rows: jax.Array, heads: int, row_bytes: int, scratch_rows: int) -> tuple[jax.Array, jax.Array]:
    """Heads of a pass, which the scratch rows must hold, and of a section of it, which the L2 cache should hold.

    Both divide what they are part of, so that all parts are alike.
    """
    divisors = jnp.array([n for n in range(1, heads + 1) if heads % n == 0], jnp.int32)
    rows = jnp.maximum(rows, 1)
    in_pass = jnp.where(divisors <= scratch_rows // rows, divisors, 1).max()
    fits = (divisors <= _SECTION_BYTES // row_bytes // rows) & (in_pass % divisors == 0)
    return in_pass, jnp.where(fits, divisors, 1).max()


def _gaps(start_R: jax.Array, tokens_R: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
    row_T = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    owned_T = ((row_T >= start_R) & (row_T < start_R + tokens_R)).any(axis=1).astype(jnp.int32)
    padded = jnp.pad(1 - owned_T, (0, -tokens % TILE_TOKENS))
    return padded.reshape(-1, TILE_TOKENS).sum(axis=1, dtype=jnp.int32), owned_T
