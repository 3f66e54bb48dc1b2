"""Tiny Llamas, one for each branch of the architecture, and the demo model SmolLM2, which is a Llama too.

Runs where torch is, and so imports nothing of this repository. These are older than the other families' files and
differ from them: torch's own random weights, and no greedy ids of the tiny ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from _goldens_tiny import continue_greedily
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

COLUMNS = 512  # of the logits that are kept
LEAST_MARGIN = 2e-5  # of the best logit over the second, relative to the largest: less is rounding's to decide
EACH = 10  # questions and texts that are kept: the first ones with that margin; there are some to spare

QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Explain gravity to a child.",
    "Write a short poem about the sea.",
    "Name three primary colours.",
    "How do I boil an egg?",
    "What is 12 + 30?",
    "Translate 'good morning' to Spanish.",
    "Was ist die Hauptstadt von Österreich?",
    "Give me a tip for sleeping well.",
    "What do bees make?",
    "Who are you?",
)
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a fox who",
    "def fibonacci(n):\n    ",
    "In 1969, Apollo 11 carried",
    "The three states of matter are",
    "\n\n# Introduction\n\nMachine learning",
    "Water boils at 100 degrees",
    "She said: “Don't go — it's 25°C outside!” and then",
    "日本の首都は",
    "A",
    "To be, or not to be",
    "import numpy as np\n",
)

TINY = {  # what differs from tiny_config's other fields
    "gqa": {},
    "mha-linear-tied-bias": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "mha-dynamic": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    },
    "gqa-llama3-tied": {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gqa-yarn": {
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}
TINY_LENGTHS = (40, 24)


def tiny_config(fields: dict[str, Any]) -> LlamaConfig:
    """Few weights, but a head that is not hidden / heads, and all kinds of layers twice."""
    base: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return LlamaConfig(**(base | fields))


def make_llama(folder: Path) -> None:
    """Each tiny model as transformers saves it, and its logits at all positions."""
    for seed, (name, fields) in enumerate(TINY.items()):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(fields))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("norm.weight", "layernorm.weight")):
                parameter.data.uniform_(0.5, 1.5)
            if parameter_name.endswith("bias"):
                parameter.data.normal_(0.0, 0.5)
        target = folder / "llama_tiny" / name
        model.to(torch.bfloat16).save_pretrained(target)
        model = load(target)
        arrays = {}
        for index, length in enumerate(TINY_LENGTHS):
            ids = np.random.RandomState(seed * 10 + index).randint(3, 64, length)
            with torch.inference_mode():
                logits = model(torch.tensor(ids[None])).logits[0]
            arrays |= {f"ids_{index}": ids.astype(np.int32), f"logits_{index}": logits.numpy()}
        np.savez(target / "reference.npz", **arrays)


def load(directory: Path) -> torch.nn.Module:
    """A model in float32 with the plain attention."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def make_smollm2(directory: Path, folder: Path) -> None:
    """Prompt ids, first logits and greedy ids of the demo model."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = load(directory)
    columns = np.sort(np.random.RandomState(0).choice(model.config.vocab_size, COLUMNS, replace=False))
    entries, rows = [], []
    for source, is_chat in ((QUESTIONS, True), (TEXTS, False)):
        kept = 0
        for given in source:
            if kept == EACH:
                break
            entry, logits = answer(model, tokenizer, given, is_chat)
            if entry["least_margin"] > LEAST_MARGIN:
                entries.append(entry)
                rows.append(logits[columns])
                kept += 1
        assert kept == EACH, "too many prompts have two tokens that are too close to tell; write others"
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    document = {"made_with": versions, "dtype": "float32", "prompts": entries}
    (folder / "smollm2.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    np.savez_compressed(folder / "smollm2_logits.npz", columns=columns.astype(np.int32), logits=np.stack(rows))


def answer(model: torch.nn.Module, tokenizer: Any, given: str, is_chat: bool) -> tuple[dict[str, Any], np.ndarray]:
    """One prompt's entry of the file, and all its first logits [V]."""
    entry: dict[str, Any] = {"text": given}
    if is_chat:
        entry["messages"] = [{"role": "user", "content": given}]
        entry["text"] = tokenizer.apply_chat_template(entry["messages"], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(entry["text"], add_special_tokens=not is_chat)["input_ids"]
    logits, greedy, margin = continue_greedily(model, ids)
    top = np.argsort(-logits)[:5]
    entry |= {
        "prompt_ids": ids,
        "greedy_ids": greedy,
        "greedy_text": tokenizer.decode(greedy, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "least_margin": margin,
        "max_abs_logit": float(np.abs(logits).max()),
        "top_ids": top.tolist(),
        "top_logits": logits[top].tolist(),
    }
    print(f"{margin:.1e} {given!r} -> {entry['greedy_text'][:60]!r}", flush=True)
    return entry, logits
