"""The comparing part of check_parity: errors of two sets of logits against the truth, their figures, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RATIO = 1.5  # of our median error to transformers' in the same dtype
FLOAT32_LIMIT = 2e-4  # of any position

Arrays = Mapping[str, np.ndarray]


def errors(got: Arrays, want: Arrays, prefix: str, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Of all positions of all sequences: max |a - b| over the kept columns / max |b|, and whether argmax agrees.

    `got` has `{prefix}values_i` and `{prefix}argmax_i`, `want` those of float32 (see _parity_torch.py).
    """
    found, same = [], []
    for i in range(sequences):
        away_T = np.abs(got[f"{prefix}values_{i}"] - want[f"float32_values_{i}"]).max(1)
        found.append(away_T / want[f"float32_largest_{i}"])
        same.append(got[f"{prefix}argmax_{i}"] == want[f"float32_argmax_{i}"])
    return np.concatenate(found), np.concatenate(same)


def figures(error_T: np.ndarray, same_T: np.ndarray) -> dict[str, float]:
    """What is reported of some positions; errors that are no numbers make all figures NaN."""
    quantiles = np.quantile(error_T, (0.5, 0.99, 1.0))
    named = zip(("median", "p99", "max"), quantiles, strict=True)
    return {name: float(f"{value:.3e}") for name, value in named} | {"same_argmax": round(float(same_T.mean()), 4)}


def compare(ours: Arrays, reference: Arrays, dtype: str, sequences: int) -> dict[str, Any]:
    """Figures of all positions and of each form that a position took, ours and transformers', and `faults`: sentences.

    Judged is every form by itself: few positions decode, and would not show among all of them.
    """
    decoded_T = np.concatenate([ours[f"decoded_{i}"] for i in range(sequences)])
    sides = {"ours": errors(ours, reference, "", sequences)}
    if dtype == "bfloat16":
        sides["transformers"] = errors(reference, reference, "bfloat16_", sequences)
    forms = {"all": np.ones_like(decoded_T), "prefill": ~decoded_T, "decode": decoded_T}
    report: dict[str, Any] = {}
    faults: list[str] = []
    for form, chosen_T in forms.items():
        part = {side: figures(error_T[chosen_T], same_T[chosen_T]) for side, (error_T, same_T) in sides.items()}
        report[form] = {"positions": int(chosen_T.sum())} | part
        faults += judge(form, part)
    return report | {"faults": faults}


def judge(form: str, part: dict[str, dict[str, float]]) -> list[str]:
    """What is wrong with one form's figures, as sentences. A NaN passes no comparison."""
    ours, other = part["ours"], part.get("transformers")
    if other is None:
        fine = ours["max"] <= FLOAT32_LIMIT
        return [] if fine else [f"{form}: the largest error is {ours['max']:.1e}, allowed: {FLOAT32_LIMIT:.0e}"]
    if ours["median"] <= RATIO * other["median"]:
        return []
    return [f"{form}: the median error is {ours['median']:.1e}, allowed: {RATIO} x {other['median']:.1e}"]


def table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Lines for a person: model -> dtype -> what `compare` says, or `failed`."""
    lines = [f"{'model':18} {'dtype':9} {'positions':>14}  {'of':12} {'median':>8} {'p99':>8} {'max':>8} {'argmax':>7}"]
    for name, model in models.items():
        if "failed" in model:
            lines.append(f"{name:18} FAILED: {model['failed']}")
        for dtype in [key for key in ("bfloat16", "float32") if key in model]:
            lines += dtype_lines(name, dtype, model[dtype])
    return "\n".join(lines)


def dtype_lines(name: str, dtype: str, report: Mapping[str, Any]) -> Sequence[str]:
    """The lines of one model in one dtype."""
    if "failed" in report:
        return [f"{name:18} {dtype:9} FAILED: {report['failed']}"]
    lines = []
    for form in ("all", "prefill", "decode"):
        for side in [side for side in ("ours", "transformers") if side in report[form]]:
            one = report[form][side]
            numbers = " ".join(f"{one[key]:8.1e}" for key in ("median", "p99", "max"))
            count = f"{report[form]['positions']} {form}"
            lines.append(f"{name:18} {dtype:9} {count:>14}  {side:12} {numbers} {one['same_argmax']:7.1%}")
    verdict = "; ".join(report["faults"]) or "passes"
    return [*lines, f"{name:18} {dtype:9} {'NOT PASSED: ' if report['faults'] else ''}{verdict}"]
