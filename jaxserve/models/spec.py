"""A model as facts: what `<model_type>.py` makes of a config.json, and all that the decoder is driven by."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.layers.gqa import GqaSpec
from jaxserve.layers.mla import MlaSpec
from jaxserve.layers.moe import MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that shapes the decoder; no family's name is needed to run it."""

    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embedding and of the head
    rms_eps: float
    tie_embeddings: bool
    max_len: int  # tokens
    attention: GqaSpec | MlaSpec
    mlp_width: int  # of the dense layers
    moe: MoeSpec | None = None  # None: all layers are dense
    first_dense: int = 0  # layers before the first mixture of experts
    post_norms: bool = False  # a norm after attention and after the feed-forward block too, before they are added
    mtp_layers: int = 0  # multi-token prediction layers that follow the others in the checkpoint
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str  # the checkpoint's own: bfloat16 | float16 | float32

    def is_moe(self, layer: int) -> bool:
        """Whether this layer (MTP layers count on after the others) is a mixture of experts."""
        return self.moe is not None and layer >= self.first_dense
