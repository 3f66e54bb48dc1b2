"""What this process may use of the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxserve import environment

SECOND = {"cpu.max": "max 100000\n", "a/cpu.max": "{quota} 100000\n", "a/b/cpu.max": "max 100000\n"}
FIRST = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
FIRST |= {"cpu/a/b/cpu.cfs_quota_us": "{quota}", "cpu/a/b/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("member", "files"),
    [
        ("0::/a/b\n", SECOND),
        ("3:memory:/c\n2:cpu,cpuacct:/a/b\n0::/\n", FIRST),
        ("0::/outside/of/the/container\n", {"cpu.max": "{quota} 100000\n"}),
    ],
    ids=["version 2", "version 1", "a container"],
)
def test_usable_cores_obey_affinity_and_cgroups(
    member: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "member").write_text(member)

    def cores(quota: int) -> int:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text.format(quota=quota))
        return environment.usable_cores(tmp_path, tmp_path / "member")

    assert [cores(quota) for quota in (350_000, 50_000, 1_600_000)] == [3, 1, 8]
    assert environment.usable_cores(tmp_path / "none", tmp_path / "none") == 8
