"""What the prefix cache saves and what scheduling costs: the real engine without a model, on any machine.

  hits       64 sessions of 8 turns talk at once: tokens of prompts that were found in the cache, of those that anybody
             had computed before; with a pool that holds all, and with half of it beside a cache that knows the future
  pages      unused part of the allocated pages, 256 requests of 1k to 8k tokens
  host       host time of a step with 256 running and 1000 waiting requests
  match      a prompt of 32k tokens: hashing it (where it is handed over) and finding its pages (in the loop)

Usage: python scripts/bench_cache.py [--json OUT] [--quick]
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxserve.engine.prefix import NO_NODE, PrefixCache, extend_keys, root_key  # noqa: E402
from scripts._cache_run import Rig, converse, fragmentation, host_us, timed  # noqa: E402
from scripts._cache_trace import Plan, Trace, belady, working_set_pages  # noqa: E402
from scripts._commit import commit  # noqa: E402

PAGE_TOKENS = 64
LONG_TOKENS = 32_768
GOALS = {  # name: (goal, whether more is better)
    "hits_of_possible": (0.97, True),
    "hits_of_belady_half_pool": (0.90, True),
    "fragmentation": (0.05, False),
    "host_us_256_running_1000_waiting": (200.0, False),
    "match_us_32k": (300.0, False),
}


def hits(plan: Plan, part: float, eviction: str) -> dict[str, Any]:
    """Of one run with a pool of that part of the working set."""
    trace = Trace.of(plan)
    num_pages = round(working_set_pages(trace, PAGE_TOKENS) * part)
    rig = Rig(num_pages, slots=plan.sessions, page_size_tokens=PAGE_TOKENS, eviction=eviction)
    turns = converse(rig, trace)
    cached, seen = (sum(getattr(turn, name) for turn in turns) for name in ("cached_tokens", "seen_tokens"))
    whole_pages = sum(turn.seen_tokens // PAGE_TOKENS * PAGE_TOKENS for turn in turns)
    best = belady(turns, num_pages, PAGE_TOKENS, plan.system_tokens)
    stats = rig.engine.stats()
    return {
        "eviction": eviction,
        "pool_pages": num_pages,
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "seen_tokens": seen,
        "cached_tokens": cached,
        "of_possible": round(cached / seen, 4),
        "of_whole_pages": round(cached / whole_pages, 4),
        "belady_tokens": best,
        "of_belady": round(cached / best, 4),
        "evicted_pages": stats.evicted_pages_total,
        "preemptions": stats.preemptions_total,
    }


def match_us(repeats: int) -> dict[str, float]:
    """Medians: hashing a prompt of 32k tokens, and finding its pages among as many others."""
    rng = np.random.default_rng(0)
    pages = LONG_TOKENS // PAGE_TOKENS
    cache, root = PrefixCache(4 * pages, PAGE_TOKENS), root_key({})
    prompts = [rng.integers(0, 100_000, LONG_TOKENS).astype(np.int32) for _ in range(4)]
    keys = [extend_keys([root], prompt, PAGE_TOKENS) for prompt in prompts]
    for index, prompt in enumerate(prompts):
        cache.add(keys[index], prompt, np.arange(pages * index, pages * (index + 1), dtype=np.int32), NO_NODE, 0)
    made = [timed(lambda: extend_keys([root], prompts[0], PAGE_TOKENS)) * 1e6 for _ in range(repeats)]
    asked = [(keys[index % 4], prompts[index % 4]) for index in range(repeats)]
    found = [timed(functools.partial(cache.match, *one)) * 1e6 for one in asked]
    return {"hash": round(statistics.median(made), 1), "match": round(statistics.median(found), 1)}


def measure(quick: bool) -> dict[str, Any]:
    """All workloads, with progress."""
    plan = Plan(sessions=8, turns=3) if quick else Plan()
    evictions = ("lru",) if quick else ("lru", "lfu")
    told("hits, the pool holds all ...")
    all_fit = hits(plan, 1.3, "lru")
    halves = []
    for eviction in evictions:
        told(f"hits, half the working set, {eviction} ...")
        halves.append(hits(plan, 0.5, eviction))
    told("pages ...")
    requests, most = (16, 2000) if quick else (256, 8000)
    rig = Rig(requests * (most // PAGE_TOKENS + 2), slots=requests, max_model_len=16384, prefix_cache=False)
    unused = fragmentation(rig, requests, (most // 8, most), 400)
    told("host ...")
    running, waiting = (16, 50) if quick else (256, 1000)
    host = host_us(Rig(running * 130, slots=running), running, waiting)
    told("match ...")
    match = match_us(5 if quick else 50)
    return {
        "hits": [all_fit, *halves],
        "match_us": match,
        "host_us": {name: round(value, 1) for name, value in host.items()},
        "figures": {
            "hits_of_possible": all_fit["of_possible"],
            "hits_of_belady_half_pool": max(half["of_belady"] for half in halves[:1]),
            "fragmentation": round(unused, 4),
            f"host_us_{running}_running_{waiting}_waiting": round(host["median"], 1),
            "match_us_32k": match["match"],
        },
    }


def told(line: str) -> None:
    """A line of progress."""
    print(f"bench: {line}", file=sys.stderr, flush=True)


def table(figures: dict[str, float]) -> str:
    """Each figure beside its goal."""
    lines = []
    for name, value in figures.items():
        goal, more = GOALS.get(name, (None, True))
        verdict = "" if goal is None else "reached" if (value >= goal if more else value <= goal) else "missed"
        lines.append(f"{name:36} {value:>10} {'' if goal is None else goal:>8}  {verdict}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """See the module; 0 when all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="small sizes, whose figures mean nothing: does it run?")
    options = parser.parse_args(argv)
    result = measure(options.quick)
    print(table(result["figures"]))
    if options.json is not None:
        where = {"date": datetime.date.today().isoformat(), "commit": commit(), "machine": platform.machine()}
        options.json.write_text(json.dumps(where | result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
