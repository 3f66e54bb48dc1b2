"""Who is alive and what they hold: the only place where sequences are admitted, preempted and finished."""

from __future__ import annotations

from collections import Counter

import numpy as np

from jaxserve.batch import Shape
from jaxserve.engine.admission import PIECE_TOKENS
from jaxserve.engine.events import Events
from jaxserve.engine.lane import Lane
from jaxserve.engine.pages import Written
from jaxserve.engine.policy import FCFS, rank
from jaxserve.engine.prefix import extend_keys, whole_pages
from jaxserve.engine.sequence import Sequence, WaitingQueue, refusal
from jaxserve.engine.suspects import Suspects
from jaxserve.request import EventBatch, Finish, Logprobs, TokenRequest


class Ledger:
    """Lanes, the queue that they share, and the rows that wait to be emitted, kept consistent with each other.

    There is one queue, and a sequence gets its lane only when it is admitted: how long those before it will run is not
    known when it comes, and with a queue for each lane one could stand idle beside another's queue.
    """

    def __init__(
        self, shape: Shape, deterministic: bool = False, eviction: str | None = None, policy: str = FCFS
    ) -> None:
        """`eviction`: the rule of the prefix caches, one a lane; None: there are none. `policy`: who goes first."""
        self.shape, self.deterministic, self.policy = shape, deterministic, policy
        self.lanes = tuple(Lane(index, shape, eviction) for index in range(shape.lanes))
        self.waiting = WaitingQueue()
        self.live: dict[int, Sequence] = {}  # by handle
        self.suspects = Suspects()
        self.events = Events()
        self.arrivals = 0
        self.preemptions = 0
        self.prefix_query_tokens = self.prefix_hit_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()

    def submit(self, request: TokenRequest, refused: str | None = None) -> None:
        """Queue a request; one that can never run, or is `refused` by the caller, ends at once with the sentence."""
        assert request.handle not in self.live, f"handle {request.handle} is alive"
        sequence = Sequence.of(request, rank(self.policy, request, self.arrivals))
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

    def admit(self, sequence: Sequence, lane: Lane, slot: int, shared: np.ndarray) -> None:
        """From the queue into a lane's next free slot; shared: int32 [N], nodes of its prefix cache to begin with."""
        self.waiting.remove(sequence)
        sequence.lane = lane.index
        lane.pool.share(slot, shared, sequence.request.priority)
        cached_tokens = len(shared) * self.shape.page_size_tokens
        lane.slots.fill(slot, sequence, cached_tokens)
        lane.writers[slot] = sequence
        if sequence.keys and not sequence.wants_scores and not sequence.preemptions:
            sequence.cached_tokens = cached_tokens
            self.prefix_query_tokens += sequence.num_prompt_tokens
            self.prefix_hit_tokens += cached_tokens

    def keep(self, sequence: Sequence) -> None:
        """What collected steps have written of a running sequence enters the prefix cache."""
        if sequence.keys:
            lane = self.lanes[sequence.lane]
            lane.pool.enter(sequence.slot, self._written(sequence))

    def _written(self, sequence: Sequence) -> Written:
        """A sequence's full pages; the token sampled last is in none of them, as no collected step was fed it.

        Of a deterministic engine only those of the prompt: what was decoded would be rounded otherwise as a prompt.
        """
        slots, slot, page = self.lanes[sequence.lane].slots, sequence.slot, self.shape.page_size_tokens
        known, outputs = len(sequence.token_ids), slots.outputs.of(slot)
        tokens = known + len(outputs) - 1 if len(outputs) else sequence.written_tokens
        if self.deterministic:
            pages = whole_pages(min(tokens, known), page, PIECE_TOKENS)
        else:
            pages = whole_pages(tokens, page)
        token_ids = sequence.token_ids
        if pages * page > known:
            token_ids = np.concatenate((token_ids, outputs))
        token_ids = token_ids[: pages * page]
        if len(sequence.keys) <= pages:
            sequence.keys += extend_keys(sequence.keys, token_ids, page)
        return Written(sequence.keys[1 : pages + 1], token_ids, len(outputs) > 0, sequence.request.priority)

    def flush_cache(self) -> None:
        """Empty the prefix caches; running sequences go on and leave nothing there."""
        for lane in self.lanes:
            lane.pool.flush()

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot; the pages come back once nothing of it is in flight."""
        self.preemptions += 1
        lane, slot = self.lanes[sequence.lane], sequence.slot
        if lane.slots.last_step_S[slot] <= lane.pool.collected_step:
            self.requeue(sequence)
        else:  # the token in flight is still its own: collected first
            lane.slots.decoding_S[slot] = False
            lane.slots.prefilling.pop(slot, None)
            lane.slots.leaving.add(slot)

    def requeue(self, sequence: Sequence) -> None:
        """Back to its old place in the queue with all tokens collected so far; what is in flight is dropped.

        Its full pages stay in the prefix cache, where it finds them again if nobody needed them.
        A deterministic engine takes it back to its prompt, and repeats what followed.
        """
        lane, slot = self.lanes[sequence.lane], sequence.slot
        outputs = lane.slots.outputs.of(slot).copy()
        written = self._written(sequence) if sequence.keys else None
        lane.pool.release(slot, int(lane.slots.last_step_S[slot]), written)
        lane.writers.pop(slot, None)
        lane.slots.vacate(slot)
        if not self.deterministic:
            sequence.token_ids = np.concatenate((sequence.token_ids, outputs))
        else:
            sequence.wants_scores = sequence.request.prompt_logprobs is not None  # the same programs as before
            if len(outputs) > len(sequence.to_repeat):
                sequence.to_repeat = outputs
        sequence.preemptions += 1
        sequence.scores.clear()  # a prompt that was not done is scored from its start again
        self.waiting.add(sequence)

    def requeue_leaving(self, lane: Lane) -> None:
        """Requeue a lane's preempted whose last step has been collected."""
        for slot in [*lane.slots.leaving]:
            if lane.slots.last_step_S[slot] <= lane.pool.collected_step:
                self.requeue(lane.slots.tenant(slot))

    def requeue_all(self, void_step: int) -> None:
        """Nothing on the device is trusted any more, and no step up to `void_step` will write again."""
        self.flush_cache()
        for lane in self.lanes:
            lane.pool.step_collected(void_step)
            for sequence in lane.slots.sequences:
                if sequence is not None:
                    self.requeue(sequence)

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
            lane = self.lanes[sequence.lane]
            written = self._written(sequence) if sequence.keys and reason is not Finish.ERROR else None
            if reason is Finish.ERROR:
                lane.pool.distrust(sequence.slot)
            lane.pool.release(sequence.slot, int(lane.slots.last_step_S[sequence.slot]), written)
            lane.writers.pop(sequence.slot, None)
            lane.slots.vacate(sequence.slot)
        else:
            self.waiting.remove(sequence)
        del self.live[sequence.request.handle]
        self.suspects.forget(sequence)
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
        """Raise AssertionError unless the pages and slots of each lane, and the queue, add up."""
        for lane in self.lanes:
            lane.check()
        held = sum(lane.slots.occupied for lane in self.lanes)
        if held + len(self.waiting) != len(self.live):
            raise AssertionError(f"sequences: live {len(self.live)} = in slots {held} + waiting {len(self.waiting)}")
