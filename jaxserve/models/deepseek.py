"""`model_type: deepseek` (DeepSeek MoE 16B, arXiv 2401.06066): config.json -> ModelSpec."""

from __future__ import annotations

from typing import Any

from jaxserve.models.fields import flag, require_equal
from jaxserve.models.parts import common, gqa_spec, head_dim_of, moe_fields, route_rule
from jaxserve.models.rope import rope_spec
from jaxserve.models.spec import ModelSpec


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Llama's attention, softmax-routed experts. Raises ModelError for a missing field or an unknown feature."""
    require_equal(config, "scoring_func", "softmax")
    require_equal(config, "attention_bias", False)
    rule = route_rule(config, scoring="softmax", renormalise=flag(config, "norm_topk_prob", False))
    return ModelSpec(
        **common(config, rms_eps=1e-6),
        attention=gqa_spec(config, rope_spec(config, head_dim_of(config))),
        **moe_fields(config, rule, bias=False),
    )
