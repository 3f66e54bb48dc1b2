"""From rows to outputs: text, stops, logprobs, and merging."""

from __future__ import annotations

import math

import pytest

from jaxserve.request import CompletionOutput, Finish, RequestOutput, SamplingParams
from jaxserve.text.assemble import LOGPROB_FLOOR, Assembler, merge, position_dict
from jaxserve.text.prepare import prepare
from tests.text.scripted import LIMITS, logprobs_of, pieces

NONE, STOP, LENGTH = Finish.NONE, Finish.STOP, Finish.LENGTH


def run(vocabulary, rows, **params) -> CompletionOutput:
    """All rows of one choice, merged; stops at the first output that ends it."""
    prepared = prepare([1], SamplingParams(**params), LIMITS, vocabulary)
    assembler = Assembler(prepared, 0, vocabulary)
    whole = CompletionOutput(0, "", [])
    for row in rows:
        output = assembler.push(*row)
        whole.text += output.text
        whole.token_ids += output.token_ids
        whole.finish_reason, whole.stop_reason = output.finish_reason, output.stop_reason
        if output.finish_reason is not None:
            break
    return whole


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(1, NONE), (2, NONE), (3, NONE), (4, NONE), (0, STOP)], "a#b#ENZ"),
        ([(1, NONE), (2, NONE), (3, LENGTH)], "a#b#EN"),
        ([(1, NONE), (2, NONE), (0, STOP)], "a#b#"),
        ([(1, NONE), (2, NONE), (-1, Finish.CANCELLED)], "a#b#"),
    ],
)
def test_b043_held_text_comes_with_every_kind_of_end(rows, text):
    vocabulary = pieces("<eos>", "a#", "b#", "EN", "Z", special=[0])
    assert run(vocabulary, rows, stop=["##", "#END"]).text == text


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("params", [{"stop_token_ids": [2]}, {"stop": ["<|user|>"]}])
def test_b045_stop_token_that_is_a_special_token(params, include):
    vocabulary = pieces("<eos>", "done", "<|user|>", special=[0, 2])
    output = run(vocabulary, [(1, NONE), (2, STOP)], include_stop_str_in_output=include, **params)
    assert output.text == "done" and output.token_ids == [1, 2] and output.finish_reason == "stop"
    assert output.stop_reason == (2 if "stop_token_ids" in params else "<|user|>")


def test_stop_token_shows_only_when_asked_for():
    vocabulary = pieces("<eos>", "done", ".", special=[0])
    rows = [(1, NONE), (2, STOP)]
    assert run(vocabulary, rows, stop_token_ids=[2]).text == "done"
    assert run(vocabulary, rows, stop_token_ids=[2], include_stop_str_in_output=True).text == "done."
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert run(vocabulary, [(1, NONE), (0, STOP)], **shown).text == "done<eos>"
    assert run(vocabulary, [(1, NONE), (0, STOP)], skip_special_tokens=False).text == "done"


def test_b041_eos_has_no_stop_reason_and_an_own_stop_id_has():
    vocabulary = pieces("<eos>", "x", special=[0])
    assert run(vocabulary, [(0, STOP)]).stop_reason is None
    assert run(vocabulary, [(0, STOP)], ignore_eos=True, stop_token_ids=[0]).stop_reason == 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [((-1, LENGTH), "length"), ((0, STOP), "stop"), ((2, STOP), "stop"), ((-1, Finish.CANCELLED), "cancelled")],
)
def test_b052_end_in_the_middle_of_a_character(row, reason):
    vocabulary = pieces("<eos>", b"\xf0\x9f\x98", "y", special=[0])
    output = run(vocabulary, [(1, NONE), row], stop_token_ids=[2])
    assert output.text == "\ufffd" and output.finish_reason == reason
    assert output.token_ids == [1] + [row[0]] * (row[0] >= 0)
    assert run(vocabulary, [(1, LENGTH)]).text == "\ufffd"


def test_min_tokens_holds_back_stop_strings_too():
    vocabulary = pieces("<eos>", "stop", "st", "op", special=[0])
    output = run(vocabulary, [(1, NONE), (2, NONE), (3, NONE), (1, NONE)], stop=["stop"], min_tokens=3)
    assert output.text == "stop" and output.token_ids == [1, 2, 3] and output.stop_reason == "stop"


def test_stop_string_at_the_last_token_is_a_stop():
    vocabulary = pieces("<eos>", "a", "END", special=[0])
    output = run(vocabulary, [(1, NONE), (2, LENGTH)], stop=["END"])
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "END")


def test_without_text_ids_and_finish_still_come():
    vocabulary = pieces("<eos>", "a", special=[0])
    for used, params in ((vocabulary, {"detokenize": False}), (None, {})):
        output = run(used, [(1, NONE), (1, LENGTH)], **params)
        assert (output.text, output.token_ids, output.finish_reason) == ("", [1, 1], "length")


# Logprobs: area F.


def test_b057_chosen_first_then_the_best_in_order():
    vocabulary = pieces("<eos>", "a", "b", b"\xe6", special=[0])
    lists = logprobs_of([-3.0], [3], [[3, 0, 1]], [[-0.1, -2.0, -3.0]])
    entries = position_dict(lists, 0, 1, 2, vocabulary)
    assert list(entries) == [1, 3, 0]
    assert [(entry.rank, entry.decoded_token) for entry in entries.values()] == [(3, "a"), (1, "\ufffd"), (2, "<eos>")]
    assert list(position_dict(lists, 0, 3, 2, vocabulary)) == [3, 0]  # the chosen one is among the best: as asked
    assert list(position_dict(lists, 0, 1, 0, vocabulary)) == [1]
    assert position_dict(lists, 0, 1, 1, None)[1].decoded_token is None


def test_b057_no_infinity_and_no_nan():
    lists = logprobs_of([-math.inf], [7], [[2, 1, -1]], [[math.nan, -1e30, 0.0]])
    entries = position_dict(lists, 0, 0, 3, None)
    assert list(entries) == [0, 2, 1]  # an id of -1 is no entry
    assert {entry.logprob for entry in entries.values()} == {LOGPROB_FLOOR}


def test_b061_one_entry_for_each_token():
    prepared = prepare([1], SamplingParams(logprobs=1), LIMITS, None)
    assembler = Assembler(prepared, 0, None)
    position = logprobs_of([-0.5], [1], [[4]], [[-0.5]])
    first, second, last = assembler.push(4, 0, position), assembler.push(5, 0, position), assembler.end(LENGTH)
    assert [list(output.logprobs[0]) for output in (first, second)] == [[4], [5, 4]] and last.logprobs == []
    with pytest.raises(AssertionError, match="no logprobs with token 3"):
        assembler.push(4)


# Merging.


def delta(*outputs: CompletionOutput, **fields) -> RequestOutput:
    return RequestOutput("a", None, [1], list(outputs), **fields)


def test_merged_deltas_are_the_whole_answer():
    whole = delta(CompletionOutput(1, "b", [2], [{2: None}]), prompt_logprobs=[None])
    merge(whole, delta(CompletionOutput(0, "x", [5]), num_cached_tokens=4))
    merge(whole, delta(CompletionOutput(1, "c", [3], [{3: None}], "stop", 3), num_cached_tokens=4))
    merged = merge(whole, delta(CompletionOutput(0, "", [], None, "length"), finished=True, num_cached_tokens=4))
    assert merged is whole and merged.finished and merged.num_cached_tokens == 4 and merged.prompt_logprobs == [None]
    assert merged.outputs == [
        CompletionOutput(0, "x", [5], None, "length"),
        CompletionOutput(1, "bc", [2, 3], [{2: None}, {3: None}], "stop", 3),
    ]
