"""A deterministic engine: what a request's tokens go through does not depend on who else is there."""

from __future__ import annotations

import pytest

from jaxserve.batch import FLAG_FILTER, FLAG_RANDOM, FLAGS_WORD, Batch, Layout, Program
from jaxserve.config import RuntimeConfig
from jaxserve.engine.admission import PIECE_TOKENS, Candidate, Limits
from jaxserve.engine.buckets import Buckets
from jaxserve.engine.schedule import share_budget
from jaxserve.engine.sequence import Sequence
from jaxserve.request import Finish, TokenRequest
from tests.engine.harness import Bench, make_request
from tests.fakes.runner import Row, make_shape

RUNTIME = RuntimeConfig(decode_buckets=(2, 8), mixed_buckets=(16, 48), deterministic=True)


def crowded(num_pages: int = 60, **fields: object) -> Bench:
    """Twelve requests on eight slots and few pages, to their ends."""
    bench = Bench(make_shape(8, num_pages, 8, 128, 3), budget_tokens=48, runtime=RUNTIME)
    bench.runner.keep_batches = True
    for handle in range(12):
        scored = {"prompt_logprobs": 1} if handle % 4 == 1 else {}
        bench.submit(make_request(handle, 5 + 9 * handle % 70, 20, **scored, **fields))
        bench.step(2)
    bench.finish()
    return bench


def chunks_of(bench: Bench, batch: Batch) -> list[tuple[int, int]]:
    """First and last position + 1 of each chunk."""
    views = Layout(batch.bucket, bench.shape).views(batch.vector[0])
    pairs = zip(views["chunk_position"].tolist(), views["chunk_tokens"].tolist(), strict=True)
    return [(start, start + tokens) for start, tokens in pairs if tokens]


def test_the_size_of_a_tokens_step_is_its_own_and_rows_and_prompts_never_share_one() -> None:
    bench = crowded()
    sizes = {(batch.bucket.program, batch.bucket.rows) for batch in bench.runner.batches}
    assert sizes == {(Program.DECODE, 8), (Program.MIXED, 16), (Program.MIXED, 48), (Program.SCORED, 48)}
    for batch in bench.runner.batches:
        if batch.bucket.program is Program.DECODE:
            continue
        views = Layout(batch.bucket, bench.shape).views(batch.vector[0])
        assert views["num_decode"][0] == 0
        for row, (start, _) in enumerate(chunks_of(bench, batch)):
            token = views["token"][views["chunk_start"][row]]
            prompts = {handle: request.prompt_token_ids for handle, request in bench.requests.items()}
            (owner,) = [handle for handle, ids in prompts.items() if start < len(ids) and ids[start] == token]
            assert (batch.bucket.program, batch.bucket.rows) == home_of(bench.requests[owner])


def home_of(request: TokenRequest) -> tuple[Program, int]:
    """The steps that a request's prompt belongs in."""
    if request.prompt_logprobs is not None:
        return Program.SCORED, 48
    return Program.MIXED, 16 if len(request.prompt_token_ids) <= 16 else 48


def test_draws_always_go_through_the_filters() -> None:
    """Whether a neighbour asks for a filter must not change the form in which a row is drawn."""
    for fields, wanted in (({"temperature": 0.0}, 0), ({"temperature": 0.7}, FLAG_RANDOM | FLAG_FILTER)):
        bench = Bench(make_shape(2, 40, 8, 256, 2), budget_tokens=16, runtime=RUNTIME)
        bench.runner.keep_batches = True
        bench.submit(make_request(0, 5, 4, **fields))
        bench.finish()
        assert {int(batch.vector[0, FLAGS_WORD]) for batch in bench.runner.batches} == {wanted}


def test_chunks_end_at_pieces_or_with_their_prompt() -> None:
    bench = crowded()
    prompts = {len(request.prompt_token_ids) for request in bench.requests.values()}
    mixed = [batch for batch in bench.runner.batches if batch.bucket.program is not Program.DECODE]
    chunks = [chunk for batch in mixed for chunk in chunks_of(bench, batch)]
    assert all(start % 8 == 0 and (end % 8 == 0 or end in prompts) for start, end in chunks)
    large = [chunk for batch in mixed if batch.bucket.rows == 48 for chunk in chunks_of(bench, batch)]
    assert all(start % 16 == 0 and (end % 16 == 0 or end in prompts) for start, end in large)
    assert any(end not in prompts for _, end in chunks), "no prompt was cut"


def test_prompts_and_decode_rows_take_turns() -> None:
    bench = Bench(make_shape(4, 200, 8, 512, 3), budget_tokens=48, runtime=RUNTIME)
    bench.runner.keep_batches = True
    bench.submit(make_request(0, 5, 60))
    bench.step(3)
    bench.submit(make_request(1, 400, 1, prompt_logprobs=1), make_request(2, 400, 1))
    bench.step(30)
    kinds = [batch.bucket.program for batch in bench.runner.batches][4:30]
    assert set(kinds[::2]) == {Program.DECODE} or set(kinds[1::2]) == {Program.DECODE}
    prompts = [kind for kind in kinds if kind is not Program.DECODE]
    assert set(prompts[::2]) | set(prompts[1::2]) == {Program.MIXED, Program.SCORED}
    assert prompts[0] != prompts[1] and prompts[:2] * 6 == prompts[:12], "scored prompts and others take turns, too"
    bench.finish()


def test_a_preempted_sequence_repeats_its_steps_and_sends_nothing_twice() -> None:
    bench = crowded(num_pages=22)
    assert bench.engine.stats().preemptions_total > 0
    assert bench.engine.stats().generation_tokens_total == 12 * 20
    for handle in bench.answers:
        assert bench.tokens(handle) == bench.solo(handle)
    prompts = {len(request.prompt_token_ids) for request in bench.requests.values()}
    for batch in bench.runner.batches:
        if batch.bucket.program is not Program.DECODE:  # no output is ever prefilled
            assert all(end <= max(prompts) for _, end in chunks_of(bench, batch))


def test_prompt_logprobs_come_once_though_the_prompt_is_scored_twice() -> None:
    bench = Bench(make_shape(2, 40, 8, 256, 2), budget_tokens=16, runtime=RUNTIME)
    bench.submit(make_request(0, 40, 12, prompt_logprobs=1))
    bench.step(12)
    assert len(bench.tokens(0)) > 1
    bench.preempt(0)
    bench.finish()
    assert bench.tokens(0) == bench.solo(0)
    scores = bench.answers[0].prompt_logprobs
    assert scores is not None and len(scores.chosen) == 39


def test_a_repeated_token_that_differs_ends_the_sequence_with_a_sentence() -> None:
    seen: dict[int, int] = {}

    def unsteady(row: Row) -> int:
        seen[row.output_index] = seen.get(row.output_index, 0) + 1
        return 7 if row.output_index == 3 and seen[3] == 2 else 5

    bench = Bench(make_shape(2, 40, 8, 256, 2), budget_tokens=16, runtime=RUNTIME, script=unsteady)
    bench.submit(make_request(0, 10, 30))
    bench.step(9)
    assert bench.tokens(0)[:4] == [5, 5, 5, 5]
    bench.preempt(0)
    bench.finish()
    answer = bench.answers[0]
    assert answer.finish is Finish.ERROR
    assert "token 3 of its output came out as 7, where 5 had been sent" in (answer.error or "")


@pytest.mark.parametrize(("budget", "piece"), [(2048, 128), (256, 128), (200, 64), (48, 16), (9, 4), (1, 1)])
def test_the_oldest_prompts_share_holds_a_piece(budget: int, piece: int) -> None:
    buckets = Buckets((8,), (budget,), min(256, budget))
    limits = Limits(budget, 4, 16, 100, buckets, deterministic=True)
    assert limits.piece_tokens(budget) == piece <= PIECE_TOKENS
    assert Limits(budget, 4, 16, 100, buckets).piece_tokens(budget) == 1
    candidates = [Candidate(Sequence.of(make_request(i, 900, 1), (0, i)), i, 0, 900, 0) for i in range(2)]
    share_budget(candidates, budget, 4, piece)
    given = [candidate.tokens for candidate in candidates]
    assert given[0] >= min(piece, budget) and sum(given) <= budget
    assert all(tokens in (0, 900) or tokens % piece == 0 for tokens in given)
