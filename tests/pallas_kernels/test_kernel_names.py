"""Kernels are the same bytes wherever they are lowered, so that they are compiled once."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.kernel_names import leave_out_counts
from pallas_kernels.sampling.contract import sample

H200 = Device("gpu", "9.0")


def kernels(call: jax.stages.Wrapped) -> list[str]:
    """Hashes of the kernels of a program that draws for four rows, lowered for a GPU."""
    shapes = [jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((4, 256), (4,), (4,))]
    text = call.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return sorted(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text))


def test_programs_share_their_kernels() -> None:
    leave_out_counts()
    leave_out_counts()
    draw = partial(sample, device=H200)
    plain = jax.jit(lambda x, u, t: draw(x, u, temperature_B=t))
    both = jax.jit(lambda x, u, p: (draw(x, u, temperature_B=p), draw(x, u, top_p_B=p, temperature_B=p)))
    assert len(kernels(plain)) == 2
    assert kernels(plain) == kernels(both)  # one function, which is called twice
