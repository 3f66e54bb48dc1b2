"""What one stream has yet to send: takes deltas from the text rooms, gives merged ones to the stream's task.

Bounded by merging: however far the reader is behind, one delta with one entry a choice waits here.
"""

from __future__ import annotations

import asyncio

from jaxserve.request import RequestOutput
from jaxserve.text.assemble import merge


class Outbox:
    """One writer and one reader (the stream's task), both on the event loop's thread."""

    __slots__ = ("_waiter", "_waiting", "ended", "merged_deltas")

    def __init__(self) -> None:
        self._waiting: RequestOutput | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.merged_deltas = 0  # how often the reader was behind
        self.ended = False  # the last delta is here: the request is no more, and its id may be another's already

    def put(self, delta: RequestOutput) -> None:
        """Add a delta; the outbox owns it from now on."""
        if self._waiting is None:
            self._waiting = delta
        else:
            merge(self._waiting, delta)
            self.merged_deltas += 1
        self.ended = self.ended or delta.finished
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> RequestOutput:
        """All that waits; sleeps until there is something."""
        while self._waiting is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta, self._waiting = self._waiting, None
        return delta
