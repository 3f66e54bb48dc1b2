"""The one table from Hugging Face's model_type to the file that reads its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.errors import ModelError
from jaxserve.models import deepseek, deepseek_v2, deepseek_v3, glm, glm4, glm4_moe, glm4_moe_lite, llama
from jaxserve.models.spec import ModelSpec

FAMILIES: dict[str, Callable[[dict[str, Any]], ModelSpec]] = {
    "chatglm": glm.chatglm_spec,
    "deepseek": deepseek.model_spec,
    "deepseek_v2": deepseek_v2.model_spec,
    "deepseek_v3": deepseek_v3.model_spec,
    "glm": glm.model_spec,
    "glm4": glm4.model_spec,
    "glm4_moe": glm4_moe.model_spec,
    "glm4_moe_lite": glm4_moe_lite.model_spec,
    "llama": llama.model_spec,
}


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """A config.json's contents -> ModelSpec. Raises ModelError naming what is known where model_type is not."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"config.json: model_type is {kind!r}, supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind](config)
