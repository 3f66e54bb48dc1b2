"""Takes prepared requests from the server or the library, and the engine's EventBatches; gives each request its deltas.

The router between texts and the engine: it hands out handles, which are never used twice, so a request id that is used
again right after a cancel cannot meet the old one's tokens. All methods may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.errors import DuplicateRequest, JaxserveError, RequestFailed
from jaxserve.request import (
    Cancel,
    CompletionOutput,
    EventBatch,
    Finish,
    Logprob,
    Logprobs,
    RequestOutput,
    TokenRequest,
)
from jaxserve.text.assemble import Assembler, prompt_dicts
from jaxserve.text.prepare import Prepared, copy_with
from jaxserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

type Outbox = Callable[[RequestOutput], None]
type Send = Callable[[list[TokenRequest | Cancel]], None]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What one finished request took, for metrics; one for each request, however many choices it has."""

    request_id: str
    arrival_s: float  # the front's clock
    queue_s: float | None  # from arrival until the engine first scheduled it
    first_token_s: float | None  # the front's clock
    finish_s: float  # the front's clock
    decode_s: float  # from the first to the last token, summed over choices
    decode_tokens: int  # tokens but the first of each choice
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    finish_reasons: tuple[str, ...]  # by choice

    @property
    def time_to_first_token_s(self) -> float | None:
        """From arrival; None where no token came."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean over the tokens behind the first; None where there is none."""
        return self.decode_s / self.decode_tokens if self.decode_tokens else None

    @property
    def e2e_s(self) -> float:
        """From arrival to the end."""
        return self.finish_s - self.arrival_s


@dataclass(slots=True, eq=False)
class Live:
    """A request that is not finished, and what is known of it so far."""

    request_id: str
    prepared: Prepared
    outbox: Outbox
    arrival_s: float
    handles: dict[int, Choice] = field(default_factory=dict)  # of the choices that still run
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice
    queue_s: float | None = None
    first_token_s: float | None = None
    decode_s: float = 0.0
    generation_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # until they are sent, with choice 0's first token


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence at the engine."""

    handle: int
    assembler: Assembler
    live: Live
    first_s: float = 0.0
    last_s: float = 0.0


class Front:
    """Requests in, deltas out; `send` takes what the engine is told, `observe` each finished request's times.

    An outbox is called with a RequestOutput that holds only what is new, at most once a step and choice; the delta of
    the last choice's end has `finished`. It must not block. If it raises, its request is cancelled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        send: Send,
        clock: Callable[[], float],
        observe: Callable[[RequestTimes], None] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._send = send
        self._clock = clock
        self._observe = observe
        self._lock = threading.RLock()  # reentrant: an outbox may cancel
        self._requests: dict[str, Live] = {}
        self._choices: dict[int, Choice] = {}  # by handle
        self._next_handle = 1
        self._refusal: JaxserveError | None = None

    @property
    def num_live_requests(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def submit(self, prepared: Prepared, outbox: Outbox, request_id: str = "", arrival_s: float | None = None) -> str:
        """Send a request to the engine and return its id, a fresh one unless given.

        `arrival_s` is when it came in, on this front's clock; unset: now. Raises DuplicateRequest for the id of a
        live request, and what `refuse_new` or `fail_all` was given.
        """
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            request_id = request_id or uuid.uuid4().hex
            if request_id in self._requests:
                raise DuplicateRequest(f"request_id: {request_id!r} is in use by a request that is still alive")
            live = Live(request_id, prepared, outbox, self._clock() if arrival_s is None else arrival_s)
            messages: list[TokenRequest | Cancel] = []
            for index, request in enumerate(prepared.requests):
                handle = self._next_handle
                self._next_handle += 1
                live.handles[handle] = Choice(handle, Assembler(prepared, index, self._tokenizer), live)
                messages.append(copy_with(request, handle=handle, arrival_s=live.arrival_s))
            if prepared.params.prompt_logprobs is not None:
                live.prompt_logprobs = [None]
            self._send(messages)
            self._requests[request_id] = live
            self._choices.update(live.handles)
            return request_id

    def cancel(self, request_id: str, reason: Finish = Finish.CANCELLED) -> bool:
        """End a request now: its outbox gets the last delta, the engine a Cancel. False if no such request is alive.

        Harmless at any time and twice; tokens still on their way are dropped.
        """
        with self._lock:
            live = self._requests.get(request_id)
            if live is None:
                return False
            cancels: list[TokenRequest | Cancel] = [Cancel(handle, reason) for handle in live.handles]
            self._end_all(live, reason, None)
            self._send(cancels)
            return True

    def refuse_new(self, error: JaxserveError) -> None:
        """Raise `error` at each further submit; live requests go on. For draining."""
        with self._lock:
            self._refusal = error

    def fail_all(self, error: JaxserveError) -> None:
        """The engine is gone: end each live request with `error`, and refuse new ones with it."""
        with self._lock:
            self._refusal = error
            for live in list(self._requests.values()):
                self._end_all(live, Finish.ERROR, error)

    def on_events(self, batch: EventBatch) -> None:
        """Route one step's events. Rows of sequences that ended here (a cancel, a stop string) are dropped."""
        with self._lock:
            now_s = self._clock()
            self._note(batch)
            cancels: list[TokenRequest | Cancel] = []
            choices, logprobs = self._choices, batch.logprobs
            rows = zip(batch.handles.tolist(), batch.token_ids.tolist(), batch.finishes.tolist(), strict=True)
            for row, (handle, token, finish) in enumerate(rows):
                choice = choices.get(handle)
                if choice is None:
                    continue
                output = choice.assembler.push(token, finish, logprobs.get(row))
                if token >= 0:
                    if choice.assembler.num_tokens == 1:
                        self._first_token(choice, now_s)
                    choice.last_s = now_s
                error = None
                if output.finish_reason is not None:
                    if not finish:  # a stop string, which the engine cannot know
                        cancels.append(Cancel(handle, Finish.STOP))
                    elif finish == Finish.ERROR:
                        error = RequestFailed(batch.errors.get(handle, "the request failed in the engine"))
                    self._close(choice, output.finish_reason, now_s)
                self._deliver(choice.live, output, error)
            if cancels:
                self._send(cancels)

    def _note(self, batch: EventBatch) -> None:
        """Keep what a batch says of requests rather than of rows."""
        for handle, tokens in batch.cached_tokens.items():
            choice = self._choices.get(handle)
            if choice is not None and choice.assembler.index == 0:
                choice.live.cached_tokens = tokens
        for handle, queue_s in batch.queue_s.items():
            choice = self._choices.get(handle)
            if choice is not None and (choice.live.queue_s is None or queue_s < choice.live.queue_s):
                choice.live.queue_s = queue_s
        for handle, logprobs in batch.prompt_logprobs.items():
            choice = self._choices.get(handle)
            if choice is not None:
                self._note_prompt(choice.live, logprobs)

    def _note_prompt(self, live: Live, logprobs: Logprobs) -> None:
        most = live.prepared.params.prompt_logprobs
        if most is None or live.prompt_logprobs is None:
            return
        known = len(live.prompt_logprobs)
        ids = live.prepared.prompt_token_ids[known : known + len(logprobs.chosen)]
        live.prompt_logprobs += prompt_dicts(logprobs, ids, most, self._tokenizer)

    def _first_token(self, choice: Choice, now_s: float) -> None:
        choice.first_s = now_s
        if choice.live.first_token_s is None:
            choice.live.first_token_s = now_s

    def _close(self, choice: Choice, finish_reason: str, now_s: float) -> None:
        """Forget a choice that ended; with the last one its request, whose times are then told."""
        live = choice.live
        del self._choices[choice.handle], live.handles[choice.handle]
        live.finish_reasons[choice.assembler.index] = finish_reason
        live.decode_s += choice.last_s - choice.first_s
        live.generation_tokens += choice.assembler.num_tokens
        live.decode_tokens += max(choice.assembler.num_tokens - 1, 0)
        if live.handles:
            return
        del self._requests[live.request_id]
        if self._observe is not None:
            self._observe(times_of(live, now_s))

    def _end_all(self, live: Live, reason: Finish, error: JaxserveError | None) -> None:
        """End the choices that still run."""
        now_s = self._clock()
        for choice in list(live.handles.values()):
            if choice.handle not in live.handles:  # an outbox cancelled the rest while it was told of one
                continue
            output = choice.assembler.end(reason)
            self._close(choice, output.finish_reason or "", now_s)
            self._deliver(live, output, error)

    def _deliver(self, live: Live, output: CompletionOutput, error: JaxserveError | None) -> None:
        delta = RequestOutput(
            live.request_id, live.prepared.prompt, live.prepared.prompt_token_ids, [output], not live.handles
        )
        delta.num_cached_tokens = live.cached_tokens
        delta.error = error
        if live.prompt_logprobs is not None and output.index == 0:
            delta.prompt_logprobs, live.prompt_logprobs = live.prompt_logprobs, None
        try:
            live.outbox(delta)
        except Exception:  # one reader's fault must not stop the others' tokens
            log.exception("request %s: its outbox failed, the request is cancelled", live.request_id)
            self._drop(live)

    def _drop(self, live: Live) -> None:
        """End a request whose outbox is of no use any more."""
        cancels: list[TokenRequest | Cancel] = [Cancel(handle) for handle in live.handles]
        live.outbox = discard
        self._end_all(live, Finish.CANCELLED, None)
        if cancels:
            self._send(cancels)


def discard(delta: RequestOutput) -> None:
    """The outbox of a request that nobody reads."""


def times_of(live: Live, now_s: float) -> RequestTimes:
    """The record of a request that just ended."""
    return RequestTimes(
        request_id=live.request_id,
        arrival_s=live.arrival_s,
        queue_s=live.queue_s,
        first_token_s=live.first_token_s,
        finish_s=now_s,
        decode_s=live.decode_s,
        decode_tokens=live.decode_tokens,
        prompt_tokens=len(live.prepared.prompt_token_ids),
        generation_tokens=live.generation_tokens,
        cached_tokens=live.cached_tokens,
        finish_reasons=tuple(live.finish_reasons[index] for index in sorted(live.finish_reasons)),
    )
