"""The one decoder, driven by a ModelSpec: packed tokens and the paged cache in, hidden states and the cache out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxserve.errors import ConfigError
from jaxserve.layers.gqa import GqaAttention, GqaSpec, repeat_kv_heads
from jaxserve.layers.linear import contract, parameter
from jaxserve.layers.mla import MlaAttention, MlaSpec
from jaxserve.layers.mlp import GatedMlp
from jaxserve.layers.moe import MoeMlp
from jaxserve.layers.norm import RmsNorm
from jaxserve.layers.paged import Cache, Paged
from jaxserve.layers.rope import angles
from jaxserve.layers.rows import Rows
from jaxserve.mesh import Placement, index, total
from jaxserve.models.spec import ModelSpec

Angles = tuple[jax.Array, jax.Array]


class Matrix(nnx.Module):
    """A lone matrix over the vocabulary, whose rows may be cut: the embedding, or an untied head."""

    def __init__(self, rows: int, columns: int, dtype: jnp.dtype, placement: Placement) -> None:
        self.axes = placement.axes("vocab", rows)
        self.weight = parameter((rows, columns), ("vocab", "embed"), dtype)

    def look_up(self, token_T: jax.Array) -> jax.Array:
        """Rows by id, [T, D]."""
        table = self.weight[...]
        if not self.axes:
            return table.at[token_T].get(mode="clip")
        local_T = token_T - index(self.axes) * table.shape[0]
        mine_T1 = ((local_T >= 0) & (local_T < table.shape[0]))[:, None]
        return total(jnp.where(mine_T1, table.at[local_T].get(mode="clip"), 0), self.axes)

    def score(self, hidden_QD: jax.Array) -> jax.Array:
        """float32 [Q, V]: the logits of this device's rows. Training keeps the matrix in float32 whatever the model's
        dtype is, since a lookup's gradient adds up thousands of tokens."""
        return contract(hidden_QD, self.weight[...].astype(hidden_QD.dtype), 1, jnp.float32)


def attention_module(
    hidden: int, spec: GqaSpec | MlaSpec, dtype: jnp.dtype, placement: Placement
) -> GqaAttention | MlaAttention:
    """The module that a spec describes."""
    if isinstance(spec, GqaSpec):
        return GqaAttention(hidden, spec, dtype, placement)
    return MlaAttention(hidden, spec, dtype, placement)


class Layer(nnx.Module):
    """x += attention(norm x); x += mlp(norm x); with post_norms each result passes a norm before it is added.

    x is float32 whatever the model's dtype, and so are the results: they are rounded as inputs of products only.
    """

    def __init__(self, spec: ModelSpec, is_moe: bool, dtype: jnp.dtype, placement: Placement) -> None:
        hidden = spec.hidden_size

        def norm() -> RmsNorm:
            return RmsNorm(hidden, spec.rms_eps, dtype)

        self.attention_norm = norm()
        self.attention = attention_module(hidden, spec.attention, dtype, placement)
        self.attention_post_norm = norm() if spec.post_norms else None
        self.mlp_norm = norm()
        if is_moe and spec.moe is not None:
            self.mlp = MoeMlp(hidden, spec.moe, dtype, placement)
        else:
            self.mlp = GatedMlp(hidden, spec.mlp_width, dtype, placement)
        self.mlp_post_norm = norm() if spec.post_norms else None

    def __call__(self, x_TD: jax.Array, cos_sin: Angles, cache: Cache, paged: Paged | Rows) -> tuple[jax.Array, Cache]:
        """x, float32 [T, D] -> the same, and the layer's cache."""
        mixed, cache = self.attention(self.attention_norm(x_TD), cos_sin, cache, paged)
        x_TD = x_TD + (mixed if self.attention_post_norm is None else self.attention_post_norm(mixed, jnp.float32))
        normed = self.mlp_norm(x_TD)
        fed = self.mlp(normed, paged)
        return x_TD + (fed if self.mlp_post_norm is None else self.mlp_post_norm(fed, jnp.float32)), cache


class Mtp(nnx.Module):
    """A multi-token prediction layer (arXiv 2412.19437, part 2.2): from a token's hidden state and the token after it,
    the hidden state that predicts the one after that. Embedding and head are the decoder's."""

    def __init__(self, spec: ModelSpec, is_moe: bool, dtype: jnp.dtype, placement: Placement) -> None:
        hidden = spec.hidden_size
        self.embed_norm = RmsNorm(hidden, spec.rms_eps, dtype)
        self.hidden_norm = RmsNorm(hidden, spec.rms_eps, dtype)
        self.project = parameter((hidden, 2 * hidden), ("embed", None), dtype)
        self.layer = Layer(spec, is_moe, dtype, placement)
        self.norm = RmsNorm(hidden, spec.rms_eps, dtype)

    def __call__(
        self, hidden_TD: jax.Array, next_TD: jax.Array, cos_sin: Angles, cache: Cache, paged: Paged | Rows
    ) -> tuple[jax.Array, Cache]:
        """hidden: the decoder's normed output at each token; next: the embedding of the token that follows."""
        both = jnp.concatenate((self.embed_norm(next_TD), self.hidden_norm(hidden_TD)), axis=1)
        x_TD, cache = self.layer(contract(both, self.project[...], 1, jnp.float32), cos_sin, cache, paged)
        return self.norm(x_TD), cache


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. Layers are unrolled: a scan would copy each layer's weights first.

    MTP layers are there when asked for: nothing uses them yet but a test, and they would take memory.
    """

    def __init__(
        self, spec: ModelSpec, dtype: jnp.dtype, placement: Placement | None = None, with_mtp: bool = False
    ) -> None:
        self.spec, self.placement = spec, placement or Placement()
        placement = self.placement
        self.embed = Matrix(spec.vocab_size, spec.hidden_size, dtype, placement)
        self.layers = nnx.List([Layer(spec, spec.is_moe(i), dtype, placement) for i in range(spec.num_layers)])
        self.norm = RmsNorm(spec.hidden_size, spec.rms_eps, dtype)
        self.head = None if spec.tie_embeddings else Matrix(spec.vocab_size, spec.hidden_size, dtype, placement)
        extra = range(spec.num_layers, spec.num_layers + (spec.mtp_layers if with_mtp else 0))
        self.mtp = nnx.List([Mtp(spec, spec.is_moe(i), dtype, placement) for i in extra])

    def __call__(
        self, token_T: jax.Array, position_T: jax.Array, caches: Sequence[Cache], paged: Paged | Rows
    ) -> tuple[jax.Array, list[Cache]]:
        """Tokens int32 [T] at positions int32 [T] -> (normed hidden states [T, D] in the model's dtype, caches in the
        order received). Between layers they are float32."""
        x_TD = self.embed.look_up(token_T).astype(jnp.float32)
        cos_sin = angles(self.spec.attention.rope, position_T)
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TD, cache = layer(x_TD, cos_sin, cache, paged)
            new_caches.append(cache)
        return self.norm(x_TD), new_caches

    def logits(self, hidden_QD: jax.Array) -> jax.Array:
        """Hidden states [Q, D] -> logits, float32 [Q, V]; of this device's part of the vocabulary where it is cut."""
        return (self.embed if self.head is None else self.head).score(hidden_QD)


@dataclass(frozen=True, slots=True)
class SplitDecoder:
    """The decoder taken apart once: the jitted step gets the leaves as one flat list and merges inside."""

    spec: ModelSpec  # as it runs on the mesh: see `fit_spec`
    placement: Placement
    graph: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef
    names: tuple[str, ...]  # dotted, in leaf order
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # with shardings where a mesh was given
    stored: tuple[jax.ShapeDtypeStruct, ...]  # what a loader is asked for: `leaves`, or without the repeated kv heads
    kv_repeat: int

    def merge(self, leaves: Sequence[jax.Array]) -> Decoder:
        """Put weights (or tracers) in leaf order back into a module."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))

    def finish(self, name: str, array: jax.Array, want: jax.ShapeDtypeStruct) -> jax.Array:
        """A parameter as the loader brought it -> as the step takes it."""
        if array.shape == want.shape:
            return array
        repeat = jax.jit(lambda x: repeat_kv_heads(name, x, self.kv_repeat), out_shardings=want.sharding)
        return repeat(array)


def split_decoder(spec: ModelSpec, dtype: jnp.dtype, mesh: Mesh | None = None, with_mtp: bool = False) -> SplitDecoder:
    """The abstract decoder: nothing is allocated. Raises ConfigError where the mesh does not fit the model."""
    placement = Placement() if mesh is None else Placement.of(mesh)
    times, fitted = kv_repeat(spec, placement), fit_spec(spec, placement)
    graph, tree, names, leaves = abstract(fitted, dtype, placement, mesh, with_mtp)
    stored = leaves
    if times > 1:
        whole = abstract(replace(fitted, attention=spec.attention), dtype, placement, mesh, with_mtp)[3]
        stored = tuple(old if old.shape != new.shape else new for old, new in zip(whole, leaves, strict=True))
    return SplitDecoder(fitted, placement, graph, tree, names, leaves, stored, times)


def kv_repeat(spec: ModelSpec, placement: Placement) -> int:
    """How often each kv head must be there so that every tensor-parallel device has one; 1: as it is."""
    tensor = placement.tensor
    if not isinstance(spec.attention, GqaSpec) or spec.attention.num_kv_heads % tensor == 0:
        return 1
    kv_heads, heads = spec.attention.num_kv_heads, spec.attention.num_heads
    return tensor // kv_heads if tensor % kv_heads == 0 and heads % tensor == 0 else 1


def fit_spec(spec: ModelSpec, placement: Placement) -> ModelSpec:
    """The model as it runs on the mesh: kv heads repeated where there are fewer than tensor-parallel devices, shared
    experts among the others where each device has all of them.

    Raises ConfigError where heads or experts cannot be shared out evenly.
    """
    times = kv_repeat(spec, placement)
    if times > 1 and isinstance(spec.attention, GqaSpec):
        spec = replace(spec, attention=spec.attention.repeated(times))
    tensor, expert, heads = placement.tensor, placement.expert, spec.attention.num_heads
    if spec.attention.cut_heads % tensor:
        kv_heads = spec.attention.cut_heads
        shared = f" and divides {kv_heads} kv heads or is their multiple" if kv_heads != heads else ""
        raise ConfigError(
            f"--tensor-parallel-size: got {tensor}, allowed: what divides the model's {heads} attention heads{shared}"
        )
    if spec.moe is not None and spec.moe.num_experts % expert:
        raise ConfigError(
            f"--expert-parallel-size: got {expert}, allowed: what divides the model's {spec.moe.num_experts} experts"
        )
    return spec if spec.moe is None else replace(spec, moe=spec.moe.fitted(placement))


def abstract(
    spec: ModelSpec, dtype: jnp.dtype, placement: Placement, mesh: Mesh | None, with_mtp: bool
) -> tuple[nnx.GraphDef, jax.tree_util.PyTreeDef, tuple[str, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """Graph, tree, names and leaves of a decoder, each leaf with its sharding where there is a mesh."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(spec, dtype, placement, with_mtp)))
    variables = nnx.to_flat_state(state)
    names = tuple(".".join(map(str, path)) for path, _ in variables)
    leaves, tree = jax.tree.flatten(state)
    if mesh is not None:
        logical = [variable.get_metadata()["out_sharding"] for _, variable in variables]
        leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, placement.spec(axes, leaf.shape)))
            for leaf, axes in zip(leaves, logical, strict=True)
        ]
    return graph, tree, names, tuple(leaves)


def parameter_shapes(
    spec: ModelSpec, dtype: jnp.dtype = jnp.bfloat16, with_mtp: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Dotted parameter names in leaf order -> shapes and dtypes: what a converted checkpoint holds for any mesh, which
    is the model as its config describes it, before `fit_spec`."""
    _, _, names, leaves = abstract(spec, jnp.dtype(dtype), Placement(), None, with_mtp)
    return dict(zip(names, leaves, strict=True))
