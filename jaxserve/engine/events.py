"""What the front is told: takes rows from `collect` and from finishes, gives one EventBatch a step to `emit`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxserve.request import EventBatch, Finish, Logprobs

NO_LOGPROBS: Mapping[int, Logprobs] = {}


class Events:
    """The rows of the batch that is being made: first those of sequences that go on, then the final ones."""

    def __init__(self) -> None:
        self.cached_tokens: dict[int, int] = {}
        self.queue_s: dict[int, float] = {}
        self.prompt_logprobs: dict[int, Logprobs] = {}
        self._running: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._running_rows = 0
        self._logprobs: dict[int, Logprobs] = {}
        self._finals: list[tuple[int, int, int]] = []
        self._final_logprobs: dict[int, Logprobs] = {}
        self._errors: dict[int, str] = {}

    def add_running(
        self, handle_N: np.ndarray, token_N: np.ndarray, logprobs: Mapping[int, Logprobs] = NO_LOGPROBS
    ) -> None:
        """Rows of sequences that go on; `logprobs` by index into them."""
        for row, entry in logprobs.items():
            self._logprobs[self._running_rows + row] = entry
        self._running.append((handle_N, token_N, np.zeros(len(handle_N), np.uint8)))
        self._running_rows += len(handle_N)

    def add_final(
        self, handle: int, token: int, finish: Finish, error: str | None = None, logprobs: Logprobs | None = None
    ) -> None:
        """The last row of a sequence; token -1 where it brings none."""
        if logprobs is not None:
            self._final_logprobs[len(self._finals)] = logprobs
        if error is not None:
            self._errors[handle] = error
        self._finals.append((handle, token, finish))

    def build(self) -> EventBatch | None:
        """The batch; None without rows."""
        parts, logprobs = self._running, self._logprobs
        if self._finals:
            finals = np.array(self._finals, np.int64)
            parts = [*parts, (finals[:, 0], finals[:, 1].astype(np.int32), finals[:, 2].astype(np.uint8))]
            logprobs |= {self._running_rows + row: entry for row, entry in self._final_logprobs.items()}
        if not parts:
            return None
        columns = parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))
        return EventBatch(
            *columns,
            cached_tokens=self.cached_tokens,
            queue_s=self.queue_s,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            errors=self._errors,
        )
