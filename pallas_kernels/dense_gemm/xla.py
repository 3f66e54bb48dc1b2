"""dense_gemm in plain XLA: one dot a product; fits every shape and device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_gemm.contract import DenseGemmShapes, Stage, X
from pallas_kernels.device import Device


def why_not(shapes: DenseGemmShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    stages: tuple[Stage, ...],
    arrays: dict[str, jax.Array],
    *,
    ahead: tuple[jax.Array, ...] = (),
    sync: Any = None,
    device: Device,
) -> list[jax.Array]:
    """[T, N] of each stage; see the contract. Nothing is fetched ahead."""
    x_TK, made = arrays["x"], []
    for number, stage in enumerate(stages):
        w_PNK = arrays[f"w{number}"]
        P, N, K = w_PNK.shape
        tokens = x_TK if stage.source == X else made[stage.source]
        if stage.norm_eps is not None:
            tokens = _normed(tokens, arrays[f"norm{stage.source}"], stage.norm_eps)
        tokens = tokens[:, :K]
        # Full fp32 products where the inputs are fp32; a GPU would take TF32 otherwise.
        precision = lax.Precision.HIGHEST if tokens.dtype == jnp.float32 else lax.Precision.DEFAULT
        over = (((1,), (1,)), ((), ()))
        flat = lax.dot_general(
            tokens, w_PNK.reshape(P * N, K), over, precision=precision, preferred_element_type=jnp.float32
        )
        y_TN = jax.nn.silu(flat[:, :N]) * flat[:, N:] if stage.gated else flat
        if stage.bias:
            y_TN += arrays[f"bias{number}"].astype(jnp.float32)
        if stage.residual is not None:
            added = arrays[f"residual{number}"] if stage.residual == X else made[stage.residual]
            y_TN += added.astype(jnp.float32)
        made.append(y_TN if stage.exact else y_TN.astype(x_TK.dtype))
    return made


def _normed(x_TD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    x32 = x_TD.astype(jnp.float32)
    scale_T1 = lax.rsqrt((x32 * x32).mean(axis=1, keepdims=True) + eps)
    return (x32 * scale_T1 * weight_D.astype(jnp.float32)).astype(x_TD.dtype)
