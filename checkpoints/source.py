"""Takes the path that a user gave; gives a ModelSource: config at once, weights when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from checkpoints.files import Kind, kind_of, model_directory, tokenizer_directory
from checkpoints.fp8 import DequantizedReader, read_scheme
from checkpoints.load import load_weights
from checkpoints.names.families import name_table
from checkpoints.names.mlp import SHARED
from checkpoints.readers.gguf import GgufReader
from checkpoints.readers.reader import Reader, read_json
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.restore import WEIGHTS_NAME, restore
from jaxserve.errors import CheckpointError
from jaxserve.models.families import model_spec
from jaxserve.models.fields import checkpoint_dtype
from jaxserve.models.spec import ModelSpec

type Wanted = Mapping[str, jax.ShapeDtypeStruct]  # each with its sharding


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk, of any of the three kinds.

    `load(wanted)` reads the weights straight to the devices: parameter name -> jax.Array of the wanted shape, dtype and
    sharding. Those of MTP layers may be left out of `wanted`, all together, and no others. It raises CheckpointError
    where the files do not fit.
    """

    path: Path
    kind: Kind
    config: dict[str, Any]  # as in config.json
    generation_config: dict[str, Any]  # empty where there is none
    tokenizer_dir: Path | None
    dtype: str  # of the files: float32, float16 or bfloat16
    load: Callable[[Wanted], dict[str, jax.Array]]


def open_model(path: str | Path) -> ModelSource:
    """Recognise what lies at `path` and read its config; the weights may still be missing or damaged.

    Raises CheckpointError saying what was found when it is no model, ModelError for one that we do not know.
    """
    path = Path(path)
    kind = kind_of(path)
    folder = model_directory(path)
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return ModelSource(
        path=path,
        kind=kind,
        config=config,
        generation_config=read_json(generation) if generation.is_file() else {},
        tokenizer_dir=tokenizer_directory(folder),
        dtype=checkpoint_dtype(config),
        load=lambda wanted: load_from(path, kind, wanted),
    )


def load_from(path: Path, kind: Kind, wanted: Wanted) -> dict[str, jax.Array]:
    """Weights of any kind of source."""
    if kind is Kind.CONVERTED:
        return restore(path / WEIGHTS_NAME, wanted)
    reader = open_reader(path, kind)
    table = name_table(reader.config.get("model_type"), as_asked(model_spec(reader.config), wanted))
    return load_weights(reader, table, wanted)


def as_asked(spec: ModelSpec, wanted: Wanted) -> ModelSpec:
    """The model with shared experts in parameters of their own where such are wanted, else among the others."""
    apart = any(name.endswith(tuple(SHARED.values())) for name in wanted)
    return spec if spec.moe is None or apart else replace(spec, moe=spec.moe.joined())


def open_reader(path: Path, kind: Kind, *, dequantize: bool = False) -> Reader:
    """A reader of what is not converted yet; checks all headers.

    Raises CheckpointError where the weights are quantised and are not to be made plain, ModelError where they are
    quantised in a way that we do not know.
    """
    if kind is Kind.GGUF:
        return GgufReader(path)
    reader = SafetensorsReader(path)
    scheme = read_scheme(reader.config)
    if scheme is None:
        return reader
    if not dequantize:
        raise CheckpointError(
            f"{path}: the weights are {scheme}, which cannot be kept yet; make plain ones of them with "
            "scripts/convert_checkpoint.py SOURCE TARGET --dequantize"
        )
    return DequantizedReader(reader, scheme)
