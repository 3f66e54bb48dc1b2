"""Takes the lines of a training log; gives its curves as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot(lines: Sequence[dict[str, Any]], target: Path) -> None:
    """Losses and the experts' balance over the tokens seen, PNG."""
    figure = Figure(figsize=(9, 8))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for kind in sorted({line["kind"] for line in lines}):
        chosen = [line for line in lines if line["kind"] == kind]
        for field, style in (("loss", "-"), ("mtp_loss", ":")):
            points = [(line["step"], line[field]) for line in chosen if math.isfinite(line.get(field, math.nan))]
            if points:
                dots = {} if kind == "train" else {"marker": "o", "markersize": 3}
                above.plot(*zip(*points, strict=True), style, label=f"{kind} {field}", linewidth=1, **dots)
    steps = [line for line in lines if "load_max" in line]
    for field in ("load_max", "load_min"):
        below.plot([line["step"] for line in steps], [line[field] for line in steps], label=field, linewidth=1)
    above.set_ylabel("nats a token")
    below.set_ylabel("experts' load / mean, worst layer")
    below.set_xlabel("step")
    for part in (above, below):
        part.grid(alpha=0.3)
        if part.has_data():
            part.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
