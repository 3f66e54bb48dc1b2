"""Mixture of experts (arXiv 2401.06066): a float32 router, sorted rows through grouped products, shared experts.

Every device routes all rows alike and computes those of its own experts; what each makes is a part of one sum. No row
is ever dropped: the sorted order holds all T x J assignments. Where each device has all experts, shared ones are the
first of the grouped products: that costs the time of their weights and no launch. Where experts are cut over the
devices they stay a block of their own, which all devices cut alike, as no single one should have all its rows to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import add_up, contract, parameter
from jaxserve.layers.mlp import GatedMlp
from jaxserve.layers.paged import Paged
from jaxserve.layers.rows import Rows
from jaxserve.mesh import Placement, index
from pallas_kernels.moe_route.contract import RouteRule


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Sizes and rule of one mixture-of-experts layer."""

    num_experts: int
    width: int  # of each expert
    shared_width: int  # of all shared experts together; 0: there are none
    rule: RouteRule
    bias: bool  # a correction bias that only decides which experts are chosen
    grouped_shared: int = 0  # S: the first of the experts' arrays are shared ones, and there is no module for them

    def fitted(self, placement: Placement) -> MoeSpec:
        """As it runs on the mesh: shared experts among the others where these are whole and cut like them."""
        if self.shared_width % self.width or placement.axes("experts", self.num_experts):
            return self
        cut_alike = placement.axes("mlp", self.shared_width) == placement.axes("expert_mlp", self.width)
        return self.joined() if cut_alike else self

    def joined(self) -> MoeSpec:
        """The same layer with its shared experts among the others."""
        return replace(self, grouped_shared=self.shared_width // self.width)


class MoeMlp(nnx.Module):
    """shared(x) + sum of weight_j * expert_j(x) over the chosen experts."""

    def __init__(self, hidden: int, spec: MoeSpec, dtype: jnp.dtype, placement: Placement) -> None:
        self.spec = spec
        experts, width, shared = spec.num_experts, spec.width, spec.grouped_shared
        self.expert_axes = placement.axes("experts", experts)
        self.axes = self.expert_axes + placement.axes("expert_mlp", width)
        self.local_experts = experts // placement.size(self.expert_axes)
        # In float32 whatever the model's dtype: close scores would tie in bfloat16 and choose other experts.
        self.router = parameter((experts, hidden), (None, "embed"), jnp.dtype(jnp.float32))
        self.router_bias = parameter((experts,), (None,), jnp.dtype(jnp.float32)) if spec.bias else None
        gate_axes = ("experts", None, "expert_mlp", "embed")
        self.experts_gate_up = parameter((shared + experts, 2, width, hidden), gate_axes, dtype)
        self.experts_down = parameter((shared + experts, hidden, width), ("experts", "embed", "expert_mlp"), dtype)
        has_module = spec.shared_width > 0 and not shared
        self.shared = GatedMlp(hidden, spec.shared_width, dtype, placement) if has_module else None

    def __call__(self, x_TD: jax.Array, paged: Paged | Rows) -> jax.Array:
        """[T, D] -> float32 [T, D]."""
        routed, dtype = self.routed(x_TD, paged), x_TD.dtype
        if self.shared is None:
            return add_up(routed, self.axes, dtype)
        shared = self.shared.partial(x_TD, paged)
        if self.shared.axes == self.axes:
            return add_up(routed + shared, self.axes, dtype)
        return add_up(routed, self.axes, dtype) + add_up(shared, self.shared.axes, dtype)

    def routed(self, x_TD: jax.Array, paged: Paged | Rows) -> jax.Array:
        """This device's part of the sum of the experts in its arrays, float32. Rows of padding go to no routed expert,
        whose weights they would have read for nothing."""
        logits_TX = contract(x_TD.astype(jnp.float32), self.router[...], 1)
        bias_X = None if self.router_bias is None else self.router_bias[...]
        own = {"first": index(self.expert_axes) * self.local_experts, "count": self.local_experts}
        weights = (self.experts_gate_up[...], self.experts_down[...])
        shared = self.spec.grouped_shared
        return paged.mix_experts(x_TD, logits_TX, bias_X, *weights, rule=self.spec.rule, shared=shared, **own)
