"""The library as its users meet it: a tiny model with random weights and a small tokenizer, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError, EngineUnavailable, InvalidRequest, JaxserveError
from tests.fakes.tiny import CONFIG
from tests.fakes.tokenizer import tiny_tokenizer_dir

CONTEXT = 128
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_tokenizer_dir(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 640, "num_hidden_layers": 1}))
    return folder


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    lines: list[str] = []
    with LLM(
        str(model_dir),
        load_format="dummy",
        max_model_len=CONTEXT,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_pages=32,
        device="cpu",
        compile_cache_dir="",
        progress=lines.append,
    ) as llm:
        assert any(line.startswith("compiling") for line in lines)
        yield llm


def test_one_prompt_and_many_in_input_order(llm: LLM) -> None:
    one = llm.generate("The capital of France is", GREEDY)
    assert len(one) == 1 and one[0].finished and one[0].prompt == "The capital of France is"
    assert len(one[0].outputs[0].token_ids) == 6 and one[0].outputs[0].finish_reason == "length"
    prompts = [f"hello {i}" for i in range(9)]
    many = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=1 + i, ignore_eos=True) for i in range(9)])
    assert [result.prompt for result in many] == prompts
    assert [len(result.outputs[0].token_ids) for result in many] == list(range(1, 10))


def test_token_ids_dicts_and_text_mean_the_same(llm: LLM) -> None:
    by_text = llm.generate("hello world", GREEDY)[0]
    ids = by_text.prompt_token_ids
    for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": "hello world"}, [ids]):
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == by_text.outputs[0].token_ids


def test_stream_joins_to_the_whole_and_closing_it_cancels(llm: LLM) -> None:
    whole = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0]
    deltas = list(llm.stream("hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)))
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == whole.token_ids
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    assert llm.generate("hello", GREEDY)[0].finished
    assert llm.stats().live_pages == 0


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (result,) = llm.chat(messages, GREEDY)
    text = llm.tokenizer.decode(result.prompt_token_ids)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([messages, messages], GREEDY)
    assert both[0].outputs[0].token_ids == both[1].outputs[0].token_ids == result.outputs[0].token_ids


def test_logprobs_as_vllm_users_know_them(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=4, logprobs=3, prompt_logprobs=2)
    (result,) = llm.generate("hello world, hello", params)
    output = result.outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(position)) == token and 3 <= len(position) <= 4
        assert all(entry.logprob <= 0 for entry in position.values())
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_b030_choices_differ_repeat_and_start_with_the_only_one(llm: LLM) -> None:
    for seed in (-2, 0, 42, 2**63 - 1):
        params = SamplingParams(n=3, temperature=1.5, seed=seed, max_tokens=12, ignore_eos=True)
        first = [output.token_ids for output in llm.generate("hello", params)[0].outputs]
        again = [output.token_ids for output in llm.generate("hello", params)[0].outputs]
        single = SamplingParams(n=1, temperature=1.5, seed=seed, max_tokens=12, ignore_eos=True)
        assert first == again and len({tuple(ids) for ids in first}) == 3
        assert llm.generate("hello", single)[0].outputs[0].token_ids == first[0]


def test_b047_more_choices_than_slots_run_in_waves(llm: LLM) -> None:
    (result,) = llm.generate("hello", SamplingParams(n=9, max_tokens=3, ignore_eos=True))
    assert [len(output.token_ids) for output in result.outputs] == [3] * 9


def test_cached_pages_change_no_token_and_are_told(llm: LLM) -> None:
    llm.flush_cache()
    rng = np.random.default_rng(1)
    ids = rng.integers(3, 460, 70).tolist()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    cold = llm.generate([ids], replace(params, bypass_prefix_cache=True))[0]
    first, second = (llm.generate([ids], params)[0] for _ in range(2))
    assert [output.num_cached_tokens for output in (cold, first, second)] == [0, 0, 64]
    for output in (first, second):
        assert output.outputs[0].token_ids == cold.outputs[0].token_ids
        pairs = zip(output.outputs[0].logprobs, cold.outputs[0].logprobs, strict=True)
        assert all(
            mine[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
            for mine, theirs in pairs
            for token, entry in list(theirs.items())[:1]
        )
    choices = llm.generate([ids], replace(params, n=3))[0]
    assert choices.num_cached_tokens == 64
    assert all(output.token_ids == cold.outputs[0].token_ids for output in choices.outputs)


def test_the_next_turn_finds_the_answer_of_the_last(llm: LLM) -> None:
    llm.flush_cache()
    history = np.random.default_rng(2).integers(3, 460, 20).tolist()
    for turn in range(4):
        params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
        answer = llm.generate([history], params)[0]
        cold = llm.generate([history], replace(params, bypass_prefix_cache=True))[0]
        assert answer.outputs[0].token_ids == cold.outputs[0].token_ids
        assert answer.num_cached_tokens == (len(history) - 6) // 16 * 16 if turn else not answer.num_cached_tokens
        history += [*answer.outputs[0].token_ids, *range(5 + turn, 10 + turn)]


def test_b002_salts_and_flushes_part_what_is_shared(llm: LLM) -> None:
    ids = np.random.default_rng(3).integers(3, 460, 40).tolist()

    def cached(**fields: object) -> int:
        return llm.generate([{"prompt_token_ids": ids, **fields}], GREEDY)[0].num_cached_tokens

    llm.flush_cache()
    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="")] == [0, 32, 0, 0]
    assert [cached(cache_salt="a"), cached(cache_salt=""), cached(cache_salt="b")] == [32, 32, 0]
    stats = llm.stats()
    llm.flush_cache()
    assert [cached(), cached()] == [0, 32]
    assert llm.stats().prefix_hit_tokens_total == stats.prefix_hit_tokens_total + 32
    assert llm.stats().compilations_after_warmup_total == 0
    with pytest.raises(InvalidRequest, match="cache_salt: got 5"):
        cached(cache_salt=5)


def test_stop_strings_end_the_request_and_free_its_slot(llm: LLM) -> None:
    whole = llm.generate("hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0].text
    stop = whole[5:8]
    (result,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=100, stop=stop))
    assert result.outputs[0].text == whole[: whole.index(stop)]
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", stop)
    assert llm.generate("hello", GREEDY)[0].finished


def test_a_bad_prompt_among_good_ones_runs_nothing(llm: LLM) -> None:
    before = llm.stats().prompt_tokens_total
    with pytest.raises(InvalidRequest, match="prompt_token_ids: got 1000 tokens, allowed: at most 127 tokens"):
        llm.generate(["hello", [5] * 1000], GREEDY)
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate("", GREEDY)
    with pytest.raises(InvalidRequest, match="prompt: got"):
        llm.generate({"text": "hello"}, GREEDY)
    with pytest.raises(InvalidRequest, match="sampling_params: got '1 of them', allowed: one, or 2"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.stats().prompt_tokens_total == before


def test_b039_max_tokens_is_clipped_to_the_context(llm: LLM) -> None:
    ids = [5] * 8
    (result,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == CONTEXT - 8 and result.outputs[0].finish_reason == "length"


def test_async_forms_run_side_by_side(llm: LLM) -> None:
    async def both() -> list[list[int]]:
        results = await asyncio.gather(*(llm.generate_async("hello", GREEDY) for _ in range(3)))
        return [result.outputs[0].token_ids for result in results]

    assert asyncio.run(both()) == [llm.generate("hello", GREEDY)[0].outputs[0].token_ids] * 3


def test_nothing_compiles_while_serving(llm: LLM) -> None:
    before = llm.stats().compilations_after_warmup_total
    llm.generate(["a", "bb ccc"], SamplingParams(temperature=0.5, top_p=0.9, logprobs=2, max_tokens=3))
    assert llm.stats().compilations_after_warmup_total == before


def test_without_a_tokenizer_ids_work_and_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    options = dict(load_format="dummy", max_num_seqs=1, max_num_batched_tokens=16, num_pages=8, compile_cache_dir="")
    with LLM(str(tmp_path), device="cpu", max_model_len=64, **options) as llm:
        assert len(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids) == 6
        with pytest.raises(InvalidRequest, match="no tokenizer files"):
            llm.generate("hello", GREEDY)
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate([[5]], GREEDY)


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        ({"model_type": "gpt2"}, {}, "config.json: model_type is 'gpt2', supported: "),
        ({"hidden_size": None}, {}, "config.json: hidden_size is None, expected: int"),
        ({}, {"max_model_len": 10_000}, "--max-model-len: got 10000, allowed: at most 256"),
        ({}, {"attention": "triton"}, "--attention: "),
        ({}, {"num_seqs": 3}, "num_seqs: no such option"),
    ],
)
def test_what_cannot_work_is_one_sentence(tmp_path: Path, config: dict, options: dict, sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises(JaxserveError) as error:
        LLM(str(tmp_path), load_format="dummy", device="cpu", compile_cache_dir="", num_pages=8, **options)
    assert str(error.value).startswith(sentence)
    assert not isinstance(error.value, ConfigError) or "\n" not in str(error.value)
