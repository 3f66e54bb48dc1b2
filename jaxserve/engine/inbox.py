"""The engine's only way in: takes lists of work from any thread, gives them to the loop in order; prompts get keys."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxserve.batch import Shape
from jaxserve.engine.admission import Limits
from jaxserve.engine.prefix import extend_keys, root_key
from jaxserve.errors import EngineUnavailable
from jaxserve.request import Cancel, FlushCache, TokenRequest, Work


class PromptKeys:
    """Makes the keys by which prompts find their pages in the prefix cache, in the thread that hands them over."""

    def __init__(self, limits: Limits, shape: Shape) -> None:
        self._limits, self._shape = limits, shape

    def __call__(self, items: Sequence[Work]) -> list[Work]:
        """The same work, the requests with their keys; the choices of one prompt are hashed once."""
        made: dict[tuple[int, bytes], tuple[bytes, ...]] = {}  # by the array itself, which `items` keeps alive
        return [item if isinstance(item, Cancel | FlushCache) else self._keyed(item, made) for item in items]

    def _keyed(self, request: TokenRequest, made: dict[tuple[int, bytes], tuple[bytes, ...]]) -> TokenRequest:
        if request.bypass_prefix_cache or len(request.prompt_token_ids) > self._shape.max_model_len:
            return request
        root = root_key(self._extras(request))
        known = (id(request.prompt_token_ids), root)
        if known not in made:
            token_ids = np.asarray(request.prompt_token_ids, np.int32)
            made[known] = (root, *extend_keys([root], token_ids, self._shape.page_size_tokens))
        return replace(request, page_keys=made[known])

    def _extras(self, request: TokenRequest) -> dict[str, str]:
        """What a prompt must have in common with another to share its pages, besides the tokens."""
        extras = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
        if self._limits.deterministic:  # the programs that round alike
            scored, tokens = request.prompt_logprobs is not None, len(request.prompt_token_ids)
            extras["steps"] = "scored" if scored else str(self._limits.step_tokens(tokens))
        return extras


class Inbox:
    """A list under a lock. Once closed it refuses, so that nothing is ever left in it unseen."""

    def __init__(self, keys: PromptKeys | None = None) -> None:
        """`keys` None: there is no prefix cache."""
        self._lock = threading.Lock()
        self._filled = threading.Event()
        self._items: list[Work] = []
        self._closed: str | None = None
        self._keys = keys

    @property
    def is_empty(self) -> bool:
        """Nothing waits to be taken."""
        return not self._items

    def put(self, items: Sequence[Work]) -> None:
        """Add to the end. Raises EngineUnavailable, with the reason given to `close`, once closed."""
        if self._keys is not None:
            items = self._keys(items)
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
