"""Run by a Python that has torch and transformers, and nothing of ours: a directory's float32 logits of some tokens.

    python _logits_torch.py MODEL TOKENS.npy LOGITS.npy

TOKENS: int [I, C], each row a prompt of its own; LOGITS: float32 [I, C, V].
"""

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main(model: str, tokens: str, logits: str) -> None:
    """Load in float32 on the CPU, with eager attention: no kernel stands between the definition and the figures."""
    loaded, about = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for what in ("missing_keys", "mismatched_keys"):
        if about[what]:
            sys.exit(f"transformers: {what}: {sorted(map(str, about[what]))}")
    with torch.no_grad():
        found = loaded.eval()(torch.from_numpy(np.load(tokens)).long()).logits
    np.save(logits, found.float().numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
