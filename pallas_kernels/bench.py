"""Times the kernels against the limit and the rivals: `python -m pallas_kernels.bench [op or case id ...] --json OUT`.

Prints a line a case and variant: microseconds, GB/s and TFLOP/s, fraction of the limit, error against an fp32
reference, and the rival's time. A variant that fails is reported and the others go on. --check runs the op's
correctness cases first, several times each: an error that moves between runs is a race. timing.py has the method.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from pallas_kernels import timing
from pallas_kernels.compare import difference
from pallas_kernels.device import Device, device_of

# The ops that are measured, in this order; each has its modules `benchmark` and `check` in its folder. They are loaded
# when asked for, so that one op can be measured while another does not import.
OPS = (
    "dense_gemm",
    "gqa_decode",
    "gqa_prefill",
    "grouped_gemm",
    "kv_write",
    "latent_write",
    "mla_decode",
    "mla_prefill",
    "moe_route",
    "sampling",
)
RIVALS = Path(__file__).parent / "data" / "rivals_h200.json"


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 where a check or a variant failed."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", help="ops or case ids; all ops where nothing is named")
    parser.add_argument("--json", type=Path, help="write the records here, by case id")
    parser.add_argument(
        "--variants", nargs="*", metavar="PART", help="time other tunings and forms too: all, or whose names hold PART"
    )
    parser.add_argument("--no-graphs", action="store_true", help="launch each kernel, as if XLA made no graphs")
    parser.add_argument("--profile", action="store_true", help="time each kernel of a call, too")
    parser.add_argument("--loops", type=int, default=1, help="run a program's calls so often in a loop on the device")
    parser.add_argument(
        "--check", nargs="*", metavar="PART", help="run the correctness cases first: all, or whose labels hold PART"
    )
    parser.add_argument("--lock", type=Path, help="a file held while the GPU is used: several benches compile at once")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this long")
    options = parser.parse_args(arguments)
    try:
        ops, cases = _wanted(options.what)
        _refuse(options)
    except ValueError as error:
        parser.error(str(error))
    held = _Lock(options.lock)
    device = device_of(jax.devices()[0])
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "commit": _commit()}
    about["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    print(about, flush=True)
    deadline = time.monotonic() + options.seconds
    failures = 0
    if options.check is not None:
        failures += _check_all(ops, device, options.check, held)
    records: dict[str, Any] = {}
    for case_id in cases:
        if time.monotonic() > deadline:
            print(f"{case_id}: left out, {options.seconds:.0f} s are over")
            continue
        record, failed = _case(case_id, device, options, held)
        failures += failed
        if record:
            records[case_id] = record | about
        if options.json:
            options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 1 if failures else 0


class _Lock:
    """A file that benches on one GPU agree on: whoever times holds it alone, whoever only computes shares it.

    The first run of a check, which compiles, holds nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @contextlib.contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        if self._path is None:
            yield
            return
        with self._path.open("a") as file:  # closing it lets go
            fcntl.flock(file, kind)
            yield

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """No other bench uses the GPU meanwhile."""
        return self._held(fcntl.LOCK_EX)

    def shared(self) -> contextlib.AbstractContextManager[None]:
        """No other bench times meanwhile."""
        return self._held(fcntl.LOCK_SH)


def _wanted(what: list[str]) -> tuple[list[str], list[str]]:
    """Ops and case ids that the command line names. ValueError: it names something else."""
    for one in what:
        op = one.split(" ")[0]
        if op not in OPS:
            raise ValueError(f"there is no op {op!r}, must be one of {', '.join(OPS)}.")
        if one != op and not part(op, "benchmark").PATTERN.fullmatch(one):
            ids = case_ids(op)
            raise ValueError(f"there is no case {one!r}, must be {op!r} for all, or like {ids[0]!r} or {ids[-1]!r}.")
    ops = [name for name in OPS if not what or any(one.split(" ")[0] == name for one in what)]
    whole = [name for name in ops if not what or name in what]
    cases = [case_id for name in whole for case_id in case_ids(name)]
    return ops, [one for one in what if one not in OPS] + cases


def _refuse(options: argparse.Namespace) -> None:
    """ValueError about an option that would else fail after the first case was measured, or measure nothing."""
    if options.loops < 1:
        raise ValueError(f"--loops is {options.loops}, must be 1 or more.")
    if not options.seconds > 0:
        raise ValueError(f"--seconds is {options.seconds}, must be above 0.")
    for name in ("json", "lock"):
        path = getattr(options, name)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"--{name} is {path}, must be a file in a folder that exists.")


def case_ids(op: str) -> tuple[str, ...]:
    """The cases of an op's benchmark."""
    return tuple(part(op, "benchmark").CASE_IDS)


def part(op: str, module: str) -> ModuleType:
    """A module of an op's folder: `benchmark` or `check`."""
    return importlib.import_module(f"pallas_kernels.{op}.{module}")


def _check_all(ops: list[str], device: Device, parts: list[str], held: _Lock) -> int:
    """Number of these ops' correctness cases that are wrong; 1 where no label holds `parts`: nothing was checked."""
    counts = [_check(op, device, parts, held) for op in ops]
    if not any(seen for seen, _ in counts):
        print(f"BAD  --check {' '.join(parts)}: no case of {', '.join(ops)} has a label that holds this", flush=True)
        return 1
    return sum(wrong for _, wrong in counts)


def _check(op: str, device: Device, parts: list[str], held: _Lock) -> tuple[int, int]:
    """Number of correctness cases, and of those that are wrong, or differ between runs."""
    seen = wrong = 0
    check = part(op, "check")
    for label, run in check.checks(device):
        if parts and not any(part in label for part in parts):
            continue
        seen += 1
        try:
            results = [run()]  # compiles: nothing is held
            with held.shared():
                results += [run() for _ in range(4)]
            moves = any(not np.array_equal(results[0][0], other, equal_nan=True) for other, _ in results[1:])
            found = difference(*results[0])
            good = check.passes(found) and not moves
            wrong += not good
            print(
                f"{'ok  ' if good else 'BAD '} {op} {label}: norm {found.norm:.2e} element {found.element:.2e} "
                f"special {found.bad} worst {found.worst} {'MOVES BETWEEN RUNS' if moves else ''}",
                flush=True,
            )
        except Exception as error:
            wrong += 1
            print(f"BAD  {op} {label}: {_brief(error)}", flush=True)
    return seen, wrong


def _case(case_id: str, device: Device, options: argparse.Namespace, held: _Lock) -> tuple[dict[str, Any], int]:
    """The record of a case, its first variant's figures on top, and the number of variants that failed."""
    try:
        op = part(case_id.split()[0], "benchmark")
        with held.shared():
            problem = op.build(case_id, device)
            expected = np.asarray(problem.reference(), np.float32)
        variants = _chosen(op.variants(problem, device, options.variants is not None), options.variants)
    except Exception as error:
        print(f"{case_id}: {_brief(error)}", flush=True)
        return {}, 1
    rival = json.loads(RIVALS.read_text())["rivals"].get(case_id, {})
    record: dict[str, Any] = {}
    failed = 0
    for name, step in variants.items():
        try:
            chain = timing.chain(step, problem, graphs=not options.no_graphs, loops=options.loops)
            with held.alone():
                figures = _measure(chain, problem, expected)
                if options.profile and name == next(iter(variants)):
                    figures["kernels_us"] = _profile(chain)
        except Exception as error:
            failed += 1
            print(f"{case_id:32s} {name:32s} FAILED {_brief(error)}", flush=True)
            continue
        print(_line(case_id, name, figures, rival), flush=True)
        record = record or figures | {"variant": name, "rival_us": rival.get("us"), "rival": rival.get("name")}
        record.setdefault("variants", {})[name] = figures["us"]
    return record, failed


def _chosen(variants: dict[str, timing.Step], parts: list[str] | None) -> dict[str, timing.Step]:
    """The first variant, and those whose names hold one of `parts`; all where none is named."""
    names = [name for i, name in enumerate(variants) if i == 0 or not parts or any(part in name for part in parts)]
    return {name: variants[name] for name in names}


def _measure(chain: timing.Chain, problem: timing.Problem, expected: np.ndarray) -> dict[str, Any]:
    timed = timing.time_chain(chain)
    found = difference(timed.first, expected)
    return {
        "us": round(timed.median_us, 2),
        "best_us": round(timed.best_us, 2),
        "host_us": round(timed.host_us, 2),
        "GBps": round(problem.least_bytes / timed.median_us / 1e3, 1),
        "TFLOPs": round(problem.operations / timed.median_us / 1e6, 1),
        "of_limit": round(problem.limit_us / timed.median_us, 3),
        "error": float(f"{found.norm:.2e}"),
        "bad": found.bad,
    }


def _profile(chain: timing.Chain) -> dict[str, float] | str:
    try:
        totals = timing.kernels_us(chain)
    except Exception as error:
        return _brief(error)
    return {name: round(us, 2) for name, us in sorted(totals.items(), key=lambda item: -item[1])[:6]}


def _line(case_id: str, name: str, figures: dict[str, Any], rival: dict[str, Any]) -> str:
    against = f"rival {rival['us']:.1f} us, ratio {figures['us'] / rival['us']:.3f}" if rival else ""
    line = (
        f"{case_id:32s} {name:32s} {figures['us']:9.2f} us (best {figures['best_us']:.2f}, host "
        f"{figures['host_us']:.1f}) {figures['GBps']:7.1f} GB/s {figures['TFLOPs']:6.1f} TFLOP/s "
        f"{figures['of_limit']:.2f} of limit, error {figures['error']:.1e} bad {figures['bad']} {against}"
    )
    return line + (f"\n    {figures['kernels_us']}" if "kernels_us" in figures else "")


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return found.stdout.strip() or None


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


if __name__ == "__main__":
    sys.exit(main())
