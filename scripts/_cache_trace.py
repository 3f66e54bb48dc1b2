"""Conversations as the cache benchmark runs them, and what a perfect cache would save: no engine is in here.

A session is turns that each begin with all of those before: system prompt, question, answer, question, ... Who talks
when follows from thinking times. `belady` replays a finished run against a cache that knows the future.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a trace, in tokens; times in seconds."""

    sessions: int = 64
    turns: int = 8
    system_tokens: int = 512
    question_tokens: tuple[int, int] = (40, 200)  # from, to
    answer_tokens: tuple[int, int] = (100, 300)
    think_s: float = 10.0  # mean of an exponential
    vocab_size: int = 100_000
    seed: int = 0


@dataclass(slots=True)
class Session:
    """A conversation and where it stands. history: all tokens so far, which the next prompt begins with."""

    number: int
    questions: list[np.ndarray]  # int32
    answers: list[int]  # tokens of each answer
    thinking_s: list[float]  # before each question
    history: np.ndarray
    next_turn: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as it ran. seen: tokens of its prompt that somebody had computed before."""

    session: int
    prompt_tokens: int
    answer_tokens: int
    seen_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Trace:
    """The sessions of a plan."""

    plan: Plan
    sessions: list[Session] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan) -> Trace:
        """The same sessions for the same plan."""
        rng = np.random.default_rng(plan.seed)

        def ids(count: int) -> np.ndarray:
            return rng.integers(0, plan.vocab_size, count).astype(np.int32)

        system = ids(plan.system_tokens)
        made = cls(plan)
        for number in range(plan.sessions):
            lengths = rng.integers(*plan.question_tokens, plan.turns)
            answers = rng.integers(*plan.answer_tokens, plan.turns).tolist()
            thinking_s = rng.exponential(plan.think_s, plan.turns).tolist()
            made.sessions.append(Session(number, [ids(count) for count in lengths], answers, thinking_s, system))
        return made


def working_set_pages(trace: Trace, page_size_tokens: int) -> int:
    """Pages that hold all conversations to their ends, the system prompt once."""
    own = [sum(map(len, one.questions)) + sum(one.answers) for one in trace.sessions]
    shared = trace.plan.system_tokens // page_size_tokens
    return shared + sum(-(-(trace.plan.system_tokens + tokens) // page_size_tokens) - shared for tokens in own)


def belady(turns: Sequence[Turn], num_pages: int, page_size_tokens: int, system_tokens: int) -> int:
    """Tokens of prompts that a cache of so many pages serves which always evicts what is needed last.

    L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. The turns run one after the
    other and hold no page themselves, so no engine can reach this. Of a conversation the last pages go first.
    """
    shared_pages = system_tokens // page_size_tokens
    next_use = following(turns)
    cached: dict[int, int] = {}  # by session: pages, those of the system prompt left out
    due: dict[int, int] = {}
    served, is_system_there = 0, False
    for index, turn in enumerate(turns):
        most = (turn.prompt_tokens - 1) // page_size_tokens
        there = shared_pages * is_system_there + cached.get(turn.session, 0)
        served += min(most, there) * page_size_tokens
        is_system_there = True
        cached[turn.session] = (turn.prompt_tokens + turn.answer_tokens - 1) // page_size_tokens - shared_pages
        due[turn.session] = next_use[index]
        over = shared_pages + sum(cached.values()) - num_pages
        for session in sorted(cached, key=lambda session: -due[session]):
            if over <= 0:
                break
            gone = min(over, cached[session])
            cached[session] -= gone
            over -= gone
    return served


def following(turns: Sequence[Turn]) -> list[int]:
    """For each turn the index of its session's next one; past the last where there is none."""
    found, later = [len(turns)] * len(turns), {}
    for index in reversed(range(len(turns))):
        found[index] = later.get(turns[index].session, len(turns))
        later[turns[index].session] = index
    return found
