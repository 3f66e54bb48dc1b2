"""Which part of the model a kernel belongs to, told by its name: takes what bench_step.py --kernels wrote of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OTHER, HOST_GAP = "other", "host gap"
BETWEEN, ALL = "(between kernels)", "all"  # entries of a profile that are no kernels

# The first pattern that matches decides. A Mosaic kernel is called after its body, which begins with its op; XLA calls
# a fusion after its kind and its last operation, and one made in Triton just `fusion`. Products that XLA does for
# attention, or for shared experts that stand apart from the others, look like any other product.
CLASSES: dict[str, str] = {
    "attention": r"(gqa|mla)_(decode|prefill)|.*(flash|fmha)",
    "MoE GEMM": r"grouped_gemm|ragged_dot",
    "routing": r"moe_route",
    "cache write": r"(kv|latent)_write",
    "sampling": r"sampling",
    "collectives": r"nccl|(all|collective|reduce)-\w|(all_reduce|all_gather|all_to_all|collective_permute)",
    "dense GEMM": r".*(gemm|gemv|nvjet|cutlass|cublas|splitk)",
    "norm, elementwise, copies": r"(loop|input|wrapped|transpose|concatenate)_|fusion|memcpy|memset|copy|broadcast",
}
ORDER = (*CLASSES, OTHER, HOST_GAP)


def class_of(kernel: str) -> str:
    """The class of a kernel's name; "other" for one that no pattern knows."""
    name = kernel.strip().lower()
    return next((title for title, pattern in CLASSES.items() if re.match(pattern, name)), OTHER)


@dataclass(frozen=True, slots=True)
class Part:
    """What one class takes of a step."""

    us: float  # microseconds
    launches: int
    kernels: tuple[tuple[str, float], ...]  # names with their microseconds, the longest first


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of so many sequences, by class; `parts` add up to `step_us` unless the kernels alone take longer."""

    rows: int
    step_us: float  # one step ahead, as the engine runs
    parts: dict[str, Part]  # in the order of ORDER, only those that are there

    @property
    def kernels_us(self) -> float:
        """Microseconds of all kernels."""
        return sum(part.us for title, part in self.parts.items() if title != HOST_GAP)


def split_step(rows: int, step_us: float, kernels: Mapping[str, Sequence[float]]) -> StepTime:
    """{kernel: (microseconds, launches)} of a step -> its time by class.

    "all" is the sum of a profile: what it has beyond the kernels that are listed is shown as other. The profile's own
    idle time is left out, for a profile runs without graphs; the gap is what `step_us` has beyond all kernels.
    """
    named = {name: (us, int(launches)) for name, (us, launches) in kernels.items() if name not in (BETWEEN, ALL)}
    idle_us, _ = kernels.get(BETWEEN, (0.0, 0))
    all_us, all_launches = kernels.get(ALL, (0.0, 0))
    rest_us = all_us - idle_us - sum(us for us, _ in named.values())
    rest_launches = int(all_launches) - sum(launches for _, launches in named.values())
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for name, value in named.items():
        found.setdefault(class_of(name), {})[name] = value
    if rest_launches > 0:
        found.setdefault(OTHER, {})["(not listed)"] = (max(0.0, rest_us), rest_launches)
    parts = {title: part(found[title]) for title in ORDER if title in found}
    gap_us = step_us - sum(part.us for part in parts.values())
    return StepTime(rows, step_us, parts | {HOST_GAP: Part(max(0.0, gap_us), 0, ())})


def part(kernels: Mapping[str, tuple[float, int]]) -> Part:
    """The kernels of one class together."""
    longest = sorted(((name, us) for name, (us, _) in kernels.items()), key=lambda item: -item[1])
    return Part(
        sum(us for us, _ in kernels.values()), sum(launches for _, launches in kernels.values()), tuple(longest)
    )
