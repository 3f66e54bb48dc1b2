#!/usr/bin/env python3
"""Compare our logits with transformers' at real layer sizes, on the device at hand, in bfloat16 or float32.

    scripts/check_parity.py --layers 4 --json parity.json [CONFIG_DIR ...]

transformers makes a checkpoint with random weights from each CONFIG_DIR/config.json, and its logits: in float32 the
truth, in bfloat16 the yardstick. Then the checkpoint is loaded as the service loads it, and the sequences run through
the paged cache: chunks of several prompts together, beside rows that decode, by the kernels that the engine would take.
It passes where our median error in bfloat16 is at most 1.5 times transformers', and in float32 none is above 2e-4.
torch runs in a process of its own that ends before JAX takes the device; its Python may be another one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from jaxserve import environment  # noqa: E402
from scripts._commit import commit  # noqa: E402
from scripts._parity_compare import compare, table  # noqa: E402

CONFIGS = ROOT / "scripts" / "configs"
DEFAULT = ("deepseek-v2-lite", "glm-4-9b-0414", "glm-4.7-flash")
MODEL_BYTES = 8 << 30  # a checkpoint of four layers takes less
MOST_SEQUENCES = 8
MEMORY = Path("/dev/shm")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    flag = parser.add_argument
    flag("config_dirs", nargs="*", type=Path, default=[CONFIGS / name for name in DEFAULT], metavar="CONFIG_DIR")
    flag("--layers", type=positive, default=4, help="cut the models to so many (default: 4)")
    flag("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"], help="ours (default: bfloat16)")
    flag("--lengths", nargs="+", type=positive, default=[700, 130, 5], help="tokens of up to 8 sequences")
    flag("--columns", type=positive, default=4096, help="vocabulary ids whose logits are compared (default: 4096)")
    flag("--seed", type=int, default=0)
    flag("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flag("--torch-python", default=sys.executable, help="the Python that has torch (default: this one)")
    flag("--work", type=Path, help="folder for the checkpoints (default: in memory if there is room, else temporary)")
    flag("--json", type=Path, metavar="OUT", help="results file")
    flag("--commit", help="the commit that is checked, where this is no git checkout")
    return parser


def positive(text: str) -> int:
    """A flag's whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: whole numbers from 1 up")
    return int(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; leaves with a sentence where they do not belong together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if len(args.lengths) > MOST_SEQUENCES:
        parser.error(f"argument --lengths: got {len(args.lengths)} sequences, allowed: {MOST_SEQUENCES} at most")
    for path in args.config_dirs:
        if not (path / "config.json").is_file():
            parser.error(f"argument CONFIG_DIR: got {path}, which holds no config.json")
    if len({path.name for path in args.config_dirs}) < len(args.config_dirs):
        parser.error("argument CONFIG_DIR: two folders have the same name, by which results are kept")
    return args


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with so many layers at most and without MTP layers; dense layers stand at the front and stay."""
    out = config | {"num_hidden_layers": min(layers, config["num_hidden_layers"])}
    if "num_nextn_predict_layers" in out:
        out["num_nextn_predict_layers"] = 0
    return out


def work_folder(models: int) -> Path:
    """Where checkpoints of so many models are made: in memory if there is room."""
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > models * MODEL_BYTES:
        return MEMORY
    return Path(tempfile.gettempdir())


def run_torch(folders: list[Path], args: argparse.Namespace) -> None:
    """Have the folders filled. Raises CalledProcessError where not even a report of a failure came of it."""
    command = [args.torch_python, str(ROOT / "scripts" / "_parity_torch.py"), *map(str, folders)]
    command += ["--lengths", *map(str, args.lengths), "--columns", str(args.columns), "--seed", str(args.seed)]
    command += ["--device", args.device, *(["--bfloat16"] if "bfloat16" in args.dtype else [])]
    command += ["--steady"] if "float32" in args.dtype else []
    subprocess.run(command, check=True)


def check_model(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All that is reported of a model that transformers is done with."""
    from scripts._parity_ours import Sizes, our_logits

    report: dict[str, Any] = {"transformers": json.loads((folder / "torch.json").read_text(encoding="utf-8"))}
    if "failed" in report["transformers"]:
        return report | {"failed": f"transformers: {report['transformers']['failed']}"}
    reference = dict(np.load(folder / "reference.npz"))
    sequences = [reference[f"ids_{i}"] for i in range(len(args.lengths))]
    for dtype in args.dtype:
        try:
            found, run = our_logits(folder, dtype, sequences, reference["columns"], Sizes(rows=MOST_SEQUENCES))
            report[dtype] = compare(found, reference, dtype, len(sequences)) | run
            print(f"{folder.name}, ours in {dtype}: {json.dumps(run)}", flush=True)
        except Exception as error:  # the rest shall still be measured
            traceback.print_exc()
            report[dtype] = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
    return report


def failed(models: dict[str, dict[str, Any]], dtypes: list[str]) -> bool:
    """Whether anything failed or did not pass."""
    parts = [model.get(dtype, model) for model in models.values() for dtype in dtypes]
    return any("failed" in part or part["faults"] for part in parts)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 where all passed."""
    args = parse(argv)
    start_s = time.monotonic()
    results: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": args.commit or commit(),
        "layers": args.layers,
        "lengths": args.lengths,
        "columns": args.columns,
        "models": {},
    }
    with tempfile.TemporaryDirectory(dir=args.work or work_folder(len(args.config_dirs))) as name:
        folders = [Path(name) / path.name for path in args.config_dirs]
        for path, folder in zip(args.config_dirs, folders, strict=True):
            folder.mkdir()
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            (folder / "config.json").write_text(json.dumps(cut(config, args.layers), indent=1), encoding="utf-8")
        run_torch(folders, args)
        environment.prepare(args.device, 0.9)
        import jax

        device = jax.devices()[0]
        results |= {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
        for folder in folders:
            results["models"][folder.name] = check_model(folder, args)
            shutil.rmtree(folder)
            results["seconds"] = round(time.monotonic() - start_s, 1)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results["models"]))
    print(f"{results['device']}, {results['seconds']} s in all")
    return 1 if failed(results["models"], args.dtype) else 0


if __name__ == "__main__":
    sys.exit(main())
