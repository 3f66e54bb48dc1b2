"""One sequence on its way through the engine: made from a TokenRequest, waits, holds a slot, perhaps waits again."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxserve.batch import (
    FLAG_FILTER,
    FLAG_LOGPROBS,
    FLAG_MASK,
    FLAG_PENALTY,
    FLAG_RANDOM,
    Install,
    Shape,
)
from jaxserve.engine.pages import pages_for
from jaxserve.engine.policy import Rank
from jaxserve.request import MAX_STOP_TOKEN_IDS, Logprobs, TokenRequest

GREEDY_BELOW = 1e-5  # temperatures under it are 0
MAX_PASSED = 32  # later arrivals that may go ahead of one that does not fit; then pages are kept for it


@dataclass(slots=True, eq=False)
class Sequence:
    """What the engine remembers of a request besides its row of the slot arrays."""

    request: TokenRequest
    rank: Rank  # by the policy, smaller goes first; it keeps it through preemptions
    token_ids: np.ndarray  # int32, all known when it last entered the queue: the prompt, then outputs where it resumes
    wants_scores: bool  # its prompt_logprobs are still to be made
    lane: int = -1  # -1: any; it keeps the one that it was admitted to, or that it was passed over in too often
    slot: int = -1  # of its lane; -1: waiting
    passed: int = 0  # later arrivals admitted while it did not fit
    preemptions: int = 0
    strikes: int = 0  # failed steps that it was in
    keys: list[bytes] = field(default_factory=list)  # of its full pages, the root first; empty: it shares none
    written_tokens: int = 0  # of token_ids, those in the cache by steps that were collected
    cached_tokens: int = 0  # of its prompt, found in the prefix cache when it was first admitted
    queue_s: float | None = None  # None: never scheduled
    answered: bool = False  # its first row has been emitted
    scores: list[Logprobs] = field(default_factory=list)  # of the prompt, a part a chunk
    # Outputs that were emitted before a preemption, int32: a deterministic engine decodes them again, since prefilled
    # they would be rounded otherwise, and emits none of them twice.
    to_repeat: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def of(cls, request: TokenRequest, rank: Rank) -> Sequence:
        """A newcomer."""
        token_ids = np.ascontiguousarray(request.prompt_token_ids, dtype=np.int32)
        wants_scores = request.prompt_logprobs is not None
        return cls(request, rank, token_ids, wants_scores, keys=[*request.page_keys])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt alone."""
        return len(self.request.prompt_token_ids)

    @property
    def limit_tokens(self) -> int:
        """Prompt and output tokens when it is full."""
        return self.num_prompt_tokens + self.request.max_tokens

    @property
    def is_barrier(self) -> bool:
        """Nobody may be admitted ahead of it: it was preempted, or passed often enough."""
        return self.preemptions > 0 or self.passed >= MAX_PASSED


def refusal(request: TokenRequest, shape: Shape) -> str | None:
    """Why this engine can never run the request, as a sentence; None if it can."""
    prompt, total = len(request.prompt_token_ids), len(request.prompt_token_ids) + request.max_tokens
    room_pages = min(shape.num_pages, shape.max_pages_per_seq)
    need_pages = pages_for(total - 1, shape.page_size_tokens)  # the last token is never fed
    most_top = max(request.logprobs or 0, request.prompt_logprobs or 0)
    if prompt < 1:
        return "prompt: got 0 tokens, allowed: at least 1"
    if request.max_tokens < 1:
        return f"max_tokens: got {request.max_tokens}, allowed: at least 1"
    if total > shape.max_model_len:
        return (
            f"prompt and max_tokens: got {prompt} + {request.max_tokens} tokens, allowed: together at most "
            f"{shape.max_model_len}, the context length"
        )
    if need_pages > room_pages:
        return (
            f"prompt and max_tokens: got {prompt} + {request.max_tokens} tokens, which need {need_pages} cache pages, "
            f"allowed: at most {room_pages} pages of {shape.page_size_tokens} tokens, the whole pool"
            + (f" of one of {shape.lanes} data-parallel lanes" if shape.lanes > 1 else "")
        )
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        return f"stop_token_ids: got {len(request.stop_token_ids)} ids, allowed: at most {MAX_STOP_TOKEN_IDS}"
    if most_top > shape.max_logprobs:
        return f"logprobs: got {most_top}, allowed: at most {shape.max_logprobs}"
    return None


def step_flags(request: TokenRequest) -> int:
    """FLAG_* bits that a step which samples this request must carry."""
    random = request.temperature >= GREEDY_BELOW
    filtered = request.top_k > 0 or request.top_p < 1.0 or request.min_p > 0.0
    penalised = request.repetition_penalty != 1.0 or request.presence_penalty != 0.0 or request.frequency_penalty != 0.0
    masked = (
        request.allowed_token_ids is not None
        or bool(request.banned_token_ids or request.bad_sequences or request.logit_bias)
        or bool(request.min_tokens and request.masked_until_min)
    )
    return (
        FLAG_RANDOM * random
        | FLAG_FILTER * (random and filtered)
        | FLAG_PENALTY * penalised
        | FLAG_MASK * masked
        | FLAG_LOGPROBS * (request.logprobs is not None)
    )


def make_install(sequence: Sequence, shared: np.ndarray) -> Install:
    """What the device must know before the first step of a sequence in the slot that it has just taken.

    shared: int32 [N], the pages that it begins with.
    """
    request = sequence.request
    return Install(
        slot=sequence.slot,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        min_position=sequence.num_prompt_tokens + request.min_tokens,
        masked_until_min=request.masked_until_min,
        logit_bias=request.logit_bias,
        allowed_token_ids=request.allowed_token_ids,
        banned_token_ids=request.banned_token_ids,
        bad_sequences=request.bad_sequences,
        lane=sequence.lane,
        page_ids=shared,
    )


class WaitingQueue:
    """Sequences without a slot, by rank; who comes back from a preemption takes its old place."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def add(self, sequence: Sequence) -> None:
        """Put it at its place."""
        insort(self._items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take it out; it must be there."""
        place = bisect_left(self._items, sequence.rank, key=_rank)
        assert self._items[place] is sequence, sequence.request.handle
        del self._items[place]


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
