"""The serving workloads and their arithmetic, on a driver that takes token requests and says when each token came.

A workload's keys are those of the results file. Requests are sent all at once; every prompt is fresh random ids.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

STEADY_STEPS = 128  # steps that a decode workload averages over
RAGGED_TOKENS = (64, 128, 512, 1024, 2048, 4096)
RAGGED_SEED = 1


class BenchError(Exception):
    """A workload could not be measured; the text is one sentence for the results file."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: so many prompt tokens, exactly so many output tokens."""

    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine under test can hold."""

    max_model_len: int  # tokens
    max_num_seqs: int
    pool_tokens: int
    step_tokens: int  # token budget of a step
    max_chunks: int  # prompts that one step may take a piece of


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What happened to one batch of requests; all times are seconds of the driver's clock."""

    start_s: float  # when they were sent
    token_s: Sequence[np.ndarray]  # per request, float64 [tokens]: when each of its tokens came


class Driver(Protocol):
    """An engine under test, in process or behind a server."""

    limits: Limits

    def run(self, asks: Sequence[Ask], limit_s: float) -> Run:
        """Send all, wait for all. Raises BenchError where one fails or the time is up; nothing is then left running."""
        ...


@dataclass(frozen=True, slots=True)
class Workload:
    """One line of the table in the documentation of results: what is sent, how often, and what is computed of it."""

    keys: tuple[str, ...]
    asks: Callable[[Limits], list[Ask]]
    figures: Callable[[list[Ask], list[Run]], tuple[float, ...]]  # in the order of `keys`
    repeats: int = 1
    together: bool = False  # all requests must be resident at once

    def why_not(self, limits: Limits) -> str | None:
        """None where it can run, else one sentence."""
        asks = self.asks(limits)
        longest = max(ask.prompt_tokens + ask.max_tokens for ask in asks)
        if longest > limits.max_model_len:
            return f"needs {longest} tokens of context, max_model_len is {limits.max_model_len}"
        total = sum(ask.prompt_tokens + ask.max_tokens for ask in asks)
        if self.together and len(asks) > limits.max_num_seqs:
            return f"needs {len(asks)} sequences at once, max_num_seqs is {limits.max_num_seqs}"
        if self.together and total > limits.pool_tokens:
            return f"does not fit: needs {total} tokens of cache, the pool holds {limits.pool_tokens}"
        return None

    def measure(self, driver: Driver, limit_s: float) -> dict[str, float]:
        """Key -> figure. Raises BenchError."""
        asks = self.asks(driver.limits)
        runs = [driver.run(asks, limit_s) for _ in range(self.repeats)]
        return dict(zip(self.keys, self.figures(asks, runs), strict=True))


# What is computed of the runs.


def duration_s(run: Run) -> float:
    """From sending to the last token of all."""
    return max(times[-1] for times in run.token_s) - run.start_s


def wave_rates(asks: list[Ask], runs: list[Run]) -> tuple[float, float]:
    """Requests a second and output tokens a second of the second fastest wave."""
    second_s = sorted(duration_s(run) for run in runs)[1]
    return len(asks) / second_s, sum(ask.max_tokens for ask in asks) / second_s


def single_times(asks: list[Ask], runs: list[Run]) -> tuple[float, float]:
    """Median over the runs of: milliseconds an output token after the first; milliseconds to the first."""
    times = [run.token_s[0] for run in runs]
    tpot_s = statistics.median((time[-1] - time[0]) / (len(time) - 1) for time in times)
    ttft_s = statistics.median(run.token_s[0][0] - run.start_s for run in runs)
    return tpot_s * 1e3, ttft_s * 1e3


def steady_step(asks: list[Ask], runs: list[Run]) -> tuple[float]:
    """Milliseconds between steps in which all sequences decode: the 128 after the last sequence's first token."""
    (run,) = runs
    all_started_s = max(times[0] for times in run.token_s)
    spans_s = []
    for times in run.token_s:
        first = int(np.searchsorted(times, all_started_s))
        if first + STEADY_STEPS >= len(times):
            raise BenchError(f"a sequence ended before {STEADY_STEPS} steps in which all decode")
        spans_s.append(times[first + STEADY_STEPS] - times[first])
    return (float(np.mean(spans_s)) / STEADY_STEPS * 1e3,)


def prompt_rate(asks: list[Ask], runs: list[Run]) -> tuple[float]:
    """Prompt tokens a second, until the last request's one token."""
    return (sum(ask.prompt_tokens for ask in asks) / duration_s(runs[0]),)


def output_rate(asks: list[Ask], runs: list[Run]) -> tuple[float]:
    """Output tokens a second."""
    return (sum(ask.max_tokens for ask in asks) / duration_s(runs[0]),)


# What is sent.


def same(count: int, prompt_tokens: int, max_tokens: int, limits: Limits) -> list[Ask]:
    """`count` equal requests."""
    return [Ask(prompt_tokens, max_tokens)] * count


def steady(count: int, prompt_tokens: int, limits: Limits) -> list[Ask]:
    """Requests long enough that the first still decodes when the last, whose prompt came later, has its 129 tokens."""
    free_tokens = max(limits.step_tokens - count, 1)  # of a step, while all the others decode
    prefill_steps = -(-count * prompt_tokens // free_tokens) + -(-count // limits.max_chunks)
    return [Ask(prompt_tokens, 1 + STEADY_STEPS + prefill_steps + 8)] * count


def ragged(count: int, max_tokens: int, limits: Limits) -> list[Ask]:
    """Prompts of very different lengths, equally often, in a fixed shuffled order; the longest 3072 on short models."""
    longest = RAGGED_TOKENS[-1] if RAGGED_TOKENS[-1] + max_tokens <= limits.max_model_len else 3072
    lengths = np.resize((*RAGGED_TOKENS[:-1], longest), count)
    np.random.default_rng(RAGGED_SEED).shuffle(lengths)
    return [Ask(int(length), max_tokens) for length in lengths]


WORKLOADS: dict[str, Workload] = {
    "c16_256_128": Workload(
        ("c16_256_128_req_s", "c16_256_128_tok_s"), partial(same, 16, 256, 128), wave_rates, repeats=4, together=True
    ),
    "b1_1k": Workload(("b1_1k_tpot_ms", "b1_1k_ttft_ms"), partial(same, 1, 1024, 257), single_times, repeats=3),
    "b16_1k": Workload(("b16_1k_step_ms",), partial(steady, 16, 1024), steady_step, together=True),
    "b64_1k": Workload(("b64_1k_step_ms",), partial(steady, 64, 1024), steady_step, together=True),
    "b256_1k": Workload(("b256_1k_step_ms",), partial(steady, 256, 1024), steady_step, together=True),
    "b16_32k": Workload(("b16_32k_step_ms",), partial(steady, 16, 32768), steady_step, together=True),
    "prefill_8x8192": Workload(("prefill_8x8192_tok_s",), partial(same, 8, 8192, 1), prompt_rate),
    "prefill_16x4000": Workload(("prefill_16x4000_tok_s",), partial(same, 16, 4000, 1), prompt_rate),
    "prefill_16x32k": Workload(("prefill_16x32k_tok_s",), partial(same, 16, 32768, 1), prompt_rate),
    "thr_512x_1k_256": Workload(("thr_512x_1k_256_tok_s",), partial(same, 512, 1024, 256), output_rate),
    "thr_128x_1k_256": Workload(("thr_128x_1k_256_tok_s",), partial(same, 128, 1024, 256), output_rate),
    "thr_256x_ragged_256": Workload(("thr_256x_ragged_256_tok_s",), partial(ragged, 256, 256), output_rate),
    "thr_256x_1312_256": Workload(("thr_256x_1312_256_tok_s",), partial(same, 256, 1312, 256), output_rate),
}


def longest_tokens(names: Sequence[str], limits: Limits) -> int:
    """The context that the named workloads need, at most what the model has; those that need more are left out."""
    needs = [max(ask.prompt_tokens + ask.max_tokens for ask in WORKLOADS[name].asks(limits)) for name in names]
    fitting = [need for need in needs if need <= limits.max_model_len]
    return max(fitting, default=limits.max_model_len)


def chosen(text: str) -> list[str]:
    """Names out of "all" or a comma-separated list of names or keys. Raises BenchError for one that does not exist."""
    if text == "all":
        return list(WORKLOADS)
    by_key = {key: name for name, workload in WORKLOADS.items() for key in workload.keys}
    names = [by_key.get(word, word) for word in (part.strip() for part in text.split(","))]
    for name in names:
        if name not in WORKLOADS:
            raise BenchError(f"--workloads: got {name!r}, allowed: all, or a list out of {', '.join(WORKLOADS)}")
    return list(dict.fromkeys(names))
