"""Show documents of the corpus: python -m demo_model.corpus --seed 1 --split train --documents 20."""

from __future__ import annotations

import argparse
from pathlib import Path

from demo_model.corpus.document import Renderer
from demo_model.corpus.mix import TRAIN, VALIDATION, documents


def main() -> None:
    """Print them as the model is trained on them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--split", choices=(TRAIN, VALIDATION), default=TRAIN)
    parser.add_argument("--start", type=int, default=0, help="the first one's number")
    parser.add_argument("--documents", type=int, default=20, help="how many")
    parser.add_argument("--wordnet", type=Path, help="what python -m demo_model.corpus.wordnet fetched")
    args = parser.parse_args()
    render = Renderer()
    for document in documents(args.split, args.seed, args.start, args.documents, args.wordnet):
        print(render(document), end="\n\n")


if __name__ == "__main__":
    main()
