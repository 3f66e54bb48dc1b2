"""Where the packed rows of one step stand in the paged cache: made once a step, used by every attention layer.

Keys and values are written first and only the new array is read: XLA then updates the cache in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.dense_gemm.contract import dense_gemm
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode.contract import gqa_decode
from pallas_kernels.gqa_prefill.contract import gqa_prefill
from pallas_kernels.grouped_gemm.contract import down, gate_up
from pallas_kernels.kv_write.contract import QkNorm, kv_write
from pallas_kernels.latent_write.contract import latent_write
from pallas_kernels.mla_decode.contract import mla_decode
from pallas_kernels.mla_prefill.contract import mla_prefill
from pallas_kernels.moe_route.contract import RouteRule, combine, moe_route
from pallas_kernels.rotary import Rotary

Cache = tuple[jax.Array, ...]  # of one layer: keys and values, or the latents
CosSin = tuple[jax.Array, jax.Array]  # of each packed row's position


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt chunks among the packed rows (R of them): each row r's block table, packed range and first position."""

    table_RM: jax.Array  # int32
    start_R: jax.Array  # int32, packed index of the chunk's first token
    tokens_R: jax.Array  # int32, 0: unused
    position_R: jax.Array  # int32, absolute position of the first token


@dataclass(frozen=True, slots=True)
class Groups:
    """The chunks' tokens as rows of a decode kernel: G groups of up to S neighbours, the last of each chunk full.

    A token's result stands at [group_T, place_T]. Places before a chunk's first token hold what nobody reads.
    """

    table_GM: jax.Array  # int32
    length_G: jax.Array  # int32, tokens in the cache up to the group's last one; 0: unused
    token_GS: jax.Array  # int32, packed index of each query
    group_T: jax.Array  # int32
    place_T: jax.Array  # int32
    is_chunk_T: jax.Array  # bool: False for decode rows and padding


def group_chunks(chunks: Chunks, tokens: int, group_tokens: int) -> Groups:
    """Cut chunks among `tokens` packed rows into groups of `group_tokens`, from their ends, so that all end full."""
    count_R = -(-chunks.tokens_R // group_tokens)
    end_R = jnp.cumsum(count_R, dtype=jnp.int32)
    most = tokens // group_tokens + len(count_R)  # groups that the chunks can fill together
    group_G = jnp.arange(most, dtype=jnp.int32)
    chunk_G = jnp.minimum(jnp.searchsorted(end_R, group_G, side="right"), len(count_R) - 1)
    stop_G = chunks.tokens_R[chunk_G] - group_tokens * (end_R[chunk_G] - 1 - group_G)
    first_G = chunks.start_R[chunk_G] + stop_G - group_tokens
    token_T = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    inside_TR = (token_T >= chunks.start_R) & (token_T < chunks.start_R + chunks.tokens_R)
    chunk_T = jnp.argmax(inside_TR, axis=1)
    behind_T = (chunks.start_R + chunks.tokens_R)[chunk_T] - 1 - token_T[:, 0]  # tokens of the chunk after this one
    return Groups(
        chunks.table_RM[chunk_G],
        jnp.where(group_G < end_R[-1], chunks.position_R[chunk_G] + stop_G, 0),
        jnp.clip(first_G[:, None] + jnp.arange(group_tokens, dtype=jnp.int32), 0, tokens - 1),
        end_R[chunk_T] - 1 - behind_T // group_tokens,
        group_tokens - 1 - behind_T % group_tokens,
        inside_TR.any(axis=1),
    )


@dataclass(frozen=True, slots=True)
class Paged:
    """One step's view of the cache. Decode rows are the first B packed rows whose length is not 0."""

    device: Device
    implementation: str  # a registry name, or "auto"
    live_T: jax.Array  # bool: False for padding
    page_T: jax.Array  # int32: the page that each packed token is written to; the pool's size for padding
    offset_T: jax.Array  # int32: its row in that page
    table_BM: jax.Array  # int32: block tables of the rows that may decode
    length_B: jax.Array  # int32: their tokens in the cache, the new one included; 0 for the others
    chunks: Chunks | None = None  # None: a pure decode step
    groups: Groups | None = None  # the chunks once more, in steps of few tokens
    invariant: bool = False  # a decode row's result is the same to the bit whatever the others are

    def multiply(self, x_TK: jax.Array, w_NK: jax.Array) -> jax.Array:
        """float32 [T, N]: x w^T, of a decode step's few rows by a kernel where there is a faster one."""
        options = {"out_dtype": jnp.dtype(jnp.float32), "device": self.device}
        if self.chunks is not None:  # the rows of a mixed step are XLA's, however few
            options["implementation"] = "xla"
        return dense_gemm(x_TK, w_NK, self.length_B, **options)

    def mix_experts(
        self,
        x_TD: jax.Array,
        logits_TX: jax.Array,
        bias_X: jax.Array | None,
        gate_up_X2FD: jax.Array,
        down_XDF: jax.Array,
        *,
        rule: RouteRule,
        first: jax.Array | int,
        count: int,
        shared: int,
    ) -> jax.Array:
        """float32 [T, D]: sum of weight_j * expert_j(x) over the chosen ones of this device's experts, in sorted rows
        through grouped products. `first`, `count` and `shared`: see `moe_route`."""
        own = {"first": first, "count": count, "shared": shared, "device": self.device}
        routed = moe_route(logits_TX, bias_X, self.live_T, rule, **own)
        h_AF = gate_up(x_TD, routed.row_A, gate_up_X2FD, routed.size_X, device=self.device)
        y_AD = down(h_AF, down_XDF, routed.size_X, routed.weight_A, device=self.device)
        return combine(y_AD, routed.place_TJ, dtype=jnp.float32)

    def write(
        self,
        cache: Cache,
        qkv_TNSE: jax.Array,
        cos_sin: CosSin,
        *,
        rotary: Rotary,
        bias_NSE: jax.Array | None,
        norm: QkNorm | None,
    ) -> tuple[jax.Array, Cache]:
        """Finish projected rows and put their keys and values into their pages; rows of padding are dropped.

        Returns the queries, [T, N, G, E], and the cache.
        """
        places = (*cos_sin, self.page_T, self.offset_T)
        options = {"rotary": rotary, "bias_NSE": bias_NSE, "norm": norm, "device": self.device}
        q_TNGE, *written = kv_write(*cache, qkv_TNSE, *places, **options)
        return q_TNGE, tuple(written)

    def attend(self, query_TNGE: jax.Array, cache: Cache, scale: float) -> jax.Array:
        """Causal attention of every packed row over its sequence's pages: [T, N, G, E]."""
        options = {"scale": scale, "device": self.device, "implementation": self.implementation}
        rows = self.length_B.shape[0]
        places = (self.table_BM, self.length_B)
        decoded = gqa_decode(query_TNGE[:rows], *cache, *places, **options, invariant=self.invariant)
        if self.chunks is None:
            return decoded
        chunks = self.chunks
        out = gqa_prefill(
            query_TNGE, *cache, chunks.table_RM, chunks.start_R, chunks.tokens_R, chunks.position_R, **options
        )
        is_decode = (self.length_B > 0)[:, None, None, None]
        return out.at[:rows].set(jnp.where(is_decode, decoded, out[:rows]))

    def write_latent(
        self,
        cache: Cache,
        down_TW: jax.Array,
        scale_R: jax.Array,
        query_THE: jax.Array,
        cos_sin: CosSin,
        *,
        rotary: Rotary,
        eps: float,
    ) -> tuple[jax.Array, Cache]:
        """Finish projected latents and put them into their pages; rows of padding are dropped.

        Returns the part of the queries that turns, turned, [T, H, rotary dims], and the cache.
        """
        places = (*cos_sin, self.page_T, self.offset_T)
        options = {"rotary": rotary, "eps": eps, "device": self.device}
        turned_THE, written = latent_write(*cache, down_TW, scale_R, query_THE, *places, **options)
        return turned_THE, (written,)

    def decode_latent(self, query_BHL: jax.Array, cache: Cache, rank: int, scale: float) -> jax.Array:
        """Attention of the decode rows over the latents, whose first `rank` dimensions are the values: [B, H, rank]."""
        options = {"rank": rank, "scale": scale, "device": self.device, "implementation": self.implementation}
        return mla_decode(query_BHL, *cache, self.table_BM, self.length_B, **options, invariant=self.invariant)

    def extend_latent(self, query_THL: jax.Array, cache: Cache, rank: int, scale: float) -> jax.Array:
        """Attention of the chunks' rows over the latents, in groups of neighbours: [T, H, rank], zeros for others."""
        assert self.groups is not None
        groups = self.groups
        options = {"rank": rank, "scale": scale, "device": self.device, "implementation": self.implementation}
        places, query_GSHL = (groups.table_GM, groups.length_G), query_THL[groups.token_GS]
        mixed_GSHR = mla_decode(query_GSHL, *cache, *places, **options, invariant=self.invariant)
        return jnp.where(groups.is_chunk_T[:, None, None], mixed_GSHR[groups.group_T, groups.place_T], 0)

    def prefill_latent(
        self, query_THE: jax.Array, cache: Cache, key_up_HNR: jax.Array, value_up_HVR: jax.Array, scale: float
    ) -> jax.Array:
        """Causal attention of the chunks' rows, latents expanded to each head's keys and values: [T, H, V]."""
        assert self.chunks is not None
        chunks, ups = self.chunks, (key_up_HNR, value_up_HVR)
        places = (chunks.table_RM, chunks.start_R, chunks.tokens_R, chunks.position_R)
        options = {"scale": scale, "device": self.device, "implementation": self.implementation}
        return mla_prefill(query_THE, *cache, *ups, *places, **options)
