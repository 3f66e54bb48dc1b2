"""`model_type: glm`: Llama's names, but the feed-forward block's first two matrices are one."""

from __future__ import annotations

from checkpoints.names.decoder import Layout, decoder_table
from checkpoints.names.mlp import fused_gated
from checkpoints.names.table import NameTable, Target
from jaxserve.models.spec import ModelSpec


def fused_mlp(spec: ModelSpec, layer: str) -> dict[str, Target]:
    """gate and up in one, then down."""
    return fused_gated(spec.mlp_width, spec.hidden_size, f"{layer}.mlp.gate_up_proj", f"{layer}.mlp.down_proj")


def name_table(spec: ModelSpec) -> NameTable:
    """See `decoder_table`."""
    return decoder_table(spec, Layout(mlp=fused_mlp))
