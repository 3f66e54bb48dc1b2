"""The rope fields of a config.json (both the old `rope_scaling` and the new `rope_parameters`) -> RopeSpec."""

from __future__ import annotations

import math
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.layers.rope import RopeSpec
from jaxserve.models.fields import integer, number

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The scaling's own fields, from either spelling. Raises ModelError where there are some and no type is named."""
    both: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        fields = config.get(name) or {}
        if not isinstance(fields, dict):
            raise ModelError(f"config.json: {name} is {fields!r}, expected: an object")
        both |= fields
    if both.keys() & {"factor", "mscale"} and not (both.get("rope_type") or both.get("type")):
        raise ModelError(f"config.json: rope_scaling names no type, allowed: {', '.join(KINDS)}")
    return both


def rope_spec(config: dict[str, Any], head_dim: int, *, interleaved: bool = False, partial: float = 1.0) -> RopeSpec:
    """`partial`: the share of a head that rotates where the config does not say. Raises ModelError for a scaling type
    that is not in KINDS.

    `dynamic` (NTK) leaves the frequencies as they are up to max_position_embeddings, which is also the longest context
    that we serve: beyond it transformers recomputes them at every length, which a cache of rotated keys cannot follow.
    """
    fields = rope_fields(config)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"config.json: rope type is {kind!r}, supported: {', '.join(KINDS)}")
    partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", partial))
    rotary = int(head_dim * partial) if isinstance(partial, int | float) and 0 < partial <= 1 else 0
    if not rotary or rotary % 2:
        raise ModelError(
            f"config.json: partial_rotary_factor is {partial!r}, allowed: above 0 and at most 1, "
            f"and an even number of the {head_dim} dimensions that may rotate"
        )
    spec = {
        "theta": number(config | fields, "rope_theta", 10000.0),
        "rotary_dims": rotary,
        "interleaved": interleaved,
        "kind": "default" if kind == "dynamic" else kind,
    }
    if kind in ("linear", "llama3", "yarn"):
        need(fields, "factor", kind)
        spec["factor"] = number(fields, "factor")
    if kind in ("llama3", "yarn"):
        longest = integer(config, "max_position_embeddings", 0)
        spec["original_max_len"] = integer(fields, "original_max_position_embeddings", longest)
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            need(fields, name, kind)
            spec[name] = number(fields, name)
    if kind == "yarn":
        spec |= yarn_fields(fields, spec["factor"])
    return RopeSpec(**spec)


def need(fields: dict[str, Any], name: str, kind: str) -> Any:
    """A field that this scaling type cannot do without."""
    if fields.get(name) is None:
        raise ModelError(f"config.json: rope type {kind} needs {name}")
    return fields[name]


def yarn_fields(fields: dict[str, Any], factor: float) -> dict[str, Any]:
    """YaRN's own fields; attention_factor as transformers: given, from mscale and mscale_all_dim, or 0.1 ln f + 1."""
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = (number(fields, name, 0.0) for name in ("mscale", "mscale_all_dim"))
        both = bool(mscale and all_dim)
        attention_factor = mscale_of(factor, mscale) / mscale_of(factor, all_dim) if both else mscale_of(factor, 1.0)
    return {
        "beta_fast": number(fields, "beta_fast", 32.0),
        "beta_slow": number(fields, "beta_slow", 1.0),
        "truncate": bool(fields.get("truncate", True)),
        "attention_factor": float(attention_factor),
    }


def mscale_of(factor: float, mscale: float) -> float:
    """m(f, s) of models that scale attention with YaRN: 1 if f <= 1 else 0.1 s ln f + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
