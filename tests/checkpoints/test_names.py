"""Name tables: they fill the decoder exactly, read backwards without loss, and say what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.assemble import assemble, check_names, take_apart
from checkpoints.load import load_weights
from checkpoints.names.families import TABLES, name_table
from checkpoints.names.table import Cut, NameTable, Part, Piece, Target, covers, joined, plain
from checkpoints.readers.safetensors import SafetensorsReader
from jaxserve.errors import CheckpointError, ModelError
from jaxserve.models.decoder import parameter_shapes
from jaxserve.models.families import FAMILIES, model_spec
from tests.checkpoints import tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "wide head": {"head_dim": 16},
}


def table_of(config: dict[str, Any]) -> NameTable:
    return name_table(config["model_type"], model_spec(config))


def test_each_family_has_a_table() -> None:
    assert TABLES.keys() == FAMILIES.keys()


def test_unknown_family() -> None:
    with pytest.raises(ModelError, match=r"'mamba'.*chatglm, deepseek, .*llama"):
        name_table("mamba", model_spec(tiny.CONFIG))


@pytest.mark.parametrize("variant", VARIANTS)
def test_table_fills_the_decoder_from_the_right_rows(tmp_path: Path, variant: str) -> None:
    config = tiny.CONFIG | VARIANTS[variant]
    tensors = tiny.random_tensors(config)
    reader = SafetensorsReader(tiny.write_model(tmp_path / "model", config, tensors, shards=3))
    table = table_of(config)
    check_names(reader, table)
    assert {name: target.shape for name, target in table.targets.items()} == {
        name: leaf.shape for name, leaf in parameter_shapes(model_spec(config)).items()
    }
    found = {name: assemble(reader, target, np.dtype("bfloat16")) for name, target in table.targets.items()}
    tiny.assert_equal(found, tiny.expected(config, tensors))


@pytest.mark.parametrize("variant", VARIANTS)
def test_b131_round_trip_is_bit_for_bit(tmp_path: Path, variant: str) -> None:
    """Hugging Face -> ours -> Hugging Face; its logits are compared in test_goldens.py."""
    config = tiny.CONFIG | VARIANTS[variant]
    tensors = tiny.random_tensors(config)
    reader = SafetensorsReader(tiny.write_model(tmp_path / "model", config, tensors))
    table = table_of(config)
    arrays = {name: assemble(reader, target, np.dtype("bfloat16")) for name, target in table.targets.items()}
    tiny.assert_equal(take_apart(table, arrays), tensors)


def check(tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    check_names(SafetensorsReader(tiny.write_model(tmp_path / "model", config, tensors)), table_of(config))


def test_missing_unknown_and_misshapen_are_all_named(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()
    with pytest.raises(CheckpointError) as caught:
        check(tmp_path, tiny.CONFIG, tensors)
    text = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in text
    assert "unknown: model.layers.2.mlp.up_proj.weight" in text
    assert "misshapen: lm_head.weight bfloat16[32, 64], expected [64, 32]" in text


def test_long_lists_are_cut(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    with pytest.raises(CheckpointError, match="and 10 more"):
        check(tmp_path, tiny.CONFIG, {name: tensors[name] for name in list(tensors)[18:]})


def test_quantised_weights_are_not_cast(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    with pytest.raises(CheckpointError, match=r"not float32, float16 or bfloat16: lm_head.weight int8"):
        check(tmp_path, tiny.CONFIG, tensors)


def test_inverse_frequencies_are_ignored(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    check(tmp_path, tiny.CONFIG, tensors)


TIED = tiny.CONFIG | {"tie_word_embeddings": True}


def test_b119_tied_head_absent_from_the_file(tmp_path: Path) -> None:
    """There is one matrix by rule: the decoder has no head to leave unfilled. test_convert.py restores it."""
    assert "head.weight" not in table_of(TIED).targets
    check(tmp_path, TIED, tiny.random_tensors(TIED))


def test_b119_tied_head_in_the_file_must_equal_the_embedding(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)
    check(tmp_path / "equal", TIED, tensors)
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
        check(tmp_path / "other", TIED, tensors)


def test_b119_untied_head_absent_from_the_file(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match="missing: lm_head.weight"):
        check(tmp_path, tiny.CONFIG, tensors)


def test_stacked_pieces(tmp_path: Path) -> None:
    """Experts: numbered pieces of one shape along a new first axis, each made of several tensors."""
    rng = np.random.default_rng(0)
    tensors = {f"experts.{e}.{name}": rng.standard_normal((3, 4)).astype(np.float32) for e in range(5) for name in "gu"}
    target = Target(
        tuple(Piece(tuple(Part(f"experts.{e}.{n}", (3, 4), (1, 3, 4)) for n in "gu")) for e in range(5)), stacked=True
    )
    reader = SafetensorsReader(tiny.write_model(tmp_path / "model", {}, tensors))
    table = NameTable({"experts": target})
    check_names(reader, table)
    whole = assemble(reader, target, np.dtype(np.float32))
    assert whole.shape == target.shape == (5, 2, 3, 4)
    np.testing.assert_array_equal(whole[3], np.stack([tensors["experts.3.g"], tensors["experts.3.u"]]))
    tiny.assert_equal(take_apart(table, {"experts": whole}), tensors)


def test_a_table_that_does_not_fit_the_decoder(tmp_path: Path) -> None:
    table = table_of(tiny.CONFIG)
    targets = dict(table.targets) | {
        "norm.scale": plain("model.norm.weight", (32,), (4, 8)),
        "more": joined(0, Part("lm_head.weight", (64, 32), (64, 32))),
    }
    del targets["embed.weight"]
    reader = SafetensorsReader(tiny.write_model(tmp_path / "model", tiny.CONFIG, tiny.random_tensors(tiny.CONFIG)))
    with pytest.raises(
        CheckpointError, match=r"without a source: embed.weight; unknown .*: more; misshapen: norm.scale"
    ):
        load_weights(reader, NameTable(targets), tiny.wanted(tiny.CONFIG))


def cut(start: int, stop: int, view: tuple[int, ...] = (2, 6), axis: int = 1) -> Part:
    return Part("x", (12,), (2, stop - start), Cut(view, axis, start, stop))


WHOLE = Part("x", (12,), (3, 4))
COVERS = [
    ([WHOLE], True),
    ([cut(0, 2), cut(2, 6)], True),
    ([cut(2, 6), cut(0, 2)], True),
    ([cut(0, 6)], True),
    ([WHOLE, WHOLE], False),
    ([WHOLE, cut(0, 6)], False),
    ([cut(0, 2), cut(3, 6)], False),
    ([cut(0, 3), cut(2, 6)], False),
    ([cut(0, 2), cut(2, 5)], False),
    ([cut(1, 6)], False),
    ([cut(0, 2), cut(2, 6, view=(2, 2, 3))], False),
]


@pytest.mark.parametrize(("parts", "right"), COVERS)
def test_each_element_is_taken_once(parts: list[Part], right: bool) -> None:
    assert covers(parts) == right


def test_a_table_that_takes_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    table = NameTable({"a": plain("x", (4,)), "b": plain("x", (4,))})
    reader = SafetensorsReader(tiny.write_model(tmp_path / "model", {}, {"x": np.ones(4, np.float32)}))
    with pytest.raises(AssertionError, match="once"):
        check_names(reader, table)


def test_cuts_there_and_back(tmp_path: Path) -> None:
    """Of each head's rows the first ones go here and the others there."""
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    parts = [Part("x", (12, 2), (3, n, 2), Cut((3, 4, 2), 1, at, at + n)) for at, n in ((0, 1), (1, 3))]
    table = NameTable({name: joined(0, part) for name, part in zip("ab", parts, strict=True)})
    reader = SafetensorsReader(tiny.write_model(tmp_path / "model", {}, {"x": x}))
    check_names(reader, table)
    arrays = {name: assemble(reader, target, np.dtype(np.float32)) for name, target in table.targets.items()}
    np.testing.assert_array_equal(arrays["a"][1], [[8, 9]])
    np.testing.assert_array_equal(arrays["b"][1], [[10, 11], [12, 13], [14, 15]])
    tiny.assert_equal(take_apart(table, arrays), {"x": x})
