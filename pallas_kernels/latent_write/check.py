"""The correctness cases of latent_write's native kernel on its own device: cases in, results to compare out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.latent_write import mosaic_gpu
from pallas_kernels.latent_write.cases import CASES, WriteCase, make_inputs
from pallas_kernels.latent_write.kernel import Tuning
from pallas_kernels.latent_write.reference import dense, rope

_ROWS = 131  # of the larger form of each case, which fills more pages than one


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's queries and pool and the reference's."""
    for case in CASES:
        yield case.name, _runner(case, Tuning())
        more = dataclasses.replace(case, rows=_ROWS, dropped=case.dropped * 20)
        yield f"{case.name}, {_ROWS} rows, 4 tokens a CTA", _runner(more, Tuning(tokens=4))


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN (what nobody wrote) in the same places."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _runner(case: WriteCase, tuning: Tuning) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    inputs = make_inputs(case, seed=0)
    pool, *arrays, page, offset = inputs
    turned, rows = rope(*arrays, rotary=case.rotary, eps=case.eps)
    expected = (turned, dense(pool.astype(np.float32), rows, page, offset))
    call = jax.jit(lambda *inputs: mosaic_gpu.run(*inputs, rotary=case.rotary, eps=case.eps, tuning=tuning))
    return lambda: (_flat(call(*inputs)), _flat(expected))


def _flat(arrays: tuple[jax.Array | np.ndarray, ...]) -> np.ndarray:
    return np.concatenate([np.asarray(array, np.float32).ravel() for array in arrays])
