"""What the families' files share: parts of a ModelSpec from fields that several model types spell alike."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ModelError
from jaxserve.layers.gqa import GqaSpec
from jaxserve.layers.mla import MlaSpec
from jaxserve.layers.moe import MoeSpec
from jaxserve.layers.rope import RopeSpec
from jaxserve.models.fields import checkpoint_dtype, read, require_equal, token_ids
from jaxserve.models.rope import mscale_of, rope_fields, rope_spec
from pallas_kernels.moe_route.contract import RouteRule

LATENT_NORM_EPS = 1e-6  # fixed in transformers (5.17 and 5.24), whatever rms_norm_eps says; see `mla_spec`


def common(config: dict[str, Any], *, rms_eps: float) -> dict[str, Any]:
    """The ModelSpec fields that every family reads alike; `rms_eps` is its default."""
    require_equal(config, "hidden_act", "silu")
    return {
        "hidden_size": read(config, "hidden_size", int),
        "num_layers": read(config, "num_hidden_layers", int),
        "vocab_size": read(config, "vocab_size", int),
        "rms_eps": float(config.get("rms_norm_eps", rms_eps)),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_len": read(config, "max_position_embeddings", int),
        "mlp_width": read(config, "intermediate_size", int),
        "eos_token_ids": token_ids(config.get("eos_token_id")),
        "bos_token_id": next(iter(token_ids(config.get("bos_token_id"))), None),
        "dtype": checkpoint_dtype(config),
    }


def gqa_spec(config: dict[str, Any], rope: RopeSpec, **switches: Any) -> GqaSpec:
    """Grouped-query attention; `head_dim` is hidden_size / heads where the field is absent."""
    heads = read(config, "num_attention_heads", int)
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return GqaSpec(heads, kv_heads, head_dim_of(config), rope, **switches)


def head_dim_of(config: dict[str, Any]) -> int:
    """Of grouped-query attention."""
    return config.get("head_dim") or read(config, "hidden_size", int) // read(config, "num_attention_heads", int)


def mla_spec(config: dict[str, Any]) -> MlaSpec:
    """Multi-head latent attention. A `head_dim` in the config is not looked at: files disagree on what it means.

    The softmax factor is head_dim^-1/2, under YaRN times m(factor, mscale_all_dim)^2 (arXiv 2309.00071, and DeepSeek's
    code; leaving it out goes unseen at position 0). The latent norms' eps: transformers fixes 1e-6, vLLM and SGLang
    take rms_norm_eps. They differ for GLM alone (1e-5); what training used is not known. We follow transformers, unless
    the config has `latent_norm_eps`, a field of our own.
    """
    require_equal(config, "attention_bias", False)
    nope, turning = read(config, "qk_nope_head_dim", int), read(config, "qk_rope_head_dim", int)
    whole_part = config | {"partial_rotary_factor": 1.0}  # the rotary part is a part of its own
    rope = rope_spec(whole_part, turning, interleaved=bool(config.get("rope_interleave", True)))
    scale = (nope + turning) ** -0.5
    all_dim = rope_fields(config).get("mscale_all_dim")
    if rope.kind == "yarn" and all_dim:
        scale *= mscale_of(rope.factor, all_dim) ** 2
    return MlaSpec(
        num_heads=read(config, "num_attention_heads", int),
        q_rank=config.get("q_lora_rank"),
        rank=read(config, "kv_lora_rank", int),
        nope_dim=nope,
        value_dim=read(config, "v_head_dim", int),
        rope=rope,
        scale=scale,
        norm_eps=float(config.get("latent_norm_eps", LATENT_NORM_EPS)),
    )


def moe_fields(config: dict[str, Any], rule: RouteRule, *, bias: bool) -> dict[str, Any]:
    """The ModelSpec fields `moe` and `first_dense`; no routed experts at all is a dense model."""
    require_equal(config, "moe_layer_freq", 1)
    if not config.get("n_routed_experts"):
        return {}
    experts, width = read(config, "n_routed_experts", int), read(config, "moe_intermediate_size", int)
    try:
        rule.check_experts(experts)
    except ValueError as error:
        raise ModelError(f"config.json: routing: {error}") from error
    shared = (config.get("n_shared_experts") or 0) * width
    return {"moe": MoeSpec(experts, width, shared, rule, bias), "first_dense": first_dense(config)}


def first_dense(config: dict[str, Any]) -> int:
    """How many layers come before the first mixture of experts; also from a list of each layer's type."""
    types = config.get("mlp_layer_types")
    if types is None:
        return config.get("first_k_dense_replace", 0)
    count = types.index("sparse") if "sparse" in types else len(types)
    if any(kind != "sparse" for kind in types[count:]):
        raise ModelError(f"config.json: mlp_layer_types is {types!r}, supported: dense layers, then sparse ones")
    return count


def route_rule(config: dict[str, Any], **fields: Any) -> RouteRule:
    """How experts are chosen; top_k and scale are spelt alike everywhere."""
    try:
        return RouteRule(
            top_k=config.get("num_experts_per_tok") or 1,
            scale=float(config.get("routed_scaling_factor", 1.0)),
            **fields,
        )
    except ValueError as error:
        raise ModelError(f"config.json: routing: {error}") from error


def sigmoid_rule(config: dict[str, Any]) -> RouteRule:
    """DeepSeek-V3's routing without auxiliary loss (arXiv 2412.19437, 2.1.2), which GLM took over with one group."""
    require_equal(config, "scoring_func", "sigmoid")
    require_equal(config, "topk_method", "noaux_tc")
    return route_rule(
        config,
        scoring="sigmoid",
        num_groups=config.get("n_group") or 1,
        kept_groups=config.get("topk_group") or 1,
        group_score="top2",
        renormalise=bool(config.get("norm_topk_prob", True)),
    )


def mtp_layers(config: dict[str, Any]) -> int:
    """Multi-token prediction layers, from either spelling of the field."""
    return config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
