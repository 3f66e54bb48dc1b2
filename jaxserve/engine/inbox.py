"""The engine's only way in: takes lists of TokenRequest and Cancel from any thread, gives them to the loop in order."""

from __future__ import annotations

import threading

from jaxserve.errors import EngineUnavailable
from jaxserve.request import Cancel, TokenRequest

type Work = TokenRequest | Cancel


class Inbox:
    """A list under a lock. Once closed it refuses, so that nothing is ever left in it unseen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._items: list[Work] = []
        self._closed: str | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing waits to be taken."""
        return not self._items

    def put(self, items: list[Work]) -> None:
        """Add to the end. Raises EngineUnavailable, with the reason given to `close`, once closed."""
        with self._lock:
            if self._closed is not None:
                raise EngineUnavailable(self._closed)
            self._items.extend(items)
        self._filled.set()

    def take(self) -> list[Work]:
        """All that waits, at once; does not block."""
        if not self._filled.is_set():
            return []
        with self._lock:
            self._filled.clear()
            items, self._items = self._items, []
        return items

    def wait(self, timeout_s: float) -> None:
        """Block until something is put, or the time is over."""
        self._filled.wait(timeout_s)

    def close(self, reason: str) -> list[Work]:
        """Refuse from now on; returns what was still waiting."""
        with self._lock:
            self._closed = reason
            items, self._items = self._items, []
        return items
