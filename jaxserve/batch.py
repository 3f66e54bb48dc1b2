"""What one device step is given and what it gives back; one int32 vector a step and lane travels to the device.

Dimension keys of the whole project (array names end in them):
    T  packed tokens of a step          B  rows of a decode step       S  request slots (max_num_seqs)
    R  chunks of a mixed step           Q  rows that are sampled       P  pages of the pool
    K  tokens of a page                 M  pages of a block table row  U  changed block table entries of a step
    D  hidden size                      H  query heads                 N  key/value heads
    G  query heads a kv head            E  head dimension              F  feed-forward width
    V  vocabulary (padded)              W  words of a vocabulary bit mask, 32 ids each
    L  top logprobs                     X  experts
    Z  lanes

A lane is one rank of data parallelism: slots, pages and block tables of its own, under the same program as all others.
Slot and page ids are the lane's: each lane counts its own from 0, and all sizes here but Z are those of one lane.

Rows that pad a bucket name slot S (one past the last: a scratch row of every table) and page P (one past the pool: the
write is dropped). Never -1: a negative page wraps round and overwrites the last page.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np


class Program(enum.Enum):
    """The compiled step programs."""

    DECODE = "decode"  # B rows, one token each, read from the device's table of last tokens
    MIXED = "mixed"  # T packed tokens: decode rows first, then chunks of prompts
    SCORED = "scored"  # mixed, and the logprobs of every packed token for prompt_logprobs


@dataclass(frozen=True, slots=True)
class Shape:
    """The static sizes that all programs of one engine share; those of slots, pages and chunks are a lane's."""

    num_slots: int  # S
    num_pages: int  # P
    page_size_tokens: int  # K
    max_pages_per_seq: int  # M
    max_chunks: int  # R
    vocab_size: int  # ids that may be sampled: the tokenizer's, at most the logits' width
    max_logprobs: int  # L
    max_model_len: int  # tokens
    lanes: int = 1  # Z


@dataclass(frozen=True, slots=True)
class Bucket:
    """One compiled program: its kind and its number of rows in each lane (B for decode, T for the others)."""

    program: Program
    rows: int


@dataclass(frozen=True, slots=True)
class Field:
    """A named piece of a lane's int32 vector."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of int32 words."""
        return int(np.prod(self.shape, dtype=np.int64))


# Flags in Layout's `flags` field: what some row of the step needs, so that the program may skip the rest. Every lane's
# vector has those of all lanes: what is skipped must be the same everywhere, or collectives would wait for ever.
FLAG_FILTER = 1  # top_k, top_p or min_p
FLAG_PENALTY = 2  # a penalty other than neutral
FLAG_MASK = 4  # allowed, banned, bias, bad words, min_tokens
FLAG_LOGPROBS = 8
FLAG_RANDOM = 16  # a temperature above 0
FLAGS_WORD = 0  # where `flags` lies in every layout


class Layout:
    """Where each field of a lane's vector lies. The same object packs on the host and unpacks in the program.

    Fields of decode[B] (Q = B):
      flags [1]; slot_B; position_B (of the token that is fed: the number of tokens already in the cache);
      update_slot_U, update_index_U, update_page_U: block table entries that changed, U = B.
    Fields of mixed[T] and scored[T] (Q = min(T, S)):
      flags [1]; token_T (-1: the slot's last token); slot_T; position_T;
      num_decode [1]: the first num_decode packed tokens are decode rows;
      chunk_slot_R, chunk_start_R (packed index of its first token), chunk_tokens_R (0: unused), chunk_position_R;
      sample_row_Q (packed index), sample_slot_Q (S: unused); the updates, U = T // K + 2 R + Q.
      scored only: target_T, the prompt token that follows each packed token (-1: none), which is what is scored.
    """

    def __init__(self, bucket: Bucket, shape: Shape) -> None:
        self.bucket, self.shape = bucket, shape
        self.fields: dict[str, Field] = {}
        self.words = 0
        rows, chunks = bucket.rows, shape.max_chunks
        self._add("flags", 1)
        if bucket.program is Program.DECODE:
            self.sampled_rows = rows
            self.updates = rows
            self._add("slot", rows)
            self._add("position", rows)
        else:
            self.sampled_rows = min(rows, shape.num_slots)
            self.updates = rows // shape.page_size_tokens + 2 * chunks + self.sampled_rows
            for name in ("token", "slot", "position"):
                self._add(name, rows)
            self._add("num_decode", 1)
            for name in ("chunk_slot", "chunk_start", "chunk_tokens", "chunk_position"):
                self._add(name, chunks)
            self._add("sample_row", self.sampled_rows)
            self._add("sample_slot", self.sampled_rows)
        if bucket.program is Program.SCORED:
            self._add("target", rows)
        for name in ("update_slot", "update_index", "update_page"):
            self._add(name, self.updates)

    def _add(self, name: str, *shape: int) -> None:
        self.fields[name] = Field(name, self.words, shape)
        self.words += self.fields[name].count

    def empty(self) -> np.ndarray:
        """A fresh vector of one lane, int32 [words], that pads every row: nothing is computed, nothing is written."""
        vector = np.zeros(self.words, np.int32)
        views = self.views(vector)
        for name in ("slot", "update_slot", "sample_slot", "chunk_slot"):
            if name in views:
                views[name][...] = self.shape.num_slots
        views["update_page"][...] = self.shape.num_pages
        if "target" in views:
            views["target"][...] = -1
        return vector

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Named views of a host vector; writing to them writes to it. Works on traced arrays too (then no views)."""
        return {f.name: vector[f.offset : f.offset + f.count].reshape(f.shape) for f in self.fields.values()}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step, packed: the bucket and its vector, a row for each lane (padded where the lane runs nothing)."""

    bucket: Bucket
    vector: np.ndarray  # int32 [Z, Layout.words]


@dataclass(frozen=True, slots=True, eq=False)
class Install:
    """A request takes (or retakes) a slot: what the device must know of it before its first step.

    `token_ids` are its tokens so far (prompt, then outputs where it resumes), only for penalties and bad words;
    `num_prompt_tokens` of them are the prompt. Everything else is as in TokenRequest.
    """

    slot: int
    token_ids: np.ndarray  # int32 [tokens]
    num_prompt_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int  # uint64
    min_position: int  # num_prompt_tokens + min_tokens: below it masked_until_min cannot be sampled
    masked_until_min: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    banned_token_ids: tuple[int, ...]
    bad_sequences: tuple[tuple[int, ...], ...]
    lane: int = 0  # whose slot it is
    page_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # its first pages, already written


@dataclass(frozen=True, slots=True, eq=False)
class StepOut:
    """One step's results on the host; row [z, q] belongs to lane z's sample_slot_Q[q] (decode: slot_B[q]).

    token_ids: int32 [Z, Q]; bad_rows: bool [Z, Q], True where the logits held NaN (the token is then meaningless);
    the logprob arrays are None unless FLAG_LOGPROBS was set. Scored programs give score_* for each packed token t:
    the logprob of target_T[t] under the model at token t.
    """

    token_ids: np.ndarray
    bad_rows: np.ndarray
    chosen_logprobs: np.ndarray | None = None  # float32 [Z, Q]
    chosen_ranks: np.ndarray | None = None  # int32 [Z, Q]
    top_ids: np.ndarray | None = None  # int32 [Z, Q, L]
    top_logprobs: np.ndarray | None = None  # float32 [Z, Q, L]
    score_chosen: np.ndarray | None = None  # float32 [Z, T]
    score_ranks: np.ndarray | None = None  # int32 [Z, T]
    score_top_ids: np.ndarray | None = None  # int32 [Z, T, L]
    score_top: np.ndarray | None = None  # float32 [Z, T, L]
