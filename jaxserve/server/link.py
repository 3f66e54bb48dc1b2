"""Between the front's process and the engine's: takes TokenRequest and Cancel one way, EventBatch and stats the other.

A Unix socket in a private folder carries frames: 8 bytes of length, then one pickle of the records below. The first
frame of a connection is the bare key, compared before anything is unpickled. Both sides gather all that waits into one
frame: at most one message a step each way, whatever the number of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import pickle
import queue
import secrets
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.errors import JaxserveError
from jaxserve.request import MAX_LOGPROBS, EngineStats, EventBatch, Work

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<Q")
STATS_PERIOD_S = 1.0
CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine's process tells of itself once it is warm; GetModelInfo and GetServerInfo show it."""

    max_model_len: int  # tokens, after the cut to what the pool can hold
    model_type: str
    dtype: str
    platform: str
    device_kind: str
    num_devices: int
    max_num_seqs: int
    max_num_batched_tokens: int
    total_pages: int
    page_size_tokens: int
    vocab_size: int  # ids that may be sampled are below this
    max_logprobs: int = MAX_LOGPROBS
    implementations: dict[str, str] = field(default_factory=dict)  # op -> chosen kernel


@dataclass(frozen=True, slots=True)
class Progress:
    """Start-up: what is being done, and which part of it is done (None: unknown)."""

    text: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is warm and takes work."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine ends: one sentence for the user and the exit code of the whole."""

    sentence: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Busy:
    """A step takes long for a known reason, such as a compilation: not a hang. None ends it."""

    reason: str | None


@dataclass(frozen=True, slots=True)
class News:
    """What the engine did since the last frame: batches in step order, and its stats about once a second."""

    batches: tuple[EventBatch, ...] = ()
    stats: EngineStats | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """The front asks the engine's process to end."""


type FromEngine = Progress | Ready | Failed | Busy | News


def pack_frame(record: object) -> bytes:
    """One frame of a record of this module."""
    body = pickle.dumps(record, protocol=5)
    return HEADER.pack(len(body)) + body


class FrontSide:
    """The front's end. It listens; `app` starts the engine's process with `address` and `authkey`.

    Everything but the constructor belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="jaxserve-"))  # mkdtemp: only this user may enter
        self.address = str(self._folder / "engine.sock")
        self.authkey = secrets.token_bytes(32)
        self._outgoing: list[Work] = []
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._connected: asyncio.Future[asyncio.StreamReader | None] | None = None
        self._stop_asked = False

    async def listen(self) -> None:
        """Open the socket; call it before the engine's process starts."""
        self._connected = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._accept, self.address)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._connected is not None
        key = b""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            key = await reader.readexactly(len(self.authkey))
        if self._connected.done() or not hmac.compare_digest(key, self.authkey):
            writer.close()
            return
        self._writer = writer
        self._connected.set_result(reader)
        if self._stop_asked:  # before it had connected
            self._write(Stop())

    async def records(self, process_sentinel: int | None = None) -> AsyncIterator[FromEngine]:
        """What the engine's process says, in order; ends when that process is gone.

        `process_sentinel` (multiprocessing's) also ends it for a process that dies before it connects.
        """
        assert self._connected is not None, "listen() comes first"
        loop = asyncio.get_running_loop()
        if process_sentinel is not None:
            loop.add_reader(process_sentinel, self._process_ended, process_sentinel)
        try:
            reader = await self._connected
            while reader is not None:
                try:
                    (body_bytes,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                    body = await reader.readexactly(body_bytes)
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                yield pickle.loads(body)
        finally:
            if process_sentinel is not None:
                loop.remove_reader(process_sentinel)

    def _process_ended(self, process_sentinel: int) -> None:
        asyncio.get_running_loop().remove_reader(process_sentinel)
        if self._connected is not None and not self._connected.done():
            self._connected.set_result(None)  # once connected, the end of the stream says it

    def submit(self, items: Sequence[Work]) -> None:
        """Send to the engine; all that one turn of the loop submits travels as one frame."""
        if not self._outgoing and items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.extend(items)

    def _flush(self) -> None:
        items, self._outgoing = self._outgoing, []
        self._write(items)

    def stop_engine(self) -> None:
        """Ask the engine's process to end, as soon as it listens."""
        self._stop_asked = True
        self._write(Stop())

    def _write(self, record: object) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack_frame(record))

    async def close(self) -> None:
        """Hang up and remove the socket; the engine's process ends by itself where it has not yet."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def exit_at_once() -> None:
    """End the process from any thread: a compilation or a device call in the main thread cannot be interrupted."""
    os._exit(1)


class EngineSide:
    """The engine's end: a thread that reads work and a thread that sends news. `emit` never blocks the step loop."""

    def __init__(self, address: str, authkey: bytes, on_front_gone: Callable[[], None] = exit_at_once) -> None:
        """Connect. `on_front_gone` is called from a thread when the front's process, or the link itself, is no more."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._socket.connect(address)
        self._socket.settimeout(None)
        self._socket.sendall(authkey)
        self._on_front_gone = on_front_gone
        self._submit: Callable[[list[Work]], None] | None = None
        self._on_stop: Callable[[], None] | None = None
        self._read_stats: Callable[[], EngineStats] | None = None
        self._closing = threading.Event()
        self._queue: queue.SimpleQueue[EventBatch | FromEngine | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._guard, args=(self._send_all,), name="link-sender", daemon=True)
        self._reader = threading.Thread(target=self._guard, args=(self._read_all,), name="link-reader", daemon=True)
        self._sender.start()
        self._reader.start()

    def progress(self, text: str, fraction: float | None = None) -> None:
        """Tell what start-up is at."""
        self._queue.put(Progress(text, fraction))

    def busy(self, reason: str | None) -> None:
        """Before and (with None) after something long inside a step, such as a compilation."""
        self._queue.put(Busy(reason))

    def fail(self, error: BaseException) -> None:
        """The engine ends; own errors travel with their sentence and exit code, others with their type only."""
        if isinstance(error, JaxserveError):
            self._queue.put(Failed(str(error), error.exit_code))
        else:
            self._queue.put(Failed(f"the engine stopped with {type(error).__name__}: {error}"[:500], 1))

    def ready(
        self,
        facts: EngineFacts,
        submit: Callable[[list[Work]], None],
        read_stats: Callable[[], EngineStats],
        on_stop: Callable[[], None],
    ) -> None:
        """The engine is warm. From now on `submit` gets the front's lists and `on_stop` its request to end.

        Both are called from the reader's thread, `read_stats` about once a second from the sender's: each must be
        quick and safe beside a running step.
        """
        self._submit, self._read_stats, self._on_stop = submit, read_stats, on_stop
        self._queue.put(Ready(facts))

    def emit(self, batch: EventBatch) -> None:
        """One step's events. Never blocks."""
        self._queue.put(batch)

    def close(self) -> None:
        """Send what waits, then hang up."""
        self._closing.set()
        self._queue.put(None)
        self._sender.join(timeout=5.0)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(timeout=5.0)
        self._socket.close()

    def _guard(self, run: Callable[[], None]) -> None:
        """A thread's whole life. An engine that is deaf or mute is of no use: without the link it ends."""
        try:
            run()
        except OSError:
            pass  # the front hung up
        except Exception:
            logger.exception("the link to the front broke")
        if not self._closing.is_set():
            self._on_front_gone()

    def _send_all(self) -> None:
        while True:
            waiting = [*self._wait()]
            ended = None in waiting
            frames = merge_news([item for item in waiting if item is not None], self._stats())
            self._socket.sendall(b"".join(map(pack_frame, frames)))
            if ended:
                return

    def _wait(self) -> list[EventBatch | FromEngine | None]:
        """All that waits; empty after a period without news."""
        items: list[EventBatch | FromEngine | None] = []
        with contextlib.suppress(queue.Empty):
            items.append(self._queue.get(timeout=STATS_PERIOD_S))
            while True:
                items.append(self._queue.get_nowait())
        return items

    def _stats(self) -> EngineStats | None:
        return self._read_stats() if self._read_stats is not None else None

    def _read_all(self) -> None:
        with self._socket.makefile("rb") as stream:
            while header := stream.read(HEADER.size):
                if len(header) < HEADER.size:
                    break
                (body_bytes,) = HEADER.unpack(header)
                body = stream.read(body_bytes)
                if len(body) < body_bytes:
                    break
                self._handle(pickle.loads(body))

    def _handle(self, record: object) -> None:
        if isinstance(record, Stop):
            if self._on_stop is not None:
                self._on_stop()
            else:
                self._on_front_gone()  # still starting: there is nothing to finish
        else:
            assert self._submit is not None and isinstance(record, list), "work before Ready"
            self._submit(record)


def merge_news(items: Sequence[EventBatch | FromEngine], stats: EngineStats | None) -> list[FromEngine]:
    """Batches that follow each other become one News; the stats go with the last one."""
    merged: list[FromEngine] = []
    run: list[EventBatch] = []
    for item in items:
        if isinstance(item, EventBatch):
            run.append(item)
            continue
        if run:
            merged.append(News(tuple(run)))
            run = []
        merged.append(item)
    if run or stats is not None:
        merged.append(News(tuple(run), stats))
    return merged
