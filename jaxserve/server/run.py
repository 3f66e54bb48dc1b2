"""The front's process from start to stop: takes configuration, text rooms and a link, gives an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.request import Work
from jaxserve.server.control import ControlService
from jaxserve.server.handlers import handlers
from jaxserve.server.health import SERVICES, HealthService, Pulse
from jaxserve.server.hub import Hub, Phase, TextParts
from jaxserve.server.link import FrontSide, Ready
from jaxserve.server.metrics import METRICS_HOST, Metrics, MetricsEndpoint
from jaxserve.server.service import InferenceService
from jaxserve.v1 import control_pb2, inference_pb2

TOKENISER_THREADS = 2
HEALTH_PERIOD_S = 1.0
FAREWELL_S = 2.0  # for the last statuses to reach their clients
ENGINE_STOP_S = 10.0
MAX_METADATA_BYTES = 32 << 10
KEEPALIVE_MS = 30_000


@dataclass(frozen=True, slots=True)
class FrontParts:
    """What `app` builds for the front.

    `announce` gets one line for each thing that the user should see.
    """

    model_name: str
    text: TextParts
    version: str
    announce: Callable[[str], None]
    step_timeout_s: float = 120.0
    max_queue_requests: int = 4096


class FrontServer:
    """The gRPC server with all its services, and the metrics page."""

    def __init__(self, config: ServerConfig, parts: FrontParts, submit: Callable[[Sequence[Work]], None]) -> None:
        """Make it on a running event loop; `submit` sends work to the engine."""
        self._config = config
        self.metrics = Metrics(parts.model_name)
        self.pulse = Pulse(parts.step_timeout_s)
        self.hub = Hub(submit, parts.text, config.max_n, parts.max_queue_requests, self.metrics, self.pulse)
        self.health = HealthService()
        self._pool = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="text")
        self._endpoint: MetricsEndpoint | None = None
        limit = config.max_message_bytes
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # two servers on one port would share its calls without a word
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", -1),  # handlers measure and say it better
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # a client whose network is gone frees what it holds
                ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
            )
        )
        inference = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
        control = control_pb2.DESCRIPTOR.services_by_name["Control"]
        self._server.add_generic_rpc_handlers(
            (
                handlers(inference, InferenceService(self.hub, self._pool, config.max_n), limit),
                handlers(control, ControlService(self.hub, config, parts.model_name, parts.version), limit),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        reflection.enable_server_reflection(
            (*SERVICES[1:], "grpc.health.v1.Health", reflection.SERVICE_NAME), self._server
        )
        self.port = 0

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics page; None without one."""
        return None if self._endpoint is None else self._endpoint.port

    async def start(self) -> None:
        """Open the ports; the health check says NOT_SERVING. Raises ConfigError for ports that cannot be had."""
        self.port = bind(self._server, self._config.host, self._config.port)
        if self._config.metrics_port is not None:
            self._endpoint = MetricsEndpoint(self.metrics, self._config.metrics_port)
        await self._server.start()

    def refresh_health(self) -> str | None:
        """Judge anew; returns why the engine counts as hung, or None."""
        why_hung = self.hub.why_hung()
        self.health.set_serving(self.hub.phase is Phase.SERVING and why_hung is None)
        return why_hung

    async def stop(self, grace_s: float) -> None:
        """Close the ports; open calls have `grace_s` to end, then they are cancelled. Twice is harmless."""
        self.health.set_serving(False)
        await self._server.stop(grace_s)
        self._pool.shutdown(wait=False, cancel_futures=True)
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await asyncio.to_thread(endpoint.close)


def bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Bind, and say what is wrong where that fails: gRPC's own error hides the reason. Returns the port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        flag, given = ("--host", host) if isinstance(error, socket.gaierror) else ("--host/--port", f"{host}:{port}")
        raise ConfigError(
            f"{flag}: got {given}, which cannot be opened ({error.strerror}), "
            "allowed: an address of this machine with a free port, or port 0 to take any"
        ) from error
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_insecure_port(target)
    except RuntimeError as error:
        raise ConfigError(f"--host/--port: got {target}, which gRPC cannot open, allowed: a free port") from error


async def serve_front(
    config: ServerConfig, parts: FrontParts, link: FrontSide, process_sentinel: int | None = None
) -> int:
    """Serve until a signal or the engine's end; returns the exit code.

    `link.listen()` has been called, and the engine's process is starting; `process_sentinel` is multiprocessing's.
    The first SIGINT or SIGTERM drains (config.drain_timeout_s), the second one stops at once.
    Raises ConfigError for ports that cannot be had; the link is closed in any case, which ends the engine.
    """
    server = FrontServer(config, parts, link.submit)
    try:
        await server.start()
        return await Session(server, config, parts, link).run(process_sentinel)
    finally:
        await link.close()
        await server.stop(0.0)  # without effect where it has been stopped in peace


class Session:
    """One run of a started server: pumps the link, watches health, stops on signals."""

    def __init__(self, server: FrontServer, config: ServerConfig, parts: FrontParts, link: FrontSide) -> None:
        self._server, self._config, self._link = server, config, link
        self._announce = parts.announce
        self._signals = 0
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, process_sentinel: int | None) -> int:
        """Until it is over; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        pump = asyncio.create_task(self._pump(process_sentinel))
        watch = asyncio.create_task(self._watch_health())
        asked = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait((pump, watch, asked), return_when=asyncio.FIRST_COMPLETED)
            if pump.done() or watch.done():
                return await self._after_engine(pump, watch)
            return await self._graceful(pump)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            for task in (pump, watch, asked):
                task.cancel()
            await asyncio.gather(pump, watch, asked, return_exceptions=True)

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop_asked.set()
        if self._signals > 1:
            self._stop_now.set()

    async def _pump(self, process_sentinel: int | None) -> None:
        hub, said = self._server.hub, ""
        async for record in self._link.records(process_sentinel):
            hub.on_record(record)
            self._server.refresh_health()
            if isinstance(record, Ready):
                if self._server.metrics_port is not None:
                    self._announce(f"metrics on http://{METRICS_HOST}:{self._server.metrics_port}/metrics")
                self._announce(f"serving on {self._config.host}:{self._server.port}")
            elif hub.phase is Phase.STARTING and hub.phase_text != said:
                said = hub.phase_text
                self._announce(said)

    async def _watch_health(self) -> None:
        said = False
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            why_hung = self._server.refresh_health()
            if why_hung is not None and not said:
                self._announce(f"not healthy: {why_hung}")
            said = why_hung is not None

    async def _after_engine(self, *tasks: asyncio.Task[None]) -> int:
        """The engine's process has gone, or our own code failed: tell every client, then leave."""
        hub = self._server.hub
        broken = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        hub.fail(
            "the server stops after an internal error" if broken else "the engine's process has ended unexpectedly"
        )
        self._announce(hub.phase_text)
        await self._server.stop(FAREWELL_S)
        if broken:
            raise broken[0]
        return hub.exit_code

    async def _graceful(self, pump: asyncio.Task[None]) -> int:
        hub = self._server.hub
        if hub.open_streams:
            self._announce(f"waiting for {hub.open_streams} live requests; once more stops at once")
        self._server.health.set_serving(False)
        drained = asyncio.create_task(hub.drained(self._config.drain_timeout_s))
        now = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait((drained, now, pump), return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, now):
            task.cancel()
        hub.fail("the server has stopped before the answer was complete", exit_code=0)
        await self._server.stop(FAREWELL_S)
        self._link.stop_engine()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self._stop_now.is_set() else ENGINE_STOP_S):
                await asyncio.shield(pump)
        self._announce("stopped")
        return 0
