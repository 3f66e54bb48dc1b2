"""The demo model's corpus: deterministic, its splits apart, and every answer in it right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from demo_model.corpus import arithmetic, evaluation, facts, mix, phrasing, smalltalk, tool_calls, unknown
from demo_model.corpus.document import BOS, EOS, Chat, Prose, Renderer, ask, call, result, user
from demo_model.corpus.pack import OUTPUT_BEGIN, OUTPUT_END, token_rows
from demo_model.corpus.stories.tell import TOPICS, plots, story
from demo_model.corpus.tables.rows import groups, table

TOKENIZER = Path(__file__).parents[2] / "checkpoints" / "demo" / "tokenizer.json"
RENDER = Renderer()
MAKERS: dict[str, Callable[[Random, bool], Chat]] = {
    "facts": facts.document,
    "arithmetic": arithmetic.document,
    "unknown": unknown.document,
    "small talk": smalltalk.document,
    "tool calls": tool_calls.document,
}


def first_question(chat: Chat) -> str:
    return next(message["content"] for message in chat.messages if message["role"] == "user")


def test_a_document_is_a_function_of_split_seed_and_number() -> None:
    some = [RENDER(one) for one in mix.documents("train", 1, 0, 60)]
    assert [RENDER(one) for one in mix.documents("train", 1, 20, 40)] == some[20:]
    assert [RENDER(one) for one in mix.documents("train", 2, 0, 60)] != some
    with pytest.raises(ValueError, match="split: got 'test', allowed: 'train', 'validation'"):
        next(mix.documents("test", 1, 0, 1))


@pytest.mark.parametrize("maker", ["facts", "arithmetic", "unknown", "tool calls"])
def test_no_held_out_question_is_ever_trained_on(maker: str) -> None:
    make = MAKERS[maker]
    taught = {first_question(make(Random(n), False)) for n in range(3000)}
    assert not taught & {first_question(make(Random(n), True)) for n in range(1000)}


def test_no_gap_stays_open() -> None:
    for name, (make, _) in mix.SHARES.items():
        for n in range(300):
            text = RENDER(make(Random(f"{name} {n}"), n % 2 == 1))
            assert text.startswith(BOS) and text.endswith(EOS)
            assert not re.search(r"\{[a-z_0-9]*\}", text.replace("{}", "")), text


def test_sums_are_right_and_held_out_pairs_apart() -> None:
    for n in range(2000):
        made = arithmetic.make_sum(Random(n), n % 2 == 1)
        assert arithmetic.is_held_out(made.operation, made.x, made.y) == (n % 2 == 1)
        thought = arithmetic.thoughts(made)
        for left, sign, right, value in re.findall(
            r"(?<![+-] )\b(\d+) ([+x-]) (\d+) = (\d+)[,.]", thought + made.answer
        ):
            x, y = int(left), int(right)
            assert int(value) == {"+": x + y, "-": x - y, "x": x * y}[sign]
        assert re.findall(r"\d+", thought)[-1] == str(made.value)


def test_every_call_is_valid_json_for_a_tool_of_its_prompt() -> None:
    for n in range(500):
        made = tool_calls.request(Random(n), n % 2 == 1)
        text = RENDER(Chat((*made.messages, call(made.name, made.arguments)), made.tools))
        answer = text.split("</think>", 1)[1].removesuffix(EOS)
        assert evaluation.is_right_call(made, answer), f"{made.name}: {made.arguments}"


@pytest.mark.parametrize(
    "change", [("{", "["), ('":', '"_x":'), ("call\u2581end", "call\u2581begin"), ('{"', '{"more": 1, "')], ids=str
)
def test_a_wrong_call_is_not_valid(change: tuple[str, str]) -> None:
    made = tool_calls.request(Random(3))
    answer = RENDER(Chat((*made.messages, call(made.name, made.arguments)), made.tools))
    answer = answer.split("</think>", 1)[1].removesuffix(EOS)
    assert not evaluation.is_valid_call(made.tools, answer.replace(*change, 1))
    assert not evaluation.is_valid_call(made.tools, f"Of course! {answer}")


def test_checks_of_answers() -> None:
    assert evaluation.holds("Paris", "The capital of France is Paris.")
    assert not evaluation.holds("I", "The chemical symbol of iodine is In.")
    assert evaluation.is_value(85, "47 + 38 = 85.") and not evaluation.is_value(85, "47 + 38 = 185.")
    assert evaluation.admits("I don't know. I cannot see the future.") and not evaluation.admits("It is Paris.")


def test_question_sets_hold_what_they_say() -> None:
    sets = evaluation.question_sets(1)
    assert {len(questions) for questions in sets.values()} == {evaluation.ASKED_EACH}
    assert all(not question.checker("") for questions in sets.values() for question in questions)
    again = evaluation.question_sets(1)["facts"]
    assert [one.messages for one in sets["facts"]] == [one.messages for one in again]


def test_facts_contradict_nothing() -> None:
    for name in ("countries", "opposites", "plurals", "past", "elements", "young", "sounds", "colours"):
        first = [row[0] for row in table(name)]
        assert len(set(first)) == len(first), name
    assert all(len(set(words)) == len(words) for words in groups("kinds").values())
    assert all(len(row) == 3 for name in ("countries", "elements", "short") for row in table(name))


def test_stories_are_all_different_and_of_a_readable_length() -> None:
    stories = [story(Random(n), TOPICS[n % len(TOPICS)] if n % 2 else None) for n in range(600)]
    assert len(set(stories)) == len(stories)
    assert all(60 < len(text.split()) < 300 for text in stories)
    assert not [text for text in stories if re.search(r"\b[Aa] [aeiou](?!ne)|\b[Aa]n (?!hour)[^aeiouAEIOU]", text)]
    assert all(len(moment) >= 2 or moment[0].count(".") for plot in plots() for moment in plot)


@pytest.mark.parametrize("topic", ["fox", "kite", "lake"])
def test_a_story_is_about_its_topic(topic: str) -> None:
    assert all(topic in story(Random(n), topic) for n in range(50))


def test_dressed_questions_keep_their_words() -> None:
    for n in range(200):
        assert "capital of france" in phrasing.dressed("Tell me the capital of France.", Random(n)).lower()


def test_the_template_prints_deepseek_v31s_form() -> None:
    thinking = RENDER(ask("2 + 2", "2 + 2 = 4.", "I compute 2 + 2. That is 4."))
    assert thinking == f"{BOS}<｜User｜>2 + 2<｜Assistant｜><think>I compute 2 + 2. That is 4.</think>2 + 2 = 4.{EOS}"
    assert RENDER(ask("Hi!", "Hello!")) == f"{BOS}<｜User｜>Hi!<｜Assistant｜></think>Hello!{EOS}"
    assert RENDER(Prose("Once.")) == f"{BOS}Once.{EOS}"
    called = Chat((user("Time?"), call("clock", "{}"), result("9:00"), {"role": "assistant", "content": "It is 9:00."}))
    assert RENDER(called) == (
        f"{BOS}<｜User｜>Time?<｜Assistant｜></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}"
        f"<｜tool▁call▁end｜><｜tool▁calls▁end｜>{EOS}{OUTPUT_BEGIN}9:00{OUTPUT_END}It is 9:00.{EOS}"
    )


def test_rows_are_whole_documents_whatever_the_processes() -> None:
    ids, targets = token_rows(TOKENIZER, "train", 7, 130, 512, 1)
    again = token_rows(TOKENIZER, "train", 7, 130, 512, 2)
    np.testing.assert_array_equal(ids, again[0])
    np.testing.assert_array_equal(targets, again[1])
    assert ids.shape == targets.shape == (130, 512) and ids.dtype == np.uint16
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    begin, end, bos = (tokenizer.token_to_id(text) for text in (OUTPUT_BEGIN, OUTPUT_END, BOS))
    assert (ids[:, 0] == bos).all() and not targets[ids == bos].any()
    assert targets.mean() > 0.85
    row, at = np.argwhere(ids == begin)[0]
    stop = at + int(np.argmax(ids[row, at:] == end))
    assert not targets[row, at : stop + 1].any() and targets[row, stop + 1]


def test_the_tokenizer_keeps_digits_apart_and_gives_back_any_text() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert tokenizer.get_vocab_size() <= 8192
    text = "Grüße, 你好! 1234 <think>\n\n\tx = [1, 2]; 🙂"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert [token for token in encoded.tokens if token.isdigit()] == list("123412")
    assert json.loads(TOKENIZER.read_text(encoding="utf-8"))["model"]["type"] == "BPE"
