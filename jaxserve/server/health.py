"""Is the engine alive: takes heartbeats and the engine's own word, gives grpc.health.v1 and a sentence for the log.

A loop that hangs with work pending is not healthy; a long step, a long queue or a compilation is not a hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICES = ("", "jaxserve.v1.Inference", "jaxserve.v1.Control")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Pulse:
    """Judges by the engine's heartbeat with work pending. Both processes' clocks are the host's monotonic one."""

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._last_beat_s = float("-inf")
        self._pending_since_s: float | None = None
        self._busy_reason: str | None = None

    def beat(self, at_s: float) -> None:
        """The engine finished a step, or waited for work, at this time."""
        self._last_beat_s = max(self._last_beat_s, at_s)

    def busy(self, reason: str | None, at_s: float) -> None:
        """The engine says that it does something long; None: it is done, and the clock starts anew."""
        self._busy_reason = reason
        self.beat(at_s)

    def work(self, pending: bool, at_s: float) -> None:
        """Whether any request waits for the engine."""
        if not pending:
            self._pending_since_s = None
        elif self._pending_since_s is None:
            self._pending_since_s = at_s

    def why_hung(self, now_s: float) -> str | None:
        """None while all is well, else the sentence."""
        if self._busy_reason is not None or self._pending_since_s is None:
            return None
        silent_s = now_s - max(self._last_beat_s, self._pending_since_s)
        if silent_s <= self._step_timeout_s:
            return None
        return f"no step has finished for {silent_s:.0f} s with work pending (limit {self._step_timeout_s:g} s)"


class HealthService(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 for all our services at once. Starts as NOT_SERVING."""

    def __init__(self) -> None:
        self._serving = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """What Check answers now."""
        return self._serving

    def set_serving(self, serving: bool) -> None:
        """Change the answer; watchers hear of it. A slow watcher delays nobody."""
        if serving != self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in SERVICES:
            return SERVICE_UNKNOWN
        return SERVING if self._serving else NOT_SERVING

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The state now; NOT_FOUND for a service that is not ours."""
        if request.service not in SERVICES:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service: got {request.service[:80]!r}, allowed: {', '.join(SERVICES[1:])}"
            )
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state now and after each change."""
        sent = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            else:
                await changed.wait()
