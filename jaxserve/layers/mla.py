"""Multi-head latent attention (arXiv 2405.04434): keys and values come from one small latent, which is what is cached.

Per token and layer the cache holds the latent after its norm, then the rotated key part that all heads share. Rows that
decode take the absorbed form: the up-projections are applied to query and output, and attention runs over the latents
themselves. Chunks of prompts take the expanded form: latents become keys and values of each head. Both are the same
function; which is cheaper depends on how many queries share a key: a step of few tokens, as the rest of a prompt whose
beginning is cached, takes the absorbed form for its chunks too.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.layers.linear import add_up, contract, parameter, project
from jaxserve.layers.norm import RmsNorm
from jaxserve.layers.paged import Cache, Paged
from jaxserve.layers.rope import RopeSpec
from jaxserve.layers.rows import Rows
from jaxserve.mesh import Placement


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Shapes and switches of one attention layer."""

    num_heads: int
    q_rank: int | None  # of the queries' low-rank projection; None: one full projection
    rank: int  # of the latent
    nope_dim: int  # of a head's query and key, the part without position
    value_dim: int
    rope: RopeSpec  # its rotary_dims are the rest of a head's query, and the shared key
    scale: float  # of the scores, YaRN's factor included
    norm_eps: float  # of the norms of latent and low-rank query

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.nope_dim + self.rope.rotary_dims

    @property
    def cached_dim(self) -> int:
        """Elements that a token takes in the cache of a layer."""
        return self.rank + self.rope.rotary_dims

    @property
    def cut_heads(self) -> int:
        """The heads that a mesh may share out."""
        return self.num_heads

    def cache_shapes(self, num_pages: int, page_size_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Shape of the layer's one cache, [P, K, L]."""
        return ((num_pages, page_size_tokens, self.cached_dim),)

    def cache_axes(self) -> tuple[str | None, ...]:
        """Logical axes of the cache: every device that has some of the heads has all of it."""
        return ("lanes", None, None)


class MlaAttention(nnx.Module):
    """out(attention(q(x), latent(x))). `down` makes the low-rank query (where there is one), the latent and the shared
    key in one product."""

    def __init__(self, hidden: int, spec: MlaSpec, dtype: jnp.dtype, placement: Placement) -> None:
        self.spec = spec
        heads, axes = spec.num_heads, ("heads", None, "embed")
        self.axes = placement.axes("heads", heads)
        self.down = parameter(((spec.q_rank or 0) + spec.cached_dim, hidden), (None, "embed"), dtype)
        self.q_norm = RmsNorm(spec.q_rank, spec.norm_eps, dtype) if spec.q_rank else None
        self.q = parameter((heads, spec.head_dim, spec.q_rank or hidden), axes, dtype)
        self.latent_norm = RmsNorm(spec.rank, spec.norm_eps, dtype)
        self.key_up = parameter((heads, spec.nope_dim, spec.rank), axes, dtype)
        self.value_up = parameter((heads, spec.value_dim, spec.rank), axes, dtype)
        self.out = parameter((hidden, heads, spec.value_dim), ("embed", "heads", None), dtype)

    def __call__(
        self, x_TD: jax.Array, cos_sin: tuple[jax.Array, jax.Array], cache: Cache, paged: Paged | Rows
    ) -> tuple[jax.Array, Cache]:
        """x [T, D] -> (float32 [T, D], the layer's cache with this step's latents)."""
        spec = self.spec
        down_TW = project(x_TD, self.down[...])
        q_THE = project(x_TD if self.q_norm is None else self.q_norm(down_TW[:, : spec.q_rank]), self.q[...])
        scale, rope = self.latent_norm.scale[...], {"rotary": spec.rope.rotary, "eps": spec.norm_eps}
        turned, cache = paged.write_latent(cache, down_TW, scale, q_THE, cos_sin, **rope)
        mixed_THV = self.attend(q_THE[:, :, : spec.nope_dim], turned, cache, paged)
        part_TD = contract(mixed_THV, self.out[...], 2, jnp.float32)
        return add_up(part_TD, self.axes, x_TD.dtype), cache

    def attend(self, plain_THE: jax.Array, turned_THE: jax.Array, cache: Cache, paged: Paged | Rows) -> jax.Array:
        """Causal attention of every packed row over its sequence: [T, H, V]."""
        if isinstance(paged, Rows):
            return self.expanded(plain_THE, turned_THE, cache, paged)
        rows = paged.length_B.shape[0]
        if paged.chunks is None or paged.groups is not None:
            return self.absorbed(plain_THE, turned_THE, cache, paged)
        decoded = self.absorbed(plain_THE[:rows], turned_THE[:rows], cache, paged)
        return with_decoded(self.expanded(plain_THE, turned_THE, cache, paged), decoded, paged)

    def expanded(self, plain_THE: jax.Array, turned_THE: jax.Array, cache: Cache, paged: Paged | Rows) -> jax.Array:
        """Attention with each head's keys and values made from the latents: [T, H, V]."""
        q_THE = jnp.concatenate((plain_THE, turned_THE), axis=2)
        return paged.prefill_latent(q_THE, cache, self.key_up[...], self.value_up[...], self.spec.scale)

    def absorbed(self, plain_THE: jax.Array, turned_THE: jax.Array, cache: Cache, paged: Paged) -> jax.Array:
        """Attention over the latents themselves of the decode rows, and of more rows where chunks are in groups."""
        q_THR = per_head(plain_THE, self.key_up[...], over=1)
        q_THL = jnp.concatenate((q_THR, turned_THE), axis=2)
        options = {"rank": self.spec.rank, "scale": self.spec.scale}
        rows = paged.length_B.shape[0]
        u_THR = paged.decode_latent(q_THL[:rows], cache, **options)
        if paged.groups is not None:
            u_THR = with_decoded(paged.extend_latent(q_THL, cache, **options), u_THR, paged)
        return per_head(u_THR, self.value_up[...], over=2)


def with_decoded(chunks_THX: jax.Array, decoded_BHX: jax.Array, paged: Paged) -> jax.Array:
    """The rows of chunks, and in front of them the decode rows."""
    rows = len(decoded_BHX)
    is_decode_B11 = (paged.length_B > 0)[:, None, None]
    return chunks_THX.at[:rows].set(jnp.where(is_decode_B11, decoded_BHX, chunks_THX[:rows]))


def per_head(x_BHE: jax.Array, weight: jax.Array, over: int) -> jax.Array:
    """Each head's rows times its own matrix, contracted over axis `over` of the weight [H, ...]: [B, H, other axis]."""
    precision = lax.Precision.HIGHEST if x_BHE.dtype == jnp.float32 else None
    dims = (((2,), (over,)), ((1,), (0,)))
    product = lax.dot_general(x_BHE, weight, dims, precision=precision, preferred_element_type=x_BHE.dtype)
    return product.transpose(1, 0, 2)
