#!/usr/bin/env python3
"""Measures the serving workloads: flags, and the process settings that JAX reads; then becomes _bench_run.py.

    scripts/bench_serve.py CONFIG_DIR --weights random --workloads c16_256_128,b1_1k --json results.json

CONFIG_DIR needs only a config.json where the weights are random. Engine flags are those of `jaxserve serve`.
Without CONFIG_DIR nothing is measured: --report shows what the results file holds, on any machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own folder is there, not the tree it lies in

from jaxserve import cli, environment  # noqa: E402
from jaxserve.errors import JaxserveError  # noqa: E402
from scripts._bench_workloads import BenchError, chosen  # noqa: E402
from scripts._commit import ROOT  # noqa: E402
from scripts._report import read_table  # noqa: E402
from scripts._report_pages import write_all  # noqa: E402
from scripts._report_plot import require_matplotlib  # noqa: E402

MAX_NUM_SEQS = 256
STEP_TOKENS = 8192


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(prog="scripts/bench_serve.py", description="Measure the serving workloads.")
    flag = parser.add_argument
    flag("--weights", choices=("random", "real"), default="real", help="random: N(0, 0.02), made on the device")
    flag("--workloads", type=workloads, default="all", help="all, or names or keys with commas between (default: all)")
    flag("--json", type=Path, required=True, metavar="OUT", help="results file; what it holds of others stays")
    flag("--grpc", action="store_true", help="through a server on a loopback port, in place of in process")
    flag("--limit", type=float, default=300.0, help="seconds that one run of a workload may take (default: 300)")
    flag("--commit", help="the commit that is measured, where this is no git checkout")
    flag("--report", type=Path, metavar="DIR", help="write a Markdown page and a plot: ours, vLLM, goal, limit")
    flag("--steps", type=Path, metavar="FILE", help="what bench_step.py wrote: the report shows a step by kernel class")
    flag("--readme", type=Path, metavar="FILE", help="without MODEL: put the report's tables between this file's marks")
    cli.add_model_flags(parser, required=False)
    parser.set_defaults(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=STEP_TOKENS)
    return parser


def workloads(text: str) -> list[str]:
    """The names that --workloads chooses."""
    try:
        return chosen(text)
    except BenchError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--workloads: ")) from error


def main(argv: Sequence[str]) -> int:
    """Checks the flags; returns only where they are wrong, else this process becomes the measurement."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.model is None and args.report is None:
        parser.error("MODEL: got none, allowed: a model to measure, or --report to show what --json holds")
    if args.report is None and (args.steps or args.readme):
        parser.error("--steps, --readme: got one without --report, allowed: together with it")
    if args.model is not None and args.readme:
        parser.error("--readme: got it with MODEL, allowed: without, for its tables are of all models")
    try:
        if args.report:
            require_matplotlib()
            make_folder(args.report)
        if args.steps:
            read_table("--steps", args.steps)  # one that is none of ours would else end the run after it is measured
        if args.model is None:
            for path in write_all(args.json, args.steps, args.report, args.readme):
                print(f"bench: report in {path}")
            return 0
    except (BenchError, JaxserveError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    environment.prepare(args.device, args.gpu_memory_utilization)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.execv(sys.executable, [sys.executable, "-m", "scripts._bench_run", *argv])


def make_folder(folder: Path) -> None:
    """Before anything is measured. Raises BenchError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(
            f"--report: got {folder}, which is no folder and cannot be made one ({error.strerror})"
        ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
