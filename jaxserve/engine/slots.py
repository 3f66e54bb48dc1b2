"""The request slots as numpy arrays: what a steady step reads and writes, so that it touches no object a request.

`computed_S` counts tokens whose cache rows a dispatched step has written or will write; with one step in flight it
runs ahead of what has been collected, and collecting uses the positions noted at dispatch.
"""

from __future__ import annotations

import numpy as np

from jaxserve.engine.sequence import Sequence, step_flags

FIRST_STOP_COLUMNS = 2  # most requests name one or two; up to MAX_STOP_TOKEN_IDS when one names more
FIRST_OUTPUT_COLUMNS = 256


class StopTable:
    """Stop ids by slot, -1 where unused (no token is -1); as wide as the longest list so far."""

    def __init__(self, num_slots: int) -> None:
        self._id_SI = np.full((num_slots, FIRST_STOP_COLUMNS), -1, np.int32)

    def set(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """Replace a slot's ids; ids beyond int32 can never be sampled and are left out."""
        kept = [token for token in token_ids if token < 1 << 31]
        missing = len(kept) - self._id_SI.shape[1]
        if missing > 0:
            self._id_SI = np.pad(self._id_SI, ((0, 0), (0, missing)), constant_values=-1)
        self._id_SI[slot] = -1
        self._id_SI[slot, : len(kept)] = kept

    def match(self, slot_Q: np.ndarray, token_Q: np.ndarray) -> np.ndarray:
        """bool [Q]: the token ends its slot's sequence."""
        return np.logical_or.reduce(self._id_SI.take(slot_Q, axis=0) == token_Q[:, None], axis=1)


class Outputs:
    """Sampled tokens by slot since it was last filled: what a preempted sequence must prefill again."""

    def __init__(self, num_slots: int) -> None:
        self.count_S = np.zeros(num_slots, np.int32)  # collected ones
        self.sent_S = np.zeros(num_slots, np.int32)  # so many had been sent before, and are only repeated
        self._most = 0  # no count is higher; exact only when it would not fit
        self._token_SX = np.zeros((num_slots, FIRST_OUTPUT_COLUMNS), np.int32)

    def append(self, slot_Q: np.ndarray, token_Q: np.ndarray) -> None:
        """One more token for each of the distinct slots."""
        if self._most >= self._token_SX.shape[1]:
            self._make_room()
        column_Q = self.count_S[slot_Q]
        self._token_SX[slot_Q, column_Q] = token_Q
        self.count_S[slot_Q] = column_Q + 1
        self._most += 1

    def _make_room(self) -> None:
        self._most = int(self.count_S.max())
        if self._most >= self._token_SX.shape[1]:
            wider = np.zeros((len(self.count_S), 2 * self._token_SX.shape[1]), np.int32)  # untouched rows cost nothing
            for slot in np.flatnonzero(self.count_S):
                wider[slot, : self.count_S[slot]] = self._token_SX[slot, : self.count_S[slot]]
            self._token_SX = wider

    def of(self, slot: int) -> np.ndarray:
        """A slot's tokens, int32 [outputs]; a view."""
        return self._token_SX[slot, : self.count_S[slot]]


class SlotTable:
    """The state of all slots. A slot is free, prefilling, decoding, ending (its last token is in flight) or leaving."""

    def __init__(self, num_slots: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.free: list[int] = list(range(num_slots - 1, -1, -1))  # the next one is last
        self.prefilling: dict[int, Sequence] = {}
        self.leaving: set[int] = set()  # preempted, with a step in flight that is still to be collected
        self.decoding_S = np.zeros(num_slots, bool)  # may run a decode row in the next step
        self.generation_S = np.zeros(num_slots, np.int64)  # grows when vacated: results of old ones are dropped
        self.handle_S = np.zeros(num_slots, np.int64)
        self.known_S = np.zeros(num_slots, np.int32)  # tokens to prefill: those known when the slot was filled
        self.computed_S = np.zeros(num_slots, np.int32)
        self.limit_S = np.zeros(num_slots, np.int32)  # tokens, outputs included, at which it is full
        self.last_step_S = np.zeros(num_slots, np.int64)  # the last dispatched step it was part of
        self.flag_S = np.zeros(num_slots, np.int32)  # FLAG_* bits
        self.top_S = np.full(num_slots, -1, np.int32)  # logprobs wanted a token, -1: none
        self.stops = StopTable(num_slots)
        self.outputs = Outputs(num_slots)

    @property
    def occupied(self) -> int:
        """Slots in use."""
        return len(self.sequences) - len(self.free)

    def tenant(self, slot: int) -> Sequence:
        """The sequence in an occupied slot."""
        sequence = self.sequences[slot]
        assert sequence is not None, slot
        return sequence

    def fill(self, slot: int, sequence: Sequence, cached_tokens: int = 0) -> None:
        """A sequence takes the next free slot, nothing of it computed but what it shares."""
        request = sequence.request
        assert self.free.pop() == slot, slot
        self.sequences[slot] = sequence
        self.prefilling[slot] = sequence
        sequence.slot = slot
        self.handle_S[slot] = request.handle
        self.known_S[slot] = len(sequence.token_ids)
        self.computed_S[slot] = sequence.written_tokens = cached_tokens
        self.limit_S[slot] = sequence.limit_tokens
        self.last_step_S[slot] = 0
        self.outputs.sent_S[slot] = len(sequence.to_repeat)
        self.flag_S[slot] = step_flags(request)
        self.top_S[slot] = -1 if request.logprobs is None else request.logprobs
        self.stops.set(slot, request.stop_token_ids)

    def vacate(self, slot: int) -> Sequence:
        """Its sequence leaves, and whatever is in flight for it will be dropped."""
        sequence = self.tenant(slot)
        self.sequences[slot] = None
        self.prefilling.pop(slot, None)
        self.leaving.discard(slot)
        self.decoding_S[slot] = False
        self.generation_S[slot] += 1
        self.outputs.count_S[slot] = 0
        self.free.append(slot)
        sequence.slot = -1
        return sequence

    def advance_decode(self, slot_D: np.ndarray, step: int) -> None:
        """These slots' last tokens are fed in `step`; those whose next token is their last need no further row."""
        self.last_step_S[slot_D] = step
        computed_D = self.computed_S[slot_D] + 1
        self.computed_S[slot_D] = computed_D
        self.decoding_S[slot_D] = computed_D + 1 < self.limit_S[slot_D]

    def advance_chunk(self, slot: int, tokens: int, step: int) -> None:
        """`tokens` more of a prompt are fed in `step`; with the last of them the slot turns to decoding."""
        self.last_step_S[slot] = step
        computed = int(self.computed_S[slot]) + tokens
        self.computed_S[slot] = computed
        if computed == self.known_S[slot]:
            del self.prefilling[slot]
            self.decoding_S[slot] = computed + 1 < self.limit_S[slot]
