#!/usr/bin/env python3
"""Make tests/goldens anew: transformers' answers for the demo model and for tiny models of all families, in float32.

A family's folder is tests/goldens/FAMILY_tiny, with a folder for each variant; what is in it, and which row of which
array has which position, says _goldens_tiny.py. With --check nothing is written: what comes out is compared with the
committed files. torch lives in an environment of its own (made on the first run, with its own Python if need be),
because nothing that runs or tests the service needs it.
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
from jaxserve.errors import ConfigError, JaxserveError  # noqa: E402

GOLDENS = ROOT / "tests" / "goldens"
PACKAGES = ("torch==2.13.0", "transformers==5.24.0", "numpy==2.4.6")  # 5.24 knows MTP layers; numpy for Python 3.11
FAMILIES = ("smollm2", "llama", "deepseek", "deepseek_v2", "deepseek_v3", "glm", "glm4", "glm4_moe", "glm4_moe_lite")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".cache" / "torch", help="folder of the environment with torch"
    )
    parser.add_argument(
        "--family", nargs="+", choices=FAMILIES, default=FAMILIES, help="only these (glm: the original chatglm too)"
    )
    parser.add_argument("--check", action="store_true", help="write nothing and compare with the committed files")
    parser.add_argument("--python", default="python3.11", help="the Python to make that environment with")
    return parser


def prepare_environment(folder: Path, python: str) -> Path:
    """The environment's Python; installed if it is not there.

    Raises ConfigError if one is there that has other versions, CalledProcessError or FileNotFoundError if it cannot be
    made.
    """
    inside = folder / "bin" / "python"
    if not inside.is_file():
        print(f"making {folder} with {', '.join(PACKAGES)}", flush=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        try:
            subprocess.run([str(inside), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        except BaseException:
            shutil.rmtree(folder)  # half an environment would be taken for a whole one the next time
            raise
    elif why := unfit(folder):
        raise ConfigError(f"--environment is {folder}, {why}; delete it to have it made anew, or give another")
    return inside


def unfit(folder: Path) -> str:
    """Why an environment cannot make these goldens; empty if it can. numpy's version decides nothing."""
    wanted = dict(package.split("==") for package in PACKAGES[:2])
    ask = f"from importlib.metadata import version; print(*(version(name) for name in {list(wanted)}))"
    answer = subprocess.run([str(folder / "bin" / "python"), "-c", ask], capture_output=True, text=True)
    if answer.returncode != 0:
        return f"which lacks {' or '.join(wanted)}"
    has = dict(zip(wanted, answer.stdout.split(), strict=True))
    other = [
        f"{name} {has[name]} in place of {wanted[name]}" for name in wanted if not matches(has[name], wanted[name])
    ]
    return f"which has {' and '.join(other)}" if other else ""


def matches(has: str, wanted: str) -> bool:
    """Whether a version is the wanted one, whatever device it was built for (2.13.0+cpu)."""
    return has.split("+")[0] == wanted


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        python = prepare_environment(args.environment, args.python)
        command = [str(python), str(ROOT / "scripts" / "_goldens_reference.py"), str(GOLDENS), *args.family]
        if "smollm2" in args.family:
            command += ["--smollm2", str(fetch_directory(ROOT / ".cache"))]
        return subprocess.run(command + ["--check"] * args.check).returncode  # it has said what is wrong
    except JaxserveError as error:
        print(f"make_goldens: {error}", file=sys.stderr)
        return error.exit_code
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"make_goldens: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
