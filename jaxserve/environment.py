"""What JAX and XLA read from the environment, set in one place before JAX is imported; the only reader of it too."""

from __future__ import annotations

import os
from pathlib import Path

XLA_FLAGS: tuple[str, ...] = ()  # measured ones only; see jaxserve/runtime/NOTES.md
HOST_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def prepare(device: str, gpu_memory_utilization: float) -> None:
    """Set up this process, and those it starts, for JAX on `device` (auto, cpu or cuda).

    The allocator takes its share of the GPU at once, so that a second server on the same GPU fails here and not later.
    JAX reads all this when it first looks for devices; once it has, the settings that it was started with hold.
    """
    if device != "auto":
        os.environ["JAX_PLATFORMS"] = device
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{gpu_memory_utilization:.3f}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["XLA_FLAGS"] = " ".join((*os.environ.get("XLA_FLAGS", "").split(), *XLA_FLAGS))


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), member: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process can keep busy: those that it may run on, or fewer where its cgroups limit its time.

    `cgroups`: where they are mounted; `member`: the file that says which of them this process is in.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *cpu_limits(cgroups, member)])))


def cpu_limits(cgroups: Path, member: Path) -> list[float]:
    """In cores, one for each cgroup above this process that has a limit, of version 2 or 1."""
    limits = []
    for line in read_or_empty(member).splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        folder = root / place.lstrip("/")
        for level in (folder, *(parent for parent in folder.parents if parent.is_relative_to(root))):
            one_line = read_or_empty(level / "cpu.max")
            two_files = f"{read_or_empty(level / 'cpu.cfs_quota_us')} {read_or_empty(level / 'cpu.cfs_period_us')}"
            match (one_line or two_files).split():
                case [quota, period] if quota.isdecimal() and period.isdecimal():  # else "max" or -1: no limit
                    limits.append(int(quota) / int(period))
    return limits


def read_or_empty(path: Path) -> str:
    """A file's text; empty where there is none to read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def default_compile_cache() -> str:
    """The folder that compiled programs are kept in unless a flag names another."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "jaxserve" / "compiled")


def reserves_memory() -> bool:
    """Whether JAX takes its whole share of the GPU's memory at its first allocation."""
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0")


def compiler_settings() -> list[tuple[str, str]]:
    """The variables that change what XLA and the kernel compiler make of a program; the order of flags counts."""
    prefixes = ("XLA_FLAGS", "MOSAIC_", "TF_XLA", "NVIDIA_TF32_OVERRIDE")
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(prefixes))


def worker_variables(num_devices: int, import_folders: list[str]) -> dict[str, str]:
    """The environment of a process that lowers programs for another one: `num_devices` CPU devices and no GPU.

    `import_folders`: where it looks for modules, in order.
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(HOST_DEVICES_FLAG)]
    return os.environ | {
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "CUDA_VISIBLE_DEVICES": "",  # it must not take any of the GPU's memory
        "PYTHONPATH": os.pathsep.join(import_folders),
    }
