"""The part of make_goldens that runs where torch is: makes the families that it is told, and compares if asked to.

Runs in an environment of its own with an older Python, and so imports nothing of this repository.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from _goldens_check import compare
from _goldens_deepseek import make_deepseek, make_deepseek_v2, make_deepseek_v3
from _goldens_glm import make_glm, make_glm4, make_glm4_moe, make_glm4_moe_lite
from _goldens_llama import make_llama, make_smollm2

TINY = {
    "llama": make_llama,
    "deepseek": make_deepseek,
    "deepseek_v2": make_deepseek_v2,
    "deepseek_v3": make_deepseek_v3,
    "glm": make_glm,
    "glm4": make_glm4,
    "glm4_moe": make_glm4_moe,
    "glm4_moe_lite": make_glm4_moe_lite,
}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("goldens", type=Path, help="the folder to write to, or to compare with")
    parser.add_argument("families", nargs="+", choices=[*TINY, "smollm2"])
    parser.add_argument("--smollm2", type=Path, help="folder of the demo model, if it is among the families")
    parser.add_argument("--check", action="store_true", help="write elsewhere and compare")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # the MTP layers' names are reported as unexpected at each load
    torch.set_num_threads(1)  # more only spin where cores are shared
    if not args.check:
        make(args.goldens, args.families, args.smollm2)
        return 0
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), args.families, args.smollm2)
        differences = compare(Path(name), args.goldens)
    print("\n".join(differences) or "all as committed", flush=True)
    return 1 if differences else 0


def make(folder: Path, families: list[str], smollm2: Path | None) -> None:
    """Writes the files of the families into a folder."""
    for number, family in enumerate(families, start=1):
        print(f"[{number}/{len(families)}] {family}", flush=True)
        start_s = time.monotonic()
        if family != "smollm2":
            TINY[family](folder)
        elif smollm2 is not None:
            make_smollm2(smollm2, folder)
        print(f"    {time.monotonic() - start_s:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
