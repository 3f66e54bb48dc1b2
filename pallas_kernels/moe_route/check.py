"""The correctness cases of moe_route's kernels on their own device: takes cases, gives results to compare.

Choices, places and rows must be those of the XLA form on the same device bit for bit; weights only close to the
reference's. So all of them stand in one array, in which a wrong integer is far outside the bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from pallas_kernels.compare import BOUNDS, Difference
from pallas_kernels.device import Device
from pallas_kernels.moe_route import mosaic_gpu, reference, xla
from pallas_kernels.moe_route.cases import CASES, RouteCase, make_inputs
from pallas_kernels.moe_route.contract import MoeRouteShapes, Routed
from pallas_kernels.moe_route.mosaic_gpu import Tuning

_TIMES = 1000  # of weights beside ids


def checks(device: Device) -> Iterator[tuple[str, Callable[[], tuple[np.ndarray, np.ndarray]]]]:
    """Label and function of each case; a function gives the kernel's result and the reference's, or XLA's."""
    for case in CASES:
        shapes = MoeRouteShapes(case.tokens, case.experts, case.experts, case.rule, case.bias, case.shared)
        if mosaic_gpu.why_not(shapes, device) is None:
            yield case.name, _against_reference(case, Tuning())
            yield f"{case.name}, a CTA", _against_reference(case, Tuning(tokens_each=32))
            yield f"{case.name}, two launches", _against_reference(case, Tuning(one_launch=0, most_ctas=2))
    for case in [case for case in CASES if case in CASES[:4] or case.shared]:
        for tokens in (1, 256, 4099, 8192):
            many = dataclasses.replace(case, tokens=tokens)
            yield f"{case.name}, {tokens} tokens, as xla", _against_xla(many)
    yield "slice of the experts, as xla", _against_xla(dataclasses.replace(CASES[3], tokens=100), first=64, count=32)


def passes(found: Difference) -> bool:
    """Within the bounds of fp32."""
    norm, element = BOUNDS["float32"]
    return found.norm <= norm and found.element <= element and not found.bad


def _live(tokens: int) -> np.ndarray:
    return np.arange(tokens) % 7 != 3


def _against_reference(case: RouteCase, tuning: Tuning) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    logits_TX, bias_X = make_inputs(case, seed=0)
    live_T = _live(case.tokens)
    options = {"first": 0, "bias_X": bias_X, "rule": case.rule, "count": case.experts, "shared": case.shared}
    expected = _flat(reference.run(logits_TX, live_T, **options))
    call = jax.jit(lambda *inputs: mosaic_gpu.run(*inputs, tuning=tuning, **options))
    return lambda: (_flat(call(logits_TX, live_T)), expected)


def _against_xla(
    case: RouteCase, first: int = 0, count: int | None = None
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    logits_TX, bias_X = make_inputs(case, seed=1)
    live_T = _live(case.tokens)
    options = {"first": first, "bias_X": bias_X, "rule": case.rule, "count": count or case.experts}
    options["shared"] = case.shared
    native = jax.jit(lambda *inputs: mosaic_gpu.run(*inputs, **options))
    plain = jax.jit(lambda *inputs: xla.run(*inputs, **options))
    return lambda: (_flat(native(logits_TX, live_T)), _flat(plain(logits_TX, live_T)))


def _flat(routed: Routed) -> np.ndarray:
    """Places, sizes, and rows with their weights as far as they are somebody's."""
    live = int(np.asarray(routed.size_X).sum())
    parts = (routed.place_TJ, routed.size_X, routed.row_A[:live], _TIMES * routed.weight_A[:live])
    return np.concatenate([np.asarray(part, np.float32).ravel() for part in parts])
