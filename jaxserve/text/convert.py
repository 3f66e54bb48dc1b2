"""Takes a directory with tokenizer files older than tokenizer.json; prints the text of a tokenizer.json.

Run as a process of its own, so that the seconds and the memory that transformers costs are not the server's.
"""

from __future__ import annotations

import sys

from transformers import AutoTokenizer


def main(directory: str) -> None:
    """Print the converted tokenizer; anything that goes wrong ends the process with its reason as the last line."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    sys.stdout.write(tokenizer.backend_tokenizer.to_str())


if __name__ == "__main__":
    main(sys.argv[1])
