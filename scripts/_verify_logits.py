"""Compares a converted checkpoint with transformers: log-probabilities of a fixed prompt from the library and torch."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.export import export
from checkpoints.files import kind_of
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.source import open_reader
from jaxserve import LLM, SamplingParams
from jaxserve.errors import CheckpointError

PROMPT_TOKENS = 48
TOP = 5  # log-probabilities compared at each position
TOLERANCE = 1e-3  # of float32 log-probabilities
TOLERANCE_BFLOAT16 = 0.15  # the reference runs in float32 on weights that bfloat16 has rounded

Logprobs = Sequence[Mapping[int, float] | None]  # a position's token ids -> log-probabilities


def why_no_reference(model_type: str) -> str | None:
    """None where transformers can run the source; else what is missing."""
    if not importlib.util.find_spec("torch"):
        return "torch is not installed"
    known: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    return None if model_type in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else f"transformers has no {model_type}"


def prompt_ids(vocab_size: int) -> list[int]:
    """A fixed prompt that any vocabulary has."""
    return np.random.RandomState(0).randint(0, vocab_size, PROMPT_TOKENS).tolist()


def compare_logits(source: Path, target: Path, dtype: str) -> str:
    """Run the source through transformers and the target through the library; returns what to print.

    Raises CheckpointError where they differ by more than rounding.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory, reader = source, open_reader(source, kind_of(source), dequantize=True)
        if not isinstance(reader, SafetensorsReader):  # quantised: torch gets what the conversion got
            directory = Path(folder) / "exported"
            export(reader, directory)
        expected = reference_logprobs(directory)
    with LLM(str(target), dtype="float32", max_model_len=PROMPT_TOKENS + 1, max_num_seqs=1, device="cpu") as llm:
        ids = prompt_ids(len(expected[0]))
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=TOP)
        output = llm.generate({"prompt_token_ids": ids}, params)[0]
    found = [entry and {token: one.logprob for token, one in entry.items()} for entry in output.prompt_logprobs or []]
    return judge(expected, found, TOLERANCE if dtype == "float32" else TOLERANCE_BFLOAT16)


def judge(expected: np.ndarray, found: Logprobs, tolerance: float) -> str:
    """`expected` [positions, V]: after each prompt token; `found[i]`: of the token at i, so after i - 1."""
    if len(found) != len(expected):
        raise CheckpointError(f"logits: {len(found)} positions came back, expected {len(expected)}")
    pairs = [
        (value, expected[position - 1, token])
        for position, entry in enumerate(found)
        for token, value in (entry or {}).items()
    ]
    worst = float(np.abs(np.subtract(*np.array(pairs).T)).max())  # NaN where any is
    if not worst <= tolerance:
        raise CheckpointError(f"logits differ from transformers' by up to {worst:.2e}, allowed: {tolerance:g}")
    return f"log-probabilities equal transformers' within {worst:.1e} at {len(expected)} positions"


def reference_logprobs(directory: Path) -> np.ndarray:
    """transformers' log-probabilities after each token of the prompt, float32 [positions, V]."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([prompt_ids(model.config.vocab_size)])
    with torch.inference_mode():
        return torch.log_softmax(model(ids).logits[0], -1).numpy()
