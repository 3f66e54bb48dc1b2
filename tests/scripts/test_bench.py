"""The benchmark's arithmetic on a scripted engine with a fake clock, and what it writes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import EngineUnavailable
from jaxserve.request import Cancel, EventBatch, Finish, TokenRequest
from scripts import _bench_run as bench_run
from scripts import _bench_workloads as bench
from scripts import _commit, bench_serve
from scripts._bench_drivers import EngineDriver
from scripts._bench_workloads import WORKLOADS, Ask, BenchError, Limits

LIMITS = Limits(max_model_len=40_000, max_num_seqs=256, pool_tokens=2_000_000, step_tokens=2048, max_chunks=16)

# The keys that results are compared under, here and with other engines.
KEYS = """
c16_256_128_req_s c16_256_128_tok_s b1_1k_tpot_ms b1_1k_ttft_ms b16_1k_step_ms b64_1k_step_ms b256_1k_step_ms
b16_32k_step_ms prefill_8x8192_tok_s prefill_16x4000_tok_s prefill_16x32k_tok_s thr_512x_1k_256_tok_s
thr_128x_1k_256_tok_s thr_256x_ragged_256_tok_s thr_256x_1312_256_tok_s
""".split()


class ScriptedEngine:
    """Prompts one after another, `prompt_s` a token; then a token for all that run each `step_s`. Plays on submit."""

    def __init__(
        self, driver: EngineDriver, step_s: float = 0.01, prompt_s: float = 0.0, budget: int = 1 << 30
    ) -> None:
        self.driver, self.step_s, self.prompt_s, self.budget = driver, step_s, prompt_s, budget
        self.now_s = 100.0
        self.seen: list[TokenRequest] = []
        self.cancelled: list[int] = []
        self.fails = self.short = self.hangs = False
        self.slow_waves: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def submit(self, items: Sequence[TokenRequest | Cancel]) -> None:
        requests = [item for item in items if isinstance(item, TokenRequest)]
        self.cancelled += [item.handle for item in items if isinstance(item, Cancel)]
        self.seen += requests
        self.now_s += self.slow_waves.pop(0) if self.slow_waves else 0.0
        if self.cancelled:
            self.emit(self.cancelled, -1, Finish.CANCELLED)
        elif not self.hangs:
            self.play(requests)

    def play(self, requests: list[TokenRequest]) -> None:
        waiting = [[request, len(request.prompt_token_ids)] for request in requests]
        left = {request.handle: request.max_tokens - int(self.short) for request in requests}
        running: list[int] = []
        while waiting or running:
            budget = self.budget - len(running)
            self.now_s += self.step_s
            rows = list(running)
            while waiting and budget > 0:
                taken = min(budget, waiting[0][1])
                self.now_s += taken * self.prompt_s
                waiting[0][1] -= taken
                budget -= taken
                if waiting[0][1] == 0:
                    rows.append(waiting.pop(0)[0].handle)
            for handle in rows:
                left[handle] -= 1
            ended = [handle for handle in rows if left[handle] == 0]
            running = [handle for handle in rows if left[handle] > 0]
            self.emit(rows, 7, Finish.NONE, ended)

    def emit(self, handles: list[int], token: int, finish: Finish, ended: Sequence[int] = ()) -> None:
        codes = [Finish.LENGTH if handle in ended else finish for handle in handles]
        errors = {handles[0]: "the step failed"} if self.fails else {}
        ids = np.full(len(handles), token, np.int32)
        self.driver.emit(EventBatch(np.array(handles, np.int64), ids, np.array(codes, np.uint8), errors=errors))


def make(limits: Limits = LIMITS, **timing: float) -> tuple[EngineDriver, ScriptedEngine]:
    """A driver and the scripted engine behind it, on one clock."""
    driver = EngineDriver(lambda: engine.now_s)
    engine = ScriptedEngine(driver, **timing)  # pyright: ignore[reportArgumentType]
    driver.connect(engine.submit, 1000, limits)
    return driver, engine


def test_keys_are_those_that_others_compare_with() -> None:
    assert sorted(key for workload in WORKLOADS.values() for key in workload.keys) == sorted(KEYS)


def test_waves_take_the_second_fastest() -> None:
    """16 requests of 128 tokens at 10 ms a step take 1.28 s; waves are late by what submitting them takes."""
    driver, engine = make()
    engine.slow_waves = [9.0, 0.72, 0.0, 3.0]
    figures = WORKLOADS["c16_256_128"].measure(driver, 10)
    assert figures["c16_256_128_req_s"] == pytest.approx(16 / 2.0)
    assert figures["c16_256_128_tok_s"] == pytest.approx(16 * 128 / 2.0)
    assert len(engine.seen) == 64 and {len(request.prompt_token_ids) for request in engine.seen} == {256}


def test_one_request_has_its_first_token_apart() -> None:
    driver, engine = make(step_s=0.004, prompt_s=1e-4)
    figures = WORKLOADS["b1_1k"].measure(driver, 10)
    assert figures["b1_1k_ttft_ms"] == pytest.approx(4 + 102.4)
    assert figures["b1_1k_tpot_ms"] == pytest.approx(4)
    assert {request.max_tokens for request in engine.seen} == {257}
    first, second, _ = (request.prompt_token_ids for request in engine.seen)
    assert not np.array_equal(first, second)  # a cached prompt would be no prefill


@pytest.mark.parametrize(("name", "count"), [("b16_1k", 16), ("b64_1k", 64), ("b256_1k", 256)])
def test_steady_steps_leave_out_those_in_which_prompts_run(name: str, count: int) -> None:
    """Prompt steps are a hundred times as slow; a single one inside the window would show."""
    driver, engine = make(step_s=0.005, prompt_s=1e-3, budget=2048)
    (figure,) = WORKLOADS[name].measure(driver, 10).values()
    assert figure == pytest.approx(5)
    assert len(engine.seen) == count


def test_steady_steps_need_all_sequences() -> None:
    driver, engine = make(step_s=0.005, budget=300)  # the engine takes prompts more slowly than its limits say
    with pytest.raises(BenchError, match="128 steps in which all decode"):
        WORKLOADS["b16_1k"].measure(driver, 10)


def test_rates_count_the_right_tokens() -> None:
    driver, _ = make(step_s=0.0, prompt_s=1e-5)
    assert WORKLOADS["prefill_8x8192"].measure(driver, 10) == {"prefill_8x8192_tok_s": pytest.approx(1e5)}
    driver, _ = make(step_s=0.01)
    assert WORKLOADS["thr_512x_1k_256"].measure(driver, 10) == {"thr_512x_1k_256_tok_s": pytest.approx(512 / 0.01)}


def test_ragged_prompts_add_up_to_the_even_ones() -> None:
    asks = WORKLOADS["thr_256x_ragged_256"].asks(LIMITS)
    assert {ask.prompt_tokens for ask in asks} == {64, 128, 512, 1024, 2048, 4096} and len(asks) == 256
    assert sum(ask.prompt_tokens for ask in asks) == pytest.approx(256 * 1312, rel=0.02)
    assert asks != sorted(asks, key=lambda ask: ask.prompt_tokens)
    assert asks == WORKLOADS["thr_256x_ragged_256"].asks(LIMITS)
    short = Limits(4096, 256, 10**6, 2048, 16)
    assert max(ask.prompt_tokens for ask in WORKLOADS["thr_256x_ragged_256"].asks(short)) == 3072


def test_what_does_not_fit_says_why() -> None:
    small = Limits(max_model_len=4096, max_num_seqs=64, pool_tokens=50_000, step_tokens=2048, max_chunks=16)
    assert "needs 8193 tokens of context, max_model_len is 4096" == WORKLOADS["prefill_8x8192"].why_not(small)
    assert "max_num_seqs is 64" in (WORKLOADS["b256_1k"].why_not(small) or "")
    assert "does not fit" in (WORKLOADS["b64_1k"].why_not(small) or "")
    assert WORKLOADS["thr_512x_1k_256"].why_not(small) is None  # more requests than slots wait their turn


def test_the_context_is_what_the_workloads_need() -> None:
    assert bench.longest_tokens(["b1_1k", "c16_256_128"], LIMITS) == 1281
    assert bench.longest_tokens(["b1_1k", "prefill_16x32k"], Limits(4096, 256, 0, 2048, 16)) == 1281
    assert bench.longest_tokens(["prefill_16x32k"], Limits(4096, 256, 0, 2048, 16)) == 4096


def test_a_failed_request_is_no_figure() -> None:
    driver, engine = make()
    engine.fails = True
    with pytest.raises(BenchError, match="the step failed"):
        driver.run([Ask(4, 2)], 1)


def test_a_request_that_ends_early_is_no_figure() -> None:
    driver, engine = make()
    engine.short = True
    with pytest.raises(BenchError, match="1 tokens in place of 2"):
        driver.run([Ask(4, 2)], 1)


def test_a_run_past_its_limit_is_cancelled() -> None:
    driver, engine = make()
    engine.hangs = True
    with pytest.raises(BenchError, match="not done within 0 s"):
        driver.run([Ask(4, 2)] * 3, 0.01)
    assert engine.cancelled == [request.handle for request in engine.seen]


def test_an_engine_that_is_gone_is_an_error() -> None:
    driver, _ = make()

    def gone(items: Sequence[object]) -> None:
        raise EngineUnavailable("the engine was stopped")

    driver.connect(gone, 1000, LIMITS)
    with pytest.raises(BenchError, match="the engine was stopped"):
        driver.run([Ask(4, 2)], 1)


def test_events_of_an_earlier_run_do_not_count() -> None:
    driver, engine = make()
    driver.run([Ask(4, 2)], 1)
    late = engine.seen[0].handle
    engine.play_was = engine.play

    def play(requests: list[TokenRequest]) -> None:
        engine.emit([late], 7, Finish.LENGTH)
        engine.play_was(requests)

    engine.play = play
    assert [len(times) for times in driver.run([Ask(4, 2)] * 2, 1).token_s] == [2, 2]


@pytest.mark.parametrize("text", ["b1_1k, c16_256_128", "b1_1k_ttft_ms,b1_1k_tpot_ms,c16_256_128_req_s"])
def test_workloads_are_chosen_by_name_or_key(text: str) -> None:
    assert bench_serve.workloads(text) == ["b1_1k", "c16_256_128"]


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="got 'b2_1k', allowed: all, or a list out of c16_256_128"):
        bench_serve.workloads("b1_1k,b2_1k")
    assert bench_serve.workloads("all") == list(WORKLOADS)


def test_results_are_merged(tmp_path: Path) -> None:
    """Another model's and another workload's figures stay; what can no longer be measured goes."""
    path = tmp_path / "new folder" / "results.json"
    other = bench_run.Results(path, "other", {"device": "a"})
    other.figures("b1_1k", {"b1_1k_tpot_ms": 1.0, "b1_1k_ttft_ms": 2.0}, {})
    mine = bench_run.Results(path, "mine", {"device": "b"})
    mine.figures("b1_1k", {"b1_1k_tpot_ms": 3.0, "b1_1k_ttft_ms": 4.0}, {"host_us_per_step": 5.0})
    mine.leave_out("b16_1k", "does not fit")
    mine.figures("b16_1k", {"b16_1k_step_ms": 6.0}, {})
    mine.leave_out("b1_1k", "not done within 1 s")
    table = json.loads(path.read_text())
    assert table["other"]["b1_1k_tpot_ms"] == 1.0
    assert table["mine"] == {
        "b16_1k_step_ms": 6.0,
        "measured": {"b16_1k": {"device": "b"}},
        "left_out": {"b1_1k": "not done within 1 s"},
    }


@pytest.mark.parametrize("text", ["{", "[1]", '{"version": "1.0"}', '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_table_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(BenchError, match="allowed: a results file or a new one"):
        bench_run.Results(path, "mine").read()
    assert path.read_text() == text


def test_one_failure_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver, engine = make(limits=Limits(2000, 256, 10**6, 2048, 16))
    results = bench_run.Results(tmp_path / "r.json", "m", {"commit": "c"})

    def measure_then_fail() -> dict[str, int]:
        engine.fails = True
        return {"preemptions": 0}

    names = ["b1_1k", "prefill_8x8192", "c16_256_128"]
    assert bench_run.run_workloads(driver, names, 1, results, measure_then_fail) == 1
    entry = results.read()["m"]
    assert entry["b1_1k_tpot_ms"] == pytest.approx(10)
    assert entry["measured"] == {"b1_1k": {"commit": "c", "preemptions": 0}}
    assert entry["left_out"].keys() == {"prefill_8x8192", "c16_256_128"}
    assert "b1_1k_tpot_ms = 10" in capsys.readouterr().out


def test_engine_flags_reach_the_server() -> None:
    argv = ["model", "--json", "r.json", "--num-pages", "77", "--dtype", "float32"]
    flags = bench_run.model_flags(bench_serve.build_parser().parse_args(argv))
    assert flags[0] == "model"
    pairs = dict(zip(flags[1::2], flags[2::2], strict=True))
    assert pairs["--num-pages"] == "77" and pairs["--dtype"] == "float32" and pairs["--max-num-seqs"] == "256"
    assert "--tokenizer" not in pairs


def test_the_commit_is_known_or_said_to_be_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_commit, "ROOT", tmp_path)
    assert _commit.commit() == "unknown"
