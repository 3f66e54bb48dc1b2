"""mla_prefill in plain XLA: chunks are cut into query tiles, and each tile goes through the key blocks by itself.

A tile expands each key block once, so tiles are large: with DeepSeek's sizes the expansion of a key costs as much as
400 queries of it do. Only tiles that hold work run, each to the end of what its last query sees; memory is that of one
tile and one block. Dimension keys beyond the contract's: Q query tokens of a tile, C pages of a key block, Y their C K
tokens, J rope dimensions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device
from pallas_kernels.latent_blocks import Block, block_pages, gather, precision_for, softmax_over_blocks
from pallas_kernels.mla_prefill.contract import MlaPrefillShapes

# Query tokens of a tile at most. On a GPU scores move five times the expansion's time through memory at 512 queries.
_TILE_TOKENS = {"cpu": 64, "gpu": 512}


def why_not(shapes: MlaPrefillShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    q_THE: jax.Array,
    latent_PKL: jax.Array,
    key_up_HNR: jax.Array,
    value_up_HVR: jax.Array,
    table_RM: jax.Array,
    start_R: jax.Array,
    tokens_R: jax.Array,
    position_R: jax.Array,
    *,
    scale: float,
    device: Device,
) -> jax.Array:
    """See the contract."""
    T, H, E = q_THE.shape
    Q = min(T, _TILE_TOKENS["gpu" if device.platform == "gpu" else "cpu"])
    V, itemsize = value_up_HVR.shape[1], q_THE.dtype.itemsize
    # Per key and head: score, weight and rounded weight of each query; the expanded key twice (its parts), the value.
    token_bytes = H * (10 * Q + (2 * E + V) * itemsize) + 2 * latent_PKL.shape[2] * itemsize
    C = block_pages(token_bytes, latent_PKL.shape[1], table_RM.shape[1], device)
    table_RM = jnp.pad(table_RM, ((0, 0), (0, -table_RM.shape[1] % C)))
    tiles_R = (tokens_R + Q - 1) // Q
    last_R = jnp.cumsum(tiles_R)

    def tile(index: jax.Array, out_THV: jax.Array) -> jax.Array:
        chunk = jnp.searchsorted(last_R, index, side="right")
        offset_Q = (index - (last_R - tiles_R)[chunk]) * Q + jnp.arange(Q)  # within its chunk
        live_Q = offset_Q < tokens_R[chunk]
        row_Q = jnp.where(live_Q, start_R[chunk] + offset_Q, T)
        visible_Q = jnp.where(live_Q, position_R[chunk] + offset_Q + 1, 0)
        q_HQE = q_THE.at[row_Q].get(mode="clip").transpose(1, 0, 2)
        ups = (key_up_HNR, value_up_HVR)
        out_HQV = _attend(q_HQE, latent_PKL, *ups, table_RM[chunk], visible_Q, pages=C, scale=scale)
        return out_THV.at[row_Q].set(out_HQV.transpose(1, 0, 2), mode="drop")

    return lax.fori_loop(0, last_R[-1], tile, jnp.zeros((T, H, V), q_THE.dtype))


def _attend(
    q_HQE: jax.Array,
    latent_PKL: jax.Array,
    key_up_HNR: jax.Array,
    value_up_HVR: jax.Array,
    table_M: jax.Array,
    visible_Q: jax.Array,
    *,
    pages: int,
    scale: float,
) -> jax.Array:
    """[H, Q, V]: query q of a tile attends to the first `visible_Q[q]` tokens of the pages, `pages` a block."""
    H, Q, _ = q_HQE.shape
    V, rank, Y = value_up_HVR.shape[1], value_up_HVR.shape[2], pages * latent_PKL.shape[1]
    precision = precision_for(q_HQE.dtype)
    end = visible_Q.max()

    def block(index: jax.Array) -> Block:
        pages_C = lax.dynamic_slice_in_dim(table_M, index * pages, pages)
        token_Y = index * Y + jnp.arange(Y)
        row_YL = gather(latent_PKL, pages_C[None], (token_Y < end)[None])[0]
        latent_YR, shared_YJ = row_YL[:, :rank], row_YL[:, rank:]
        nope_HYN = jnp.einsum("yr,hnr->hyn", latent_YR, key_up_HNR, precision=precision)
        value_HYV = jnp.einsum("yr,hvr->hyv", latent_YR, value_up_HVR, precision=precision)
        # One product over nope and rope together: two would move the scores, which are far larger, once more.
        shared_HYJ = jnp.broadcast_to(shared_YJ, (H, *shared_YJ.shape))
        key_HYE = jnp.concatenate([nope_HYN, shared_HYJ], axis=-1)
        score_HQY = scale * jnp.einsum(
            "hqe,hye->hqy", q_HQE, key_HYE, precision=precision, preferred_element_type=jnp.float32
        )

        def weigh(weight_HQY: jax.Array) -> jax.Array:
            weight_HQY = weight_HQY.astype(value_HYV.dtype)
            return jnp.einsum(
                "hqy,hyv->hqv", weight_HQY, value_HYV, precision=precision, preferred_element_type=jnp.float32
            )

        return jnp.where(token_Y < visible_Q[:, None], score_HQY, -jnp.inf), weigh

    blocks = jnp.minimum((end + Y - 1) // Y, table_M.shape[0] // pages)
    return softmax_over_blocks(blocks, block, (H, Q), V).astype(q_HQE.dtype)
