"""scripts/demo without a model: its flags, its waiting, its clock, and that it stops the server whatever happens."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from jaxserve.request import CompletionOutput, RequestOutput
from scripts import _demo, _demo_run


class FakeClock:
    """Seconds that only pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FakeProcess:
    """A process that ends with `code` once the clock passes `end_s`."""

    def __init__(self, clock: FakeClock, end_s: float = 1e9, code: int = 0) -> None:
        self._clock, self._end_s, self.returncode = clock, end_s, code

    def poll(self) -> int | None:
        return self.returncode if self._clock() >= self._end_s else None


def delta(text: str, count: int) -> RequestOutput:
    return RequestOutput("r", None, [], [CompletionOutput(0, text, list(range(count)))])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-tokens", "0"], "got '0', allowed: 1 to 4096"),
        (["--max-tokens", "many"], "got 'many', allowed: 1 to 4096"),
        (["--port", "70000"], "got '70000', allowed: 0 to 65535"),
        (["--prompt", " "], "got an empty text, allowed: a question"),
        (["--verbose"], "unrecognized arguments: --verbose"),
    ],
)
def test_wrong_flags_end_before_anything_is_set_up(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as exit_info:
        _demo.main(argv)
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err


def test_a_failed_setup_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 7))
    assert _demo.main([]) == 7


def test_ctrl_c_during_the_setup_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo.subprocess, "run", interrupted)
    assert _demo.main([]) == 130


def test_waiting_ends_when_the_health_check_says_so() -> None:
    clock = FakeClock()
    waited_s = _demo_run.wait_until_serving(FakeProcess(clock), lambda: clock() >= 3, clock, clock.sleep)
    assert 3 <= waited_s < 3.5


def test_waiting_ends_when_the_server_does() -> None:
    clock = FakeClock()
    with pytest.raises(_demo_run.DemoError, match="ended with exit code 4") as error:
        _demo_run.wait_until_serving(FakeProcess(clock, end_s=1, code=4), lambda: False, clock, clock.sleep)
    assert error.value.exit_code == 4


def test_waiting_has_a_limit() -> None:
    clock = FakeClock()
    with pytest.raises(_demo_run.DemoError, match="not ready within 600 s"):
        _demo_run.wait_until_serving(FakeProcess(clock), lambda: False, clock, clock.sleep)


def test_timing_counts_tokens_not_messages() -> None:
    """A delta may hold several tokens, or none."""
    clock, written = FakeClock(), []

    def deltas():
        for seconds, text, count in ((0.5, "", 0), (0.5, "The", 1), (0.4, " capital is", 2), (0.6, " Paris.", 2)):
            clock.sleep(seconds)
            yield delta(text, count)
        clock.sleep(9)
        yield delta("", 0)

    timing = _demo_run.show_answer(deltas(), written.append, clock)
    assert "".join(written) == "The capital is Paris."
    assert (timing.first_token_s, timing.tokens, timing.decode_s) == (1.0, 5, 1.0)
    assert timing.tokens_per_s == 4.0


def test_one_token_has_no_rate() -> None:
    timing = _demo_run.show_answer([delta("Yes", 1)], lambda text: None, FakeClock())
    assert timing.tokens_per_s == 0.0


def test_an_answer_without_tokens_is_an_error() -> None:
    with pytest.raises(_demo_run.DemoError, match="no token"):
        _demo_run.show_answer([delta("", 0)], lambda text: None, FakeClock())


# SIGINT is ignored by whoever was started in the background of a shell, and that is inherited.
POLITE = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print('ready', flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print('bye', flush=True)
"""
DEAF = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


@pytest.mark.parametrize(("code", "ends_with"), [(POLITE, 0), (DEAF, -15)], ids=["polite", "deaf"])
def test_the_server_is_stopped_when_a_step_fails(
    code: str, ends_with: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGINT; by SIGTERM where that is not heard."""
    with pytest.raises(RuntimeError, match="in between"):
        with _demo_run.server([sys.executable, "-c", code], stop_limit_s=5 if ends_with == 0 else 0.3) as process:
            heard = ""
            limit_s = time.monotonic() + 20
            while "server | ready" not in heard and time.monotonic() < limit_s:
                heard += capfd.readouterr().out
            raise RuntimeError("in between")
    assert process.returncode == ends_with


def test_the_free_port_is_free() -> None:
    assert 1024 <= _demo_run.free_port() <= 65535


@pytest.mark.parametrize(
    ("raised", "code"),
    [(KeyboardInterrupt(), 130), (_demo_run.DemoError("no", 4), 4), (_demo_run.ServerError("INTERNAL", "no"), 1)],
)
def test_exit_codes(raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> None:
        raise raised

    monkeypatch.setattr(_demo_run, "run", fail)
    monkeypatch.setattr(_demo_run.signal, "signal", lambda *a: None)
    assert _demo_run.main([]) == code
