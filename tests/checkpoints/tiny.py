"""A tiny random Llama as files: a Hugging Face directory in one or several shards, and what the decoder should hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from checkpoints.export import write_safetensors
from checkpoints.readers.reader import TensorInfo
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes, written down independently of checkpoints/names."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        found |= {p + "input_layernorm.weight": (hidden,), p + "post_attention_layernorm.weight": (hidden,)}
        found |= {p + "self_attn.q_proj.weight": (q, hidden), p + "self_attn.k_proj.weight": (kv, hidden)}
        found |= {p + "self_attn.v_proj.weight": (kv, hidden), p + "self_attn.o_proj.weight": (hidden, q)}
        found |= {p + "mlp.gate_proj.weight": (width, hidden), p + "mlp.up_proj.weight": (width, hidden)}
        found |= {p + "mlp.down_proj.weight": (hidden, width)}
        if config.get("attention_bias"):
            found |= {p + f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv), ("o", hidden))}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    return found


def random_tensors(config: Mapping[str, Any], dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the model."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes(config).items()}


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file."""
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in tensors.items()}
    write_safetensors(path, infos, tensors.items())


def write_model(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], shards: int = 1) -> Path:
    """A Hugging Face directory."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    if shards == 1:
        write_file(directory / "model.safetensors", tensors)
        return directory
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[shard::shards]
        write_file(directory / name, {key: tensors[key] for key in names})
        weight_map |= dict.fromkeys(names, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def wanted(config: Mapping[str, Any], dtype: str = "bfloat16", devices: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """What the runtime asks a source for."""
    split = split_decoder(model_spec(dict(config)), jax.numpy.dtype(dtype), make_mesh(jax.devices(), devices))
    return dict(zip(split.names, split.leaves, strict=True))


def expected(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The decoder's parameters, put together head by head from the description of the layout."""
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    group = heads // kv_heads
    found = {"embed.weight": tensors["model.embed_tokens.weight"], "norm.scale": tensors["model.norm.weight"]}
    for i in range(config["num_hidden_layers"]):
        p, t = f"model.layers.{i}.", f"layers.{i}."
        for kind in ("weight", "bias") if config.get("attention_bias") else ("weight",):
            q, k, v = (tensors[f"{p}self_attn.{name}_proj.{kind}"] for name in "qkv")
            rows = []
            for n in range(kv_heads):
                rows += [q[(n * group + g) * dim : (n * group + g + 1) * dim] for g in range(group)]
                rows += [k[n * dim : (n + 1) * dim], v[n * dim : (n + 1) * dim]]
            whole = np.stack(rows)
            name = "attention.qkv" if kind == "weight" else "attention.qkv_bias"
            found[t + name] = whole.reshape(kv_heads, group + 2, *whole.shape[1:])
        out = tensors[p + "self_attn.o_proj.weight"]
        found[t + "attention.out"] = np.stack([out[:, h * dim : (h + 1) * dim] for h in range(heads)], 1).reshape(
            len(out), kv_heads, group, dim
        )
        if config.get("attention_bias"):
            found[t + "attention.out_bias"] = tensors[p + "self_attn.o_proj.bias"]
        found[t + "attention_norm.scale"] = tensors[p + "input_layernorm.weight"]
        found[t + "mlp_norm.scale"] = tensors[p + "post_attention_layernorm.weight"]
        found[t + "mlp.gate_up"] = np.stack([tensors[p + f"mlp.{name}_proj.weight"] for name in ("gate", "up")])
        found[t + "mlp.down"] = tensors[p + "mlp.down_proj.weight"]
    if not config["tie_word_embeddings"]:
        found["head.weight"] = tensors["lm_head.weight"]
    return found


def assert_equal(found: Mapping[str, Any], right: Mapping[str, np.ndarray]) -> None:
    """Bit for bit, after the right values are cast to what was found."""
    assert found.keys() == right.keys()
    for name, array in found.items():
        host = np.asarray(array)
        assert host.shape == right[name].shape, name
        assert host.tobytes() == right[name].astype(host.dtype).tobytes(), name
