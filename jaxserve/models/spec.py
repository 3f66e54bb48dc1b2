"""A model as facts: what `<model_type>.py` makes of a config.json, and all that the decoder is driven by."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.layers.gqa import GqaSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that shapes the decoder; no family's name is needed to run it."""

    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embedding and of the head
    rms_eps: float
    tie_embeddings: bool
    max_len: int  # tokens
    attention: GqaSpec
    mlp_width: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str  # the checkpoint's own: bfloat16 | float16 | float32
