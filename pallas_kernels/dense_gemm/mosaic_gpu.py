"""dense_gemm on Hopper: chooses how a product is shared out and runs the kernel of kernel.py."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dense_gemm.contract import DenseGemmShapes
from pallas_kernels.dense_gemm.kernel import ALIGN, STEP, WIDTH, Tuning, multiply
from pallas_kernels.dense_gemm.shares import Shares
from pallas_kernels.device import Device
from pallas_kernels.grid_sync import zero_words

MOST_ROWS = 64
LEAST_INNER = 8192  # XLA cuts long sums, too, but adds the parts with a second kernel
_FLIGHT_BYTES = 128 << 10  # of weights, on an SM
_CTA_BYTES = 232_448 - 2048  # shared memory of a CTA, less what barriers take
_WORDS = 1024  # of zeros, the same for all products of a step, so that XLA makes them once


def why_not(shapes: DenseGemmShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.rows > MOST_ROWS:
        return f"there are {shapes.rows} rows, must be {MOST_ROWS} at most."
    if shapes.inner < LEAST_INNER:
        return f"the sums have {shapes.inner} terms, must have {LEAST_INNER} at least: XLA is as fast for fewer."
    if shapes.inner % STEP or shapes.columns % (2 * WIDTH):
        return f"the weight is {shapes.columns} x {shapes.inner}, must be multiples of {2 * WIDTH} and {STEP}."
    return None


def tuning_for(rows: int, inner: int) -> Tuning:
    """Of many rows each tile leaves more partial sums, so tiles are narrow."""
    return fitted(Tuning(sides=2 if rows <= 16 else 1, step=STEP if inner % (2 * STEP) else 2 * STEP), rows)


def fitted(tuning: Tuning, rows: int, flight_bytes: int = _FLIGHT_BYTES) -> Tuning:
    """With as many stages as hold so many bytes of weights in flight on an SM, or as many as fit."""
    weight_bytes = 2 * tuning.step * WIDTH * tuning.sides
    stage_bytes = weight_bytes + 2 * tuning.step * padded(rows)
    return dataclasses.replace(tuning, stages=min(flight_bytes // weight_bytes, _CTA_BYTES // stage_bytes))


def shares_for(tuning: Tuning, columns: int, inner: int) -> Shares:
    """How the product is shared out. ValueError: tiles or steps do not divide it."""
    tile = WIDTH * tuning.sides
    if columns % tile or inner % tuning.step:
        raise ValueError(f"the weight is {columns} x {inner}, must be multiples of {tile} and {tuning.step}.")
    tiles, steps = columns // tile, inner // tuning.step
    return Shares(tiles, steps, min(tuning.ctas, tiles * steps))


def padded(rows: int) -> int:
    """Up to a multiple of 8, as copies need."""
    return -(-rows // ALIGN) * ALIGN


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning", "interpret"))
def run(
    x_TK: jax.Array,
    w_NK: jax.Array,
    lengths_B: jax.Array,
    *,
    out_dtype: jnp.dtype,
    tuning: Tuning | None = None,
    out_TN: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """[T, N]; see the contract. out_TN: is written in place where T is a multiple of 8.

    `interpret` runs the same kernel in the interpreter, on a CPU.
    """
    T, (N, K) = x_TK.shape[0], w_NK.shape
    tuning = tuning or tuning_for(T, K)
    shares = shares_for(tuning, N, K)
    missing = ((0, padded(T) - T), (0, 0))
    words = zero_words(jnp.resize(lengths_B, (max(_WORDS, shares.tiles * tuning.sides),)))
    out = jax.ShapeDtypeStruct((padded(T), N), out_dtype) if out_TN is None else jnp.pad(out_TN, missing)
    return multiply(jnp.pad(x_TK, missing), w_NK, words, out, shares=shares, tuning=tuning, interpret=interpret)[:T]
