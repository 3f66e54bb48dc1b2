"""The Inference service: takes requests, gives streams. One coroutine a call, from its message to its last delta."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jaxserve.errors import DeadlineExceeded, InvalidRequest
from jaxserve.request import Finish
from jaxserve.server import wire
from jaxserve.server.handlers import Stream
from jaxserve.server.hub import Hub
from jaxserve.server.outbox import Outbox
from jaxserve.text.prepare import NO_TOKENIZER, Prepared, encode_text, prepare, prepare_chat
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.v1 import inference_pb2 as pb

type Request = pb.GenerateRequest | pb.ChatRequest


class InferenceService:
    """One method for each of the proto's."""

    def __init__(self, hub: Hub, pool: ThreadPoolExecutor, max_n: int) -> None:
        """`pool` is where tokenising happens, so that no text holds up the streams of others."""
        self._hub, self._text, self._pool, self._max_n = hub, hub.text, pool, max_n

    async def Generate(self, request: pb.GenerateRequest, stream: Stream) -> None:
        """Stream the continuation of a text or of token ids."""
        limits, prompt = self._hub.limits(), wire.prompt_of(request)
        params = wire.sampling_params(request.sampling, self._max_n)
        await self._run(request, stream, lambda: prepare(prompt, params, limits, self._text.tokenizer))

    async def Chat(self, request: pb.ChatRequest, stream: Stream) -> None:
        """Stream the answer to a conversation."""
        limits, messages = self._hub.limits(), wire.chat_messages(request)
        params, values = wire.sampling_params(request.sampling, self._max_n), wire.template_kwargs(request)
        opening = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
        await self._run(
            request,
            stream,
            lambda: prepare_chat(
                messages,
                params,
                limits,
                self._text.tokenizer,
                self._text.template,
                add_generation_prompt=opening,
                template_kwargs=values,
            ),
        )

    async def Tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Text to ids."""
        limits, text = self._hub.limits(), request.text
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await self._in_pool(lambda: encode_text("text", text, self._text.tokenizer, special))
        return pb.TokenizeResponse(token_ids=ids, max_model_len=limits.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Ids to text."""
        ids, tokenizer = list(request.token_ids), self._tokenizer(request)
        text = await self._in_pool(lambda: tokenizer.decode(ids, request.skip_special_tokens))
        return pb.DetokenizeResponse(text=text)

    def _tokenizer(self, request: pb.DetokenizeRequest) -> Tokenizer:
        if self._text.tokenizer is None:
            raise InvalidRequest("token_ids", f"{len(request.token_ids)} ids", NO_TOKENIZER)
        return self._text.tokenizer

    async def _in_pool[T](self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def _run(self, request: Request, stream: Stream, make: Callable[[], Prepared]) -> None:
        """Prepare, submit, send. Whatever ends it, and whether or not gRPC says why, the request is gone afterwards."""
        request_id = wire.request_id_of(request.request_id)
        deadline_s = stream.time_remaining_s()
        outbox, submitted, reason = Outbox(), False, Finish.CANCELLED
        with self._hub.stream() as arrival_s:
            try:
                async with asyncio.timeout(deadline_s):
                    prepared = await self._in_pool(make)
                    request_id = self._hub.submit(prepared, outbox, request_id, arrival_s)
                    submitted = True
                    await send(request, request_id, prepared, outbox, stream)
            except TimeoutError:
                reason = Finish.DEADLINE
                raise DeadlineExceeded(f"the call's deadline of {deadline_s:.3f} s has passed") from None
            finally:
                remaining_s = stream.time_remaining_s()
                if remaining_s is not None and remaining_s <= 0:
                    reason = Finish.DEADLINE  # gRPC's own cancel at the deadline may win against our timer
                if submitted and not outbox.ended:  # once ended, the id may be another request's
                    self._hub.front.cancel(request_id, reason)


async def send(request: Request, request_id: str, prepared: Prepared, outbox: Outbox, stream: Stream) -> None:
    """Deltas to messages, until the last one. While a write waits for a slow reader, the outbox merges.

    Raises the error that ended a choice, once all choices have ended.
    """
    response = pb.GenerateResponse() if isinstance(request, pb.GenerateRequest) else pb.ChatResponse()
    response.request_id = request_id
    if request.return_prompt_token_ids:
        response.prompt_token_ids.extend(prepared.prompt_token_ids)
    completion_tokens, finished, error = 0, False, None
    while not finished:
        delta = await outbox.take()
        finished, error = delta.finished, error or delta.error
        completion_tokens += sum(len(output.token_ids) for output in delta.outputs)
        wire.fill_response(response, delta)
        if finished:
            response.usage.prompt_tokens = len(prepared.prompt_token_ids)
            response.usage.completion_tokens = completion_tokens
            response.usage.cached_tokens = delta.num_cached_tokens
        await stream.write(response)
        response.Clear()
    if error is not None:
        raise error
