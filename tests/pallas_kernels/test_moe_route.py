"""moe_route's steps in XLA against numpy: rules, groups, ties, biases, padding, and slices of experts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.moe_route import reference, xla
from pallas_kernels.moe_route.cases import CASES, ORDER_CASES, OrderCase, RouteCase, make_experts, make_inputs
from pallas_kernels.moe_route.contract import RouteRule, combine, moe_route, sort_by_expert

CPU = Device("cpu")
SORT = jax.jit(sort_by_expert, static_argnames="count")
ROUTE = jax.jit(xla.choose, static_argnames="rule")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_experts_and_weights(case: RouteCase) -> None:
    logits_TX, bias_X = make_inputs(case, seed=0)
    expert_TJ, weight_TJ = ROUTE(logits_TX, bias_X, rule=case.rule)
    assert expert_TJ.dtype == jnp.int32 and weight_TJ.dtype == jnp.float32
    expected_TJ, expected_weight_TJ = reference.route(logits_TX, bias_X, case.rule)
    np.testing.assert_array_equal(expert_TJ, expected_TJ)
    check(np.asarray(weight_TJ), expected_weight_TJ, label=case.name)


def test_b075_the_bias_is_in_no_weight() -> None:
    logits_TX = np.array([[2, 0, 0, -1, -1, -1, -1, -1]], np.float32)
    bias_X = np.eye(1, 8, 2, dtype=np.float32)[0] / 2
    rule = RouteRule("sigmoid", 2, num_groups=4, kept_groups=4, group_score="top2", renormalise=True)
    expert_TJ, weight_TJ = ROUTE(logits_TX, bias_X, rule=rule)
    np.testing.assert_array_equal(expert_TJ, [[2, 0]])  # 1.0 and 0.88
    np.testing.assert_allclose(weight_TJ, [[0.36211, 0.63789]], atol=5e-6)


def test_b078_no_score_is_recovered_from_a_biased_one() -> None:
    """12 + 1e-8 is 12 in fp32: both choices tie, so the lower index comes first, and both weights keep their bits."""
    logits_TX = np.array([[-18, -17, -30, -30]], np.float32)
    bias_X = np.array([12, 12, 0, 0], np.float32)
    expert_TJ, weight_TJ = ROUTE(logits_TX, bias_X, rule=RouteRule("sigmoid", 2, renormalise=True))
    np.testing.assert_array_equal(expert_TJ, [[0, 1]])
    np.testing.assert_allclose(weight_TJ, [[0.26894, 0.73106]], atol=5e-6)


def test_biases_that_differ_by_less_than_bfloat16_decide() -> None:
    """Biases from 6.8 to 7.1: a bfloat16 step there is 0.03, so that rounded ones would tie and choose others."""
    bias_X = np.linspace(6.817, 7.063, 64, dtype=np.float32)
    expert_TJ, _ = ROUTE(np.zeros((1, 64), np.float32), bias_X, rule=RouteRule("sigmoid", 8))
    np.testing.assert_array_equal(expert_TJ, [range(63, 55, -1)])


def test_a_group_that_is_left_out_loses_to_negative_choices() -> None:
    """With 0 in place of minus infinity, the experts that are left out would win over the kept ones."""
    bias_X = np.array([-1.0, -1.1, -2.0, -2.0, -3.0, -3.0, -3.0, -3.0], np.float32)
    rule = RouteRule("sigmoid", 2, num_groups=4, kept_groups=1, group_score="top2")
    expert_TJ, _ = ROUTE(np.zeros((1, 8), np.float32), bias_X, rule=rule)
    np.testing.assert_array_equal(expert_TJ, [[0, 1]])


def test_a_group_scores_by_its_two_best_not_its_best() -> None:
    logits_TX = np.array([[3, -5, 2, 2]], np.float32)
    rule = RouteRule("sigmoid", 1, num_groups=2, kept_groups=1, group_score="top2")
    assert ROUTE(logits_TX, None, rule=rule)[0].item() == 2
    assert ROUTE(logits_TX, None, rule=dataclasses.replace(rule, group_score="max"))[0].item() == 0


@pytest.mark.parametrize("case", ORDER_CASES, ids=lambda case: case.name)
def test_the_sorted_order(case: OrderCase) -> None:
    expert_TJ = make_experts(case, seed=0)
    order = SORT(expert_TJ, first=0, count=case.experts)
    for made, expected in zip(order, reference.sort(expert_TJ, 0, case.experts), strict=True):
        assert made.dtype == jnp.int32
        np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("case", [case for case in ORDER_CASES if case.experts % 4 == 0], ids=lambda case: case.name)
def test_slices_of_the_experts_add_up_to_the_whole(case: OrderCase) -> None:
    """Expert parallel: four devices, each with its own quarter and NaN in every row that is not its own."""
    expert_TJ = make_experts(case, seed=1)
    A, count = expert_TJ.size, case.experts // 4
    value_X = np.random.default_rng(0).standard_normal(case.experts).astype(np.float32)
    real_TJ = (expert_TJ >= 0) & (expert_TJ < case.experts)
    expected_T = np.where(real_TJ, value_X[np.clip(expert_TJ, 0, case.experts - 1)], 0).sum(axis=1)
    parts = []
    for first in range(0, case.experts, count):
        order = SORT(expert_TJ, first=jnp.int32(first), count=count)
        for made, expected in zip(order, reference.sort(expert_TJ, first, count), strict=True):
            np.testing.assert_array_equal(made, expected)
        y_AD = np.full((A, 1), np.nan, np.float32)
        y_AD[: order.size_X.sum(), 0] = np.repeat(value_X[first : first + count], order.size_X)
        parts.append(np.asarray(combine(jnp.asarray(y_AD), order.place_TJ, dtype=jnp.float32))[:, 0])
    np.testing.assert_allclose(sum(parts), expected_T, atol=1e-6)


def test_combine_adds_in_fp32_and_rounds_once() -> None:
    """1 + 3 x 2^-8 in bf16 steps would stay 1."""
    y_AD = jnp.array([[1.0], [2**-9], [2**-9], [2**-9]], jnp.bfloat16)
    out = combine(y_AD, jnp.arange(4).reshape(1, 4), dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16 and out.item() == 1.0078125


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scoring": "tanh"}, "scoring is 'tanh', must be one of softmax, sigmoid"),
        ({"top_k": 0}, "top_k is 0, must be 1 or more"),
        ({"num_groups": 0}, "num_groups is 0, must be 1 or more"),
        ({"num_groups": 4, "kept_groups": 5}, "kept_groups is 5, must be from 1 to num_groups, 4"),
        ({"group_score": "mean"}, "group_score is 'mean', must be one of max, top2"),
        ({"scale": float("nan")}, "scale is nan, must be a positive number"),
    ],
)
def test_rules_that_make_no_sense(change: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RouteRule(**{"scoring": "softmax", "top_k": 2} | change)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (RouteRule("sigmoid", 2, num_groups=3, kept_groups=3), "num_groups is 3, must divide the 8 experts"),
        (RouteRule("sigmoid", 5, num_groups=4, kept_groups=2), "top_k is 5, must be 4 at most"),
        (RouteRule("sigmoid", 1, num_groups=8, kept_groups=2, group_score="top2"), "needs groups of 2 experts"),
    ],
)
def test_rules_that_do_not_fit_the_experts(rule: RouteRule, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        moe_route(jnp.zeros((2, 8)), None, jnp.ones(2, bool), rule, count=8, device=CPU)


def test_arrays_that_do_not_belong_together() -> None:
    with pytest.raises(ValueError, match="3 rows, must be 4"):
        combine(jnp.zeros((3, 8)), jnp.zeros((2, 2), jnp.int32), dtype=jnp.float32)
    with pytest.raises(ValueError, match="count is 0"):
        sort_by_expert(jnp.zeros((2, 2), jnp.int32), first=0, count=0)
