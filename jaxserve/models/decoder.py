"""The one decoder, driven by a ModelSpec: packed tokens and the paged cache in, hidden states and the cache out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxserve.layers.gqa import GqaAttention
from jaxserve.layers.linear import contract, parameter
from jaxserve.layers.mlp import GatedMlp
from jaxserve.layers.norm import RmsNorm
from jaxserve.layers.paged import Cache, Paged
from jaxserve.layers.rope import angles
from jaxserve.mesh import RULES
from jaxserve.models.spec import ModelSpec


class Matrix(nnx.Module):
    """A lone matrix: the embedding, or an untied head."""

    def __init__(self, rows: int, columns: int, dtype: jnp.dtype) -> None:
        self.weight = parameter((rows, columns), ("vocab", "embed"), dtype)


class Layer(nnx.Module):
    """x += attention(norm x); x += mlp(norm x)."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, shards: int) -> None:
        self.attention_norm = RmsNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.attention = GqaAttention(spec.hidden_size, spec.attention, dtype)
        self.mlp_norm = RmsNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.mlp = GatedMlp(spec.hidden_size, spec.mlp_width, dtype, shards)

    def __call__(
        self, x_TD: jax.Array, cos_sin: tuple[jax.Array, jax.Array], cache: Cache, paged: Paged
    ) -> tuple[jax.Array, Cache]:
        mixed, cache = self.attention(self.attention_norm(x_TD), cos_sin, cache, paged)
        x_TD = x_TD + mixed
        return x_TD + self.mlp(self.mlp_norm(x_TD)), cache


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. Layers are unrolled: a scan would copy each layer's weights first."""

    def __init__(self, spec: ModelSpec, dtype: jnp.dtype, shards: int = 1) -> None:
        self.spec = spec
        self.embed = Matrix(spec.vocab_size, spec.hidden_size, dtype)
        self.layers = nnx.List([Layer(spec, dtype, shards) for _ in range(spec.num_layers)])
        self.norm = RmsNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.head = None if spec.tie_embeddings else Matrix(spec.vocab_size, spec.hidden_size, dtype)

    def __call__(
        self, token_T: jax.Array, position_T: jax.Array, caches: Sequence[Cache], paged: Paged
    ) -> tuple[jax.Array, list[Cache]]:
        """Tokens int32 [T] at positions int32 [T] -> (normed hidden states [T, D], caches in the order received)."""
        x_TD = self.embed.weight[...].at[token_T].get(mode="clip")
        cos_sin = angles(self.spec.attention.rope, position_T)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TD, cache = layer(x_TD, cos_sin, cache, paged)
            new_caches.append(cache)
        return self.norm(x_TD), new_caches

    def logits(self, hidden_QD: jax.Array) -> jax.Array:
        """Hidden states [Q, D] -> logits, float32 [Q, V]."""
        weight = (self.embed if self.head is None else self.head).weight[...]
        return contract(hidden_QD, weight, 1, jnp.float32)


@dataclass(frozen=True, slots=True)
class SplitDecoder:
    """The decoder taken apart once: the jitted step gets the leaves as one flat list and merges inside."""

    graph: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef
    names: tuple[str, ...]  # dotted, in leaf order
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # with shardings where a mesh was given

    def merge(self, leaves: Sequence[jax.Array]) -> Decoder:
        """Put weights (or tracers) in leaf order back into a module."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


def split_decoder(spec: ModelSpec, dtype: jnp.dtype, mesh: Mesh | None = None) -> SplitDecoder:
    """The abstract decoder: nothing is allocated."""
    with nnx.use_eager_sharding(False), nnx.logical_axis_rules(RULES):
        shards = mesh.shape["tensor"] if mesh is not None else 1
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(spec, dtype, shards)))
        names = tuple(".".join(map(str, path)) for path, _ in nnx.to_flat_state(state))
        leaves, tree = jax.tree.flatten(state)
        if mesh is not None:
            shardings = jax.tree.leaves(nnx.get_named_sharding(state, mesh))
            leaves = [
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
                for leaf, place in zip(leaves, shardings, strict=True)
            ]
    return SplitDecoder(graph, tree, names, tuple(leaves))


def parameter_shapes(spec: ModelSpec, dtype: jnp.dtype = jnp.bfloat16) -> dict[str, jax.ShapeDtypeStruct]:
    """Dotted parameter names in leaf order -> shapes and dtypes; what a checkpoint must fill, no more and no less."""
    split = split_decoder(spec, jnp.dtype(dtype))
    return dict(zip(split.names, split.leaves, strict=True))
