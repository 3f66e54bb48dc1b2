"""The one table from Hugging Face's model_type to the file that names its tensors."""

from __future__ import annotations

from collections.abc import Callable

from checkpoints.names import (
    chatglm,
    deepseek,
    deepseek_v2,
    deepseek_v3,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    llama,
)
from checkpoints.names.table import NameTable
from jaxserve.errors import ModelError
from jaxserve.models.spec import ModelSpec

TABLES: dict[str, Callable[[ModelSpec], NameTable]] = {
    "chatglm": chatglm.name_table,
    "deepseek": deepseek.name_table,
    "deepseek_v2": deepseek_v2.name_table,
    "deepseek_v3": deepseek_v3.name_table,
    "glm": glm.name_table,
    "glm4": glm4.name_table,
    "glm4_moe": glm4_moe.name_table,
    "glm4_moe_lite": glm4_moe_lite.name_table,
    "llama": llama.name_table,
}


def name_table(model_type: str, spec: ModelSpec) -> NameTable:
    """Raises ModelError naming what is known where model_type is not."""
    if model_type not in TABLES:
        raise ModelError(f"config.json: model_type is {model_type!r}, supported: {', '.join(sorted(TABLES))}")
    return TABLES[model_type](spec)
