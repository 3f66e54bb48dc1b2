"""The demo model's two GLM forms, made of a tiny Llama: their files fit, and their slices are the same function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import smollm2_forms
from checkpoints.assemble import check_names
from checkpoints.export import export
from checkpoints.names.families import name_table
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.smollm2_forms import FORMS, FormReader
from jaxserve.models.families import model_spec
from tests.checkpoints import tiny

CONFIG: dict[str, Any] = tiny.CONFIG | {
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "mlp_bias": False,
    "rope_theta": 1e5,
    "rope_scaling": None,
}
CACHE = Path(__file__).resolve().parents[2] / ".cache"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SafetensorsReader:
    tensors = tiny.random_tensors(CONFIG, np.float32)
    model = tiny.write_model(tmp_path_factory.mktemp("forms") / "llama", CONFIG, tensors)
    (model / "tokenizer.json").write_text("{}")
    return SafetensorsReader(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_whole_checkpoint(tmp_path: Path, llama: SafetensorsReader, form: str, dtype: str) -> None:
    export(FormReader(llama, form, dtype), tmp_path / form)
    reader = SafetensorsReader(tmp_path / form)
    spec = model_spec(reader.config)
    check_names(reader, name_table(reader.config["model_type"], spec))
    assert reader.config == json.loads((tmp_path / form / "config.json").read_text())
    assert (spec.dtype, spec.mtp_layers, spec.tie_embeddings) == (dtype, 0, True)
    assert [spec.is_moe(i) for i in range(2)] == [form == "moe"] * 2
    old = model_spec(CONFIG)
    assert spec.attention == old.attention  # whole heads rotate, no norms, no bias
    bias = "gate.e_score_correction_bias"
    kinds = {info.dtype.name for name, info in reader.tensors.items() if not name.endswith(bias)}
    assert kinds == {dtype}
    assert (tmp_path / form / "tokenizer.json").is_file()


def test_dense_tensors_are_the_same(llama: SafetensorsReader) -> None:
    dense = FormReader(llama, "dense", "float32")
    assert dense.tensors == llama.tensors
    tiny.assert_equal({name: dense.read(name) for name in dense.tensors}, {n: llama.read(n) for n in llama.tensors})


def mlp(reader: Any, prefix: str, x: np.ndarray) -> np.ndarray:
    gate, up, down = (reader.read(f"{prefix}.{name}_proj.weight").astype(np.float64) for name in ("gate", "up", "down"))
    return (x @ gate.T / (1 + np.exp(-x @ gate.T)) * (x @ up.T)) @ down.T


def test_slices_are_the_same_function(llama: SafetensorsReader) -> None:
    """Scores of a zero router are 1/2 each; normalised and times the scale, each weight is 1."""
    moe = FormReader(llama, "moe", "float32")
    config, block = moe.config, "model.layers.1.mlp"
    x = np.random.default_rng(1).standard_normal((5, config["hidden_size"]))
    scores = 1 / (1 + np.exp(-x @ moe.read(f"{block}.gate.weight").T))
    weights = scores / scores.sum(1, keepdims=True) * config["routed_scaling_factor"]
    assert weights.shape[1] == config["n_routed_experts"] == config["num_experts_per_tok"]
    assert not moe.read(f"{block}.gate.e_score_correction_bias").any()
    found = mlp(moe, f"{block}.shared_experts", x)
    for i in range(config["n_routed_experts"]):
        found += weights[:, i : i + 1] * mlp(moe, f"{block}.experts.{i}", x)
    np.testing.assert_allclose(found, mlp(llama, block, x), rtol=1e-12, atol=1e-12)


@pytest.mark.smollm2
def test_made_once_from_the_real_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in FORMS:
        reader = SafetensorsReader(smollm2_forms.fetch_form(CACHE, form))
        check_names(reader, name_table("glm4_moe", model_spec(reader.config)))
    monkeypatch.setattr(smollm2_forms, "export", None)
    assert smollm2_forms.fetch_form(CACHE, "moe") == CACHE / "smollm2-glm-moe-float32"
