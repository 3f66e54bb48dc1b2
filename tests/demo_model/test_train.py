"""Training of a small model for some steps on the CPU: it learns, goes on exactly, and what it exports is served."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.files import Kind
from checkpoints.fp8 import FIELD, dequantize, quantize
from checkpoints.load import load_weights
from checkpoints.names.families import name_table
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.source import open_model, open_reader
from demo_model.train.data import TokenRows, by_kind, get_rows, rows_of_step
from demo_model.train.export import export_model
from demo_model.train.loss import hidden_states
from demo_model.train.options import Options
from demo_model.train.report import read_log
from demo_model.train.run import Place, run
from demo_model.train.schedule import rates
from demo_model.train.state import TrainState, fresh_weights, weights_from
from demo_model.train.step import Trainer
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.layers.rows import Rows
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from tests.house.source import ROOT

CONFIG = json.loads((ROOT / "checkpoints" / "demo" / "config.json").read_text()) | {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
CONFIG.pop(FIELD, None)  # of what is shipped; an export says it anew
BOS, CHAT = CONFIG["bos_token_id"], 5
OPTIONS = Options(
    row_tokens=32,
    batch_rows=8,
    part_rows=4,
    steps=24,
    warmup_steps=4,
    rate=0.01,
    dtype="float32",
    validate_steps=12,
    save_steps=10,
)


def counting(split: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A stand-in for the corpus: documents of ids that count up in steps of 1 to 3, half of them marked as chats."""
    rng = np.random.default_rng(len(split))
    tokens, length = [], OPTIONS.row_tokens
    while len(tokens) < rows * length:
        start, by = rng.integers(6, 40), rng.integers(1, 4)
        body = (start + by * np.arange(rng.integers(6, 14)) - 6) % 58 + 6
        tokens += [BOS, *([CHAT] if rng.random() < 0.5 else []), *body.tolist()]
    token_NC = np.array(tokens[: rows * length], np.uint16).reshape(rows, length)
    return token_NC, (token_NC != CHAT).astype(np.uint8)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(split_decoder(model_spec(CONFIG), jnp.dtype(OPTIONS.dtype), with_mtp=True), OPTIONS)


def place(folder: Path) -> Place:
    return Place(folder, TokenRows(*counting("train", 40)), TokenRows(*counting("validation", 8)), CHAT)


def train(trainer: Trainer, folder: Path, resume: bool = False) -> TrainState:
    return run(trainer, fresh_weights(trainer.split, 1), place(folder), time.monotonic(), resume)


@pytest.fixture(scope="module")
def finished(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    folder = tmp_path_factory.mktemp("run")
    return folder, train(trainer, folder)


def test_it_learns(finished: tuple[Path, TrainState]) -> None:
    folder, _ = finished
    lines = read_log(folder / "log.jsonl")
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, 25))
    assert steps[-1]["loss"] < 0.75 * steps[0]["loss"]
    assert steps[-1]["mtp_loss"] < 0.85 * steps[0]["mtp_loss"]
    assert {line["step"] for line in lines if line["kind"] == "validation_prose"} == {12, 24}
    held_out = [line["loss"] for line in lines if line["kind"] == "validation_chat"]
    assert held_out[-1] < held_out[0]
    assert all(line["load_max"] >= 1 >= line["load_min"] for line in steps)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_resumed_run_ends_alike_to_the_bit(
    trainer: Trainer, finished: tuple[Path, TrainState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after step 13, it goes on from step 10, which was the last one that it kept."""

    class Killed(Exception):
        """In the place of a signal."""

    real = rates

    def dies(step: int, *given: object) -> object:
        if step == 13:
            raise Killed
        return real(step, *given)

    with monkeypatch.context() as patch:
        patch.setattr("demo_model.train.run.rates", dies)
        with pytest.raises(Killed):
            train(trainer, tmp_path)
    state = train(trainer, tmp_path, resume=True)
    for a, b in zip(jax.tree.leaves(finished[1]), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    losses = [{k: line[k] for k in ("kind", "step", "loss")} for line in read_log(tmp_path / "log.jsonl")]
    assert losses == [{k: line[k] for k in ("kind", "step", "loss")} for line in read_log(finished[0] / "log.jsonl")]


def test_resume_without_a_state(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--resume: .* holds no state of a run"):
        train(trainer, tmp_path, resume=True)


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config"


def logits(trainer: Trainer, weights: list[jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    """Of the decoder and of its MTP layer."""
    model, token_IC = trainer.split.merge(weights), jnp.asarray(counting("validation", 4)[0], jnp.int32)
    hidden = hidden_states(model, token_IC, Rows.of(token_IC, BOS))
    return tuple(np.asarray(model.logits(one)) for one in hidden)


def test_an_export_is_loaded_as_it_was(
    trainer: Trainer, finished: tuple[Path, TrainState], config_folder: Path, tmp_path: Path
) -> None:
    """bfloat16 weights give the logits of the weights rounded so, to the bit; training starts from them too."""
    weights = finished[1].weights
    export_model(trainer.split, weights, config_folder, tmp_path / "plain")
    assert open_model(tmp_path / "plain").config == CONFIG
    loaded = weights_from(trainer.split, tmp_path / "plain")
    plain = ("router", "router_bias")
    rounded = [
        weight if name.endswith(plain) else weight.astype(jnp.bfloat16).astype(jnp.float32)
        for name, weight in zip(trainer.split.names, weights, strict=True)
    ]
    for a, b in zip(logits(trainer, loaded), logits(trainer, rounded), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(CheckpointError, match="is there already"):
        export_model(trainer.split, weights, config_folder, tmp_path / "plain")


def test_an_fp8_export_is_near(
    trainer: Trainer, finished: tuple[Path, TrainState], config_folder: Path, tmp_path: Path
) -> None:
    """Read through the loader's own dequantisation, MTP layer included."""
    weights, split, target = finished[1].weights, trainer.split, tmp_path / "fp8"
    export_model(split, weights, config_folder, target, fp8=True)
    reader = open_reader(target, Kind.HUGGING_FACE, dequantize=True)
    stored = SafetensorsReader(target).tensors
    assert stored["model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"].shape == (1, 1)
    assert stored["model.embed_tokens.weight"].dtype == "bfloat16"
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)
        for name, leaf in zip(split.names, split.leaves, strict=True)
    }
    loaded = load_weights(reader, name_table(CONFIG["model_type"], split.spec), wanted)
    for name, weight in zip(split.names, weights, strict=True):
        error = np.abs(np.asarray(loaded[name]) - np.asarray(weight)).max()
        assert error <= np.abs(np.asarray(weight)).max() * 2**-4, name  # e4m3 has 3 bits behind the leading one
    exact, near = logits(trainer, weights)[0], logits(trainer, [loaded[name] for name in split.names])[0]
    assert np.abs(near - exact).mean() < 0.05 * np.abs(exact).mean()


@pytest.mark.parametrize("shape", [(128, 128), (160, 384), (5, 300)])
def test_quantised_blocks_are_near_what_they_were(shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight[:, :2] = 0
    stored, scale = quantize(weight, (128, 128))
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    error = np.abs(dequantize(stored, scale, (128, 128)) - weight)
    assert (error <= np.maximum(np.abs(weight) * 2**-4, np.abs(weight).max() / 448 * 2**-9)).all()
    assert (quantize(np.zeros((4, 4), np.float32), (128, 128))[1] == 1).all()


def test_rows_of_steps_are_permutations() -> None:
    taken = np.concatenate([rows_of_step(step, 40, 8, seed=1) for step in range(5)])
    assert sorted(taken.tolist()) == list(range(40))
    again = np.concatenate([rows_of_step(step, 40, 8, seed=1) for step in range(5, 10)])
    assert sorted(again.tolist()) == list(range(40))
    assert again.tolist() != taken.tolist()
    with pytest.raises(ConfigError, match="--rows: got 7, allowed: at least --batch-rows, 8"):
        rows_of_step(0, 7, 8, seed=1)


def test_kinds_part_what_counts() -> None:
    token_NC = np.array([[BOS, 7, 8, BOS, CHAT, 9], [9, CHAT, BOS, 7, 7, 7]], np.uint16)
    count_NC = np.array([[1, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]], np.uint8)
    kinds = by_kind(TokenRows(token_NC, count_NC), BOS, CHAT)
    assert kinds["chat"].tolist() == [[0, 0, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0]]
    assert kinds["prose"].tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]]


def test_rows_are_kept_for_the_next_run(tmp_path: Path) -> None:
    asked: list[str] = []

    def source(split: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(split)
        return counting(split, rows)

    first = get_rows(source, "train", 4, tmp_path, {"seed": 1})
    second = get_rows(source, "train", 4, tmp_path, {"seed": 1})
    np.testing.assert_array_equal(first.token_NC, second.token_NC)
    assert asked == ["train"]
    get_rows(source, "train", 4, tmp_path, {"seed": 2})
    assert asked == ["train", "train"]


def test_the_schedule() -> None:
    options = Options(steps=300, warmup_steps=60)
    assert rates(0, 300, options).learning == pytest.approx(3e-3 / 60)
    assert rates(60, 300, options).learning == pytest.approx(3e-3)
    assert rates(300, 300, options).learning == pytest.approx(0.02 * 3e-3)
    assert [float(rates(step, 300, options).mtp_weight) for step in (199, 200)] == pytest.approx([0.3, 0.1])
    assert [float(rates(step, 300, options).bias) for step in (269, 270)] == pytest.approx([3e-3, 0])


def test_options_that_do_not_belong_together() -> None:
    for words, changed in (
        ("--part-rows: got 5, allowed: what divides --batch-rows 8", {"batch_rows": 8, "part_rows": 5, "steps": 1}),
        ("--steps: got none", {}),
        ("--warmup-steps: got 5, allowed: at least 30", {"minutes": 1.0, "warmup_steps": 5}),
    ):
        with pytest.raises(ConfigError, match=words):
            Options(**changed)
