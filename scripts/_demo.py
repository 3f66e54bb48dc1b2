"""The flags of scripts/demo: refuses wrong ones before anything is set up; then makes .venv and runs _demo_run in it.

Called by scripts/demo with any Python >= 3.12, so standard library only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build_parser() -> argparse.ArgumentParser:
    """All flags of scripts/demo."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Fetch a small real model, convert it, serve it over gRPC, and stream its answer to a question.",
    )
    parser.add_argument("--prompt", type=question, default="What is the capital of France?", help="the question")
    parser.add_argument("--max-tokens", type=positive, default=128, help="the longest answer (default: 128)")
    parser.add_argument("--port", type=port, default=0, help="of the server, on 127.0.0.1 (default: a free one)")
    parser.add_argument("--keep", action="store_true", help="leave the server running until Ctrl-C")
    return parser


def question(text: str) -> str:
    """A prompt with something in it."""
    if not text.strip():
        raise argparse.ArgumentTypeError("got an empty text, allowed: a question")
    return text


def positive(text: str) -> int:
    """A count of tokens."""
    return number_within(text, 1, 4096)


def port(text: str) -> int:
    """A TCP port; 0 is a free one."""
    return number_within(text, 0, 65535)


def number_within(text: str, low: int, high: int) -> int:
    """A whole number in low..high. Raises ArgumentTypeError with what was given and what is allowed."""
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: {low} to {high}")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code where the setup fails; else this process becomes the demo itself."""
    build_parser().parse_args(argv)
    try:
        setup = subprocess.run([sys.executable, ROOT / "scripts" / "_setup.py", "runtime"])
    except KeyboardInterrupt:  # the setup goes on from there the next time
        return 130
    if setup.returncode:
        return setup.returncode
    os.chdir(ROOT)
    python = str(ROOT / ".venv" / "bin" / "python")
    os.execv(python, [python, "-m", "scripts._demo_run", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
