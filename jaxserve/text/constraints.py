"""Takes SamplingParams and the model's limits; gives the id lists that a TokenRequest holds, to `prepare`.

Stops, bad words, biases and allowed ids: whatever in a request names tokens, and so needs the vocabulary to be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.request import MAX_BAD_WORD_TOKENS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.text.chat import check_text
from jaxserve.text.tokenizer import Tokenizer

NO_TOKENIZER = "no text: this model's directory has no tokenizer files, so only token ids can be used"


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What the model and the engine can take."""

    max_model_len: int  # tokens of prompt and answer together
    vocab_size: int  # ids that exist: 0 to vocab_size - 1
    pool_tokens: int  # what the whole cache pool holds
    eos_token_ids: tuple[int, ...] = ()  # of the generation config
    max_n: int = 128
    max_logprobs: int = MAX_LOGPROBS

    @property
    def context_tokens(self) -> int:
        """What one sequence can ever have: the model's context or the whole pool, whichever is less."""
        return min(self.max_model_len, self.pool_tokens)

    @property
    def context_words(self) -> str:
        """The limit with its numbers, for error texts."""
        return (
            f"at most {self.context_tokens - 1} tokens (max_model_len {self.max_model_len}, cache pool of "
            f"{self.pool_tokens} tokens, and at least one token must be left for the answer)"
        )


class Size(str):
    """A count in words, shown in an error text without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def resolve_stops(
    params: SamplingParams, limits: TextLimits, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], dict[int, int | str]]:
    """The ids that end the sequence (before min_tokens they are masked), and what to report for the user's own.

    A stop string that is just one special token's text also ends the sequence by that token's id: skipped special
    tokens have no text in which the string could be found.
    """
    check_words("stop", params.stop, tokenizer)
    if params.stop and not params.detokenize:
        raise InvalidRequest("stop", list(params.stop), "no stop strings with detokenize false: there is no text")
    reasons: dict[int, int | str] = {} if tokenizer is None else special_stops(params.stop, tokenizer)
    reasons.update((int(token), int(token)) for token in params.stop_token_ids)
    reasons = {token: reason for token, reason in reasons.items() if token < limits.vocab_size}
    ends = set(reasons) | (set() if params.ignore_eos else set(limits.eos_token_ids))
    stop_ids = tuple(sorted(token for token in ends if 0 <= token < limits.vocab_size))
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", Size(f"{len(stop_ids)} ids with the model's own"), f"at most {MAX_STOP_TOKEN_IDS}"
        )
    return stop_ids, reasons


def special_stops(stops: Sequence[str], tokenizer: Tokenizer) -> dict[int, int | str]:
    """The stop strings that are special tokens, by id."""
    ids = ((tokenizer.id_of(stop), stop) for stop in stops)
    return {token: stop for token, stop in ids if token is not None and tokenizer.is_special(token)}


def check_words(field: str, words: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """Raise InvalidRequest for words that are no Unicode text, or for any words where there is no tokenizer."""
    for word in words:
        check_text(field, word)
    if words and tokenizer is None:
        raise InvalidRequest(field, list(words), NO_TOKENIZER)


def resolve_bad_words(
    params: SamplingParams, limits: TextLimits, tokenizer: Tokenizer | None
) -> tuple[set[int], tuple[tuple[int, ...], ...]]:
    """Ids that may never be sampled, and longer sequences that may never be completed.

    A word counts both at the start of a word (with a space before it) and within one.
    """
    check_words("bad_words", params.bad_words, tokenizer)
    if tokenizer is None:
        return set(), ()
    banned: set[int] = set()
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for form in (word, " " + word.lstrip(" ")):
            ids = tuple(tokenizer.continuation(form))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    "bad_words", word, f"words of at most {MAX_BAD_WORD_TOKENS} tokens; this one has {len(ids)}"
                )
            if len(ids) == 1 and ids[0] < limits.vocab_size:
                banned.add(ids[0])
            elif len(ids) > 1:
                sequences[ids] = None
    return banned, tuple(sequences)


def check_bias(params: SamplingParams, limits: TextLimits) -> list[tuple[int, float]]:
    """The bias entries by id. Raises InvalidRequest for an id outside the vocabulary."""
    entries = sorted((int(token), float(bias)) for token, bias in (params.logit_bias or {}).items())
    if entries and entries[-1][0] >= limits.vocab_size:
        raise InvalidRequest("logit_bias", entries[-1][0], f"ids from 0 to {limits.vocab_size - 1}")
    return entries


def check_allowed(
    params: SamplingParams, limits: TextLimits, forbidden: set[int], sequences: tuple[tuple[int, ...], ...]
) -> tuple[int, ...] | None:
    """The allowed ids in order. Raises InvalidRequest for one that does not exist, or if all are forbidden elsewhere.

    The last token of a bad word counts as forbidden here: at some position it may be the only one left.
    """
    never = forbidden | {sequence[-1] for sequence in sequences}
    if params.allowed_token_ids is None:
        if len(never) >= limits.vocab_size:
            raise InvalidRequest("logit_bias", Size(f"{len(never)} forbidden ids"), "at least one id left to sample")
        return None
    ids: set[int] = set()
    for token in params.allowed_token_ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < limits.vocab_size:
            raise InvalidRequest("allowed_token_ids", token, f"ids from 0 to {limits.vocab_size - 1}")
        ids.add(int(token))
    if ids <= never:
        raise InvalidRequest(
            "allowed_token_ids",
            sorted(ids),
            "at least one id that logit_bias, bad_words, min_tokens and the stop ids leave free",
        )
    return tuple(sorted(ids))
