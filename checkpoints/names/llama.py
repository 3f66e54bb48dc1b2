"""`model_type: llama`: the names that most Hugging Face files share."""

from __future__ import annotations

from checkpoints.names.decoder import decoder_table
from checkpoints.names.table import NameTable
from jaxserve.models.spec import ModelSpec


def name_table(spec: ModelSpec) -> NameTable:
    """See `decoder_table`."""
    return decoder_table(spec)
