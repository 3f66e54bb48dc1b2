"""The roofline report: rows, pages, plots and the README's tables, of small results files and of the committed ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.models.families import model_spec
from scripts import _report_pages as pages
from scripts import _report_plot as plot
from scripts import bench_serve
from scripts._bench_workloads import WORKLOADS, BenchError
from scripts._commit import ROOT
from scripts._report import LABELS, Report, Row, make_report, number, read_table, short

MODEL = "deepseek-v2-lite"
SPEC = model_spec(json.loads((pages.CONFIGS / MODEL / "config.json").read_text()))
PEERS: dict[str, Any] = {
    "device": "NVIDIA H200",
    "engine": "vLLM 0.24.0, 2026-12-01",
    "names": {MODEL: "DeepSeek-V2-Lite"},
    "vllm": {MODEL: {"b16_1k_step_ms": 8.0, "prefill_8x8192_tok_s": 80000, "b256_1k_step_ms": 13.9}},
    "goals": {MODEL: {"b16_1k_step_ms": 6.6, "prefill_8x8192_tok_s": 108000}},
}


def conditions(**changes: Any) -> dict[str, Any]:
    run: dict[str, Any] = {
        "device": "NVIDIA H200",
        "num_devices": 1,
        "date": "2026-12-03",
        "commit": "0123456789abcdef",
        "jax": "0",
    }
    run |= {"dtype": "bfloat16", "weights": "random", "path": "in process", "max_num_seqs": 64}
    return run | {"max_num_batched_tokens": 8192} | changes


def entry(**changes: Any) -> dict[str, Any]:
    """A results file's entry: a step that is at the goal, a prompt rate that is not, and a workload left out."""
    return {
        "b16_1k_step_ms": 6.4,
        "prefill_8x8192_tok_s": 40000.0,
        "measured": {"b16_1k": conditions(**changes), "prefill_8x8192": conditions(**changes)},
        "left_out": {"b256_1k": "needs 256 sequences at once, max_num_seqs is 64"},
    }


def steps(**changes: Any) -> dict[str, Any]:
    kernels = {"all": [6500.0, 90], "(between kernels)": [500.0, 0], "grouped_gemm_mosaic_gpu_kernel": [4000.0, 52]}
    kernels |= {"nvjet_a": [1500.0, 27], "mystery": [300.0, 5]}
    variants = {"default": {"device": "NVIDIA H200", "decode_16": {"step_ahead": 6400.0, "kernels": kernels}}}
    return {
        "model": MODEL,
        "context_tokens": 1024,
        "date": "2026-12-03",
        "commit": "fedcba9876",
        "variants": variants,
    } | changes


def report(steps_file: dict[str, Any] | None = None, name: str = MODEL, **changes: Any) -> Report:
    return make_report(name, SPEC, entry(**changes), steps_file or {}, PEERS)


def test_a_changed_tree_stays_said() -> None:
    assert [short(text) for text in ("0123456789abcdef", "0123456789abcdef-dirty", "6b32b8c", "unknown")] == [
        "0123456",
        "0123456-dirty",
        "6b32b8c",
        "unknown",
    ]


def test_every_figure_has_a_label() -> None:
    assert set(LABELS) == {key for workload in WORKLOADS.values() for key in workload.keys} - {"c16_256_128_tok_s"}


def test_rows_stand_beside_what_they_are_measured_against() -> None:
    """Faster is above 1 and nearer the limit, for times as for rates."""
    rows = {row.key: row for row in report().rows}
    assert list(rows) == ["b16_1k_step_ms", "b256_1k_step_ms", "prefill_8x8192_tok_s"]
    step, rate, missing = rows["b16_1k_step_ms"], rows["prefill_8x8192_tok_s"], rows["b256_1k_step_ms"]
    assert step.against_vllm == pytest.approx(8.0 / 6.4) and rate.against_vllm == pytest.approx(0.5)
    assert step.share(step.ours) == pytest.approx(5.58 / 6.4, rel=0.01)
    assert rate.share(rate.ours) == pytest.approx(40 / 141, rel=0.01)
    assert step.reaches_goal and not rate.reaches_goal and not missing.reaches_goal
    assert missing.ours is None and missing.against_vllm is None and missing.share(missing.ours) is None


def test_another_device_has_nothing_beside_it() -> None:
    for rows in (report(device="cpu").rows, report(num_devices=2).rows):
        assert [row.key for row in rows] == ["b16_1k_step_ms", "prefill_8x8192_tok_s"]
        assert all((row.vllm, row.goal, row.limit) == (None, None, None) for row in rows)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (7.265, "7.27"), (5.8663, "5.87"), (28.5236, "28.5"), (99.96, "100"), (1983.4, "1,980"), (6, "6.00")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_page_shows_all_there_is(tmp_path: Path) -> None:
    path = pages.write_page(report({MODEL: steps()}, host_us_per_step=1633.8), tmp_path / "new", PEERS)
    text = path.read_text()
    assert (
        "| decode step, 16 at 1024 tokens: ms | **6.40** | 8.00 | 1.25x | 6.60 | 5.58 | 87% | 2026-12-03, 0123456 |"
        in text
    )
    assert "| prefill, 8 prompts of 8192: tokens/s | 40,000 | 80,000 | 0.50x | 108,000 | 141,000 | 28% |" in text
    assert "| decode step, 256 at 1024 tokens: ms | - | 13.9 | - | - | 8.66 | - | - |" in text
    assert "- b256_1k was left out: needs 256 sequences at once, max_num_seqs is 64." in text
    assert "1 NVIDIA H200, bfloat16, random weights, in process, `--max-num-seqs 64" in text
    assert "| MoE GEMM | 4,000 (52), 62% |" in text and "| dense GEMM | 1,500 (27), 23% |" in text
    assert "| other | 500 (11), 8% |" in text and "| host gap | 400, 6% |" in text  # 200 us were not listed
    assert "| **whole step** | **6,400** |" in text and "| limit | 5,577 |" in text
    assert "16 at 1,024 tokens (NVIDIA H200, 2026-12-03, commit fedcba9)" in text and "`mystery` 300.0" in text
    assert "| b16_1k | 1,634 | - | - | - |" in text and f"({path.stem}.png)" in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_page_without_a_profile_says_how_to_make_one(tmp_path: Path) -> None:
    text = pages.write_page(report(name=f"{MODEL} (grpc)"), tmp_path, PEERS).read_text()
    assert "bench_step.py --kernels" in text and "| MoE GEMM" not in text and "own counts" not in text
    assert text.startswith("# DeepSeek-V2-Lite, through gRPC")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{MODEL}-grpc.md", f"{MODEL}-grpc.png"]


def test_the_newest_profile_of_a_whole_model_counts() -> None:
    """Not those of another model, of some layers, without kernels, or of a device whose profile holds none."""
    empty = {"default": {"device": "cpu", "decode_64": {"step_ahead": 1.0, "kernels": {"all": [0.0, 0]}}}}
    bare = {"default": {"device": "NVIDIA H200", "decode_32": {"step_ahead": 1.0}}}
    found = report(
        {
            "newer": steps(commit="newest", date="2026-12-04"),
            "older": steps(commit="older"),
            "cut": steps(layers=4, date="2026-12-05"),
            "other": steps(model="other", date="2026-12-05"),
            "cpu": steps(variants=empty),
            "bare": steps(variants=bare),
            "no table": 1,
        }
    ).profiles
    assert [(p.time.rows, p.source) for p in found] == [(16, "NVIDIA H200, 2026-12-04, commit newest")]


def drawn_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Report) -> dict[str, list[float]]:
    """What the plot's bars are as long as, by the legend's words: widths on the left, heights on the right."""
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    plot.draw(shown, tmp_path / "a.png")
    left, *right = figures[0].axes
    bars = {c.get_label(): [bar.get_width() for bar in c] for c in left.containers}
    return bars | {c.get_label(): [bar.get_height() for bar in c] for axes in right for c in axes.containers}


def test_the_plot_has_a_bar_for_each_figure_and_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = drawn_bars(tmp_path, monkeypatch, report({MODEL: steps()}))
    assert bars["jaxserve"] == pytest.approx([100 * 5.584 / 6.4, 0, 100 * 40 / 140.68], rel=0.01)
    assert bars["vLLM"][0] == pytest.approx(100 * 5.584 / 8.0, rel=0.01) and len(bars["goal"]) == 3
    classes = [bars[title] for title in ("MoE GEMM", "dense GEMM", "other", "host gap")]
    assert sum(classes, []) == pytest.approx([4.0, 1.5, 0.5, 0.4])


def test_the_plot_of_another_device_has_no_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn_bars(tmp_path, monkeypatch, report(device="cpu")) == {}


def test_without_matplotlib_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert bench_serve.main(["some-model", "--json", "r.json", "--report", "out"]) == 1  # before anything is measured
    assert "--report: matplotlib is not installed; the extra bench" in capsys.readouterr().err


def test_the_readme_shows_the_committed_figures() -> None:
    """Its tables are what `bench_serve.py --report DIR --readme README.md` writes: no figure is typed by hand."""
    reports = pages.reports_of(ROOT / "scripts" / "results" / "serve_h200.json", None)
    block = pages.readme_block(reports, read_table("--report", pages.PEERS))
    assert block.count("| jaxserve |") == 4 and block in (ROOT / "README.md").read_text()


def test_only_the_readmes_tables_are_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    block = pages.readme_block([report(), report(name=f"{MODEL} (grpc)")], PEERS)
    pages.put_block(readme, block)
    pages.put_block(readme, block)
    assert readme.read_text() == f"before\n{block}\nafter\n"
    assert block.count("**DeepSeek-V2-Lite**") == 1 and "old" not in block
    readme.write_text("no marks")
    with pytest.raises(BenchError, match="--readme: .* has no place for the figures, allowed: a file with the marks"):
        pages.put_block(readme, block)
    assert readme.read_text() == "no marks"


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_file_that_is_no_table_is_refused(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchError, match=r"^--steps: .*steps.json .*, allowed: a results file$"):
        read_table("--steps", path)


def test_a_wrong_file_of_steps_ends_a_run_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["some-model", "--json", "r.json", "--report", "out", "--steps", str(tmp_path / "none.json")]
    assert bench_serve.main(flags) == 1
    assert "none.json cannot be read (No such file or directory), allowed: a results file" in capsys.readouterr().err


def test_committed_figures_are_shown_without_a_model(tmp_path: Path) -> None:
    results, steps_path = tmp_path / "results.json", tmp_path / "steps.json"
    results.write_text(json.dumps({MODEL: entry(), "unknown": entry()}))
    steps_path.write_text(json.dumps({"any": steps()}))
    command = [sys.executable, str(ROOT / "scripts" / "bench_serve.py"), "--json", str(results)]
    command += ["--steps", str(steps_path), "--report", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == f"bench: report in {tmp_path}/out/{MODEL}.md\n"
    )  # of one whose config.json is not at hand, none
    assert "| MoE GEMM | 4,000 (52), 62% |" in (tmp_path / "out" / f"{MODEL}.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "MODEL: got none, allowed: a model to measure, or --report"),
        (["m", "--steps", "s"], "--steps, --readme: got one without --report"),
        (["m", "--report", "d", "--readme", "r"], "--readme: got it with MODEL, allowed: without"),
    ],
)
def test_flags_that_make_no_sense_together(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serve.main(["--json", "r.json", *flags])
    assert message in capsys.readouterr().err


def test_a_row_without_a_limit_has_no_share() -> None:
    assert Row("b1_1k_tpot_ms", 1.0, 2.0, None, None, {}).share(1.0) is None
