"""Stop strings over a stream: B043, B056, and any cut into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequest
from jaxserve.text.stop import MAX_STOP_CHARACTERS, StopAutomaton, StopMatcher


def run(stops, parts, include=False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopAutomaton(stops), include)
    sent = []
    for part in parts:
        text, match = matcher.push(part)
        sent.append(text)
        if match is not None:
            return sent, match
    return [*sent, matcher.flush()], None


@pytest.mark.parametrize(
    ("parts", "whole"),
    [(["a#", "b#", "EN", "Z"], "a#b#ENZ"), (["a#", "b#", "EN"], "a#b#EN"), (["a#", "b#"], "a#b#")],
)
def test_b043_held_text_is_sent_exactly_once(parts, whole):
    sent, match = run(["##", "#END"], parts)
    assert "".join(sent) == whole and match is None


def test_b043_text_is_held_only_while_it_may_become_a_stop_string():
    assert run(["##", "#END"], ["a#", "b#", "EN", "Z"])[0] == ["a", "#b", "", "#ENZ", ""]


def test_b056_a_stop_list_does_not_cut_markers():
    parts = ["<think>", "a", "</think>", "b"]
    assert run(["zzzzzz"], parts)[0] == [*parts, ""]


def test_match_across_token_borders_with_and_without_the_string():
    parts = ["He said S", "TO", "P now"]
    assert run(["STOP"], parts) == (["He said ", "", ""], "STOP")
    assert run(["STOP"], parts, include=True) == (["He said ", "", "STOP"], "STOP")


def test_first_complete_match_wins_whatever_the_cut():
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert "".join(run(["abcd", "bc"], "xabcd")[0]) == "xa"
    assert run(["bc", "abc"], ["xabc"]) == (["x"], "abc")  # both complete at once: the longer one


def test_nothing_ends_before_min_tokens_but_a_match_may_begin_there():
    matcher = StopMatcher(StopAutomaton(["stop"]))
    assert matcher.push("stop st", may_end=False) == ("stop ", None)
    assert matcher.push("op") == ("", "stop")


def test_an_ignored_match_is_not_held():
    matcher = StopMatcher(StopAutomaton(["stop"]))
    assert matcher.push("a stop", may_end=False) == ("a stop", None)


def test_too_long_a_string_is_refused():
    with pytest.raises(InvalidRequest, match=f"stop: .* at most {MAX_STOP_CHARACTERS} characters"):
        StopAutomaton(["x" * (MAX_STOP_CHARACTERS + 1)])


def reference(stops, text) -> tuple[str, str | None]:
    """Character by character: the first end of a match, and there the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            match = max(found, key=len)
            return text[: end - len(match)], match
    return text, None


@given(
    st.lists(st.text("ab#", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("ab#", max_size=4), max_size=10),
)
def test_any_cut_gives_the_same_text(stops, parts):
    sent, match = run(stops, parts)
    assert ("".join(sent), match) == reference(stops, "".join(parts))
