"""From a step's results to events: takes StepOut and what was packed, moves the ledger on, leaves rows there."""

from __future__ import annotations

import numpy as np

from jaxserve.batch import FLAG_LOGPROBS, StepOut
from jaxserve.engine.lane import Lane
from jaxserve.engine.ledger import Ledger
from jaxserve.engine.pack import Packed, PackedLane
from jaxserve.engine.sequence import Sequence
from jaxserve.request import Finish, Logprobs

REPEAT_SENTENCE = (
    "after a preemption the sequence was computed again and token {place} of its output came out as {token}, where "
    "{emitted} had been sent: this is a fault of --deterministic"
)
NAN_SENTENCE = "the model's logits held NaN at this position; the sequence was ended, others are not affected"


def collect(ledger: Ledger, packed: Packed, out: StepOut) -> None:
    """Apply one step's results. Rows whose slot was vacated since the dispatch are dropped: an extra token."""
    for lane, part in zip(ledger.lanes, packed.lanes, strict=True):
        lane.pool.step_collected(packed.step)
        if packed.is_scored:
            collect_scores(lane, part, out)
        same_Q = lane.slots.generation_S[part.slot_Q] == part.generation_Q
        if np.count_nonzero(same_Q) == len(same_Q):
            row_Q = slice(0, len(same_Q))  # the usual case, without copies
        else:
            row_Q = same_Q.nonzero()[0]
        if ledger.deterministic:
            row_Q = collect_repeated(ledger, lane, part, out, np.arange(len(same_Q))[row_Q])
        if len(part.slot_Q[row_Q]):
            collect_tokens(ledger, lane, part, out, row_Q, bool(packed.flags & FLAG_LOGPROBS))
        collect_pages(ledger, lane, part)
        if lane.slots.leaving:
            ledger.requeue_leaving(lane)


def collect_tokens(
    ledger: Ledger, lane: Lane, part: PackedLane, out: StepOut, row_Q: np.ndarray | slice, has_logprobs: bool
) -> None:
    """Append the tokens of a lane's `row_Q`, end the sequences that are complete, and leave a row for each."""
    slots = lane.slots
    slot_Q, token_Q = part.slot_Q[row_Q], out.token_ids[lane.index, row_Q]
    for chunk, generation in zip(part.plan.chunks, part.chunk_generations, strict=True):
        if chunk.is_last and not chunk.sequence.answered and slots.generation_S[chunk.slot] == generation:
            answer(ledger, chunk.sequence)
    slots.outputs.append(slot_Q, token_Q)
    stopped_Q = slots.stops.match(slot_Q, token_Q)
    full_Q = part.position_Q[row_Q] + 1 >= slots.limit_S[slot_Q]
    bad_Q = out.bad_rows[lane.index, row_Q]
    ended_Q = stopped_Q | full_Q | bad_Q
    entries = row_logprobs(out, lane.index, row_Q, slots.top_S[slot_Q]) if has_logprobs else {}
    ledger.generation_tokens += len(slot_Q)
    if not np.count_nonzero(ended_Q):
        ledger.events.add_running(slots.handle_S[slot_Q], token_Q, entries)
        return
    kept = (~ended_Q).nonzero()[0]
    if len(kept):
        kept_entries = {row: entries[i] for row, i in enumerate(kept.tolist()) if i in entries}
        ledger.events.add_running(slots.handle_S[slot_Q[kept]], token_Q[kept], kept_entries)
    for i in ended_Q.nonzero()[0].tolist():
        sequence = slots.tenant(int(slot_Q[i]))
        if bad_Q[i]:
            ledger.generation_tokens -= 1
            ledger.finish(sequence, Finish.ERROR, error=NAN_SENTENCE)
        else:
            reason = Finish.STOP if stopped_Q[i] else Finish.LENGTH
            ledger.finish(sequence, reason, int(token_Q[i]), logprobs=entries.get(i))


def collect_pages(ledger: Ledger, lane: Lane, part: PackedLane) -> None:
    """The pages that a lane's chunks have filled enter its prefix cache, of sequences that are still alive."""
    for chunk, generation in zip(part.plan.chunks, part.chunk_generations, strict=True):
        if lane.slots.generation_S[chunk.slot] == generation:
            chunk.sequence.written_tokens = chunk.start + chunk.tokens
            ledger.keep(chunk.sequence)
            if chunk.is_last:
                lane.writers.pop(chunk.slot, None)
                lane.pool.prove(chunk.slot)


def collect_repeated(ledger: Ledger, lane: Lane, part: PackedLane, out: StepOut, row_Q: np.ndarray) -> np.ndarray:
    """Take in the tokens that a lane's preempted sequences have sent before; returns the other rows of `row_Q`."""
    slots, outputs, slot_Q = lane.slots, lane.slots.outputs, part.slot_Q[row_Q]
    again_Q = outputs.count_S[slot_Q] < outputs.sent_S[slot_Q]
    for row in row_Q[again_Q].tolist():
        slot = int(part.slot_Q[row])
        sequence, place = slots.tenant(slot), int(outputs.count_S[slot])
        token, emitted = int(out.token_ids[lane.index, row]), int(sequence.to_repeat[place])
        if token != emitted:
            sentence = REPEAT_SENTENCE.format(place=place, token=token, emitted=emitted)
            ledger.finish(sequence, Finish.ERROR, error=sentence)
            continue
        outputs.append(part.slot_Q[row : row + 1], out.token_ids[lane.index, row : row + 1])
    return row_Q[~again_Q]


def answer(ledger: Ledger, sequence: Sequence) -> None:
    """What goes with a sequence's first row."""
    handle, events = sequence.request.handle, ledger.events
    sequence.answered = True
    ledger.prompt_tokens += sequence.num_prompt_tokens
    events.cached_tokens[handle] = sequence.cached_tokens
    events.queue_s[handle] = sequence.queue_s or 0.0
    if sequence.wants_scores:
        events.prompt_logprobs[handle] = join(sequence.scores, sequence.request.prompt_logprobs or 0)
        sequence.wants_scores = False
        sequence.scores.clear()


def row_logprobs(out: StepOut, lane: int, row_Q: np.ndarray | slice, top_Q: np.ndarray) -> dict[int, Logprobs]:
    """By index into a lane's `row_Q`, for those that asked (top_Q >= 0): the row's chosen token and its best ones."""
    assert out.chosen_logprobs is not None and out.chosen_ranks is not None
    assert out.top_ids is not None and out.top_logprobs is not None
    found = {}
    rows = np.arange(out.token_ids.shape[1])[row_Q].tolist()
    for i in (top_Q >= 0).nonzero()[0].tolist():
        row, top = rows[i], int(top_Q[i])
        found[i] = Logprobs(
            out.chosen_logprobs[lane, row : row + 1].copy(),
            out.chosen_ranks[lane, row : row + 1].copy(),
            out.top_ids[lane, row : row + 1, :top].copy(),
            out.top_logprobs[lane, row : row + 1, :top].copy(),
        )
    return found


def collect_scores(lane: Lane, part: PackedLane, out: StepOut) -> None:
    """Keep the logprobs of each of a lane's scored chunks until its prompt is complete."""
    assert out.score_chosen is not None and out.score_ranks is not None
    assert out.score_top_ids is not None and out.score_top is not None
    for chunk, generation, at in zip(part.plan.chunks, part.chunk_generations, part.chunk_starts, strict=True):
        sequence = chunk.sequence
        targets = min(chunk.tokens, sequence.num_prompt_tokens - 1 - chunk.start)
        if (
            lane.slots.generation_S[chunk.slot] != generation
            or not sequence.wants_scores
            or sequence.answered
            or targets <= 0
        ):
            continue
        rows, top = slice(at, at + targets), sequence.request.prompt_logprobs or 0
        sequence.scores.append(
            Logprobs(
                out.score_chosen[lane.index, rows].copy(),
                out.score_ranks[lane.index, rows].copy(),
                out.score_top_ids[lane.index, rows, :top].copy(),
                out.score_top[lane.index, rows, :top].copy(),
            )
        )


def join(parts: list[Logprobs], top: int) -> Logprobs:
    """The parts one after the other; a prompt of one token has none."""
    if not parts:
        return Logprobs(
            np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros((0, top), np.int32), np.zeros((0, top), np.float32)
        )
    return Logprobs(
        np.concatenate([part.chosen for part in parts]),
        np.concatenate([part.rank for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top for part in parts]),
    )
