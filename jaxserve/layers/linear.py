"""Products with weights kept in Hugging Face's [out, in] orientation, and the parameters that hold them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.mesh import total


def parameter(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> nnx.Param:
    """A parameter with logical axis names. Its value is zeros: modules are only ever built under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes)


def project(x_TD: jax.Array, weight: jax.Array) -> jax.Array:
    """x [T, D] times weight [..., D] over D: [T, ...], in x's dtype."""
    return contract(x_TD, weight, 1)


def add_up(part: jax.Array, axes: tuple[str, ...], dtype: jnp.dtype) -> jax.Array:
    """float32: the devices' float32 parts of a sum over these mesh axes; as it is where there is one device.

    Parts travel in `dtype`, the model's: float32 would double what a step moves between devices.
    """
    return total(part.astype(dtype), axes).astype(jnp.float32) if axes else part


def contract(x: jax.Array, weight: jax.Array, dims: int, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [T, ...] times weight [..., *] over the last `dims` dimensions of both: [T, leading dimensions of weight].

    The product is always of two matrices: given more dimensions, XLA:CPU first copies the weight into another order at
    every step. float32 asks for HIGHEST precision, since XLA would use TF32 on a GPU.
    """
    out_dims = weight.shape[: weight.ndim - dims]
    inner = math.prod(weight.shape[weight.ndim - dims :])
    flat = product(x.reshape(-1, inner), weight.reshape(-1, inner), out_dtype)
    return flat.reshape(-1, *out_dims)


def product(x_TD: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """x [T, D] times weight [..., D] as one dot; see `contract`."""
    precision = lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None
    over_last = (((1,), (weight.ndim - 1,)), ((), ()))
    return lax.dot_general(x_TD, weight, over_last, precision=precision, preferred_element_type=out_dtype or x_TD.dtype)
