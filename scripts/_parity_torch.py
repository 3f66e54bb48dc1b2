"""The part of check_parity that runs where torch is: makes random checkpoints by transformers, and their logits.

Runs in a process of its own, whose Python may be older, and so imports nothing of this repository. Each folder holds a
config.json; it writes the weights (bfloat16, as transformers saves them), reference.npz and torch.json there. In
reference.npz, of sequence i with n tokens:

- `ids_i` int32 [n]; `columns` int64 [C], the vocabulary ids whose logits are kept;
- `float32_values_i` float32 [n, C], `float32_argmax_i` int64 [n], `float32_largest_i` float32 [n] (max |logit| over the
  whole vocabulary): the truth, of the same weights in float32, with plain attention and experts;
- with --bfloat16, `bfloat16_values_i` and so on: the same by transformers in bfloat16.

torch.json holds versions, the device and seconds; or `failed`, what went wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

STD = 0.02
SHARPER = {  # standard deviations of others, by the end of the name
    "q_proj.weight": 0.04,  # or attention is nearly even, and hides what it attends to
    "q_b_proj.weight": 0.04,
    "mlp.gate.weight": 0.03,  # spreads a router's scores without taking sigmoids to their ends
}
NORM = (0.7, 1.3)
ROUTER_BIAS = (-0.02, 0.02)

NUDGE = 1e-5  # relative change of the embedding, above what float32 rounds ...
FLIP = 2e-4  # ... which moves a position's logits by more than this only where a router's choice hangs on it
MOST_DRAWS = 30


def main() -> int:
    """Returns 0 also where a model failed: its torch.json says so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--lengths", nargs="+", type=int, required=True, help="tokens of each sequence")
    parser.add_argument("--columns", type=int, required=True, help="vocabulary ids whose logits are kept")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), required=True)
    parser.add_argument("--bfloat16", action="store_true", help="logits in bfloat16 too")
    parser.add_argument(
        "--steady", action="store_true", help="only sequences whose experts float32 rounding decides not"
    )
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers.utils.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    for folder in args.folders:
        try:
            report = one_model(folder, args)
        except Exception as error:  # the other models shall still be measured
            traceback.print_exc()
            report = {"failed": f"{type(error).__name__}: {error}"}
        (folder / "torch.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{folder.name}, transformers: {json.dumps(report.get('seconds', report))}", flush=True)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return 0


def one_model(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Writes the files of one model but torch.json, whose content it returns."""
    seconds: dict[str, float] = {}
    marks_s = [time.monotonic()]

    def lap(name: str) -> None:
        if args.device == "cuda":
            torch.cuda.synchronize()
        marks_s.append(time.monotonic())
        seconds[name] = round(marks_s[-1] - marks_s[-2], 1)

    config_text = (folder / "config.json").read_text(encoding="utf-8")
    model = build(folder, args.seed, torch.device(args.device))
    lap("build")
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config_text, encoding="utf-8")  # with the published keys, not transformers' own
    lap("save")
    truth, random = copy.deepcopy(model).float(), np.random.RandomState(args.seed)
    columns = np.sort(random.permutation(model.config.vocab_size)[: args.columns])
    arrays: dict[str, np.ndarray] = {"columns": columns}
    for i, length in enumerate(args.lengths):
        ids, found = draw_sequence(truth, length, columns, random, args.steady)
        arrays |= {f"ids_{i}": ids.astype(np.int32)} | {f"float32_{name}_{i}": array for name, array in found.items()}
    del truth
    lap("float32")
    if args.bfloat16:
        for i in range(len(args.lengths)):
            found = logits(model, arrays[f"ids_{i}"], columns)
            arrays |= {f"bfloat16_{name}_{i}": array for name, array in found.items()}
        lap("bfloat16")
    np.savez(folder / "reference.npz", **arrays)
    lap("write")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"versions": versions, "device": device, "parameters": model.num_parameters(), "seconds": seconds}


def build(folder: Path, seed: int, device: torch.device) -> torch.nn.Module:
    """The folder's model on the device in bfloat16, with random weights that depend on seed and names alone."""
    config = AutoConfig.from_pretrained(folder)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **plain)
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device).manual_seed((zlib.crc32(name.encode()) + seed) % 2**32)
        with torch.no_grad():
            if name.endswith("norm.weight"):
                parameter.uniform_(*NORM, generator=generator)
            else:
                std = next((std for end, std in SHARPER.items() if name.endswith(end)), STD)
                parameter.normal_(0.0, std, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            generator = torch.Generator(device).manual_seed((zlib.crc32(name.encode()) + seed) % 2**32)
            buffer.data = torch.empty(buffer.shape, device=device).uniform_(*ROUTER_BIAS, generator=generator)
    return model.eval()


def draw_sequence(
    model: torch.nn.Module, length: int, columns: np.ndarray, random: np.random.RandomState, steady: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Random ids and what `logits` says of them; where asked for, such as no router's choice is too near to call."""
    embedding = model.get_input_embeddings().weight
    steady = steady and any(name.endswith("mlp.gate.weight") for name, _ in model.named_parameters())
    for _ in range(MOST_DRAWS):
        ids = random.randint(5, model.config.vocab_size, length)
        found = logits(model, ids, columns)
        if not steady:
            return ids, found
        before = embedding.data
        embedding.data = before * (1 + NUDGE * torch.randn_like(before))
        moved = np.abs(logits(model, ids, columns)["values"] - found["values"]).max(1)
        embedding.data = before
        if (moved < FLIP * found["largest"]).all():
            return ids, found
    raise RuntimeError(f"{MOST_DRAWS} sequences of {length} tokens were drawn, each has a choice of experts too near")


def logits(model: torch.nn.Module, ids: np.ndarray, columns: np.ndarray) -> dict[str, np.ndarray]:
    """What is kept of the logits of each position."""
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode():
        tokens = torch.from_numpy(ids.astype(np.int64)[None]).to(device)
        found = model(tokens, use_cache=False).logits[0]
        kept = found[:, torch.from_numpy(columns).to(device)].float()
        parts = {"values": kept, "argmax": found.argmax(-1), "largest": found.abs().amax(-1).float()}
    return {name: part.cpu().numpy() for name, part in parts.items()}


if __name__ == "__main__":
    sys.exit(main())
