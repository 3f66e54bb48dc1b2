"""The roofline report's plot: workloads as a share of the physical limit, and a decode step by kernel class.

matplotlib is asked for only here, since nothing else of a benchmark needs it (the extra `bench` has it).
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts._bench_workloads import BenchError
from scripts._kernel_classes import ORDER
from scripts._report import LABELS, Profile, Report, Row, number

OURS, VLLM, GOAL, INK = "#1f5fa8", "#a9b3bd", "#ffffff", "#222222"
# One colour a class, told apart also by those who see no red or no green; grey is what is no kernel of ours.
COLOURS = dict(
    zip(
        ORDER,
        ("#d55e00", "#0072b2", "#cc79a7", "#e69f00", "#f0e442", "#7b3294", "#56b4e9", "#009e73", "#8c8c8c", "#dedede"),
        strict=True,
    )
)
DARK = ("attention", "MoE GEMM", "collectives", "norm, elementwise, copies")  # their figures are written in white
BAR = 0.27  # of a workload's height, each of its three bars
LEAST_LABELLED = 0.035  # a class that takes less of the tallest step has no room for its figure


def require_matplotlib() -> None:
    """Raises BenchError, one sentence, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(
            "--report: matplotlib is not installed; the extra bench and scripts/requirements/bench.txt have it"
        )


def draw(report: Report, path: Path) -> None:
    """Writes the plot as a PNG. Raises BenchError where matplotlib is not installed."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.limit is not None]
    height = max(4.5, 1.6 + 0.62 * len(rows))
    figure = Figure(figsize=(8.2 + (2.4 + 2.3 * len(report.profiles) if report.profiles else 0), height), dpi=130)
    figure.set_layout_engine("constrained")
    ratios = [8.2, 2.4 + 2.3 * len(report.profiles)] if report.profiles else [1]
    panels = figure.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
    figure.suptitle(report.title, fontsize=14, fontweight="bold")
    draw_workloads(panels[0], rows)
    if report.profiles:
        draw_steps(panels[1], report.profiles)
    figure.savefig(path, metadata={"Software": None})


def draw_workloads(axes: Any, rows: Sequence[Row]) -> None:
    """Three bars a workload: ours, vLLM's and the goal, each as a share of the limit, with its figure."""
    styles = (("jaxserve", OURS, OURS), ("vLLM", VLLM, VLLM), ("goal", GOAL, INK))
    for which, (title, colour, edge) in enumerate(styles):
        values = [(row.ours, row.vllm, row.goal)[which] for row in rows]
        if all(value is None for value in values):
            continue
        shares = [100 * (row.share(value) or 0.0) for row, value in zip(rows, values, strict=True)]
        places = [place + (which - 1) * (BAR + 0.02) for place in range(len(rows))]
        axes.barh(places, shares, BAR, label=title, color=colour, edgecolor=edge, linewidth=0.8)
        for place, share, value in zip(places, shares, values, strict=True):
            if value is not None:
                text, weight = f"{number(value)}  ({share:.0f} %)", "bold" if which == 0 else "normal"
                shown = axes.text(share + 1, place, text, va="center", fontsize=7.5, fontweight=weight, color=INK)
                shown.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # over the limit's line
            elif which == 0:
                axes.text(1, place, "not measured", va="center", fontsize=7.5, style="italic", color="#777777")
    axes.axvline(100, color=INK, linewidth=1.2, linestyle="--")
    axes.set_yticks(range(len(rows)), [textwrap.fill(LABELS[row.key], 30) for row in rows], fontsize=8.5)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_xlim(0, 115)
    axes.set_title("Workloads", fontsize=11, loc="left")
    if rows:
        axes.set_xlabel("% of the physical limit of one H200 (dashed): longer is faster")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, borderaxespad=0.2)
    else:
        axes.text(57, 0, "no limit is known for the device that was measured", ha="center", color="#777777")
    axes.spines[["top", "right"]].set_visible(False)


def draw_steps(axes: Any, profiles: Sequence[Profile]) -> None:
    """A bar a profile, stacked by class in milliseconds, with the limit of the same work as a line across it."""
    tallest_us = max(max(p.time.step_us, p.time.kernels_us) for p in profiles)
    floors = [0.0] * len(profiles)
    for title in ORDER:
        parts_us = [p.time.parts[title].us if title in p.time.parts else 0.0 for p in profiles]
        if not any(parts_us):
            continue
        heights = [us / 1000 for us in parts_us]
        axes.bar(range(len(profiles)), heights, 0.62, bottom=floors, label=title, color=COLOURS[title],
                 edgecolor="white", linewidth=0.6)  # fmt: skip
        for place, (us, floor) in enumerate(zip(parts_us, floors, strict=True)):
            if us > LEAST_LABELLED * tallest_us:
                axes.text(place, floor + us / 2000, f"{us / 1000:.2f}", ha="center", va="center", fontsize=9,
                          color="white" if title in DARK else INK)  # fmt: skip
        floors = [floor + high for floor, high in zip(floors, heights, strict=True)]
    first = next((place for place, p in enumerate(profiles) if p.limit_us is not None), None)
    for place, p in enumerate(profiles):
        axes.text(place, floors[place], f"{p.time.step_us / 1000:.2f} ms", ha="center", va="bottom", fontweight="bold",
                  fontsize=9)  # fmt: skip
        if p.limit_us is not None:
            axes.hlines(p.limit_us / 1000, place - 0.42, place + 0.42, color=INK, linewidth=1.8, linestyle="--",
                        label="physical limit" if place == first else None)  # fmt: skip
    names = [f"{p.time.rows} sequence{'s' * (p.time.rows > 1)}\n{p.context_tokens:,} tokens" for p in profiles]
    axes.set_xticks(range(len(profiles)), names, fontsize=9)
    axes.set_xlim(-0.6, len(profiles) - 0.4)
    axes.set_ylim(0, 1.1 * tallest_us / 1000)
    axes.set_ylabel("milliseconds a decode step")
    axes.set_title("A decode step by kernel class", fontsize=11, loc="left")
    handles, titles = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], titles[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
