"""Takes one choice's tokens as the engine emits them; gives what is new of its CompletionOutput, to `front`.

Also the two halves of a delta's life: logprob arrays become dicts here, and deltas are merged here, either because a
reader is behind or because the whole answer is wanted.

Rules: the token that ended a choice (eos, stop id) is in `token_ids` but not in the text, unless
include_stop_str_in_output. `token_ids` and `logprobs` always have one entry a token. A logprob below LOGPROB_FLOOR,
minus infinity too, is given as LOGPROB_FLOOR, so that it survives JSON; a NaN as well.
"""

from __future__ import annotations

from jaxserve.request import CompletionOutput, Finish, Logprob, Logprobs, RequestOutput
from jaxserve.text.detokenize import Detokenizer
from jaxserve.text.prepare import Prepared
from jaxserve.text.stop import StopMatcher
from jaxserve.text.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0
STOP = int(Finish.STOP)
FINISH_TEXTS = {int(finish): finish.text for finish in Finish}


class Assembler:
    """One choice of a request, from its first token to its finish."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_logprobs",
        "_min_tokens",
        "_stop",
        "_stop_reasons",
        "_tokenizer",
        "index",
        "num_tokens",
    )

    def __init__(self, prepared: Prepared, index: int, tokenizer: Tokenizer | None) -> None:
        params = prepared.params
        self.index = index
        self.num_tokens = 0
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = None
        if self._tokenizer is not None:
            self._detokenizer = Detokenizer(self._tokenizer, params.skip_special_tokens)
        self._stop = None
        if prepared.stop_automaton is not None:
            self._stop = StopMatcher(prepared.stop_automaton, params.include_stop_str_in_output)
        self._stop_reasons = prepared.stop_reasons
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._logprobs = params.logprobs

    def push(self, token: int, finish: int = 0, position: Logprobs | None = None) -> CompletionOutput:
        """What one row of an EventBatch adds: `token` is -1 where it brings none, `finish` a Finish code.

        The output has a finish_reason if this ends the choice. Where `finish` is 0 then, a stop string did, and the
        engine must be told.
        """
        if token < 0:
            return self._end(CompletionOutput(self.index, "", []), finish) if finish else self._nothing()
        self.num_tokens += 1
        text, matched = "", None
        if self._detokenizer is not None and (finish != STOP or self._include_stop):
            text = self._detokenizer.push(token)
            if self._stop is not None:
                text, matched = self._stop.push(text, self.num_tokens >= self._min_tokens)
        output = CompletionOutput(self.index, text, [token])
        if self._logprobs is not None:
            assert position is not None, f"no logprobs with token {self.num_tokens} of choice {self.index}"
            output.logprobs = [position_dict(position, 0, token, self._logprobs, self._tokenizer)]
        if matched is not None:
            output.finish_reason, output.stop_reason = "stop", matched
        elif finish:
            self._end(output, finish)
            if finish == STOP:
                output.stop_reason = self._stop_reasons.get(token)
        return output

    def end(self, finish: Finish) -> CompletionOutput:
        """The last output of a choice that ends between tokens: cancelled, over its deadline, failed."""
        return self._end(self._nothing(), finish)

    def _nothing(self) -> CompletionOutput:
        return CompletionOutput(self.index, "", [], None if self._logprobs is None else [])

    def _end(self, output: CompletionOutput, finish: int) -> CompletionOutput:
        """Put what was held back behind the output's text: nothing is lost, half a character is one U+FFFD."""
        if self._detokenizer is not None:
            tail = self._detokenizer.flush()
            if self._stop is not None:
                tail = self._stop.push(tail, may_end=False)[0] + self._stop.flush()
            output.text += tail
        output.finish_reason = FINISH_TEXTS[finish]
        return output


def position_dict(
    logprobs: Logprobs, row: int, token: int, most: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """One position as users know it: the token itself, then the `most` best ones in falling order."""
    text = tokenizer.token_text if tokenizer is not None else no_text
    entries = {token: Logprob(finite(logprobs.chosen[row]), int(logprobs.rank[row]), text(token))}
    ids, values = logprobs.top_ids[row, :most].tolist(), logprobs.top[row, :most].tolist()
    for at, (other, value) in enumerate(zip(ids, values, strict=True)):
        if other >= 0 and other not in entries:
            entries[other] = Logprob(finite(value), at + 1, text(other))
    return entries


def prompt_dicts(
    logprobs: Logprobs, ids: list[int], most: int, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob] | None]:
    """The positions of a piece of a prompt; `ids` are the tokens that `logprobs` is about."""
    return [position_dict(logprobs, row, token, most, tokenizer) for row, token in enumerate(ids)]


def finite(value: float) -> float:
    """A logprob that any format can hold."""
    return float(value) if value > LOGPROB_FLOOR else LOGPROB_FLOOR  # also for NaN: it compares false


def no_text(token: int) -> None:
    """The text of a token where there is no tokenizer."""
    return None


def merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Add a request's later delta to an earlier one, in place. All deltas merged in order are the whole answer."""
    for news in later.outputs:
        for known in earlier.outputs:
            if known.index == news.index:
                break
        else:
            earlier.outputs.append(news)
            earlier.outputs.sort(key=lambda output: output.index)
            continue
        known.text += news.text
        known.token_ids += news.token_ids
        if news.logprobs is not None:
            if known.logprobs is None:
                known.logprobs = []
            known.logprobs += news.logprobs
        known.finish_reason, known.stop_reason = news.finish_reason, news.stop_reason
    earlier.finished = later.finished
    earlier.prompt_logprobs = earlier.prompt_logprobs or later.prompt_logprobs
    earlier.num_cached_tokens = later.num_cached_tokens
    earlier.error = earlier.error or later.error
    return earlier
