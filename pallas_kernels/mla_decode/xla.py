"""mla_decode in plain XLA: what runs where no native kernel fits. All rows go through the key blocks together.

Dimension keys beyond the contract's: H the heads of all query tokens, C pages of a key block, Y their C K tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device
from pallas_kernels.latent_blocks import Block, block_pages, gather, precision_for, softmax_over_blocks
from pallas_kernels.mla_decode.contract import MlaDecodeShapes, fold_tokens


def why_not(shapes: MlaDecodeShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    q_BHL: jax.Array,
    latent_PKL: jax.Array,
    table_BM: jax.Array,
    length_B: jax.Array,
    *,
    rank: int,
    scale: float,
    device: Device,
    invariant: bool = False,
) -> jax.Array:
    """See the contract. The loop runs to the longest row.

    invariant: holds in any case: blocks have one size, and those past a row's end add exact zeros.
    """
    shape = (*q_BHL.shape[:-1], rank)
    q_BHL, tokens = fold_tokens(q_BHL)
    B, H, L = q_BHL.shape
    K, itemsize = latent_PKL.shape[1], q_BHL.dtype.itemsize
    # Per key: the row as read and as masked, and score, weight and rounded weight of each query.
    C = block_pages(B * (2 * L * itemsize + 10 * H), K, table_BM.shape[1], device)
    table_BM = jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % C)))
    precision = precision_for(q_BHL.dtype)
    visible_BH = length_B[:, None] - tokens + 1 + jnp.arange(H) // (H // tokens)

    def block(index: jax.Array) -> Block:
        pages_BC = lax.dynamic_slice_in_dim(table_BM, index * C, C, axis=1)
        place_Y = index * C * K + jnp.arange(C * K)
        row_BYL = gather(latent_PKL, pages_BC, place_Y < length_B[:, None])
        score_BHY = scale * jnp.einsum(
            "bhl,byl->bhy", q_BHL, row_BYL, precision=precision, preferred_element_type=jnp.float32
        )

        def weigh(weight_BHY: jax.Array) -> jax.Array:
            weight_BHY, value_BYR = weight_BHY.astype(row_BYL.dtype), row_BYL[..., :rank]
            return jnp.einsum(
                "bhy,byr->bhr", weight_BHY, value_BYR, precision=precision, preferred_element_type=jnp.float32
            )

        return jnp.where(place_Y < visible_BH[..., None], score_BHY, -jnp.inf), weigh

    blocks = jnp.minimum((length_B.max() + C * K - 1) // (C * K), table_BM.shape[1] // C)
    return softmax_over_blocks(blocks, block, (B, H), rank).astype(q_BHL.dtype).reshape(shape)
