"""Takes the path that a user gave; says what lies there, and where its config and tokenizer files are. No JAX here."""

from __future__ import annotations

import enum
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from checkpoints.readers.gguf import GgufReader
from checkpoints.readers.safetensors import TOKENIZER_FILES
from jaxserve import environment
from jaxserve.errors import CheckpointError

PROVENANCE_NAME = "conversion.json"
EXPECTED = "a Hugging Face directory (config.json and .safetensors), a GGUF file, or a converted checkpoint"
GGUF_START = b"GGUF"
GGUF_VERSION = 1  # of what we make from a GGUF file's metadata; another number makes it anew


class Kind(enum.Enum):
    """What a model's path holds."""

    HUGGING_FACE = "Hugging Face directory"
    GGUF = "GGUF file"
    CONVERTED = "converted checkpoint"


def kind_of(path: Path) -> Kind:
    """What lies at `path`. Raises CheckpointError saying what was found when it is none of the three."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory, expected: {EXPECTED}")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(GGUF_START)) == GGUF_START:
                return Kind.GGUF
        raise CheckpointError(f"{path}: a file that is not GGUF, expected: {EXPECTED}")
    if path.name.endswith(partial_of(Path("x")).name.removeprefix("x")):
        raise CheckpointError(f"{path}: an unfinished conversion; run scripts/convert_checkpoint.py again to finish it")
    if (path / PROVENANCE_NAME).is_file():
        return Kind.CONVERTED
    if (path / "config.json").is_file():
        return Kind.HUGGING_FACE
    names = sorted(entry.name for entry in path.iterdir())
    shown = f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names else "nothing"
    raise CheckpointError(f"{path}: a directory without config.json (it holds {shown}), expected: {EXPECTED}")


def partial_of(target: Path) -> Path:
    """Where `target` is made before it is whole."""
    return target.with_name(target.name + ".partial")


def model_directory(model: str | Path) -> Path:
    """The directory with a model's config.json and tokenizer files.

    A GGUF file's are made from its metadata once and kept in the user's cache folder. Raises CheckpointError or
    ModelError where there is no model, or none that we know.
    """
    path = Path(model)
    return path if kind_of(path) is not Kind.GGUF else gguf_directory(path)


def gguf_directory(path: Path) -> Path:
    """Config and tokenizer files of a GGUF file, in the cache folder."""
    status = path.stat()
    facts = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {GGUF_VERSION}"
    base = Path(environment.default_compile_cache()).parent / "gguf"
    folder = base / hashlib.sha256(facts.encode()).hexdigest()[:24]
    if not (folder / "config.json").is_file():
        reader = GgufReader(path)
        try:
            base.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(dir=base))
            try:
                reader.copy_files(fresh)
                put_in_place(fresh, folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"{base}: the files made from {path} cannot be kept there: {error}") from error
    return folder


def put_in_place(fresh: Path, folder: Path) -> None:
    """Rename; if another process was first, its result is the same."""
    try:
        os.rename(fresh, folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def tokenizer_directory(folder: Path) -> Path | None:
    """The folder itself if it holds tokenizer files."""
    return folder if any((folder / name).is_file() for name in TOKENIZER_FILES) else None
