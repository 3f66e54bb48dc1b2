"""The front's centre: takes records from the link, gives events to the text rooms; knows what the server is at, and how
many streams are open. All on the event loop's thread; nothing here blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jaxserve.errors import EngineUnavailable, QueueFull
from jaxserve.request import EngineStats, FlushCache, Work
from jaxserve.server.health import Pulse
from jaxserve.server.link import Busy, EngineFacts, Failed, FromEngine, News, Progress, Ready
from jaxserve.server.metrics import Metrics
from jaxserve.server.outbox import Outbox
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.front import Front
from jaxserve.text.prepare import Prepared, TextLimits
from jaxserve.text.tokenizer import Tokenizer


class Phase(enum.IntEnum):
    """What the server is at; the values are the proto's ServerState."""

    STARTING = 1
    SERVING = 2
    DRAINING = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class TextParts:
    """What `app` reads from the model's directory for the text rooms."""

    tokenizer: Tokenizer | None  # None: token ids only
    template: ChatTemplate | None  # None: no Chat
    eos_token_ids: tuple[int, ...]


class Hub:
    """The engine as the services see it."""

    def __init__(
        self,
        submit: Callable[[Sequence[Work]], None],
        text: TextParts,
        max_n: int,
        max_queue_requests: int,
        metrics: Metrics,
        pulse: Pulse,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`submit` sends work to the engine, whose clock is `clock_s` too: the host's monotonic one."""
        self.text = text
        self._submit = submit
        self.front = Front(text.tokenizer, submit, clock_s, metrics.observe)
        self.phase, self.phase_text, self.exit_code = Phase.STARTING, "the engine's process starts", 0
        self.facts: EngineFacts | None = None
        self.open_streams = 0
        self._limits: TextLimits | None = None
        self._max_n, self._max_queue_requests = max_n, max_queue_requests
        self._metrics, self._pulse, self._clock_s = metrics, pulse, clock_s
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def stats(self) -> EngineStats:
        """The engine's last report."""
        return self._metrics.stats

    def limits(self) -> TextLimits:
        """What requests may be. Raises EngineUnavailable while starting and after a failure."""
        if self._limits is None or self.phase is Phase.FAILED:
            raise EngineUnavailable(self.why_not_serving())
        return self._limits

    def why_not_serving(self) -> str:
        """One sentence for the UNAVAILABLE status."""
        match self.phase:
            case Phase.STARTING:
                return f"the server is starting ({self.phase_text}); try again when the health check says SERVING"
            case Phase.DRAINING:
                return "the server is draining and takes no new requests"
            case _:
                return self.phase_text or "the server is serving"

    def why_hung(self) -> str | None:
        """None while the engine lives, else the sentence."""
        now_s = self._clock_s()
        self._pulse.work(self.front.num_live_requests > 0, now_s)
        return self._pulse.why_hung(now_s)

    # --- from the services

    @contextlib.contextmanager
    def stream(self) -> Iterator[float]:
        """Counts one open stream; gives its time of arrival. Raises EngineUnavailable or QueueFull."""
        if self.phase is not Phase.SERVING or self.facts is None:
            raise EngineUnavailable(self.why_not_serving())
        most = self.facts.max_num_seqs + self._max_queue_requests
        if self.open_streams >= most:
            raise QueueFull(
                f"{self.open_streams} requests are live, allowed: {most} (--max-num-seqs {self.facts.max_num_seqs} "
                f"that run and --max-queue-requests {self._max_queue_requests} that wait); try again later"
            )
        self.open_streams += 1
        self._idle.clear()
        try:
            yield self._clock_s()
        finally:
            self.open_streams -= 1
            if not self.open_streams:
                self._idle.set()

    def submit(self, prepared: Prepared, outbox: Outbox, request_id: str, arrival_s: float) -> str:
        """Send a request to the engine; returns its id. Raises DuplicateRequest or EngineUnavailable."""
        request_id = self.front.submit(prepared, outbox.put, request_id, arrival_s)
        self._pulse.work(True, self._clock_s())
        return request_id

    def flush_cache(self) -> None:
        """Tell the engine to empty its prefix cache. Raises EngineUnavailable while there is none."""
        if self.facts is None or self.phase is Phase.FAILED:
            raise EngineUnavailable(self.why_not_serving())
        self._submit([FlushCache()])

    async def drained(self, timeout_s: float) -> bool:
        """Take nothing new and wait until the open streams are done; False where the timeout came first."""
        if self.phase in (Phase.STARTING, Phase.SERVING):
            self.phase, self.phase_text = Phase.DRAINING, "finishing the live requests"
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # --- from the engine

    def on_record(self, record: FromEngine) -> None:
        """One record of the link."""
        match record:
            case News():
                self._on_news(record)
            case Progress() if self.phase is Phase.STARTING:
                self.phase_text = record.text
            case Busy():
                self._pulse.busy(record.reason, self._clock_s())
            case Ready():
                self._on_ready(record.facts)
            case Failed():
                self.fail(record.sentence, record.exit_code)

    def _on_news(self, news: News) -> None:
        if news.stats is not None:
            self._metrics.stats = news.stats
            self._pulse.beat(news.stats.heartbeat_s)
        if news.batches:
            self._pulse.beat(self._clock_s())
            for batch in news.batches:
                self.front.on_events(batch)

    def _on_ready(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._limits = TextLimits(
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            pool_tokens=facts.total_pages * facts.page_size_tokens,
            eos_token_ids=self.text.eos_token_ids,
            max_n=self._max_n,
            max_logprobs=facts.max_logprobs,
        )
        if self.phase is Phase.STARTING:  # a drain may have come first
            self.phase, self.phase_text = Phase.SERVING, ""

    def fail(self, sentence: str, exit_code: int = 1) -> None:
        """The engine is gone: every stream ends with this sentence, nothing new is taken."""
        if self.phase is not Phase.FAILED:
            self.phase, self.phase_text, self.exit_code = Phase.FAILED, sentence, exit_code
            self.front.fail_all(EngineUnavailable(sentence))
