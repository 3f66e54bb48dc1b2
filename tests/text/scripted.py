"""Helpers: a vocabulary made of given byte strings, and an engine that says what a test tells it to."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from jaxserve.request import EventBatch, Finish, Logprobs, RequestOutput
from jaxserve.text.assemble import merge
from jaxserve.text.constraints import TextLimits
from jaxserve.text.front import Front, RequestTimes
from jaxserve.text.token_bytes import whole_text

LIMITS = TextLimits(max_model_len=1024, vocab_size=1000, pool_tokens=4096, eos_token_ids=(0,))


def pieces(*tokens: bytes | str, special: Sequence[int] = ()) -> SimpleNamespace:
    """What a tokenizer is to the way back: token i stands for the bytes given."""
    table = [token.encode() if isinstance(token, str) else token for token in tokens]
    texts = [whole_text(data) for data in table]
    return SimpleNamespace(
        token_bytes=table,
        token_texts=texts,
        special_ids=frozenset(special),
        vocab_size=len(table),
        token_text=lambda token: table[token].decode("utf-8", "replace"),
        is_special=lambda token: token in special,
        id_of=lambda text: texts.index(text) if text in texts else None,
        continuation=lambda text: [table.index(text.encode())],
    )


def events(
    rows: Sequence[tuple[int, int] | tuple[int, int, Finish]],
    **extra: dict,
) -> EventBatch:
    """An EventBatch of (handle, token) or (handle, token, finish) rows."""
    filled = [(*row, Finish.NONE)[:3] for row in rows]
    return EventBatch(
        np.array([row[0] for row in filled], np.int64),
        np.array([row[1] for row in filled], np.int32),
        np.array([row[2] for row in filled], np.uint8),
        **extra,
    )


def logprobs_of(chosen: Sequence[float], rank: Sequence[int], ids: Sequence[Sequence[int]], top: Sequence) -> Logprobs:
    """Logprobs from lists."""
    return Logprobs(
        np.array(chosen, np.float32), np.array(rank, np.int32), np.array(ids, np.int32), np.array(top, np.float32)
    )


class Desk:
    """A front with a fake clock, what it sent, what it observed, and each request's deltas."""

    def __init__(self, tokenizer: object) -> None:
        self.now_s = 0.0
        self.sent: list = []
        self.times: list[RequestTimes] = []
        self.deltas: dict[str, list[RequestOutput]] = {}
        self.front = Front(tokenizer, self.sent.extend, lambda: self.now_s, self.times.append)

    def submit(self, prepared, request_id: str = "a") -> list[int]:
        """Submit and give the handles; a reused id starts a new list of deltas."""
        before = len(self.sent)
        deltas: list[RequestOutput] = []
        self.front.submit(prepared, deltas.append, request_id)
        self.deltas[request_id] = deltas
        return [message.handle for message in self.sent[before:]]

    def whole(self, request_id: str = "a") -> RequestOutput:
        """All deltas of a request, merged."""
        first, *others = [copy_of(delta) for delta in self.deltas[request_id]]
        for delta in others:
            merge(first, delta)
        return first

    def texts(self, request_id: str = "a") -> list[str]:
        """The text of each delta."""
        return [output.text for delta in self.deltas[request_id] for output in delta.outputs]


def copy_of(delta: RequestOutput) -> RequestOutput:
    """A delta that merging may change."""
    outputs = [
        type(o)(o.index, o.text, list(o.token_ids), o.logprobs, o.finish_reason, o.stop_reason) for o in delta.outputs
    ]
    return RequestOutput(
        delta.request_id,
        delta.prompt,
        delta.prompt_token_ids,
        outputs,
        delta.finished,
        delta.prompt_logprobs,
        delta.num_cached_tokens,
        delta.error,
    )
