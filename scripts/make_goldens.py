#!/usr/bin/env python3
"""Make tests/goldens anew: transformers' answers for the demo model and for tiny Llamas, from torch in float32.

torch lives in an environment of its own (made on the first run, with its own Python if need be), because nothing that
runs or tests the service needs it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from checkpoints.smollm2 import fetch_directory  # noqa: E402
from jaxserve.errors import JaxserveError  # noqa: E402

GOLDENS = ROOT / "tests" / "goldens"
PACKAGES = ("torch==2.13.0", "transformers==5.17.0", "numpy==2.4.6")  # as the CPU reference; numpy for Python 3.11


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".cache" / "torch", help="folder of the environment with torch"
    )
    parser.add_argument("--python", default="python3.11", help="the Python to make that environment with")
    return parser


def prepare_environment(folder: Path, python: str) -> Path:
    """The environment's Python; installed if it is not there. Raises CalledProcessError or FileNotFoundError."""
    inside = folder / "bin" / "python"
    if not inside.is_file():
        print(f"making {folder} with {', '.join(PACKAGES)}", flush=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        try:
            subprocess.run([str(inside), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        except BaseException:
            shutil.rmtree(folder)  # half an environment would be taken for a whole one the next time
            raise
    return inside


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        model = fetch_directory(ROOT / ".cache")
        python = prepare_environment(args.environment, args.python)
        reference = ROOT / "scripts" / "_goldens_reference.py"
        subprocess.run([str(python), str(reference), str(model), str(GOLDENS)], check=True)
    except JaxserveError as error:
        print(f"make_goldens: {error}", file=sys.stderr)
        return error.exit_code
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"make_goldens: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
