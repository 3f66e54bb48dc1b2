#!/usr/bin/env python3
"""Compare exported weights of the demo model with transformers: the same logits, in float32.

    scripts/check_demo_export.py out/demo/fp8 --torch-python PYTHON

MODEL may be plain or fp8; of fp8 transformers is given the weights that its blocks stand for, as our loader reads them.
PYTHON is one that has torch and transformers; it may be another version than ours. Exit codes: 0 alike, 1 not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from checkpoints.export import export  # noqa: E402
from checkpoints.files import Kind  # noqa: E402
from checkpoints.readers.reader import read_json  # noqa: E402
from checkpoints.source import open_reader  # noqa: E402
from demo_model.train.loss import hidden_states  # noqa: E402
from demo_model.train.state import weights_from  # noqa: E402
from jaxserve.errors import JaxserveError  # noqa: E402
from jaxserve.layers.rows import Rows  # noqa: E402
from jaxserve.models.decoder import split_decoder  # noqa: E402
from jaxserve.models.families import model_spec  # noqa: E402

ROWS, ROW_TOKENS = 4, 96
MOST = 2e-5  # of the largest logit: sums in another order


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="an exported directory")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch and transformers")
    return parser


def our_logits(folder: Path, token_IC: np.ndarray) -> np.ndarray:
    """float32 [I, C, V], in training mode, whose logits are those of serving; random ids hold no BOS but the first."""
    config = read_json(folder / "config.json")
    split = split_decoder(model_spec(config), jnp.dtype(jnp.float32), with_mtp=True)

    @jax.jit
    def forward(leaves: list[jax.Array]) -> jax.Array:
        model = split.merge(leaves)
        hidden_TD, _ = hidden_states(model, jnp.asarray(token_IC), Rows.of(token_IC, config["bos_token_id"]))
        return model.logits(hidden_TD)

    return np.asarray(forward(weights_from(split, folder))).reshape(*token_IC.shape, -1)


def compare(model: Path, torch_python: str) -> float:
    """Largest difference as a share of the largest logit. Raises JaxserveError, CalledProcessError of torch's side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = folder / "plain"
        export(open_reader(model, Kind.HUGGING_FACE, dequantize=True), plain)
        config = read_json(plain / "config.json")
        token_IC = np.random.default_rng(0).integers(2, config["vocab_size"], (ROWS, ROW_TOKENS), dtype=np.int32)
        token_IC[:, 0] = config["bos_token_id"]
        np.save(folder / "tokens.npy", token_IC)
        script = Path(__file__).with_name("_logits_torch.py")
        paths = [str(plain), str(folder / "tokens.npy"), str(folder / "logits.npy")]
        subprocess.run([torch_python, str(script), *paths], check=True)
        want, got = np.load(folder / "logits.npy"), our_logits(plain, token_IC)
    return float(np.abs(got - want).max() / np.abs(want).max())


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        error = compare(args.model, args.torch_python)
    except (JaxserveError, subprocess.CalledProcessError) as failure:
        print(f"check_demo_export: {failure}", file=sys.stderr)
        return 1
    verdict = "alike" if error <= MOST else f"different, allowed: {MOST}"
    print(f"{args.model}: largest difference {error:.2e} of the largest logit: {verdict}")
    return int(error > MOST)


if __name__ == "__main__":
    sys.exit(main())
