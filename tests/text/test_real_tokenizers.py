"""Real DeepSeek and GLM tokenizers and chat templates against transformers' goldens (scripts/make_chat_goldens.py).

scripts/test fetches the tokenizers first (scripts/fetch_tokenizers.py); without them these tests are skipped.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from jaxserve.engine_app import sampled_vocabulary
from jaxserve.errors import InvalidRequest
from jaxserve.options import config_from_options
from jaxserve.request import SamplingParams
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.constraints import TextLimits
from jaxserve.text.detokenize import Detokenizer
from jaxserve.text.prepare import prepare, prepare_chat
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer, read_eos_ids
from scripts._chat_cases import ALL_TEXTS, CHATS, LOOK_ALIKES, RAW, Chat
from scripts.fetch_tokenizers import DIRECTORY, SOURCES, whole
from scripts.make_chat_goldens import MODELS

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "chat"

# What the models' config.json and generation_config.json say, and what the prompt of a chat begins with.
DEEPSEEK_V2, DEEPSEEK_V3 = (100001, (100000,)), (1, (0,))
GLM_4, GLM_4_7 = ([151329, 151336, 151338], (151331, 151333)), ([154820, 154827, 154829], (154822, 154824))
FACTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    name: {"deepseek_v2": DEEPSEEK_V2, "glm4_moe_lite": GLM_4_7, "glm_moe_dsa": GLM_4_7}.get(
        SOURCES[name].model_type, DEEPSEEK_V3 if name.startswith("deepseek") else GLM_4
    )
    for name in MODELS
}


class Model(NamedTuple):
    """One model's text room and what transformers gives for it."""

    name: str
    golden: dict[str, Any]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    limits: TextLimits


def load(name: str) -> Model:
    """As `app` wires it."""
    if not whole(DIRECTORY):
        pytest.skip("the real tokenizers are not there: run scripts/fetch_tokenizers.py")
    tokenizer = load_tokenizer(DIRECTORY / name)
    assert tokenizer is not None
    source = tokenizer.chat_template
    template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
    limits = TextLimits(max_model_len=100_000, vocab_size=tokenizer.vocab_size, pool_tokens=100_000)
    golden = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
    return Model(name, golden, tokenizer, template, limits)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return load(request.param)


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
    """The text in pieces, put together."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


def chat_ids(model: Model, chat: Chat) -> list[int]:
    """The prompt of a chat request."""
    prepared = prepare_chat(
        chat.messages,
        SamplingParams(),
        model.limits,
        model.tokenizer,
        model.template,
        add_generation_prompt=chat.add_generation_prompt,
        tools=chat.tools,
        template_kwargs=chat.template_kwargs,
    )
    return prepared.prompt_token_ids


def test_the_table(model: Model) -> None:
    """Every single id's text, and which ids are special."""
    tokenizer, golden = model.tokenizer, model.golden
    special = [token for first, last in golden["special_ids"] for token in range(first, last + 1)]
    assert sorted(tokenizer.special_ids) == special
    assert tokenizer.vocab_size == golden["vocab_size"]
    singles = [tokenizer.token_text(token) for token in range(tokenizer.vocab_size)]
    assert hashlib.sha256("\0".join(singles).encode()).hexdigest() == golden["token_digest"]


def test_texts_and_their_way_back(model: Model) -> None:
    tokenizer = model.tokenizer
    for text, ids in zip(ALL_TEXTS, model.golden["texts"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == stream(tokenizer, ids, skip_special_tokens=False) == text
        assert tokenizer.decode(ids, True) == stream(tokenizer, ids, skip_special_tokens=True)


def test_ids_that_no_text_gives(model: Model) -> None:
    """Broken characters, also with special tokens between their bytes."""
    assert any("\ufffd" in case["text"] for case in model.golden["decoded"])
    for case in model.golden["decoded"]:
        for name, skip in (("text", False), ("skipped", True)):
            assert model.tokenizer.decode(case["ids"], skip) == stream(model.tokenizer, case["ids"], skip) == case[name]


def test_chats(model: Model) -> None:
    if model.template is None:
        assert "chats" not in model.golden
        with pytest.raises(InvalidRequest, match="no chat template"):
            chat_ids(model, CHATS["plain"])
        return
    right = {name: ids for name, ids in model.golden["chats"].items() if ids is not None}
    assert len(right) > len(CHATS) - 7
    for name, ids in right.items():
        assert chat_ids(model, CHATS[name]) == ids, name


def test_chats_that_transformers_has_no_answer_for(model: Model) -> None:
    """Text parts become lines where a template does not read them; the rest is refused, with the template's words."""
    for name in [name for name, ids in model.golden.get("chats", {}).items() if ids is None]:
        chat = CHATS[name]
        try:
            ids = chat_ids(model, chat)
        except InvalidRequest as error:
            assert error.field == "messages" and not name.startswith("parts")
            continue
        text = model.tokenizer.decode(ids)
        assert "None" not in text and "'type'" not in text
        if name.startswith("parts"):
            joined = [{**message, "content": lines(message["content"])} for message in chat.messages]
            assert chat_ids(model, chat._replace(messages=joined)) == ids


def lines(content: Any) -> Any:
    """Text parts as one text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def test_the_beginning_is_never_doubled(model: Model) -> None:
    """Of a chat, of a raw prompt, and of a chat that the user rendered and sends as a raw prompt."""
    start = list(FACTS[model.name][1])
    tokenizer, golden = model.tokenizer, model.golden
    raw = prepare(RAW, SamplingParams(), model.limits, tokenizer).prompt_token_ids
    plain = tokenizer.encode(RAW, add_special_tokens=False)
    assert raw == golden["flagged"]
    assert golden["flagged"] in (plain, start + plain)
    # transformers 5 drops the flag of DeepSeek V2 to V3.1, and nothing else differs.
    dropped = model.name in ("deepseek-v2", "deepseek-v2.5", "deepseek-v3", "deepseek-r1", "deepseek-v3.1")
    assert (golden["loaded"] != golden["flagged"]) == dropped and golden["loaded"] in (plain, golden["flagged"])
    assert (golden["flagged"] != plain) == (dropped or model.name == "glm-4")
    if model.template is not None:
        text = model.template.render(CHATS["turns"].messages)
        for ids in (chat_ids(model, CHATS["turns"]), tokenizer.encode(text), tokenizer.encode(text, False)):
            assert ids[: len(start)] == start and ids.count(start[0]) == 1


def test_special_tokens_that_a_user_writes_are_taken_as_such(model: Model) -> None:
    """As transformers and vLLM do; the bars and blocks must be the model's own characters."""
    tokenizer = model.tokenizer
    if model.name.startswith("glm"):
        assert tokenizer.encode("<|user|>", False) == [FACTS[model.name][0][1]]
        assert len(tokenizer.encode("<\uff5cuser\uff5c>", False)) > 1
        return
    bos = tokenizer.encode("<\uff5cbegin\u2581of\u2581sentence\uff5c>", False)
    assert bos == list(FACTS[model.name][1]) == [tokenizer.bos_id]
    for written in ("<|begin_of_sentence|>", "<\uff5cbegin_of_sentence\uff5c>", "<|begin\u2581of\u2581sentence|>"):
        assert len(tokenizer.encode(written, False)) > 1
    assert bos[0] in tokenizer.encode(LOOK_ALIKES[2], False)


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_every_stop_id_ends_an_answer(model: Model, tmp_path: Path, place: str) -> None:
    """Whichever file names them all; the tokenizer's own eos token is one of them and not always the first."""
    given = FACTS[model.name][0]
    every = tuple(given) if isinstance(given, list) else (given,)
    assert model.tokenizer.eos_id in every
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": every[0]}))
    (tmp_path / place).write_text(json.dumps({"eos_token_id": given}))
    eos_ids = read_eos_ids(tmp_path, model.tokenizer)
    assert eos_ids == every
    limits = TextLimits(100, model.tokenizer.vocab_size, 100, eos_token_ids=eos_ids)
    assert prepare(RAW, SamplingParams(), limits, model.tokenizer).requests[0].stop_token_ids == every


@pytest.mark.parametrize(("name", "rows"), [("deepseek-v3", 129280), ("deepseek-v4", 129280)])
def test_ids_beyond_the_tokenizer_are_neither_sampled_nor_taken(name: str, rows: int) -> None:
    """B034: the rows of the head past the tokenizer's last id are padding, except where it fills them all."""
    model = load(name)
    config: Any = config_from_options(str(DIRECTORY / name), {})
    source: Any = SimpleNamespace(tokenizer_dir=DIRECTORY / name)
    spec: Any = SimpleNamespace(vocab_size=rows)
    size = sampled_vocabulary(config, source, spec)
    assert size == model.golden["vocab_size"] <= rows
    limits = TextLimits(100, size, 100)
    assert prepare([size - 1], SamplingParams(), limits, model.tokenizer).prompt_token_ids == [size - 1]
    with pytest.raises(InvalidRequest, match=f"integers from 0 to {size - 1}"):
        prepare([size], SamplingParams(), limits, model.tokenizer)


def check_goldens(names: list[str], folder: Path) -> None:
    """Make them anew with the transformers of this environment and compare, byte for byte."""
    if not whole(DIRECTORY):
        pytest.skip("the real tokenizers are not there: run scripts/fetch_tokenizers.py")
    script = ROOT / "scripts" / "make_chat_goldens.py"
    command = [sys.executable, str(script), "--output", str(folder), "--model", *names]
    subprocess.run(command, check=True, capture_output=True)
    for name in names:
        assert (folder / f"{name}.json").read_text() == (GOLDENS / f"{name}.json").read_text(), name


def test_goldens_are_what_transformers_gives(tmp_path: Path) -> None:
    check_goldens(["deepseek-v3.1", "glm-5"], tmp_path)


@pytest.mark.nightly
def test_all_goldens_are_what_transformers_gives(tmp_path: Path) -> None:
    check_goldens(MODELS, tmp_path)
    assert {path.stem for path in GOLDENS.iterdir()} == set(MODELS)
