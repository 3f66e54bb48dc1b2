"""What the quality script measures, over a small random model behind the real engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from demo_model import quality
from demo_model.train.export import export_model
from demo_model.train.loss import hidden_states, losses
from demo_model.train.state import fresh_weights, weights_from
from jaxserve.layers.rows import Rows
from jaxserve.llm import LLM
from jaxserve.models.decoder import SplitDecoder, split_decoder
from jaxserve.models.families import model_spec
from tests.demo_model.test_train import BOS, CONFIG

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %} t{{ tool.name }}{% endfor %}"
    "{% for message in messages %} {{ message.content }}{% endfor %}"
)


@dataclass(frozen=True)
class Asked:
    """A question."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    checker: Callable[[str], bool]


@pytest.fixture(scope="module")
def split() -> SplitDecoder:
    return split_decoder(model_spec(CONFIG), jnp.dtype("float32"), with_mtp=True)


@pytest.fixture(scope="module")
def model(split: SplitDecoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words t0 to t63 are the vocabulary, t0 the BOS; matrices are spread widely."""
    folder = tmp_path_factory.mktemp("quality")
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float32"}))
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t63"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["t0", "t1"])
    tokenizer.save(str(folder / "config" / "tokenizer.json"))
    said = {"bos_token": "t0", "eos_token": "t1", "chat_template": TEMPLATE}
    (folder / "config" / "tokenizer_config.json").write_text(json.dumps(said))
    weights = [leaf * 4 if leaf.ndim > 1 else leaf for leaf in fresh_weights(split, 5)]
    export_model(split, weights, folder / "config", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", device="cpu", max_model_len=64, max_num_seqs=4) as llm:
        yield llm


def test_perplexity_is_that_of_training(llm: LLM, split: SplitDecoder, model: Path) -> None:
    """The engine's logprobs of prompts against training's loss on the same documents, side by side in a row."""
    rng = np.random.default_rng(0)
    texts = [[BOS, *rng.integers(2, 60, length).tolist()] for length in (9, 17, 4)]
    token_IC = jnp.asarray([[*sum(texts, []), BOS]], jnp.int32)
    assert quality.documents_of(np.asarray(token_IC), BOS, 10) == texts
    decoder = split.merge(weights_from(split, model))
    want = losses(decoder, token_IC, jnp.ones_like(token_IC), BOS)
    found = quality.perplexity(llm, texts)
    assert (found["tokens"], found["documents"]) == (30, 3) == (float(want.main_tokens), 3)
    assert found["nats"] == pytest.approx(float(want.main) / 30, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats"]))


def test_answers_and_drafts(llm: LLM, split: SplitDecoder, model: Path) -> None:
    """Checkers see the answers, tools reach the prompt; drafts are counted as a plain loop counts them."""
    seen: list[str] = []

    def check(text: str) -> bool:
        seen.append(text)
        return len(seen) != 2

    plain = [Asked([{"role": "user", "content": f"t{i} t{i + 1}"}], None, check) for i in (5, 20, 33)]
    tool = [Asked([{"role": "user", "content": "t9"}], [{"name": 7}], check)]
    rates, said = quality.answer_rates(llm, {"plain": plain, "tools": tool}, max_tokens=6)
    assert [said[i].prompt_token_ids for i in (0, 3)] == [[0, 5, 6], [0, 7, 9]]
    assert (rates["plain"]["rate"], rates["plain"]["asked"], rates["tools"]["rate"]) == (pytest.approx(2 / 3), 3, 1.0)
    assert rates["plain"]["wrong"] == [{"asked": "t20 t21", "answered": seen[1]}]
    leaves, right, drafted = weights_from(split, model), 0, 0
    decoder = split.merge(leaves)
    for output in said:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        row_IC = jnp.asarray([[*prompt, *answer]], jnp.int32)
        _, mtp_TD = hidden_states(decoder, row_IC, Rows.of(row_IC, BOS))
        drafts = np.asarray(decoder.logits(mtp_TD)).argmax(axis=1)
        for at in range(len(prompt) + 1, len(prompt) + len(answer)):
            right, drafted = right + int(drafts[at - 2] == row_IC[0, at]), drafted + 1
    found = quality.acceptance(split, leaves, said, BOS)
    assert drafted > 12
    assert found == {"rate": pytest.approx(right / drafted), "drafted": drafted}


def test_distinct_counts_words() -> None:
    assert quality.distinct(["a b a b"], 1) == 0.5
    assert quality.distinct(["a b a b"], 2) == pytest.approx(2 / 3)
    assert quality.distinct(["a b", "a b"], 2) == 0.5
    assert quality.distinct(["a"], 2) == 0
