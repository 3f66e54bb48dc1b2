"""The correctness cases of mla_prefill's native kernels on their own device: takes cases, gives results to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.alone import chunks_alone
from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.mla_prefill import mosaic_gpu
from pallas_kernels.mla_prefill.cases import DEEPSEEK, GLM_FLASH, MIXED, PrefillCase, make_inputs
from pallas_kernels.mla_prefill.common import PAGE_TOKENS, Tuning
from pallas_kernels.mla_prefill.reference import dense

LONG = ((3, 0, 129), (0, 700, 300), (0, 0, 128), (5, 64, 64), (0, 4091, 2), (0, 127, 257))
_SHAPES = {"deepseek": DEEPSEEK, "glm": GLM_FLASH}


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's."""
    for model, tokens, chunks, heads in (
        ("deepseek", 120, MIXED, 3),
        ("deepseek", 1000, LONG, 16),
        ("glm", 1000, LONG, 20),
    ):
        case = PrefillCase(model, tokens, chunks, heads, page_tokens=PAGE_TOKENS, dtype="bfloat16", **_SHAPES[model])
        inputs = make_inputs(case, seed=0)
        expected = dense(*inputs, scale=case.scale)
        tuning = Tuning.of(case.nope_dim + case.value_dim)
        for variant, options in {
            "turns": {"tuning": tuning},
            "free": {"tuning": replace(tuning, turns=False)},
            "long shares": {"tuning": replace(tuning, ctas=7)},
            "fine steps": {"tuning": replace(tuning, up_columns=32)},
            "passes": {"tuning": tuning, "scratch_bytes": 0},
        }.items():
            call = jax.jit(lambda *arrays, o=options, s=case.scale: _poisoned(arrays, scale=s, device=device, **o))
            yield f"{model} t{tokens} h{heads} {variant}", _runner(call, inputs, expected)
        yield f"{model} t{tokens} h{heads} alone", alone(case, device)


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN or Inf nowhere."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _poisoned(arrays: tuple[jax.Array, ...], **options: Any) -> jax.Array:
    T, H, _ = arrays[0].shape
    into = jnp.full((max(T, mosaic_gpu.TILE_TOKENS), H, arrays[3].shape[1]), jnp.nan, arrays[0].dtype)
    return mosaic_gpu.run(*arrays, **options, into_THV=into)


def _runner(call: Any, inputs: tuple[np.ndarray, ...], expected: np.ndarray) -> Callable[..., Any]:
    return lambda: (np.asarray(call(*inputs), np.float32), expected)


def alone(case: PrefillCase, device: Device, **options: Any) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Each chunk by itself, at the first packed rows, against all together: NaN where a bit differs.

    options: of mosaic_gpu.run.
    """
    inputs = make_inputs(case, seed=0)
    expected = dense(*inputs, scale=case.scale)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=case.scale, device=device, **options))
    return lambda: (chunks_alone(call, inputs), expected)
