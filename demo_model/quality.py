"""Takes a served model and held-out texts; gives what is known of its quality, as plain numbers for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from demo_model.train.loss import hidden_states
from jaxserve.layers.rows import Rows
from jaxserve.llm import LLM
from jaxserve.models.decoder import SplitDecoder
from jaxserve.request import RequestOutput, SamplingParams

SHOWN = 5  # wrong answers of each kind that are kept to be read
BATCH_ROWS = 16  # of sequences whose drafts are computed together


class Question(Protocol):
    """One held-out conversation and what its next answer must be."""

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """As a client sends them."""
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None:
        """Schemas that the chat template prints."""
        ...

    @property
    def checker(self) -> Callable[[str], bool]:
        """Whether an answer is right; it is given the text with special tokens, without the EOS."""
        ...


def documents_of(token_NC: np.ndarray, bos_token_id: int, count: int) -> list[list[int]]:
    """The first `count` documents that stand whole in their row: from a BOS to before the next one."""
    found: list[list[int]] = []
    for row_C in token_NC.tolist():
        starts = [at for at, token in enumerate(row_C) if token == bos_token_id]
        found += [row_C[start:stop] for start, stop in pairwise(starts) if stop - start > 1]
        if len(found) >= count:
            break
    return found[:count]


def perplexity(llm: LLM, documents: Sequence[Sequence[int]]) -> dict[str, float]:
    """Over every token of the documents but their BOS, through the engine's own logprobs of prompts."""
    prompts = [{"prompt_token_ids": list(document)} for document in documents]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    nats, tokens = 0.0, 0
    for output, document in zip(llm.generate(prompts, params), documents, strict=True):
        entries = output.prompt_logprobs or []
        for token, entry in zip(document[1:], entries[1:], strict=True):
            assert entry is not None
            nats, tokens = nats - entry[token].logprob, tokens + 1
    mean = nats / max(tokens, 1)
    return {"perplexity": math.exp(mean), "nats": mean, "tokens": tokens, "documents": len(documents)}


def answers(llm: LLM, questions: Sequence[Question], params: SamplingParams) -> list[RequestOutput]:
    """What the model says to each; those with the same tools go in together."""
    found: dict[int, RequestOutput] = {}
    by_tools: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        by_tools.setdefault(repr(question.tools), []).append(index)
    for indices in by_tools.values():
        kwargs = {"tools": list(questions[indices[0]].tools or ())} if questions[indices[0]].tools else None
        conversations = [list(questions[index].messages) for index in indices]
        found |= dict(zip(indices, llm.chat(conversations, params, template_kwargs=kwargs), strict=True))
    return [found[index] for index in range(len(questions))]


def answer_rates(
    llm: LLM, groups: Mapping[str, Sequence[Question]], max_tokens: int
) -> tuple[dict[str, dict[str, Any]], list[RequestOutput]]:
    """Of each kind of question the share of greedy answers that are right, and some wrong ones; all the answers too."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, skip_special_tokens=False)
    rates, said = {}, []
    for kind, questions in groups.items():
        outputs = answers(llm, questions, params)
        texts = [visible(llm, output) for output in outputs]
        right = [bool(question.checker(text)) for question, text in zip(questions, texts, strict=True)]
        wrong = [
            {"asked": question.messages[-1].get("content"), "answered": text}
            for question, text, ok in zip(questions, texts, right, strict=True)
            if not ok
        ]
        rates[kind] = {"rate": sum(right) / max(len(right), 1), "asked": len(right), "wrong": wrong[:SHOWN]}
        said += outputs
    return rates, said


def visible(llm: LLM, output: RequestOutput) -> str:
    """An answer's text without the EOS that may end it."""
    tokens = output.outputs[0].token_ids
    while tokens and tokens[-1] in llm.limits.eos_token_ids:
        tokens = tokens[:-1]
    return llm.tokenizer.decode(tokens, skip_special_tokens=False)


def distinct(texts: Sequence[str], n: int) -> float:
    """Distinct word n-grams as a share of all, over the texts together (distinct-n, arXiv 1510.03055)."""
    grams = [gram for text in texts for gram in zip(*[text.split()[i:] for i in range(n)], strict=False)]
    return len(set(grams)) / max(len(grams), 1)


def acceptance(
    split: SplitDecoder, leaves: Sequence[jax.Array], outputs: Sequence[RequestOutput], bos_token_id: int
) -> dict[str, float]:
    """How often the MTP layer's most likely token is the one that the model itself said next, over greedy answers.

    That is the chance that a first draft token is accepted. An answer's first token is not drafted: the draft for token
    t+2 needs the model's output at t, the prompt's last token at the earliest, and token t+1.
    """
    said = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    said = [(prompt, answer) for prompt, answer in said if len(answer) > 1]
    longest = -(-max((len(prompt) + len(answer) for prompt, answer in said), default=1) // 64) * 64

    @jax.jit
    def draft(leaves: list[jax.Array], token_IC: jax.Array) -> jax.Array:
        model = split.merge(leaves)
        _, mtp_TD = hidden_states(model, token_IC, Rows.of(token_IC, bos_token_id))
        assert mtp_TD is not None
        return model.logits(mtp_TD).argmax(axis=1).reshape(token_IC.shape)

    accepted = drafted = 0
    for start in range(0, len(said), BATCH_ROWS):
        batch = said[start : start + BATCH_ROWS]
        token_IC = np.full((BATCH_ROWS, longest), bos_token_id, np.int32)
        for row_C, (prompt, answer) in zip(token_IC, batch, strict=False):
            row_C[: len(prompt) + len(answer)] = [*prompt, *answer]
        draft_IC = np.asarray(draft(list(leaves), jnp.asarray(token_IC)))
        for row_C, (prompt, answer) in zip(draft_IC, batch, strict=False):
            first = len(prompt) - 1
            accepted += int((row_C[first : first + len(answer) - 1] == np.array(answer[1:])).sum())
            drafted += len(answer) - 1
    return {"rate": accepted / max(drafted, 1), "drafted": drafted}
