"""A real gRPC server on a loopback port over a scripted engine in the same process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from jaxserve.config import ServerConfig
from jaxserve.request import Cancel
from jaxserve.server.hub import TextParts
from jaxserve.server.link import News, Ready, Work
from jaxserve.server.run import FrontParts, FrontServer
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.tokenizer import load_tokenizer, read_eos_ids
from jaxserve.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.fakes.engine import FACTS, ScriptedEngine
from tests.fakes.tokenizer import tiny_tokenizer_dir

CONFIG = ServerConfig(port=0, drain_timeout_s=2.0, max_n=8)


@dataclass
class DirectLink:
    """A link without a second process: work goes straight into the scripted engine."""

    engine: ScriptedEngine
    cancels: list[Cancel] = field(default_factory=list)

    def submit(self, items: Sequence[Work]) -> None:
        """As FrontSide.submit."""
        self.cancels.extend(item for item in items if isinstance(item, Cancel))
        self.engine.submit(items)


@dataclass
class Serving:
    """A running server and ways to call it."""

    server: FrontServer
    engine: ScriptedEngine
    link: DirectLink
    channel: grpc.aio.Channel

    @property
    def address(self) -> str:
        """host:port for clients of their own."""
        return f"127.0.0.1:{self.server.port}"

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        """Stub on the shared channel."""
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def control(self) -> control_pb2_grpc.ControlStub:
        """Stub on the shared channel."""
        return control_pb2_grpc.ControlStub(self.channel)

    def step(self) -> None:
        """One step of the engine, delivered at once."""
        batch = self.engine.step()
        self.server.hub.on_record(News((batch,) if batch else (), self.engine.stats()))

    async def idle(self, steps: int = 200) -> None:
        """Wait until nobody is live in front and engine; fails after that many turns."""
        for _ in range(steps):
            if self.engine.idle and not self.server.hub.open_streams:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still live: {self.server.hub.open_streams} streams, {len(self.engine.live)} sequences")


def text_parts(folder: Path, vocab_size: int = 512) -> TextParts:
    """The real text rooms over a small byte-level tokenizer made in `folder`."""
    path = tiny_tokenizer_dir(folder / f"tokenizer-{vocab_size}", vocab_size)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None and tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    return TextParts(tokenizer, template, read_eos_ids(path, tokenizer))


@contextlib.asynccontextmanager
async def serving(
    text: TextParts,
    engine: ScriptedEngine | None = None,
    *,
    config: ServerConfig = CONFIG,
    ready: bool = True,
    step_period_s: float | None = 0.002,
    max_queue_requests: int = 4096,
) -> AsyncIterator[Serving]:
    """A server that is warm, stepping by itself each period; None: only when the test calls `step`."""
    engine = engine or ScriptedEngine()
    link = DirectLink(engine)
    parts = FrontParts("scripted", text, "0.0.0", lambda line: None, max_queue_requests=max_queue_requests)
    server = FrontServer(config, parts, link.submit)
    try:
        await server.start()
    except BaseException:
        await server.stop(0.0)
        raise
    if ready:
        server.hub.on_record(Ready(FACTS))
        server.refresh_health()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", options=(("grpc.max_receive_message_length", -1),)
    ) as channel:
        running = Serving(server, engine, link, channel)
        stepper = asyncio.create_task(step_forever(running, step_period_s)) if step_period_s is not None else None
        try:
            yield running
        finally:
            if stepper is not None:
                stepper.cancel()
                await asyncio.gather(stepper, return_exceptions=True)
            await server.stop(0.0)


async def step_forever(running: Serving, period_s: float) -> None:
    """The engine's loop."""
    while True:
        running.step()
        await asyncio.sleep(period_s)


def request(ids: Sequence[int] | str, request_id: str = "", **sampling: object) -> inference_pb2.GenerateRequest:
    """A GenerateRequest of ids or of text."""
    made = inference_pb2.GenerateRequest(request_id=request_id, sampling=inference_pb2.SamplingParams(**sampling))
    if isinstance(ids, str):
        made.text = ids
    else:
        made.token_ids.ids.extend(ids)
    return made


async def joined(call: grpc.aio.UnaryStreamCall) -> tuple[str, list[int], list[inference_pb2.GenerateResponse]]:
    """Text and ids of choice 0, and all messages of a stream."""
    messages: list[inference_pb2.GenerateResponse] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    choices = [choice for message in messages for choice in message.choices if choice.index == 0]
    return "".join(c.text for c in choices), [t for c in choices for t in c.token_ids], messages
