"""Takes a GGUF file's metadata; gives the config.json that Hugging Face would have for the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, ModelError

LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192  # of all Llama 3.x; the file has only their result
END_TOKENS = ("eos", "eot", "eom")  # tokenizer.ggml.<...>_token_id that end an answer


def llama_config(
    path: Path, metadata: Mapping[str, Any], tensors: set[str], dtype: str, rope_factors: np.ndarray | None
) -> dict[str, Any]:
    """Raises ModelError for another architecture, CheckpointError for a missing field."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{path}: general.architecture is {architecture!r}, supported: 'llama'")
    if metadata.get("llama.expert_count"):
        raise ModelError(f"{path}: llama.expert_count is {metadata['llama.expert_count']}, supported: 0")

    def need(name: str) -> Any:
        if f"llama.{name}" not in metadata:
            raise CheckpointError(f"{path}: llama.{name} is missing in the metadata")
        return metadata[f"llama.{name}"]

    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    rotary_dims = metadata.get("llama.rope.dimension_count", head_dim)
    if rotary_dims != head_dim:
        raise ModelError(f"{path}: llama.rope.dimension_count is {rotary_dims}, supported: {head_dim}, the whole head")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": vocabulary_rows(path, metadata),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": short_float(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": short_float(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(path, metadata, head_dim, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": dtype,
    }
    return config | token_fields(metadata)


def vocabulary_rows(path: Path, metadata: Mapping[str, Any]) -> int:
    """Rows of the embedding."""
    rows = metadata.get("llama.vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    if not rows:
        raise CheckpointError(f"{path}: neither llama.vocab_size nor tokenizer.ggml.tokens is in the metadata")
    return rows


def token_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, pad, and all ids that end an answer: one as a number, several as a list."""
    fields = {
        f"{name}_token_id": metadata[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in END_TOKENS]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if ends:
        fields["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return fields


def short_float(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def rope_scaling(
    path: Path, metadata: Mapping[str, Any], head_dim: int, factors: np.ndarray | None
) -> dict[str, Any] | None:
    """The rule that scales rotary frequencies, in config.json's words; None where there is none."""
    if factors is not None:
        return llama3_scaling(path, metadata, head_dim, factors)
    prefix = "llama.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    factor = metadata.get(prefix + "factor") or metadata.get("llama.rope.scale_linear")
    if kind == "none" and not metadata.get("llama.rope.scale_linear"):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": short_float(factor)} if factor and factor != 1 else None
    if kind != "yarn":
        raise ModelError(f"{path}: {prefix}type is {kind!r}, supported: none, linear, yarn")
    if not factor:
        raise CheckpointError(f"{path}: {prefix}factor is missing in the metadata")
    scaling = {"rope_type": "yarn", "factor": short_float(factor)}
    if prefix + "original_context_length" in metadata:
        scaling["original_max_position_embeddings"] = metadata[prefix + "original_context_length"]
    return scaling


def llama3_scaling(path: Path, metadata: Mapping[str, Any], head_dim: int, factors: np.ndarray) -> dict[str, Any]:
    """Find the factor whose llama3 rule gives these divisors. Raises ModelError where none does."""
    theta = metadata.get("llama.rope.freq_base", 10000.0)
    factor = short_float(factors.max())
    if factors.shape != (head_dim // 2,) or not np.allclose(
        factors, llama3_divisors(theta, head_dim, factor), rtol=1e-3
    ):
        raise ModelError(f"{path}: rope_freqs.weight does not follow the llama3 rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What the llama3 rule divides each frequency by, [head_dim / 2]."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (LLAMA3_ORIGINAL / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    return 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))
