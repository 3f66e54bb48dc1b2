"""Random traffic on tiny pools: page sums each step, one end each, and outputs as if every request were alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import RuntimeConfig
from jaxserve.engine.pages import pages_for
from jaxserve.request import Finish, TokenRequest
from tests.engine.harness import Bench, make_request
from tests.fakes.runner import Row, hash_tokens, make_shape, next_token, solo_tokens

STOP_IDS = tuple(range(0, 1000, 37))  # a token in 37 of the tiny model's ends a sequence


@dataclass(frozen=True)
class Arrival:
    """A request of a drawn traffic."""

    after_steps: int  # iterations after the one before it
    prompt_tokens: int
    max_tokens: int
    cancel_after: int | None  # iterations
    stops: bool
    prompt_logprobs: bool
    family: int  # prompts of a family begin alike
    salted: bool


ARRIVALS = st.builds(
    Arrival,
    after_steps=st.integers(0, 4),
    prompt_tokens=st.integers(1, 70),
    max_tokens=st.integers(1, 30),
    cancel_after=st.none() | st.integers(0, 20),
    stops=st.booleans(),
    prompt_logprobs=st.booleans(),
    family=st.integers(0, 3),
    salted=st.booleans(),
)


def expected(bench: Bench, handle: int) -> tuple[list[int], Finish]:
    """Tokens and finish of an undisturbed run."""
    request = bench.requests[handle]
    tokens = solo_tokens(request.prompt_token_ids, request.max_tokens, bench.shape.vocab_size)
    for count, token in enumerate(tokens, 1):
        if token in request.stop_token_ids:
            return tokens[:count], Finish.STOP
    return tokens, Finish.LENGTH


def drive(bench: Bench, arrivals: list[Arrival]) -> None:
    """Play the traffic to its end."""
    cancels: dict[int, list[int]] = {}
    for handle, arrival in enumerate(arrivals):
        for _ in range(arrival.after_steps):
            bench.cancel(*cancels.pop(bench.iterations, ()))
            bench.step()
        bench.submit(
            TokenRequest(
                handle,
                make_request(arrival.family, arrival.prompt_tokens, 1).prompt_token_ids,
                arrival.max_tokens,
                seed=handle,
                stop_token_ids=STOP_IDS if arrival.stops else (),
                prompt_logprobs=1 if arrival.prompt_logprobs else None,
                cache_salt="salt" if arrival.salted else None,
            )
        )
        if arrival.cancel_after is not None:
            cancels.setdefault(bench.iterations + arrival.cancel_after, []).append(handle)
    while cancels:
        bench.cancel(*cancels.pop(bench.iterations, ()))
        bench.step()
    bench.finish()


@settings(max_examples=80)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=14),
    num_slots=st.integers(1, 5),
    num_pages=st.integers(13, 30),
    page_size_tokens=st.sampled_from([8, 16]),
    max_chunks=st.integers(1, 3),
    budget_tokens=st.integers(8, 80),
    lanes=st.sampled_from([1, 2, 4]),
    deterministic=st.booleans(),
    eviction=st.sampled_from([None, "lru", "lfu", "priority"]),
)
def test_any_traffic_gives_the_outputs_of_solo_runs(
    arrivals: list[Arrival],
    num_slots: int,
    num_pages: int,
    page_size_tokens: int,
    max_chunks: int,
    budget_tokens: int,
    lanes: int,
    deterministic: bool,
    eviction: str | None,
) -> None:
    shape = make_shape(num_slots, num_pages, page_size_tokens, 128, max_chunks, lanes=lanes)
    runtime = RuntimeConfig(mixed_buckets=(8, 80), deterministic=deterministic)
    bench = Bench(shape, budget_tokens=budget_tokens, runtime=runtime, eviction=eviction)
    drive(bench, arrivals)
    for handle, arrival in enumerate(arrivals):
        tokens, finish = expected(bench, handle)
        answer = bench.answers[handle]
        if pages_for(arrival.prompt_tokens + arrival.max_tokens - 1, page_size_tokens) > num_pages:
            assert answer.finish is Finish.ERROR and not answer.token_ids
        elif answer.finish is Finish.CANCELLED:
            assert arrival.cancel_after is not None
            assert answer.token_ids == tokens[: len(answer.token_ids)]
        else:
            assert (answer.token_ids, answer.finish) == (tokens, finish)
            if arrival.prompt_logprobs:
                assert answer.prompt_logprobs is not None
                assert len(answer.prompt_logprobs.chosen) == arrival.prompt_tokens - 1


@settings(max_examples=40)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=8),
    failing=st.sets(st.integers(1, 30), max_size=4),
    in_dispatch=st.booleans(),
    lanes=st.sampled_from([1, 2]),
    deterministic=st.booleans(),
)
def test_failures_at_any_step_end_few_and_harm_nobody_else(
    arrivals: list[Arrival], failing: set[int], in_dispatch: bool, lanes: int, deterministic: bool
) -> None:
    runtime = RuntimeConfig(deterministic=deterministic)
    bench = Bench(make_shape(3, 14, 16, 128, 2, lanes=lanes), budget_tokens=40, runtime=runtime)
    left = set(failing)

    def fail(step: int) -> None:
        if step in left:
            left.discard(step)
            raise RuntimeError(f"step {step}")

    if in_dispatch:
        bench.runner.before_dispatch = fail
    else:
        bench.runner.before_result = fail
    drive(bench, arrivals)
    errors = sum("failed on the device" in (answer.error or "") for answer in bench.answers.values())
    assert errors < max(1, len(failing) - len(left)), "the first failure ends nobody"
    for handle in bench.answers:
        tokens, finish = expected(bench, handle)
        answer = bench.answers[handle]
        if answer.finish in (Finish.CANCELLED, Finish.ERROR):
            assert answer.token_ids == tokens[: len(answer.token_ids)]
        else:
            assert (answer.token_ids, answer.finish) == (tokens, finish)


@pytest.mark.parametrize("lanes", [1, 4])
def test_b095_no_page_is_lost_over_5000_requests(lanes: int) -> None:
    """B095: ends by stop id, length, cancel, a front's stop string and bad logits; prompts begin alike.

    After each 500 requests all is drained, and free and cached pages are all there are.
    """

    def script(row: Row) -> int | np.ndarray:
        token = next_token(row.history, 1000)
        if row.install.seed % 50 == 7 and row.output_index == 1:
            return np.full(1000, np.nan, np.float32)
        return token

    shape = make_shape(num_slots=24 // lanes, num_pages=60 // lanes, page_size_tokens=8, lanes=lanes)
    bench = Bench(shape, budget_tokens=128, script=script)
    handle = 0
    for _ in range(10):
        cancels: dict[int, list[tuple[int, Finish]]] = {}
        for first in range(handle, handle + 500, 10):
            for handle in range(first, first + 10):
                draw = hash_tokens(np.array([handle]))
                stops = STOP_IDS if draw % 3 == 0 else ()
                prompt = make_request(draw // 512 % 7, 1 + draw % 40, 1).prompt_token_ids
                bench.submit(TokenRequest(handle, prompt, 1 + draw // 64 % 8, seed=handle, stop_token_ids=stops))
                if draw % 5 == 0:
                    reason = Finish.STOP if draw % 2 else Finish.CANCELLED
                    cancels.setdefault(bench.iterations + draw // 128 % 12, []).append((handle, reason))
            for _ in range(4):
                for cancelled, reason in cancels.pop(bench.iterations, ()):
                    bench.cancel(cancelled, reason=reason)
                bench.step()
        handle += 1
        bench.finish()
    assert handle == 5000
    counts = bench.engine.stats().finished_total
    assert sum(counts.values()) == 5000 and set(counts) == {"stop", "length", "cancelled", "error"}
    assert not bench.engine.ledger.live and not bench.engine.ledger.events.build()
