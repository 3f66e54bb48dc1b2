"""Multi-token prediction layers: kept by a conversion, left out whole by serving, never half there without a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.convert import convert, is_finished, plan
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.restore import restore
from checkpoints.source import open_model
from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import parameter_shapes
from jaxserve.models.families import model_spec
from scripts import convert_checkpoint
from tests.checkpoints import tiny

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "deepseek_v3_tiny" / "groups-yarn-mtp"
LAYER = "model.layers.3."  # the MTP layer's
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    reader = SafetensorsReader(GOLDEN)
    return {name: reader.read(name) for name in reader.tensors}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("mtp") / "target"
    convert(plan(GOLDEN, target, "auto"))
    return target


def changed(tmp_path: Path, tensors: Tensors, change: Callable[[Tensors], object]) -> Path:
    """The golden checkpoint with other tensors."""
    changed_ = dict(tensors)
    change(changed_)
    return tiny.write_model(tmp_path / "model", json.loads((GOLDEN / "config.json").read_text()), changed_)


def wanted(with_mtp: bool) -> dict[str, jax.ShapeDtypeStruct]:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = parameter_shapes(model_spec(json.loads((GOLDEN / "config.json").read_text())), with_mtp=with_mtp)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for name, leaf in leaves.items()}


def refuse(model: Path, *words: str) -> None:
    """By the conversion, and by loading straight from the files, with the layer and without."""
    for attempt in (
        lambda: plan(model, model.with_name("target"), "auto"),
        lambda: open_model(model).load(wanted(True)),
        lambda: open_model(model).load(wanted(False)),
    ):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        for word in words:
            assert word in str(caught.value)


def test_b125_a_tensor_of_the_layer_is_missing(tmp_path: Path, tensors: Tensors) -> None:
    model = changed(tmp_path, tensors, lambda all_: all_.pop(LAYER + "eh_proj.weight"))
    refuse(model, f"missing: {LAYER}eh_proj.weight")


def test_b125_names_at_the_top_level(tmp_path: Path, tensors: Tensors) -> None:
    def move(all_: Tensors) -> None:
        all_["mtp.norm.weight"] = all_.pop(LAYER + "shared_head.norm.weight")
        all_["mtp.embed_tokens.weight"] = all_.pop(LAYER + "embed_tokens.weight")

    words = (f"missing: {LAYER}shared_head.norm.weight", "unknown: mtp.embed_tokens.weight, mtp.norm.weight")
    refuse(changed(tmp_path, tensors, move), *words)


def test_b125_a_wrong_norm_of_its_own(tmp_path: Path, tensors: Tensors) -> None:
    def widen(all_: Tensors) -> None:
        all_[LAYER + "enorm.weight"] = np.ones(7, np.float32)
        all_[LAYER + "norm.weight"] = np.ones(7, np.float32)

    model = changed(tmp_path, tensors, widen)
    refuse(model, f"misshapen: {LAYER}enorm.weight float32[7]", f"unknown: {LAYER}norm.weight")


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_b125_an_embedding_or_head_of_its_own(tmp_path: Path, tensors: Tensors, name: str) -> None:
    """The decoder's once more: absent is fine, different is not."""

    def change(all_: Tensors) -> None:
        all_[LAYER + name] = all_[LAYER + name] + np.asarray(1, all_[LAYER + name].dtype)

    other = changed(tmp_path / "other", tensors, change)
    with pytest.raises(CheckpointError, match=f"{LAYER}{name} differs from"):
        plan(other, tmp_path / "target", "auto")
    with pytest.raises(CheckpointError, match=f"{LAYER}{name} differs from"):
        open_model(other).load(wanted(True))
    open_model(other).load(wanted(False))  # not read, so not compared: the matrices are the largest there are
    plan(changed(tmp_path / "absent", tensors, lambda all_: all_.pop(LAYER + name)), tmp_path / "t", "auto")


def drop_layer(all_: Tensors) -> None:
    for name in [name for name in all_ if name.startswith(LAYER)]:
        del all_[name]


def test_files_without_the_layer_that_the_config_names(tmp_path: Path, tensors: Tensors) -> None:
    """Uploads that were quantised anew often are like that. Serving needs nothing of it; a conversion asks."""
    model = changed(tmp_path, tensors, drop_layer)
    assert open_model(model).load(wanted(False)).keys() == wanted(False).keys()
    with pytest.raises(CheckpointError, match=f"missing: {LAYER}e"):
        open_model(model).load(wanted(True))
    with pytest.raises(CheckpointError, match=r"names 1 MTP layer\(s\) and the files hold nothing.*--without-mtp"):
        plan(model, tmp_path / "target", "auto")
    assert convert_checkpoint.main([str(model), str(tmp_path / "target"), "--without-mtp"]) == 0
    source = open_model(tmp_path / "target")
    assert source.config["num_nextn_predict_layers"] == 0
    tiny.assert_equal(
        source.load(wanted(False)), {k: np.asarray(v) for k, v in open_model(model).load(wanted(False)).items()}
    )
    with pytest.raises(CheckpointError, match=r"missing: mtp.0.embed_norm.scale"):
        source.load(wanted(True))


def test_without_mtp_on_files_that_have_it(tmp_path: Path, converted: Path, tensors: Tensors) -> None:
    """The layer is left out, whatever state it is in, and the record says so."""
    half = changed(tmp_path, tensors, lambda all_: all_.pop(LAYER + "eh_proj.weight"))
    assert plan(half, tmp_path / "target", "auto", without_mtp=True).tensors().keys() == wanted(False).keys()
    conversion = plan(GOLDEN, tmp_path / "target", "auto", without_mtp=True)
    convert(conversion)
    assert conversion.tensors().keys() == wanted(False).keys()
    assert is_finished(conversion)
    with pytest.raises(CheckpointError, match="it was made without MTP layers"):
        is_finished(plan(GOLDEN, tmp_path / "target", "auto"))
    shutil.copytree(converted, tmp_path / "with")
    with pytest.raises(CheckpointError, match="it was made with MTP layers"):
        is_finished(plan(GOLDEN, tmp_path / "with", "auto", without_mtp=True))


def test_b127_serving_leaves_out_all_of_it_or_nothing(converted: Path) -> None:
    weights = converted / "weights"
    assert restore(weights, wanted(False)).keys() == wanted(False).keys()
    assert restore(weights, wanted(True)).keys() == wanted(True).keys()
    half = wanted(True)
    del half["mtp.0.project"]
    with pytest.raises(CheckpointError, match="extra: mtp.0.project"):
        restore(weights, half)
    fewer = wanted(False)
    del fewer["layers.2.attention.down"]
    with pytest.raises(CheckpointError, match="extra: layers.2.attention.down$"):
        restore(weights, fewer)
