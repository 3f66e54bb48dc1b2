#!/usr/bin/env python3
"""Measure the demo model's quality through the library, on a CPU or a GPU, and write it as JSON.

    scripts/eval_demo.py out/demo/bf16 --json quality.json

Perplexity of whole documents of the training and the held-out split, prose and chats apart; exact answers to held-out
questions; variety of sampled stories; and how often the MTP layer's first draft token is what the model then says.
MODEL is a directory with plain weights and the MTP layer, as scripts/train_demo.py writes to OUT/bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from checkpoints.readers.reader import read_json  # noqa: E402
from demo_model import quality  # noqa: E402
from demo_model.corpus import evaluation  # noqa: E402
from demo_model.corpus.pack import token_rows  # noqa: E402
from demo_model.train.data import TRAIN, VALIDATION  # noqa: E402
from demo_model.train.state import compute_leaves, weights_from  # noqa: E402
from jaxserve.errors import JaxserveError  # noqa: E402
from jaxserve.llm import LLM  # noqa: E402
from jaxserve.models.decoder import split_decoder  # noqa: E402
from jaxserve.models.families import model_spec  # noqa: E402
from jaxserve.request import SamplingParams  # noqa: E402

USER = "<\uff5cUser\uff5c>"
STORY_PARAMS = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 400}
ROW_TOKENS = 1024


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="a Hugging Face directory with plain weights and the MTP layer")
    parser.add_argument("--json", type=Path, help="where the figures go; standard output without it")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--wordnet", type=Path, help="its files, where the model was trained with them")
    parser.add_argument("--documents", type=int, default=200, help="whose perplexity is taken, of each split and kind")
    parser.add_argument("--questions", type=int, default=200, help="of each kind, at most")
    parser.add_argument("--stories", type=int, default=30, help="that are sampled and kept")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--seed", type=int, default=1, help="of the corpus and of the stories")
    parser.add_argument("--processes", type=int, default=2, help="that generate the texts")
    return parser


def perplexities(llm: LLM, args: argparse.Namespace, bos_token_id: int) -> dict[str, dict[str, float]]:
    """By split and kind."""
    tokenizer_path = args.model / "tokenizer.json"
    user = Tokenizer.from_file(str(tokenizer_path)).token_to_id(USER)
    found = {}
    for split in (TRAIN, VALIDATION):
        rows = max(8, args.documents * 2)
        token_NC, _ = token_rows(tokenizer_path, split, args.seed, rows, ROW_TOKENS, args.processes, args.wordnet)
        documents = quality.documents_of(np.asarray(token_NC), bos_token_id, 1 << 30)
        for kind, is_chat in (("prose", False), ("chat", True)):
            chosen = [one for one in documents if (user in one) == is_chat and len(one) < llm.limits.max_model_len]
            found[f"{split} {kind}"] = quality.perplexity(llm, chosen[: args.documents])
    return found


def stories(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Sampled, with their variety."""
    prompts = list(evaluation.story_prompts(args.stories))
    params = [SamplingParams(**STORY_PARAMS, seed=args.seed + index) for index in range(len(prompts))]
    texts = [output.outputs[0].text for output in llm.chat([list(prompt) for prompt in prompts], params)]
    variety = {f"distinct_{n}": quality.distinct(texts, n) for n in (1, 2, 3)}
    return variety | {"stories": len(texts), "different": len(set(texts)), "texts": texts}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All of it. Raises JaxserveError."""
    begun_s = time.monotonic()
    config = read_json(args.model / "config.json")
    options = {"device": args.device, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    with LLM(str(args.model), **options) as llm:
        groups = {kind: records[: args.questions] for kind, records in evaluation.question_sets(args.seed).items()}
        rates, said = quality.answer_rates(llm, groups, args.max_tokens)
        found = {"perplexity": perplexities(llm, args, config["bos_token_id"]), "answers": rates}
        found["stories"] = stories(llm, args)
        found["model"] = {"path": args.model.name, "dtype": llm.config.model.dtype}
    split = split_decoder(model_spec(config), jnp.dtype(jnp.float32), with_mtp=True)
    leaves = compute_leaves(split, weights_from(split, args.model))
    found["mtp_acceptance"] = quality.acceptance(split, leaves, said, config["bos_token_id"])
    return found | {"seconds": time.monotonic() - begun_s}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; every failure is one sentence on standard error."""
    args = build_parser().parse_args(argv)
    try:
        found = measure(args)
    except JaxserveError as error:
        print(f"eval_demo: {error}", file=sys.stderr)
        return error.exit_code
    text = json.dumps(found, indent=1, ensure_ascii=False)
    if args.json:
        args.json.write_text(text + "\n")
        for kind, one in found["answers"].items():
            print(f"{kind}: {one['rate']:.3f} of {one['asked']}")
        print(json.dumps(found["perplexity"] | {"mtp_acceptance": found["mtp_acceptance"]}))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
