"""Runs the bodies of simt.py in numpy, all threads of all CTAs in step: for tests on a CPU.

It has simt.Machine's methods; a value is an array [CTAs, threads]. It shows what a body computes, not that its threads
wait for each other where they must: they always do here.
"""

from __future__ import annotations

import numpy as np

_Value = np.ndarray


class Emulator:
    """ctas x threads; shared memory is an array [CTAs, size], other memory is flat."""

    def __init__(self, ctas: int, threads: int) -> None:
        self.ctas = ctas
        self.thread = np.broadcast_to(np.arange(threads, dtype=np.uint32), (ctas, threads))
        self.lane, self.warp = self.thread & 31, self.thread >> 5
        self.cta = np.broadcast_to(np.arange(ctas, dtype=np.uint32)[:, None], (ctas, threads))

    def where(self, condition: _Value, yes: _Value, no: _Value) -> _Value:
        return np.where(condition, yes, no)

    def max(self, a: _Value, b: _Value) -> _Value:
        return np.maximum(a, b)

    def min(self, a: _Value, b: _Value) -> _Value:
        return np.minimum(a, b)

    def exp(self, x: _Value) -> _Value:
        return np.exp(x)

    def inverse(self, x: _Value) -> _Value:
        return np.float32(1) / x

    def bits(self, x: _Value) -> _Value:
        return np.ascontiguousarray(x).view(np.uint32)

    def floats(self, x: _Value) -> _Value:
        return np.ascontiguousarray(x).view(np.float32)

    def count_bits(self, x: _Value) -> _Value:
        return np.bitwise_count(x).astype(np.uint32)

    def load(self, ref: _Value, index: _Value, count: int = 1) -> list[_Value]:
        return [self._load(ref, index + i) for i in range(count)]

    def _load(self, ref: _Value, index: _Value) -> _Value:
        return ref[self.cta, index] if ref.ndim == 2 else ref[index]

    def load_of(self, ref: _Value, index: _Value, cta: int) -> _Value:
        return ref[cta][index]

    def store(self, ref: _Value, index: _Value, value: _Value | int, where: _Value) -> None:
        value = np.broadcast_to(value, where.shape)
        place = (self.cta[where], index[where]) if ref.ndim == 2 else (index[where],)
        ref[place] = value[where]

    def store_or(self, ref: _Value, index: _Value, value: _Value, where: _Value) -> None:
        np.bitwise_or.at(ref, (self.cta[where], index[where]), value[where])

    def largest(self, x: _Value) -> _Value:
        return self._warps(np.maximum, x)

    def smallest(self, x: _Value) -> _Value:
        return self._warps(np.minimum, x)

    def total(self, x: _Value) -> _Value:
        return self._warps(np.add, x)

    def _warps(self, op: np.ufunc, x: _Value) -> _Value:
        warps = x.reshape(self.ctas, -1, 32)
        return np.broadcast_to(op.reduce(warps, axis=2, dtype=x.dtype)[..., None], warps.shape).reshape(x.shape)

    def of_lane(self, x: _Value, lane: _Value | int) -> _Value:
        warps = x.reshape(self.ctas, -1, 32)
        lanes = np.broadcast_to(np.asarray(lane, np.int64), x.shape).reshape(warps.shape)
        return np.take_along_axis(warps, lanes, axis=2).reshape(x.shape)

    def sync(self) -> None:
        """All threads are always at the same place."""

    sync_all = sync
