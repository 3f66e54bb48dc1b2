"""Attention over pages, block by block, in plain XLA: takes queries and block tables from the reference of an op.

Both references are this one loop. Besides the dimension keys of the contracts: X independent query tiles, Q query
tokens of a tile, J query heads of a tile and kv head (Q times G), C pages of a key block, L their C K tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device

# What one loop step may hold at a time, and the longest key block: short on a CPU, where a block that a short
# sequence does not fill costs time, long on a GPU, where each loop step costs a dozen launches.
_STEP_BYTES = {"cpu": 8 << 20, "gpu": 512 << 20}
_BLOCK_TOKENS = {"cpu": 64, "gpu": 1024}


def attend(
    q_XQNGE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    table_XM: jax.Array,
    visible_XQ: jax.Array,
    *,
    scale: float,
    device: Device,
) -> jax.Array:
    """Each query token attends to the first `visible_XQ` tokens of its tile's pages; 0 visible tokens give zeros.

    The loop runs to the longest tile of this call. Returns [X, Q, N, G, E] in q's dtype.
    """
    X, Q, N, G, E = q_XQNGE.shape
    K, J = k_PNKE.shape[2], Q * G
    C = _block_pages(q_XQNGE, K, table_XM.shape[1], device)
    L = C * K
    # Full fp32 products where the inputs are fp32; a GPU would take TF32 otherwise.
    precision = lax.Precision.HIGHEST if q_XQNGE.dtype == jnp.float32 else lax.Precision.DEFAULT
    q_XNJE = q_XQNGE.transpose(0, 2, 1, 3, 4).reshape(X, N, J, E)
    visible_XJ = jnp.repeat(visible_XQ, G, axis=1)
    end_X = visible_XQ.max(axis=1)
    table_XM = jnp.pad(table_XM, ((0, 0), (0, -table_XM.shape[1] % C)))

    def step(block: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        max_XNJ, sum_XNJ, acc_XNJE = state
        pages_XC = lax.dynamic_slice_in_dim(table_XM, block * C, C, axis=1)
        token_L = block * L + jnp.arange(L)
        k_XNLE, v_XNLE = _gather(k_PNKE, pages_XC), _gather(v_PNKE, pages_XC)
        # Stale rows may hold NaN, and 0 * NaN is NaN: their scores and their values are both replaced by select.
        v_XNLE = jnp.where((token_L < end_X[:, None])[:, None, :, None], v_XNLE, 0)
        score_XNJL = scale * jnp.einsum(
            "xnje,xnle->xnjl", q_XNJE, k_XNLE, precision=precision, preferred_element_type=jnp.float32
        )
        live_XJL = token_L < visible_XJ[:, :, None]
        score_XNJL = jnp.where(live_XJL[:, None], score_XNJL, -jnp.inf)
        new_max_XNJ = jnp.maximum(max_XNJ, score_XNJL.max(axis=-1))
        safe_XNJ = jnp.where(jnp.isneginf(new_max_XNJ), 0.0, new_max_XNJ)  # nothing visible yet: -inf - -inf is NaN
        weight_XNJL = jnp.exp(score_XNJL - safe_XNJ[..., None])
        keep_XNJ = jnp.exp(max_XNJ - safe_XNJ)
        added_XNJE = jnp.einsum(
            "xnjl,xnle->xnje",
            weight_XNJL.astype(v_XNLE.dtype),
            v_XNLE,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return (
            new_max_XNJ,
            sum_XNJ * keep_XNJ + weight_XNJL.sum(axis=-1),
            acc_XNJE * keep_XNJ[..., None] + added_XNJE,
        )

    start = (
        jnp.full((X, N, J), -jnp.inf, jnp.float32),
        jnp.zeros((X, N, J), jnp.float32),
        jnp.zeros((X, N, J, E), jnp.float32),
    )
    blocks = jnp.minimum((end_X.max() + L - 1) // L, table_XM.shape[1] // C)
    _, sum_XNJ, acc_XNJE = lax.fori_loop(0, blocks, step, start)
    # A row that saw nothing has sum 0 and acc 0.
    out_XNJE = (acc_XNJE / jnp.where(sum_XNJ == 0, 1.0, sum_XNJ)[..., None]).astype(q_XQNGE.dtype)
    return out_XNJE.reshape(X, N, Q, G, E).transpose(0, 2, 1, 3, 4)


def _gather(pool_PNKE: jax.Array, pages_XC: jax.Array) -> jax.Array:
    """[X, N, C K, E]: the named pages, kv heads before tokens. Page ids outside the pool are clipped, never read."""
    _, N, K, E = pool_PNKE.shape
    X, C = pages_XC.shape
    head_N = jnp.arange(N)
    index = (pages_XC[:, None, :], head_N[None, :, None])
    rows_XNCKE = pool_PNKE.at[index].get(mode="clip", wrap_negative_indices=False)
    return rows_XNCKE.reshape(X, N, C * K, E)


def _block_pages(q_XQNGE: jax.Array, page_tokens: int, max_pages: int, device: Device) -> int:
    """Pages of a key block: as many as the step's budget and the longest block allow, one at least."""
    X, Q, N, G, E = q_XQNGE.shape
    kind = "gpu" if device.platform == "gpu" else "cpu"
    # Per cached token: a key and a value row, and score, weight and rounded weight of each query.
    token_bytes = X * N * (2 * E * q_XQNGE.dtype.itemsize + 10 * Q * G)
    tokens = min(_BLOCK_TOKENS[kind], _STEP_BYTES[kind] // token_bytes)
    return max(1, min(tokens // page_tokens, max_pages))
