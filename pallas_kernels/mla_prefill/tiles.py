"""The work list of mla_prefill's native kernels: takes chunk borders, gives query tiles and places of scratch rows.

Dimension key: Y blocks of scratch rows of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.query_tiles import Tiles, cut_tiles

BLOCK_ROWS = 128  # scratch rows that are expanded together; a chunk's rows begin at a multiple of it
# Keys and values of the heads that are worked on together should stay in the L2 cache, half of which is for them.
_SECTION_BYTES = 24 << 20


class Expansion(NamedTuple):
    """Where the expanded rows lie, int32. Made from borders only, so that XLA makes it once for all layers."""

    sizes_3: jax.Array  # scratch rows of a head, heads of a pass, heads of a section
    base_R: jax.Array  # scratch row of each chunk's token 0
    context_R: jax.Array  # tokens of each chunk's request up to the chunk's end; 0: unused
    chunk_Y: jax.Array


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
) -> tuple[Tiles, Expansion]:
    """tokens: T, at least TILE_TOKENS. request_tokens: that a block table can hold. row_bytes: of a scratch row."""
    chunks = tokens_R.shape[0]
    context_R = jnp.where(tokens_R > 0, position_R + tokens_R, 0)
    rows_R = (context_R + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    end_R = jnp.cumsum(rows_R, dtype=jnp.int32)
    block_Y = jnp.arange(head_rows(chunks, request_tokens) // BLOCK_ROWS, dtype=jnp.int32)
    chunk_Y = jnp.minimum((end_R <= block_Y[:, None] * BLOCK_ROWS).sum(axis=1, dtype=jnp.int32), chunks - 1)
    sizes_3 = jnp.stack([end_R[-1], *_shares(end_R[-1], heads, row_bytes, scratch_rows)])
    base_R = end_R - rows_R
    tiles = cut_tiles(start_R, tokens_R, position_R, tokens=tokens, base_R=base_R)
    return tiles, Expansion(sizes_3, base_R, context_R, chunk_Y)


def _shares(rows: jax.Array, heads: int, row_bytes: int, scratch_rows: int) -> tuple[jax.Array, jax.Array]:
    """Heads of a pass, which the scratch rows must hold, and of a section of it, which the L2 cache should hold.

    Both divide what they are part of, so that all parts are alike.
    """
    divisors = jnp.array([n for n in range(1, heads + 1) if heads % n == 0], jnp.int32)
    rows = jnp.maximum(rows, 1)
    in_pass = jnp.where(divisors <= scratch_rows // rows, divisors, 1).max()
    fits = (divisors <= _SECTION_BYTES // row_bytes // rows) & (in_pass % divisors == 0)
    return in_pass, jnp.where(fits, divisors, 1).max()
