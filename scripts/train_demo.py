#!/usr/bin/env python3
"""Train the demo model of checkpoints/demo on one GPU, within some minutes, and export it.

    scripts/train_demo.py --minutes 9 --out out/demo            as many steps as fit; ends cleanly in time
    scripts/train_demo.py --minutes 9 --out out/demo --resume   goes on with the state that is kept in out/demo
    scripts/train_demo.py --minutes 9 --out out/more --from-weights out/demo/bf16   a new schedule from these weights
    scripts/train_demo.py --tiny --out out/tiny                 a few small steps, on a CPU too

The corpus is generated here, or read from --keep-rows where an earlier run has left it. OUT gets log.jsonl, curves.png,
the state for --resume, and at the end bf16 and fp8: Hugging Face directories. Exit codes: 0 done, 2 options that do
not belong together, 4 files that do not fit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from checkpoints.readers.reader import read_json  # noqa: E402
from demo_model.corpus.pack import token_rows  # noqa: E402
from demo_model.train.data import TRAIN, VALIDATION, get_rows  # noqa: E402
from demo_model.train.estimate import describe  # noqa: E402
from demo_model.train.export import export_model  # noqa: E402
from demo_model.train.optimizer import OPTIMIZERS  # noqa: E402
from demo_model.train.options import Options  # noqa: E402
from demo_model.train.run import Place, run  # noqa: E402
from demo_model.train.state import fresh_weights, weights_from  # noqa: E402
from demo_model.train.step import Trainer  # noqa: E402
from jaxserve.errors import CheckpointError, ConfigError, JaxserveError  # noqa: E402
from jaxserve.models.decoder import split_decoder  # noqa: E402
from jaxserve.models.families import model_spec  # noqa: E402

BOS, USER = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"
TINY = {"row_tokens": 64, "batch_rows": 4, "part_rows": 2, "steps": 6, "warmup_steps": 2, "validate_steps": 3}
TINY |= {"dtype": "float32", "save_steps": 3, "minutes": None}
DEFAULTS = Options(steps=1)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\nThe corpus")[0], formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="the run's directory")
    parser.add_argument("--config", type=Path, default=ROOT / "checkpoints" / "demo", help="config and tokenizer files")
    parser.add_argument("--minutes", type=float, help="the whole run's, from start to end")
    parser.add_argument("--steps", type=int, help="of the schedule; without them what fits into the minutes")
    parser.add_argument("--resume", action="store_true", help="go on with the state in --out")
    parser.add_argument("--from-weights", type=Path, help="begin with these weights, a model that the loader reads")
    parser.add_argument("--rows", type=int, default=60_000, help="of the training corpus, as many as are generated")
    parser.add_argument("--validation-rows", type=int, default=128, help="of the held-out corpus")
    parser.add_argument("--wordnet", type=Path, help="its files: some documents are then about what words mean")
    parser.add_argument("--keep-rows", type=Path, help="where generated rows are kept, and taken from if there")
    parser.add_argument("--processes", type=int, default=16, help="that generate the corpus")
    parser.add_argument("--compile-cache", type=Path, help="where compiled programs are kept")
    parser.add_argument("--tiny", action="store_true", help="a few small steps, to see that all of it works")
    sizes = {"row_tokens": "tokens of a row", "batch_rows": "rows of a step", "part_rows": "rows computed at a time"}
    rates = {"rate": "the highest learning rate", "warmup_steps": "steps of its rise", "mtp_weight": "of the MTP loss"}
    rates |= {
        "last_mtp_weight": "in the last third",
        "bias_rate": "of the router's bias",
        "weight_decay": "of matrices",
    }
    others = {"seed": "of weights, corpus and order", "validate_steps": "between two validations"}
    for name, what in (sizes | rates | others | {"save_steps": "between two saved states"}).items():
        value = getattr(DEFAULTS, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"{what}; {value}")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help=DEFAULTS.optimizer)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help=f"of the computation; {DEFAULTS.dtype}")
    return parser


def options_of(args: argparse.Namespace) -> Options:
    """Those given, over those of --tiny, over the defaults. Raises ConfigError."""
    given = {name: getattr(args, name, None) for name in Options.__dataclass_fields__}
    given = {name: value for name, value in given.items() if value is not None}
    return Options(**(TINY if args.tiny else {}) | given)


def special_token(tokenizer: Tokenizer, text: str) -> int:
    """Its id. Raises CheckpointError where the tokenizer has none."""
    found = tokenizer.token_to_id(text)
    if found is None:
        raise CheckpointError(f"tokenizer.json: there is no token {text!r}, expected: DeepSeek's special tokens")
    return found


def train(args: argparse.Namespace, started_s: float) -> None:
    """Corpus, training, export. Raises JaxserveError."""
    options, config = options_of(args), read_json(args.config / "config.json")
    if args.resume and args.from_weights:
        raise ConfigError("--from-weights: got one, allowed: none beside --resume, which has weights of its own")
    tokenizer_path = args.config / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    if special_token(tokenizer, BOS) != config["bos_token_id"] or tokenizer.get_vocab_size() > config["vocab_size"]:
        raise CheckpointError(f"{tokenizer_path}: BOS or size of the vocabulary is not what config.json says")
    if args.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(args.compile_cache.resolve()))
    if not args.resume:
        shutil.rmtree(args.out, ignore_errors=True)
    source = partial(rows_from, tokenizer_path, options, args.wordnet, args.processes)
    about = {"seed": options.seed, "row_tokens": options.row_tokens, "wordnet": args.wordnet is not None}
    rows = {TRAIN: 8 * options.batch_rows if args.tiny else args.rows}
    rows |= {VALIDATION: options.part_rows if args.tiny else args.validation_rows}
    corpus = {split: get_rows(source, split, count, args.keep_rows, about) for split, count in rows.items()}
    print(f"corpus after {time.monotonic() - started_s:.0f} s", flush=True)
    split = split_decoder(model_spec(config), jnp.dtype(options.dtype), with_mtp=True)
    print(describe(split, options, rows[TRAIN]), flush=True)
    trainer = Trainer(split, options)
    weights = weights_from(split, args.from_weights) if args.from_weights else fresh_weights(split, options.seed)
    place = Place(args.out, corpus[TRAIN], corpus[VALIDATION], special_token(tokenizer, USER))
    state = run(trainer, weights, place, started_s, args.resume)
    for name in ("bf16", "fp8"):
        shutil.rmtree(args.out / name, ignore_errors=True)
        size_bytes = export_model(split, state.weights, args.config, args.out / name, fp8=name == "fp8")
        print(f"{args.out / name}: {size_bytes / 1e6:.2f} MB", flush=True)
    print(f"done after {time.monotonic() - started_s:.0f} s", flush=True)


def rows_from(
    tokenizer_path: Path, options: Options, wordnet: Path | None, processes: int, split: str, rows: int
) -> tuple:
    """The corpus's rows, with what its generation took."""
    begun_s = time.monotonic()
    found = token_rows(tokenizer_path, split, options.seed, rows, options.row_tokens, processes, wordnet)
    spent_s, tokens = time.monotonic() - begun_s, rows * options.row_tokens
    print(
        f"{split}: {tokens / 1e6:.1f} M tokens in {spent_s:.1f} s, {tokens / spent_s / 1e6:.2f} M a second", flush=True
    )
    return found


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; every failure is one sentence on standard error."""
    started_s = time.monotonic()
    try:
        train(build_parser().parse_args(argv), started_s)
    except JaxserveError as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
