"""Between grpc.aio and our services: takes a service object, gives gRPC its handlers. Decoding, statuses and the size
limit happen here, once for all methods; the services see readable messages and raise our own errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from jaxserve.errors import MessageTooLarge
from jaxserve.server.decode import BadMessage, deserializer
from jaxserve.server.status import abort

type Context = grpc.aio.ServicerContext


class Stream:
    """What a streaming method writes to. Messages are serialised once, measured, and sent as they are."""

    __slots__ = ("_context", "_max_message_bytes")

    def __init__(self, context: Context, max_message_bytes: int) -> None:
        self._context, self._max_message_bytes = context, max_message_bytes

    def time_remaining_s(self) -> float | None:
        """Seconds until the call's deadline; None without one."""
        return self._context.time_remaining()

    async def write(self, message: Message) -> None:
        """Send; waits while the reader is behind. Raises MessageTooLarge."""
        await self._context.write(measured(message, self._max_message_bytes))


def measured(message: Message, max_message_bytes: int) -> bytes:
    """The message's bytes. Raises MessageTooLarge with both sizes."""
    raw = message.SerializeToString()
    if len(raw) > max_message_bytes:
        raise MessageTooLarge(
            f"{message.DESCRIPTOR.name}: the answer has {len(raw)} bytes, allowed: at most {max_message_bytes}"
        )
    return raw


def handlers(service: ServiceDescriptor, behaviour: object, max_message_bytes: int) -> grpc.GenericRpcHandler:
    """Handlers for every method of `service`: `behaviour` has an async method of each name.

    A streaming method takes (request, Stream), the others take the request and return the response.
    """
    made = {
        method.name: handler(method, getattr(behaviour, method.name), max_message_bytes) for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, made)


def handler(
    method: MethodDescriptor, behaviour: Callable[..., Awaitable[Any]], max_message_bytes: int
) -> grpc.RpcMethodHandler:
    """One method's handler."""

    async def unary(request: Message | BadMessage, context: Context) -> bytes:
        try:
            return measured(await behaviour(readable(request)), max_message_bytes)
        except Exception as error:
            await abort(context, error, method.full_name)

    async def stream(request: Message | BadMessage, context: Context) -> None:
        try:
            await behaviour(readable(request), Stream(context, max_message_bytes))
        except Exception as error:
            await abort(context, error, method.full_name)

    read = deserializer(GetMessageClass(method.input_type))
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, request_deserializer=read)
    return grpc.unary_unary_rpc_method_handler(unary, request_deserializer=read)


def readable(request: Message | BadMessage) -> Message:
    """The message itself. Raises the InvalidRequest of one that could not be read."""
    if isinstance(request, BadMessage):
        raise request.error
    return request
