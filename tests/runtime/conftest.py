"""One tiny server for all tests of this folder: compiling it is most of their time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.tiny import TinyServer


@pytest.fixture(scope="session")
def tiny() -> Iterator[TinyServer]:
    """The real engine over the real runner; its cache starts full of NaN."""
    server = TinyServer()
    yield server
    server.runner.close()
