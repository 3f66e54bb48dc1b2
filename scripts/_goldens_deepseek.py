"""Tiny models of the DeepSeek families, each branch of the architecture in one of them at least.

Runs where torch is, and so imports nothing of this repository.
"""

from __future__ import annotations

import json
import runpy
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _goldens_tiny import (
    BASE,
    NEW_TOKENS,
    NUDGE,
    RANGE,
    Answers,
    Variant,
    draw,
    draw_between,
    make,
    margin_of,
    write_reference,
)
from safetensors.torch import save_file
from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

REFERENCE = Path(__file__).parents[1] / "tests" / "models" / "deepseek_v1_reference.py"

LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "attention_bias": False}
STOPS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 16}

V2 = (
    LATENT
    | STOPS
    | {
        "num_key_value_heads": 8,
        "qk_rope_head_dim": 8,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "max_position_embeddings": 640,
        "rms_norm_eps": 1e-6,
    }
)
DEEPSEEK_V2 = {
    # V2-Lite's form. beta_slow puts pairs between the two ends of the ramp, which the published 1 does not at 4 pairs.
    "lite": Variant(
        V2
        | {"q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "topk_method": "greedy"}
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
        | {"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 0.02, "mscale": 0.707, "mscale_all_dim": 0.707}},
        published=True,
        without=("head_dim", "qk_head_dim"),
    ),
    # V2's form: low-rank queries and groups.
    "groups": Variant(
        V2
        | {"q_lora_rank": 24, "n_routed_experts": 16, "num_experts_per_tok": 4, "topk_method": "group_limited_greedy"}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0}
        | {"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}

V3 = (
    LATENT
    | STOPS
    | {
        "num_key_value_heads": 8,
        "qk_rope_head_dim": 16,
        "moe_intermediate_size": 16,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rms_norm_eps": 1e-6,
    }
)
DEEPSEEK_V3 = {
    # V3's form. All biased scores are negative, so that a group masked by 0 in place of -inf is the best one. The two
    # mscales differ, so that cosine and sine have a factor, which is 1 in the published checkpoints.
    "groups-yarn-mtp": Variant(
        V3
        | {"q_lora_rank": 24, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4}
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 640}
        | {"rope_parameters": YARN | {"beta_fast": 4, "beta_slow": 0.05, "mscale": 1.0, "mscale_all_dim": 0.8}},
        mtp=True,
        router_bias=(-1.8, -1.0),
        published=True,
        without=("head_dim", "qk_head_dim"),
    ),
    # The other branch of each switch; values wider than the keys without position.
    "plain": Variant(
        V3
        | {"q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "v_head_dim": 24}
        | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
}

V1: dict[str, Any] = BASE | {  # the keys of the published checkpoint
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "model_type": "deepseek",
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "seq_aux": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def make_deepseek(folder: Path) -> None:
    """The first MoE model, for which transformers has no class: its reference is the one of the tests."""
    target = folder / "deepseek_tiny" / "moe"
    target.mkdir(parents=True, exist_ok=True)
    seed = zlib.crc32(b"deepseek_tiny/moe")
    tensors = {name: value.bfloat16() for name, value in v1_weights(seed).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    stops = {key: V1[key] for key in ("bos_token_id", "eos_token_id")}
    for name, entry in (("config.json", V1), ("generation_config.json", {"_from_model_config": True, **stops})):
        (target / name).write_text(json.dumps(entry, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    weights = {name: value.float().numpy() for name, value in tensors.items()}
    answers = v1_answers(weights)
    ids = np.arange(5, 45)
    want = assembled(tensors)(torch.from_numpy(ids[None])).logits[0].detach().numpy()
    difference = np.abs(answers.logits(ids)["logits"] - want).max() / np.abs(want).max()
    assert difference < 1e-5, f"the reference and a Llama with the experts of V2 differ by {difference:.1e}"
    write_reference(target, answers, seed)


def v1_answers(weights: dict[str, np.ndarray]) -> Answers:
    """What the tests' reference says; its greedy ids come from the whole sequence anew at each step."""
    forward = runpy.run_path(str(REFERENCE))["logits"]
    nudged = {name: value * (1 + NUDGE / RANGE * draw(value.shape, name, 0).numpy()) for name, value in weights.items()}

    def greedy(ids: np.ndarray) -> tuple[list[int], float]:
        tokens, margin = ids.tolist(), float("inf")
        for _ in range(NEW_TOKENS):
            last = forward(V1, weights, np.array(tokens))[-1]
            margin = min(margin, margin_of(last))
            tokens.append(int(last.argmax()))
        return tokens[len(ids) :], margin

    def logits_with(used: dict[str, np.ndarray]) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
        return lambda ids: {"logits": forward(V1, used, ids)}

    return Answers(V1["vocab_size"], logits_with(weights), logits_with(nudged), greedy)


def v1_weights(seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights under the published names: Llama's attention, the experts of V2."""
    hidden, narrow = V1["hidden_size"], V1["moe_intermediate_size"]
    shapes = {"model.embed_tokens": (V1["vocab_size"], hidden), "lm_head": (V1["vocab_size"], hidden)}
    shapes["model.norm"] = (hidden,)
    for layer in range(V1["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{block}self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        if layer < V1["first_k_dense_replace"]:
            widths = {"mlp.": V1["intermediate_size"]}
        else:
            shapes[f"{block}mlp.gate"] = (V1["n_routed_experts"], hidden)
            widths = {f"mlp.experts.{expert}.": narrow for expert in range(V1["n_routed_experts"])}
            widths["mlp.shared_experts."] = narrow * V1["n_shared_experts"]
        for place, width in widths.items():
            shapes |= {f"{block}{place}{name}_proj": (width, hidden) for name in ("gate", "up")}
            shapes[f"{block}{place}down_proj"] = (hidden, width)
    full = {f"{name}.weight": shape for name, shape in shapes.items()}
    return {
        name: draw_between((0.5, 1.5), shape, name, seed) if name.endswith("norm.weight") else draw(shape, name, seed)
        for name, shape in full.items()
    }


def assembled(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The model from transformers' parts, in float32: a Llama whose later layers have the experts of V2."""
    shared = {key: V1[key] for key in BASE} | {"num_key_value_heads": V1["num_key_value_heads"]}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": float(V1["rope_theta"])}}
    plain = {"rms_norm_eps": V1["rms_norm_eps"], "attn_implementation": "eager"}
    model = LlamaForCausalLM(LlamaConfig(**shared, **rope, **plain))
    keys = ("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    routed = DeepseekV2Config(**shared, **{key: V1[key] for key in keys}, topk_method="greedy")
    state = {name: value.float() for name, value in tensors.items()}
    for layer, block in enumerate(model.model.layers):
        if layer < V1["first_k_dense_replace"]:
            continue
        block.mlp = DeepseekV2Moe(routed)
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: torch.stack([state.pop(f"{prefix}{e}.{kind}_proj.weight") for e in range(V1["n_routed_experts"])])
            for kind in ("gate", "up", "down")
        }
        state[f"{prefix}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        state[f"{prefix}down_proj"] = parts["down"]
    model.load_state_dict(state)
    return model.eval()


def make_deepseek_v2(folder: Path) -> None:
    """V2 and V2-Lite."""
    for name, variant in DEEPSEEK_V2.items():
        make(folder / "deepseek_v2_tiny" / name, DeepseekV2Config, variant)


def make_deepseek_v3(folder: Path) -> None:
    """V3, and one with the other branches."""
    for name, variant in DEEPSEEK_V3.items():
        make(folder / "deepseek_v3_tiny" / name, DeepseekV3Config, variant)
