"""The correctness cases of sampling's native kernels on their own device: takes cases, gives results to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np

from pallas_kernels.compare import Difference
from pallas_kernels.device import Device
from pallas_kernels.sampling import mosaic_gpu
from pallas_kernels.sampling.cases import CASES, FILTERS, WIDE, SamplingCase, make_inputs
from pallas_kernels.sampling.reference import sort_based

# One set of filters for all, so that few shapes are compiled.
_FILTERS = (*FILTERS, *WIDE, (20000, 0.7, 0.0))
_LARGE = (
    SamplingCase("v151552", 151552, _FILTERS),
    SamplingCase("v151552 flat", 151552, _FILTERS, width=1.0),
    SamplingCase("v151552 ties", 151552, _FILTERS, data="integers"),
    SamplingCase("v151552 sorted", 151552, _FILTERS, data="sorted"),
    SamplingCase("v154880 logits", 154880, _FILTERS, logits=True),
    SamplingCase("v154880 peaked logits", 154880, _FILTERS, width=6.0, logits=True),
)
_SMALL = tuple(case for case in CASES if case.name in ("small", "no multiple of a chunk"))


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernels' result and the reference's."""
    for case in (*_LARGE, *_SMALL):
        yield case.name, _runner(case, device)
    yield "v151552 alone", _alone(_LARGE[1], device)


def passes(found: Difference) -> bool:
    """Every token and every number of kept elements is the reference's."""
    return found.norm == 0 and not found.bad


def _runner(case: SamplingCase, device: Device) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    inputs = make_inputs(case, seed=0)
    expected = np.stack(sort_based(*inputs)).astype(np.float32)
    return lambda: (_run(inputs, device), expected)


def _alone(case: SamplingCase, device: Device) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Every row by itself against all together: a row's result does not hang on its neighbours."""
    inputs = make_inputs(case, seed=1)
    rows = [[None if array is None else array[i : i + 1] for array in inputs] for i in range(len(case.filters))]
    return lambda: (np.concatenate([_run(row, device) for row in rows], axis=1), _run(inputs, device))


def _run(inputs: tuple[np.ndarray | None, ...] | list[np.ndarray | None], device: Device) -> np.ndarray:
    """Tokens and numbers of kept elements, fp32 [2, B]."""
    return np.stack([np.asarray(out, np.float32) for out in _call(*inputs, device=device)])


_call = jax.jit(mosaic_gpu.run, static_argnames="device")
