"""A process that lowers programs for another one (see `apart.py`): a pickled Job comes in, pickled answers go out.

An answer is (name, the fields of the program's `jax.export.Exported`), or (name, text of the error). They are pickled
and not serialised by `jax.export`, which would need one more package; both ends are the same code on the same host.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.runtime.apart import Job
from jaxserve.runtime.lower import Lowering, lower_steps
from jaxserve.runtime.state import state_shapes
from pallas_kernels.device import Device
from pallas_kernels.kernel_names import leave_out_counts

NO_VALUE = ("_get_vjp",)  # a function, which no pickle holds; it gives derivatives


def main() -> None:
    """Serve one job, then end; end at once when standard input does, since nobody waits for the answers then."""
    gc.disable()  # a twentieth of the time, and 3 % more memory of a process that does not live long
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    job: Job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=end_with_parent, daemon=True).start()
    use_settings(job.settings)
    leave_out_counts()
    steps = steps_of(job)
    for name in job.names:
        pickle.dump((name, answer_for(steps[name], job.options.device)), answers)
        answers.flush()


def end_with_parent() -> None:
    """Wait for the end of standard input, which the parent holds open as long as it lives.

    The file is read below Python's buffer, whose lock this thread would hold when the process ends.
    """
    while os.read(0, 1):
        pass
    os._exit(1)


def use_settings(settings: dict[str, Any]) -> None:
    """Set JAX up as in the parent; the parent runs the same version, so nothing need be portable."""
    for name, value in settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    jax.config.update("jax_export_ignore_forward_compatibility", True)


def steps_of(job: Job) -> dict[str, Lowering]:
    """The parent's programs, on this process's devices; nothing is allocated."""
    mesh, dtype = make_mesh(jax.devices(), *job.mesh_sizes), jnp.dtype(job.dtype)
    split = split_decoder(job.spec, dtype, mesh)
    shapes = state_shapes(split.spec, job.options.shape, dtype, mesh)
    return lower_steps(split, job.buckets, job.options, shapes, mesh)


def answer_for(lowering: Lowering, device: Device) -> dict[str, Any] | str:
    """The exported program's fields, or what went wrong."""
    try:
        return fields_of(export_for(lowering, device))
    except Exception as error:  # JAX and the kernels raise their own; the parent lowers the program itself
        return f"{type(error).__name__}: {error}".splitlines()[0]


def export_for(lowering: Lowering, device: Device) -> export.Exported:
    """Lower for the parent's device. Donation is left to the parent's call."""
    platform = "cuda" if device.platform == "gpu" else device.platform
    jitted = jax.jit(lowering.function, out_shardings=lowering.places)
    return export.export(jitted, platforms=[platform])(*lowering.arguments)


def fields_of(exported: export.Exported) -> dict[str, Any]:
    """What makes an equal Exported."""
    names = [field.name for field in dataclasses.fields(exported)]
    return {name: None if name in NO_VALUE else getattr(exported, name) for name in names}


if __name__ == "__main__":
    main()
