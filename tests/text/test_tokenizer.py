"""Loading tokenizers, and text to ids and back."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError, InvalidRequest, ModelError
from jaxserve.text.tokenizer import load_tokenizer, may_shrink, part_json, read_eos_ids
from tests.fakes.tokenizer import tiny_metaspace_dir, tiny_tokenizer_dir

TEXTS = ["hello world", " hello", "a\n b", "東京は今日 😀", "", "\0", "<|im_end|>x</s>", "the cat  hello"]


@pytest.mark.parametrize("text", TEXTS)
def test_decode_gives_the_text_back(tokenizer, metaspace, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert metaspace.decode(metaspace.encode(text), skip_special_tokens=True) == text.replace("</s>", "")


@given(st.lists(st.integers(0, 300), max_size=12))
def test_decode_equals_the_library_where_bytes_are_whole(ids):
    """The library shows broken bytes of a byte-fallback tokenizer one by one; we show maximal parts."""
    for loaded in LOADED:
        backend = loaded._backend
        theirs = backend.decode(ids, skip_special_tokens=True)
        if "\ufffd" not in theirs:
            assert loaded.decode(ids, skip_special_tokens=True) == theirs


@pytest.fixture(scope="module", autouse=True)
def loaded_for_property_tests(tokenizer, metaspace):
    LOADED[:] = [tokenizer, metaspace]


LOADED: list = []


def test_bos_is_added_by_the_post_processor_or_by_the_flag(tokenizer, metaspace, tmp_path):
    assert metaspace.encode("the")[0] == metaspace.bos_id == 1
    assert metaspace.encode("the", add_special_tokens=False)[0] != 1
    assert tokenizer.encode("the") == tokenizer.encode("the", add_special_tokens=False)
    flagged = load_tokenizer(tiny_tokenizer_dir(tmp_path / "a", add_bos_token=True))
    assert flagged.encode("the") == [0, *tokenizer.encode("the")]
    unflagged = load_tokenizer(tiny_metaspace_dir(tmp_path / "b", add_bos_token=False))
    assert unflagged.encode("the") == metaspace.encode("the", add_special_tokens=False)


def test_a_text_that_begins_with_bos_gets_no_second_one(metaspace, tmp_path):
    flagged = load_tokenizer(tiny_tokenizer_dir(tmp_path, add_bos_token=True))
    assert flagged.encode("<|endoftext|>the") == flagged.encode("the") and flagged.encode("")[:1] == [0]
    assert metaspace.encode("<s>the").count(1) == 1 and metaspace.encode("the<s>").count(1) == 2


def test_what_the_post_processor_adds_stands_on_both_sides(tmp_path):
    path = tiny_tokenizer_dir(tmp_path)
    file = path / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> <|im_start|> $A <|im_end|>",
        special_tokens=[("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    backend.save(str(file))
    loaded = load_tokenizer(path)
    plain = loaded.encode("the cat", add_special_tokens=False)
    assert loaded.encode("the cat") == [0, 1, *plain, 2] == backend.encode("the cat").ids
    assert loaded.encode("") == [0, 1, 2] and loaded.encode("<|endoftext|>the cat") == [0, 1, 0, *plain, 2]
    assert loaded.encode("<|endoftext|><|im_start|>the cat") == [0, 1, *plain, 2]


def test_continuation_has_no_space_of_its_own(metaspace, tokenizer):
    for text in ("the", " the"):
        for loaded in (metaspace, tokenizer):
            assert "".join(map(loaded.token_text, loaded.continuation(text))) == text
    assert "".join(map(metaspace.token_text, metaspace.encode("the", add_special_tokens=False))) == " the"


def test_special_tokens_and_template_come_from_the_config(tokenizer):
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.eos_id == 2 and tokenizer.is_special(3) and not tokenizer.is_special(4)
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert "im_start" in tokenizer.chat_template
    assert tokenizer.token_text(2) == "<|im_end|>" and tokenizer.token_text(10**9) == ""


def test_template_file_wins_over_the_config_and_a_list_has_a_default(tmp_path):
    path = tiny_tokenizer_dir(
        tmp_path, chat_template=[{"name": "x", "template": "X"}, {"name": "default", "template": "D"}]
    )
    assert load_tokenizer(path).chat_template == "D"
    (path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(path).chat_template == "file"


def test_tokens_that_only_the_config_names_are_added(tmp_path, tokenizer):
    extra = {str(tokenizer.vocab_size): {"content": "<think>", "special": False}}
    loaded = load_tokenizer(tiny_tokenizer_dir(tmp_path, added_tokens_decoder=extra))
    assert loaded.encode("<think>") == [tokenizer.vocab_size] and loaded.vocab_size == tokenizer.vocab_size + 1
    assert not loaded.is_special(tokenizer.vocab_size) and loaded.decode([tokenizer.vocab_size]) == "<think>"


def test_directory_without_tokenizer_files_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(CheckpointError, match="not a directory"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{"), ("tokenizer_config.json", "{"), ("tokenizer_config.json", "[]")]
)
def test_damaged_file_is_named(tmp_path, name, content):
    path = tiny_tokenizer_dir(tmp_path)
    (path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(path)


def test_unknown_decoder_is_named(tmp_path):
    backend = Backend(models.BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_decode_refuses_ids_that_do_not_exist(tokenizer):
    with pytest.raises(
        InvalidRequest, match=f"token_ids: got 100000, allowed: ids from 0 to {tokenizer.vocab_size - 1}"
    ):
        tokenizer.decode([100_000])


def test_b089_long_text_is_judged_without_encoding_all_of_it(tokenizer):
    start_s = time.process_time()
    assert tokenizer.over_limit("hello world " * 5_000_000, 64) > 64
    assert time.process_time() - start_s < 1.0
    assert tokenizer.over_limit("hello " * 1000, 64) > 64  # by its beginning
    assert tokenizer.over_limit("hello " * 20, 64) is None


@given(st.text("ab hello\n東é", max_size=600), st.integers(1, 40))
def test_b089_judgement_is_never_wrong(text, limit_tokens):
    least_tokens = LOADED[0].over_limit(text, limit_tokens)
    if least_tokens is not None:
        assert limit_tokens < least_tokens <= len(LOADED[0].encode(text))


def test_eos_ids_are_those_of_all_files(tmp_path, tokenizer):
    assert read_eos_ids(tmp_path, None) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert read_eos_ids(tmp_path, tokenizer) == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 9]}')
    assert read_eos_ids(tmp_path, tokenizer) == (1, 2, 7, 9)
    (tmp_path / "config.json").write_text('{"eos_token_id": null, "text_config": {"eos_token_id": [5, 9]}}')
    assert read_eos_ids(tmp_path, tokenizer) == (1, 2, 5, 9)


@pytest.mark.parametrize("given", ['"</s>"', "[1, null]", "true", "{}", "1.5"])
def test_eos_ids_that_are_none_are_named(tmp_path, given):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {given}}}')
    with pytest.raises(CheckpointError, match="generation_config.json: eos_token_id is .*, expected: an id or a list"):
        read_eos_ids(tmp_path, None)


def test_older_files_are_converted(tmp_path, tokenizer):
    model = json.loads((tiny_tokenizer_dir(tmp_path / "new") / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n")
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    (old / "config.json").write_text('{"model_type": "gpt2"}')
    converted = load_tokenizer(old)
    assert converted.encode("hello world 東") == tokenizer.encode("hello world 東")
    assert converted.eos_id == 0


def test_older_files_that_do_not_convert_say_why(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="older tokenizer files do not convert: "):
        load_tokenizer(tmp_path)


def test_text_rooms_import_neither_transformers_nor_jax():
    code = "import sys, jaxserve.text.front; print({'jax', 'transformers', 'torch', 'grpc'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("normalizer", "shrinks"),
    [
        (None, False),
        (normalizers.Sequence([]), False),
        (normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]), False),
        (normalizers.NFC(), True),
        (normalizers.Sequence([normalizers.Replace("  ", "")]), True),
        (normalizers.Replace(Regex(" +"), " "), True),
    ],
)
def test_b089_normalizers_that_shorten_a_text_are_known(normalizer, shrinks):
    assert may_shrink(part_json(normalizer)) is shrinks
