"""Takes a prompt and SamplingParams; gives the TokenRequests that the engine is told, to `front`.

Everything that needs the model's limits or its tokenizer is checked here, before the engine hears of the request.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams, TokenRequest
from jaxserve.text.chat import ChatTemplate, check_text
from jaxserve.text.constraints import (
    NO_TOKENIZER,
    Size,
    TextLimits,
    check_allowed,
    check_bias,
    resolve_bad_words,
    resolve_stops,
)
from jaxserve.text.stop import StopAutomaton
from jaxserve.text.tokenizer import Tokenizer

NO_TEMPLATE = "no messages: this model's directory has no chat template, so only prompts can be used"
MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A request that is fit for the engine. `requests` holds one TokenRequest a choice; `front` gives the handles."""

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: tuple[TokenRequest, ...]
    stop_automaton: StopAutomaton | None
    stop_reasons: Mapping[int, int | str]  # by id that the user made end the request: what is reported


def prepare(
    prompt: str | Sequence[int] | np.ndarray,
    params: SamplingParams,
    limits: TextLimits,
    tokenizer: Tokenizer | None,
    *,
    add_special_tokens: bool = True,
    field: str = "prompt",
    draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
) -> Prepared:
    """Check a prompt (text, or token ids that are taken as they are) and resolve its parameters.

    Rules: max_tokens is clipped to what fits behind the prompt; a prompt that leaves no room for one token is refused.
    Stop ids outside the vocabulary are accepted and dropped, as they can never match. Choice 0 draws with the seed
    itself, choice i with a mix of seed and i.
    Raises InvalidRequest naming the field, what was given and what is allowed.
    """
    check_counts(params, limits)
    if isinstance(prompt, str):
        ids = encode_prompt(field, prompt, limits, tokenizer, add_special_tokens)
    else:
        ids = check_prompt_ids("prompt_token_ids" if field == "prompt" else field, prompt, limits)
    stop_ids, stop_reasons = resolve_stops(params, limits, tokenizer)
    room_tokens = limits.context_tokens - len(ids)
    max_tokens = room_tokens if params.max_tokens is None else min(room_tokens, params.max_tokens)
    first = TokenRequest(
        handle=0,
        prompt_token_ids=ids,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        seed=(draw_seed() if params.seed is None else int(params.seed)) & MASK64,
        stop_token_ids=stop_ids,
        masked_until_min=stop_ids,
        text_stop_pending=bool(params.stop),
        **numbers_of(params),
        **token_lists(params, limits, tokenizer, stop_ids),
    )
    return Prepared(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids.tolist(),
        params=params,
        requests=choices_of(first, params.n),
        stop_automaton=StopAutomaton(params.stop) if params.stop else None,
        stop_reasons=stop_reasons,
    )


def prepare_chat(
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    limits: TextLimits,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prepared:
    """As `prepare`, for a conversation; the template writes BOS itself, so the tokenizer adds none."""
    if tokenizer is None:
        raise InvalidRequest("messages", f"{len(messages)} messages", NO_TOKENIZER)
    if template is None:
        raise InvalidRequest("messages", f"{len(messages)} messages", NO_TEMPLATE)
    text = template.render(messages, add_generation_prompt, tools, template_kwargs)
    return prepare(text, params, limits, tokenizer, add_special_tokens=False, field="messages")


def check_counts(params: SamplingParams, limits: TextLimits) -> None:
    """Raise InvalidRequest for more choices or logprobs than the server gives."""
    if params.n > limits.max_n:
        raise InvalidRequest("n", params.n, f"1 to {limits.max_n}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > limits.max_logprobs:
            raise InvalidRequest(name, count, f"0 to {limits.max_logprobs}")


def numbers_of(params: SamplingParams) -> dict[str, Any]:
    """The fields of a TokenRequest that need no model."""
    return {
        "temperature": float(params.temperature),
        "top_k": max(int(params.top_k), 0),
        "top_p": float(params.top_p),
        "min_p": float(params.min_p),
        "repetition_penalty": float(params.repetition_penalty),
        "presence_penalty": float(params.presence_penalty),
        "frequency_penalty": float(params.frequency_penalty),
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "cache_salt": params.cache_salt,
        "bypass_prefix_cache": bool(params.bypass_prefix_cache),
        "priority": int(params.priority),
    }


def token_lists(
    params: SamplingParams, limits: TextLimits, tokenizer: Tokenizer | None, stop_ids: tuple[int, ...]
) -> dict[str, Any]:
    """The fields of a TokenRequest that raise, lower or forbid tokens."""
    banned, sequences = resolve_bad_words(params, limits, tokenizer)
    bias = check_bias(params, limits)
    banned |= {token for token, value in bias if value == -math.inf}
    at_first = banned.union(stop_ids) if params.min_tokens else banned
    return {
        "logit_bias": tuple((token, value) for token, value in bias if value != -math.inf),
        "allowed_token_ids": check_allowed(params, limits, at_first, sequences),
        "banned_token_ids": tuple(sorted(banned)),
        "bad_sequences": sequences,
    }


def encode_text(field: str, text: object, tokenizer: Tokenizer | None, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text. Raises InvalidRequest where there is no tokenizer or the text is no Unicode."""
    checked = check_text(field, text)
    if tokenizer is None:
        raise InvalidRequest(field, checked, NO_TOKENIZER)
    return tokenizer.encode(checked, add_special_tokens)


def encode_prompt(
    field: str, text: str, limits: TextLimits, tokenizer: Tokenizer | None, add_special_tokens: bool
) -> np.ndarray:
    """Ids of a prompt's text, int32; one that is far too long is refused without encoding the whole of it."""
    check_text(field, text)
    if tokenizer is not None:
        least_tokens = tokenizer.over_limit(text, limits.context_tokens)
        if least_tokens is not None:
            raise InvalidRequest(field, Size(f"at least {least_tokens} tokens"), limits.context_words)
    ids = encode_text(field, text, tokenizer, add_special_tokens)
    if not ids:
        raise InvalidRequest(field, text, "a text of at least one token (this tokenizer adds none of its own)")
    return check_prompt_ids(field, ids, limits)


def check_prompt_ids(field: str, ids: Sequence[int] | np.ndarray, limits: TextLimits) -> np.ndarray:
    """The ids as int32. Raises InvalidRequest for none, too many, or one outside the vocabulary."""
    if isinstance(ids, (bytes, bytearray, Mapping)) or not isinstance(ids, (Sequence, np.ndarray)):
        raise InvalidRequest(field, ids, "a text or a list of token ids")
    if not len(ids):
        raise InvalidRequest(field, Size("no tokens"), "at least one token")
    if len(ids) >= limits.context_tokens:
        raise InvalidRequest(field, Size(f"{len(ids)} tokens"), limits.context_words)
    allowed = f"integers from 0 to {limits.vocab_size - 1}"
    if not isinstance(ids, np.ndarray):
        wrong = {kind for kind in set(map(type, ids)) if kind is bool or not issubclass(kind, (int, np.integer))}
        if wrong:
            raise InvalidRequest(field, next(token for token in ids if type(token) in wrong), allowed)
    array = np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":  # "O": an integer that 64 bits cannot hold
        raise InvalidRequest(field, max(ids) if array.dtype.kind in "Of" else f"{array.dtype} array", allowed)
    outside = (array < 0) | (array >= limits.vocab_size)
    if outside.any():
        raise InvalidRequest(field, int(array[outside.argmax()]), allowed)
    return array.astype(np.int32)


def choices_of(first: TokenRequest, count: int) -> tuple[TokenRequest, ...]:
    """The request's choices; only the first computes the prompt's logprobs, which are the same for all."""
    others = [copy_with(first, seed=mix_seed(first.seed, index), prompt_logprobs=None) for index in range(1, count)]
    return (first, *others)


def copy_with(request: TokenRequest, **changes: Any) -> TokenRequest:
    """A TokenRequest with some fields changed."""
    fields = {name: getattr(request, name) for name in TokenRequest.__slots__}
    return TokenRequest(**{**fields, **changes})


def mix_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request, uint64: splitmix64's output for the state seed + index steps."""
    mixed = (seed + index * 0x9E3779B97F4A7C15) & MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK64
    return mixed ^ (mixed >> 31)
