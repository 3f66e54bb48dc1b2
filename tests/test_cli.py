"""The command line: exit codes, one sentence on standard error, and the two talking commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import cli
from jaxserve.errors import InvalidRequest
from jaxserve.request import CompletionOutput, RequestOutput, SamplingParams
from tests.fakes.tiny import CONFIG

ROOT = Path(__file__).parents[1]


class Echo:
    """A talker that answers with what it was asked."""

    def __init__(self) -> None:
        self.histories: list[list[dict[str, str]]] = []
        self.params: SamplingParams | None = None

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        self.params = params
        for piece in (prompt, "!"):
            yield RequestOutput("r", prompt, [], [CompletionOutput(0, piece, [])])

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.histories.append(list(messages))
        if messages[-1]["content"] == "bad":
            raise InvalidRequest("messages", "bad", "something else")
        return self.stream(f"re: {messages[-1]['content']}", params)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    talker = Echo()
    monkeypatch.setattr(cli, "open_talker", lambda args: talker)
    return talker


def test_generate_prints_the_stream_and_passes_its_flags(echo: Echo, capsys: pytest.CaptureFixture) -> None:
    argv = ["generate", "hello", "--address", "x:1", "--max-tokens", "7", "--stop", "a", "--stop", "b"]
    assert cli.main([*argv, "--sampling-seed", "-1", "--temperature", "0.5"]) == 0
    assert capsys.readouterr().out == "hello!\n"
    assert echo.params == SamplingParams(max_tokens=7, stop=("a", "b"), seed=-1, temperature=0.5)


def test_chat_keeps_the_history_and_survives_a_refusal(
    echo: Echo, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["one", "bad", "two", ""])
    monkeypatch.setattr(cli, "ask", lambda mark: next(lines))
    assert cli.main(["chat", "--address", "x:1", "--system", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert out == "re: one!\nre: two!\n" and "messages: got 'bad'" in err
    assert [entry["content"] for entry in echo.histories[-1]] == ["be brief", "one", "re: one!", "two"]


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        (["serve", "/no/such/model"], 4, "jaxserve: /no/such/model: no such file or directory, expected: "),
        (["generate", "x", "--address", "a:99999"], 2, "jaxserve: --address: got 'a:99999', allowed: HOST:PORT with a"),
        (["generate", "x", "--address", ""], 2, "jaxserve: --address: got '', allowed: HOST:PORT with a port of 1"),
        (["generate", "x"], 2, "jaxserve: generate: give either --model or --address"),
        (["chat", "--model", "m", "--address", "a:1"], 2, "jaxserve: chat: give either --model or --address"),
        (["serve", "m", "--port", "70000"], 2, "jaxserve: --port: got 70000, allowed: 0 to 65535"),
        (["serve", "m", "--max-num-seqs", "0"], 2, "jaxserve: --max-num-seqs: got 0, allowed: 1 to 4096"),
    ],
)
def test_errors_are_one_sentence(argv: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(argv) == code
    err = capsys.readouterr().err
    assert err.startswith(sentence) and err.count("\n") == 1


def test_explain_prints_each_op_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert cli.main(["explain", str(tmp_path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "  gqa_decode     mosaic_gpu   it needs an NVIDIA GPU of compute capability 9.0" in out
    assert "* gqa_decode     xla          fits" in out and "* kv_write       xla" in out


def test_explain_refuses_an_implementation_that_nothing_has(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert cli.main(["explain", str(tmp_path), "--device", "cpu", "--attention", "nope"]) != 0
    err = capsys.readouterr().err
    assert "--attention: got nope, allowed: auto, or what fits gqa_decode (mosaic_gpu: " in err and err.count("\n") == 1


def test_experts_of_a_dense_model_cannot_be_shared_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = (
        "import sys\nfrom jaxserve import cli\n"
        "sys.exit(cli.main(['explain', sys.argv[1], '--device', 'cpu', '--expert-parallel-size', '2']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0 and "--expert-parallel-size: got 2, allowed: 1, the model has no experts" in done.stderr


def test_devices_that_come_too_late(tmp_path: Path) -> None:
    """A process whose JAX has one CPU device already asks for two."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = (
        "import sys, jax\njax.devices()\nfrom jaxserve import cli\n"
        "sys.exit(cli.main(['explain', sys.argv[1], '--device', 'cpu', '--tensor-parallel-size', '2']))"
    )
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode != 0
    assert "2 devices are asked for, but this process has started JAX with 1 CPU device(s)" in done.stderr


def test_a_forced_implementation_is_of_attention_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert cli.main(["explain", str(tmp_path), "--device", "cpu", "--attention", "xla"]) == 0
    assert "* kv_write       xla" in capsys.readouterr().out


def test_flags_have_one_spelling(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "m", "--num-page", "4"])
    assert "unrecognized arguments: --num-page" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_fault(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    def leave(_: object) -> int:
        raise BrokenPipeError

    led_away: list[int] = []
    monkeypatch.setattr(cli, "run", leave)
    monkeypatch.setattr(cli.os, "dup2", lambda _, old: led_away.append(old))
    assert cli.main(["explain", "m"]) == 141
    assert led_away == [cli.sys.stdout.fileno()] and not capfd.readouterr().err
