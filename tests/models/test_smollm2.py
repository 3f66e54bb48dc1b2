"""SmolLM2 against transformers: 64 greedy tokens of 20 prompts through the whole engine, and the first logits.

The goldens come from scripts/make_goldens.py, which runs transformers on the same dequantised fp32 weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.smollm2_forms import fetch_form
from checkpoints.source import open_model
from jaxserve import LLM, SamplingParams
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.weights import load_weights
from tests.fakes.forward import PagedForward

ROOT = Path(__file__).parents[2]
GOLDENS = json.loads((ROOT / "tests/goldens/smollm2.json").read_text())["prompts"]

MODEL = ROOT / ".cache" / "smollm2.gguf"

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not MODEL.is_file(), reason=f"no {MODEL.name}; `python -m checkpoints.smollm2` fetches it"),
]


OPTIONS = dict(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(MODEL), compile_cache_dir="", **OPTIONS) as llm:
        yield llm


def test_greedy_ids_are_those_of_transformers(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    results = llm.generate([prompt["prompt_ids"] for prompt in GOLDENS], params)
    for prompt, result in zip(GOLDENS, results, strict=True):
        assert result.outputs[0].token_ids == prompt["greedy_ids"], prompt["text"]


@pytest.mark.parametrize(
    ("form", "tokens"), [("dense", 8), ("moe", 12), pytest.param("moe", 64, marks=pytest.mark.nightly)]
)
def test_the_same_weights_as_a_glm_checkpoint_give_the_same_ids(form: str, tokens: int) -> None:
    """SmolLM2 is exactly a `glm4_moe`: all layers dense, or each block cut into one shared and three routed experts."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(str(fetch_form(MODEL.parent, form)), compile_cache_dir="", **OPTIONS) as llm:
        results = llm.generate([prompt["prompt_ids"] for prompt in GOLDENS], params)
    for prompt, result in zip(GOLDENS, results, strict=True):
        assert result.outputs[0].token_ids == prompt["greedy_ids"][:tokens], prompt["text"]


def test_first_logits_are_those_of_transformers() -> None:
    source = open_model(MODEL)
    split = split_decoder(model_spec(source.config), jnp.dtype("float32"), make_mesh(jax.devices()))
    longest = max(len(prompt["prompt_ids"]) for prompt in GOLDENS)
    forward = PagedForward(split, load_weights(split, source.load), longest)
    reference = np.load(ROOT / "tests/goldens/smollm2_logits.npz")
    for prompt, want in zip(GOLDENS, reference["logits"], strict=True):
        got = forward.logits(prompt["prompt_ids"])[-1]
        assert got.argsort()[::-1][:5].tolist() == prompt["top_ids"][:5]
        assert np.abs(got[reference["columns"]] - want).max() < 1e-4 * prompt["max_abs_logit"]


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
