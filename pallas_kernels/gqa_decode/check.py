"""The correctness cases of gqa_decode's native kernel on its own device: takes cases, gives results to compare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from pallas_kernels.alone import rows_alone
from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode import mosaic_gpu
from pallas_kernels.gqa_decode.cases import DecodeCase, make_inputs
from pallas_kernels.gqa_decode.reference import dense

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 4092, 0, 128, 700)
NEW_TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 66, 70, 71, 72, 1000, 4092)


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's."""
    for group in (1, 3, 4, 8, 16):
        for head_dim in (64, 128, 256):
            yield _check(f"g{group} e{head_dim}", LENGTHS, 2, group, head_dim, device)
    for tokens, group in ((2, 1), (2, 16), (3, 3), (4, 16), (8, 8), (8, 1)):
        yield _check(f"s{tokens} g{group} e128", NEW_TOKENS, 2, group, 128, device, tokens=tokens)
    yield _check("s4 g8 e256", NEW_TOKENS, 2, 8, 256, device, tokens=4)
    many = tuple(int(n) for n in np.random.default_rng(5).integers(0, 600, 60))
    yield _check("fewer queries than columns", (77,), 1, 3, 128, device)
    yield _check("60 rows, 8 kv heads", many, 8, 4, 128, device)
    yield _check("60 rows, 8 kv heads, own merge", many, 8, 4, 128, device, merge="kernel")
    yield _check("cut evenly", (4096,) * 16, 2, 16, 128, device)
    # One long row: more items than are merged at once, so in groups first; and few CTAs that go over many units.
    yield _check("one row of 64k", (65536 - 7,), 2, 16, 128, device)
    yield _check("one row of 64k among short", (5, 65500, 64, 300), 1, 4, 64, device)
    yield _check("few parts", many, 2, 16, 128, device, parts=7)
    for group in (3, 16):
        for head_dim in (128, 256):
            yield _check(f"slices g{group} e{head_dim}", LENGTHS, 2, group, head_dim, device, slices=True)
    yield _check("slices s4 g16 e128", NEW_TOKENS, 2, 16, 128, device, tokens=4, slices=True)
    yield _check("slices s3 g3 e128", NEW_TOKENS, 2, 3, 128, device, tokens=3, slices=True)
    yield _check("slices 60 rows, 8 kv heads", many, 8, 4, 128, device, slices=True)
    yield _check("slices one row of 4k", (4096,), 2, 16, 128, device, slices=True)
    yield _check("slices one row of 64k", (65536 - 7,), 2, 16, 128, device, slices=True)
    yield _check("slices one row of 64k among short", (5, 65500, 64, 300), 1, 4, 128, device, slices=True)
    yield _check("slices few parts", many, 2, 16, 128, device, slices=True, parts=7, min_pages=1)

    for lengths, kv_heads, head_dim in ((LENGTHS, 2, 128), (many, 8, 128), (LENGTHS, 3, 64), ((4096,) * 16, 2, 128)):
        label = f"invariant {len(lengths)} rows n{kv_heads} e{head_dim}"
        case = DecodeCase(label, lengths, kv_heads, 4, head_dim, mosaic_gpu.PAGE_TOKENS, "bfloat16")
        yield label, _alone(case, device)


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN or Inf nowhere."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _check(
    label: str,
    lengths: tuple[int, ...],
    kv_heads: int,
    group: int,
    head_dim: int,
    device: Device,
    *,
    tokens: int | None = None,
    slices: bool = False,
    **changes: Any,
) -> tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    """One case, with the tuning chosen for it and changes to it."""
    case = DecodeCase(label, lengths, kv_heads, group, head_dim, mosaic_gpu.PAGE_TOKENS, "bfloat16", tokens)
    chosen = mosaic_gpu.tuning_in_slices if slices else mosaic_gpu.tuning_for
    tuning = replace(chosen(head_dim, (tokens or 1) * group), **changes)

    def run() -> tuple[np.ndarray, np.ndarray]:
        inputs, expected, call = prepared()
        return np.asarray(call(*inputs), np.float32), expected

    @functools.cache
    def prepared() -> tuple[Any, np.ndarray, Callable[..., jax.Array]]:
        inputs = make_inputs(case, seed=0)
        call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=case.scale, device=device, tuning=tuning))
        return jax.device_put(inputs), dense(*inputs, scale=case.scale), call

    return label, run


def _alone(case: DecodeCase, device: Device) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Some rows, the others empty, against all together: NaN where a bit differs."""
    inputs = make_inputs(case, seed=0)
    expected = dense(*inputs, scale=case.scale)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=case.scale, device=device, invariant=True))
    return lambda: (rows_alone(call, inputs), expected)
