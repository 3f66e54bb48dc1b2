"""`model_type: deepseek_v3` (V3, R1, V3.1; arXiv 2412.19437): config.json -> ModelSpec."""

from __future__ import annotations

from typing import Any

from jaxserve.models.parts import common, mla_spec, moe_fields, mtp_layers, sigmoid_rule
from jaxserve.models.spec import ModelSpec


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ModelError for a missing field or a feature that this file does not know."""
    return ModelSpec(
        **common(config, rms_eps=1e-6),
        attention=mla_spec(config),
        **moe_fields(config, sigmoid_rule(config), bias=True),
        mtp_layers=mtp_layers(config),
    )
