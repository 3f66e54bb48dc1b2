"""One benchmark run: brings up the engine or a server, runs the chosen workloads, writes the results as they come."""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from checkpoints.source import open_model
from jaxserve import cli
from jaxserve.client import Client
from jaxserve.config import Config
from jaxserve.engine_app import build_engine
from jaxserve.errors import JaxserveError
from jaxserve.models.families import model_spec
from jaxserve.models.spec import ModelSpec
from jaxserve.options import config_from_options
from scripts import _demo_run
from scripts._bench_drivers import EngineDriver, ServerDriver
from scripts._bench_workloads import WORKLOADS, Ask, BenchError, Driver, Limits, longest_tokens
from scripts._commit import commit
from scripts._report_pages import write_one
from scripts.bench_serve import build_parser

WARM_ASKS = [Ask(64, 8)] * 2


@dataclass(slots=True)
class Results:
    """One model's entry of the results file; what the file holds of others, or of other workloads, stays as it is.

    {model: {key: figure, "measured": {workload: conditions}, "left_out": {workload: reason}}}
    """

    path: Path
    model: str
    conditions: dict[str, Any] = field(default_factory=dict)  # what a figure is worth nothing without

    def read(self) -> dict[str, Any]:
        """The whole file; empty where there is none. Raises BenchError for one that is no such table."""
        if not self.path.exists():
            return {}
        try:
            table = json.loads(self.path.read_text())
        except ValueError as error:
            raise BenchError(
                f"--json: {self.path} holds no JSON ({error}), allowed: a results file or a new one"
            ) from None
        if not isinstance(table, dict) or not all(map(is_entry, table.values())):
            raise BenchError(f"--json: {self.path} holds no table of models, allowed: a results file or a new one")
        return table

    def figures(self, name: str, figures: dict[str, float], beside: dict[str, Any]) -> None:
        """Record a workload that was measured; `beside` goes with the conditions."""
        self._write(name, figures, {"measured": {name: self.conditions | beside}})

    def leave_out(self, name: str, reason: str) -> None:
        """Record why there is no figure; an older one goes, for it belongs to other conditions."""
        self._write(name, {}, {"left_out": {name: reason}})

    def _write(self, name: str, figures: dict[str, float], records: dict[str, dict[str, Any]]) -> None:
        """Write the file whole after each workload, so that an interrupted run keeps what it has."""
        table = self.read()
        entry = {key: value for key, value in table.get(self.model, {}).items() if key not in WORKLOADS[name].keys}
        for part in ("measured", "left_out"):
            others = {other: value for other, value in entry.get(part, {}).items() if other != name}
            entry[part] = others | records.get(part, {})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text(json.dumps(table | {self.model: entry | figures}, indent=1, sort_keys=True) + "\n")
        scratch.replace(self.path)


def is_entry(entry: Any) -> bool:
    """Whether this may be one model's part of a results file: figures, and what was measured or left out."""
    if not isinstance(entry, dict) or not ("measured" in entry or "left_out" in entry):
        return False
    return all(isinstance(value, dict) for key, value in entry.items() if key in ("measured", "left_out"))


def say(text: str) -> None:
    """One line of progress."""
    print(f"bench: {text}", flush=True)


def run_workloads(
    driver: Driver,
    names: Sequence[str],
    limit_s: float,
    results: Results,
    beside: Callable[[], dict[str, Any]] = dict,
) -> int:
    """Measure each and record it; returns how many failed. `beside` says what else to record of the one just done."""
    driver.run(WARM_ASKS, limit_s)
    failed = 0
    for name in names:
        workload, start_s = WORKLOADS[name], time.monotonic()
        reason = workload.why_not(driver.limits)
        if reason is not None:
            say(f"{name}: left out, {reason}")
            results.leave_out(name, reason)
            continue
        say(f"{name} ...")
        try:
            figures = workload.measure(driver, limit_s)
        except BenchError as error:
            failed += 1
            say(f"{name}: failed, {error}")
            results.leave_out(name, str(error))
            continue
        for key, value in figures.items():
            say(f"{key} = {value:.4g}   ({time.monotonic() - start_s:.0f} s)")
        results.figures(name, {key: round(value, 4) for key, value in figures.items()}, beside())
    return failed


def conditions(
    args: argparse.Namespace, device_kind: str, num_devices: int, implementations: Mapping[str, str]
) -> dict[str, Any]:
    """What goes beside each figure of this run."""
    return {
        "device": device_kind,
        "num_devices": num_devices,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": args.commit or commit(),
        "jax": jax.__version__,
        "weights": args.weights,
        "dtype": args.dtype,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "deterministic": args.deterministic,
        "implementations": dict(implementations),
        "path": "grpc" if args.grpc else "in process",
    }


def spec_of(config: Config) -> ModelSpec:
    """The facts of the model that is measured."""
    return model_spec(open_model(config.model.model).config)


def fitted(config: Config, names: Sequence[str]) -> Config:
    """The configuration with the context that the workloads need, unless a flag says another."""
    if config.model.max_model_len is not None:
        return config
    model_max_len = spec_of(config).max_len
    schedule = config.schedule
    limits = Limits(
        model_max_len, schedule.max_num_seqs, 0, schedule.max_num_batched_tokens, max_chunks=schedule.max_num_chunks
    )
    return replace(config, model=replace(config.model, max_model_len=longest_tokens(names, limits)))


def measure_in_process(args: argparse.Namespace, config: Config, results: Results) -> int:
    """With an engine in a thread of this process; returns how many workloads failed."""
    driver = EngineDriver()
    parts = build_engine(config, driver.emit, say)
    facts, stop = parts.facts, threading.Event()
    limits = Limits(
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        pool_tokens=facts.total_pages * facts.page_size_tokens,
        step_tokens=facts.max_num_batched_tokens,
        max_chunks=parts.config.schedule.max_num_chunks,
    )
    driver.connect(parts.engine.submit, facts.vocab_size, limits)
    args.dtype = facts.dtype
    results.conditions = conditions(args, facts.device_kind, facts.num_devices, facts.implementations)

    def beside() -> dict[str, Any]:
        stats = parts.stats()
        return {
            "host_us_per_step": round(stats.host_us_per_step, 1),
            "device_us_per_step": round(stats.device_us_per_step, 1),
            "gap_us_per_step": round(stats.gap_us_per_step, 1),
            "compilations_after_warmup": stats.compilations_after_warmup_total,
            "preemptions": stats.preemptions_total,
        }

    loop = threading.Thread(target=parts.engine.run, args=(stop,), name="engine", daemon=True)
    loop.start()
    try:
        return run_workloads(driver, args.workloads, args.limit, results, beside)
    finally:
        stop.set()
        loop.join(timeout=60)


def measure_over_grpc(args: argparse.Namespace, config: Config, results: Results) -> int:
    """With a server in processes of its own; returns how many workloads failed."""
    args.max_model_len = config.model.max_model_len
    address = f"127.0.0.1:{_demo_run.free_port()}"
    with serving(args, address) as client:
        model, server = client.model_info(), client.server_info()
        limits = Limits(
            max_model_len=model.max_model_len,
            max_num_seqs=server.max_num_seqs,
            pool_tokens=server.total_pages * server.page_size_tokens,
            step_tokens=server.max_num_batched_tokens,
            max_chunks=config.schedule.max_num_chunks,
        )
        args.dtype = model.dtype
        results.conditions = conditions(args, server.device_kind, server.num_devices, server.implementations)

        def beside() -> dict[str, Any]:
            load = client.load()
            return {
                "compilations_after_warmup": load.compilations_after_warmup_total,
                "preemptions": load.preemptions_total,
            }

        driver = ServerDriver(client, model.vocab_size, limits)
        return run_workloads(driver, args.workloads, args.limit, results, beside)


@contextmanager
def serving(args: argparse.Namespace, address: str) -> Iterator[Client]:
    """A server with the run's engine flags, ready; stopped on leaving."""
    host, port = address.split(":")
    command = [sys.executable, "-m", "jaxserve.cli", "serve", *model_flags(args), "--host", host, "--port", port]
    with _demo_run.server(command) as process, Client(address) as client:
        _demo_run.wait_until_serving(process, client.is_serving)
        yield client


def model_flags(args: argparse.Namespace) -> list[str]:
    """The engine flags of this run, as `jaxserve serve` takes them."""
    parser = argparse.ArgumentParser(add_help=False)
    cli.add_model_flags(parser)
    flags: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value is not None:
            flags += [*action.option_strings[:1], str(value)]
    return flags


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 where a workload that fits could not be measured."""
    args = build_parser().parse_args(argv)
    args.load_format = "dummy" if args.weights == "random" else "auto"
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(name)s %(message)s", force=True)
    for name in ("absl", "jax"):  # they tell of every back end that is not here
        logging.getLogger(name).setLevel(max(logging.getLogger().level, logging.WARNING))
    name = args.served_model_name or Path(args.model).resolve().name
    results = Results(args.json, f"{name} (grpc)" if args.grpc else name)
    try:
        results.read()  # a file that is none of ours ends the run before it starts
        config = fitted(config_from_options(args.model, cli.options_from(args)), args.workloads)
        failed = (measure_over_grpc if args.grpc else measure_in_process)(args, config, results)
        if args.report:
            page = write_one(results.model, spec_of(config), args.json, args.steps, args.report)
            say(f"report in {page}")
    except (JaxserveError, BenchError, _demo_run.DemoError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        say(f"interrupted; {args.json} has what was measured")
        return 130
    say(f"written to {args.json}" + (f"; {failed} workloads failed" if failed else ""))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
