"""Tells the compiler that a value is the same in all threads: takes one from a kernel, gives the same one back.

Inside a loop whose condition or length it holds to be divergent, ptxas waits for each wgmma before the next (its note
C7519). It does so for what a loop carries and for what was read from memory, unless the value went through a broadcast.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm

_SCALAR = plgpu.Layout.WG_SPLAT


def uniform(value: jax.Array) -> jax.Array:
    """The same int32 scalar, of the first thread of each warp. On the GPU only; all threads must call, converged."""

    @plgpu.inline_mgpu(arg_types=(_SCALAR,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR))
    def broadcast(_: Any, value: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        mask, lane, width = mgpu.c(0xFFFFFFFF, i32), mgpu.c(0, i32), mgpu.c(0x1F, i32)
        first = nvvm.shfl_sync(mask, value.registers.item(), lane, width, nvvm.ShflKind.idx)
        return mgpu.FragmentedArray.splat(first, (), is_signed=True)

    typed: Any = broadcast  # the decorator's result takes no context
    return typed(value)
