"""The product of a step's few rows with a weight whose rows are long: takes rows from a layer, gives it rows.

Dimension keys: T tokens, K what is summed over, N columns of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.arguments import INTEGERS, require
from pallas_kernels.device import Device

OP = "dense_gemm"


@dataclass(frozen=True, slots=True)
class DenseGemmShapes:
    """Static sizes of one call."""

    rows: int  # T
    inner: int  # K
    columns: int  # N
    dtype: str
    out_dtype: str


def dense_gemm(
    x_TK: jax.Array,
    w_NK: jax.Array,
    lengths_B: jax.Array,
    *,
    out_dtype: jnp.dtype | None = None,
    device: Device,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """x w^T, summed in fp32 and rounded once.

    Args:
      x_TK: rows, in the dtype of the weight.
      w_NK: [out, in], as Hugging Face keeps it.
      lengths_B: int32, not negative: the same array in all calls of a step, as the native kernel's words, which are
        made of it, are then made once. Its numbers do not matter.
      out_dtype: None: x's; else that or float32.
      device, implementation: see registry.select.

    Returns:
      [T, N] in out_dtype. A row does not depend on the others.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require(OP, "x", x_TK, "T K")
    require(OP, "w", w_NK, "N K")
    require(OP, "lengths", lengths_B, "B", dtypes=INTEGERS)
    (rows, inner), columns = x_TK.shape, w_NK.shape[0]
    if w_NK.shape[1] != inner:
        raise ValueError(f"{OP}: w is {w_NK.shape}, must be [N, {inner}] for these rows.")
    out_dtype = jnp.dtype(out_dtype or x_TK.dtype)
    if w_NK.dtype != x_TK.dtype or out_dtype not in (x_TK.dtype, jnp.float32):
        given = f"x {x_TK.dtype}, w {w_NK.dtype} and the result {out_dtype}"
        raise ValueError(f"{OP}: {given} must have one dtype, the result that or float32.")
    shapes = DenseGemmShapes(rows, inner, columns, str(x_TK.dtype), str(out_dtype))
    chosen = registry.select(OP, shapes, device, implementation)
    return chosen.run(x_TK, w_NK, lengths_B, out_dtype=out_dtype)
