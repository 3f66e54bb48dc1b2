"""Chat templates and the checks of messages."""

from __future__ import annotations

import datetime

import pytest

from jaxserve.errors import InvalidRequest, ModelError
from jaxserve.request import SamplingParams
from jaxserve.text.chat import ChatTemplate, check_text
from jaxserve.text.constraints import TextLimits
from jaxserve.text.prepare import prepare_chat
from jaxserve.text.tokenizer import load_tokenizer
from tests.fakes.tokenizer import tiny_tokenizer_dir

USER = [{"role": "user", "content": "hello"}]


def render(source: str, messages=USER, special=None, **values) -> str:
    now = lambda: datetime.datetime(2026, 12, 1)  # noqa: E731
    return ChatTemplate(source, special or {}, now).render(messages, **values)


def test_the_usual_shape(tokenizer):
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    expected = "<|im_start|>user\nhello<|im_end|>\n"
    assert template.render(USER) == expected + "<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hello"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{{ '東<' | tojson }}", '"東<"'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = 7 %}{% endfor %}{{ ns.x }}", "7"),
        ("{{ strftime_now('%d %b %Y') }}", "01 Dec 2026"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("    {% if true %}\nx\n    {% endif %}\n", "x\n"),
        ("{{ tools is none }}{{ documents is none }}{{ enable_thinking }}", "TrueTrueno"),
        ("{{ thinking is defined }}{{ thinking }}", "False"),
    ],
)
def test_what_templates_use(source, expected):
    assert render(source, special={"bos_token": "<s>"}, template_kwargs={"enable_thinking": "no"}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source):
    with pytest.raises(InvalidRequest, match="^messages: .*what the chat template accepts; it says: "):
        render(source)


def test_template_error_keeps_its_words():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_source_that_is_no_template_fails_at_load():
    with pytest.raises(ModelError, match="chat template: line 2"):
        ChatTemplate("\n{% if %}", {})


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], r"messages\[0\]"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([*USER, {"role": "assistant"}], r"messages\[1\].content"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
    ],
)
def test_bad_messages_are_named(messages, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: got "):
        render("x", messages)


def test_text_parts_become_lines_and_tool_calls_need_no_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert render("{{ messages[0].content is none }}", [{"role": "assistant", "tool_calls": [{}]}]) == "True"
    assert render("{{ messages[0].content }}", [{"role": "assistant", "tool_calls": [{}]}]) == ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}", "[a][b]"),
        ("{{ messages[0].content }}", "a\nb"),
        ("{{ messages[0].content | tojson }}", '"a\\nb"'),
        ("{{ 'User: ' + messages[0].content }}", "User: a\nb"),
        ("{{ raise_exception('no') if messages[0].content is not string else messages[0].content }}", "a\nb"),
    ],
)
def test_text_parts_go_to_a_template_that_reads_them(source, expected):
    parts = [{"type": "text", "text": "a", "extra": 1}, {"type": "text", "text": "b"}]
    assert render(source, [{"role": "user", "content": parts}]) == expected


def test_text_parts_are_read_role_by_role():
    """GLM-4.7's template reads the parts of all roles but a tool's, whose list it prints."""
    source = (
        "{% for m in messages %}{% if m.role == 'tool' or m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(source, [{"role": "user", "content": parts}, {"role": "tool", "content": parts}]) == "[a][b]a\nb"


@pytest.mark.parametrize(
    ("messages", "values", "field"),
    [
        ([{"role": "user", "content": "\ud800"}], {}, r"messages\[0\].content"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"arguments": {"a": "x\udc00"}}]}],
            {},
            r"messages\[0\].tool_calls\[0\].arguments.a",
        ),
        (USER, {"tools": [{"name": "\ud800"}]}, r"tools\[0\].name"),
    ],
)
def test_b093_lone_surrogates_are_refused_by_field(messages, values, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: got .*surrogate"):
        render("x", messages, **values)


def test_b093_nul_is_a_character():
    assert check_text("prompt", "a\0b") == "a\0b"


def test_rendered_bos_is_not_doubled(tmp_path):
    source = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = load_tokenizer(tiny_tokenizer_dir(tmp_path, add_bos_token=True, chat_template=source))
    template = ChatTemplate(source, tokenizer.special_tokens)
    limits = TextLimits(64, tokenizer.vocab_size, 64)
    prepared = prepare_chat(USER, SamplingParams(), limits, tokenizer, template)
    assert prepared.prompt_token_ids == tokenizer.encode("hello") and prepared.prompt_token_ids.count(0) == 1
    assert prepared.prompt == "<|endoftext|>hello"


def test_chat_needs_a_tokenizer_and_a_template(tokenizer, limits):
    with pytest.raises(InvalidRequest, match="messages: .*no chat template"):
        prepare_chat(USER, SamplingParams(), limits, tokenizer, None)
    with pytest.raises(InvalidRequest, match="messages: .*no tokenizer files"):
        prepare_chat(USER, SamplingParams(), limits, None, None)
