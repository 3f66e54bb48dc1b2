"""moe_route on Hopper: one launch for up to 256 tokens, two for more."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.device import Device
from pallas_kernels.moe_route import kernel
from pallas_kernels.moe_route.contract import MoeRouteShapes, Routed, RouteRule

_LANES = 32
_MOST_EXPERTS = 512
_MOST_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Tuning:
    """What may be tuned for a device."""

    tokens_each: int = 4  # that a CTA of the one launch routes, as long as a cluster has CTAs
    one_launch: int = kernel.WORD * kernel.MOST_CTAS  # tokens, at most
    most_ctas: int = 132  # of the two launches


def why_not(shapes: MoeRouteShapes, device: Device) -> str | None:
    """None, or what the kernel lacks for these sizes."""
    if not device.is_sm90:
        return f"it needs an NVIDIA GPU of compute capability 9.0, this is {device}."
    if shapes.experts % _LANES or shapes.experts > _MOST_EXPERTS:
        return f"there are {shapes.experts} experts, must be a multiple of {_LANES} and {_MOST_EXPERTS} at most."
    if shapes.rule.top_k > _LANES:
        return f"top_k is {shapes.rule.top_k}, must be {_LANES} at most."
    if shapes.shared > _LANES:
        return f"there are {shapes.shared} shared experts, must be {_LANES} at most."
    if shapes.rule.grouped and _LANES % shapes.rule.num_groups:
        return f"there are {shapes.rule.num_groups} groups, must be a power of 2 and {_LANES} at most."
    if shapes.rule.scoring == "softmax" and not shapes.rule.by_logit(shapes.bias):
        return "softmax scores with a bias, or summed in groups, are not chosen bit for bit as elsewhere."
    if shapes.tokens > _MOST_TOKENS:
        return f"there are {shapes.tokens} tokens, must be {_MOST_TOKENS} at most."
    return None


# Under jit of its own, the kernel of all layers is traced, lowered and compiled once, not once a layer.
@functools.partial(jax.jit, static_argnames=("rule", "count", "shared", "tuning"))
def run(
    logits_TX: jax.Array,
    live_T: jax.Array,
    *,
    first: jax.Array | int,
    bias_X: jax.Array | None,
    rule: RouteRule,
    count: int,
    shared: int = 0,
    tuning: Tuning | None = None,
) -> Routed:
    """See the contract."""
    sizes = sizes_for(logits_TX.shape, count, rule, bias_X is not None, tuning or Tuning(), shared)
    inputs = (logits_TX, live_T.astype(jnp.int32), jnp.asarray(first, jnp.int32).reshape(1), bias_X)
    one = sizes.tokens <= (tuning or Tuning()).one_launch
    return Routed(*(kernel.route_sorted if one else kernel.route_then_sort)(*inputs, sizes=sizes))


def sizes_for(
    shape: tuple[int, ...], count: int, rule: RouteRule, bias: bool, tuning: Tuning, shared: int = 0
) -> kernel.Sizes:
    """How a launch is cut into CTAs."""
    tokens, experts = shape
    facts = (tokens, experts, count, rule, bias, shared)
    if tokens <= tuning.one_launch:
        ctas = min(kernel.MOST_CTAS, -(-tokens // tuning.tokens_each))
        while -(-tokens // ctas) * (ctas - 1) >= tokens:  # no CTA without a token
            ctas -= 1
        return kernel.Sizes(*facts, ctas)
    words = -(-tokens // (kernel.WORD * tuning.most_ctas))
    return kernel.Sizes(*facts, -(-tokens // (kernel.WORD * words)), words)
