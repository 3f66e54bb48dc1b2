"""The roofline report's contents: takes what bench_serve.py and bench_step.py wrote, gives a model's rows and profiles.

Nothing here runs on a device, so that committed figures can be shown anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from jaxserve.models.spec import ModelSpec
from scripts._bench_workloads import BenchError
from scripts._kernel_classes import StepTime, split_step
from scripts._roofline import WORKLOAD_OF, Weights, decode_s, limit

OVER_GRPC = " (grpc)"  # what bench_serve.py adds to the name of a model that it reached through a server

# What the table calls the figures of a results file, in its order; c16's tokens are its requests times 128.
LABELS = {
    "c16_256_128_req_s": "16 requests at once, 256 in, 128 out: requests/s",
    "b1_1k_tpot_ms": "1 request, 1024 in: ms a token",
    "b1_1k_ttft_ms": "1 request, 1024 in: ms to the first token",
    "b16_1k_step_ms": "decode step, 16 at 1024 tokens: ms",
    "b64_1k_step_ms": "decode step, 64 at 1024 tokens: ms",
    "b256_1k_step_ms": "decode step, 256 at 1024 tokens: ms",
    "b16_32k_step_ms": "decode step, 16 at 32,768 tokens: ms",
    "prefill_8x8192_tok_s": "prefill, 8 prompts of 8192: tokens/s",
    "prefill_16x4000_tok_s": "prefill, 16 prompts of 4000: tokens/s",
    "prefill_16x32k_tok_s": "prefill, 16 prompts of 32,768: tokens/s",
    "thr_512x_1k_256_tok_s": "512 requests, 1024 in, 256 out: tokens/s",
    "thr_128x_1k_256_tok_s": "128 requests, 1024 in, 256 out: tokens/s",
    "thr_256x_ragged_256_tok_s": "256 requests, 64 to 4096 in, 256 out: tokens/s",
    "thr_256x_1312_256_tok_s": "256 requests, 1312 in, 256 out: tokens/s",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a model beside what it is measured against; None: there is none. All in the figure's own unit."""

    key: str
    ours: float | None
    vllm: float | None
    goal: float | None
    limit: float | None
    conditions: Mapping[str, Any]  # of our figure; empty where there is none

    def share(self, value: float | None) -> float | None:
        """How much of the limit a figure reaches, 1.0 being all of it; times count by their inverse."""
        if value is None or self.limit is None:
            return None
        return self.limit / value if self.key.endswith("_ms") else value / self.limit

    @property
    def against_vllm(self) -> float | None:
        """Our speed over vLLM's: above 1 we are faster."""
        if self.ours is None or self.vllm is None:
            return None
        return self.vllm / self.ours if self.key.endswith("_ms") else self.ours / self.vllm

    @property
    def reaches_goal(self) -> bool:
        """Whether our figure is at the goal or past it."""
        if self.ours is None or self.goal is None:
            return False
        return self.ours <= self.goal if self.key.endswith("_ms") else self.ours >= self.goal


@dataclass(frozen=True, slots=True)
class Profile:
    """A decode step by kernel class, with the conditions of its measurement and the limit of the same work."""

    time: StepTime
    context_tokens: int
    limit_us: float | None  # None: not measured on one of the devices that the limit is of
    source: str  # device, date and commit


@dataclass(frozen=True, slots=True)
class Report:
    """All that a page shows of one model."""

    name: str
    title: str
    rows: list[Row]
    left_out: Mapping[str, str]  # workload -> reason
    profiles: list[Profile]


def read_table(flag: str, path: Path) -> dict[str, Any]:
    """A JSON file that holds a table. Raises BenchError, one sentence, for anything else."""
    try:
        table = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"{flag}: {path} cannot be read ({error.strerror}), allowed: a results file") from None
    except ValueError as error:
        raise BenchError(f"{flag}: {path} holds no JSON ({error}), allowed: a results file") from None
    if not isinstance(table, dict):
        raise BenchError(f"{flag}: {path} holds no table, allowed: a results file")
    return table


def make_report(
    name: str, spec: ModelSpec, entry: Mapping[str, Any], steps: Mapping[str, Any], peers: Mapping[str, Any]
) -> Report:
    """One model's entry of a results file, and all entries of a file of steps -> its report.

    vLLM's figures, goals and limits are of one device; they stand beside ours only where ours are of such a device.
    """
    base = name.removesuffix(OVER_GRPC)
    measured = entry.get("measured", {})
    comparable = all(
        (run.get("device"), run.get("num_devices", 1)) == (peers["device"], 1) for run in measured.values()
    )
    vllm, goals = (peers[part].get(base, {}) if comparable else {} for part in ("vllm", "goals"))
    rows = []
    for key in LABELS:
        ours = entry.get(key)
        if ours is not None or key in vllm or key in goals:
            bound = limit(spec, key) if comparable else None
            conditions = measured.get(WORKLOAD_OF[key], {}) if ours is not None else {}
            rows.append(Row(key, ours, vllm.get(key), goals.get(key), bound, conditions))
    title = peers["names"].get(base, base) + (", through gRPC" if base != name else "")
    return Report(name, title, rows, entry.get("left_out", {}), profiles(base, spec, steps, peers["device"]))


def profiles(base: str, spec: ModelSpec, steps: Mapping[str, Any], device: str) -> list[Profile]:
    """The newest profile of each batch and context among the entries of whole models of that name."""
    found: dict[tuple[int, int], Profile] = {}
    tables = [entry for entry in steps.values() if isinstance(entry, dict)]
    entries = [entry for entry in tables if entry.get("model") == base and not entry.get("layers")]
    for entry in sorted(entries, key=lambda entry: entry["date"]):
        run = entry.get("variants", {}).get("default", {})
        for key, step in run.items():
            if not key.startswith("decode_") or not any(launches for _, launches in step.get("kernels", {}).values()):
                continue  # no profile, or one of a device whose kernels it does not hold
            rows, context_tokens = int(key.removeprefix("decode_")), entry["context_tokens"]
            bound_s = decode_s(Weights.of(spec), rows, context_tokens) if run.get("device") == device else None
            found[rows, context_tokens] = Profile(
                split_step(rows, step["step_ahead"], step["kernels"]),
                context_tokens,
                None if bound_s is None else bound_s * 1e6,
                f"{run.get('device')}, {entry['date']}, commit {short(entry['commit'])}",
            )
    return [found[place] for place in sorted(found)]


def number(value: float | None) -> str:
    """Three digits that count, thousands apart; a dash for none."""
    if value is None:
        return "-"
    exact = Decimal(str(value))
    rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), ROUND_HALF_UP)
    return f"{rounded:,f}" if rounded < 100 else f"{int(rounded):,}"


def short(commit: str) -> str:
    """A commit's first digits; that files differed from it stays said."""
    return commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")
