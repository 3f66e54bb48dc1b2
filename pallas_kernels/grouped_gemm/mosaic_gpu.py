"""grouped_gemm on Hopper: gathers the rows of tokens, pads them to whole tiles, and runs the kernel of kernel.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.grouped_gemm.contract import GroupedGemmShapes
from pallas_kernels.grouped_gemm.kernel import BLOCK, STEP, Tuning, grouped
from pallas_kernels.grouped_gemm.walk import ALIGN, WALK

_SHARED_BYTES = 232_448 - 1024  # less what barriers take
_QUEUE_BYTES = 2048  # an item's number and the words of items, each at a multiple of 1024
_MOST_STAGES = 8
# The copying warpgroup looks tiles up and needs more registers than where it only copies.
MANY_ROWS = Tuning(
    rows=128,
    widths=(64, 80, 96, 104, 112, 120),
    queue=True,
    matrix_stores=True,
    compute_registers=224,
    copy_registers=56,
)


def why_not(shapes: GroupedGemmShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.inner % STEP:
        return f"the inner dimension is {shapes.inner}, must be a multiple of {STEP}."
    if shapes.columns % ALIGN or shapes.columns < BLOCK:
        return f"the product has {shapes.columns} columns, must be a multiple of {ALIGN} and {BLOCK} at least."
    if shapes.rows < 1:
        return "there are no rows."
    return None


def tuning_for(rows: int, experts: int, products: int) -> Tuning:
    """By the rows that experts hold when tokens choose them at random: a share, its spread, and what alignment adds."""
    share = rows / experts
    wanted = share + ALIGN - 1 + 1.5 * math.sqrt(share)
    if wanted > 128:
        return fitted(MANY_ROWS)
    tall = max(16, ALIGN * math.ceil(wanted / ALIGN))
    return fitted(Tuning(rows=min(tall, padded(rows)), blocks=2 if products == 2 or share > 16 else 1))


def fitted(tuning: Tuning) -> Tuning:
    """With as many stages as shared memory holds."""
    stage = 2 * tuning.step * (BLOCK * tuning.blocks + tuning.rows)
    stores = 2 * BLOCK * min(tuning.rows, tuning.store_rows)
    left = _SHARED_BYTES - stores - (_QUEUE_BYTES if tuning.queue else 0)
    stages = min(_MOST_STAGES * (2 // tuning.blocks), left // stage)
    return dataclasses.replace(tuning, stages=stages)


def padded(rows: int) -> int:
    """Up to a multiple of 8, as copies need."""
    return -(-rows // ALIGN) * ALIGN


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("device", "tuning", "interpret"))
def run(
    x: jax.Array,
    w_XPNK: jax.Array,
    size_X: jax.Array,
    *,
    row_A: jax.Array | None,
    weight_A: jax.Array | None,
    device: Device,
    tuning: Tuning | None = None,
    out_AN: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array:
    """[A, N]; see xla.run. out_AN: is written in place where A is a multiple of 8 and a tile or more.

    `interpret` runs the same kernel in the interpreter, on a CPU.
    """
    A = x.shape[0] if row_A is None else row_A.shape[0]
    X, P, _, _ = w_XPNK.shape
    tuning = tuning or tuning_for(A, X, P)
    # A tile's rows are read whole, so there must be as many.
    missing = max(padded(A), tuning.rows) - A
    if row_A is not None:
        x_AK = x.at[jnp.pad(row_A, (0, missing))].get(mode="clip", wrap_negative_indices=False)
    else:
        x_AK = jnp.pad(x, ((0, missing), (0, 0)))
    if weight_A is not None:
        weight_A = jnp.pad(weight_A, (0, missing))
    if out_AN is not None:
        out_AN = jnp.pad(out_AN, ((0, missing), (0, 0)))
    size_X = jnp.pad(size_X, (0, -size_X.shape[0] % WALK))
    return grouped(x_AK, w_XPNK, size_X, weight_A, out_AN, tuning=tuning, interpret=interpret)[:A]
