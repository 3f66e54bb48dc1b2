"""The correctness cases of mla_decode's native kernels on their own device: takes cases, gives results to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import numpy as np

from pallas_kernels.alone import rows_alone
from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.mla_decode import cases, mosaic_gpu
from pallas_kernels.mla_decode.cases import DecodeCase, make_inputs
from pallas_kernels.mla_decode.reference import dense

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 4092, 0, 128, 700)
HEADS = (1, 8, 16, 20, 32, 64, 96, 128)
NEW_TOKENS = ((4, 4), (16, 2), (8, 4), (3, 8))  # heads and query tokens

FEW_FORMS = tuple({"fused": fused, "min_pages": pages} for fused in (True, False) for pages in (1, 2))
MANY_FORMS = ({"multicast": False},)


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's."""
    many = tuple(int(n) for n in np.random.default_rng(5).integers(0, 600, 60))
    for heads in HEADS:
        for name, lengths in (("edges", LENGTHS), ("60 rows", many), ("one row", (1000,))):
            case = DecodeCase(f"h{heads} {name}", lengths, heads, mosaic_gpu.PAGE_TOKENS, dtype="bfloat16")
            yield case.name, _runner(case, device, mosaic_gpu.tuning_for(heads))
    for heads, new in NEW_TOKENS:
        for name, lengths in (("edges", (*cases.NEW_TOKENS, 700, 4092, 4097)), ("60 rows", many)):
            label = f"h{heads} s{new} {name}"
            case = DecodeCase(label, lengths, heads, mosaic_gpu.PAGE_TOKENS, dtype="bfloat16", tokens=new)
            yield case.name, _runner(case, device, mosaic_gpu.tuning_for(heads * new))
    for heads, new in ((20, 3), (128, 2), (128, 8)):
        label = f"h{heads} s{new} edges"
        lengths = (*cases.NEW_TOKENS, 700, 4092, 4097)
        case = DecodeCase(label, lengths, heads, mosaic_gpu.PAGE_TOKENS, dtype="bfloat16", tokens=new)
        yield label, _runner(case, device, mosaic_gpu.tuning_for(heads * new))
    # One part holds all rows whole; parts of one page; a merge in several rounds.
    for heads in (1, 8, 16, 20, 32, 128):
        case = DecodeCase(f"h{heads} edges", LENGTHS, heads, mosaic_gpu.PAGE_TOKENS, dtype="bfloat16")
        forms = MANY_FORMS if heads == 128 else FEW_FORMS
        for changes in ({"parts": 1}, {"min_pages": 1}, {"merge_items": (2,), "merge_heads": 3}, *forms):
            tuning = replace(mosaic_gpu.tuning_for(heads), **changes)
            yield f"{case.name} {changes}", _runner(case, device, tuning)

    for heads, lengths in ((16, LENGTHS), (20, many), (128, LENGTHS), (16, (4000,) * 3), (128, many[:24] * 6)):
        case = DecodeCase(f"h{heads} {len(lengths)} rows", lengths, heads, mosaic_gpu.PAGE_TOKENS, dtype="bfloat16")
        yield f"invariant {case.name}", _alone(case, device)


def passes(found: Difference) -> bool:
    """Within the bounds of bf16, and NaN or Inf nowhere."""
    norm, element = BOUNDS["bfloat16"]
    return found.norm <= norm and found.element <= element and not found.bad


def _runner(case: DecodeCase, device: Device, tuning: mosaic_gpu.Tuning) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    inputs = make_inputs(case, seed=0)
    expected = dense(*inputs, rank=case.rank, scale=case.scale)
    options = {"rank": case.rank, "scale": case.scale, "device": device, "tuning": tuning}
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, **options))
    return lambda: (np.asarray(call(*inputs), np.float32), expected)


def _alone(case: DecodeCase, device: Device) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Some rows, the others empty, against all together: NaN where a bit differs."""
    inputs = make_inputs(case, seed=0)
    expected = dense(*inputs, rank=case.rank, scale=case.scale)
    options = {"rank": case.rank, "scale": case.scale, "device": device, "invariant": True}
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, **options))
    return lambda: (rows_alone(call, inputs), expected)
