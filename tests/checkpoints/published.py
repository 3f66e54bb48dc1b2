"""Published checkpoints as they lie on disk: configs, and every tensor's name, shape and dtype, without any weights.

Written from descriptions of the files, independently of checkpoints/names, so that the two can be held together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.readers.reader import SourceFile, TensorInfo

type Shapes = dict[str, tuple[int, ...]]

BF16, F32, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3fn)

V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
V3: dict[str, Any] = V2_LITE | {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129280,
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
GLM_MOE: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}
GLM_45_AIR: dict[str, Any] = GLM_MOE | {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": False,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 1.0,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "rope_scaling": None,
}
GLM_47_FLASH: dict[str, Any] = GLM_MOE | {
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "attention_bias": False,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.8,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
}
GLM_4_9B_CHAT: dict[str, Any] = {  # as first published
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "ffn_hidden_size": 13696,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_layers": 40,
    "original_rope": True,
    "padded_vocab_size": 151552,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 500,
    "seq_length": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": [151329, 151336, 151338],
}


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of a checkpoint, but for the scales of quantised ones."""
    if config["model_type"] == "chatglm":
        return chatglm_shapes(config)
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    found: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    mtp = config.get("num_nextn_predict_layers") or 0
    for i in range(layers + mtp):
        layer = f"model.layers.{i}."
        block = mla_shapes(config) if "kv_lora_rank" in config else gqa_shapes(config)
        found |= {f"{layer}self_attn.{name}": shape for name, shape in block.items()}
        found |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        found |= {f"{layer}mlp.{name}": shape for name, shape in mlp_shapes(config, i).items()}
        if i >= layers:
            found |= {f"{layer}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            found |= {f"{layer}{name}.weight": (vocab, hidden) for name in ("embed_tokens", "shared_head.head")}
            found[layer + "eh_proj.weight"] = (hidden, 2 * hidden)
    return found


def gqa_shapes(config: Mapping[str, Any]) -> Shapes:
    """Below `self_attn.`"""
    hidden, dim = config["hidden_size"], config["head_dim"]
    sizes = {"q": config["num_attention_heads"] * dim, "k": config["num_key_value_heads"] * dim}
    sizes["v"] = sizes["k"]
    found: Shapes = {f"{name}_proj.weight": (rows, hidden) for name, rows in sizes.items()}
    found["o_proj.weight"] = (hidden, sizes["q"])
    if config.get("attention_bias"):
        found |= {f"{name}_proj.bias": (rows,) for name, rows in sizes.items()}
    if config.get("use_qk_norm"):
        found |= {"q_norm.weight": (dim,), "k_norm.weight": (dim,)}
    return found


def mla_shapes(config: Mapping[str, Any]) -> Shapes:
    """Below `self_attn.`"""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    found: Shapes = {
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }
    low = config["q_lora_rank"]
    if low is None:
        return found | {"q_proj.weight": (heads * (nope + rope), hidden)}
    found |= {"q_a_proj.weight": (low, hidden), "q_a_layernorm.weight": (low,)}
    return found | {"q_b_proj.weight": (heads * (nope + rope), low)}


def mlp_shapes(config: Mapping[str, Any], layer: int) -> Shapes:
    """Below `mlp.`"""
    hidden = config["hidden_size"]

    def gated(width: int, prefix: str = "") -> Shapes:
        rows = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return {f"{prefix}{name}_proj.weight": shape for name, shape in rows.items()}

    if layer < config.get("first_k_dense_replace", layer + 1):
        return gated(config["intermediate_size"])
    width, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    found: Shapes = {"gate.weight": (experts, hidden)}
    if config["model_type"] not in ("deepseek", "deepseek_v2"):
        found["gate.e_score_correction_bias"] = (experts,)
    for i in range(experts):
        found |= gated(width, f"experts.{i}.")
    return found | gated(width * config["n_shared_experts"], "shared_experts.")


def chatglm_shapes(config: Mapping[str, Any]) -> Shapes:
    """GLM-4-9B's own names."""
    hidden, vocab, width = config["hidden_size"], config["padded_vocab_size"], config["ffn_hidden_size"]
    queries = config["num_attention_heads"] * config["kv_channels"]
    rows = queries + 2 * config["multi_query_group_num"] * config["kv_channels"]
    found: Shapes = {
        "transformer.embedding.word_embeddings.weight": (vocab, hidden),
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (vocab, hidden),
        "transformer.rotary_pos_emb.inv_freq": (config["kv_channels"] // 4,),
    }
    for i in range(config["num_layers"]):
        block: Shapes = {
            "input_layernorm.weight": (hidden,),
            "self_attention.query_key_value.weight": (rows, hidden),
            "self_attention.query_key_value.bias": (rows,),
            "self_attention.dense.weight": (hidden, queries),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.dense_h_to_4h.weight": (2 * width, hidden),
            "mlp.dense_4h_to_h.weight": (hidden, width),
        }
        found |= {f"transformer.encoder.layers.{i}.{name}": shape for name, shape in block.items()}
    return found


PLAIN = ("embed_tokens.weight", "norm.weight", "lm_head.weight", "mlp.gate.weight", "head.weight", "eh_proj.weight")


def block_scaled(found: Shapes) -> dict[str, TensorInfo]:
    """As V3 is published: matrices in e4m3 with a scale for each 128x128, the others plain."""
    infos: dict[str, TensorInfo] = {}
    for name, shape in found.items():
        if name.endswith("e_score_correction_bias"):
            infos[name] = TensorInfo(shape, F32)
        elif len(shape) == 2 and not name.endswith(PLAIN):
            infos[name] = TensorInfo(shape, FP8)
            infos[f"{name}_scale_inv"] = TensorInfo((-(-shape[0] // 128), -(-shape[1] // 128)), F32)
        else:
            infos[name] = TensorInfo(shape, BF16)
    return infos


@dataclass(frozen=True)
class IndexReader:
    """A reader of names and shapes alone."""

    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    path: Path = Path("published")
    generation_config: dict[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> np.ndarray:
        """There is nothing to read."""
        raise AssertionError(f"{name} was read")

    def fingerprints(self) -> list[SourceFile]:
        """There are no files."""
        return []

    def copy_files(self, target: Path) -> None:
        """There are no files."""
