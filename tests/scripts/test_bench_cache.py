"""The cache benchmark: its trace, the cache that knows the future, and that all of it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts import bench_cache
from scripts._cache_run import Rig, converse
from scripts._cache_trace import Plan, Trace, Turn, belady, following, working_set_pages

SMALL = Plan(sessions=3, turns=2, system_tokens=128, question_tokens=(20, 40), answer_tokens=(30, 50), think_s=1.0)


def turn(session: int, prompt_tokens: int, answer_tokens: int = 1) -> Turn:
    return Turn(session, prompt_tokens, answer_tokens, 0, 0)


def test_a_plan_makes_the_same_sessions_again() -> None:
    first, again = Trace.of(SMALL), Trace.of(SMALL)
    for one, other in zip(first.sessions, again.sessions, strict=True):
        assert one.answers == other.answers and one.thinking_s == other.thinking_s
        assert all(np.array_equal(*pair) for pair in zip(one.questions, other.questions, strict=True))


def test_turns_begin_with_what_was_said() -> None:
    """Answers are part of what follows; all but the last page and token of it is found again."""
    trace = Trace.of(SMALL)
    rig = Rig(2 * working_set_pages(trace, 16), slots=3, page_size_tokens=16)
    turns = converse(rig, trace)
    assert len(turns) == 6 and rig.engine.is_idle
    for session in trace.sessions:
        first, second = (one for one in turns if one.session == session.number)
        assert second.seen_tokens == first.prompt_tokens + first.answer_tokens
        assert second.prompt_tokens == second.seen_tokens + len(session.questions[1])
        assert second.seen_tokens - 17 <= second.cached_tokens <= second.seen_tokens
        assert len(session.history) == second.prompt_tokens + second.answer_tokens
    assert turns[0].seen_tokens == turns[0].cached_tokens == 0


def test_who_knows_the_future_keeps_what_is_needed_soonest() -> None:
    """Pages of 10 tokens, no system prompt: two sessions of 3 pages, room for 4, the first one talks next."""
    turns = [turn(0, 30), turn(1, 30), turn(0, 40), turn(1, 40)]
    assert following(turns) == [2, 3, 4, 4]
    assert belady(turns, 100, 10, 0) == 30 + 30
    assert belady(turns, 4, 10, 0) == 30 + 10  # of the second session one page is left beside the first one's three
    assert belady([turn(0, 25), turn(1, 25)], 100, 10, 20) == 20  # the system prompt is everybody's


@pytest.mark.parametrize("pages", [10, 20, 40, 1000])
def test_it_is_never_worse_than_the_engine(pages: int) -> None:
    trace = Trace.of(SMALL)
    turns = converse(Rig(max(pages, 20), slots=1, page_size_tokens=16), trace)
    assert sum(one.cached_tokens for one in turns) <= belady(turns, max(pages, 20), 16, SMALL.system_tokens)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cache.json"
    assert bench_cache.main(["--quick", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["hits"][0]["evicted_pages"] == 0 < written["hits"][1]["evicted_pages"]
    assert 0 < written["figures"]["fragmentation"] < 0.1 and written["match_us"]["match"] > 0
    assert "hits_of_possible" in capsys.readouterr().out
