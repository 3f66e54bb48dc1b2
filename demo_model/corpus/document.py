"""One document of the corpus: prose as it is, or a conversation as the model's own chat template prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.text.chat import ChatTemplate

BOS, EOS = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prose:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages that end with the assistant's; `reasoning`: what it thinks before that last one, None: it does not."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    reasoning: str | None = None


Document = Prose | Chat


def ask(question: str, answer: str, reasoning: str | None = None) -> Chat:
    """The shortest conversation."""
    return Chat((user(question), assistant(answer)), reasoning=reasoning)


def user(text: str) -> Message:
    """What a person says."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """What the model says."""
    return {"role": "assistant", "content": text}


def call(name: str, arguments: str) -> Message:
    """The assistant's call of one tool; arguments: JSON."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def result(text: str) -> Message:
    """What a tool gave back."""
    return {"role": "tool", "content": text}


@dataclass(slots=True)
class Renderer:
    """Documents -> the text that the model is trained on, each from BOS to EOS."""

    template: ChatTemplate = field(
        default_factory=lambda: ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), {"bos_token": BOS, "eos_token": EOS})
    )

    def __call__(self, document: Document) -> str:
        """The last answer follows the prompt that a server would make of what is before it."""
        if isinstance(document, Prose):
            return f"{BOS}{document.text}{EOS}"
        *history, last = document.messages
        thinking = {"thinking": document.reasoning is not None}
        prompt = self.template.render(history, True, document.tools or None, thinking)
        thought = "" if document.reasoning is None else f"{document.reasoning}</think>"
        calls = "".join(
            f"{CALL_BEGIN}{each['function']['name']}{SEPARATOR}{each['function']['arguments']}{CALL_END}"
            for each in last.get("tool_calls", ())
        )
        calls = f"{CALLS_BEGIN}{calls}{CALLS_END}" if calls else ""
        return f"{prompt}{thought}{last['content']}{calls}{EOS}"
