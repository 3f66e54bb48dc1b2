"""The demo model as a GLM mixture of experts: takes its GGUF file; gives Hugging Face directories of `glm4_moe`.

A Llama is a `glm4_moe` whose layers are all dense, whose heads rotate whole and have no norm. And a feed-forward block
of width F is the sum of its slices: cut into one shared and three routed experts, all three always chosen with equal
scores (the router is zero) and weights of 1 (a third each, times 3), it is the same function again. So real weights
run through every part of that model.

`python -m checkpoints.smollm2_forms` leaves both in `.cache/` of the checkout, and does nothing where they are whole.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tqdm import tqdm

from checkpoints.assemble import read_part
from checkpoints.export import export
from checkpoints.names.table import Cut, Part
from checkpoints.readers.gguf import GgufReader
from checkpoints.readers.reader import Reader, SourceFile, TensorInfo, write_json
from checkpoints.smollm2 import fetch
from jaxserve.errors import JaxserveError

FORMS = ("dense", "moe")
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ROUTED = 3  # experts, all chosen; one more is shared


def form_config(llama: Mapping[str, Any], form: str, dtype: str) -> dict[str, Any]:
    """The same model's config.json in the other family's words."""
    layers, theta = llama["num_hidden_layers"], llama["rope_theta"]
    gone = ("mlp_bias", "rope_scaling")
    return {name: value for name, value in llama.items() if name not in gone} | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0},
        "partial_rotary_factor": 1.0,
        "use_qk_norm": False,
        "first_k_dense_replace": layers if form == "dense" else 0,
        "moe_intermediate_size": llama["intermediate_size"] // (ROUTED + 1),
        "n_routed_experts": ROUTED,
        "n_shared_experts": 1,
        "num_experts_per_tok": ROUTED,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(ROUTED),
        "num_nextn_predict_layers": 0,
        "torch_dtype": dtype,
    }


def expert_parts(config: Mapping[str, Any], mlp: str) -> dict[str, Part]:
    """A block's slices by name: rows of gate and up, columns of down."""
    width, hidden = config["moe_intermediate_size"], config["hidden_size"]
    total = width * (ROUTED + 1)
    experts = [f"{mlp}.shared_experts", *(f"{mlp}.experts.{i}" for i in range(ROUTED))]
    parts: dict[str, Part] = {}
    for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        whole, shape = ((total, hidden), (width, hidden)) if axis == 0 else ((hidden, total), (hidden, width))
        for i, expert in enumerate(experts):
            cut = Cut(whole, axis, i * width, (i + 1) * width)
            parts[f"{expert}.{name}.weight"] = Part(f"{mlp}.{name}.weight", whole, shape, cut)
    return parts


class FormReader:
    """A Llama's reader as one of the forms."""

    def __init__(self, reader: Reader, form: str, dtype: str) -> None:
        self.path = reader.path
        self.config = form_config(reader.config, form, dtype)
        self.generation_config = reader.generation_config
        self._reader, self._dtype = reader, DTYPES[dtype]
        self._parts = {name: Part(name, info.shape, info.shape) for name, info in reader.tensors.items()}
        self._zeros: dict[str, TensorInfo] = {}
        if form == "moe":
            for layer in range(self.config["num_hidden_layers"]):
                self._split(f"model.layers.{layer}.mlp")

    def _split(self, mlp: str) -> None:
        """Experts in place of a dense block."""
        parts = expert_parts(self.config, mlp)
        for part in parts.values():
            self._parts.pop(part.source, None)
        self._parts |= parts
        router = TensorInfo((ROUTED, self.config["hidden_size"]), self._dtype)
        bias = TensorInfo((ROUTED,), np.dtype(np.float32))  # in published files too, whatever the other tensors are
        self._zeros |= {f"{mlp}.gate.weight": router, f"{mlp}.gate.e_score_correction_bias": bias}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by Hugging Face name."""
        return {name: TensorInfo(part.shape, self._dtype) for name, part in self._parts.items()} | self._zeros

    def read(self, name: str) -> np.ndarray:
        """A tensor in memory of its own."""
        if name in self._zeros:
            return np.zeros(self._zeros[name].shape, self._zeros[name].dtype)
        return read_part(self._reader, self._parts[name]).astype(self._dtype)

    def fingerprints(self) -> list[SourceFile]:
        """Those of the Llama's file."""
        return self._reader.fingerprints()

    def copy_files(self, target: Path) -> None:
        """The Llama's tokenizer files and generation config, and a config of our own."""
        self._reader.copy_files(target)
        write_json(target / "config.json", self.config)


def fetch_form(cache_dir: Path, form: str, dtype: str = "float32") -> Path:
    """Path of a form (one of FORMS) as a Hugging Face directory in `cache_dir`; made if it is not there."""
    directory = cache_dir / f"smollm2-glm-{form}-{dtype}"
    if not directory.is_dir():
        reader = FormReader(GgufReader(fetch(cache_dir)), form, dtype)
        total = sum(info.num_bytes for info in reader.tensors.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc=directory.name, disable=None) as bar:
            export(reader, directory, lambda name, num_bytes: bar.update(num_bytes) and None)
    return directory


def main(argv: list[str] | None = None) -> int:
    """Write both into the checkout's `.cache/`."""
    parser = argparse.ArgumentParser(description="Write the demo model as two glm4_moe checkpoints.")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    args = parser.parse_args(argv)
    try:
        for form in FORMS:
            print(fetch_form(Path(__file__).resolve().parents[1] / ".cache", form, args.dtype))
    except JaxserveError as error:
        print(f"smollm2_forms: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
