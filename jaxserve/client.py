"""The gRPC client: takes prompts and messages, gives RequestOutput, whole or as a stream of deltas. Needs no jax.

with Client("127.0.0.1:50051") as client:
    for delta in client.stream_chat([{"role": "user", "content": "Hello"}]):
        print(delta.outputs[0].text, end="")
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Never, Self, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError, shorten
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.server import wire
from jaxserve.text.assemble import merge
from jaxserve.text.chat import check_strings, check_text
from jaxserve.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

MAX_MESSAGE_BYTES = 64 << 20
UNARY_DEADLINE_S = 60.0
DETAILS_KEY = "grpc-status-details-bin"

type Message = Mapping[str, str]
type Response = inference_pb2.GenerateResponse | inference_pb2.ChatResponse


class ServerError(JaxserveError):
    """The server answered with an error: its sentence, `status` (such as "UNAVAILABLE") and the field, where known."""

    def __init__(self, status: str, sentence: str, field: str | None = None) -> None:
        self.status, self.field = status, field
        super().__init__(sentence)

    def __reduce__(self) -> tuple[type, tuple[str, str, str | None]]:
        return type(self), (self.status, str(self), self.field)


class Client:
    """A blocking client; safe to use from several threads. Each call may have a deadline in seconds.

    All methods raise ServerError, and InvalidRequest for what the wire cannot hold. Leaving a stream early (or
    `close()` on it) cancels its request.
    """

    def __init__(self, address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """`address` is host:port. Nothing is sent until the first call. Raises ConfigError for another form."""
        check_address(address)
        options = (
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
        )
        self._channel = grpc.insecure_channel(address, options=options)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; calls that still run are cancelled."""
        self._channel.close()

    # --- text and tokens

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        return_prompt_token_ids: bool = False,
        deadline_s: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Continue a text or token ids: deltas as they come, each holding only what is new; the last is `finished`."""
        request = inference_pb2.GenerateRequest(
            request_id=check_text("request_id", request_id),
            sampling=wire.sampling_message(params or SamplingParams()),
            return_prompt_token_ids=return_prompt_token_ids,
        )
        if isinstance(prompt, str):
            request.text = check_text("prompt", prompt)
        else:
            request.token_ids.ids.extend(checked_ids(prompt))
        call = self._inference.Generate(request, timeout=deadline_s)
        return deltas(call, prompt if isinstance(prompt, str) else None)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        request_id: str = "",
        return_prompt_token_ids: bool = False,
        deadline_s: float | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer a conversation: deltas as they come. Without `params` the answer may fill the context."""
        check_strings("messages", messages)
        check_strings("template_kwargs", template_kwargs)
        request = inference_pb2.ChatRequest(
            request_id=check_text("request_id", request_id),
            messages=[inference_pb2.ChatMessage(role=entry["role"], content=entry["content"]) for entry in messages],
            sampling=wire.sampling_message(params or SamplingParams(max_tokens=None)),
            add_generation_prompt=add_generation_prompt,
            return_prompt_token_ids=return_prompt_token_ids,
        )
        if template_kwargs:
            request.template_kwargs.update(dict(template_kwargs))
        return deltas(self._inference.Chat(request, timeout=deadline_s), None)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        deadline_s: float | None = None,
    ) -> RequestOutput:
        """As `stream`, joined."""
        return join(
            self.stream(prompt, params, request_id=request_id, return_prompt_token_ids=True, deadline_s=deadline_s)
        )

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        request_id: str = "",
        deadline_s: float | None = None,
    ) -> RequestOutput:
        """As `stream_chat`, joined."""
        return join(
            self.stream_chat(
                messages,
                params,
                template_kwargs=template_kwargs,
                add_generation_prompt=add_generation_prompt,
                request_id=request_id,
                return_prompt_token_ids=True,
                deadline_s=deadline_s,
            )
        )

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        request = inference_pb2.TokenizeRequest(text=check_text("text", text), add_special_tokens=add_special_tokens)
        return list(unary(self._inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return unary(self._inference.Detokenize, request).text

    # --- the server

    def abort(self, request_id: str) -> bool:
        """End one live request; False: no such request is alive."""
        return unary(self._control.Abort, control_pb2.AbortRequest(request_id=request_id)).aborted

    def flush_cache(self) -> None:
        """Empty the prefix cache: requests sent from now on find nothing of what was before."""
        unary(self._control.FlushCache, control_pb2.FlushCacheRequest())

    def drain(self, timeout_s: float | None = None) -> int:
        """No new requests from now on; waits for the live ones and returns how many are left at the timeout."""
        return unary(self._control.Drain, control_pb2.DrainRequest(timeout_s=timeout_s), None).live_requests

    def model_info(self) -> control_pb2.GetModelInfoResponse:
        """What is served."""
        return unary(self._control.GetModelInfo, control_pb2.GetModelInfoRequest())

    def server_info(self) -> control_pb2.GetServerInfoResponse:
        """State, device and limits; answers while the server starts, too."""
        return unary(self._control.GetServerInfo, control_pb2.GetServerInfoRequest())

    def load(self) -> control_pb2.GetLoadResponse:
        """How busy it is."""
        return unary(self._control.GetLoad, control_pb2.GetLoadRequest())

    def is_serving(self, deadline_s: float = 5.0) -> bool:
        """The health check's answer; False where nobody answers."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=deadline_s)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING


def check_address(address: str) -> None:
    """Raises ConfigError where a host or a port that exists is missing: gRPC would take some other port."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--address: got {shorten(address)}, allowed: HOST:PORT with a port of 1 to 65535")


def unary(method: Any, request: Any, deadline_s: float | None = UNARY_DEADLINE_S) -> Any:
    """One call's answer. Raises ServerError."""
    try:
        return method(request, timeout=deadline_s)
    except grpc.RpcError as error:
        raise_server_error(error)


def checked_ids(prompt: Iterable[int]) -> list[int]:
    """Token ids as the wire takes them, int32. Raises InvalidRequest for anything else, as a list of prompts is.

    Whether they are within the vocabulary the server knows.
    """
    ids = []
    for token in prompt:
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= operator.index(token) < 2**31:
            raise InvalidRequest("prompt", token, "a text, or a list of token ids from 0; one prompt a call")
        ids.append(operator.index(token))
    return ids


def deltas(call: Any, prompt: str | None) -> Iterator[RequestOutput]:
    """The responses of a stream as RequestOutputs that hold only what is new; cancels the call when left early."""
    request_id = ""
    try:
        for response in call:
            request_id = request_id or response.request_id
            yield wire.output_of(response, request_id, prompt)
    except grpc.RpcError as error:
        raise_server_error(error)
    finally:
        call.cancel()  # no effect on a call that has ended


def join(parts: Iterable[RequestOutput]) -> RequestOutput:
    """All deltas of a stream as one result, choices in order."""
    return functools.reduce(merge, parts)


def raise_server_error(error: grpc.RpcError) -> Never:
    """Turn gRPC's error into ours."""
    assert isinstance(error, grpc.Call)
    raise ServerError(error.code().name, error.details() or "no details", field_in(error)) from None


def field_in(error: grpc.Call) -> str | None:
    """The field that the status' rich details name first."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            for detail in status_pb2.Status.FromString(cast(bytes, value)).details:
                violations = error_details_pb2.BadRequest()
                if detail.Unpack(violations) and violations.field_violations:
                    return violations.field_violations[0].field
    return None
