#!/usr/bin/env python3
"""Compare our bfloat16 steps with our own in float32, on the device at hand, at real layer sizes.

    scripts/check_fast_path.py --layers 6 --json fast.json [CONFIG_DIR ...]

Random weights; in float32 no kernel of ours runs but the routing. 32 prompts: float32 goes on with 64 ids each, and
bfloat16 is fed the same ids. It passes where bfloat16 has the same argmax at each place whose two largest logits in
float32 are more than 0.15 apart, and no logprob of an id differs by more than 0.05. Reported are both counts, and of a
mixture of experts the same for those places where every layer chose the same experts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from jaxserve import environment  # noqa: E402
from scripts._commit import commit  # noqa: E402
from scripts.check_parity import CONFIGS, cut, positive  # noqa: E402

DEFAULT = ("deepseek-v2-lite", "glm-4.7-flash", "glm-4-9b-0414", "llama-2-13b")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; leaves with a sentence where a folder is none of a model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    flag = parser.add_argument
    flag("config_dirs", nargs="*", type=Path, default=[CONFIGS / name for name in DEFAULT], metavar="CONFIG_DIR")
    flag("--layers", type=positive, default=6, help="cut the models to so many (default: 6)")
    flag("--prompts", type=positive, default=32, help="that run at once (default: 32)")
    flag("--tokens", type=positive, default=64, help="ids after each prompt (default: 64)")
    flag("--longest", type=positive, default=300, help="tokens of a prompt, at most (default: 300)")
    flag("--seed", type=int, default=0)
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flag("--json", type=Path, metavar="OUT", help="results file")
    flag("--commit", help="the commit that is checked, where this is no git checkout")
    args = parser.parse_args(argv)
    for path in args.config_dirs:
        if not (path / "config.json").is_file():
            parser.error(f"argument CONFIG_DIR: got {path}, which holds no config.json")
    return args


def line(name: str, report: dict[str, Any]) -> str:
    """For a person."""
    verdict, same = "; ".join(report["faults"]) or "passes", report["same_experts"]
    return (
        f"{name:18} {report['positions']} places, {report['clear_positions']} clear; another argmax at "
        f"{report['other_argmax']}, of clear ones {report['other_argmax_where_clear']}, {differences(report)}; "
        f"where the experts are the same, {same['positions']} places, of clear ones "
        f"{same['other_argmax_where_clear']}, {differences(same)}; {report['seconds']} s: {verdict}"
    )


def differences(part: dict[str, Any]) -> str:
    """Of the logprobs, for a person."""
    return (
        f"logprobs differ by up to {part['largest_logprob_difference']:.4f} (mean "
        f"{part['mean_logprob_difference']:.4f}, rms {part['rms_logprob_difference']:.4f}), "
        f"{part['logprobs_above_limit']} by too much"
    )


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 where all passed."""
    args = parse(argv)
    environment.prepare(args.device, 0.9)
    import jax

    from scripts._fast_path import check

    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": args.commit or commit(),
        "device": jax.devices()[0].device_kind,
        "layers": args.layers,
        "models": {},
    }
    sizes = {"prompts": args.prompts, "tokens": args.tokens, "longest": args.longest, "seed": args.seed}
    for path in args.config_dirs:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))

        def progress(text: str, name: str = path.name) -> None:
            print(f"{name:18} {text}", flush=True)

        report = results["models"][path.name] = check(cut(config, args.layers), **sizes, progress=progress)
        print(line(path.name, report), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if any(report["faults"] for report in results["models"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
