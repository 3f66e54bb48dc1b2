"""Takes any reader; gives a Hugging Face directory: model.safetensors (streamed), config and tokenizer files."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from checkpoints.files import partial_of
from checkpoints.readers.reader import Reader, TensorInfo
from checkpoints.readers.safetensors import DTYPES, SINGLE_NAME
from jaxserve.errors import CheckpointError

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Step = Callable[[str, int], None]  # a tensor's name and bytes, when it is done


def no_progress(name: str, num_bytes: int) -> None:
    """For callers that show none."""


def export(reader: Reader, target: Path, step: Step = no_progress) -> None:
    """Write a reader's tensors, one after the other, and files as a Hugging Face directory.

    `target` appears when it is whole. Raises CheckpointError where it is there already.
    """
    if target.exists():
        raise CheckpointError(f"{target}: is there already")
    unfinished = partial_of(target)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        reader.copy_files(unfinished)
        write_safetensors(
            unfinished / SINGLE_NAME, reader.tensors, ((name, reader.read(name)) for name in reader.tensors), step
        )
        unfinished.rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_safetensors(
    path: Path,
    infos: Mapping[str, TensorInfo],
    tensors: Iterable[tuple[str, np.ndarray]],
    step: Step = no_progress,
) -> None:
    """Write tensors, which come in the order of `infos`, one after the other: memory holds one."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, info in infos.items():
        header[name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [at, at + info.num_bytes],
        }
        at += info.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, info), (given, array) in zip(infos.items(), tensors, strict=True):
            assert (given, array.shape, array.dtype) == (name, info.shape, info.dtype), name
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            step(name, info.num_bytes)
