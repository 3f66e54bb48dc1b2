"""Reading a Hugging Face config.json field by field, each failure one sentence."""

from __future__ import annotations

import math
from typing import Any

from jaxserve.errors import ModelError

REQUIRED = object()  # a default that is none


def read(config: dict[str, Any], name: str, kind: type) -> Any:
    """A required field of the given type."""
    if name not in config:
        raise ModelError(f"config.json: {name} is missing")
    value = config[name]
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
        raise ModelError(f"config.json: {name} is {value!r}, expected: {kind.__name__}")
    return value


def integer(config: dict[str, Any], name: str, default: Any = REQUIRED, least: int = 1) -> int:
    """A whole number of at least `least`; `default` where it is absent or null."""
    value = config.get(name)
    if value is None and default is not REQUIRED:
        return default
    value = read(config, name, int)
    if value < least:
        raise ModelError(f"config.json: {name} is {value}, allowed: at least {least}")
    return value


def number(config: dict[str, Any], name: str, default: Any = REQUIRED) -> float:
    """A positive finite number; `default` where it is absent."""
    if name not in config and default is not REQUIRED:
        return default
    if name not in config:
        raise ModelError(f"config.json: {name} is missing")
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {name} is {value!r}, expected: a positive number")
    return float(value)


def flag(config: dict[str, Any], name: str, default: bool) -> bool:
    """true or false; `default` where it is absent."""
    return read(config, name, bool) if name in config else default


def require_equal(config: dict[str, Any], name: str, expected: object) -> None:
    """Refuse a switch that we do not implement in any but its usual position; absent is fine."""
    if name in config and config[name] != expected:
        raise ModelError(f"config.json: {name} is {config[name]!r}, supported: {expected!r}")


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An id, a list of ids or nothing, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def checkpoint_dtype(config: dict[str, Any]) -> str:
    """The dtype that the weights were saved in, from either spelling of the field."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"config.json: torch_dtype is {name!r}, supported: bfloat16, float16, float32")
    return name
