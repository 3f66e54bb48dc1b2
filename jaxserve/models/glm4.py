"""`model_type: glm4` (GLM-4-0414, GLM-Z1): config.json -> ModelSpec. `glm` with a norm after each block too."""

from __future__ import annotations

from typing import Any

from jaxserve.models import glm
from jaxserve.models.spec import ModelSpec


def model_spec(config: dict[str, Any]) -> ModelSpec:
    """Raises ModelError for a missing field or a feature that this file does not know."""
    return glm.model_spec(config, post_norms=True)
