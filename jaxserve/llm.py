"""The Python library: one object that holds a warm engine in this process. Takes prompts, gives RequestOutputs.

Three threads: the caller's, the engine's loop, and one for text, so that neither tokenising nor detokenising holds up a
step.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from jaxserve import environment
from jaxserve.app import text_parts
from jaxserve.config import ServerConfig
from jaxserve.engine_app import build_engine
from jaxserve.errors import EngineUnavailable, InvalidRequest, RequestCancelled
from jaxserve.options import EngineOptions, config_from_options
from jaxserve.request import EngineStats, EventBatch, Finish, FlushCache, RequestOutput, SamplingParams
from jaxserve.text.assemble import merge
from jaxserve.text.front import Front
from jaxserve.text.prepare import Prepared, TextLimits, prepare, prepare_chat

type Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
type Messages = Sequence[Mapping[str, Any]]

JOIN_S = 30.0


class LLM:
    """A model, loaded and warm.

    with LLM("path/to/model", max_model_len=4096) as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

    Args:
      model: a Hugging Face directory, a GGUF file, or a converted checkpoint.
      progress: called with a line for each part of the start.
      options: see `jaxserve.options.EngineOptions`: dtype, max_model_len, max_num_seqs, device, ... as vLLM's.

    Raises ConfigError, ModelError, CheckpointError or DeviceError, each one sentence.
    """

    def __init__(
        self, model: str, *, progress: Callable[[str], None] = lambda line: None, **options: Unpack[EngineOptions]
    ) -> None:
        config = config_from_options(model, {"compile_cache_dir": environment.default_compile_cache()} | options)
        environment.prepare(config.runtime.device, config.cache.gpu_memory_utilization)
        self._text = text_parts(config)
        self._events: queue.SimpleQueue[EventBatch | None] = queue.SimpleQueue()
        self._parts = build_engine(config, self._events.put, progress)
        self.config = self._parts.config
        facts = self._parts.facts
        self.limits = TextLimits(
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            pool_tokens=facts.total_pages * facts.page_size_tokens,
            eos_token_ids=self._text.eos_token_ids,
            max_n=ServerConfig().max_n,
        )
        self._front = Front(self._text.tokenizer, self._parts.engine.submit, time.monotonic)
        self._stop = threading.Event()
        self._engine_thread = threading.Thread(target=self._run_engine, name="jaxserve-engine", daemon=True)
        self._text_thread = threading.Thread(target=self._run_text, name="jaxserve-text", daemon=True)
        self._engine_thread.start()
        self._text_thread.start()

    # Requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; results in input order.

        A prompt is a text, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and perhaps "cache_salt".
        One SamplingParams holds for all prompts; a list has one for each.
        Raises InvalidRequest, before anything runs, if any prompt or parameter is not allowed; RequestFailed or
        EngineUnavailable if the engine failed.
        """
        many = as_list(prompts)
        return self._run_all([self._prepare(prompt, one) for prompt, one in paired(many, sampling_params)])

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them; messages are dicts with "role" and "content".

        `template_kwargs` go to the model's chat template: GLM takes {"enable_thinking": False}, DeepSeek-V3.1
        {"thinking": True}.
        """
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        extra = (template_kwargs, add_generation_prompt)
        return self._run_all([self._prepare_chat(one, params, *extra) for one, params in paired(many, sampling_params)])

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt; yields what is new since the last yield. Closing the iterator cancels the request."""
        return self._stream(self._prepare(prompt, sampling_params))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Iterator[RequestOutput]:
        """As `stream`, for a conversation (see `chat`)."""
        return self._stream(self._prepare_chat(messages, sampling_params, template_kwargs, add_generation_prompt))

    async def generate_async(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Complete one prompt without blocking the event loop; cancelling the task cancels the request."""
        whole: RequestOutput | None = None
        async with contextlib.aclosing(self.stream_async(prompt, sampling_params)) as deltas:
            async for delta in deltas:
                whole = delta if whole is None else merge(whole, delta)
        assert whole is not None
        return whole

    async def stream_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """As `stream`, for asyncio."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[RequestOutput] = asyncio.Queue()
        prepared = await asyncio.to_thread(self._prepare, prompt, sampling_params)
        request_id = self._front.submit(prepared, lambda delta: loop.call_soon_threadsafe(deltas.put_nowait, delta))
        try:
            while True:
                delta = await deltas.get()
                yield checked(delta)
                if delta.finished:
                    return
        finally:
            self._front.cancel(request_id)

    # The engine

    def stats(self) -> EngineStats:
        """The engine's figures of this moment."""
        return self._parts.stats()

    def flush_cache(self) -> None:
        """Empty the prefix cache: prompts given from now on find nothing of what was before; running ones go on."""
        self._parts.engine.submit([FlushCache()])

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - None or jaxserve.text.tokenizer.Tokenizer
        """The tokenizer, or None."""
        return self._text.tokenizer

    def close(self) -> None:
        """End all requests and free the device. Harmless twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._front.fail_all(EngineUnavailable("the LLM was closed"))
        self._engine_thread.join(JOIN_S)
        self._events.put(None)
        self._text_thread.join(JOIN_S)
        self._parts.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _run_engine(self) -> None:
        try:
            self._parts.engine.run(self._stop)
        except EngineUnavailable as error:
            self._front.fail_all(error)

    def _run_text(self) -> None:
        while (batch := self._events.get()) is not None:
            self._front.on_events(batch)

    def _prepare(self, prompt: Prompt, params: SamplingParams | None) -> Prepared:
        params = params or SamplingParams()
        if isinstance(prompt, Mapping):
            rest = dict(prompt)
            if "cache_salt" in rest:  # where vLLM's users put it
                params = replace(params, cache_salt=rest.pop("cache_salt"))
            if len(rest) != 1 or not rest.keys() <= {"prompt", "prompt_token_ids"}:
                allowed = 'a dict with just "prompt" or just "prompt_token_ids", and "cache_salt" if need be'
                raise InvalidRequest("prompt", sorted(prompt), allowed)
            (prompt,) = rest.values()
        return prepare(prompt, params, self.limits, self._text.tokenizer)

    def _prepare_chat(
        self,
        messages: Messages,
        params: SamplingParams | None,
        template_kwargs: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> Prepared:
        return prepare_chat(
            messages,
            params or SamplingParams(),
            self.limits,
            self._text.tokenizer,
            self._text.template,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )

    def _run_all(self, prepared: list[Prepared]) -> list[RequestOutput]:
        deltas: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()
        request_ids = []
        results: list[RequestOutput | None] = [None] * len(prepared)
        try:
            for i, one in enumerate(prepared):
                request_ids.append(self._front.submit(one, lambda delta, i=i: deltas.put((i, delta))))
            running = len(prepared)
            while running:
                i, delta = deltas.get()
                whole = results[i]
                results[i] = delta if whole is None else merge(whole, delta)
                running -= delta.finished
        finally:
            for request_id in request_ids:  # all have ended, unless the caller interrupts
                self._front.cancel(request_id)
        return [checked(result) for result in results if result is not None]

    def _stream(self, prepared: Prepared) -> Iterator[RequestOutput]:
        deltas: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        request_id = self._front.submit(prepared, deltas.put)
        try:
            while True:
                delta = deltas.get()
                yield checked(delta)
                if delta.finished:
                    return
        finally:
            self._front.cancel(request_id)


def checked(output: RequestOutput) -> RequestOutput:
    """The output, unless the engine failed it: then its error is raised."""
    if output.error is not None:
        raise output.error
    if any(choice.finish_reason == Finish.CANCELLED.text for choice in output.outputs):
        raise RequestCancelled(f"request {output.request_id} was cancelled")
    return output


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many. A list of ints is one prompt."""
    if isinstance(prompts, (str, Mapping, np.ndarray)) or (
        len(prompts) and isinstance(prompts[0], (int, np.integer)) and not isinstance(prompts[0], bool)
    ):
        return [prompts]
    return list(prompts)


def paired[Item](
    items: Sequence[Item], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Item, SamplingParams | None]]:
    """Each item with its parameters."""
    if params is None or isinstance(params, SamplingParams):
        return [(item, params) for item in items]
    if len(params) != len(items):
        raise InvalidRequest("sampling_params", f"{len(params)} of them", f"one, or {len(items)}: one a prompt")
    return list(zip(items, params, strict=True))
