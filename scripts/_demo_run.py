"""The demo itself, run in .venv: fetch, convert, serve, ask over gRPC, stream the answer, stop the server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from jaxserve.client import Client, ServerError
from jaxserve.request import RequestOutput, SamplingParams
from scripts._demo import ROOT, build_parser

CHECKPOINT = ROOT / ".cache" / "smollm2-orbax"
START_LIMIT_S = 600.0
STOP_LIMIT_S = 20.0

# Small limits: few programs to compile on a first start, and a cache that fits any machine.
SERVE_FLAGS = ("--max-model-len", "4096", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")


class DemoError(Exception):
    """A step failed; the text is one sentence for the user, `exit_code` what the demo ends with."""

    def __init__(self, sentence: str, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Timing:
    """What the demo reports of an answer."""

    first_token_s: float
    tokens: int
    decode_s: float  # from the first token to the last

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first a second; 0 where there was only one."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else 0.0


def prepare_checkpoint() -> None:
    """Fetch the model and convert it; each does nothing where its result lies there already."""
    say("model: SmolLM2-135M-Instruct (Apache-2.0)")
    run_step("fetching the model", [sys.executable, "-m", "checkpoints.smollm2"])
    say("checkpoint: Orbax")
    convert = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py")]
    run_step("converting the model", [*convert, str(ROOT / ".cache" / "smollm2"), str(CHECKPOINT)])


def run_step(what: str, command: Sequence[str]) -> None:
    """Run a command in the foreground. Raises DemoError where it fails; it has said why."""
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        raise DemoError(f"{what} failed with exit code {code}; see above", code if code > 0 else 1)


def free_port() -> int:
    """A loopback port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(text: str) -> None:
    """One line of progress."""
    print(f"demo: {text}", flush=True)


@contextmanager
def server(command: Sequence[str], stop_limit_s: float = STOP_LIMIT_S) -> Iterator[subprocess.Popen[str]]:
    """A server process whose log is shown as it comes; stopped on leaving, whatever the reason.

    It gets a process group of its own: Ctrl-C in the terminal reaches only the demo, which then stops it once.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    assert process.stdout is not None
    reader = threading.Thread(target=show_log, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield process
    finally:
        stop(process, stop_limit_s)
        reader.join(timeout=2)
        if not reader.is_alive():  # a grandchild may hold the pipe open; then the reader ends with the demo
            process.stdout.close()


def show_log(stream: IO[str]) -> None:
    """Print the server's lines, set apart from the demo's own."""
    for line in stream:
        print(f"server | {line.rstrip()}", flush=True)


def stop(process: subprocess.Popen[str], limit_s: float) -> None:
    """Ask the server to end (SIGINT), then insist, at once on another Ctrl-C; only ever this process, by its id."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            say(f"the server did not end within {limit_s:.0f} s of {number.name}")
        except KeyboardInterrupt:
            say("insisting")


def wait_until_serving(
    process: subprocess.Popen[str],
    is_serving: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Seconds until the health check says SERVING. Raises DemoError where the server ends before, or takes too long."""
    start_s = clock()
    while not is_serving():
        if process.poll() is not None:
            raise DemoError(f"the server ended with exit code {process.returncode}; see above", process.returncode or 1)
        if clock() - start_s > START_LIMIT_S:
            raise DemoError(f"the server was not ready within {START_LIMIT_S:.0f} s")
        sleep(0.2)
    return clock() - start_s


def show_answer(
    deltas: Iterable[RequestOutput], write: Callable[[str], object], clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Write an answer's text as it comes, and time it. Raises DemoError for an answer without tokens."""
    start_s = clock()
    first_s = last_s = None
    tokens = 0
    for delta in deltas:
        for choice in delta.outputs:
            if choice.token_ids:
                last_s = clock()
                first_s = last_s if first_s is None else first_s
                tokens += len(choice.token_ids)
            write(choice.text)
    if first_s is None or last_s is None:
        raise DemoError("the server sent no token")
    return Timing(first_s - start_s, tokens, last_s - first_s)


def write_now(text: str) -> None:
    """To the terminal, at once."""
    print(text, end="", flush=True)


def ask(client: Client, prompt: str, max_tokens: int) -> None:
    """Send the question and stream the answer."""
    print(f"\nuser: {prompt}\nmodel: ", end="", flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    timing = show_answer(client.stream_chat([{"role": "user", "content": prompt}], params), write_now)
    print(
        f"\n\ntime to first token {timing.first_token_s * 1e3:.0f} ms, {timing.tokens} tokens, "
        f"{timing.tokens_per_s:.1f} tokens/s\n",
        flush=True,
    )


def run(argv: Sequence[str]) -> None:
    """All steps. Raises DemoError, ServerError, KeyboardInterrupt; the server is stopped in any case."""
    args = build_parser().parse_args(argv)
    prepare_checkpoint()
    port = args.port or free_port()
    address = f"127.0.0.1:{port}"
    say(f"server: starting on {address}; the first start compiles, minutes on a small machine, and keeps what it made")
    serve = [sys.executable, "-m", "jaxserve.cli", "serve", str(CHECKPOINT), "--host", "127.0.0.1", "--port", str(port)]
    with server([*serve, *SERVE_FLAGS]) as process, Client(address) as client:
        say(f"the server is ready after {wait_until_serving(process, client.is_serving):.1f} s")
        ask(client, args.prompt, args.max_tokens)
        if args.keep:
            say(f"the server runs on until Ctrl-C; talk to it with: .venv/bin/jaxserve chat --address {address}")
            process.wait()
        say("stopping the server")
    if process.returncode:
        raise DemoError(f"the server ended with exit code {process.returncode}", max(process.returncode, 1))
    say("done")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 130 after Ctrl-C, the failed step's own where one failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(argv)
    except KeyboardInterrupt:
        print(flush=True)
        say("interrupted")
        return 130
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    except ServerError as error:
        print(f"demo: the server answered {error.status}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
