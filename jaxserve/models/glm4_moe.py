"""`model_type: glm4_moe` (GLM-4.5, 4.5-Air, 4.6, 4.7): config.json -> ModelSpec.

Half of each head rotates, paired by halves (the dense GLMs pair neighbours).
"""

from __future__ import annotations

from typing import Any

from jaxserve.models.fields import flag
from jaxserve.models.parts import common, gqa_spec, head_dim_of, moe_fields, mtp_layers, sigmoid_rule
from jaxserve.models.rope import rope_spec
from jaxserve.models.spec import ModelSpec


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ModelError for a missing field or a feature that this file does not know."""
    shared = common(config, rms_eps=1e-5)
    rope = rope_spec(config, head_dim_of(config), partial=0.5)
    attention = gqa_spec(
        config,
        rope,
        qkv_bias=flag(config, "attention_bias", False),
        qk_norm_eps=shared["rms_eps"] if flag(config, "use_qk_norm", False) else None,
    )
    fields = {"first_k_dense_replace": 1} | config
    return ModelSpec(
        **shared,
        attention=attention,
        **moe_fields(fields, sigmoid_rule(config), bias=True),
        mtp_layers=mtp_layers(config),
    )
