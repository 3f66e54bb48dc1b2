"""`model_type: deepseek_v3`: as V2, with a router bias and an MTP layer."""

from __future__ import annotations

from checkpoints.names.decoder import decoder_table
from checkpoints.names.table import NameTable
from jaxserve.models.spec import ModelSpec


def name_table(spec: ModelSpec) -> NameTable:
    """See `decoder_table`."""
    return decoder_table(spec)
