"""Grouped-query attention (arXiv 2305.13245) over the paged cache; MHA is one query head a group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import add_up, contract, parameter, project
from jaxserve.layers.norm import RmsNorm
from jaxserve.layers.paged import Cache, Paged
from jaxserve.layers.rope import RopeSpec
from jaxserve.mesh import Placement
from pallas_kernels.kv_write.contract import QkNorm


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Shapes and switches of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None  # None: no norm of each head's query and key before they rotate

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.head_dim**-0.5

    @property
    def cut_heads(self) -> int:
        """The heads that a mesh may share out."""
        return self.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads a key/value head."""
        return self.num_heads // self.num_kv_heads

    def cache_shapes(self, num_pages: int, page_size_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the layer's key and value caches, [P, N, K, E] each."""
        shape = (num_pages, self.num_kv_heads, page_size_tokens, self.head_dim)
        return shape, shape

    def cache_axes(self) -> tuple[str | None, ...]:
        """Logical axes of both caches."""
        return ("lanes", "kv_heads", None, None)

    def repeated(self, times: int) -> GqaSpec:
        """The same attention with each kv head there `times` times, its query heads shared out among the copies."""
        return replace(self, num_kv_heads=self.num_kv_heads * times)


class GqaAttention(nnx.Module):
    """out(attention(rope(q), rope(k), v)); per kv head the fused weight holds its G query heads, then k, then v.

    The kv head is the leading axis of the fused weight, so that a tensor-parallel shard owns whole groups.
    """

    def __init__(self, hidden: int, spec: GqaSpec, dtype: jnp.dtype, placement: Placement) -> None:
        self.spec = spec
        self.axes = placement.axes("kv_heads", spec.num_kv_heads)
        heads, group, dim = spec.num_kv_heads, spec.group, spec.head_dim
        self.qkv = parameter((heads, group + 2, dim, hidden), ("kv_heads", None, None, "embed"), dtype)
        self.out = parameter((hidden, heads, group, dim), ("embed", "kv_heads", None, None), dtype)
        bias_shape, bias_axes = (heads, group + 2, dim), ("kv_heads", None, None)
        # Assigned once each: NNX takes an attribute that was None for static, and refuses the parameter.
        self.qkv_bias = parameter(bias_shape, bias_axes, dtype) if spec.qkv_bias else None
        self.out_bias = parameter((hidden,), ("embed",), dtype) if spec.out_bias else None
        self.q_norm = RmsNorm(dim, spec.qk_norm_eps, dtype) if spec.qk_norm_eps is not None else None
        self.k_norm = RmsNorm(dim, spec.qk_norm_eps, dtype) if spec.qk_norm_eps is not None else None

    def __call__(
        self, x_TD: jax.Array, cos_sin: tuple[jax.Array, jax.Array], cache: Cache, paged: Paged
    ) -> tuple[jax.Array, Cache]:
        """x [T, D] -> (float32 [T, D], the layer's cache with this step's keys and values)."""
        spec = self.spec
        qkv = project(x_TD, self.qkv[...])
        bias = None if self.qkv_bias is None else self.qkv_bias[...]
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = QkNorm(self.q_norm.scale[...], self.k_norm.scale[...], self.q_norm.eps)
        query, cache = paged.write(cache, qkv, cos_sin, rotary=spec.rope.rotary, bias_NSE=bias, norm=norm)
        mixed = paged.attend(query, cache, spec.scale)
        out = add_up(contract(mixed, self.out[...], 3, jnp.float32), self.axes, x_TD.dtype)
        return out if self.out_bias is None else out + self.out_bias[...], cache


def repeat_kv_heads(name: str, array: jax.Array, times: int) -> jax.Array:
    """A parameter of GqaAttention (by the end of its name) made for `times` as many kv heads; the function it computes
    stays the same. Other parameters come back as they are."""
    if name.endswith(("attention.qkv", "attention.qkv_bias")):
        heads, slots, *rest = array.shape
        q = array[:, :-2].reshape(heads * times, (slots - 2) // times, *rest)
        return jnp.concatenate((q, jnp.repeat(array[:, -2:], times, axis=0)), axis=1)
    if name.endswith("attention.out"):
        hidden, heads, group, dim = array.shape
        return array.reshape(hidden, heads * times, group // times, dim)
    return array
