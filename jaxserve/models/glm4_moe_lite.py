"""`model_type: glm4_moe_lite` (GLM-4.7-Flash): config.json -> ModelSpec. DeepSeek-V3's shape with GLM's sizes."""

from __future__ import annotations

from typing import Any

from jaxserve.models.parts import common, mla_spec, moe_fields, mtp_layers, sigmoid_rule
from jaxserve.models.spec import ModelSpec


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ModelError for a missing field or a feature that this file does not know."""
    fields = config if "first_k_dense_replace" in config else {"first_k_dense_replace": 1} | config
    return ModelSpec(
        **common(config, rms_eps=1e-5),
        attention=mla_spec(config),
        **moe_fields(fields, sigmoid_rule(config), bias=True),
        mtp_layers=mtp_layers(config),
    )
