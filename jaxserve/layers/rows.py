"""Where the tokens of a batch of whole rows stand: what layers are given in training, as `Paged` in serving.

A row holds documents side by side. There is no cache: a layer's latents live for one call. All ops here are plain JAX
and differentiable, and experts are exact: every one is computed for every token and weighted by 0 where it was not
chosen, so that none is dropped and all is one product. Dimension keys besides those of batch.py: I rows of the batch,
C tokens of a row (T = I C), J experts a token; the experts' X counts the shared ones too, which come first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.layers.linear import project
from pallas_kernels.latent_blocks import precision_for
from pallas_kernels.moe_route.contract import RouteRule
from pallas_kernels.moe_route.xla import choose
from pallas_kernels.rotary import Rotary, normed, rotate

Latents = tuple[jax.Array, ...]  # of one layer, [T, rank + rotary dims]; empty before it has run


@dataclass(frozen=True, slots=True)
class Rows:
    """One batch of rows. Tokens see those of their own document up to themselves."""

    document_IC: jax.Array  # int32: which document of its row a token belongs to

    @classmethod
    def of(cls, token_IC: jax.Array, bos_token_id: int) -> Rows:
        """Documents begin at their BOS; what stands before a row's first one is a document too."""
        return cls(jnp.cumsum(token_IC == bos_token_id, axis=1, dtype=jnp.int32))

    def position_T(self) -> jax.Array:
        """int32: each token's place in its document, from 0, as serving counts."""
        index_C = jnp.arange(self.document_IC.shape[1], dtype=jnp.int32)
        fresh_IC = jnp.diff(self.document_IC, axis=1, prepend=-1) != 0
        return (index_C - lax.cummax(jnp.where(fresh_IC, index_C, 0), axis=1)).reshape(-1)

    def multiply(self, x_TK: jax.Array, w_NK: jax.Array) -> jax.Array:
        """float32 [T, N]: x w^T."""
        return summed("tk,nk->tn", x_TK, w_NK)

    def write_latent(
        self,
        latents: Latents,
        down_TW: jax.Array,
        scale_R: jax.Array,
        query_THE: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        *,
        rotary: Rotary,
        eps: float,
    ) -> tuple[jax.Array, Latents]:
        """Finish projected latents: turned queries and the latents (see `latent_write`)."""
        rank = scale_R.shape[0]
        latent, key = jnp.split(down_TW[:, down_TW.shape[1] - rank - rotary.dims :], [rank], axis=1)
        row_TL = jnp.concatenate((normed(latent, scale_R, eps), rotate(rotary, key, *cos_sin)), axis=1)
        return rotate(rotary, query_THE[:, :, query_THE.shape[2] - rotary.dims :], *cos_sin), (row_TL,)

    def prefill_latent(
        self, query_THE: jax.Array, latents: Latents, key_up_HNR: jax.Array, value_up_HVR: jax.Array, scale: float
    ) -> jax.Array:
        """Causal attention within documents, latents expanded to each head's keys and values: [T, H, V]."""
        (row_TL,) = latents
        latent_TR, shared_TE = jnp.split(row_TL, [key_up_HNR.shape[2]], axis=1)
        shared_THE = jnp.broadcast_to(shared_TE[:, None], (*query_THE.shape[:2], shared_TE.shape[1]))
        key_THE = jnp.concatenate((project(latent_TR, key_up_HNR), shared_THE), axis=2)
        shape = (*self.document_IC.shape, query_THE.shape[1], -1)
        q, k, v = (x.reshape(shape) for x in (query_THE, key_THE, project(latent_TR, value_up_HVR)))
        score_IHCC = scale * summed("iqhe,ikhe->ihqk", q, k)
        weight_IHCC = jax.nn.softmax(jnp.where(self.visible(), score_IHCC, -jnp.inf), axis=-1).astype(v.dtype)
        mixed_ICHV = jnp.einsum("ihqk,ikhv->iqhv", weight_IHCC, v, precision=precision_for(v.dtype))
        return mixed_ICHV.reshape(*query_THE.shape[:2], -1)

    def visible(self) -> jax.Array:
        """bool [I, 1, C, C]: whether a query (third axis) sees a key (fourth)."""
        index_C = jnp.arange(self.document_IC.shape[1])
        same = self.document_IC[:, :, None] == self.document_IC[:, None, :]
        return (same & (index_C[:, None] >= index_C))[:, None]

    def mix_experts(
        self,
        x_TD: jax.Array,
        logits_TX: jax.Array,
        bias_X: jax.Array | None,
        gate_up_X2FD: jax.Array,
        down_XDF: jax.Array,
        *,
        rule: RouteRule,
        first: int,
        count: int,
        shared: int,
    ) -> jax.Array:
        """float32 [T, D]: sum of weight_j * expert_j(x) over the chosen experts and the shared ones.

        The gradient of the bias is the experts' load in tokens: see `count_load`.
        """
        assert (first, count) == (0, logits_TX.shape[1]), "training has all experts on one device"
        expert_TJ, weight_TJ = choose(logits_TX, bias_X, rule)
        chosen_TJX = expert_TJ[:, :, None] == jnp.arange(count)
        weight_TX = jnp.where(chosen_TJX, weight_TJ[:, :, None], 0).sum(axis=1)
        if bias_X is not None:
            weight_TX = count_load(weight_TX, bias_X, chosen_TJX.sum(axis=(0, 1), dtype=jnp.float32))
        weight_TX = jnp.pad(weight_TX, ((0, 0), (shared, 0)), constant_values=1)
        both = project(x_TD, gate_up_X2FD).astype(jnp.float32)
        h_TXF = (jax.nn.silu(both[:, :, 0]) * both[:, :, 1] * weight_TX[:, :, None]).astype(x_TD.dtype)
        return summed("txf,xdf->td", h_TXF, down_XDF)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The einsum in float32 of arrays of one dtype. Its gradient is rounded to theirs before it is multiplied: left in
    float32 it would raise both factors to float32, with half the rate and twice the bytes."""
    return jnp.einsum(equation, a, b, precision=precision_for(a.dtype), preferred_element_type=jnp.float32)


def _summed_forward(equation: str, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return summed(equation, a, b), (a, b)


def _summed_backward(
    equation: str, factors: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b = factors
    _, pull = jax.vjp(lambda a, b: jnp.einsum(equation, a, b, precision=precision_for(a.dtype)), a, b)
    return pull(gradient.astype(a.dtype))


summed.defvjp(_summed_forward, _summed_backward)


@jax.custom_vjp
def count_load(weight_TX: jax.Array, bias_X: jax.Array, load_X: jax.Array) -> jax.Array:
    """The weights as they are; backwards the bias is given `load_X`, the tokens that chose each expert.

    The bias only decides which experts are chosen, so its true gradient is 0. DeepSeek-V3 (arXiv 2412.19437, 2.1.2)
    moves it by the load instead; in the gradient's place the load of every layer reaches the optimizer, added up over
    the parts of a batch, and no module needs a second output.
    """
    return weight_TX


def _load_forward(weight_TX: jax.Array, bias_X: jax.Array, load_X: jax.Array) -> tuple[jax.Array, jax.Array]:
    return weight_TX, load_X


def _load_backward(load_X: jax.Array, gradient_TX: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return gradient_TX, load_X, jnp.zeros_like(load_X)


count_load.defvjp(_load_forward, _load_backward)
