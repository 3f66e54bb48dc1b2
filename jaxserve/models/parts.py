"""What the families' files share: parts of a ModelSpec from fields that several model types spell alike."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ModelError
from jaxserve.layers.gqa import GqaSpec
from jaxserve.layers.mla import MlaSpec
from jaxserve.layers.moe import MoeSpec
from jaxserve.layers.rope import RopeSpec
from jaxserve.models.fields import checkpoint_dtype, flag, integer, number, require_equal, token_ids
from jaxserve.models.rope import mscale_of, rope_fields, rope_spec
from pallas_kernels.moe_route.contract import RouteRule

LATENT_NORM_EPS = 1e-6  # fixed in transformers (5.17 and 5.24), whatever rms_norm_eps says; see `mla_spec`


def common(config: dict[str, Any], *, rms_eps: float) -> dict[str, Any]:
    """The ModelSpec fields that every family reads alike; `rms_eps` is its default."""
    require_equal(config, "hidden_act", "silu")
    return {
        "hidden_size": integer(config, "hidden_size"),
        "num_layers": integer(config, "num_hidden_layers"),
        "vocab_size": integer(config, "vocab_size"),
        "rms_eps": number(config, "rms_norm_eps", rms_eps),
        "tie_embeddings": flag(config, "tie_word_embeddings", False),
        "max_len": integer(config, "max_position_embeddings"),
        "mlp_width": integer(config, "intermediate_size"),
        "eos_token_ids": token_ids(config.get("eos_token_id")),
        "bos_token_id": next(iter(token_ids(config.get("bos_token_id"))), None),
        "dtype": checkpoint_dtype(config),
    }


def gqa_spec(config: dict[str, Any], rope: RopeSpec, **switches: Any) -> GqaSpec:
    """Grouped-query attention; `head_dim` is hidden_size / heads where the field is absent."""
    heads = integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return GqaSpec(heads, kv_heads, head_dim_of(config), rope, **switches)


def head_dim_of(config: dict[str, Any]) -> int:
    """Of grouped-query attention."""
    return integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))


def mla_spec(config: dict[str, Any]) -> MlaSpec:
    """Multi-head latent attention. A `head_dim` in the config is not looked at: files disagree on what it means.

    The softmax factor is head_dim^-1/2, under YaRN times m(factor, mscale_all_dim)^2 (arXiv 2309.00071, and DeepSeek's
    code; leaving it out goes unseen at position 0). The latent norms' eps: transformers fixes 1e-6, vLLM and SGLang
    take rms_norm_eps. They differ for GLM alone (1e-5); what training used is not known. We follow transformers, unless
    the config has `latent_norm_eps`, a field of our own.
    """
    require_equal(config, "attention_bias", False)
    nope, turning = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    whole_part = config | {"partial_rotary_factor": 1.0}  # the rotary part is a part of its own
    rope = rope_spec(whole_part, turning, interleaved=flag(config, "rope_interleave", True))
    scale = (nope + turning) ** -0.5
    all_dim = rope_fields(config).get("mscale_all_dim")
    if rope.kind == "yarn" and all_dim:
        scale *= mscale_of(rope.factor, all_dim) ** 2
    return MlaSpec(
        num_heads=integer(config, "num_attention_heads"),
        q_rank=integer(config, "q_lora_rank", None),
        rank=integer(config, "kv_lora_rank"),
        nope_dim=nope,
        value_dim=integer(config, "v_head_dim"),
        rope=rope,
        scale=scale,
        norm_eps=number(config, "latent_norm_eps", LATENT_NORM_EPS),
    )


def moe_fields(config: dict[str, Any], rule: RouteRule, *, bias: bool) -> dict[str, Any]:
    """The ModelSpec fields `moe` and `first_dense`; n_routed_experts null is a dense model, as in DeepSeek."""
    require_equal(config, "moe_layer_freq", 1)
    if config.get("n_routed_experts", 0) is None:
        return {}
    experts, width = integer(config, "n_routed_experts"), integer(config, "moe_intermediate_size")
    if experts % rule.num_groups:
        raise ModelError(f"config.json: n_group is {rule.num_groups}, allowed: what divides n_routed_experts {experts}")
    most = experts // rule.num_groups * rule.kept_groups
    if rule.top_k > most:
        raise ModelError(
            f"config.json: num_experts_per_tok is {rule.top_k}, allowed: at most {most}, the experts that may be chosen"
        )
    try:
        rule.check_experts(experts)
    except ValueError as error:
        raise ModelError(f"config.json: routing: {error}") from error
    shared = integer(config, "n_shared_experts", 0, least=0) * width
    return {"moe": MoeSpec(experts, width, shared, rule, bias), "first_dense": first_dense(config)}


def first_dense(config: dict[str, Any]) -> int:
    """How many layers come before the first mixture of experts; also from a list of each layer's type."""
    layers, types = integer(config, "num_hidden_layers"), config.get("mlp_layer_types")
    if types is None:
        count = integer(config, "first_k_dense_replace", 0, least=0)
        if count > layers:
            raise ModelError(f"config.json: first_k_dense_replace is {count}, allowed: at most {layers}, the layers")
        return count
    count = types.index("sparse") if isinstance(types, list) and "sparse" in types else layers
    if types != ["dense"] * count + ["sparse"] * (layers - count):
        raise ModelError(
            f"config.json: mlp_layer_types is {types!r}, supported: 'dense' layers, then 'sparse' ones, {layers} in all"
        )
    return count


def route_rule(config: dict[str, Any], **fields: Any) -> RouteRule:
    """How experts are chosen; `fields` besides top_k, which is spelt alike everywhere."""
    groups, kept = fields.get("num_groups", 1), fields.get("kept_groups", 1)
    if kept > groups:
        raise ModelError(f"config.json: topk_group is {kept}, allowed: at most {groups}, n_group")
    return RouteRule(top_k=integer(config, "num_experts_per_tok"), **fields)


def sigmoid_rule(config: dict[str, Any]) -> RouteRule:
    """DeepSeek-V3's routing without auxiliary loss (arXiv 2412.19437, 2.1.2), which GLM took over with one group."""
    require_equal(config, "scoring_func", "sigmoid")
    require_equal(config, "topk_method", "noaux_tc")
    return route_rule(
        config,
        scoring="sigmoid",
        num_groups=integer(config, "n_group"),
        kept_groups=integer(config, "topk_group"),
        group_score="top2",
        renormalise=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor"),
    )


def mtp_layers(config: dict[str, Any]) -> int:
    """Multi-token prediction layers, from either spelling of the field."""
    return integer(config, "num_nextn_predict_layers", integer(config, "num_mtp_layers", 0, least=0), least=0)
