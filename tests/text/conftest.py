"""Tokenizers and limits that the text rooms' tests share."""

from __future__ import annotations

import pytest

from jaxserve.text.constraints import TextLimits
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.tokenizer import tiny_metaspace_dir, tiny_tokenizer_dir


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """The byte-level BPE; eos is id 2, <|user|> id 3; no BOS is added."""
    return load_tokenizer(tiny_tokenizer_dir(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory) -> Tokenizer:
    """The Llama-2-like one; BOS (id 1) is added."""
    return load_tokenizer(tiny_metaspace_dir(tmp_path_factory.mktemp("metaspace")))


@pytest.fixture
def limits(tokenizer) -> TextLimits:
    """A context of 64 tokens and a larger pool."""
    return TextLimits(max_model_len=64, vocab_size=tokenizer.vocab_size, pool_tokens=1024, eos_token_ids=(2,), max_n=9)
