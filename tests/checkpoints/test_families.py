"""Each family's tiny checkpoints, as transformers saved them: converted by the script, restored, read backwards."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoints.assemble import assemble, take_apart
from checkpoints.convert import plan
from checkpoints.names.families import TABLES, name_table
from checkpoints.names.table import NameTable
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.source import open_model
from jaxserve.models.decoder import parameter_shapes
from jaxserve.models.families import model_spec
from jaxserve.models.spec import ModelSpec
from scripts import convert_checkpoint
from tests.checkpoints import tiny

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
ALL = sorted(f"{path.parent.name}/{path.name}" for path in GOLDENS.glob("*_tiny/*") if path.is_dir())
FLOAT32 = ("mlp.router", "mlp.router_bias")


def opened(name: str) -> tuple[SafetensorsReader, ModelSpec, NameTable]:
    reader = SafetensorsReader(GOLDENS / name)
    spec = model_spec(reader.config)
    return reader, spec, name_table(reader.config["model_type"], spec)


def wanted(spec: ModelSpec, dtype: str = "bfloat16", with_mtp: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = parameter_shapes(spec, jax.numpy.dtype(dtype), with_mtp)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for name, leaf in leaves.items()}


def test_each_family_is_there() -> None:
    assert {json.loads((GOLDENS / name / "config.json").read_text())["model_type"] for name in ALL} == TABLES.keys()


@pytest.mark.parametrize("name", ALL)
def test_converted_by_the_script(tmp_path: Path, name: str) -> None:
    """Every name is used; what is restored is what reading the files gives, bit for bit, MTP layers left out or not."""
    assert convert_checkpoint.main([str(GOLDENS / name), str(tmp_path / "target")]) == 0
    reader, spec, table = opened(name)
    for with_mtp in {False, spec.mtp_layers > 0}:
        asked = wanted(spec, with_mtp=with_mtp)
        found = open_model(tmp_path / "target").load(asked)
        direct = open_model(GOLDENS / name).load(asked)
        right = {key: assemble(reader, table.targets[key], np.dtype(leaf.dtype)) for key, leaf in asked.items()}
        tiny.assert_equal(found, right)
        tiny.assert_equal(direct, right)
        assert {key: array.dtype for key, array in found.items()} == {key: leaf.dtype for key, leaf in asked.items()}


@pytest.mark.parametrize("name", ALL)
def test_b131_round_trip_is_bit_for_bit(name: str) -> None:
    reader, _, table = opened(name)
    arrays = {key: assemble(reader, target, np.dtype(np.float64)) for key, target in table.targets.items()}
    back = take_apart(table, arrays)
    left = set(reader.tensors) - set(back)
    assert left <= table.duplicates.keys() | {"transformer.rotary_pos_emb.inv_freq"}
    tiny.assert_equal(
        {key: array.astype(reader.tensors[key].dtype) for key, array in back.items()},
        {key: reader.read(key) for key in back},
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_routers_stay_in_float32(tmp_path: Path, dtype: str) -> None:
    """Whatever --dtype says: a bias of bfloat16 would choose other experts."""
    conversion = plan(GOLDENS / "deepseek_v3_tiny" / "groups-yarn-mtp", tmp_path / "target", dtype)
    for name, info in conversion.tensors().items():
        assert info.dtype == np.dtype("float32" if name.endswith(FLOAT32) else dtype), name


def heads_of(reader: SafetensorsReader, name: str, heads: int) -> np.ndarray:
    """Rows of a matrix by head."""
    whole = reader.read(f"model.layers.1.{name}.weight")
    return whole.reshape(heads, -1, whole.shape[1])


def test_latent_attention_takes_the_right_rows() -> None:
    """Written down head by head, for a model with a low-rank query."""
    reader, spec, table = opened("deepseek_v3_tiny/groups-yarn-mtp")
    config = reader.config
    nope, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
    found = {
        key: assemble(reader, table.targets[f"layers.1.attention.{key}"], np.dtype(ml_dtypes.bfloat16))
        for key in ("down", "q", "key_up", "value_up", "out")
    }
    down = [reader.read(f"model.layers.1.self_attn.{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    kv, out = heads_of(reader, "self_attn.kv_b_proj", heads), reader.read("model.layers.1.self_attn.o_proj.weight")
    value = config["v_head_dim"]
    right = {
        "down": np.concatenate(down),
        "q": heads_of(reader, "self_attn.q_b_proj", heads),
        "key_up": kv[:, :nope],
        "value_up": kv[:, nope:],
        "out": np.stack([out[:, h * value : (h + 1) * value] for h in range(heads)], axis=1),
    }
    tiny.assert_equal(found, right)


def test_experts_are_stacked_in_their_order() -> None:
    reader, spec, table = opened("deepseek_v3_tiny/groups-yarn-mtp")
    assert spec.moe is not None
    for ours, theirs in (("layers.2", "model.layers.2"), ("mtp.0.layer", "model.layers.3")):
        gate_up, down = (
            assemble(reader, table.targets[f"{ours}.mlp.experts_{name}"], np.dtype(ml_dtypes.bfloat16))
            for name in ("gate_up", "down")
        )
        for i in range(spec.moe.num_experts):
            expert = f"{theirs}.mlp.experts.{i}"
            right = [reader.read(f"{expert}.{name}_proj.weight") for name in ("gate", "up", "down")]
            tiny.assert_equal(
                dict(zip("gud", (*gate_up[i], down[i]), strict=True)), dict(zip("gud", right, strict=True))
            )


def test_the_original_names_make_the_same_parameters() -> None:
    """chatglm's fused rows are all queries, all keys, all values; glm's are apart."""
    reader, spec, table = opened("chatglm_tiny/chat")
    config = reader.config
    kv_heads, dim = config["multi_query_group_num"], config["kv_channels"]
    queries = config["num_attention_heads"] * dim
    layer = "transformer.encoder.layers.1"
    for kind in ("weight", "bias"):
        rows = reader.read(f"{layer}.self_attention.query_key_value.{kind}")
        q, k, v = np.split(rows, [queries, queries + kv_heads * dim])
        q, k, v = (part.reshape(kv_heads, -1, dim, *part.shape[1:]) for part in (q, k, v))
        name = "layers.1.attention.qkv" + ("_bias" if kind == "bias" else "")
        found = assemble(reader, table.targets[name], rows.dtype)
        tiny.assert_equal({"qkv": found}, {"qkv": np.concatenate((q, k, v), axis=1)})
    width = config["ffn_hidden_size"]
    both = reader.read(f"{layer}.mlp.dense_h_to_4h.weight")
    found = assemble(reader, table.targets["layers.1.mlp.gate_up"], both.dtype)
    tiny.assert_equal({"gate_up": found}, {"gate_up": np.stack((both[:width], both[width:]))})


def test_norms_around_both_blocks() -> None:
    reader, _, table = opened("glm4_tiny/bias")
    sources = {"attention_norm": "input_layernorm", "attention_post_norm": "post_self_attn_layernorm"}
    sources |= {"mlp_norm": "post_attention_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
    for ours, theirs in sources.items():
        found = assemble(reader, table.targets[f"layers.0.{ours}.scale"], np.dtype(ml_dtypes.bfloat16))
        tiny.assert_equal({ours: found}, {ours: reader.read(f"model.layers.0.{theirs}.weight")})
