"""Who is to blame for a step that failed: its sequences start over one by one, and who is in the next failure ends.

A step fails as a whole, and nothing says which of its sequences the device could not bear. So none of them ends: all
become suspects and go back to the queue. From there one at a time is admitted, beside sequences that were not in the
step; a newcomer waits until all are cleared. A suspect that has sampled two tokens again (its prompt's last, and one by
decoding) is past the point of the failure. When another step fails, the suspect in it ends, and it alone. A failure
that does not come again ends nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxserve.engine.lane import Lane
from jaxserve.engine.sequence import Sequence, WaitingQueue

MOST_STRIKES = 3  # failed steps that a sequence may have been in: failures that follow no rule must end, too
CLEARED_TOKENS = 2


class Suspects:
    """Sequences that were in a failed step and are not cleared yet."""

    def __init__(self) -> None:
        self._suspects: dict[int, Sequence] = {}  # by handle
        self.failed_steps = 0

    def __len__(self) -> int:
        return len(self._suspects)

    def judge(self, in_step: Iterable[Sequence]) -> list[Sequence]:
        """Who must end, of the sequences in a step that failed. The others are suspects from now on."""
        self.failed_steps += 1
        in_step = list(in_step)
        guilty = [one for one in in_step if one.request.handle in self._suspects]
        for one in in_step:
            one.strikes += 1
            if not guilty:
                self._suspects[one.request.handle] = one
        return guilty or [one for one in in_step if one.strikes >= MOST_STRIKES]

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._suspects.pop(sequence.request.handle, None)

    def clear(self, lanes: tuple[Lane, ...]) -> None:
        """After a step that went well: drop those that are past the failure."""
        for handle, one in [*self._suspects.items()]:
            if one.slot >= 0:
                done = int(lanes[one.lane].slots.outputs.count_S[one.slot])
                if done >= len(one.to_repeat) + CLEARED_TOKENS:
                    del self._suspects[handle]

    def eligible(self, waiting: WaitingQueue) -> Iterator[Sequence]:
        """Of the queue, in its order, those that may be admitted now."""
        on_trial = any(one.slot >= 0 for one in self._suspects.values())
        for one in waiting:
            if one.request.handle in self._suspects:
                if on_trial:
                    continue
                on_trial = True
            elif self._suspects and one.queue_s is None:
                continue
            yield one
