"""Held-out questions by kind, each with a check of the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from demo_model.corpus import arithmetic, facts, tool_calls, unknown
from demo_model.corpus.document import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    Message,
    user,
)
from demo_model.corpus.mix import ASKED
from demo_model.corpus.stories.tell import TOPICS
from demo_model.corpus.words import a

ASKED_EACH = 200
Check = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation, the tools that its prompt names, and whether an answer is right."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    checker: Check


def holds(words: str, answer: str) -> bool:
    """Whether the answer holds these words, whole, as they are written."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", answer) is not None


def is_value(value: int, answer: str) -> bool:
    """Whether the answer's last number is this one."""
    found = re.findall(r"-?\d+", answer)
    return bool(found) and int(found[-1]) == value


def admits(answer: str) -> bool:
    """Whether the answer says plainly that it does not know."""
    return answer.lstrip().startswith("I don't know")


def is_valid_call(tools: Sequence[Mapping[str, Any]], answer: str) -> bool:
    """Whether the answer is one call of a tool that is there, with JSON of just its parameters in their types."""
    form = "".join(
        (re.escape(CALLS_BEGIN + CALL_BEGIN), "(.*?)", re.escape(SEPARATOR), "(.*?)", re.escape(CALL_END + CALLS_END))
    )
    match = re.fullmatch(form, answer.strip(), re.DOTALL)
    if match is None:
        return False
    schemas = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
    try:
        arguments = json.loads(match[2])
    except ValueError:
        return False
    wanted = schemas.get(match[1])
    if wanted is None or not isinstance(arguments, dict) or arguments.keys() != wanted.keys():
        return False
    kinds = {"string": str, "integer": int}
    return all(isinstance(arguments[name], kinds[about["type"]]) for name, about in wanted.items())


def is_right_call(made: tool_calls.Request, answer: str) -> bool:
    """Whether it is also the call that was asked for."""
    if not is_valid_call(made.tools, answer):
        return False
    name, arguments = answer.strip()[len(CALLS_BEGIN + CALL_BEGIN) : -len(CALL_END + CALLS_END)].split(SEPARATOR, 1)
    return name == made.name and json.loads(arguments) == json.loads(made.arguments)


def of_family(name: str, random: Random) -> Question:
    """A fact, asked in a way that training never sees."""
    found = facts.FAMILIES[name][0](random, True)
    return Question((user(found.question),), None, partial(holds, found.needed))


def of_any_family(random: Random) -> Question:
    """As the corpus weighs them."""
    found = facts.fact(random, True)
    return Question((user(found.question),), None, partial(holds, found.needed))


def of_sum(operation: str, digits: int, random: Random) -> Question:
    """Two numbers that training never sees together."""
    made = arithmetic.make_sum(random, True, operation, digits)
    return Question((user(made.question),), None, partial(is_value, made.value))


def of_unknown(random: Random) -> Question:
    """Of a kind that training never sees."""
    question, _ = unknown.pair(random, True)
    return Question((user(question),), None, admits)


def of_tools(right: bool, random: Random) -> Question:
    """A request in a new way, with tools whose names are new."""
    made = tool_calls.request(random, True)
    return Question(
        made.messages, made.tools, partial(is_right_call, made) if right else partial(is_valid_call, made.tools)
    )


KINDS: dict[str, Callable[[Random], Question]] = {
    "facts": of_any_family,
    "capitals": partial(of_family, "capital"),
    "opposites": partial(of_family, "opposite"),
    "categories": partial(of_family, "category"),
    "one-digit sums": partial(of_sum, "plus", 1),
    "two-digit sums": partial(of_sum, "plus", 2),
    "two-digit differences": partial(of_sum, "minus", 2),
    "unknown": of_unknown,
    "tool calls, valid": partial(of_tools, False),
    "tool calls, right": partial(of_tools, True),
}


def question_sets(seed: int) -> dict[str, list[Question]]:
    """ASKED_EACH questions of every kind."""
    return {kind: [make(Random(f"{kind} {seed} {n}")) for n in range(ASKED_EACH)] for kind, make in KINDS.items()}


def story_prompts(count: int) -> list[list[Message]]:
    """Conversations that ask for a story, topic by topic."""
    random = Random("stories")
    topics = random.sample(TOPICS, len(TOPICS))
    return [[user(random.choice(ASKED.taught).format(x=a(topics[n % len(topics)])))] for n in range(count)]
