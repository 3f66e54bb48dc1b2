"""Takes packed rows from a source; gives arrays that lie on the device, and the order in which steps use them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxserve.errors import ConfigError

Source = Callable[[str, int], tuple[np.ndarray, np.ndarray]]  # split, rows -> uint16 ids and uint8 mask, [N, C] each
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows of packed documents, [N, C]; `count` says which tokens are targets."""

    token_NC: np.ndarray  # uint16
    count_NC: np.ndarray  # uint8

    def on_device(self) -> tuple[jax.Array, jax.Array]:
        """Both arrays whole: 300 M tokens are 0.9 GB, and a step then gathers its rows by itself."""
        return jax.device_put(self.token_NC), jax.device_put(self.count_NC)


def get_rows(source: Source, split: str, rows: int, kept_in: Path | None, about: dict[str, object]) -> TokenRows:
    """The first `rows` of a split, from `kept_in` where they are there from a run with the same facts `about` them."""
    name = f"{split}-{rows}"
    facts = json.dumps(about | {"split": split, "rows": rows}, sort_keys=True)
    if kept_in is not None and (kept_in / f"{name}.json").is_file():
        if (kept_in / f"{name}.json").read_text() == facts:
            return TokenRows(*(np.load(kept_in / f"{name}-{part}.npy") for part in ("tokens", "count")))
    found = TokenRows(*source(split, rows))
    if kept_in is not None:
        kept_in.mkdir(parents=True, exist_ok=True)
        np.save(kept_in / f"{name}-tokens.npy", found.token_NC)
        np.save(kept_in / f"{name}-count.npy", found.count_NC)
        (kept_in / f"{name}.json").write_text(facts)
    return found


def rows_of_step(step: int, rows: int, batch_rows: int, seed: int) -> np.ndarray:
    """int32 [batch_rows]: each epoch is a permutation of its own, its last rows that fill no batch are left out.

    A function of the step's number alone, so that a resumed run goes on with what the first would have taken.
    """
    per_epoch = rows // batch_rows
    if not per_epoch:
        raise ConfigError(f"--rows: got {rows}, allowed: at least --batch-rows, {batch_rows}")
    epoch, at = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(rows)
    return order[at * batch_rows : (at + 1) * batch_rows].astype(np.int32)


def by_kind(rows: TokenRows, bos_token_id: int, chat_token_id: int) -> dict[str, np.ndarray]:
    """What counts of prose and of chats, uint8 [N, C] each: a document with `chat_token_id` in it is a chat."""
    token_NC = rows.token_NC
    document_NC = np.cumsum(token_NC == bos_token_id, axis=1)
    key_NC = document_NC + np.arange(len(token_NC))[:, None] * (token_NC.shape[1] + 1)
    chats = np.unique(key_NC[token_NC == chat_token_id])
    is_chat_NC = np.isin(key_NC, chats)
    return {"chat": rows.count_NC * is_chat_NC, "prose": rows.count_NC * ~is_chat_NC}
