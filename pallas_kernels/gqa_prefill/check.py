"""The correctness cases of gqa_prefill's native kernel on its own device: takes cases, gives results to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels.alone import chunks_alone
from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.gqa_prefill import mosaic_gpu
from pallas_kernels.gqa_prefill.cases import MIXED, PrefillCase, make_inputs
from pallas_kernels.gqa_prefill.reference import dense

LONG = ((3, 0, 129), (0, 700, 300), (0, 0, 128), (5, 64, 64), (0, 4091, 2), (0, 127, 257))


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's."""
    page = mosaic_gpu.PAGE_TOKENS
    for tokens, chunks, kv_heads, group in ((128, MIXED, 2, 3), (1000, LONG, 1, 16), (1000, LONG, 4, 1)):
        for head_dim in (64, 128):
            name = f"t{tokens} g{group} e{head_dim}"
            case = PrefillCase(name, tokens, chunks, kv_heads, group, head_dim, page, "bfloat16")
            for variant, tuning in VARIANTS.items():
                yield f"{name} {variant}", _runner(case, device, tuning)
            yield f"{name} alone", alone(case, device)


VARIANTS = {
    "turns": mosaic_gpu.Tuning(),
    "no turns": mosaic_gpu.Tuning(turns=False),
    "one page": mosaic_gpu.Tuning(pages=1, stages=4),
}


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN or Inf nowhere."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _runner(
    case: PrefillCase, device: Device, tuning: mosaic_gpu.Tuning
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    inputs = make_inputs(case, seed=0)
    expected = dense(*inputs, scale=case.scale)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=case.scale, device=device, tuning=tuning))
    return lambda: (np.asarray(call(*inputs), np.float32), expected)


def alone(case: PrefillCase, device: Device, **options: Any) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Each chunk by itself, at the first packed rows, against all together: NaN where a bit differs.

    options: of mosaic_gpu.run.
    """
    inputs = make_inputs(case, seed=0)
    expected = dense(*inputs, scale=case.scale)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=case.scale, device=device, **options))
    return lambda: (chunks_alone(call, inputs), expected)
