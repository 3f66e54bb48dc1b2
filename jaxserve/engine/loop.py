"""The engine's loop: takes work from the inbox, runs one step ahead of its results, gives EventBatches to `emit`.

    inbox -> ledger -> schedule (Plan) -> pack (Packed) -> runner -> collect -> emit

A step runs all lanes (ranks of data parallelism) at once, in one program.

Step n+1 is planned and dispatched before step n's result is read; a stop is therefore seen one step late and the extra
token dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxserve.batch import Batch, Install, Program, Shape, StepOut
from jaxserve.config import CacheConfig, RuntimeConfig, ScheduleConfig
from jaxserve.engine.admission import Limits
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.collect import collect
from jaxserve.engine.inbox import Inbox, PromptKeys
from jaxserve.engine.ledger import Ledger
from jaxserve.engine.meter import Meter
from jaxserve.engine.pack import Packed, Packer
from jaxserve.engine.schedule import View, schedule
from jaxserve.errors import EngineUnavailable, shorten
from jaxserve.request import Cancel, EngineStats, EventBatch, Finish, FlushCache, TokenRequest, Work

IDLE_WAIT_S = 0.2  # an idle loop beats its heart and looks at the stop event this often

log = logging.getLogger("jaxserve.engine")


class Pending(Protocol):
    """A dispatched step."""

    def result(self) -> StepOut:
        """Block until the step is done. Raises what went wrong in it."""
        ...


class Runner(Protocol):
    """What the engine needs of the runtime. Steps and installs take effect in the order of the calls."""

    def install(self, installs: list[Install]) -> None:
        """Tell the device of sequences that take a slot, before the first step that uses them."""
        ...

    def dispatch(self, batch: Batch) -> Pending:
        """Start a step without waiting for it."""
        ...

    def recover(self) -> bool:
        """After an exception of any of these: give up all that was dispatched; True if new steps may be dispatched.

        Caches and tables may then hold anything: the engine computes again what it still needs.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A step that was dispatched and not collected; `pending` None: its dispatch raised `error`."""

    packed: Packed
    dispatched_s: float
    pending: Pending | None = None
    error: Exception | None = None


class Engine:
    """Continuous batching over one runner. All methods but submit, drain and stats belong to the loop's thread."""

    def __init__(
        self,
        schedule: ScheduleConfig,
        runtime: RuntimeConfig,
        shape: Shape,
        runner: Runner,
        emit: Callable[[EventBatch], None],
        clock: Callable[[], float] = time.monotonic,
        cache: CacheConfig | None = None,
    ) -> None:
        """`emit` gets one EventBatch a step, from the loop's thread, and must not block. `clock` counts seconds.

        `cache` says whether there is a prefix cache, and what it evicts first; None: there is none.
        """
        assert shape.num_slots == schedule.max_num_seqs, (shape, schedule)
        eviction = cache.prefix_cache_eviction if cache is not None and cache.prefix_cache else None
        self.ledger = Ledger(shape, runtime.deterministic, eviction, schedule.policy)
        self.step_count = 0
        buckets = Buckets.from_config(runtime, schedule)
        self._limits = Limits(
            budget_tokens=min(schedule.max_num_batched_tokens, buckets.mixed_tokens[-1]),
            max_chunks=shape.max_chunks,
            page_size_tokens=shape.page_size_tokens,
            num_pages=shape.num_pages,
            buckets=buckets,
            deterministic=runtime.deterministic,
            policy=schedule.policy,
        )
        self._packer = Packer(shape, buckets.all())
        self._runner, self._emit, self._clock = runner, emit, clock
        self._inbox = Inbox(None if eviction is None else PromptKeys(self._limits, shape))
        self._in_flight: InFlight | None = None
        self._last_was_scored = self._last_had_prompts = False
        self._last_mixed_tokens = 0
        self._draining = False
        self._meter = Meter(clock())

    # Any thread

    def submit(self, items: Sequence[Work]) -> None:
        """Hand over work, in order. Raises EngineUnavailable once the engine has ended."""
        self._inbox.put(items)

    def drain(self) -> None:
        """From now on new requests are refused; those that are alive run to their end."""
        self._draining = True

    def stats(self) -> EngineStats:
        """Figures of this moment; `compilations_after_warmup_total` is the runner's to fill in."""
        ledger = self.ledger
        pools = [lane.pool for lane in ledger.lanes]
        return EngineStats(
            step_count=self.step_count,
            running_requests=sum(lane.slots.occupied for lane in ledger.lanes),
            waiting_requests=len(ledger.waiting),
            total_pages=sum(pool.num_pages for pool in pools),
            live_pages=sum(pool.live_pages for pool in pools),
            cached_pages=sum(pool.cached_pages for pool in pools),
            free_pages=sum(pool.free_pages for pool in pools),
            prompt_tokens_total=ledger.prompt_tokens,
            generation_tokens_total=ledger.generation_tokens,
            preemptions_total=ledger.preemptions,
            failed_steps_total=ledger.suspects.failed_steps,
            prefix_query_tokens_total=ledger.prefix_query_tokens,
            prefix_hit_tokens_total=ledger.prefix_hit_tokens,
            evicted_pages_total=sum(pool.prefix.evicted_pages for pool in pools if pool.prefix is not None),
            finished_total=dict(ledger.finished),
            heartbeat_s=self._meter.heartbeat_s,
            host_us_per_step=self._meter.host_us,
            device_us_per_step=self._meter.device_us,
            gap_us_per_step=self._meter.gap_us,
        )

    # The loop's thread

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; sleeps while there is nothing to do.

        Whatever ends it, every sequence gets its last row. Raises EngineUnavailable if it could not go on.
        """
        reason = "the engine was stopped"
        try:
            while not stop.is_set():
                if not self.step():
                    self._inbox.wait(IDLE_WAIT_S)
        except Exception as error:
            reason = f"the engine failed: {describe(error)}"
            if isinstance(error, EngineUnavailable):
                raise
            raise EngineUnavailable(reason) from error
        finally:
            self._end(reason)

    def step(self) -> bool:
        """One iteration; False if there was nothing to do."""
        started_s = self._clock()
        self._take_work()
        previous, self._in_flight = self._in_flight, self._dispatch()
        busy = previous is not None or self._in_flight is not None
        waited_s = self._collect(previous) if previous is not None else 0.0
        if self._in_flight is not None and self._in_flight.error is not None:
            self._step_failed(self._in_flight, self._in_flight.error)
        self._flush()
        assert busy or not self.ledger.live, f"nothing to run for {len(self.ledger.live)} live sequences"
        if busy:
            self._meter.step(started_s, self._clock(), waited_s)
        else:
            self._meter.idle(started_s)
        return busy

    @property
    def is_idle(self) -> bool:
        """Nothing is alive, in flight or waiting to be taken in."""
        return not self.ledger.live and self._in_flight is None and self._inbox.is_empty

    def _take_work(self) -> None:
        for item in self._inbox.take():
            if isinstance(item, Cancel):
                self.ledger.cancel(item.handle, item.reason)
            elif isinstance(item, FlushCache):
                self.ledger.flush_cache()
            else:
                self.ledger.submit(item, "the engine is draining and takes no new requests" if self._draining else None)

    def _dispatch(self) -> InFlight | None:
        """Plan the next step and start it; None if there is nothing to run."""
        ledger = self.ledger
        last = (self._last_was_scored, self._last_had_prompts, self._last_mixed_tokens)
        plan = schedule(View(self._limits, ledger.lanes, ledger.waiting, ledger.suspects, *last))
        packed = self._packer.apply(plan, ledger, self.step_count + 1)
        if packed is None:
            return None
        self.step_count += 1
        self._last_had_prompts = any(part.plan.chunks for part in packed.lanes)
        if self._last_had_prompts or not ledger.deterministic:
            self._last_was_scored = packed.is_scored
        if packed.batch.bucket.program is Program.MIXED:
            self._last_mixed_tokens = packed.batch.bucket.rows
        now_s = self._clock()
        for part in packed.lanes:
            for chunk in part.plan.chunks:
                if chunk.sequence.queue_s is None:
                    chunk.sequence.queue_s = max(0.0, now_s - chunk.sequence.request.arrival_s)
        try:
            if packed.installs:
                self._runner.install(packed.installs)
            return InFlight(packed, now_s, self._runner.dispatch(packed.batch))
        except Exception as error:
            return InFlight(packed, now_s, error=error)

    def _collect(self, flight: InFlight) -> float:
        """Read a step's results and apply them; returns the seconds spent waiting for them."""
        assert flight.pending is not None
        asked_s = self._clock()
        try:
            out = flight.pending.result()
        except Exception as error:
            self._step_failed(flight, error)
            return self._clock() - asked_s
        ready_s = self._clock()
        self._meter.result(flight.dispatched_s, ready_s)
        collect(self.ledger, flight.packed, out)
        if len(self.ledger.suspects):
            self.ledger.suspects.clear(self.ledger.lanes)
        return ready_s - asked_s

    def _step_failed(self, flight: InFlight, error: Exception) -> None:
        """All start over from their tokens, but for who is to blame (see Suspects); all end if the runner is gone."""
        self._flush()  # a sequence has one row a batch, and the step before may just have given it one
        sentence = f"step {flight.packed.step} failed on the device: {describe(error)}"
        in_step = flight.packed.alive(self.ledger)
        ending = self.ledger.suspects.judge(in_step)
        log.error("%s; of %d sequences in it %d end", sentence, len(in_step), len(ending), exc_info=error)
        for sequence in ending:
            self.ledger.finish(sequence, Finish.ERROR, error=sentence)
        self._in_flight = None
        if not self._runner.recover():
            self.ledger.finish_all(Finish.ERROR, f"the engine cannot go on: {sentence}")
            self._flush()
            raise EngineUnavailable(f"the engine cannot go on: {sentence}") from error
        self.ledger.requeue_all(self.step_count)

    def _flush(self) -> None:
        batch = self.ledger.take_events()
        if batch is not None:
            self._emit(batch)

    def _end(self, reason: str) -> None:
        """Refuse new work and give everyone a last row, those in the inbox included."""
        for item in self._inbox.close(reason):
            if isinstance(item, TokenRequest):
                self.ledger.submit(item, reason)
        self.ledger.finish_all(Finish.ERROR, reason)
        self._in_flight = None
        self._flush()


def describe(error: BaseException) -> str:
    """An exception for a user's eyes: its type and the start of its text."""
    return f"{type(error).__name__}: {shorten(str(error), 200)}"
