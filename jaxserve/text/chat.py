"""Takes the messages of a conversation and the model's chat template; gives the prompt's text, to `tokenizer`.

The rendered text already holds BOS and the role marks: it is encoded without the tokenizer's own special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import InvalidRequest, ModelError

ROLES = ("system", "developer", "user", "assistant", "tool", "observation")
PROBE = "one part"


class ChatTemplate:
    """A compiled Jinja template. It runs in a sandbox: a template comes with the model, and so from strangers.

    Templates may use what Hugging Face gives them: loop controls, `tojson` without ASCII escapes, `raise_exception`,
    `strftime_now` and `generation` blocks; `tools` and `documents` are none where there are none. The text equals
    transformers' (tests/goldens/chat), but for a null content, which prints nothing here: transformers 5.17 prints
    "None", and 5.24 drops the field, on which templates that ask whether it is none fail.
    A message's text parts go to a template that reads them as they are; for others they become lines of one text.
    Raises ModelError for a source that is no template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationBlock],
            finalize=lambda value: "" if value is None else value,
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"chat template: line {getattr(error, 'lineno', '?')}: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._reads_parts = frozenset(filter(self._try_parts, ROLES))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises InvalidRequest for messages that are malformed or that the template refuses."""
        checked = check_messages(messages, self._reads_parts)
        for name, value in (("tools", tools), ("template_kwargs", template_kwargs)):
            check_strings(name, value)
        values = {"tools": None, "documents": None, **self._special_tokens, **(template_kwargs or {})}
        if tools:
            values["tools"] = list(tools)
        try:
            return self._template.render(values, messages=checked, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template can raise anything: all of it is about these messages
            raise InvalidRequest(
                "messages", [entry["role"] for entry in checked], f"what the chat template accepts; it says: {error}"
            ) from error

    def _try_parts(self, role: str) -> bool:
        """Whether the template itself takes a list of text parts from this role: tried, as nothing declares it."""
        before = [] if role in ("system", "user") else [{"role": "user", "content": "x"}]
        messages = [*before, {"role": role, "content": [{"type": "text", "text": PROBE}]}]
        try:
            text = self._template.render(
                self._special_tokens, messages=messages, add_generation_prompt=False, tools=None
            )
        except Exception:  # as in `render`: one that cannot take a list fails in its own way
            return False
        return PROBE in text and "'type'" not in text and '"type"' not in text  # else it printed the list


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; when serving it is its content alone."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: no HTML escapes, no \\u escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def check_messages(messages: Sequence[Mapping[str, Any]], reads_parts: Collection[str] = ()) -> list[dict[str, Any]]:
    """The messages with `content` as one string, but for roles in `reads_parts`, whose text parts are left.

    Raises InvalidRequest naming the first bad field.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", messages, "a list of objects with role and content")
    if not messages:
        raise InvalidRequest("messages", [], "at least one message")
    checked = []
    for at, message in enumerate(messages):
        field = f"messages[{at}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(field, message, "an object with role and content")
        if message.get("role") not in ROLES:
            raise InvalidRequest(f"{field}.role", message.get("role"), f"one of {', '.join(ROLES)}")
        entry = {**message, "content": message_content(f"{field}.content", message, message["role"] in reads_parts)}
        check_strings(field, entry)
        checked.append(entry)
    return checked


def message_content(field: str, message: Mapping[str, Any], as_parts: bool) -> str | list[dict[str, str]] | None:
    """A message's text: a string, or text parts, which become lines unless `as_parts`.

    An assistant's may be absent beside tool calls: None.
    """
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return None
    if isinstance(content, Sequence) and content:
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        lines = [text for text in texts if isinstance(text, str)]
        if len(lines) == len(content):
            return [{"type": "text", "text": line} for line in lines] if as_parts else "\n".join(lines)
    raise InvalidRequest(field, content, "a string, or a list of parts of type text")


def check_strings(field: str, value: Any) -> None:
    """Raise InvalidRequest for a lone surrogate in any string inside `value`, naming where it is."""
    if isinstance(value, str):
        check_text(field, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_strings(f"{field} key", key)
            check_strings(f"{field}.{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        for at, item in enumerate(value):
            check_strings(f"{field}[{at}]", item)


def check_text(field: str, text: object) -> str:
    """The text itself. Raises InvalidRequest unless it is a string that UTF-8 can hold; U+0000 is a character."""
    if not isinstance(text, str):
        raise InvalidRequest(field, text, "a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        given = text[error.start : error.start + 1]
        raise InvalidRequest(field, given, f"Unicode text; character {error.start} is half a surrogate pair") from None
    return text
