"""Kernels whose bytes depend on what they compute alone, not on what was lowered before them.

JAX writes a name for dumps into each Mosaic GPU kernel, with a count of the kernels that the process has lowered. So no
two programs share a kernel's machine code, though the runtime keeps it by the kernel's bytes: each is compiled again,
about a second of ptxas. A name that is there already is kept.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir

_DUMP_NAME = "mosaic_gpu.dump_basename"


def leave_out_counts() -> None:
    """From now on in this process. Dumps of kernels of one name replace each other then."""
    counted = mgpu.dialect.get_or_set_dump_options
    if not hasattr(counted, "counted"):
        mgpu.dialect.get_or_set_dump_options = _Named(counted)


class _Named:
    """JAX's function, after the kernel's own name was set."""

    def __init__(self, counted: Any) -> None:
        self.counted = counted

    def __call__(self, module: ir.Module) -> Any:
        attributes = module.operation.attributes
        if _DUMP_NAME not in attributes and "sym_name" in attributes:
            attributes[_DUMP_NAME] = ir.StringAttr.get(attributes["sym_name"].value, context=module.context)
        return self.counted(module)
