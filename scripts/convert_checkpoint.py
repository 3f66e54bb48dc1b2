#!/usr/bin/env python3
"""Convert a Hugging Face directory or a GGUF file to a sharded Orbax checkpoint with its config and tokenizer.

A killed run is taken up again by the same command. Exit codes: 0 done (or done before), 3 a model that is not
supported, 4 a source or target that does not fit, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # before JAX is imported: no device is needed, and none should be taken
    sys.path.insert(0, str(ROOT))
    os.environ["JAX_PLATFORMS"] = "cpu"

from tqdm import tqdm  # noqa: E402

from checkpoints.convert import DTYPES, Conversion, convert, is_finished, plan  # noqa: E402
from checkpoints.files import partial_of  # noqa: E402
from checkpoints.verify import verify_checksums  # noqa: E402
from jaxserve.errors import JaxserveError  # noqa: E402
from scripts._verify_logits import compare_logits, why_no_reference  # noqa: E402

INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", type=Path, help="a Hugging Face directory, or a GGUF file")
    parser.add_argument("target", type=Path, help="the directory to make; TARGET.partial is used until it is whole")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto keeps bfloat16 and makes all else float32 (exact); routers are float32",
    )
    parser.add_argument(
        "--dequantize",
        action="store_true",
        help="make plain weights of fp8 ones (DeepSeek's blocks, compressed-tensors' channels); twice the bytes",
    )
    parser.add_argument(
        "--without-mtp",
        action="store_true",
        help="leave out multi-token prediction layers, also where the config names them and the files lack them",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare what is stored with the source, and logits with transformers where torch is installed",
    )
    return parser


def progress(conversion: Conversion, what: str) -> tqdm:
    """A bar on standard error; silent where that is no terminal."""
    return tqdm(total=conversion.num_bytes, unit="B", unit_scale=True, desc=what, disable=None)


def run(args: argparse.Namespace) -> None:
    """Convert if it is not done, verify if asked to. Raises JaxserveError."""
    conversion = plan(args.source, args.target, args.dtype, dequantize=args.dequantize, without_mtp=args.without_mtp)
    if is_finished(conversion):
        print(f"{args.target}: converted already, from this source in {conversion.identity.dtype}")
    else:
        if partial_of(args.target).exists():
            print(f"{partial_of(args.target)}: going on with an unfinished conversion", file=sys.stderr)
        with progress(conversion, "converting") as bar:
            convert(conversion, lambda name, num_bytes: bar.update(num_bytes) and None)
        tensors = len(conversion.table.targets)
        print(f"{args.target}: {tensors} parameters, {conversion.num_bytes / 1e9:.3f} GB {conversion.identity.dtype}")
    if args.verify:
        verify(conversion, args)


def verify(conversion: Conversion, args: argparse.Namespace) -> None:
    """Checksums always, logits where they can be had. Raises CheckpointError where something differs."""
    with progress(conversion, "verifying") as bar:
        compared = verify_checksums(conversion, lambda name, num_bytes: bar.update(num_bytes) and None)
    print(f"{args.target}: {compared} stored arrays equal the source's")
    reason = why_no_reference(conversion.reader.config["model_type"])
    if reason:
        print(f"{args.target}: logits not compared: {reason}")
    else:
        print(f"{args.target}: {compare_logits(args.source, args.target, conversion.identity.dtype)}")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; every failure is one sentence on standard error."""
    args = build_parser().parse_args(argv)
    try:
        run(args)
    except JaxserveError as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            f"convert_checkpoint: interrupted; the same command goes on from {partial_of(args.target)}", file=sys.stderr
        )
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
