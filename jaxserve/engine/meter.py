"""How long steps take: takes clock readings from the loop, gives moving averages to EngineStats."""

from __future__ import annotations

SMOOTHING = 0.02  # weight of the newest step: about the last 50 count


class Meter:
    """Moving averages in microseconds and the heartbeat in seconds of the engine's clock."""

    def __init__(self, now_s: float) -> None:
        self.heartbeat_s = now_s
        self.host_us = 0.0
        self.device_us = 0.0
        self.gap_us = 0.0
        self._rested = True
        self._last_result_s = now_s

    def step(self, started_s: float, ended_s: float, waited_s: float) -> None:
        """One iteration: all of it but the wait for results is host time."""
        self.heartbeat_s = ended_s
        self.host_us = average(self.host_us, (ended_s - started_s - waited_s) * 1e6)

    def idle(self, now_s: float) -> None:
        """An iteration that found nothing to run."""
        self.heartbeat_s = now_s
        self._rested = True

    def result(self, dispatched_s: float, ready_s: float) -> None:
        """A step's results came: it ran since its dispatch or since the step before it, whichever is later.

        Between the two the device had nothing to do; that counts as a gap where there was work all the time.
        """
        if not self._rested:
            self.gap_us += SMOOTHING * (max(dispatched_s - self._last_result_s, 0.0) * 1e6 - self.gap_us)
        self._rested = False
        self.device_us = average(self.device_us, (ready_s - max(dispatched_s, self._last_result_s)) * 1e6)
        self._last_result_s = ready_s


def average(before: float, newest: float) -> float:
    """An exponential moving average that starts at its first value."""
    return newest if before == 0.0 else before + SMOOTHING * (newest - before)
