"""Text rooms for server tests: made once, they hold no state."""

from __future__ import annotations

import pytest

from jaxserve.server.hub import TextParts
from tests.server.harness import text_parts


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextParts:
    """A byte-level tokenizer of 512 ids, its chat template and its eos id."""
    return text_parts(tmp_path_factory.mktemp("text"))
