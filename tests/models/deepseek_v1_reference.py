"""The first DeepSeek MoE model (`model_type` deepseek), plainly in numpy: transformers has no class to compare with.

Written from Dai et al. 2024 (arXiv 2401.06066), equations 1 to 11: a Llama (multi-head attention, rotary halves,
RMSNorm, SwiGLU) whose layers after the first have fine-grained routed experts and always-active shared ones in place
of the feed-forward. The gate is the softmax over all routed experts, of which the best k are kept as they are: without
`norm_topk_prob` they do not sum to one. Imports numpy alone, as the script that makes the goldens runs it by its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def logits(config: Mapping[str, Any], weights: Weights, ids: np.ndarray) -> np.ndarray:
    """float32 [T, V]: at each position, of a sequence of T ids. Weights are float32 [out, in] by checkpoint name."""
    eps = config["rms_norm_eps"]
    hidden_TD = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        block = {name: value for name, value in below(weights, f"model.layers.{layer}.").items()}
        normed_TD = rms_norm(hidden_TD, block["input_layernorm.weight"], eps)
        hidden_TD = hidden_TD + attention(config, below(block, "self_attn."), normed_TD)
        normed_TD = rms_norm(hidden_TD, block["post_attention_layernorm.weight"], eps)
        feed_forward = below(block, "mlp.")
        if layer < config["first_k_dense_replace"]:
            hidden_TD = hidden_TD + swiglu(feed_forward, normed_TD)
        else:
            hidden_TD = hidden_TD + experts(config, feed_forward, normed_TD)
    return rms_norm(hidden_TD, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def below(weights: Weights, prefix: str) -> dict[str, np.ndarray]:
    """The weights under a name, by the rest of theirs."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def rms_norm(x_TD: np.ndarray, scale_D: np.ndarray, eps: float) -> np.ndarray:
    """x / rms(x) * scale."""
    return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + np.float32(eps)) * scale_D


def attention(config: Mapping[str, Any], weights: Weights, x_TD: np.ndarray) -> np.ndarray:
    """Causal multi-head attention; as many key heads as query heads."""
    heads, tokens = config["num_attention_heads"], len(x_TD)
    q_HTE, k_HTE, v_HTE = (
        (x_TD @ weights[f"{name}_proj.weight"].T).reshape(tokens, heads, -1).transpose(1, 0, 2) for name in "qkv"
    )
    q_HTE, k_HTE = (rotate(x_HTE, config["rope_theta"]) for x_HTE in (q_HTE, k_HTE))
    scores_HTS = q_HTE @ k_HTE.transpose(0, 2, 1) / np.sqrt(np.float32(q_HTE.shape[-1]))
    scores_HTS = np.where(np.tri(tokens, dtype=bool), scores_HTS, -np.inf)
    out_THE = (softmax(scores_HTS) @ v_HTE).transpose(1, 0, 2)
    return out_THE.reshape(tokens, -1) @ weights["o_proj.weight"].T


def rotate(x_HTE: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding, Llama's layout: dimension i turns with i + E/2, by the position times theta^(-2i/E)."""
    half = x_HTE.shape[-1] // 2
    frequencies = np.float32(theta) ** (-np.arange(half, dtype=np.float32) / half)
    angle_TE = np.arange(x_HTE.shape[1], dtype=np.float32)[:, None] * frequencies
    first, second = x_HTE[..., :half], x_HTE[..., half:]
    cos, sin = np.cos(angle_TE), np.sin(angle_TE)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def swiglu(weights: Weights, x_TD: np.ndarray) -> np.ndarray:
    """down(silu(gate x) * up x)."""
    gate_TF, up_TF = x_TD @ weights["gate_proj.weight"].T, x_TD @ weights["up_proj.weight"].T
    return (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ weights["down_proj.weight"].T


def experts(config: Mapping[str, Any], weights: Weights, x_TD: np.ndarray) -> np.ndarray:
    """Shared experts, which are one wide feed-forward, and for each token the best routed ones times their gates."""
    gate_TX = softmax(x_TD @ weights["gate.weight"].T)
    best_TK = np.argsort(-gate_TX, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    kept_TK = np.take_along_axis(gate_TX, best_TK, axis=-1)
    if config["norm_topk_prob"]:
        kept_TK = kept_TK / kept_TK.sum(-1, keepdims=True)
    out_TD = swiglu(below(weights, "shared_experts."), x_TD)
    for expert in range(config["n_routed_experts"]):
        token, place = np.nonzero(best_TK == expert)
        if len(token):
            out_TD[token] += kept_TK[token, place, None] * swiglu(below(weights, f"experts.{expert}."), x_TD[token])
    return out_TD
