"""The router: handles, cancels, failures, times."""

from __future__ import annotations

import logging

import pytest

from jaxserve.errors import DuplicateRequest, EngineUnavailable, RequestFailed
from jaxserve.request import Cancel, Finish, SamplingParams
from jaxserve.text.prepare import prepare
from tests.text.scripted import LIMITS, Desk, events, logprobs_of, pieces

VOCABULARY = pieces("<eos>", "a", "b", "END", special=[0])


@pytest.fixture
def desk() -> Desk:
    return Desk(VOCABULARY)


def ready(**params):
    return prepare([1, 2], SamplingParams(**{"max_tokens": 100, **params}), LIMITS, VOCABULARY)


def test_requests_reach_the_engine_with_handles_and_arrival(desk):
    desk.now_s = 7.0
    assert desk.submit(ready(n=3), "a") == [1, 2, 3]
    assert desk.submit(ready(), "b") == [4]
    assert {request.arrival_s for request in desk.sent} == {7.0}
    assert len({request.seed for request in desk.sent}) == 4


def test_deltas_hold_only_what_is_new(desk):
    (handle,) = desk.submit(ready())
    for row in ((handle, 1), (handle, 2), (handle, 0, Finish.STOP)):
        desk.front.on_events(events([row]))
    assert desk.texts() == ["a", "b", ""]
    assert [delta.finished for delta in desk.deltas["a"]] == [False, False, True]
    whole = desk.whole()
    assert whole.prompt_token_ids == [1, 2] and whole.outputs[0].token_ids == [1, 2, 0]
    assert whole.outputs[0].finish_reason == "stop" and desk.front.num_live_requests == 0
    assert len(desk.sent) == 1  # the engine ended it itself: no Cancel


def test_stop_string_tells_the_engine_and_drops_what_comes_later(desk):
    (handle,) = desk.submit(ready(stop=["END"]))
    other = desk.submit(ready(), "b")[0]
    desk.front.on_events(events([(handle, 1), (other, 1)]))
    desk.front.on_events(events([(handle, 3), (other, 2)]))
    desk.front.on_events(events([(handle, 1, Finish.STOP), (other, 0, Finish.STOP)]))
    assert desk.sent[-1] == Cancel(handle, Finish.STOP)
    assert desk.whole("a").outputs[0].text == "a" and desk.whole("a").outputs[0].stop_reason == "END"
    assert desk.whole("b").outputs[0].text == "ab"


def test_choices_of_one_request_end_on_their_own(desk):
    first, second = desk.submit(ready(n=2))
    desk.front.on_events(events([(first, 1), (second, 2)]))
    desk.front.on_events(events([(first, 0, Finish.STOP), (second, 2)]))
    assert desk.front.num_live_requests == 1
    desk.front.on_events(events([(second, 2, Finish.LENGTH)]))
    whole = desk.whole()
    assert [(output.text, output.finish_reason) for output in whole.outputs] == [("a", "stop"), ("bbb", "length")]
    assert [delta.finished for delta in desk.deltas["a"]] == [False] * 4 + [True]


def test_b091_live_id_is_refused_and_free_again_after_its_end(desk):
    (old,) = desk.submit(ready(), "a")
    with pytest.raises(DuplicateRequest, match="'a' is in use"):
        desk.front.submit(ready(), print, "a")
    old_deltas = desk.deltas["a"]
    assert desk.front.cancel("a") and not desk.front.cancel("a")  # twice is harmless
    (new,) = desk.submit(ready(), "a")
    desk.front.on_events(events([(old, 2), (new, 1)]))
    desk.front.on_events(events([(old, -1, Finish.CANCELLED), (new, 0, Finish.STOP)]))
    assert desk.whole("a").outputs[0].text == "a"
    assert [delta.outputs[0].finish_reason for delta in old_deltas] == ["cancelled"]
    assert [message for message in desk.sent if isinstance(message, Cancel)] == [Cancel(old, Finish.CANCELLED)]


def test_b091_children_and_similar_ids_do_not_meet(desk):
    desk.submit(ready(n=3), "a")
    (own,) = desk.submit(ready(), "a_0")
    desk.front.cancel("a")
    desk.front.on_events(events([(own, 1, Finish.LENGTH)]))
    assert desk.whole("a_0").outputs[0].text == "a" and len(desk.sent) == 3 + 1 + 3


def test_ids_are_made_where_none_is_given(desk):
    assert desk.front.submit(ready(), print) != desk.front.submit(ready(), print)


@pytest.mark.parametrize(("reason", "text"), [(Finish.CANCELLED, "cancelled"), (Finish.DEADLINE, "deadline")])
def test_cancel_gives_what_was_held_back(desk, reason, text):
    (handle,) = desk.submit(ready(stop=["bEND"]))
    desk.front.on_events(events([(handle, 2)]))
    assert desk.texts() == [""]
    desk.front.cancel("a", reason)
    assert desk.whole().outputs[0].text == "b" and desk.whole().outputs[0].finish_reason == text
    assert desk.deltas["a"][-1].finished and desk.sent[-1] == Cancel(handle, reason)


def test_an_engine_error_ends_only_its_request(desk):
    bad, good = desk.submit(ready(), "bad")[0], desk.submit(ready(), "good")[0]
    desk.front.on_events(events([(bad, -1, Finish.ERROR), (good, 1)], errors={bad: "logits held NaN"}))
    last = desk.deltas["bad"][-1]
    assert isinstance(last.error, RequestFailed) and str(last.error) == "logits held NaN" and last.finished
    assert last.outputs[0].finish_reason == "error"
    assert desk.texts("good") == ["a"]


def test_a_dead_engine_ends_everything_and_refuses_more(desk):
    desk.submit(ready(n=2), "a")
    desk.submit(ready(), "b")
    error = EngineUnavailable("the engine's process is gone")
    desk.front.fail_all(error)
    assert [delta.error for name in "ab" for delta in desk.deltas[name]] == [error] * 3
    assert desk.front.num_live_requests == 0 and len(desk.times) == 2
    with pytest.raises(EngineUnavailable, match="process is gone"):
        desk.front.submit(ready(), print)


def test_draining_refuses_new_requests_and_ends_the_live_ones_well(desk):
    (handle,) = desk.submit(ready())
    desk.front.refuse_new(EngineUnavailable("draining"))
    with pytest.raises(EngineUnavailable, match="draining"):
        desk.front.submit(ready(), print)
    desk.front.on_events(events([(handle, 1, Finish.LENGTH)]))
    assert desk.whole().finished


def test_a_request_that_cannot_be_sent_is_not_live(desk):
    def broken(messages) -> None:
        raise EngineUnavailable("no link")

    desk.front._send = broken
    with pytest.raises(EngineUnavailable):
        desk.front.submit(ready(), print, "a")
    assert desk.front.num_live_requests == 0


def test_an_outbox_may_cancel_its_own_request(desk):
    seen = []

    def outbox(delta) -> None:
        seen.append(delta.outputs[0].finish_reason)
        desk.front.cancel("a")

    desk.front.submit(ready(n=2), outbox, "a")
    desk.front.on_events(events([(1, 1), (2, 1)]))
    assert seen == [None, "cancelled", "cancelled"] and desk.front.num_live_requests == 0


def test_an_outbox_that_raises_loses_only_its_own_request(desk, caplog):
    def broken(delta) -> None:
        raise ValueError("reader is gone")

    desk.front.submit(ready(), broken, "broken")
    (good,) = desk.submit(ready(), "good")
    with caplog.at_level(logging.ERROR):
        desk.front.on_events(events([(1, 1), (good, 1)]))
    assert desk.texts("good") == ["a"] and desk.sent[-1] == Cancel(1, Finish.CANCELLED)
    assert desk.front.num_live_requests == 1 and "request broken: its outbox failed" in caplog.text


def test_events_of_unknown_handles_are_dropped(desk):
    desk.front.on_events(events([(99, 1)], cached_tokens={99: 1}, queue_s={99: 1.0}))
    assert desk.deltas == {}


def test_cached_tokens_and_prompt_logprobs_come_with_the_first_delta(desk):
    first, second = desk.submit(ready(n=2, prompt_logprobs=1, logprobs=0))
    position = logprobs_of([-1.0], [1], [[2]], [[-1.0]])
    desk.front.on_events(
        events(
            [(first, 1), (second, 2)],
            cached_tokens={first: 1, second: 2},
            logprobs={0: position, 1: position},
            prompt_logprobs={first: logprobs_of([-2.0], [2], [[1]], [[-0.5]])},
        )
    )
    delta, other = desk.deltas["a"]
    assert delta.num_cached_tokens == 1
    nothing, entries = delta.prompt_logprobs
    assert nothing is None and list(entries) == [2, 1] and entries[2].rank == 2 and entries[1].decoded_token == "a"
    assert other.prompt_logprobs is None


def test_prompt_of_one_token_has_no_logprobs_to_wait_for(desk):
    prepared = prepare([1], SamplingParams(prompt_logprobs=1), LIMITS, VOCABULARY)
    (handle,) = desk.submit(prepared)
    desk.front.on_events(events([(handle, 1)]))
    assert desk.deltas["a"][0].prompt_logprobs == [None]


# Times, with a fake clock: B134.


def run_b134(desk, request_id, tokens, preempted=False) -> None:
    desk.now_s = 0.0
    (handle,) = desk.submit(ready(), request_id)
    for at in range(tokens):
        desk.now_s = 2.0 + 0.1 * at
        last = at == tokens - 1
        extra = {"queue_s": {handle: 0.5}} if at == 0 else {}
        if preempted and at == 5:
            extra = {"queue_s": {handle: 1.7}}  # scheduled again: the first time counts
        desk.front.on_events(events([(handle, 1, Finish.LENGTH if last else Finish.NONE)], **extra))


@pytest.mark.parametrize("preempted", [False, True])
def test_b134_times_of_a_request(desk, preempted):
    run_b134(desk, "a", 10, preempted)
    (times,) = desk.times
    assert times.time_to_first_token_s == pytest.approx(2.0)
    assert times.time_per_output_token_s == pytest.approx(0.1)
    assert times.queue_s == 0.5 and times.e2e_s == pytest.approx(2.9)
    assert (times.prompt_tokens, times.generation_tokens, times.finish_reasons) == (2, 10, ("length",))


def test_b134_a_single_token_has_no_time_per_token(desk):
    run_b134(desk, "a", 1)
    (times,) = desk.times
    assert times.time_to_first_token_s == 2.0 and times.time_per_output_token_s is None and times.e2e_s == 2.0


def test_b134_one_observation_for_each_request(desk):
    run_b134(desk, "a", 3)
    run_b134(desk, "b", 1)
    first, second = desk.submit(ready(n=2), "c")
    desk.front.on_events(events([(first, 1), (second, 1)]))
    desk.now_s += 1.0
    desk.front.on_events(events([(first, 1, Finish.LENGTH)]))
    desk.front.cancel("c")
    assert [times.request_id for times in desk.times] == ["a", "b", "c"]
    both = desk.times[-1]
    assert both.finish_reasons == ("length", "cancelled") and both.generation_tokens == 3
    assert both.time_per_output_token_s == pytest.approx(1.0)


def test_a_request_without_tokens_is_observed_too(desk):
    desk.submit(ready())
    desk.now_s = 3.0
    desk.front.cancel("a", Finish.DEADLINE)
    (times,) = desk.times
    assert times.time_to_first_token_s is None and times.queue_s is None and times.e2e_s == 3.0
