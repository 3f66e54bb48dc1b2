"""The comparison of bfloat16 steps with our own float32, tried on a tiny model and on made-up figures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.weights import random_weights
from pallas_kernels.device import Device
from pallas_kernels.moe_route.contract import RouteRule, moe_route
from scripts import _fast_path, check_fast_path
from scripts._fast_path import Positions, Scored, compare, experts, prompt_steps, run
from scripts._parity_ours import Sizes

GOLDEN = Path(__file__).parents[1] / "goldens" / "deepseek_v2_tiny" / "lite"


def positions(**changes: np.ndarray) -> Positions:
    """Two prompts of three ids each, all clear."""
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    made = Positions(ids, ids, np.full(ids.shape, 0.5), np.full(ids.shape, -2.0), np.tile([3, 8], (2, 3, 1)))
    return dataclasses.replace(made, **changes)


def test_what_is_equal_passes() -> None:
    report = compare(positions(logprob_PS=np.full((2, 3), -2.04)), positions())
    assert report["faults"] == [] and report["clear_positions"] == 6
    assert report["largest_logprob_difference"] == pytest.approx(0.04)
    assert report["rms_logprob_difference"] == pytest.approx(0.04) and report["logprobs_above_limit"] == 0
    assert report["same_experts"]["positions"] == 6


@pytest.mark.parametrize(
    ("fast", "reference", "fault"),
    [
        ({"argmax_PS": np.array([[1, 2, 3], [4, 9, 6]])}, {}, "1 of 6 clear places have another argmax"),
        ({"logprob_PS": np.array([[-2, -2, -2], [-2, -2, -2.06]])}, {}, "logprobs differ by up to 0.060"),
        ({"logprob_PS": np.full((2, 3), np.nan)}, {}, "logprobs differ by up to nan"),
        ({}, {"margin_PS": np.full((2, 3), 0.1)}, "no argmax was judged"),
    ],
)
def test_what_differs_does_not(fast: dict, reference: dict, fault: str) -> None:
    (found,) = compare(positions(**fast), positions(**reference))["faults"]
    assert fault in found


def test_places_with_other_experts_are_told_apart() -> None:
    logprob, argmax, chosen = np.full((2, 3), -2.01), np.array([[1, 2, 3], [4, 5, 9]]), np.tile([3, 8], (2, 3, 1))
    logprob[1, 2], chosen[1, 2] = -2.4, [3, 7]
    report = compare(positions(logprob_PS=logprob, argmax_PS=argmax, experts_PSC=chosen), positions())
    assert (
        report["logprobs_above_limit"] == 1 and report["other_argmax_where_clear"] == 1 and len(report["faults"]) == 2
    )
    same = report["same_experts"]
    assert (same["positions"], same["logprobs_above_limit"], same["other_argmax_where_clear"]) == (5, 0, 0)
    assert same["largest_logprob_difference"] == pytest.approx(0.01)


def test_experts_are_found_in_the_sorted_order() -> None:
    rule, logits_TX = RouteRule("softmax", 2), jax.random.normal(jax.random.key(0), (5, 7))
    live_T = jnp.array([True, True, False, True, True])
    routed = moe_route(logits_TX, None, live_T, rule, count=7, device=Device("cpu", ""))
    want_TJ = np.sort(np.argsort(-np.asarray(logits_TX), axis=1)[:, :2], axis=1)
    np.testing.assert_array_equal(np.asarray(experts(routed))[live_T], want_TJ[live_T])


def test_another_argmax_passes_where_the_reference_is_not_sure() -> None:
    margin = np.array([[0.5, 0.5, 0.5], [0.5, 0.1, 0.5]])
    report = compare(positions(argmax_PS=np.array([[1, 2, 3], [4, 9, 6]])), positions(margin_PS=margin))
    assert report["faults"] == [] and report["other_argmax"] == 1 and report["other_argmax_where_clear"] == 0


def test_prompts_share_steps_and_are_fed_once() -> None:
    steps = prompt_steps([500, 1, 90], Sizes(rows=3))
    assert [sum(piece.tokens for piece in pieces) for pieces in steps] == [291, 200, 100]
    fed = sorted((piece.sequence, piece.start, piece.tokens) for pieces in steps for piece in pieces)
    assert fed == [(0, 0, 200), (0, 200, 200), (0, 400, 100), (1, 0, 1), (2, 0, 90)]


def test_ids_that_are_fed_back_give_the_same_figures() -> None:
    """Free and forced are the same in one dtype: places, ids and logprobs belong together."""
    spec = model_spec(json.loads((GOLDEN / "config.json").read_text()))
    split = split_decoder(spec, jnp.dtype("float32"), make_mesh(jax.devices()[:1]))
    leaves = random_weights(split, 0)
    prompts = [np.arange(5) + 3, np.array([7]), np.arange(70) % 40]
    sizes = (80, np.zeros(1, np.int32), Sizes(rows=3, width=64, chunk_tokens=24))
    made = [Scored(split, leaves, *sizes).compile() for _ in range(2)]
    free = run(made[0], prompts, 4, None)
    forced = run(made[1], prompts, 4, free.forced_PS)
    np.testing.assert_array_equal(free.forced_PS, free.argmax_PS)
    np.testing.assert_array_equal(forced.argmax_PS, free.argmax_PS)
    np.testing.assert_allclose(forced.logprob_PS, free.logprob_PS, atol=1e-5)
    np.testing.assert_allclose(forced.margin_PS, free.margin_PS, atol=1e-5)
    np.testing.assert_array_equal(forced.experts_PSC, free.experts_PSC)
    moe_layers = sum(map(spec.is_moe, range(spec.num_layers)))
    assert spec.moe and free.experts_PSC.shape == (3, 4, moe_layers * spec.moe.rule.top_k)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code and file; a model that is not the same does not pass."""
    monkeypatch.setattr(check_fast_path.environment, "prepare", lambda *_: None)
    monkeypatch.setattr(_fast_path, "MARGIN", 1e-3)  # logits of so small a model lie closer together
    flags = [str(GOLDEN), "--prompts", "2", "--tokens", "3", "--longest", "20", "--json", str(tmp_path / "out.json")]
    assert check_fast_path.main([*flags, "--commit", "abc"]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["commit"] == "abc" and written["models"]["lite"]["positions"] == 6
    out = capsys.readouterr().out
    assert written["models"]["lite"]["clear_positions"] > 0 and "passes" in out
    assert "s  weights made" in out and "s  float32 mixed compiled" in out and "s  bfloat16 prompts, step 1 of 1" in out
    monkeypatch.setattr(_fast_path, "LIMIT", 1e-9)
    assert check_fast_path.main(flags) == 1
    assert "logprobs differ by up to" in capsys.readouterr().out


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_fast_path.main([str(tmp_path)])
    assert "holds no config.json" in capsys.readouterr().err
