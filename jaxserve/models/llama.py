"""`model_type: llama` (Llama 1 to 3.x and what is shaped like them, such as SmolLM2): config.json -> ModelSpec."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ModelError
from jaxserve.layers.gqa import GqaSpec
from jaxserve.layers.rope import RopeSpec
from jaxserve.models.fields import checkpoint_dtype, read, require_equal, token_ids
from jaxserve.models.rope import rope_spec
from jaxserve.models.spec import ModelSpec


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ModelError for a missing field or a feature that this file does not know."""
    require_equal(config, "hidden_act", "silu")
    require_equal(config, "mlp_bias", False)
    hidden, heads = read(config, "hidden_size", int), read(config, "num_attention_heads", int)
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = config.get("head_dim") or hidden // heads
    rope: RopeSpec = rope_spec(config, head_dim)
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        hidden_size=hidden,
        num_layers=read(config, "num_hidden_layers", int),
        vocab_size=read(config, "vocab_size", int),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        tie_embeddings=config.get("tie_word_embeddings", False),
        max_len=read(config, "max_position_embeddings", int),
        attention=GqaSpec(heads, kv_heads, head_dim, rope, qkv_bias=bias, out_bias=bias),
        mlp_width=read(config, "intermediate_size", int),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        bos_token_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        dtype=checkpoint_dtype(config),
    )
