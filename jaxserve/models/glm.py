"""`model_type: glm` (GLM-4-9B-chat-hf) and `chatglm` (the same models as first published): config.json -> ModelSpec.

Half of each head rotates, in neighbouring pairs.
"""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models.fields import flag, number, read, require_equal
from jaxserve.models.parts import common, gqa_spec, head_dim_of
from jaxserve.models.rope import rope_spec
from jaxserve.models.spec import ModelSpec

CHATGLM_THETA = 10000.0  # times rope_ratio

# chatglm's own names for what transformers' `glm` calls otherwise
CHATGLM_NAMES = {
    "num_layers": "num_hidden_layers",
    "padded_vocab_size": "vocab_size",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
}
CHATGLM_KEPT = ("eos_token_id", "bos_token_id", "pad_token_id", "torch_dtype", "dtype", "tie_word_embeddings")
# The switches of that code which the published GLM-4 files all set alike.
CHATGLM_SWITCHES = {
    "rmsnorm": True,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "add_bias_linear": False,
    "original_rope": True,
    "pre_seq_len": None,
    "prefix_projection": False,
}


def model_spec(config: dict[str, Any], *, post_norms: bool = False) -> ModelSpec:
    """Raises ModelError for a missing field or a feature that this file does not know."""
    rope = rope_spec(config, head_dim_of(config), interleaved=True, partial=0.5)
    bias = flag(config, "attention_bias", True)
    return ModelSpec(
        **common(config, rms_eps=1.5625e-07),
        attention=gqa_spec(config, rope, qkv_bias=bias),
        post_norms=post_norms,
    )


def chatglm_spec(config: dict[str, Any]) -> ModelSpec:
    """The same from the original files' names; theta is 10000 times `rope_ratio`. Raises ModelError as `model_spec`."""
    for name, usual in CHATGLM_SWITCHES.items():
        require_equal(config, name, usual)
    fields = {ours: read(config, theirs, object) for theirs, ours in CHATGLM_NAMES.items()}
    fields |= {name: config[name] for name in CHATGLM_KEPT if name in config}
    if flag(config, "multi_query_attention", False):
        fields["num_key_value_heads"] = read(config, "multi_query_group_num", int)
    if config.get("rope_scaling"):
        raise ModelError("config.json: rope_scaling is set, supported for chatglm: rope_ratio alone")
    fields["rope_theta"] = CHATGLM_THETA * number(config, "rope_ratio", 1.0)
    fields["attention_bias"] = config.get("add_qkv_bias", False)
    return model_spec(fields)
