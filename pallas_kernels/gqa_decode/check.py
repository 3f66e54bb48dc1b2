"""The correctness cases of gqa_decode's native kernel on its own device: takes cases, gives results to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import numpy as np

from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode import mosaic_gpu
from pallas_kernels.gqa_decode.cases import DecodeCase, make_inputs
from pallas_kernels.gqa_decode.reference import dense

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 4092, 0, 128, 700)


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's."""
    for group in (1, 3, 4, 8, 16):
        for head_dim in (64, 128):
            case = DecodeCase(f"g{group} e{head_dim}", LENGTHS, 2, group, head_dim, mosaic_gpu.PAGE_TOKENS, "bfloat16")
            yield case.name, _runner(case, device, mosaic_gpu.tuning_for(head_dim))
    many = tuple(int(n) for n in np.random.default_rng(5).integers(0, 600, 60))
    case = DecodeCase("60 rows, 8 kv heads", many, 8, 4, 128, mosaic_gpu.PAGE_TOKENS, "bfloat16")
    tuning = mosaic_gpu.tuning_for(128)
    yield case.name, _runner(case, device, tuning)
    yield f"{case.name}, early merge", _runner(case, device, replace(tuning, early_merge=True))


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN or Inf nowhere."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _runner(case: DecodeCase, device: Device, tuning: mosaic_gpu.Tuning) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    inputs = make_inputs(case, seed=0)
    expected = dense(*inputs, scale=case.scale)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=case.scale, device=device, tuning=tuning))
    return lambda: (np.asarray(call(*inputs), np.float32), expected)
