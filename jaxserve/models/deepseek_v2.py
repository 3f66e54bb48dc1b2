"""`model_type: deepseek_v2` (V2, V2.5, V2-Lite, Coder-V2; arXiv 2405.04434): config.json -> ModelSpec."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.fields import integer, number, require_equal
from jaxserve.models.parts import common, mla_spec, moe_fields, route_rule
from jaxserve.models.spec import ModelSpec

TOPK_METHODS = ("greedy", "group_limited_greedy")


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ModelError for a missing field or a feature that this file does not know.

    norm_topk_prob: transformers ignores it here; all published files say false, and true is refused.
    """
    require_equal(config, "scoring_func", "softmax")
    require_equal(config, "norm_topk_prob", False)
    method = config.get("topk_method") or "greedy"
    if method not in TOPK_METHODS:
        raise ModelError(f"config.json: topk_method is {method!r}, supported: {', '.join(TOPK_METHODS)}")
    grouped = method == "group_limited_greedy"
    rule = route_rule(
        config,
        scoring="softmax",
        num_groups=integer(config, "n_group") if grouped else 1,
        kept_groups=integer(config, "topk_group") if grouped else 1,
        group_score="max",
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    return ModelSpec(**common(config, rms_eps=1e-6), attention=mla_spec(config), **moe_fields(config, rule, bias=False))
