"""Where a step's time goes: host work against device work, in the real runner with random weights.

Each batch size runs in the program that an engine of as many slots as the largest takes: of 16 rows and more on a GPU.
For each batch size it reports, in microseconds a step (medians):
  put, call, copy      the three parts of a dispatch while the device is idle: batch to the device, the compiled call
                       itself (argument handling, execute, launch or graph update), the start of the copies back
  step_sync            dispatch and read, one after the other
  step_ahead           one step ahead, as the engine runs: the device's own time where the host hides behind it;
                       ahead_put, ahead_call, ahead_copy and ahead_wait are the parts of that loop
  call_numpy           the call with the batch as a numpy argument, in place of put and call
  call_behind          the compiled call while the device still runs the step before
  call_flood_max       the slowest call of 32 dispatched without reading: back-pressure shows here
With --prefill N a step of one prompt of N tokens is timed too: step_ahead, and its kernels.

Each variant of XLA flags runs in a process of its own. Usage:
  python scripts/bench_step.py CONFIG_DIR --rows 16 64 --context 1024 --json OUT [--variants default no_graphs ...]
OUT gets an entry under the model's name, or under --label, with the date and the commit; its other entries stay. With
--kernels it is what `bench_serve.py --report DIR --steps OUT` shows by kernel class.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts._commit import commit  # noqa: E402

GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION"
VARIANTS = {
    "default": "",
    "no_graphs": "--xla_gpu_enable_command_buffer=",
    "while_graphs": f"--xla_gpu_enable_command_buffer={GRAPHS},WHILE",
}
REPEATS = 30
LEAST_SLOTS = 16  # an engine of fewer has a program of fewer rows, which XLA makes slower


def build_parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config_dir", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache of each row")
    parser.add_argument("--prefill", type=int, help="time a step of one prompt of so many tokens, too")
    parser.add_argument("--layers", type=int, help="cut the model to this many layers")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["default", "no_graphs"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--trace", type=Path, help="write a profiler trace of ten steps to this folder")
    parser.add_argument("--kernels", type=int, metavar="N", help="profile a step too: its N longest kernels by name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--label", help="the name of the entry in the results file (default: the model's)")
    parser.add_argument("--commit", help="the commit that is measured, where this is no git checkout")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Measures each variant in a process of its own, and records it."""
    args = build_parser().parse_args()
    if args.child:
        print("RESULT " + json.dumps(measure(args)))
        return 0
    record(args, {})  # a file that is none of ours ends the run before it starts
    results: dict[str, Any] = {}
    for variant in args.variants:
        flags = " ".join((os.environ.get("XLA_FLAGS", ""), VARIANTS[variant])).strip()
        command = [sys.executable, __file__, *sys.argv[1:], "--child", variant]
        done = subprocess.run(
            command, env=os.environ | {"XLA_FLAGS": flags}, stdout=subprocess.PIPE, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        results[variant] = json.loads(lines[-1][7:]) if lines else {"failed": done.returncode}
        print(variant, json.dumps(results[variant], indent=1), flush=True)
        record(args, results)
    return int(any("failed" in result for result in results.values()))


def record(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Put what was measured so far into the results file, where one is asked for; ends the run if it holds no table."""
    if args.json is None:
        return
    try:
        table = json.loads(args.json.read_text()) if args.json.exists() else {}
        entries = dict(table)
    except (TypeError, ValueError):
        sys.exit(f"bench_step: --json: {args.json} holds no table, allowed: a results file or a new one")
    if all("failed" in result for result in results.values()):
        return  # an earlier entry stays
    model = args.config_dir.resolve().name
    entry = {
        "model": model,
        "context_tokens": args.context,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": args.commit or commit(),
        "variants": results,
    }
    if args.layers:
        entry["layers"] = args.layers
    args.json.write_text(json.dumps(entries | {args.label or model: entry}, indent=1) + "\n")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One variant in this process."""
    from jaxserve import environment

    environment.prepare(args.device, 0.9)
    import jax

    from jaxserve.batch import Bucket, Program
    from jaxserve.config import CacheConfig, Config, DeviceFacts, ModelConfig, RuntimeConfig, ScheduleConfig, resolve
    from jaxserve.engine.buckets import Buckets
    from jaxserve.models.families import model_spec
    from jaxserve.runtime.start import start_runner

    model = json.loads((args.config_dir / "config.json").read_text())
    if args.layers:
        model["num_hidden_layers"] = args.layers
    spec = model_spec(model)
    most = max(*args.rows, LEAST_SLOTS)
    tokens, prompt = most + 64, args.prefill or 0
    wanted = Config(
        ModelConfig(str(args.config_dir), random_weights=True, max_model_len=max(args.context, prompt) + 256),
        cache=CacheConfig(),
        schedule=ScheduleConfig(max_num_seqs=most, max_num_batched_tokens=max(tokens, prompt)),
        runtime=RuntimeConfig(device=args.device, attention=args.attention, compile_cache_dir=""),
    )
    platform = "cpu" if jax.devices()[0].platform == "cpu" else "cuda"
    config, _ = resolve(wanted, DeviceFacts(platform, "", 1, spec.max_len, spec.dtype))
    sizes = Buckets.from_config(config.runtime, config.schedule)
    programs = {rows: sizes.choose(Program.DECODE, rows) for rows in args.rows}
    buckets = [Bucket(Program.MIXED, max(tokens, prompt)), *dict.fromkeys(programs.values())]
    started = start_runner(spec, config, buckets, None, spec.vocab_size, lambda line: print(line, flush=True))
    out: dict[str, Any] = {"start_s": {name: round(s, 2) for name, s in started.times_s.items()}}
    out["device"] = jax.devices()[0].device_kind
    out["arrays"] = {"weights": len(started.runner.leaves), "state": len(jax.tree.leaves(started.runner.state))}
    for rows, bucket in programs.items():
        out[f"decode_{rows}"] = measure_bucket(started.runner, started.shape, bucket, rows, args)
    if prompt:
        filler = programs[args.rows[0]]
        out[f"prefill_{prompt}"] = measure_prefill(started.runner, started.shape, buckets[0], filler, prompt, args)
    return out


def measure_bucket(runner: Any, shape: Any, bucket: Any, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of so many sequences in one decode bucket; its further rows are padding."""
    import jax
    import numpy as np

    from jaxserve.batch import FLAG_RANDOM, Batch, Layout

    layout = Layout(bucket, shape)
    vector = layout.empty()[None]  # one lane
    views = layout.views(vector[0])
    views["flags"][:] = FLAG_RANDOM
    views["slot"][:rows] = np.arange(rows)
    views["position"][:rows] = args.context
    fill_tables(runner, shape, bucket, rows, args.context)
    tell_rows_apart(runner, shape)
    batch = Batch(bucket, vector)
    step = (runner.programs.plain if bucket in runner.programs.plain else runner.programs.steps)[bucket]

    def call(argument: Any = None) -> Any:
        argument = jax.device_put(vector, runner.by_lane) if argument is None else argument
        runner.state, result = step(runner.leaves, runner.state, argument)
        return result

    for _ in range(5):
        jax.block_until_ready(call())
    out: dict[str, Any] = idle_parts(runner, vector, call) | busy_calls(vector, call) | ahead(runner, batch, step)
    if args.kernels:
        out["kernels"] = longest_kernels(call, args.kernels)
    if args.trace:
        with jax.profiler.trace(str(args.trace / f"decode_{rows}")):
            for _ in range(10):
                jax.block_until_ready(call())
    return out


def measure_prefill(
    runner: Any, shape: Any, bucket: Any, filler: Any, tokens: int, args: argparse.Namespace
) -> dict[str, Any]:
    """A step of one prompt from its first token on, alone; `filler` is the decode bucket that fills the tables."""
    import jax
    import numpy as np

    from jaxserve.batch import Batch, Layout

    fill_tables(runner, shape, filler, 1, tokens)
    vector = Layout(bucket, shape).empty()[None]  # one lane
    views = Layout(bucket, shape).views(vector[0])
    views["token"][:tokens] = np.random.default_rng(0).integers(0, shape.vocab_size, tokens)
    views["slot"][:tokens] = 0
    views["position"][:tokens] = np.arange(tokens)
    for name, value in {"chunk_slot": 0, "chunk_start": 0, "chunk_tokens": tokens, "chunk_position": 0}.items():
        views[name][0] = value
    views["sample_row"][0], views["sample_slot"][0] = tokens - 1, 0
    step = (runner.programs.plain if bucket in runner.programs.plain else runner.programs.steps)[bucket]

    def call() -> Any:
        runner.state, result = step(runner.leaves, runner.state, jax.device_put(vector, runner.by_lane))
        return result

    for _ in range(3):
        jax.block_until_ready(call())
    out: dict[str, Any] = ahead(runner, Batch(bucket, vector), step)
    if args.kernels:
        out["kernels"] = longest_kernels(call, args.kernels)
    return out


def longest_kernels(call: Any, count: int) -> dict[str, Any]:
    """Of a step's kernels, those of one name together: microseconds on the device, launches; "all" is their sum."""
    from pallas_kernels.timing import traced_kernels

    found = sorted(traced_kernels(call).items(), key=lambda item: -item[1][0])
    total_us, launches = sum(us for _, (us, _) in found), sum(times for _, (_, times) in found)
    return {"all": (round(total_us, 1), launches)} | {
        name: (round(us, 1), times) for name, (us, times) in found[:count]
    }


def medians(parts: dict[str, list[float]]) -> dict[str, float]:
    """Seconds to the median in microseconds."""
    return {name: round(statistics.median(values) * 1e6, 1) for name, values in parts.items()}


def idle_parts(runner: Any, vector: Any, call: Any) -> dict[str, float]:
    """put, call, copy and the whole step, each dispatch with the device idle."""
    import jax

    from jaxserve.runtime.runner import Pending

    parts: dict[str, list[float]] = {name: [] for name in ("put", "call", "copy", "step_sync")}
    for _ in range(REPEATS):
        t0 = time.perf_counter()
        put = jax.device_put(vector, runner.by_lane)
        t1 = time.perf_counter()
        result = call(put)
        t2 = time.perf_counter()
        pending = Pending(result, with_logprobs=False)
        t3 = time.perf_counter()
        pending.result()
        t4 = time.perf_counter()
        for name, span in zip(parts, (t1 - t0, t2 - t1, t3 - t2, t4 - t0), strict=True):
            parts[name].append(span)
    return medians(parts)


def busy_calls(vector: Any, call: Any) -> dict[str, float]:
    """The call with a numpy batch, behind a running step, and many times without reading."""
    import jax

    parts: dict[str, list[float]] = {"call_numpy": [], "call_behind": []}
    for _ in range(REPEATS):
        t0 = time.perf_counter()
        result = call(vector)
        parts["call_numpy"].append(time.perf_counter() - t0)
        jax.block_until_ready(result)
    for _ in range(REPEATS):
        first = call()
        t0 = time.perf_counter()
        second = call()
        parts["call_behind"].append(time.perf_counter() - t0)
        jax.block_until_ready((first, second))
    floods = []
    for _ in range(32):
        t0 = time.perf_counter()
        result = call()
        floods.append(time.perf_counter() - t0)
    jax.block_until_ready(result)
    flood = {"call_flood_first": [floods[0]], "call_flood_max": [max(floods)], "call_flood_median": floods}
    return medians(parts | flood)


def fill_tables(runner: Any, shape: Any, bucket: Any, rows: int, context: int) -> None:
    """Give each of so many slots pages for its whole context, by the updates of steps that feed nobody."""
    from jaxserve.batch import Batch, Layout

    layout = Layout(bucket, shape)
    pages = context // shape.page_size_tokens + 1
    entries = [(slot, i, (slot * pages + i) % shape.num_pages) for slot in range(rows) for i in range(pages)]
    for first in range(0, len(entries), layout.updates):
        part = entries[first : first + layout.updates]
        vector = layout.empty()[None]
        views = layout.views(vector[0])
        for name, column in zip(("update_slot", "update_index", "update_page"), zip(*part, strict=True), strict=True):
            views[name][: len(part)] = column
        runner.dispatch(Batch(bucket, vector)).result()


def tell_rows_apart(runner: Any, shape: Any) -> None:
    """Give each slot a last token of its own: equal rows would all be routed to the same few experts."""
    import jax
    import numpy as np

    slots = runner.state.slots
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, slots.last_token_S.shape, np.int32)
    tokens = jax.device_put(tokens, slots.last_token_S.sharding)
    runner.state = replace(runner.state, slots=replace(slots, last_token_S=tokens))


def ahead(runner: Any, batch: Any, step: Any) -> dict[str, float]:
    """One step ahead, as the engine runs: the whole step, and the median of each part of the loop in it."""
    import jax

    from jaxserve.runtime.runner import Pending

    parts: dict[str, list[float]] = {name: [] for name in ("ahead_put", "ahead_call", "ahead_copy", "ahead_wait")}
    pending = runner.dispatch(batch)
    count = 2 * REPEATS
    start_s = time.perf_counter()
    for _ in range(count):
        t0 = time.perf_counter()
        put = jax.device_put(batch.vector, runner.by_lane)
        t1 = time.perf_counter()
        runner.state, result = step(runner.leaves, runner.state, put)
        t2 = time.perf_counter()
        following = Pending(result, with_logprobs=False)
        t3 = time.perf_counter()
        pending.result()
        t4 = time.perf_counter()
        for name, span in zip(parts, (t1 - t0, t2 - t1, t3 - t2, t4 - t3), strict=True):
            parts[name].append(span)
        pending = following
    span_s = time.perf_counter() - start_s
    pending.result()
    return {"step_ahead": round(span_s / count * 1e6, 1)} | medians(parts)


if __name__ == "__main__":
    sys.exit(main())
