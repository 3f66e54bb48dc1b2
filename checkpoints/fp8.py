"""Takes a reader of fp8 weights with scales beside them; gives a reader of plain float32 weights, one at a time.

What the scales mean is said by the config's quantization_config, never by a family's name or by the tensors' shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.assemble import FLOATS, list_faults
from checkpoints.readers.reader import Reader, SourceFile, TensorInfo, read_json, write_json
from jaxserve.errors import CheckpointError, ModelError

FIELD = "quantization_config"
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0  # of e4m3
SCALE_DTYPES = (*FLOATS, np.dtype(ml_dtypes.float8_e8m0fnu))
VALUES = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)  # a table is faster than the dtype's own cast
ROWS = 128  # dequantised at a time where no block says it


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's fp8 weights [out, in] are scaled; the scale multiplies, whatever its name says."""

    scale: str  # its name where the weight's is `weight`
    block: tuple[int, int] | None = None  # rows and columns that share a scale; else one a row, or one a tensor
    per_row: bool = False
    ignored: tuple[str, ...] = ()  # modules that are not quantised: names, or re:<regular expression>
    unused: tuple[str, ...] = ()  # what else may stand beside a weight: scales of activations

    def __str__(self) -> str:
        if self.block:
            return f"fp8 in blocks of {self.block[0]}x{self.block[1]}"
        return f"fp8 with a scale for each {'output channel' if self.per_row else 'tensor'}"

    def scale_shapes(self, weight: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scale of a weight may have. Blocks at the edges may be cut off."""
        if self.block:
            return (tuple(-(-have // each) for have, each in zip(weight, self.block, strict=True)),)
        return ((weight[0], 1), (weight[0],)) if self.per_row else ((), (1,))


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json; None where nothing is quantised. Raises ModelError for one that we do not know."""
    fields = config.get(FIELD)
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise ModelError(f"config.json: {FIELD} is {fields!r}, expected: an object")
    method = fields.get("quant_method")
    if method == "fp8":
        return block_scheme(fields)
    if method == "compressed-tensors":
        return channel_scheme(fields)
    raise ModelError(f"config.json: {FIELD}.quant_method is {method!r}, supported: 'fp8', 'compressed-tensors'")


def block_scheme(fields: Mapping[str, Any]) -> Scheme:
    """DeepSeek's: `weight_scale_inv`, one scale for each block."""
    if fields.get("fmt", "e4m3") != "e4m3":
        raise ModelError(f"config.json: {FIELD}.fmt is {fields['fmt']!r}, supported: 'e4m3'")
    block = fields.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ModelError(f"config.json: {FIELD}.weight_block_size is {block!r}, expected: [rows, columns]")
    return Scheme("weight_scale_inv", block=(block[0], block[1]))


def channel_scheme(fields: Mapping[str, Any]) -> Scheme:
    """compressed-tensors' 8-bit floats: `weight_scale`, one for each output channel or each tensor."""
    groups = fields.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") or {} for group in groups if isinstance(group, dict)]
    kinds: set[tuple[Any, ...]] = {tuple(one.get(name) for name in ("type", "num_bits", "strategy")) for one in weights}
    allowed: dict[tuple[Any, ...], bool] = {("float", 8, "channel"): True, ("float", 8, "tensor"): False}
    if len(kinds) != 1 or not kinds <= allowed.keys():
        given = ", ".join(" ".join(map(str, kind)) for kind in sorted(kinds, key=str)) or "nothing"
        raise ModelError(
            f"config.json: {FIELD}.config_groups holds weights of {given}, supported: float 8 channel, float 8 tensor"
        )
    ignored = tuple(fields.get("ignore") or ())
    return Scheme("weight_scale", per_row=allowed[kinds.pop()], ignored=ignored, unused=("input_scale",))


class DequantizedReader:
    """The same model with float32 in place of each fp8 weight and its scale.

    Raises CheckpointError, from the headers alone, where a weight has no scale, a scale no weight, or a shape is wrong.
    """

    def __init__(self, reader: Reader, scheme: Scheme) -> None:
        self.path: Path = reader.path
        self.config: dict[str, Any] = {name: value for name, value in reader.config.items() if name != FIELD}
        self.generation_config = reader.generation_config
        self._reader, self._scheme = reader, scheme
        stored = reader.tensors
        weights = {name for name, info in stored.items() if name.endswith(".weight") and info.dtype == FP8}
        self._scales = {name: name.removesuffix("weight") + scheme.scale for name in weights}
        check_scales(self.path, stored, self._scales, scheme)
        gone = {name for name in stored if name.rpartition(".")[2] in (scheme.scale, *scheme.unused)}
        self._tensors = {
            name: TensorInfo(info.shape, np.dtype(np.float32)) if name in weights else info
            for name, info in stored.items()
            if name not in gone
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, as `read` gives them."""
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory of its own."""
        values = self._reader.read(name)
        if name not in self._scales:
            return values
        return dequantize(values, self._reader.read(self._scales[name]), self._scheme.block)

    def fingerprints(self) -> list[SourceFile]:
        """Those of the fp8 files."""
        return self._reader.fingerprints()

    def copy_files(self, target: Path) -> None:
        """Config, generation config and tokenizer files; the config no longer speaks of quantisation."""
        self._reader.copy_files(target)
        config = read_json(target / "config.json")
        config.pop(FIELD, None)
        write_json(target / "config.json", config)


def check_scales(path: Path, stored: Mapping[str, TensorInfo], scales: Mapping[str, str], scheme: Scheme) -> None:
    """Each fp8 weight has its scale, each scale its weight, and nothing is quantised that should not be."""
    known = set(scales.values())
    pairs = [(weight, scale) for weight, scale in sorted(scales.items()) if scale in stored]
    faults = {
        "without a scale": sorted(weight for weight, scale in scales.items() if scale not in stored),
        "scales without an fp8 weight": sorted(
            name for name in stored if name.endswith(f".{scheme.scale}") and name not in known
        ),
        "misshapen": [
            f"{scale} {stored[scale]}, expected {' or '.join(str(list(shape)) for shape in shapes)}"
            for weight, scale in pairs
            for shapes in [allowed_shapes(stored[weight].shape, scheme)]
            if stored[scale].shape not in shapes
        ],
        "scales that are no floats": [
            f"{scale} {stored[scale]}" for _, scale in pairs if stored[scale].dtype not in SCALE_DTYPES
        ],
        f"fp8 though {FIELD}.ignore names them": sorted(
            weight for weight in scales if is_ignored(weight.removesuffix(".weight"), scheme.ignored)
        ),
    }
    if any(faults.values()):
        raise CheckpointError(f"{path}: fp8 weights ({scheme}) do not fit: {list_faults(faults)}")


def allowed_shapes(weight: tuple[int, ...], scheme: Scheme) -> tuple[tuple[int, ...], ...]:
    """Of a weight's scale; none for what is no matrix."""
    return scheme.scale_shapes((weight[0], weight[1])) if len(weight) == 2 else ()


def is_ignored(module: str, ignored: Iterable[str]) -> bool:
    """Whether the config's list names the module, as itself or by a pattern (`re:` in front)."""
    return any(re.match(one[3:], module) if one.startswith("re:") else one == module for one in ignored)


def dequantize(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int] | None) -> np.ndarray:
    """weight e4m3 [out, in] times scale: float32. With `block` the scale is [ceil(out/rows), ceil(in/columns)]."""
    out, columns = weight.shape
    stored, wide = weight.view(np.uint8), scale.astype(np.float32)
    values = np.empty((out, columns), np.float32)
    step = block[0] if block else ROWS
    for index, row in enumerate(range(0, out, step)):
        rows = slice(row, min(row + step, out))
        if block:
            factor = np.repeat(wide[index], block[1])[:columns]
        else:
            factor = wide.reshape(-1, 1)[rows] if wide.size > 1 else wide.reshape(())
        np.multiply(VALUES[stored[rows]], factor, out=values[rows])
    return values


def quantize(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """weight float [out, in] -> e4m3 and float32 scales [ceil(out/rows), ceil(in/columns)], for `dequantize`.

    A block's largest value becomes e4m3's (DeepSeek-V3, arXiv 2412.19437, 3.3.2); a block of zeros has scale 1.
    """
    out, columns = weight.shape
    padded = np.pad(weight.astype(np.float32), [(0, -n % each) for n, each in zip(weight.shape, block, strict=True)])
    blocks = padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    largest = np.abs(blocks).max(axis=(1, 3))
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    values = np.clip(blocks / scale[:, None, :, None], -LARGEST, LARGEST).reshape(padded.shape)
    return values[:out, :columns].astype(FP8), scale
