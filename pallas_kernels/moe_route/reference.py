"""moe_route in fp32 numpy, token by token: what every implementation is compared with."""

from __future__ import annotations

import numpy as np

from pallas_kernels.moe_route.contract import SIZES, Routed, RouteRule


def route(logits_TX: np.ndarray, bias_X: np.ndarray | None, rule: RouteRule) -> tuple[np.ndarray, np.ndarray]:
    """See the contract. Returns int32 and fp32 [T, J]."""
    chosen = [_one(logits_X.astype(np.float32), bias_X, rule) for logits_X in logits_TX]
    experts, weights = zip(*chosen, strict=True)
    return np.array(experts, np.int32), np.array(weights, np.float32)


def _one(logits_X: np.ndarray, bias_X: np.ndarray | None, rule: RouteRule) -> tuple[np.ndarray, np.ndarray]:
    if rule.scoring == "softmax":
        score_X = np.exp(logits_X - logits_X.max())
        score_X /= score_X.sum()
    else:
        score_X = 1 / (1 + np.exp(-logits_X))
    choice_X = np.copy(logits_X if rule.by_logit(bias_X is not None) else score_X)
    if bias_X is not None:
        choice_X += bias_X
    groups = np.split(choice_X, rule.num_groups)
    best_G = [np.sort(group)[::-1][: 2 if rule.group_score == "top2" else 1].sum() for group in groups]
    kept = _highest(np.array(best_G), rule.kept_groups)
    for index, group in enumerate(groups):
        if index not in kept:
            group[:] = -np.inf  # splits are views
    expert_J = _highest(choice_X, rule.top_k)
    weight_J = score_X[expert_J]
    if rule.renormalise:
        weight_J = weight_J / (weight_J.sum() + np.float32(1e-20))
    return expert_J, weight_J * np.float32(rule.scale)


def _highest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the highest values, the lowest index first among equal ones."""
    return np.argsort(-values, kind="stable")[:count]


def run(
    logits_TX: np.ndarray,
    live_T: np.ndarray,
    *,
    first: int,
    bias_X: np.ndarray | None,
    rule: RouteRule,
    count: int,
    shared: int = 0,
) -> Routed:
    """See the contract. Rows past sum(size) are those of the others, by number of the expert."""
    expert_TJ, weight_TJ = route(logits_TX, bias_X, rule)
    expert_TJ[~live_T] = -1
    row_A, place_TJ, size_X, assignment_A = sort(expert_TJ, first, count)
    T = len(live_T)
    own_TS = np.arange(T)[:, None] + T * np.arange(shared)
    return Routed(
        np.concatenate((np.tile(np.arange(T), shared), row_A)),
        np.concatenate((np.ones(shared * T, np.float32), weight_TJ.reshape(-1)[assignment_A])),
        np.concatenate((own_TS, place_TJ + shared * T), axis=1),
        np.concatenate((np.full(shared, T), size_X, np.zeros(-(shared + count) % SIZES, np.int64))),
    )


def sort(expert_TJ: np.ndarray, first: int, count: int) -> tuple[np.ndarray, ...]:
    """The fields of the contract's Order, by a stable sort."""
    local_A = expert_TJ.reshape(-1) - first
    key_A = np.where((local_A >= 0) & (local_A < count), local_A, count)
    sorted_A = np.argsort(key_A, kind="stable")
    place_A = np.empty_like(sorted_A)
    place_A[sorted_A] = np.arange(len(sorted_A))
    place_A[key_A == count] = len(sorted_A)
    size_X = np.bincount(key_A, minlength=count + 1)[:count]
    return sorted_A // expert_TJ.shape[1], place_A.reshape(expert_TJ.shape), size_X, sorted_A
