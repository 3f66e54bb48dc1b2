"""moe_route: the XLA form and the kernels' bodies (run by numpy) against the reference; lowering for CUDA."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.moe_route import kernel, mosaic_gpu, reference, xla
from pallas_kernels.moe_route.cases import CASES, RouteCase, make_inputs
from pallas_kernels.moe_route.contract import MoeRouteShapes, Routed, RouteRule, moe_route
from pallas_kernels.moe_route.emulator import Emulator
from pallas_kernels.moe_route.mosaic_gpu import Tuning, sizes_for

H200 = Device("gpu", "9.0")
CPU = Device("cpu")
TUNINGS = {
    "1 token a CTA": Tuning(tokens_each=1),
    "one CTA": Tuning(tokens_each=32),
    "two launches": Tuning(one_launch=0, most_ctas=3),
    "two launches, some words a CTA": Tuning(one_launch=0, most_ctas=1),
}
NATIVE = [case for case in CASES if case.experts % 32 == 0]
SHARED = [case for case in CASES if case.shared]
FITS = {"tokens": 16, "experts": 256, "count": 256, "rule": CASES[3].rule, "bias": True}


def live_of(case: RouteCase) -> np.ndarray:
    """Some tokens are padding, the first too."""
    return np.arange(case.tokens) % 7 != 0


def expected_of(case: RouteCase, first: int, count: int) -> tuple[Routed, int]:
    """Of the reference, with the number of rows that are somebody's."""
    logits_TX, bias_X = make_inputs(case, seed=0)
    options = {"rule": case.rule, "count": count, "shared": case.shared}
    made = reference.run(logits_TX, live_of(case), first=first, bias_X=bias_X, **options)
    return made, int(made.size_X.sum())


def compare(made: Routed, expected: Routed, rows: int, label: str) -> None:
    """Integers alike, weights close; rows past the last one may be any token."""
    np.testing.assert_array_equal(made.place_TJ, expected.place_TJ)
    np.testing.assert_array_equal(made.size_X, expected.size_X)
    np.testing.assert_array_equal(made.row_A[:rows], expected.row_A[:rows])
    assert np.isin(made.row_A, np.arange(len(expected.place_TJ))).all() and np.isfinite(made.weight_A).all()
    check(np.asarray(made.weight_A[:rows]), expected.weight_A[:rows], label=label)


def emulated(case: RouteCase, first: int, count: int, tuning: Tuning) -> Routed:
    """The kernels' bodies in numpy, from poisoned outputs and scratch."""
    logits_TX, bias_X = make_inputs(case, seed=0)
    sizes = sizes_for(logits_TX.shape, count, case.rule, bias_X is not None, tuning, case.shared)
    T, J, S = case.tokens, case.rule.top_k, case.shared
    inputs = {"logits": logits_TX.ravel(), "live": live_of(case).astype(np.uint32), "bias": bias_X}
    r = SimpleNamespace(**inputs, first=np.full(1, first, np.uint32))

    def poison(**shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            floats = name in ("weight", "weights")
            setattr(r, name, np.full(shape, np.nan, np.float32) if floats else np.full(shape, 0xABCDEF, np.uint32))

    poison(row=(T * (S + J),), weight=(T * (S + J),), place=(T * (S + J),), size_X=(-(-(S + count) // 8) * 8,))
    poison(starts=(sizes.ctas, count), sums=(sizes.ctas, 32))
    if T <= tuning.one_launch:
        poison(words=(sizes.ctas, count))
        kernel.route_body(Emulator(sizes.ctas, sizes.threads), r, sizes)
    else:
        poison(experts=(T * J,), weights=(T * J,), words=(sizes.ctas * sizes.words * count,))
        poison(counts=(sizes.ctas * count,), own=(sizes.ctas, sizes.words * count))
        kernel.choose_body(Emulator(sizes.ctas, 1024), r, sizes)
        poison(size=(sizes.ctas, 1024), before=(sizes.ctas, 1024))
        kernel.place_body(Emulator(sizes.ctas, 1024), r, sizes)
    return Routed(r.row, r.weight, r.place.reshape(T, S + J).astype(np.int64), r.size_X.astype(np.int64))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("parts", [1, 2])
def test_the_xla_form(case: RouteCase, parts: int) -> None:
    logits_TX, bias_X = make_inputs(case, seed=0)
    first, count = case.experts - case.experts // parts, case.experts // parts
    call = jax.jit(xla.run, static_argnames=("rule", "count", "shared"))
    options = {"rule": case.rule, "count": count, "shared": case.shared}
    made = call(logits_TX, live_of(case), first=first, bias_X=bias_X, **options)
    expected, rows = expected_of(case, first, count)
    compare(Routed(*map(np.asarray, made)), expected, rows, case.name)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
@pytest.mark.parametrize("case", NATIVE, ids=lambda case: case.name)
def test_the_bodies_of_the_kernels(case: RouteCase, tuning: Tuning) -> None:
    expected, rows = expected_of(case, 0, case.experts)
    compare(emulated(case, 0, case.experts, tuning), expected, rows, case.name)


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS)
@pytest.mark.parametrize("first", [0, 64, 224])
def test_slices_of_the_experts(first: int, tuning: Tuning) -> None:
    """Expert parallel: rows of other devices' experts have no place, those before the first too."""
    expected, rows = expected_of(CASES[3], first, 32)
    compare(emulated(CASES[3], first, 32, tuning), expected, rows, "slice")


def test_shared_experts_are_no_part_of_a_slice() -> None:
    """They come before this device's experts, whichever those are."""
    case = dataclasses.replace(CASES[3], shared=3)
    expected, rows = expected_of(case, 64, 32)
    for tuning in TUNINGS.values():
        compare(emulated(case, 64, 32, tuning), expected, rows, "slice")


def test_every_token_goes_to_the_shared_experts() -> None:
    """Written down, for two of them and two live tokens of three."""
    rule, live_T = RouteRule("softmax", top_k=1), np.array([True, False, True])
    logits_TX = np.array([[0, 0, 0, 9], [9, 0, 0, 0], [0, 9, 0, 0]], np.float32)
    made = moe_route(jnp.asarray(logits_TX), None, jnp.asarray(live_T), rule, count=4, shared=2, device=CPU)
    np.testing.assert_array_equal(made.size_X, [3, 3, 0, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(made.row_A[:8], [0, 1, 2, 0, 1, 2, 2, 0])
    np.testing.assert_array_equal(made.place_TJ, [[0, 3, 7], [1, 4, 9], [2, 5, 6]])
    np.testing.assert_array_equal(made.weight_A[:6], np.ones(6))


def test_more_tokens_than_one_launch_takes() -> None:
    case = dataclasses.replace(CASES[0], tokens=257)
    expected, rows = expected_of(case, 0, 64)
    compare(emulated(case, 0, 64, Tuning(most_ctas=4)), expected, rows, case.name)


@pytest.mark.parametrize("tokens", [1, 2, 31, 33, 64, 100, 255, 256, 257, 4224, 4225, 8192, 32768])
def test_every_token_has_a_cta(tokens: int) -> None:
    """And every CTA one; no CTA has more than its words hold, or than the device takes."""
    sizes = sizes_for((tokens, 64), 64, CASES[0].rule, False, Tuning())
    assert (sizes.ctas - 1) * sizes.tokens_each < tokens <= sizes.ctas * sizes.tokens_each
    assert sizes.tokens_each <= 32 * sizes.words and sizes.threads <= 1024
    assert sizes.ctas <= (8 if tokens <= 256 else 132)


@pytest.mark.parametrize(("tokens", "launches"), [(1, 1), (16, 1), (256, 1), (257, 2), (8192, 2)])
@pytest.mark.parametrize("case", [*NATIVE[:4], *SHARED], ids=lambda case: case.name)
def test_it_lowers_for_the_gpu(case: RouteCase, tokens: int, launches: int) -> None:
    arrays = [jax.ShapeDtypeStruct((tokens, case.experts), jnp.float32), jax.ShapeDtypeStruct((tokens,), jnp.bool_)]
    bias_X = jnp.zeros(case.experts) if case.bias else None
    options = {"first": 0, "bias_X": bias_X, "rule": case.rule, "count": case.experts, "shared": case.shared}
    call = jax.jit(lambda *inputs: mosaic_gpu.run(*inputs, **options))
    text = call.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == launches


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"experts": 72}, "there are 72 experts, must be a multiple of 32 and 512 at most"),
        ({"experts": 544}, "there are 544 experts, must be a multiple of 32 and 512 at most"),
        ({"rule": RouteRule("sigmoid", 33)}, "top_k is 33, must be 32 at most"),
        ({"rule": RouteRule("sigmoid", 2, num_groups=64, kept_groups=8)}, "there are 64 groups, must be a power of 2"),
        ({"shared": 33}, "there are 33 shared experts, must be 32 at most"),
        ({"rule": RouteRule("softmax", 2)}, "softmax scores with a bias"),
        ({"tokens": 40000}, "there are 40000 tokens, must be 32768 at most"),
    ],
)
def test_what_it_does_not_fit(change: dict, reason: str) -> None:
    assert reason in (mosaic_gpu.why_not(MoeRouteShapes(**FITS | change), H200) or "")


def test_where_it_fits() -> None:
    assert mosaic_gpu.why_not(MoeRouteShapes(**FITS), H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(MoeRouteShapes(**FITS), CPU) or "")


def test_arrays_that_do_not_belong_together() -> None:
    rule, live = RouteRule("softmax", 2), jnp.ones(2, bool)
    good = {"rule": rule, "count": 8, "device": CPU}
    wrong = (
        ((jnp.zeros((2, 8), jnp.bfloat16), None, live), {}, "logits are bfloat16, must be float32"),
        ((jnp.zeros((2, 8)), jnp.zeros(7), live), {}, r"bias is float32 \(7,\)"),
        ((jnp.zeros((2, 8)), None, live[1:]), {}, r"live is bool \(1,\)"),
        ((jnp.zeros((2, 8)), None, live.astype(jnp.int32)), {}, "live is int32"),
        ((jnp.zeros((2, 8)), None, live), {"shared": -1}, "shared is -1, must be 0 or more"),
        ((jnp.zeros((2, 8)), None, live), {"count": 9}, "count is 9, must be from 1 to the 8 experts"),
    )
    for arrays, change, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            moe_route(*arrays, **good | change)
