"""The words of a request on its way: what the user asks, what the engine is told, and what comes back. numpy only.

SamplingParams -> (text rooms) -> TokenRequest -> engine -> EventBatch -> (text rooms) -> RequestOutput
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.errors import InvalidRequest, JaxserveError

SEED_MIN, SEED_MAX = -(1 << 63), (1 << 63) - 1
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_TOKEN_IDS = 64  # eos ids and the request's own, together: the width of the device's table
MAX_BAD_WORDS = 64  # each needs up to two token sequences: with and without a space before it
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_TOKENS = 8
MAX_LOGIT_BIAS = 1024
MAX_SALT = 256  # characters of cache_salt
MOST_PRIORITY = 2**31 - 1


class Finish(enum.IntEnum):
    """Why a sequence ended. The values travel in events and are also the proto's."""

    NONE = 0
    STOP = 1  # an eos id, a stop id or a stop string
    LENGTH = 2  # max_tokens or the context is full
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5

    @property
    def text(self) -> str | None:
        """The name that users see: "stop", "length", ...; None while running."""
        return None if self is Finish.NONE else self.name.lower()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample and when to stop, with the field names and defaults that vLLM users know.

    Order of effects on the logits of a position: padded vocabulary rows out, allowed_token_ids, bad_words, min_tokens
    (eos and stop ids out), logit_bias, repetition, presence and frequency penalties, temperature, top_k, then top_p
    over what top_k left, and min_p. Logprobs are those of the model itself: the log-softmax of the raw logits, before
    all of these.

    Fields whose meaning is not the name:
      n: independent choices; choice 0 equals the only choice of n=1 with the same seed.
      temperature: 0 is greedy. Values below 1e-5 are taken as 0.
      top_k: 0 or -1 is "all". Tokens that tie with the k-th stay in.
      seed: any 64-bit signed integer, -1 too is a seed like others; None draws a fresh one.
      max_tokens: None is "up to the context's end". A larger value than fits is clipped, finish reason length.
      min_tokens: before that many tokens no eos or stop id can be sampled and no stop string ends the request.
      ignore_eos: the model's eos ids neither end the request nor are masked; the request's own stop_token_ids still do.
      stop: strings; the text is cut before the match, or behind it with include_stop_str_in_output.
      stop_token_ids: ids outside the vocabulary are kept and never match.
      logprobs: this many best tokens at each position, at most 20; the chosen token is always there. None: no logprobs.
      prompt_logprobs: the same for each prompt token but the first.
      cache_salt: requests share cached prompts only with those of the same salt; an empty one is a salt like others.
      bypass_prefix_cache: neither take cached pages nor leave any.
      priority: a lower number is more important, where the scheduling policy or the eviction goes by it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    cache_salt: str | None = None
    bypass_prefix_cache: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidRequest for the first field out of range; nothing here depends on a model."""
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        for name in ("bad_words", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        check_int("n", self.n, 1)
        check_float("temperature", self.temperature, 0.0, 1e4)
        check_int("top_k", self.top_k, -1)
        check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 1e-2, 1e2)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            check_int("seed", self.seed, SEED_MIN, SEED_MAX)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        check_int("priority", self.priority, -MOST_PRIORITY - 1, MOST_PRIORITY)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and len(self.cache_salt) <= MAX_SALT):
            raise InvalidRequest("cache_salt", self.cache_salt, f"a text of at most {MAX_SALT} characters, or none")

    def _check_lists(self) -> None:
        for name, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            values = getattr(self, name)
            if len(values) > most:
                raise InvalidRequest(name, f"{len(values)} strings", f"at most {most}")
            for value in values:
                if not isinstance(value, str) or not value:
                    raise InvalidRequest(name, value, "non-empty strings")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0)
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise InvalidRequest("allowed_token_ids", [], "at least one id, or the field unset")
        if self.logit_bias:
            if len(self.logit_bias) > MAX_LOGIT_BIAS:
                raise InvalidRequest("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
            for token, bias in self.logit_bias.items():
                check_int("logit_bias", token, 0)
                if not isinstance(bias, (int, float)) or math.isnan(bias) or bias == math.inf:
                    raise InvalidRequest("logit_bias", bias, "finite numbers, or -inf to forbid a token")


def check_int(field_name: str, given: object, low: int, high: int | None = None) -> None:
    """Raise InvalidRequest unless `given` is an int (no bool) in low..high."""
    allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise InvalidRequest(field_name, given, allowed)
    if given < low or (high is not None and given > high):
        raise InvalidRequest(field_name, given, allowed)


def check_float(field_name: str, given: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Raise InvalidRequest unless `given` is a finite number in [low, high], or (low, high] with `low_open`."""
    allowed = f"a number from {low:g} to {high:g}" + (f", not {low:g}" if low_open else "")
    if isinstance(given, bool) or not isinstance(given, (int, float, np.number)) or not math.isfinite(float(given)):
        raise InvalidRequest(field_name, given, allowed)
    if given < low or given > high or (low_open and given == low):
        raise InvalidRequest(field_name, given, allowed)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """One sequence as the engine sees it: ids only, everything resolved by the text rooms.

    A request with n choices becomes n TokenRequests. `handle` is unique among all that an engine ever sees from one
    front; events carry it back. Ids in `stop_token_ids` (eos ids folded in unless ignore_eos) end the sequence.
    """

    handle: int
    prompt_token_ids: np.ndarray  # int32 [prompt tokens], at least one
    max_tokens: int  # resolved: at least 1, and prompt + max_tokens <= max_model_len
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # uint64: already mixed with the choice's index
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end the sequence
    masked_until_min: tuple[int, ...] = ()  # cannot be sampled before min_tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # finite only; -inf entries are in banned_token_ids
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # 2 to MAX_BAD_WORD_TOKENS ids each
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0  # a lower number is more important
    cache_salt: str | None = None
    bypass_prefix_cache: bool = False
    # Of its full pages, the root first (engine/prefix.py); empty: it shares none. The engine's inbox makes them.
    page_keys: tuple[bytes, ...] = ()
    arrival_s: float = 0.0  # the engine's clock when the front took it in
    text_stop_pending: bool = False  # the front may cancel it on a stop string: nothing for the engine to do yet


@dataclass(frozen=True, slots=True)
class Cancel:
    """The only thing that flows back: a stop string, a client's cancel and a deadline are all this."""

    handle: int
    reason: Finish = Finish.CANCELLED


@dataclass(frozen=True, slots=True)
class FlushCache:
    """An operator's word to the engine: empty the prefix cache. It takes its turn among requests and cancels."""


type Work = TokenRequest | Cancel | FlushCache


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Log-probabilities of some positions. Row i: the chosen token, then the best ones in falling order.

    chosen: float32 [n]; rank: int32 [n], 1 for the most likely; top_ids: int32 [n, k]; top: float32 [n, k].
    """

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class EventBatch:
    """All that one step produced, one message to the front; row i belongs to sequence `handles[i]`.

    handles: int64 [n]; token_ids: int32 [n], -1 where the row brings no token (a cancel, an error);
    finishes: uint8 [n], Finish codes. A sequence's last row, and only it, has a finish other than NONE.
    """

    handles: np.ndarray
    token_ids: np.ndarray
    finishes: np.ndarray
    cached_tokens: dict[int, int] = field(default_factory=dict)  # by handle, with the sequence's first row
    queue_s: dict[int, float] = field(default_factory=dict)  # by handle, with the first row: time until scheduled
    logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by row, one position each
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by handle, positions 1.. of the prompt
    errors: dict[int, str] = field(default_factory=dict)  # by handle: the sentence for Finish.ERROR


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine reports of itself; counters only grow."""

    step_count: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    total_pages: int = 0
    live_pages: int = 0
    cached_pages: int = 0
    free_pages: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    failed_steps_total: int = 0  # that raised; who was in them starts over, see engine/suspects.py
    prefix_query_tokens_total: int = 0  # of prompts that were looked up in the prefix cache
    prefix_hit_tokens_total: int = 0  # of those, found there
    evicted_pages_total: int = 0
    finished_total: dict[str, int] = field(default_factory=dict)
    compilations_after_warmup_total: int = 0
    heartbeat_s: float = 0.0  # the engine's clock at the last finished step or idle wait
    host_us_per_step: float = 0.0  # moving averages
    device_us_per_step: float = 0.0
    gap_us_per_step: float = 0.0  # that the device waited for its next step although there was work


@dataclass(slots=True)
class Logprob:
    """One entry of a position's dict, as vLLM users know it."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None  # per position: the chosen token first
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that matched; None for eos and length


@dataclass(slots=True)
class RequestOutput:
    """A request's result; while streaming, what is known so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: JaxserveError | None = None  # with a finish reason "error": why
