"""A tokenizer.model that lists ranks: the original form of GLM-4-9B."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.text.ranks import is_ranks_file
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from scripts._chat_cases import ALL_TEXTS, RAW
from scripts.fetch_tokenizers import DIRECTORY, whole

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "chat" / "glm-4.json"
TOKENS = [*(bytes([byte]) for byte in range(256)), b"ab", b"bc", b"abc", "é".encode(), b" ab", b"\n\n"]
ADDED = ("[gMASK]", "<sop>", "<|user|>")


def write(folder: Path, tokens: list[bytes], **config: Any) -> Path:
    """A directory in the original form."""
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))
    added = {str(len(tokens) + at): {"content": text, "special": True} for at, text in enumerate(ADDED)}
    whole_config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added, "eos_token": "<|user|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole_config | config))
    return folder


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def test_neighbours_join_by_rank(tmp_path: Path) -> None:
    tokenizer = loaded(write(tmp_path, TOKENS))
    names = {token: rank for rank, token in enumerate(TOKENS)}
    cases: list[tuple[str, list[bytes]]] = [
        ("abc", [b"abc"]),  # a whole word that has a rank is never cut
        ("xabcb", [b"x", b"abc", b"b"]),
        ("bcab", [b"bc", b"ab"]),
        ("é\n\n", ["é".encode(), b"\n\n"]),
        ("x ab", [b"x", b" ab"]),
        ("東", [bytes([byte]) for byte in "東".encode()]),
    ]
    for text, pieces in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == [names[piece] for piece in pieces], text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("abc<|user|>") == [262, 263, 258, 264]
    assert tokenizer.eos_id == 264 and tokenizer.special_ids == {262, 263, 264} and tokenizer.vocab_size == 265


def test_the_code_of_other_classes_is_not_guessed(tmp_path: Path) -> None:
    write(tmp_path, TOKENS, tokenizer_class="OtherTokenizer")
    with pytest.raises(CheckpointError, match="tokenizer_class is 'OtherTokenizer', supported: ChatGLM4Tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:3], b"AA== x\n", *lines[3:]], "line 4: a token in base64 and its rank"),
        (lambda lines: [*lines[:3], b"?? 3\n", *lines[4:]], "line 4: a token in base64 and its rank"),
        (lambda lines: lines[:3] + lines[4:], "its 261 ranks are not 0 to 260, each once"),
    ],
)
def test_damaged_lists_are_refused(tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], message: str) -> None:
    path = write(tmp_path, TOKENS) / "tokenizer.model"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


def test_added_tokens_must_fit(tmp_path: Path) -> None:
    write(tmp_path, TOKENS, added_tokens_decoder={"300": {"content": "[gMASK]"}})
    with pytest.raises(CheckpointError, match=r"has 262 ranks, so \[gMASK\] cannot be id 300"):
        load_tokenizer(tmp_path)
    write(tmp_path, TOKENS, added_tokens_decoder={"262": {"content": "[gMASK]"}})
    with pytest.raises(CheckpointError, match=r"lacks a token of \[gMASK\], <sop>, which ChatGLM4Tokenizer needs"):
        load_tokenizer(tmp_path)


def test_other_models_are_no_lists(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    assert not is_ranks_file(path)
    for content in (b"", b"\n\x0e\n\x05<unk>\x15", b"no list\n", b"QUI= x\n", b"QUI= 1 2\n"):
        path.write_bytes(content)
        assert not is_ranks_file(path)


def test_the_real_one_in_both_forms(tmp_path: Path) -> None:
    """The ranks of the published tokenizer.json, written as the first form had them, give the same ids."""
    if not whole(DIRECTORY):
        pytest.skip("the real tokenizers are not there: run scripts/fetch_tokenizers.py")
    folder, golden = DIRECTORY / "glm-4", json.loads(GOLDEN.read_text())
    real, config = loaded(folder), json.loads((folder / "tokenizer_config.json").read_text())
    num_ranks = min(map(int, config["added_tokens_decoder"]))
    write(tmp_path, real.token_bytes[:num_ranks], **{**config, "tokenizer_class": "ChatGLM4Tokenizer"})
    tokenizer = loaded(tmp_path)
    assert [tokenizer.encode(text, add_special_tokens=False) for text in ALL_TEXTS] == golden["texts"]
    assert tokenizer.encode(RAW) == golden["flagged"]
    assert tokenizer.token_bytes == real.token_bytes and tokenizer.special_ids == real.special_ids
