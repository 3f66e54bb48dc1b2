"""SmolLM2 through the whole engine against transformers: 64 greedy tokens of 20 prompts, and the first logprobs.

The goldens come from scripts/make_goldens.py, which runs transformers on the same dequantised fp32 weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
GOLDENS = json.loads((ROOT / "tests/goldens/smollm2.json").read_text())["prompts"]

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = ROOT / ".cache" / "smollm2.gguf"
    if not model.is_file():
        pytest.skip(f"{model} is not there; `python -m checkpoints.smollm2` fetches it")
    options = dict(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256, dtype="float32", device="cpu")
    with LLM(str(model), compile_cache_dir="", **options) as llm:
        yield llm


def test_greedy_ids_are_those_of_transformers(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=8)
    results = llm.generate([prompt["prompt_ids"] for prompt in GOLDENS], params)
    for prompt, result in zip(GOLDENS, results, strict=True):
        assert result.outputs[0].token_ids == prompt["greedy_ids"], prompt["text"]
        check_first_logprobs(prompt, result.outputs[0].logprobs[0])


def check_first_logprobs(prompt: dict, position: dict) -> None:
    """Differences between the best logits of the first position: logprobs are logits less one number."""
    ids = [token for token in prompt["top_ids"][:8] if token in position]
    assert len(ids) == 8
    ours = np.array([position[token].logprob for token in ids])
    theirs = np.array([prompt["top_logits"][prompt["top_ids"].index(token)] for token in ids])
    error = np.abs((ours - ours[0]) - (theirs - theirs[0])).max() / prompt["max_abs_logit"]
    assert error < 1e-4


def test_tokenizer_and_chat_template_give_the_same_ids(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    for prompt in GOLDENS:
        chat = prompt.get("messages")
        (result,) = llm.chat(chat, params) if chat else llm.generate(prompt["text"], params)
        assert result.prompt_token_ids == prompt["prompt_ids"]


def test_the_capital_of_france_is_paris(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (result,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
    assert "Paris" in result.outputs[0].text and result.outputs[0].finish_reason == "stop"
