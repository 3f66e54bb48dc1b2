"""A scripted device with a fake clock: checks every batch as a device would see it, and computes a tiny model.

The model's next token is a hash of the whole token history, read back from the paged cache through the block tables:
a cache row that is lost, misplaced, written twice or overwritten by somebody else changes the output.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxserve.batch import FLAG_LOGPROBS, FLAGS_WORD, Batch, Install, Layout, Program, Shape, StepOut

NOTHING = -7  # what poisoned and unwritten cache rows hold


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A sampled row: the token at `position` is wanted, after `history` (all tokens before it)."""

    slot: int
    position: int
    install: Install
    history: np.ndarray

    @property
    def output_index(self) -> int:
        """0 for the first token behind the prompt."""
        return self.position - self.install.num_prompt_tokens


Script = Callable[[Row], "int | np.ndarray"]


def hash_tokens(history: np.ndarray) -> int:
    """A 31-bit number that depends on every token and its place."""
    places = np.arange(1, len(history) + 1, dtype=np.uint64)
    mixed = (history.astype(np.uint64) + np.uint64(1)) * (places * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1))
    total = int(mixed.sum(dtype=np.uint64)) * 0xD1B54A32D192ED03 & (1 << 64) - 1
    return total >> 33


def next_token(history: np.ndarray, vocab_size: int) -> int:
    """The tiny model, greedy."""
    return hash_tokens(history) % vocab_size


def solo_tokens(prompt: np.ndarray, count: int, vocab_size: int) -> list[int]:
    """What the tiny model answers to a prompt when it is alone and nothing goes wrong."""
    history = [int(token) for token in prompt]
    for _ in range(count):
        history.append(next_token(np.array(history), vocab_size))
    return history[len(prompt) :]


def fake_logprob(history: np.ndarray, token: int) -> float:
    """The tiny model's logprob of a token after a history: any number, but always the same one."""
    return -float(hash_tokens(np.append(history, token)) % 10_000) / 1000 - 0.001


def make_shape(
    num_slots: int = 8,
    num_pages: int = 64,
    page_size_tokens: int = 16,
    max_model_len: int = 512,
    max_chunks: int = 4,
    vocab_size: int = 1000,
    lanes: int = 1,
) -> Shape:
    """A small Shape; block tables are wide enough for the context. All but the last are a lane's."""
    return Shape(
        num_slots=num_slots,
        num_pages=num_pages,
        page_size_tokens=page_size_tokens,
        max_pages_per_seq=-(-max_model_len // page_size_tokens),
        max_chunks=max_chunks,
        vocab_size=vocab_size,
        max_logprobs=20,
        max_model_len=max_model_len,
        lanes=lanes,
    )


@dataclass(slots=True, eq=False)
class FakePending:
    """A dispatched step; `result` may raise what the test wants."""

    runner: ScriptedRunner
    step: int
    out: StepOut
    results: int = field(default=0)

    def result(self) -> StepOut:
        """The step's results, once."""
        self.results += 1
        assert self.results == 1, f"step {self.step} is read twice"
        return self.runner.finish_step(self)


class ScriptedRunner:
    """Executes steps in the order of dispatch and raises AssertionError on whatever a device could not forgive.

    script: what to sample at a Row, a token id or logits [V] (greedy; NaN makes the row bad); None: the tiny model.
    before_dispatch, before_result: called with the step's number (1, 2, ...); may raise, cancel, or move the clock.
    """

    def __init__(self, shape: Shape, script: Script | None = None, clock: FakeClock | None = None) -> None:
        self.shape = shape
        self.script = script
        self.clock = clock or FakeClock()
        self.step_s = 0.001
        self.before_dispatch: Callable[[int], None] = lambda step: None
        self.before_result: Callable[[int], None] = lambda step: None
        self.recovers = True
        self.log: list[tuple[str, int]] = []  # ("dispatch" | "result" | "recover", step)
        self.batches: list[Batch] = []
        self.keep_batches = False
        self.step = 0
        self.counts: Counter[str] = Counter()  # installs, and steps by program
        self.devices = [Device(shape) for _ in range(shape.lanes)]

    def install(self, installs: list[Install]) -> None:
        """Fill slots."""
        for install in installs:
            self.devices[install.lane].install(install)
            self.counts["installs"] += 1

    def dispatch(self, batch: Batch) -> FakePending:
        """Check and run a step; its results can be read later."""
        self.step = step = self.step + 1
        self.log.append(("dispatch", step))
        self.before_dispatch(step)
        if self.keep_batches:
            self.batches.append(batch)
        layout, program = Layout(batch.bucket, self.shape), batch.bucket.program
        assert batch.vector.shape == (self.shape.lanes, layout.words) and batch.vector.dtype == np.int32
        assert len(set(batch.vector[:, FLAGS_WORD].tolist())) == 1, "lanes would take different branches"
        self.counts[program.value] += 1
        outs = []
        for device, vector in zip(self.devices, batch.vector, strict=True):
            views = {name: view.copy() for name, view in layout.views(vector).items()}
            outs.append(device.run(step, program, views, self.script))
        return FakePending(self, step, stack_outs(outs))

    def finish_step(self, pending: FakePending) -> StepOut:
        """Called by the pending step when it is read."""
        self.before_result(pending.step)
        self.log.append(("result", pending.step))
        self.clock.advance(self.step_s)
        for device in self.devices:
            assert pending.step == device.collected + 1, "results are read in order"
            device.collected = pending.step
        return pending.out

    def recover(self) -> bool:
        """Forget everything, as a runtime that has to allocate its state anew."""
        self.log.append(("recover", self.step))
        self.devices = [Device(self.shape) for _ in self.devices]
        for device in self.devices:
            device.step = device.collected = self.step
        return self.recovers


def stack_outs(outs: list[StepOut]) -> StepOut:
    """The lanes' results as one: each array gets the lane as its first dimension."""
    columns = zip(*(dataclasses.astuple(out) for out in outs), strict=True)
    return StepOut(*(None if column[0] is None else np.stack(column) for column in columns))


class Device:
    """One lane: block tables, the cache (token and position a row), last tokens, and who may write what."""

    def __init__(self, shape: Shape) -> None:
        rows = shape.num_slots + 1
        self.shape = shape
        self.step = 0
        self.collected = 0
        self.table_SM = np.full((rows, shape.max_pages_per_seq), shape.num_pages, np.int64)
        self.cache_PK2 = np.full((shape.num_pages, shape.page_size_tokens, 2), NOTHING, np.int64)
        self.last_token_S = np.full(rows, NOTHING, np.int64)
        self.written_S = np.zeros(rows, np.int64)  # tokens in the cache since the install
        self.installs: list[Install | None] = [None] * rows
        self.owner_P: list[Install | None] = [None] * shape.num_pages
        self.last_write_P = np.zeros(shape.num_pages, np.int64)  # step that last could write the page
        self.last_read_P = np.zeros(shape.num_pages, np.int64)
        self.rows: list[int] = []  # packed tokens in use, by step

    def install(self, install: Install) -> None:
        """A new tenant: nothing of the old one may be relied on."""
        assert 0 <= install.slot < self.shape.num_slots, install.slot
        self.installs[install.slot] = install
        self.table_SM[install.slot] = self.shape.num_pages
        self.last_token_S[install.slot] = NOTHING
        shared = install.page_ids
        self.table_SM[install.slot, : len(shared)] = shared
        self.written_S[install.slot] = len(shared) * self.shape.page_size_tokens
        tokens = int(self.written_S[install.slot])
        assert tokens < len(install.token_ids), "no token is left to compute"
        assert len(set(shared.tolist())) == len(shared) and (self.last_write_P[shared] <= self.collected).all()
        history = self.history(install.slot, tokens)
        assert (history == install.token_ids[:tokens]).all(), "shared pages hold others' tokens"

    def run(self, step: int, program: Program, views: dict[str, np.ndarray], script: Script | None) -> StepOut:
        """One step on copies of the fields of the lane's vector; results without the lanes' dimension."""
        self.step = step
        self._update_table(views)
        if program is Program.DECODE:
            slot_T, position_T = views["slot"], views["position"]
            live = int((slot_T < self.shape.num_slots).sum())
            token_T = np.where(slot_T < self.shape.num_slots, self.last_token_S[slot_T], 0)
            num_decode, sample_row, sample_slot = live, np.arange(len(slot_T)), slot_T
        else:
            slot_T, position_T, sample_slot = views["slot"], views["position"], views["sample_slot"]
            live, num_decode = self._check_chunks(views)
            token_T = np.where(views["token"] < 0, self.last_token_S[slot_T], views["token"])
            sample_row = views["sample_row"]
        assert (slot_T[:live] < self.shape.num_slots).all() and (slot_T[live:] == self.shape.num_slots).all(), slot_T
        assert len(set(slot_T[:num_decode].tolist())) == num_decode, "a slot has two decode rows"
        assert (token_T[:num_decode] >= 0).all(), "a decode row's last token is not known"
        self.rows.append(live)
        for row in range(live):
            self._write(int(slot_T[row]), int(position_T[row]), int(token_T[row]))
        out = self._sample(views, sample_row, sample_slot, slot_T, position_T, script)
        if program is not Program.SCORED:
            return out
        return self._score(out, views, live)

    def _update_table(self, views: dict[str, np.ndarray]) -> None:
        slots, indices, pages = views["update_slot"], views["update_index"], views["update_page"]
        used = int((slots < self.shape.num_slots).sum())
        assert (slots[used:] == self.shape.num_slots).all() and (pages[used:] == self.shape.num_pages).all()
        assert len(set(pages[:used].tolist())) == used, "a page is given twice"
        for slot, index, page in zip(
            slots[:used].tolist(), indices[:used].tolist(), pages[:used].tolist(), strict=True
        ):
            assert 0 <= page < self.shape.num_pages, page
            assert self.last_write_P[page] <= self.collected, f"page {page} may still be written by a step in flight"
            assert self.last_read_P[page] <= self.collected, f"page {page} may still be read by a step in flight"
            assert self.table_SM[slot, index] == self.shape.num_pages, f"slot {slot} already has a page at {index}"
            self.table_SM[slot, index] = page
            self.owner_P[page] = self.installs[slot]
            self.cache_PK2[page] = NOTHING

    def _check_chunks(self, views: dict[str, np.ndarray]) -> tuple[int, int]:
        """Returns (packed tokens in use, decode rows)."""
        num_decode = int(views["num_decode"][0])
        at = num_decode
        unused = False
        assert (views["token"][:num_decode] == -1).all()
        seen = set(views["slot"][:num_decode].tolist())
        for slot, start, tokens, position in zip(
            *(views[name].tolist() for name in ("chunk_slot", "chunk_start", "chunk_tokens", "chunk_position")),
            strict=True,
        ):
            if tokens == 0:
                unused = True
                assert slot == self.shape.num_slots
                continue
            assert not unused and start == at and slot not in seen, (slot, start, at)
            seen.add(slot)
            rows = slice(start, start + tokens)
            assert (views["slot"][rows] == slot).all() and (views["token"][rows] >= 0).all()
            assert (views["position"][rows] == np.arange(position, position + tokens)).all()
            at += tokens
        return at, num_decode

    def _write(self, slot: int, position: int, token: int) -> None:
        assert position == self.written_S[slot], f"slot {slot}: wrote {self.written_S[slot]} tokens, now {position}"
        page = int(self.table_SM[slot, position // self.shape.page_size_tokens])
        assert page < self.shape.num_pages, f"slot {slot} has no page for position {position}"
        assert self.owner_P[page] is self.installs[slot], f"slot {slot} writes page {page} of somebody else"
        self.cache_PK2[page, position % self.shape.page_size_tokens] = token, position
        self.written_S[slot] += 1
        self.last_write_P[page] = self.step
        self.last_read_P[self.table_SM[slot, : position // self.shape.page_size_tokens + 1]] = self.step

    def history(self, slot: int, tokens: int) -> np.ndarray:
        """A slot's first tokens, as its block table and the cache say."""
        pages = self.table_SM[slot, : -(-tokens // self.shape.page_size_tokens)]
        rows = self.cache_PK2[pages].reshape(-1, 2)[:tokens]
        assert (rows[:, 1] == np.arange(tokens)).all(), f"slot {slot}: cache rows are not its own"
        return rows[:, 0]

    def _sample(
        self,
        views: dict[str, np.ndarray],
        row_Q: np.ndarray,
        slot_Q: np.ndarray,
        slot_T: np.ndarray,
        position_T: np.ndarray,
        script: Script | None,
    ) -> StepOut:
        count, top = len(slot_Q), self.shape.max_logprobs
        token_Q, bad_Q = np.zeros(count, np.int32), np.zeros(count, bool)
        chosen_Q, rank_Q = np.zeros(count, np.float32), np.zeros(count, np.int32)
        top_QL, best_QL = np.zeros((count, top), np.int32), np.zeros((count, top), np.float32)
        scored = bool(views["flags"][0] & FLAG_LOGPROBS)
        used = [q for q in range(count) if slot_Q[q] < self.shape.num_slots]
        assert len({int(slot_Q[q]) for q in used}) == len(used), "a slot is sampled twice"
        for q in used:
            slot = int(slot_Q[q])
            assert slot_T[row_Q[q]] == slot, "sample_row names another slot's row"
            position = int(position_T[row_Q[q]]) + 1
            install, history = self.installs[slot], self.history(slot, position)
            assert install is not None
            choice = next_token(history, self.shape.vocab_size)
            if script is not None:
                choice = script(Row(slot, position, install, history))
            if isinstance(choice, np.ndarray):
                token_Q[q], bad_Q[q] = np.argmax(choice), np.isnan(choice).any()
                if scored:
                    chosen_Q[q], rank_Q[q], top_QL[q], best_QL[q] = log_softmax_row(choice, int(token_Q[q]), top)
            else:
                token_Q[q] = choice
                if scored:
                    chosen_Q[q], rank_Q[q], top_QL[q], best_QL[q] = fake_scores(history, int(choice), top)
            self.last_token_S[slot] = token_Q[q]
        if not scored:
            return StepOut(token_Q, bad_Q)
        return StepOut(token_Q, bad_Q, chosen_Q, rank_Q, top_QL, best_QL)

    def _score(self, out: StepOut, views: dict[str, np.ndarray], live: int) -> StepOut:
        rows, top = len(views["target"]), self.shape.max_logprobs
        chosen_T, rank_T = np.full(rows, np.nan, np.float32), np.zeros(rows, np.int32)
        top_TL, best_TL = np.zeros((rows, top), np.int32), np.full((rows, top), np.nan, np.float32)
        assert (views["target"][live:] == -1).all()
        for t in np.flatnonzero(views["target"] >= 0).tolist():
            history = self.history(int(views["slot"][t]), int(views["position"][t]) + 1)
            chosen_T[t], rank_T[t], top_TL[t], best_TL[t] = fake_scores(history, int(views["target"][t]), top)
        return StepOut(
            out.token_ids,
            out.bad_rows,
            out.chosen_logprobs,
            out.chosen_ranks,
            out.top_ids,
            out.top_logprobs,
            chosen_T,
            rank_T,
            top_TL,
            best_TL,
        )


def fake_scores(history: np.ndarray, token: int, top: int) -> tuple[float, int, np.ndarray, np.ndarray]:
    """Chosen logprob, rank, top ids and their logprobs of the tiny model."""
    chosen = fake_logprob(history, token)
    return chosen, 1, np.arange(token, token + top), chosen - np.arange(top)


def log_softmax_row(logits: np.ndarray, token: int, top: int) -> tuple[float, int, np.ndarray, np.ndarray]:
    """The same for explicit logits."""
    shifted = logits.astype(np.float64) - np.nanmax(logits)
    logprobs = shifted - np.log(np.nansum(np.exp(shifted)))
    best = np.argsort(-logprobs, kind="stable")[:top]
    ids, values = np.zeros(top, np.int32), np.full(top, -np.inf)
    ids[: len(best)], values[: len(best)] = best, logprobs[best]
    return float(logprobs[token]), 1 + int((logprobs > logprobs[token]).sum()), ids, values
