"""The roofline report on disk: a model's rows and profiles in, a page with its plot and the README's table out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.models.families import model_spec
from jaxserve.models.spec import ModelSpec
from scripts._bench_workloads import WORKLOADS, BenchError
from scripts._commit import ROOT
from scripts._kernel_classes import HOST_GAP, ORDER, StepTime
from scripts._report import LABELS, OVER_GRPC, Profile, Report, Row, make_report, number, read_table, short
from scripts._report_plot import draw
from scripts._roofline import WORKLOAD_OF

CONFIGS = ROOT / "scripts" / "configs"
PEERS = ROOT / "scripts" / "results" / "peers_h200.json"
BEGIN = "<!-- figures: written by scripts/bench_serve.py --report --readme -->"
END = "<!-- end of the figures -->"
KERNELS_SHOWN = 4  # of a class, the longest


def table(rows: Sequence[Row]) -> list[str]:
    """The Markdown table of one model's figures; ours is bold where it reaches the goal."""
    lines = [
        "| workload | jaxserve | vLLM | against vLLM | goal | limit | of the limit | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = f"**{number(row.ours)}**" if row.reaches_goal else number(row.ours)
        ratio, share = row.against_vllm, row.share(row.ours)
        cells = (
            LABELS[row.key],
            ours,
            number(row.vllm),
            "-" if ratio is None else f"{ratio:.2f}x",
            number(row.goal),
            number(row.limit),
            "-" if share is None else f"{share:.0%}",
            f"{row.conditions['date']}, {short(row.conditions['commit'])}" if row.conditions else "-",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def conditions_line(rows: Sequence[Row]) -> str:
    """Under which conditions a model was measured, in words; several where its figures differ in them."""
    lines = dict.fromkeys(
        f"{run['num_devices']} {run['device']}, {run['dtype']}, {run['weights']} weights, {run['path']}, "
        f"`--max-num-seqs {run['max_num_seqs']} --max-num-batched-tokens {run['max_num_batched_tokens']}`"
        for run in (row.conditions for row in rows)
        if run
    )
    return "; ".join(lines) or "not measured yet"


def readme_block(reports: Sequence[Report], peers: Mapping[str, Any]) -> str:
    """What stands between the README's two marks, the marks included."""
    lines = [BEGIN]
    for report in reports:
        if any(row.vllm is not None for row in report.rows) and not report.name.endswith(OVER_GRPC):
            lines += [f"**{report.title}**: {conditions_line(report.rows)}.", "", *table(report.rows), ""]
    return "\n".join([*lines, f"Beside it: {peers['engine']}.", END])


def put_block(path: Path, block: str) -> None:
    """Replace what stands between the marks of a file. Raises BenchError where it has no such place."""
    try:
        before, rest = path.read_text().split(BEGIN)
        _, after = rest.split(END)
    except (OSError, ValueError):
        marks = f"the marks {BEGIN} and {END}, once each"
        raise BenchError(f"--readme: {path} has no place for the figures, allowed: a file with {marks}") from None
    path.write_text(before + block + after)


def page(report: Report, plot_name: str, peers: Mapping[str, Any]) -> str:
    """The Markdown page of one model."""
    lines = [f"# {report.title}: figures against vLLM and the physical limit", ""]
    lines += [f"Measured: {conditions_line(report.rows)}. Beside it: {peers['engine']}.", ""]
    lines += ["The limit is max(bytes / 4.58 TB/s, operations / 790 TFLOP/s) for the same work, the best rates seen on"]
    lines += ["an H200 (`scripts/_roofline.py`). A bold figure reaches the goal.", ""]
    lines += [*table(report.rows), ""]
    lines += counted(report.rows)
    lines += [f"- {name} was left out: {reason}." for name, reason in report.left_out.items() if name in WORKLOADS]
    lines += ["", f"![Workloads as a share of the limit; a decode step by kernel class]({plot_name})", ""]
    lines += ["## Where a decode step's time goes", ""]
    return "\n".join(lines + (step_lines(report.profiles) if report.profiles else [NO_PROFILE])).rstrip() + "\n"


def counted(rows: Sequence[Row]) -> list[str]:
    """The table of what the engine counted of itself in each workload; nothing where it was not asked."""
    parts = ("host_us_per_step", "device_us_per_step", "gap_us_per_step", "compilations_after_warmup", "preemptions")
    runs = {WORKLOAD_OF[row.key]: row.conditions for row in rows if any(part in row.conditions for part in parts)}
    if not runs:
        return []
    units = "host: us a step | device: us a step | gap: us a step"
    lines = [f"| the engine's own counts | {units} | compilations | preemptions |"]
    lines.append("|---|---|---|---|---|---|")
    for name, run in runs.items():
        cells = [f"{run[part]:,.0f}" if part in run else "-" for part in parts]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    about = "The times are moving averages at its end. The host works while the device does; a gap is what the device "
    return [*lines, "", about + "waited for its next step although there was work.", ""]


NO_PROFILE = "Not profiled: `scripts/bench_step.py --kernels 100 --json FILE` writes what `--steps FILE` shows here."


def step_lines(found: Sequence[Profile]) -> list[str]:
    """The table of a step's time by class, a column a profile, and the kernels that make it up."""
    heads = [f"{p.time.rows} at {p.context_tokens:,} tokens" for p in found]
    lines = ["| microseconds (launches) | " + " | ".join(heads) + " |", "|---" * (1 + len(found)) + "|"]
    for title in ORDER:
        cells = [step_cell(p.time, title) for p in found]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines.append("| **whole step** | " + " | ".join(f"**{p.time.step_us:,.0f}**" for p in found) + " |")
    bounds = ["-" if p.limit_us is None else f"{p.limit_us:,.0f}" for p in found]
    lines += ["| limit | " + " | ".join(bounds) + " |", ""]
    lines += [
        "The host gap is what a step takes, run one ahead as the engine does, beyond the sum of its kernels; that"
    ]
    lines += [
        "comes from a profile, which has no graphs. Products that XLA does are dense GEMM, those of shared experts too"
    ]
    lines += ["where they stand apart from the others; what it fuses around them is elementwise.", ""]
    for head, p in zip(heads, found, strict=True):
        lines += [f"### The longest kernels, {head} ({p.source})", ""]
        for title, part in p.time.parts.items():
            if title != HOST_GAP:
                named = ", ".join(f"`{name}` {us:,.1f}" for name, us in part.kernels[:KERNELS_SHOWN])
                more = len(part.kernels) - KERNELS_SHOWN
                lines.append(f"- {title}: {named}" + (f", and {more} more" if more > 0 else ""))
        lines.append("")
    return lines


def step_cell(step: StepTime, title: str) -> str:
    """One class of one step."""
    part = step.parts.get(title)
    if part is None:
        return "-"
    launches = "" if title == HOST_GAP else f" ({part.launches})"
    return f"{part.us:,.0f}{launches}, {part.us / step.step_us:.0%}"


# Files.


def write_page(report: Report, folder: Path, peers: Mapping[str, Any]) -> Path:
    """Writes the page and its plot; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = report.name.replace(OVER_GRPC, "-grpc")
    draw(report, folder / f"{stem}.png")
    path = folder / f"{stem}.md"
    path.write_text(page(report, f"{stem}.png", peers))
    return path


def reports_of(results: Path, steps: Path | None) -> list[Report]:
    """A report for each model of a results file whose config.json lies in scripts/configs. Raises BenchError."""
    entries = read_table("--json", results)
    profiled = read_table("--steps", steps) if steps else {}
    peers = read_table("--report", PEERS)
    found = []
    for name in sorted(entries, key=lambda name: (name.removesuffix(OVER_GRPC) not in peers["names"], name)):
        config = CONFIGS / name.removesuffix(OVER_GRPC) / "config.json"
        if config.exists():
            found.append(make_report(name, model_spec(read_table("MODEL", config)), entries[name], profiled, peers))
    return found


def write_all(results: Path, steps: Path | None, folder: Path, readme: Path | None) -> list[Path]:
    """The pages of every model of a results file, and where asked for the README's table. Raises BenchError."""
    found, peers = reports_of(results, steps), read_table("--report", PEERS)
    if readme:
        put_block(readme, readme_block(found, peers))
    return [write_page(report, folder, peers) for report in found]


def write_one(name: str, spec: ModelSpec, results: Path, steps: Path | None, folder: Path) -> Path:
    """The page of the model that was just measured. Raises BenchError."""
    entry = read_table("--json", results).get(name, {})
    profiled = read_table("--steps", steps) if steps else {}
    peers = read_table("--report", PEERS)
    return write_page(make_report(name, spec, entry, profiled, peers), folder, peers)
