"""Which experts each token goes to, and the order in which their rows are computed: takes a router's scores.

Besides the dimension keys of the models (T tokens, X experts, D hidden): J experts a token, A = T J assignments. With S
shared experts, which every token goes to, J and X count those too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import registry
from pallas_kernels.arguments import FLOATS, INTEGERS, require
from pallas_kernels.device import Device
from pallas_kernels.moe_route import order

OP = "moe_route"
SCORINGS = ("softmax", "sigmoid")
SIZES = 8  # sizes of experts come in whole groups of so many
GROUP_SCORES = {"max": 1, "top2": 2}  # and how many experts of a group its score counts


@dataclass(frozen=True, slots=True)
class RouteRule:
    """How experts are chosen (DeepSeek-V2, arXiv 2405.04434 section 2.2; V3, arXiv 2412.19437 section 2.1.2).

    scoring: of the logits, over all experts. top_k: experts a token. num_groups: experts are cut into so many groups
    of neighbours, of which only the kept_groups best may be chosen from. group_score: "max", a group's best choice;
    "top2", the sum of its two best. renormalise: the chosen weights are divided by their sum. scale: then multiplies.
    """

    scoring: str
    top_k: int
    num_groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"
    renormalise: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring is {self.scoring!r}, must be one of {', '.join(SCORINGS)}.")
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, must be 1 or more.")
        if self.num_groups < 1:
            raise ValueError(f"num_groups is {self.num_groups}, must be 1 or more.")
        if not 1 <= self.kept_groups <= self.num_groups:
            raise ValueError(f"kept_groups is {self.kept_groups}, must be from 1 to num_groups, {self.num_groups}.")
        if self.group_score not in GROUP_SCORES:
            raise ValueError(f"group_score is {self.group_score!r}, must be one of {', '.join(GROUP_SCORES)}.")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}, must be a positive number.")

    def check_experts(self, experts: int) -> None:
        """ValueError where this rule cannot choose among so many experts."""
        width, rest = divmod(experts, self.num_groups)
        if rest:
            raise ValueError(f"num_groups is {self.num_groups}, must divide the {experts} experts.")
        if self.top_k > width * self.kept_groups:
            raise ValueError(
                f"top_k is {self.top_k}, must be {width * self.kept_groups} at most: "
                f"the experts in {self.kept_groups} of {self.num_groups} groups of {width}."
            )
        if self.grouped and width < GROUP_SCORES[self.group_score]:
            raise ValueError(f"group_score is {self.group_score!r}, needs groups of 2 experts or more, not {width}.")

    @property
    def grouped(self) -> bool:
        """Whether groups leave any expert out."""
        return self.kept_groups < self.num_groups

    def by_logit(self, bias: bool) -> bool:
        """Whether experts are chosen by their logits: of softmax, as nothing is added to scores."""
        return self.scoring == "softmax" and not bias and not (self.grouped and self.group_score == "top2")


class Order(NamedTuple):
    """The assignments of this device's experts, expert by expert, and after them all the others; int32.

    row_A: the token of each sorted assignment. place_TJ: where each assignment is in that order; A: not one of this
    device's experts. size_X: rows of each of this device's experts; they stand at 0 .. sum(size) - 1. assignment_A:
    which assignment a sorted row is, t J + j: `weight_TJ.reshape(-1)[assignment_A]` are the sorted weights.
    """

    row_A: jax.Array
    place_TJ: jax.Array
    size_X: jax.Array
    assignment_A: jax.Array


def sort_by_expert(expert_TJ: jax.Array, *, first: jax.Array | int, count: int) -> Order:
    """Sorts assignments by expert, stably, so that tokens stay in order within an expert.

    Args:
      expert_TJ: int32; an id outside first .. first + count - 1 (another device's expert; -1 or any id past the last
        one for a row of padding) is nobody's here.
      first: this device's first expert; may be traced.
      count: X, its number of experts, 1 or more.
    """
    require("sort_by_expert", "expert", expert_TJ, "T J", dtypes=INTEGERS)
    if count < 1:
        raise ValueError(f"sort_by_expert: count is {count}, must be 1 or more.")
    assignment_A, place_TJ, size_X = order.sort(expert_TJ, first, count)
    return Order(assignment_A // expert_TJ.shape[1], place_TJ, size_X, assignment_A)


class Routed(NamedTuple):
    """What the products of the experts need; int32 but for weight_A, which is fp32.

    row_A, weight_A: the token of each sorted assignment of this device's experts, and its weight; past sum(size) any
    token and any weight, NaN too. place_TJ, size_X: as in Order, but that zeros follow the sizes up to a multiple of
    SIZES: who reads them in groups needs no launch to fill the last one. Shared experts come first in all four.
    """

    row_A: jax.Array
    weight_A: jax.Array
    place_TJ: jax.Array
    size_X: jax.Array


@dataclass(frozen=True, slots=True)
class MoeRouteShapes:
    """Static sizes of one call."""

    tokens: int  # T
    experts: int  # of all devices
    count: int  # X, of this device
    rule: RouteRule
    bias: bool
    shared: int = 0  # S


def moe_route(
    logits_TX: jax.Array,
    bias_X: jax.Array | None,
    live_T: jax.Array,
    rule: RouteRule,
    *,
    first: jax.Array | int = 0,
    count: int,
    shared: int = 0,
    device: Device,
    implementation: str = registry.AUTO,
) -> Routed:
    """The experts of each live token and their weights in its sum, sorted by expert.

    score = scoring(logits); choice = score + bias; the top_k best choices win, of equal ones that of the lowest index.
    Where the logits have the order of the choices (RouteRule.by_logit) they are compared: rounded scores tie.
    The weights are scores, the bias is in none of them, and none is recovered by subtracting it: a score of 1e-8 beside
    a bias of 12 would be lost. Experts of groups that are left out have choice minus infinity, not 0, which a negative
    choice would lose to. Renormalised weights are divided by (sum + 1e-20), as transformers does.
    Shared experts need no choice: every token goes to each of them with weight 1, one of padding too, and whoever
    computes the rows treats them as the first S of its experts.

    Args:
      logits_TX: fp32; X are the experts of all devices.
      bias_X: fp32 [X], or None: the correction bias (`e_score_correction_bias`).
      rule: of choosing.
      live_T: bool; the others go to no expert.
      first, count: this device's experts, see sort_by_expert; shared ones are not among them.
      shared: S, how many there are.
      device, implementation: see registry.select.

    Raises:
      ValueError: shapes, dtypes and rule do not belong together. KernelChoiceError: the implementation does not fit.
    """
    require(OP, "logits", logits_TX, "T X")
    tokens, experts = logits_TX.shape
    if logits_TX.dtype != jnp.float32:
        raise ValueError(f"{OP}: logits are {logits_TX.dtype}, must be float32: close scores tie in less.")
    if bias_X is not None and (bias_X.shape != (experts,) or bias_X.dtype != jnp.float32):
        raise ValueError(f"{OP}: bias is {bias_X.dtype} {bias_X.shape}, must be float32 {(experts,)}.")
    if live_T.shape != (tokens,) or live_T.dtype != jnp.bool_:
        raise ValueError(f"{OP}: live is {live_T.dtype} {live_T.shape}, must be bool {(tokens,)}.")
    if not 1 <= count <= experts:
        raise ValueError(f"{OP}: count is {count}, must be from 1 to the {experts} experts.")
    if isinstance(first, int) and not 0 <= first <= experts - count:
        raise ValueError(f"{OP}: first is {first}, must be from 0 to {experts - count}: {count} of {experts} experts.")
    if shared < 0:
        raise ValueError(f"{OP}: shared is {shared}, must be 0 or more.")
    rule.check_experts(experts)
    shapes = MoeRouteShapes(tokens, experts, count, rule, bias_X is not None, shared)
    chosen = registry.select(OP, shapes, device, implementation)
    return chosen.run(logits_TX, live_T, first=first, bias_X=bias_X, rule=rule, count=count, shared=shared)


def combine(y_AD: jax.Array, place_TJ: jax.Array, *, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Adds up, in fp32, what the experts made of each token: [T, D] in `dtype`.

    Args:
      y_AD: sorted rows, already weighted; those past this device's own may be anything, NaN too.
      place_TJ: of the Order, or of Routed; assignments at A and beyond are left out.
    """
    require("combine", "y", y_AD, "A D", dtypes=(*FLOATS, "float16"))
    require("combine", "place", place_TJ, "T J", dtypes=INTEGERS)
    if y_AD.shape[0] != place_TJ.size:
        raise ValueError(f"combine: {y_AD.shape[0]} rows, must be {place_TJ.size}, one an assignment.")
    return order.combine(y_AD, place_TJ).astype(dtype)
