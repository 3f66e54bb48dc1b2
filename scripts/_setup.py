"""Makes .venv from pinned requirement files: called by _setup.sh with a Python >= 3.12, standard library only.

A stamp in .venv names the requirement files it was made from, so a second run only compares. A marker lies there while
an installation is under way: who finds it knows that a run before was killed, and starts afresh.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "jaxserve-setup.json"
MARKER = VENV / "jaxserve-setup-unfinished"
REQUIREMENTS = ROOT / "scripts" / "requirements"
NEWEST_TESTED = (3, 14)  # the newest Python that all pinned packages have wheels for


def requirement_files(kind: str) -> list[Path]:
    """The file of that kind and those it includes, in the order they are read."""
    path = REQUIREMENTS / f"{kind}.txt"
    included = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("-r ")]
    return [*(file for name in included for file in requirement_files(name.removesuffix(".txt"))), path]


def pins(files: list[Path]) -> dict[str, str]:
    """Package name -> version, of all the files."""
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def digest(files: list[Path]) -> str:
    """A hash of what decides the environment: the pins, the project's own metadata, and where the environment lies."""
    parts = [ROOT / "pyproject.toml", *files]
    return hashlib.sha256(b"\0".join([str(VENV).encode(), *(part.read_bytes() for part in parts)])).hexdigest()


def read_stamp() -> dict[str, str]:
    """Kind of requirements -> digest it was installed from; empty where there is no readable stamp."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def works() -> bool:
    """Whether .venv has a Python that starts and has pip. A system upgrade can take the interpreter away under it."""
    check = "import sys, pip; sys.exit(sys.version_info < (3, 12))"
    try:
        return subprocess.run([PYTHON, "-c", check], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def missing(wanted: dict[str, str]) -> list[str]:
    """The pins that the environment does not hold: all at first, some when somebody ran pip in it since."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "wanted = json.load(sys.stdin)\n"
        "have = {d.name.lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(*(f'{n}=={v}' for n, v in wanted.items() if have.get(n.lower().replace('_', '-')) != v))"
    )
    asked = json.dumps(wanted).encode()
    return subprocess.run([PYTHON, "-c", code], input=asked, capture_output=True, check=True).stdout.decode().split()


def covered(stamp: dict[str, str], files: list[Path]) -> bool:
    """Whether the environment was finished for these requirement files as they are now, or for more than them."""
    kinds = [kind for kind in stamp if (REQUIREMENTS / f"{kind}.txt").exists()]
    finished = [requirement_files(kind) for kind in kinds if stamp[kind] == digest(requirement_files(kind))]
    return any(set(files) <= set(other) for other in finished)


def create() -> None:
    """Make an empty .venv in place of what is there, with the Python that lies under the one that runs."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"setup: Python {version} ({base})", flush=True)
    if sys.version_info[:2] > NEWEST_TESTED:
        print(f"setup: newer than {'.'.join(map(str, NEWEST_TESTED))}, the newest tested; packages may lack wheels")
    if VENV.exists():
        print(f"setup: {VENV} is unfinished or broken, making it again", flush=True)
        shutil.rmtree(VENV)
    print(f"setup: making {VENV}", flush=True)
    subprocess.run([base, "-m", "venv", str(VENV)], check=True)


def install(packages: list[str]) -> None:
    """Install the pins, then the project itself (editable), with pip's own progress on the terminal.

    Without dependencies: the pins are complete, and what pip would choose by itself nobody has tested.
    """
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    if packages:
        print(f"setup: installing {len(packages)} pinned packages", flush=True)
        subprocess.run([*pip, "install", "--no-deps", *packages], check=True)
    print("setup: installing jaxserve itself", flush=True)
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True)
    subprocess.run([*pip, "check"], stdout=subprocess.DEVNULL, check=True)


def setup(kind: str) -> None:
    """Bring .venv to what requirements/<kind>.txt says; quick when it is there already."""
    start_s = time.monotonic()
    files = requirement_files(kind)
    healthy = not MARKER.exists() and works()
    if not healthy:
        create()
    stamp, lacking = read_stamp(), missing(pins(files))
    if not lacking and covered(stamp, files):
        return
    MARKER.touch()
    install(lacking)
    STAMP.write_text(json.dumps(stamp | {kind: digest(files)}, indent=1) + "\n")
    MARKER.unlink()
    print(f"setup: done in {time.monotonic() - start_s:.0f} s", flush=True)


def main() -> int:
    """Set up under a lock, so that two commands started together do not install into each other's environment."""
    lock_path = ROOT / ".cache" / "setup.lock"
    lock_path.parent.mkdir(exist_ok=True)
    with open(lock_path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another setup of this folder to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            setup(sys.argv[1])
        except subprocess.CalledProcessError as error:
            command = " ".join(map(str, error.cmd[1:4]))
            print(f"setup: '{command} ...' failed with exit status {error.returncode}; see above", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\nsetup: interrupted; the next run starts the environment afresh", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
