"""latent_write on Hopper: one kernel, which writes the pool in place."""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels.device import Device
from pallas_kernels.latent_write.contract import LatentWriteShapes
from pallas_kernels.latent_write.kernel import Tuning, Write, write
from pallas_kernels.rotary import Rotary

_RANKS, _TURNING = (256, 512, 1024), (32, 64)


def why_not(shapes: LatentWriteShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.rank not in _RANKS:
        return f"the latent has {shapes.rank} dimensions, must be one of {', '.join(map(str, _RANKS))}."
    if shapes.rotary.dims not in _TURNING:
        return f"{shapes.rotary.dims} dimensions turn, must be one of {', '.join(map(str, _TURNING))}."
    if shapes.head_dim % 8 or shapes.width % 8:
        return f"queries of {shapes.head_dim} and rows of {shapes.width} dimensions, must be multiples of 8."
    return None


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("rotary", "eps", "tuning", "interpret"))
def run(
    latent_PKL: jax.Array,
    down_TW: jax.Array,
    scale_R: jax.Array,
    q_THE: jax.Array,
    cos_TC: jax.Array,
    sin_TC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    rotary: Rotary,
    eps: float,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See the contract. `interpret` runs the same kernel in the interpreter, on a CPU."""
    first = down_TW.shape[1] - latent_PKL.shape[2]
    how = Write(rotary, first=first, rank=scale_R.shape[0], eps=eps)
    arrays = (latent_PKL, down_TW, scale_R, q_THE, cos_TC, sin_TC, page_T, offset_T)
    return write(*arrays, how=how, tuning=tuning or Tuning(), interpret=interpret)
