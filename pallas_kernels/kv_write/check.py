"""The correctness cases of kv_write's native kernel on its own device: takes cases, gives results to compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.kv_write import mosaic_gpu
from pallas_kernels.kv_write.cases import CASES, WriteCase, make_inputs
from pallas_kernels.kv_write.kernel import Tuning
from pallas_kernels.kv_write.reference import dense, rope

_ROWS = 131  # of the larger form of each case, which fills more pages than one


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's queries and pools and the reference's."""
    for case in CASES:
        yield case.name, _runner(case, Tuning())
        more = dataclasses.replace(case, rows=_ROWS, dropped=case.dropped * 20)
        yield f"{case.name}, {_ROWS} rows, 2 tokens a CTA", _runner(more, Tuning(tokens=2))


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN (what nobody wrote) in the same places."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _runner(case: WriteCase, tuning: Tuning) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    k, v, *arrays, page, offset, bias, scales = make_inputs(case, seed=0)
    rows = rope(*arrays, bias, scales, rotary=case.rotary, eps=case.eps)
    pools = dense(k.astype(np.float32), v.astype(np.float32), rows[:, :, -2], rows[:, :, -1], page, offset)
    options = {"bias_NSE": bias, "scales_2E": scales, "rotary": case.rotary, "eps": case.eps, "tuning": tuning}
    call = jax.jit(lambda *inputs: mosaic_gpu.run(*inputs, **options))
    inputs = (k, v, *arrays, page, offset)
    return lambda: (_flat(call(*inputs)), _flat((rows[:, :, :-2], *pools)))


def _flat(arrays: tuple[jax.Array | np.ndarray, ...]) -> np.ndarray:
    return np.concatenate([np.asarray(array, np.float32).ravel() for array in arrays])
