"""Takes trained weights; gives a Hugging Face directory of them: plain bfloat16, or fp8 in DeepSeek's scaled blocks.

The loader's name table, which says of each parameter what source tensors it is made of, is read backwards here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from checkpoints.export import write_safetensors
from checkpoints.files import partial_of
from checkpoints.fp8 import FIELD, quantize
from checkpoints.names.families import name_table
from checkpoints.names.table import NameTable, Part
from checkpoints.readers.reader import TensorInfo, read_json, write_json
from checkpoints.readers.safetensors import SINGLE_NAME, TOKENIZER_FILES
from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import SplitDecoder

BLOCK = (128, 128)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# What DeepSeek's fp8 files keep plain: embedding, head, norms, routers, and what joins an MTP layer to the decoder.
PLAIN = ("embed_tokens.weight", "lm_head.weight", "norm.weight", ".mlp.gate.weight", ".eh_proj.weight")
KEPT_FLOAT32 = (".mlp.gate.weight", ".e_score_correction_bias")  # as conversion stores them, and their ties matter
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}
OTHER_FILES = ("generation_config.json", *TOKENIZER_FILES)


def source_tensors(table: NameTable, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every source tensor of the table, put together from the parameters, in their dtype."""
    tensors: dict[str, np.ndarray] = {}
    for name, target in table.targets.items():
        value = parameters[name]
        for index, piece in enumerate(target.pieces):
            whole = value[index] if target.stacked else value
            ends = np.cumsum([part.shape[piece.axis] for part in piece.parts])[:-1]
            for part, values in zip(piece.parts, np.split(whole, ends, axis=piece.axis), strict=True):
                put(tensors, part, values)
    return tensors


def put(tensors: dict[str, np.ndarray], part: Part, values: np.ndarray) -> None:
    """Write a part's values to where they stand in their source tensor."""
    tensor = tensors.setdefault(part.source, np.empty(part.source_shape, values.dtype))
    if part.cut is None:
        tensor[...] = values.reshape(part.source_shape)
        return
    view = tensor.reshape(part.cut.view)  # of the same memory: the tensor is contiguous
    view[part.cut.index] = values.reshape(view[part.cut.index].shape)


def hugging_face(split: SplitDecoder, model_type: str, weights: Sequence[jax.Array]) -> dict[str, np.ndarray]:
    """The weights under the family's names, float32, MTP layers included; the embedding and head of an MTP layer, which
    are the decoder's own once more, are left out."""
    table = name_table(model_type, split.spec)
    parameters = {name: np.asarray(value, np.float32) for name, value in zip(split.names, weights, strict=True)}
    return source_tensors(table, parameters)


def stored(tensors: Mapping[str, np.ndarray], fp8: bool) -> dict[str, np.ndarray]:
    """As they are written: with `fp8` matrices as that, their scales beside them; what else there is in bfloat16."""
    found: dict[str, np.ndarray] = {}
    for name, value in sorted(tensors.items()):
        if fp8 and value.ndim == 2 and not name.endswith(PLAIN):
            weight, scale = quantize(value, BLOCK)
            found |= {name: weight, name + "_scale_inv": scale}
        else:
            found[name] = value if name.endswith(KEPT_FLOAT32) else value.astype(BFLOAT16)
    return found


def export_model(
    split: SplitDecoder, weights: Sequence[jax.Array], config_folder: Path, target: Path, *, fp8: bool = False
) -> int:
    """Write `target`, a new directory; config and tokenizer files come from `config_folder`. Returns its bytes.

    Raises CheckpointError where the target is there already.
    """
    if target.exists():
        raise CheckpointError(f"{target}: is there already")
    config = read_json(config_folder / "config.json")
    arrays = stored(hugging_face(split, config["model_type"], weights), fp8)
    fresh = partial_of(target)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    infos = {name: TensorInfo(array.shape, array.dtype) for name, array in arrays.items()}
    write_safetensors(fresh / SINGLE_NAME, infos, arrays.items())
    plain = {name: value for name, value in config.items() if name != FIELD}
    write_json(fresh / "config.json", plain | ({FIELD: QUANTIZATION} if fp8 else {}))
    for name in OTHER_FILES:
        if (config_folder / name).is_file():
            shutil.copyfile(config_folder / name, fresh / name)
    fresh.rename(target)
    return sum(path.stat().st_size for path in target.iterdir())
