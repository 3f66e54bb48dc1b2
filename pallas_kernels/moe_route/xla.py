"""moe_route in plain XLA, step by step; fits every shape and device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import Device
from pallas_kernels.moe_route.contract import GROUP_SCORES, SIZES, MoeRouteShapes, Routed, RouteRule, sort_by_expert


def why_not(shapes: MoeRouteShapes, device: Device) -> str | None:
    """Fits always."""
    return None


def run(
    logits_TX: jax.Array,
    live_T: jax.Array,
    *,
    first: jax.Array | int,
    bias_X: jax.Array | None,
    rule: RouteRule,
    count: int,
    shared: int = 0,
) -> Routed:
    """See the contract."""
    expert_TJ, weight_TJ = choose(logits_TX, bias_X, rule)
    order = sort_by_expert(jnp.where(live_T[:, None], expert_TJ, -1), first=first, count=count)
    # Sorted by a gather: a scatter needs a launch more, to zero its target.
    routed = Routed(order.row_A, weight_TJ.reshape(-1)[order.assignment_A], order.place_TJ, order.size_X)
    routed = with_shared(routed, shared) if shared else routed
    return routed._replace(size_X=jnp.pad(routed.size_X, (0, -routed.size_X.size % SIZES)))


def with_shared(routed: Routed, shared: int) -> Routed:
    """The same behind the rows of S shared experts; a place that was nobody's, A, stays one, as A grows alike."""
    T = routed.place_TJ.shape[0]
    token_T, before = jnp.arange(T, dtype=jnp.int32), shared * T
    own_TS = token_T[:, None] + T * jnp.arange(shared, dtype=jnp.int32)
    return Routed(
        jnp.concatenate((jnp.tile(token_T, shared), routed.row_A)),
        jnp.pad(routed.weight_A, (before, 0), constant_values=1),
        jnp.concatenate((own_TS, routed.place_TJ + before), axis=1),
        jnp.pad(routed.size_X, (shared, 0), constant_values=T),
    )


def choose(logits_TX: jax.Array, bias_X: jax.Array | None, rule: RouteRule) -> tuple[jax.Array, jax.Array]:
    """Experts, int32, the best choice first, and their weights, fp32: [T, J] each."""
    score_TX = jax.nn.softmax(logits_TX, axis=1) if rule.scoring == "softmax" else jax.nn.sigmoid(logits_TX)
    choice_TX = logits_TX if rule.by_logit(bias_X is not None) else score_TX
    choice_TX = choice_TX if bias_X is None else choice_TX + bias_X
    if rule.grouped:
        choice_TX = _best_groups(choice_TX, rule)
    expert_TJ = lax.top_k(choice_TX, rule.top_k)[1]
    weight_TJ = jnp.take_along_axis(score_TX, expert_TJ, axis=1, mode="clip")
    if rule.renormalise:
        weight_TJ /= weight_TJ.sum(axis=1, keepdims=True) + 1e-20
    return expert_TJ, weight_TJ * rule.scale


def _best_groups(choice_TX: jax.Array, rule: RouteRule) -> jax.Array:
    """Choices of the groups that are left out become minus infinity. G groups of W experts, K of them kept."""
    T, X = choice_TX.shape
    choice_TGW = choice_TX.reshape(T, rule.num_groups, X // rule.num_groups)
    best_TG = lax.top_k(choice_TGW, GROUP_SCORES[rule.group_score])[0].sum(axis=2)
    kept_TK = lax.top_k(best_TG, rule.kept_groups)[1]
    kept_TG = (kept_TK[:, None] == jnp.arange(rule.num_groups)[:, None]).any(axis=2)
    return jnp.where(kept_TG[..., None], choice_TGW, -jnp.inf).reshape(T, X)
