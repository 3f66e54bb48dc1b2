"""Reading a Hugging Face config.json field by field, each failure one sentence."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import ModelError


def read(config: dict[str, Any], name: str, kind: type) -> Any:
    """A required field of the given type."""
    if name not in config:
        raise ModelError(f"config.json: {name} is missing")
    value = config[name]
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
        raise ModelError(f"config.json: {name} is {value!r}, expected: {kind.__name__}")
    return value


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
