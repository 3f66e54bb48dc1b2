"""The whole decoder's parameters <- source tensors, by the names that nearly all Hugging Face files share.

A family's file says where its own names differ (`Layout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from checkpoints.names.gqa import separate
from checkpoints.names.mla import latent
from checkpoints.names.mlp import experts, gated
from checkpoints.names.table import MTP, NameTable, Target, plain
from jaxserve.layers.gqa import GqaSpec
from jaxserve.models.spec import ModelSpec

type Block = Callable[[ModelSpec, str], dict[str, Target]]  # of the layer whose source names begin like this

FREQUENCIES = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def attention(spec: ModelSpec, layer: str) -> dict[str, Target]:
    """Either kind, under `self_attn`."""
    block = f"{layer}.self_attn"
    if isinstance(spec.attention, GqaSpec):
        return separate(spec.attention, spec.hidden_size, block)
    return latent(spec.attention, spec.hidden_size, block)


def dense_mlp(spec: ModelSpec, layer: str) -> dict[str, Target]:
    """gate, up and down under `mlp`."""
    return gated(spec.mlp_width, spec.hidden_size, f"{layer}.mlp")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family names its tensors."""

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer_norms: Mapping[str, str] = field(  # ours -> theirs
        default_factory=lambda: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    )
    attention: Block = attention
    mlp: Block = dense_mlp  # of dense layers
    ignored: tuple[str, ...] = FREQUENCIES


def decoder_table(spec: ModelSpec, layout: Layout | None = None) -> NameTable:
    """The table of a model. A tied model has no head of its own: one in the files must then equal the embedding.

    MTP layers are numbered on after the others; their embedding and head are the decoder's own, once more.
    """
    layout = layout or Layout()
    vocab, hidden, count = spec.vocab_size, spec.hidden_size, spec.num_layers
    targets = {"embed.weight": plain(layout.embedding, (vocab, hidden))}
    for i in range(count):
        targets |= prefixed(f"layers.{i}.", layer_targets(spec, layout, i))
    targets["norm.scale"] = plain(layout.norm, (hidden,))
    if not spec.tie_embeddings:
        targets["head.weight"] = plain(layout.head, (vocab, hidden))
    duplicates = {layout.head: layout.embedding} if spec.tie_embeddings else {}
    for k in range(spec.mtp_layers):
        layer = f"{layout.layers}.{count + k}"
        targets |= prefixed(f"{MTP}{k}.", mtp_targets(spec, layout, count + k))
        duplicates[f"{layer}.embed_tokens.weight"] = layout.embedding
        duplicates[f"{layer}.shared_head.head.weight"] = layout.embedding if spec.tie_embeddings else layout.head
    numbers = "|".join(str(count + k) for k in range(spec.mtp_layers))
    mtp_sources = rf"{re.escape(layout.layers)}\.({numbers})\..*" if numbers else ""
    return NameTable(targets, layout.ignored, duplicates, mtp_sources)


def layer_targets(spec: ModelSpec, layout: Layout, index: int) -> dict[str, Target]:
    """One layer's parameters."""
    layer = f"{layout.layers}.{index}"
    norms = {f"{ours}.scale": f"{layer}.{theirs}.weight" for ours, theirs in layout.layer_norms.items()}
    targets = {name: plain(source, (spec.hidden_size,)) for name, source in norms.items()}
    if spec.moe is not None and spec.is_moe(index):
        mlp = experts(spec.moe, spec.hidden_size, f"{layer}.mlp")
    else:
        mlp = layout.mlp(spec, layer)
    return targets | prefixed("attention.", layout.attention(spec, layer)) | prefixed("mlp.", mlp)


def mtp_targets(spec: ModelSpec, layout: Layout, index: int) -> dict[str, Target]:
    """A multi-token prediction layer: a layer like the others, and what joins it to the decoder."""
    layer, hidden = f"{layout.layers}.{index}", spec.hidden_size
    return {
        "embed_norm.scale": plain(f"{layer}.enorm.weight", (hidden,)),
        "hidden_norm.scale": plain(f"{layer}.hnorm.weight", (hidden,)),
        "project": plain(f"{layer}.eh_proj.weight", (hidden, 2 * hidden)),
        "norm.scale": plain(f"{layer}.shared_head.norm.weight", (hidden,)),
        **prefixed("layer.", layer_targets(spec, layout, index)),
    }


def prefixed(prefix: str, targets: Mapping[str, Target]) -> dict[str, Target]:
    """The same under longer names."""
    return {prefix + name: target for name, target in targets.items()}
