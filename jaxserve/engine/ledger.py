"""Who is alive and what they hold: the only place where sequences are admitted, preempted and finished."""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxserve.batch import Shape
from jaxserve.engine.events import Events
from jaxserve.engine.pages import PagePool
from jaxserve.engine.sequence import Sequence, WaitingQueue, refusal
from jaxserve.engine.slots import SlotTable
from jaxserve.request import EventBatch, Finish, Logprobs, TokenRequest


class Ledger:
    """Slots, pages, the queue, and the rows that wait to be emitted, kept consistent with each other."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.slots = SlotTable(shape.num_slots)
        self.pool = PagePool(shape)
        self.waiting = WaitingQueue()
        self.live: dict[int, Sequence] = {}  # by handle
        self.events = Events()
        self.arrivals = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()

    def submit(self, request: TokenRequest, refused: str | None = None) -> None:
        """Queue a request; one that can never run, or is `refused` by the caller, ends at once with the sentence."""
        assert request.handle not in self.live, f"handle {request.handle} is alive"
        sequence = Sequence.of(request, self.arrivals)
        self.arrivals += 1
        self.live[request.handle] = sequence
        self.waiting.add(sequence)
        sentence = refused or refusal(request, self.shape)
        if sentence is not None:
            self.finish(sequence, Finish.ERROR, error=sentence)

    def cancel(self, handle: int, reason: Finish) -> None:
        """End a sequence wherever it is; handles that are not alive are ignored."""
        sequence = self.live.get(handle)
        if sequence is not None:
            self.finish(sequence, reason)

    def admit(self, sequence: Sequence, slot: int) -> None:
        """From the queue into the next free slot."""
        self.waiting.remove(sequence)
        self.slots.fill(slot, sequence)

    def preempt(self, slot: int) -> None:
        """Take a slot's sequence out of the running; its pages come back once nothing of it is in flight."""
        self.preemptions += 1
        if self.slots.last_step_S[slot] <= self.pool.collected_step:
            self.requeue(slot)
        else:  # the token in flight is still its own: collected first
            self.slots.decoding_S[slot] = False
            self.slots.prefilling.pop(slot, None)
            self.slots.leaving.add(slot)

    def requeue(self, slot: int) -> None:
        """Back to its old place in the queue with all tokens collected so far; what is in flight is dropped."""
        outputs = self.slots.outputs.of(slot).copy()
        self.pool.release(slot, int(self.slots.last_step_S[slot]))
        sequence = self.slots.vacate(slot)
        sequence.token_ids = np.concatenate((sequence.token_ids, outputs))
        sequence.preemptions += 1
        sequence.scores.clear()  # a prompt that was not done is scored from its start again
        self.waiting.add(sequence)

    def requeue_leaving(self) -> None:
        """Requeue the preempted whose last step has been collected."""
        for slot in [slot for slot in self.slots.leaving if self.slots.last_step_S[slot] <= self.pool.collected_step]:
            self.requeue(slot)

    def requeue_all(self, void_step: int) -> None:
        """Nothing on the device is trusted any more, and no step up to `void_step` will write again."""
        self.pool.step_collected(void_step)
        for slot, sequence in enumerate(self.slots.sequences):
            if sequence is not None:
                self.requeue(slot)

    def finish(
        self,
        sequence: Sequence,
        reason: Finish,
        token: int = -1,
        error: str | None = None,
        logprobs: Logprobs | None = None,
    ) -> None:
        """Every end goes through here: free the pages and the slot, or the place in the queue, and emit the reason."""
        if sequence.slot >= 0:
            self.pool.release(sequence.slot, int(self.slots.last_step_S[sequence.slot]))
            self.slots.vacate(sequence.slot)
        else:
            self.waiting.remove(sequence)
        del self.live[sequence.request.handle]
        self.finished[reason.name.lower()] += 1
        self.events.add_final(sequence.request.handle, token, reason, error, logprobs)

    def finish_all(self, reason: Finish, error: str | None = None) -> None:
        """End everyone."""
        for sequence in list(self.live.values()):
            self.finish(sequence, reason, error=error)

    def take_events(self) -> EventBatch | None:
        """The rows since the last call; None if there are none."""
        events, self.events = self.events, Events()
        return events.build()

    def check(self) -> None:
        """Raise AssertionError unless pages, slots and the queue add up."""
        self.pool.check()
        held = sum(sequence is not None for sequence in self.slots.sequences)
        waiting, live, free = len(self.waiting), len(self.live), len(self.slots.free)
        if held + waiting != live or held + free != self.shape.num_slots:
            raise AssertionError(
                f"sequences: live {live} = in slots {held} + waiting {waiting}; slots {self.shape.num_slots} = "
                f"held {held} + free {free}"
            )
        for slot in self.slots.free:
            if self.pool.owned_S[slot] or self.slots.decoding_S[slot]:
                raise AssertionError(f"free slot {slot} owns {self.pool.owned_S[slot]} pages")
