"""Takes a GGUF file (llama.cpp's format); gives its tensors dequantised, under Hugging Face names and row order.

The `gguf` package parses the file and knows the quantised formats; data is read piece by piece, since its own map would
count every page ever touched as ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from checkpoints.readers.gguf_config import llama_config
from checkpoints.readers.gguf_tokenizer import write_tokenizer
from checkpoints.readers.reader import SourceFile, TensorInfo, write_json
from checkpoints.readers.safetensors import fingerprint, read_bytes
from jaxserve.errors import CheckpointError, ModelError

DEQUANTISED_BYTES = 16 << 20  # at a time: dequantising makes several temporaries of this size

PLAIN: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}

NAMES = {  # ours below `blk.N.` -> Hugging Face's below `model.layers.N.`
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What gguf.quants can dequantise beside the plain ones.
QUANTISED = {
    GGMLQuantizationType[name]
    for name in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    )
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies, and how it is stored."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as in Hugging Face files
    offset_bytes: int
    num_bytes: int
    heads: int  # of rotated rows, whose order llama.cpp changed; 0 for all others

    @property
    def info(self) -> TensorInfo:
        """As `read` gives it."""
        return TensorInfo(self.shape, PLAIN.get(self.kind, np.dtype(np.float32)))


class GgufReader:
    """A GGUF file of the llama architecture. Raises CheckpointError or ModelError where it cannot be one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        parsed = parse(path)
        self.metadata: dict[str, Any] = {name: field.contents() for name, field in parsed.fields.items()}
        kinds = {tensor.name: GGMLQuantizationType(tensor.tensor_type) for tensor in parsed.tensors}
        factors = read_rope_factors(path, parsed)
        self.config: dict[str, Any] = llama_config(path, self.metadata, set(kinds), config_dtype(kinds), factors)
        self.generation_config: dict[str, Any] = {
            name: self.config[name] for name in ("bos_token_id", "eos_token_id") if name in self.config
        }
        self._stored = stored_tensors(path, parsed, self.config)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face name."""
        return {name: stored.info for name, stored in self._stored.items()}

    def read(self, name: str) -> np.ndarray:
        """A tensor, dequantised to float32 where it was quantised, rows in Hugging Face's order."""
        stored = self._stored[name]
        if stored.kind in PLAIN:
            data = read_bytes(self.path, stored.offset_bytes, stored.num_bytes).view(PLAIN[stored.kind])
            values = data.reshape(stored.shape)
        else:
            values = self._dequantised(stored)
        return unpermute(values, stored.heads) if stored.heads else values

    def _dequantised(self, stored: Stored) -> np.ndarray:
        """Row by row, so that the temporaries stay small."""
        values = np.empty(stored.shape, np.float32)
        rows = values.reshape(-1, stored.shape[-1])
        row_bytes = stored.num_bytes // len(rows)
        step = max(1, DEQUANTISED_BYTES // (rows.shape[1] * 4))
        for row in range(0, len(rows), step):
            count = min(step, len(rows) - row)
            packed = read_bytes(self.path, stored.offset_bytes + row * row_bytes, count * row_bytes)
            rows[row : row + count] = dequantize(packed.reshape(count, row_bytes), stored.kind)
        return values

    def fingerprints(self) -> list[SourceFile]:
        """See SourceFile."""
        return [fingerprint(self.path, [(stored.offset_bytes, stored.num_bytes) for stored in self._stored.values()])]

    def copy_files(self, target: Path) -> None:
        """Write config, generation config and tokenizer files made from the metadata."""
        write_json(target / "config.json", self.config)
        write_json(target / "generation_config.json", self.generation_config)
        write_tokenizer(self.path, self.metadata, target)


class ParsedGguf(GGUFReader):
    """The package's parser over a plain array. It takes hundreds of thousands of slices, and each costs several times
    more of the numpy.memmap that it would use (4.2 s against 1.2 s for a vocabulary of 49,152)."""

    @property
    def data(self) -> np.ndarray:
        """The file's bytes."""
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = mapped.view(np.ndarray)


def parse(path: Path) -> GGUFReader:
    """The gguf package's view of the file. Raises CheckpointError where the file is not whole."""
    try:
        return ParsedGguf(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise CheckpointError(f"{path}: damaged or truncated GGUF file: {error}") from error


def config_dtype(kinds: Mapping[str, GGMLQuantizationType]) -> str:
    """The dtype that holds all values exactly: float32 for what was quantised."""
    matrices = {kind for name, kind in kinds.items() if "norm" not in name and name != ROPE_FACTORS}
    if len(matrices) == 1:
        return {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}.get(*matrices, "float32")
    return "float32"


def read_rope_factors(path: Path, parsed: GGUFReader) -> np.ndarray | None:
    """Llama 3.x's divisors of the rotary frequencies, which llama.cpp stores instead of the rule's parameters."""
    for tensor in parsed.tensors:
        if tensor.name == ROPE_FACTORS:
            return read_bytes(path, int(tensor.data_offset), int(tensor.n_bytes)).view(np.float32)
    return None


def stored_tensors(path: Path, parsed: GGUFReader, config: Mapping[str, Any]) -> dict[str, Stored]:
    """All tensors by Hugging Face name, each inside the file."""
    file_bytes = path.stat().st_size
    found: dict[str, Stored] = {}
    for tensor in parsed.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name, heads = hugging_face_name(path, tensor.name, config)
        kind = GGMLQuantizationType(tensor.tensor_type)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        offset_bytes, num_bytes = int(tensor.data_offset), int(tensor.n_bytes)
        if kind not in PLAIN and kind not in QUANTISED:
            raise ModelError(f"{path}: {tensor.name} is stored as {kind.name}, which is not supported")
        block, _ = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{path}: {tensor.name}: rows of {shape[-1]} are no multiple of {kind.name}'s {block}"
            )
        if offset_bytes + num_bytes > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: {tensor.name} ends at byte {offset_bytes + num_bytes} of {file_bytes}"
            )
        found[name] = Stored(kind, shape, offset_bytes, num_bytes, heads)
    return found


def hugging_face_name(path: Path, name: str, config: Mapping[str, Any]) -> tuple[str, int]:
    """A GGUF tensor's name in Hugging Face's words, and of how many heads its rows are if they are rotated ones."""
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if kind in ("weight", "bias") and block and block[2] in NAMES:
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(block[2])
        return f"model.layers.{block[1]}.{NAMES[block[2]]}.{kind}", config[heads] if heads else 0
    if kind == "weight" and stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.weight", 0
    raise ModelError(f"{path}: tensor {name} is not one of the llama architecture's")


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's rows of a head are 0, half, 1, half + 1, ...; Hugging Face's are 0, 1, ..., half, half + 1, ..."""
    half = values.shape[0] // heads // 2
    return np.ascontiguousarray(values.reshape(heads, half, 2, -1).swapaxes(1, 2)).reshape(values.shape)
