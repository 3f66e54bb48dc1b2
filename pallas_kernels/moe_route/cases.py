"""Named cases of moe_route and of its sorted order, with their random inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.moe_route.contract import RouteRule


@dataclass(frozen=True, slots=True)
class RouteCase:
    """Sizes and rule of one call. ties: logits and biases come in so few steps that many choices are equal. shared:
    experts that every token goes to."""

    name: str
    tokens: int
    experts: int
    rule: RouteRule
    bias: bool = False
    ties: bool = False
    shared: int = 0


_V2 = RouteRule("softmax", top_k=6, num_groups=8, kept_groups=3, scale=16.0)
_V3 = RouteRule("sigmoid", 8, num_groups=8, kept_groups=4, group_score="top2", renormalise=True, scale=2.5)
CASES = (
    RouteCase("softmax", 33, 64, RouteRule("softmax", top_k=6)),
    RouteCase("softmax, renormalised", 5, 64, RouteRule("softmax", top_k=6, renormalise=True)),
    RouteCase("softmax, groups", 32, 160, _V2),
    RouteCase("sigmoid, groups, bias", 64, 256, _V3, bias=True),
    RouteCase("sigmoid, one group, bias", 16, 128, RouteRule("sigmoid", 8, renormalise=True, scale=1.5), bias=True),
    RouteCase("one token, every expert", 1, 4, RouteRule("sigmoid", top_k=4)),
    RouteCase("softmax, 2 shared", 16, 64, RouteRule("softmax", top_k=6), shared=2),
    RouteCase("sigmoid, groups, bias, 1 shared", 70, 256, _V3, bias=True, shared=1),
    RouteCase("ties", 16, 64, _V3, bias=True, ties=True),
)


def make_inputs(case: RouteCase, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """fp32 logits and biases; biases are negative too, so that a choice of 0 is not the lowest."""
    rng = np.random.default_rng(seed)
    logits_TX = 2 * rng.standard_normal((case.tokens, case.experts))
    bias_X = rng.standard_normal(case.experts)
    if case.ties:
        logits_TX, bias_X = np.round(logits_TX), np.round(bias_X)
    return logits_TX.astype(np.float32), bias_X.astype(np.float32) if case.bias else None


@dataclass(frozen=True, slots=True)
class OrderCase:
    """Sizes of one call of sort_by_expert. padding: rows at the end that name no expert."""

    name: str
    tokens: int
    top_k: int
    experts: int  # of all devices
    padding: int = 0
    hot: int | None = None  # the expert that most rows choose


ORDER_CASES = (
    OrderCase("one token", 1, 4, 16),
    OrderCase("one expert", 7, 1, 1, padding=2),
    OrderCase("decode", 64, 6, 64, padding=9),
    OrderCase("all rows to one", 40, 1, 8, hot=5),
    OrderCase("at the border", 512, 4, 32),
    OrderCase("blocks", 257, 8, 256, padding=30, hot=17),
    OrderCase("only padding", 130, 8, 8, padding=130),
)


def make_experts(case: OrderCase, seed: int) -> np.ndarray:
    """int32 [T, J]: experts of a token differ; rows of padding name -1, the number of experts, or a far id."""
    rng = np.random.default_rng(seed)
    expert_TJ = np.array([rng.permutation(case.experts)[: case.top_k] for _ in range(case.tokens)])
    if case.hot is not None:
        expert_TJ[rng.random(case.tokens) < 0.9, 0] = case.hot
    expert_TJ[case.tokens - case.padding :] = np.resize([-1, case.experts, 2**30], (case.padding, 1))
    return expert_TJ.astype(np.int32)
