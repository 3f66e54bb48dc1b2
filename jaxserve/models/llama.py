"""`model_type: llama` (Llama 1 to 3.x and what is shaped like them, such as SmolLM2): config.json -> ModelSpec."""

from __future__ import annotations

from typing import Any

from jaxserve.models.fields import flag, require_equal
from jaxserve.models.parts import common, gqa_spec, head_dim_of
from jaxserve.models.rope import rope_spec
from jaxserve.models.spec import ModelSpec


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ModelError for a missing field or a feature that this file does not know."""
    require_equal(config, "mlp_bias", False)
    bias = flag(config, "attention_bias", False)
    shared = common(config, rms_eps=1e-6)
    rope = rope_spec(config, head_dim_of(config))
    return ModelSpec(**shared, attention=gqa_spec(config, rope, qkv_bias=bias, out_bias=bias))
