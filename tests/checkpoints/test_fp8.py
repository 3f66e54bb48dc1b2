"""fp8 checkpoints made plain: values by hand, whole models, what does not fit, and what serving says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints.convert import plan
from checkpoints.fp8 import DequantizedReader, Scheme, dequantize, read_scheme
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.source import open_model
from jaxserve.errors import CheckpointError, ModelError
from scripts import convert_checkpoint
from tests.checkpoints import tiny
from tests.checkpoints.fp8_writer import FP8, quantise_blocks, quantise_channels

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head", r"re:.*layers\.0\.mlp\..*"],
}
ODD = tiny.CONFIG | {"intermediate_size": 40, "vocab_size": 72}  # no multiples of 16
Tensors = dict[str, np.ndarray]


def test_b121_blocks_at_the_edges() -> None:
    ones = np.ones((320, 256), np.float32).astype(FP8)
    found = dequantize(ones, np.array([[1, 2], [3, 4], [5, 6]], np.float32), (128, 128))
    places = {(120, 0): 1, (127, 128): 2, (128, 0): 3, (255, 0): 3, (256, 255): 6, (319, 0): 5}
    assert {place: found[place] for place in places} == places


@pytest.mark.parametrize("shape", [(576, 7168), (1, 128), (130, 1)])
def test_b121_other_shapes(shape: tuple[int, int]) -> None:
    scale = np.random.default_rng(0).uniform(0.5, 2, [-(-n // 128) for n in shape]).astype(np.float32)
    found = dequantize(np.full(shape, 1.5, np.float32).astype(FP8), scale, (128, 128))
    rows, columns = (np.arange(n) // 128 for n in shape)
    np.testing.assert_array_equal(found, 1.5 * scale[rows[:, None], columns])


def test_every_fp8_value() -> None:
    weight = np.arange(256, dtype=np.uint8).view(FP8).reshape(16, 16)
    right = weight.astype(np.float32)
    np.testing.assert_array_equal(dequantize(weight, np.array(1, np.float32), None), right)
    rows = np.arange(1, 17, dtype=np.float32)
    np.testing.assert_array_equal(dequantize(weight, rows[:, None], None), right * rows[:, None])


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.float8_e8m0fnu])
def test_b123_power_of_two_scales(stored: Any) -> None:
    """Divided by the exact scale 1 / 448 but stored with 2^-8, the largest would come back as 1.75."""
    weight = np.random.default_rng(0).uniform(-1, 1, (128, 128)).astype(np.float32)
    weight[5, 7] = 1.0
    quantised, scale = quantise_blocks(weight, power_of_two=True)
    assert scale.item() == 2.0**-8
    found = dequantize(quantised, scale.astype(stored), (128, 128))
    assert np.abs(found).max() == 1.0
    spacing = np.maximum(np.exp2(np.floor(np.log2(np.abs(weight)))) / 8, 2.0**-8 * 2.0**-9)
    assert (np.abs(found - weight) <= spacing / 2).all()


def quantised(config: dict[str, Any], fields: dict[str, Any], seed: int = 0) -> tuple[Tensors, Tensors]:
    """A checkpoint's tensors, and the plain ones that they stand for."""
    stored: Tensors = {}
    plain: Tensors = {}
    for name, array in tiny.random_tensors(config, seed=seed).items():
        stored[name] = plain[name] = array
        layers = "_proj.weight" in name
        if layers and fields is BLOCKS:
            stored[name], stored[f"{name}_scale_inv"] = quantise_blocks(array, (16, 16))
            plain[name] = dequantize(stored[name], stored[f"{name}_scale_inv"], (16, 16))
        elif layers and ".0.mlp." not in name:
            stored[name], stored[f"{name}_scale"] = quantise_channels(array)
            plain[name] = dequantize(stored[name], stored[f"{name}_scale"], None)
    return stored, plain


def write(folder: Path, fields: dict[str, Any], tensors: Tensors) -> Path:
    return tiny.write_model(folder / "model", ODD | {"quantization_config": fields}, tensors)


@pytest.mark.parametrize("fields", [BLOCKS, CHANNELS], ids=["blocks", "channels"])
def test_b121_a_whole_model_by_the_script(tmp_path: Path, fields: dict[str, Any]) -> None:
    stored, plain = quantised(ODD, fields)
    model = write(tmp_path, fields, stored)
    assert convert_checkpoint.main([str(model), str(tmp_path / "target"), "--dequantize"]) == 0
    source = open_model(tmp_path / "target")
    assert source.config == ODD  # it no longer speaks of quantisation
    tiny.assert_equal(source.load(tiny.wanted(ODD)), tiny.expected(ODD, plain))
    assert plan(model, tmp_path / "target", "auto", dequantize=True).identity.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "words"), [(BLOCKS, "fp8 in blocks of 16x16"), (CHANNELS, "fp8 with a scale for each output channel")]
)
def test_unasked_it_is_refused(tmp_path: Path, fields: dict[str, Any], words: str, capsys: Any) -> None:
    """By the conversion and by serving; both say how to go on."""
    model = write(tmp_path, fields, quantised(ODD, fields)[0])
    with pytest.raises(CheckpointError, match=f"{words}.*convert_checkpoint.py SOURCE TARGET --dequantize"):
        open_model(model).load(tiny.wanted(ODD))
    assert convert_checkpoint.main([str(model), str(tmp_path / "target")]) == 4
    assert "--dequantize" in capsys.readouterr().err


def test_a_plain_model_is_not_changed_by_the_flag(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    model = tiny.write_model(tmp_path / "model", tiny.CONFIG, tensors)
    reader = plan(model, tmp_path / "target", "auto", dequantize=True).reader
    assert isinstance(reader, SafetensorsReader)


def test_one_scale_for_the_tensor(tmp_path: Path) -> None:
    fields = json.loads(json.dumps(CHANNELS))
    fields["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    scheme = read_scheme({"quantization_config": fields})
    assert scheme is not None
    for scale in (np.array(0.5, np.float32), np.array([0.5], np.float32)):
        stored = {"x.weight": np.ones((3, 4), np.float32).astype(FP8), "x.weight_scale": scale}
        stored["x.input_scale"] = np.array(7, np.float32)  # of activations: nothing to a weight
        folder = tmp_path / str(scale.ndim)
        reader = DequantizedReader(SafetensorsReader(tiny.write_model(folder, {}, stored)), scheme)
        assert reader.tensors.keys() == {"x.weight"}
        np.testing.assert_array_equal(reader.read("x.weight"), np.full((3, 4), 0.5, np.float32))


NAME = "model.layers.1.mlp.up_proj.weight"
CHANGES: dict[str, tuple[dict[str, Any], Callable[[Tensors], object], str]] = {
    "no scale": (BLOCKS, lambda t: t.pop(f"{NAME}_scale_inv"), f"without a scale: {NAME}"),
    "no weight": (BLOCKS, lambda t: t.update({NAME: np.ones((40, 32), np.float32)}), f"without an fp8 weight: {NAME}_"),
    "guessed block": (
        BLOCKS,
        lambda t: t.update({f"{NAME}_scale_inv": np.ones((2, 2), np.float32)}),
        rf"{NAME}_scale_inv float32\[2, 2\], expected \[3, 2\]",
    ),
    "scales of rows": (
        BLOCKS,
        lambda t: t.update({f"{NAME}_scale": t.pop(f"{NAME}_scale_inv")}),
        f"without a scale: {NAME}",
    ),
    "integer scale": (
        BLOCKS,
        lambda t: t.update({f"{NAME}_scale_inv": np.ones((3, 2), np.int8)}),
        f"scales that are no floats: {NAME}_scale_inv int8",
    ),
    "too few rows": (
        CHANNELS,
        lambda t: t.update({f"{NAME}_scale": np.ones((32, 1), np.float32)}),
        rf"{NAME}_scale float32\[32, 1\], expected \[40, 1\] or \[40\]",
    ),
    "ignored": (
        CHANNELS,
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((40, 32), np.float32).astype(FP8)}),
        "ignore names them: model.layers.0.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit(tmp_path: Path, change: str) -> None:
    fields, apply, words = CHANGES[change]
    stored, _ = quantised(ODD, fields)
    apply(stored)
    with pytest.raises(CheckpointError, match=words) as caught:
        plan(write(tmp_path, fields, stored), tmp_path / "target", "auto", dequantize=True)
    assert "\n" not in str(caught.value)


def with_weights(**changed: Any) -> dict[str, Any]:
    return CHANNELS | {"config_groups": {"group_0": {"weights": WEIGHTS | changed}}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq', supported: 'fp8', 'compressed-tensors'"),
        ("fp8", "quantization_config is .fp8., expected: an object"),
        (BLOCKS | {"weight_block_size": [128]}, r"weight_block_size is \[128\], expected: \[rows, columns\]"),
        (BLOCKS | {"weight_block_size": None}, "weight_block_size is None"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt is 'e5m2', supported: 'e4m3'"),
        (with_weights(num_bits=4, type="int", strategy="group"), "int 4 group, supported: float 8 channel"),
        (CHANNELS | {"config_groups": {}}, "holds weights of nothing"),
        (CHANNELS | {"config_groups": ["Linear"]}, "holds weights of nothing"),
    ],
)
def test_schemes_that_are_not_known(fields: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_scheme({"quantization_config": fields})


def test_scheme_is_dispatched_on_the_method_and_not_the_family() -> None:
    """Both kinds are published for the same family."""
    assert read_scheme({"model_type": "glm4_moe"}) is None
    assert read_scheme({"quantization_config": BLOCKS}) == Scheme("weight_scale_inv", block=(16, 16))
    scheme = read_scheme({"quantization_config": CHANNELS})
    assert scheme is not None and (scheme.scale, scheme.per_row) == ("weight_scale", True)
