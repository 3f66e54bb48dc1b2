"""The public names, resolved on first use, so that importing jaxserve costs nothing and touches no device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.client import Client
    from jaxserve.engine_app import explain_model
    from jaxserve.errors import (
        CheckpointError,
        ConfigError,
        DeviceError,
        InvalidRequest,
        JaxserveError,
        ModelError,
        RequestFailed,
    )
    from jaxserve.llm import LLM
    from jaxserve.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxserve.llm",
    "Client": "jaxserve.client",
    "explain_model": "jaxserve.engine_app",
    "SamplingParams": "jaxserve.request",
    "RequestOutput": "jaxserve.request",
    "CompletionOutput": "jaxserve.request",
    "Logprob": "jaxserve.request",
    "JaxserveError": "jaxserve.errors",
    "InvalidRequest": "jaxserve.errors",
    "RequestFailed": "jaxserve.errors",
    "ConfigError": "jaxserve.errors",
    "ModelError": "jaxserve.errors",
    "CheckpointError": "jaxserve.errors",
    "DeviceError": "jaxserve.errors",
}

__all__ = [
    "LLM",
    "CheckpointError",
    "Client",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "InvalidRequest",
    "JaxserveError",
    "Logprob",
    "ModelError",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "explain_model",
]


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in, and keep the name here for the next time."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
