"""A tiny random model as transformers saves it, and transformers' own answers for it: what the families' files share.

Runs where torch is, and so imports nothing of this repository. A folder holds config.json, generation_config.json,
model.safetensors (bfloat16; the correction bias of a router float32, as in the published checkpoints) and
reference.npz, which holds, all from the bfloat16 weights loaded as float32 and the plain (eager) attention and experts:

- `ids_i` int32 [n], `logits_i` float32 [n, vocabulary], i = 0, 1, 2: a sequence and the logits at all its positions.
- `greedy_prompt` int32 [8], `greedy_ids` int32 [64]: the prompt and the best id at each step, stop ids ignored.
- with a multi-token-prediction (MTP) layer, `mtp_ids_i` int32 [n - 1], `mtp_logits_i` float32 [n - 1, vocabulary].
  Row r has the main model's hidden state at position r, after the final norm, and the embedding of `mtp_ids_i[r]`,
  which is `ids_i[r + 1]`, the embedding first before eh_proj; no row is masked. They are the forecast of the token at
  position r + 2. What computes them is what `generate(use_mtp=True)` drafts with (MtpModel.forward_layer, MtpCache),
  on the whole sequence at once. It numbers a row by the token that it embeds: the rotary position is r + 1, and the
  row attends to rows 0 .. r. As a rotary product knows differences only, counting from 0 gives the same logits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

NEW_TOKENS = 64
LEAST_MARGIN = 1e-4  # of the best logit over the second, relative to the largest: less is rounding's to decide
NUDGE = 3e-5  # relative change of all weights, far above rounding; it moves logits by about as much ...
FLIP = 1e-3  # ... and by more than this only where a router's choice hangs on it: such sequences are left out
LENGTHS = (40, 24, 5)
PROMPT_TOKENS = 8
RANGE = 0.25  # standard deviation of the weights: logits and router scores are spread at these widths
SMALL = 2.0**-9  # exact in bfloat16

BASE: dict[str, Any] = {  # few weights, and all that may be sharded is a multiple of 8
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "initializer_range": RANGE,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Variant:
    """One folder: the fields of its config, and what makes its weights different from plainly random ones.

    `mtp` adds the weights of one MTP layer. `router_bias` is the range of e_score_correction_bias. `small` names the
    tensors, by a part of their names, whose values are small enough for the epsilon of the norm behind them to count.
    `published` writes config.json with the keys of the published checkpoints in place of transformers 5's.
    """

    fields: dict[str, Any]
    mtp: bool = False
    router_bias: tuple[float, float] = (-0.3, 0.3)
    small: tuple[str, ...] = ()
    published: bool = False
    without: tuple[str, ...] = ()  # keys that config.json lacks


def make(folder: Path, config_class: type[PreTrainedConfig], variant: Variant) -> None:
    """Writes the folder. Raises AssertionError if transformers does not take the weights as they were written."""
    seed = zlib.crc32("/".join(folder.parts[-2:]).encode())
    layers = variant.fields.get("num_hidden_layers", BASE["num_hidden_layers"])
    config = config_class(**(BASE | variant.fields | {"num_hidden_layers": layers + variant.mtp}))
    model = AutoModelForCausalLM.from_config(config)
    fill(model, variant, seed)
    model.to(torch.bfloat16)
    for name, bias in router_biases(model):  # the cast has rounded it
        bias.data = draw_between(variant.router_bias, tuple(bias.shape), name, seed)
    model.save_pretrained(folder)
    edit_config(folder, lambda entry: saved_config(entry, variant, layers))
    if variant.mtp:
        add_mtp(folder, layers, seed)
    write_reference(folder, Answers.of(folder, layers, variant.mtp), seed)


def draw(shape: tuple[int, ...], name: str, seed: int) -> torch.Tensor:
    """Normal float32 values that depend on the tensor's name and the seed alone."""
    random = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    return torch.from_numpy((RANGE * random.standard_normal(shape)).astype(np.float32))


def draw_between(limits: tuple[float, float], shape: tuple[int, ...], name: str, seed: int) -> torch.Tensor:
    """Uniform float32 values that depend on the tensor's name and the seed alone."""
    random = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    return torch.from_numpy(random.uniform(*limits, shape).astype(np.float32))


def fill(model: torch.nn.Module, variant: Variant, seed: int) -> None:
    """Random weights in place of transformers' own."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = draw_between((0.5, 1.5), tuple(parameter.shape), name, seed)
            continue
        parameter.data = draw(tuple(parameter.shape), name, seed)
        if any(part in name for part in variant.small):
            rows = model.config.kv_lora_rank if "kv_a_proj" in name else len(parameter)  # not those of the rotary key
            parameter.data[:rows] *= SMALL


def router_biases(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The correction biases of all routers, with their names."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def saved_config(entry: dict[str, Any], variant: Variant, layers: int) -> dict[str, Any]:
    """config.json as it shall be, from what transformers wrote for a model that has the MTP layer as a last one."""
    entry["num_hidden_layers"] = layers
    if "mlp_layer_types" in entry:
        entry["mlp_layer_types"] = entry["mlp_layer_types"][:layers]
    if variant.published:
        rope = entry.pop("rope_parameters")
        entry["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        if "partial_rotary_factor" in rope:
            entry["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        entry["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        entry["torch_dtype"] = entry.pop("dtype")
    return {key: value for key, value in entry.items() if key not in variant.without}


def edit_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrites config.json."""
    path = folder / "config.json"
    entry = change(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(entry, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def add_mtp(folder: Path, layers: int, seed: int) -> None:
    """The tensors of the MTP layer beside those of its block, which transformers wrote as the last layer."""
    tensors = load_file(folder / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    hidden = embedding.shape[1]
    prefix = f"model.layers.{layers}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        full = f"{prefix}{name}.weight"
        tensors[full] = draw_between((0.5, 1.5), (hidden,), full, seed).bfloat16()
    tensors[f"{prefix}eh_proj.weight"] = draw((hidden, 2 * hidden), f"{prefix}eh_proj.weight", seed).bfloat16()
    tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()
    tensors[f"{prefix}shared_head.head.weight"] = head.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, layers: int) -> torch.nn.Module:
    """The folder's model in float32, plain attention and experts; all of the file but an MTP layer is in it."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **plain)
    left = [name for name in report["unexpected_keys"] if not name.startswith(f"model.layers.{layers}.")]
    assert not (left or report["missing_keys"] or report["mismatched_keys"]), report
    return model.eval()


@dataclass(frozen=True)
class Answers:
    """What a reference has to give: for ids int64 [n], named logits float32 [n or n - 1, vocabulary]."""

    vocabulary: int
    logits: Callable[[np.ndarray], dict[str, np.ndarray]]
    nudged: Callable[[np.ndarray], dict[str, np.ndarray]]  # the same of a model that differs a little
    greedy: Callable[[np.ndarray], tuple[list[int], float]]  # ids and the least margin, from a prompt

    @classmethod
    def of(cls, folder: Path, layers: int, mtp: bool) -> Answers:
        """transformers' answers for the model of a folder."""
        model, other = load(folder, layers), load(folder, layers)
        for name, parameter in other.named_parameters():
            parameter.data *= 1 + NUDGE / RANGE * draw(tuple(parameter.shape), name, 0)

        def greedy(ids: np.ndarray) -> tuple[list[int], float]:
            _, chosen, margin = continue_greedily(model, ids.tolist())
            return chosen, margin

        return cls(model.config.vocab_size, logits_of(model, mtp), logits_of(other, mtp), greedy)

    def steady(self, ids: np.ndarray) -> bool:
        """Whether no router's choice between two experts is so near that rounding may turn it."""
        others = self.nudged(ids)
        return all(
            np.abs(others[name] - want).max() < FLIP * np.abs(want).max() for name, want in self.logits(ids).items()
        )


def logits_of(model: torch.nn.Module, mtp: bool) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """A model's logits at all positions, and those of its MTP layer."""
    drafts = mtp_layer(model) if mtp else None

    def logits(ids: np.ndarray) -> dict[str, np.ndarray]:
        tokens = torch.from_numpy(ids[None])
        with torch.inference_mode():
            hidden = model.model(tokens).last_hidden_state
            found = {"logits": model.lm_head(hidden)[0].numpy()}
            if drafts is not None:
                positions, cache = torch.arange(1, len(ids))[None], MtpCache(config=drafts.config)
                hidden = drafts.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=tokens[:, 1:])
                found["mtp_logits"] = drafts.shared_head(hidden)[0].numpy()
        return found

    return logits


def mtp_layer(model: torch.nn.Module) -> MtpModel:
    """transformers' MTP layer, read from the model's own file; it shares the model's embedding and head."""
    config = model.config
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_hidden_layers}\."]  # the MTP's names
    if getattr(config, "mlp_layer_types", None) is not None:  # a family for which transformers knows no MTP layer
        config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ["sparse"]
    return MtpModel.from_pretrained(model).eval()


def write_reference(folder: Path, answers: Answers, seed: int) -> None:
    """reference.npz; prints the least margin of its greedy choices."""
    random = np.random.RandomState(seed)
    arrays: dict[str, np.ndarray] = {}
    for number, length in enumerate(LENGTHS):
        ids = random.randint(5, answers.vocabulary, length)
        while not answers.steady(ids):
            ids = random.randint(5, answers.vocabulary, length)
        found = {f"{name}_{number}": logits for name, logits in answers.logits(ids).items()}
        arrays |= {f"ids_{number}": ids.astype(np.int32), **found}
        if f"mtp_logits_{number}" in found:
            arrays[f"mtp_ids_{number}"] = ids[1:].astype(np.int32)
    prompt, chosen, margin = greedy_choice(answers, random)
    arrays |= {"greedy_prompt": prompt.astype(np.int32), "greedy_ids": np.array(chosen, np.int32)}
    np.savez_compressed(folder / "reference.npz", **arrays)
    kinds = len(set(chosen))
    print(f"{'/'.join(folder.parts[-2:])}: least margin {margin:.1e}, {kinds} different greedy ids", flush=True)


def greedy_choice(answers: Answers, random: np.random.RandomState) -> tuple[np.ndarray, list[int], float]:
    """A prompt, its greedy ids and their least margin, where neither margin nor router is left to rounding."""
    while True:
        prompt = random.randint(5, answers.vocabulary, PROMPT_TOKENS)
        chosen, margin = answers.greedy(prompt)
        if margin > LEAST_MARGIN and answers.steady(np.concatenate([prompt, chosen])):
            return prompt, chosen, margin


def continue_greedily(model: torch.nn.Module, ids: list[int]) -> tuple[np.ndarray, list[int], float]:
    """Logits after the prompt; NEW_TOKENS ids, whatever they are; and the least margin of a choice."""
    first, greedy, margin, cache = None, [], float("inf"), None
    step = torch.tensor([ids])
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            out = model(step, cache=cache, use_cache=True)
            cache, logits = out.cache, out.logits[0, -1].numpy()
            first = logits.copy() if first is None else first
            margin = min(margin, margin_of(logits))
            greedy.append(int(logits.argmax()))
            step = torch.tensor([[greedy[-1]]])
    return first, greedy, margin


def margin_of(logits: np.ndarray) -> float:
    """How much the best logit is above the second, relative to the largest."""
    best, second = np.sort(logits)[[-1, -2]]
    return float((best - second) / np.abs(logits).max())
