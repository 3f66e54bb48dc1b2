"""What the XLA forms of latent attention share: rows of paged latents, and a softmax over blocks of keys.

Dimension keys beyond the contracts': X independent tables, C pages of a block, Y their C K tokens, Z whatever the
scores have before their keys, V value dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device

# What one loop step may hold at a time, and the longest key block: short on a CPU, where a block that a short
# sequence does not fill costs time, long on a GPU, where each loop step costs a dozen launches.
_STEP_BYTES = {"cpu": 8 << 20, "gpu": 512 << 20}
_BLOCK_TOKENS = {"cpu": 64, "gpu": 1024}

# Of a block: fp32 scores [*Z, Y], -inf where not visible, and a function from weights to their fp32 sum [*Z, V].
Block = tuple[jax.Array, Callable[[jax.Array], jax.Array]]


def precision_for(dtype: jnp.dtype) -> lax.Precision:
    """Full fp32 products where the inputs are fp32; a GPU would take TF32 otherwise."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def block_pages(token_bytes: int, page_tokens: int, max_pages: int, device: Device) -> int:
    """Pages of a key block: as many as the step's budget and the longest block allow, one at least.

    token_bytes: what a step holds for each key.
    """
    kind = "gpu" if device.platform == "gpu" else "cpu"
    tokens = min(_BLOCK_TOKENS[kind], _STEP_BYTES[kind] // token_bytes)
    return max(1, min(tokens // page_tokens, max_pages))


def gather(latent_PKL: jax.Array, pages_XC: jax.Array, live_XY: jax.Array) -> jax.Array:
    """[X, Y, L]: the rows of the named pages, zeros where not live. Page ids outside the pool are clipped, never read.

    Stale rows may hold NaN, and 0 * NaN is NaN: what masks scores does not mask values, so rows are replaced here.
    """
    rows_XCKL = latent_PKL.at[pages_XC].get(mode="clip", wrap_negative_indices=False)
    rows_XYL = rows_XCKL.reshape(*live_XY.shape, latent_PKL.shape[2])
    return jnp.where(live_XY[..., None], rows_XYL, 0)


def softmax_over_blocks(
    blocks: jax.Array, block: Callable[[jax.Array], Block], shape_Z: tuple[int, ...], width: int
) -> jax.Array:
    """fp32 [*Z, width]: the values of `blocks` blocks, weighted by a softmax over all of them; nothing visible: 0."""

    def step(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        max_Z, sum_Z, acc_ZV = state
        score_ZY, weigh = block(index)
        new_max_Z = jnp.maximum(max_Z, score_ZY.max(axis=-1))
        safe_Z = jnp.where(jnp.isneginf(new_max_Z), 0.0, new_max_Z)  # nothing visible yet: -inf - -inf is NaN
        weight_ZY = jnp.exp(score_ZY - safe_Z[..., None])
        keep_Z = jnp.exp(max_Z - safe_Z)
        return new_max_Z, sum_Z * keep_Z + weight_ZY.sum(axis=-1), acc_ZV * keep_Z[..., None] + weigh(weight_ZY)

    start = (
        jnp.full(shape_Z, -jnp.inf, jnp.float32),
        jnp.zeros(shape_Z, jnp.float32),
        jnp.zeros((*shape_Z, width), jnp.float32),
    )
    _, sum_Z, acc_ZV = lax.fori_loop(0, blocks, step, start)
    return acc_ZV / jnp.where(sum_Z == 0, 1.0, sum_Z)[..., None]
