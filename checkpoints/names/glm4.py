"""`model_type: glm4`: as `glm`, and a norm after each block too (`post_attention_layernorm` stands before the MLP)."""

from __future__ import annotations

from checkpoints.names.decoder import Layout, decoder_table
from checkpoints.names.glm import fused_mlp
from checkpoints.names.table import NameTable
from jaxserve.models.spec import ModelSpec

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def name_table(spec: ModelSpec) -> NameTable:
    """See `decoder_table`."""
    return decoder_table(spec, Layout(mlp=fused_mlp, layer_norms=NORMS))
