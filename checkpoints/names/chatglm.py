"""`model_type: chatglm`: GLM-4-9B as first published, with one matrix for q, k and v and names of its own."""

from __future__ import annotations

from checkpoints.names.decoder import Layout, decoder_table
from checkpoints.names.gqa import fused
from checkpoints.names.mlp import fused_gated
from checkpoints.names.table import NameTable, Target
from jaxserve.layers.gqa import GqaSpec
from jaxserve.models.spec import ModelSpec


def attention(spec: ModelSpec, layer: str) -> dict[str, Target]:
    """Under `self_attention`."""
    assert isinstance(spec.attention, GqaSpec)
    return fused(spec.attention, spec.hidden_size, f"{layer}.self_attention")


def mlp(spec: ModelSpec, layer: str) -> dict[str, Target]:
    """gate and up in one, then down."""
    first, second = f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h"
    return fused_gated(spec.mlp_width, spec.hidden_size, first, second)


LAYOUT = Layout(
    embedding="transformer.embedding.word_embeddings.weight",
    layers="transformer.encoder.layers",
    norm="transformer.encoder.final_layernorm.weight",
    head="transformer.output_layer.weight",
    attention=attention,
    mlp=mlp,
    ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
)


def name_table(spec: ModelSpec) -> NameTable:
    """See `decoder_table`."""
    return decoder_table(spec, LAYOUT)
