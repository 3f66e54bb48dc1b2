"""Tiny models of the GLM families, each branch of the architecture in one of them at least.

Runs where torch is, and so imports nothing of this repository.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from _goldens_tiny import Variant, make
from safetensors.torch import load_file, save_file
from transformers import Glm4Config, Glm4MoeConfig, Glm4MoeLiteConfig, GlmConfig

STOPS: dict[str, Any] = {"eos_token_id": [1, 3, 4], "pad_token_id": 1, "bos_token_id": None}
ROPE_RATIO = 500
TURNED: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

DENSE = STOPS | {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}
GLM = {
    # GLM-4-9B-chat's form. Small embeddings, so that the tiny epsilon of the first norm counts.
    "chat": Variant(
        DENSE | {"rms_norm_eps": 1.5625e-7, "rope_parameters": TURNED | {"rope_theta": 10000.0 * ROPE_RATIO}},
        small=("embed_tokens",),
    ),
    # As published: config.json does not say which part of a head is turned.
    "no-partial-rotary-key": Variant(
        DENSE
        | {"num_hidden_layers": 2, "num_key_value_heads": 4, "rms_norm_eps": 1.5625e-7, "rope_parameters": TURNED},
        published=True,
        without=("partial_rotary_factor",),
    ),
}
GLM4 = {
    "bias": Variant(DENSE | {"rms_norm_eps": 1e-5, "rope_parameters": TURNED}, published=True),
    "no-bias": Variant(
        DENSE | {"attention_bias": False, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_parameters": TURNED}
    ),
}

ROUTED = STOPS | {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
}
MOE = ROUTED | {"num_key_value_heads": 4, "head_dim": 16, "num_experts_per_tok": 3}
FAST = TURNED | {"rope_theta": 1e6}
GLM4_MOE = {
    # GLM-4.6's form. Biases as in a published checkpoint: so near to each other that bfloat16 would make them equal.
    "qk-norm-mtp": Variant(
        MOE
        | {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5}
        | {"num_nextn_predict_layers": 1, "rope_parameters": FAST},
        mtp=True,
        router_bias=(6.817, 7.063),
        published=True,
    ),
    # GLM-4.5-Air's form.
    "air": Variant(
        MOE
        | {"attention_bias": True, "use_qk_norm": False, "routed_scaling_factor": 1.0}
        | {"num_nextn_predict_layers": 0, "rope_parameters": FAST},
    ),
    # A plain Llama's form: all layers dense, all of a head turned, one matrix for both ends.
    "dense-tied": Variant(
        MOE
        | {"attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 3, "tie_word_embeddings": True}
        | {"num_nextn_predict_layers": 0, "rope_parameters": FAST | {"rope_theta": 1e5, "partial_rotary_factor": 1.0}},
    ),
}

LITE = ROUTED | {
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts_per_tok": 2,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.8,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
}
GLM4_MOE_LITE = {
    # GLM-4.7-Flash's form. Small latents, so that their norms' epsilon counts: transformers' is 1e-6 whatever
    # rms_norm_eps says.
    "flash-mtp": Variant(
        LITE | {"q_lora_rank": 24, "num_nextn_predict_layers": 1},
        mtp=True,
        small=("q_a_proj", "kv_a_proj"),
        published=True,
        without=("mlp_layer_types", "head_dim", "qk_head_dim"),
    ),
    # As transformers saves it: the kinds of layers as a list.
    "layer-types": Variant(
        LITE | {"q_lora_rank": None, "mlp_layer_types": ["dense", "dense", "sparse"]},
        without=("first_k_dense_replace",),
    ),
}

CHATGLM: dict[str, Any] = {  # the keys of the original GLM-4-9B-chat
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "multi_query_attention": True,
    "original_rope": True,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": ROPE_RATIO,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
CHATGLM_SAME = {  # its other keys, and what transformers calls them
    "num_layers": "num_hidden_layers",
    "num_hidden_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "multi_query_group_num": "num_key_value_heads",
    "padded_vocab_size": "vocab_size",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "tie_word_embeddings": "tie_word_embeddings",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
CHATGLM_NAMES = {
    "model.embed_tokens.weight": "transformer.embedding.word_embeddings.weight",
    "model.norm.weight": "transformer.encoder.final_layernorm.weight",
    "lm_head.weight": "transformer.output_layer.weight",
}
CHATGLM_LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.dense.weight",
    "mlp.gate_up_proj.weight": "mlp.dense_h_to_4h.weight",
    "mlp.down_proj.weight": "mlp.dense_4h_to_h.weight",
}


def make_glm(folder: Path) -> None:
    """GLM-4 before April 2025, and one of them once more as the original repository writes it."""
    for name, variant in GLM.items():
        make(folder / "glm_tiny" / name, GlmConfig, variant)
    write_chatglm(folder / "glm_tiny" / "chat", folder / "chatglm_tiny" / "chat")


def write_chatglm(source: Path, target: Path) -> None:
    """The same model with the original names and keys; what is expected of it is the same, too."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    entry = CHATGLM | {key: config[name] for key, name in CHATGLM_SAME.items()}
    (target / "config.json").write_text(json.dumps(entry, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    given = load_file(source / "model.safetensors")
    tensors = {new: given.pop(old) for old, new in CHATGLM_NAMES.items()}
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.", f"transformer.encoder.layers.{layer}."
        tensors |= {new + after: given.pop(old + before) for before, after in CHATGLM_LAYER_NAMES.items()}
        for kind in ("weight", "bias"):
            parts = [given.pop(f"{old}self_attn.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"{new}self_attention.query_key_value.{kind}"] = torch.cat(parts)
    assert not given, f"no name for {sorted(given)}"
    turned = config["head_dim"] // 2
    theta = 10000.0 * ROPE_RATIO
    frequencies = theta ** (-torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    tensors["transformer.rotary_pos_emb.inv_freq"] = frequencies.bfloat16()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("generation_config.json", "reference.npz"):
        shutil.copyfile(source / name, target / name)


def make_glm4(folder: Path) -> None:
    """The 0414 models."""
    for name, variant in GLM4.items():
        make(folder / "glm4_tiny" / name, Glm4Config, variant)


def make_glm4_moe(folder: Path) -> None:
    """GLM-4.5, 4.6 and 4.7."""
    for name, variant in GLM4_MOE.items():
        make(folder / "glm4_moe_tiny" / name, Glm4MoeConfig, variant)


def make_glm4_moe_lite(folder: Path) -> None:
    """GLM-4.7-Flash."""
    for name, variant in GLM4_MOE_LITE.items():
        make(folder / "glm4_moe_lite_tiny" / name, Glm4MoeLiteConfig, variant)
