#!/usr/bin/env python3
"""Check that tokens and logprobs are the same to the bit alone, together and in other company, on the device at hand.

    scripts/check_deterministic.py CONFIG_DIR --deterministic --max-num-seqs 44 --max-model-len 4096

Random weights unless --load-format says otherwise; engine flags are those of `jaxserve serve`. Without --deterministic
it shows how much differs. Exits with 1 where anything does.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from jaxserve import LLM, RequestOutput, SamplingParams, cli  # noqa: E402

LENGTHS = (5, 33, 64, 130, 700, 1100)  # prompt tokens, in turn; the last ones take several chunks of small budgets
TOP = 5

Request = tuple[list[int], SamplingParams]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    flag = parser.add_argument
    flag("--requests", type=int, default=48, help="that are sent together (default: 48)")
    flag("--rounds", type=int, default=5, help="times that they are sent (default: 5)")
    flag("--alone", type=int, default=6, help="so many of them are sent one by one, too (default: 6)")
    flag("--tokens", type=int, default=48, help="output tokens of each (default: 48)")
    cli.add_model_flags(parser)
    parser.set_defaults(load_format="dummy")
    return parser


def make_requests(count: int, tokens: int, longest: int, vocab_size: int, seed: int = 0) -> list[Request]:
    """Greedy ones, drawn ones, filtered ones, in turn; of each some that want their prompt scored."""
    random = np.random.default_rng(seed)
    kinds: list[dict] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}]
    requests = []
    for i in range(count):
        length = max(1, min(LENGTHS[(i + seed) % len(LENGTHS)], longest - tokens))
        scored = 2 if i % 7 == 6 else None
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, seed=i, logprobs=TOP, prompt_logprobs=scored, **kinds[i % len(kinds)]
        )
        requests.append((random.integers(0, vocab_size, length).tolist(), params))
    return requests


def run(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    """All of them at once."""
    return llm.generate([ids for ids, _ in requests], [params for _, params in requests])


def differences(wanted: Sequence[RequestOutput], found: Sequence[RequestOutput]) -> tuple[int, int]:
    """Requests whose ids differ, and those where any number does: floats are compared as they are."""
    pairs = [*zip(wanted, found, strict=True)]
    ids = sum(a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in pairs)
    numbers = sum(
        (a.outputs[0].logprobs, a.prompt_logprobs) != (b.outputs[0].logprobs, b.prompt_logprobs) for a, b in pairs
    )
    return ids, numbers


def check(llm: LLM, args: argparse.Namespace) -> int:
    """Print a line for each comparison; returns how many failed."""
    limits = llm.limits
    requests = make_requests(args.requests, args.tokens, limits.max_model_len, limits.vocab_size)
    strangers = make_requests(args.requests, args.tokens // 2 + 1, limits.max_model_len, limits.vocab_size, seed=1)
    wanted = run(llm, requests)
    trials = {f"round {number}": (lambda: run(llm, requests)) for number in range(2, args.rounds + 1)}
    trials["among strangers"] = lambda: run(llm, [*strangers, *requests])[len(strangers) :]
    trials["the other way round"] = lambda: run(llm, requests[::-1])[::-1]
    trials["one by one"] = lambda: [run(llm, [request])[0] for request in requests[: args.alone]]
    failed = 0
    for name, trial in trials.items():
        start_s = time.monotonic()
        found = trial()
        ids, numbers = differences(wanted[: len(found)], found)
        failed += ids + numbers > 0
        took_s = time.monotonic() - start_s
        print(
            f"{name}: of {len(found)} requests {ids} differ in ids, {numbers} in logprobs ({took_s:.1f} s)", flush=True
        )
    return failed


def main(argv: Sequence[str]) -> int:
    """0 where nothing differs."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    with LLM(args.model, **cli.options_from(args)) as llm:
        failed = check(llm, args)
        stats = llm.stats()
        print(f"steps {stats.step_count}, preemptions {stats.preemptions_total}, {'FAILED' if failed else 'all equal'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
