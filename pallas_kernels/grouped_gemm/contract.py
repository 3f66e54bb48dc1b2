"""Products of sorted rows with their experts' weights: takes tokens and sorted assignments from an MoE layer.

Dimension keys: T tokens, A sorted assignments, X experts of this device, D hidden, F width of an expert. Inside the
op, P products at once (gate and up), K what is summed over, N columns of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.arguments import INTEGERS, require
from pallas_kernels.device import Device

OP = "grouped_gemm"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class GroupedGemmShapes:
    """Static sizes of one call."""

    rows: int  # A
    experts: int  # X
    products: int  # P: 2 for gate and up, with the activation; else 1
    inner: int  # K
    columns: int  # N
    dtype: str


def gate_up(
    x_TD: jax.Array,
    row_A: jax.Array,
    w_X2FD: jax.Array,
    size_X: jax.Array,
    *,
    device: Device,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """silu(x w_gate^T) * (x w_up^T) of each sorted row, whose expert the sizes tell.

    Args:
      x_TD: tokens, in the dtype of the weights.
      row_A: int32, the token of each sorted row.
      w_X2FD: gate and up projections of each expert, each [out, in] as Hugging Face keeps them.
      size_X: int32, rows of each expert: the first size[0] rows are expert 0's, and so on. Their sum is A at most.
        There may be more than there are experts, of which the last are 0.
      device, implementation: see registry.select.

    Returns:
      [A, F] in x's dtype; sums and activation are fp32. Rows past sum(size) hold anything, NaN too.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require("gate_up", "x", x_TD, "T D", dtypes=DTYPES)
    require("gate_up", "row", row_A, "A", dtypes=INTEGERS)
    require("gate_up", "w", w_X2FD, "X 2 F D", dtypes=DTYPES)
    if w_X2FD.shape[1] != 2 or w_X2FD.shape[3] != x_TD.shape[1]:
        raise ValueError(f"gate_up: weights are {w_X2FD.shape}, must be [X, 2, F, {x_TD.shape[1]}] for these tokens.")
    shapes = _shapes("gate_up", x_TD, w_X2FD, size_X, row_A.shape[0])
    chosen = registry.select(OP, shapes, device, implementation)
    return chosen.run(x_TD, w_X2FD, size_X, row_A=row_A, weight_A=None, device=device)


def down(
    h_AF: jax.Array,
    w_XDF: jax.Array,
    size_X: jax.Array,
    weight_A: jax.Array,
    *,
    device: Device,
    implementation: str = registry.AUTO,
) -> jax.Array:
    """weight * (h w^T) of each sorted row: the fp32 product times its fp32 weight in the token's sum, then rounded.

    Args:
      h_AF: what gate_up gives, in the dtype of the weights.
      w_XDF: down projection of each expert, [out, in].
      size_X: as in gate_up.
      weight_A: fp32, of each sorted row.
      device, implementation: see registry.select.

    Returns:
      [A, D] in h's dtype. Rows past sum(size) hold anything, NaN too.

    Raises:
      ValueError: shapes or dtypes do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require("down", "h", h_AF, "A F", dtypes=DTYPES)
    require("down", "w", w_XDF, "X D F", dtypes=DTYPES)
    rows, width = h_AF.shape
    if w_XDF.shape[2] != width:
        raise ValueError(f"down: weights are {w_XDF.shape}, must be [X, D, {width}] for these rows.")
    if weight_A.shape != (rows,) or weight_A.dtype != jnp.float32:
        raise ValueError(f"down: weight_A is {weight_A.dtype} {weight_A.shape}, must be float32 {(rows,)}.")
    w_X1DF = w_XDF[:, None]
    shapes = _shapes("down", h_AF, w_X1DF, size_X, rows)
    chosen = registry.select(OP, shapes, device, implementation)
    return chosen.run(h_AF, w_X1DF, size_X, row_A=None, weight_A=weight_A, device=device)


def _shapes(name: str, x: jax.Array, w_XPNK: jax.Array, size_X: jax.Array, rows: int) -> GroupedGemmShapes:
    experts, products, columns, inner = w_XPNK.shape
    require(name, "size", size_X, "X", dtypes=INTEGERS)
    if size_X.shape[0] < experts:
        raise ValueError(f"{name}: size is {size_X.shape}, must be {(experts,)}, one an expert, or longer.")
    if x.dtype != w_XPNK.dtype:
        raise ValueError(f"{name}: dtypes {x.dtype} and {w_XPNK.dtype} must be one.")
    return GroupedGemmShapes(rows, experts, products, inner, columns, str(x.dtype))
