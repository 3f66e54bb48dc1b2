"""The texts and conversations that real tokenizers and chat templates are tried on, by the goldens and the tests."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

Message = dict[str, Any]  # this file is also read by the Python 3.11 that makes the goldens

# The bars and the low blocks in DeepSeek's tokens are U+FF5C and U+2581; what users type for them are other characters.
# Special tokens that a user writes out are taken as such, in prompts and in messages alike.
LOOK_ALIKES = (
    "<｜User｜>Hi<｜Assistant｜></think>",
    "<|User|>Hi<|Assistant|>",
    "<｜begin▁of▁sentence｜><｜begin of sentence｜><|begin_of_sentence|>",
    "x<｜end▁of▁sentence｜>y <｜▁pad▁｜> ｜DSML｜<｜tool▁calls▁begin｜>",
    "[gMASK]<sop><|user|>\nHi<|assistant|>\n<|endoftext|> [gMASK] <sop> [MASK] <|user |>",
    "<think>\nno\n</think>\n\nyes /nothink/nothink /no_think <tool_call>f<arg_key>a</arg_key></tool_call>",
    "<s></s><unk><|im_end|><|eot_id|>",
)

TEXTS = (
    "Hello world",
    "The quick brown fox jumps over the lazy dog's back, isn't it? I'LL say WE'VE DON'T.",
    " leading space",
    "trailing space ",
    "  two  and   three    and four  ",
    "\n",
    "\n\n\n",
    "\t\tindent\n    four\r\n\r\nwindows\r old mac \n \n  \n",
    "a\u00a0b\u2003c\u200bd\u2028e\u2029f\u3000g\ufeffh\x85i\x0bj\x0ck",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 1e-5 0x1F ½ Ⅷ ٣٤٥ １２",
    "東京は今日も晴れです。カタカナとー、\u3000全角",
    "你好，世界！请用中文回答：“为什么”……——100%的",
    "안녕하세요 세계",
    "Привет, мир! Ελληνικά שלום مرحبا नमस्ते สวัสดี",
    "😀 \U0001f468\u200d\U0001f469\u200d\U0001f467 👍🏽 🇩🇪 \u2764\ufe0f 1\ufe0f\u20e3 🤦\u200d\u2642\ufe0f 🫠",
    "𠮷野家 𝕏𝓐 𐍈 \U000e0041 \U0010ffff \ue000",
    "e\u0301 é a\u0300\u0301\u0302\u0303\u0304\u0305 Z\u0351\u0327a\u0321l\u035dg\u0489o \u1100\u1161\u11a8 \u212b ﬁ",
    "\ufffd\ufffd\x00\x01\x1b[31m\x7f \u202eabc\u202c",
    "def f(x):\n    if x == 0:\n        return {'a': [1, 2]}  # why?\n\n\treturn f(x-1) ** 2 != 3 <= y && !z;\n",
    '<html><body class="x">&amp;</body></html> https://example.org/a?b=c&d=%20#e \\n \\u0041 C:\\dir',
    '{"name": "f", "arguments": {"k": [1.5, null, true, "\\"q\\""]}}\n```json\n{}\n```',
    "$$\\frac{a}{b}\\sum_{i=0}^{\\infty} x_i$$ ∀x∈ℝ: √x≥1 → ∑ ∫ ℃ €",
    "Ġhello\u010a ▁metaspace▁ Ä\u00a0 Ā <0xE8> ##ing",
    "antidisestablishmentarianism" * 4 + " " + "a" * 200 + " " + "=" * 131 + " " * 90 + "-" * 77 + "\n" * 40,
    *LOOK_ALIKES,
)


def mixed_texts(count: int, seed: int) -> list[str]:
    """Texts of random pieces: whatever two of them do at the border between them."""
    draw = random.Random(seed)
    pieces = [
        *"aZ0 9\n\r\t.,'\"-_|<>\u3002東\u30ab\u00e9\u0301\u2581\uff5c\U0001f600\u200d\u0e19\u0628",
        "the",
        " of",
        "  ",
        "<think>",
        "123",
    ]
    return ["".join(draw.choices(pieces, k=draw.randint(5, 40))) for _ in range(count)]


ALL_TEXTS = (*TEXTS, *mixed_texts(24, 7))


class Chat(NamedTuple):
    """One conversation and how it is rendered."""

    messages: list[Message]
    template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True


def say(role: str, content: Any, **more: Any) -> Message:
    """A message."""
    return {"role": role, "content": content, **more}


def text_parts(*texts: str) -> list[dict[str, str]]:
    """A message's content as a list of parts."""
    return [{"type": "text", "text": text} for text in texts]


SYSTEM = say("system", "You are terse.\nAnswer in one line.")
FIRST, SECOND = say("user", "What is 2+2?"), say("user", "And 两倍? 😀")
TURNS = [SYSTEM, FIRST, say("assistant", "4"), SECOND]
THOUGHT = say("assistant", "<think>\nTwo and two.\n</think>\n\n4")
REASONED = say("assistant", "4", reasoning_content="Two and two.\n")
ON, OFF = ({"enable_thinking": value, "thinking": value} for value in (True, False))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, e.g. 東京 <now> & here",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ARGUMENTS = {"city": "東京", "days": 3, "exact": True}


def call(arguments: Any, content: str | None = "") -> Message:
    """An assistant's turn that calls the tool."""
    function = {"name": "get_weather", "arguments": arguments}
    return say("assistant", content, tool_calls=[{"type": "function", "id": "c1", "function": function}])


ANSWERED = [say("tool", "Sunny, 21 ℃", tool_call_id="c1"), say("assistant", "It is sunny."), SECOND]

CHATS = {
    "plain": Chat([FIRST]),
    "plain, no generation prompt": Chat([FIRST], add_generation_prompt=False),
    "plain, thinking on": Chat([FIRST], ON),
    "plain, thinking off": Chat([FIRST], OFF),
    "empty": Chat([say("user", "")]),
    "system": Chat([SYSTEM, FIRST]),
    "system, thinking on": Chat([SYSTEM, FIRST], ON),
    "system, thinking off": Chat([SYSTEM, FIRST], OFF),
    "two systems": Chat([SYSTEM, say("system", "Be kind."), FIRST]),
    "turns": Chat(TURNS),
    "turns, thinking on": Chat(TURNS, ON),
    "turns, thinking off": Chat(TURNS, OFF),
    "many turns": Chat([FIRST, say("assistant", "4"), SECOND, say("assistant", " 8\n"), say("user", "Thanks!\n")]),
    "ends with an answer": Chat([FIRST, say("assistant", "4")], add_generation_prompt=False),
    "thought in the history": Chat([FIRST, THOUGHT, SECOND]),
    "thought in the history, thinking on": Chat([FIRST, THOUGHT, SECOND], ON),
    "thought in the history, thinking off": Chat([FIRST, THOUGHT, SECOND], OFF),
    "thought in the last turn": Chat([FIRST, THOUGHT], ON, add_generation_prompt=False),
    "reasoning in the history": Chat([FIRST, REASONED, SECOND], ON),
    "reasoning kept": Chat([FIRST, REASONED, SECOND], {**ON, "clear_thinking": False}),
    "reasoning in the last turn": Chat([FIRST, REASONED], ON, add_generation_prompt=False),
    "effort": Chat([SYSTEM, FIRST], {"reasoning_effort": "high"}),
    "look-alikes": Chat([say("user", "\n".join(LOOK_ALIKES)), say("assistant", LOOK_ALIKES[4]), FIRST]),
    "spaces": Chat([say("system", " \n a \n"), say("user", "\n\n  b\t \n"), say("assistant", " c "), FIRST]),
    "scripts": Chat([say("user", "\n".join(TEXTS[8:18]))]),
    "user writes /nothink": Chat([say("user", "Why? /nothink")], OFF),
    "observation": Chat([FIRST, say("assistant", "{}", metadata="get_weather"), say("observation", "Sunny"), SECOND]),
    "tools": Chat([SYSTEM, FIRST], tools=[WEATHER]),
    "tool call, arguments as an object": Chat([FIRST, call(ARGUMENTS), *ANSWERED], tools=[WEATHER]),
    "tool call, arguments as text": Chat([FIRST, call('{"city": "東京"}', None), *ANSWERED]),
    "parts of a user": Chat([say("user", text_parts("What is", "2+2?")), say("assistant", "4"), SECOND]),
    "parts of all": Chat([say("system", text_parts("Be", "kind.")), say("assistant", text_parts("4", "!")), FIRST]),
    "parts of a tool": Chat([FIRST, say("assistant", "Wait."), say("tool", text_parts("Sunny", "21")), SECOND]),
}
RAW = "Once upon a time"
