"""kv_write on Hopper: one kernel, which writes the pools in place."""

from __future__ import annotations

import functools
from typing import Any

import jax

from pallas_kernels.device import Device
from pallas_kernels.kv_write.contract import KvWriteShapes
from pallas_kernels.kv_write.kernel import Tuning, Write, values_held, write
from pallas_kernels.rotary import Rotary

_TURNING = (16, 32, 64, 128)
_MOST_VALUES = 160  # of a token that a thread holds at once; more spill


def why_not(shapes: KvWriteShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.dtype != "bfloat16":
        return f"dtype is {shapes.dtype}, must be bfloat16."
    if shapes.head_dim not in (64, 128):
        return f"head dimension is {shapes.head_dim}, must be 64 or 128."
    if shapes.rotary.dims not in _TURNING:
        return f"{shapes.rotary.dims} dimensions turn, must be one of {', '.join(map(str, _TURNING))}."
    values = values_held(shapes.kv_heads, shapes.group, shapes.rotary, shapes.head_dim)
    if values > _MOST_VALUES:
        heads = f"{shapes.kv_heads} kv heads with {shapes.group} query heads each"
        return f"{heads} are {values} values a thread, must be {_MOST_VALUES} at most."
    return None


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("rotary", "eps", "tuning", "interpret"))
def run(
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    qkv_TNSE: jax.Array,
    cos_TC: jax.Array,
    sin_TC: jax.Array,
    page_T: jax.Array,
    offset_T: jax.Array,
    *,
    bias_NSE: jax.Array | None,
    scales_2E: tuple[jax.Array, ...],
    rotary: Rotary,
    eps: float | None,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the contract. `interpret` runs the same kernel in the interpreter, on a CPU."""
    extras = (*(() if bias_NSE is None else (bias_NSE,)), *scales_2E)
    arrays = (k_PNKE, v_PNKE, qkv_TNSE, cos_TC, sin_TC, page_T, offset_T, extras)
    how = Write(rotary, bias=bias_NSE is not None, eps=eps)
    return write(*arrays, how=how, tuning=tuning or Tuning(), interpret=interpret)
