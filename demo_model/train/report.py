"""Takes what a run measured; gives its JSON lines, and a line on the screen now and then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from demo_model.train.loss import Losses
from demo_model.train.step import Measured

PRINTED_STEPS = 20


def means(found: Losses) -> dict[str, float]:
    """Means over the counted tokens, of sums that the device or several calls have made."""
    main, main_hits, main_tokens, mtp, mtp_hits, mtp_tokens = (float(value) for value in found)
    said = {"loss": main / max(main_tokens, 1), "accuracy": main_hits / max(main_tokens, 1), "tokens": main_tokens}
    if mtp_tokens:
        said |= {"mtp_loss": mtp / mtp_tokens, "mtp_accuracy": mtp_hits / mtp_tokens}
    return said


def balance(load_YX: np.ndarray) -> dict[str, Any]:
    """Of the experts' loads: the worst layer's largest and smallest share of the mean, and experts below a tenth."""
    if not load_YX.size:
        return {}
    share_YX = load_YX / np.maximum(load_YX.mean(axis=1, keepdims=True), 1)
    most, least, idle = float(share_YX.max()), float(share_YX.min()), int((share_YX < 0.1).sum())
    return {"load_max": most, "load_min": least, "idle_experts": idle}


class Log:
    """One JSON object a line, `step` being how many were done; the file goes on where a resumed run left it."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Lines of steps that will be taken again are dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        kept = read_log(path) if resumed_step and path.exists() else []
        self.lines = [line for line in kept if line["step"] <= resumed_step]
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def add(self, **fields: Any) -> None:
        """Append a line."""
        self.lines.append(fields)
        with self.path.open("a") as file:
            file.write(json.dumps(fields) + "\n")

    def train(self, step: int, measured: Measured, **fields: Any) -> None:
        """A step's line, printed every so often."""
        said = means(measured.losses) | balance(np.asarray(measured.load_YX))
        self.add(kind="train", step=step, gradient_norm=float(measured.gradient_norm), **said, **fields)
        if step % PRINTED_STEPS == 0 or step < 3:
            print(f"step {step}  " + "  ".join(short(*pair) for pair in self.lines[-1].items()), flush=True)

    def validation(self, step: int, kind: str, found: Losses) -> None:
        """A line of one kind of held-out text."""
        self.add(kind=f"validation_{kind}", step=step, **means(found))
        print(
            f"step {step}  validation {kind}  " + "  ".join(short(*pair) for pair in means(found).items()), flush=True
        )


def short(name: str, value: Any) -> str:
    """A field for the screen; nothing for those that each line begins with."""
    if name in ("kind", "step"):
        return ""
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
