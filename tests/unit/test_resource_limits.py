"""CPUs and memory under affinity masks and cgroups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcray.platform import resource_limits


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /sys/fs/cgroup, on a machine with 16 CPUs."""
    monkeypatch.setattr(resource_limits, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def member(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    """Let /proc/self/cgroup say `lines`."""
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *rest: lines if str(self) == "/proc/self/cgroup" else real(self, *rest)
    )


def test_the_affinity_mask_limits_the_usable_cpus(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member(monkeypatch, "0::/\n")
    assert resource_limits.usable_cpus() == 16


@pytest.mark.parametrize(("quota", "cpus"), [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_cpu_quota_of_cgroup_v2_counts_at_any_level(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int
) -> None:
    leaf = cgroup / "job" / "step"
    leaf.mkdir(parents=True)
    (leaf / "cpu.max").write_text("max 100000\n")
    (cgroup / "job" / "cpu.max").write_text(quota + "\n")
    member(monkeypatch, "0::/job/step\n")
    assert resource_limits.usable_cpus() == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 16), ("300000", 3)])
def test_a_cpu_quota_of_cgroup_v1_counts(cgroup: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int) -> None:
    leaf = cgroup / "cpu" / "job"
    leaf.mkdir(parents=True)
    (leaf / "cpu.cfs_quota_us").write_text(quota)
    (leaf / "cpu.cfs_period_us").write_text("100000")
    member(monkeypatch, "3:cpuset:/\n2:cpu:/job\n")
    assert resource_limits.usable_cpus() == cpus


def test_usable_memory_is_cut_to_the_smallest_cgroup_limit(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaf = cgroup / "job" / "step"
    leaf.mkdir(parents=True)
    (leaf / "memory.max").write_text("max\n")
    member(monkeypatch, "0::/job/step\n")
    machine = resource_limits.usable_memory()
    assert machine > 1 << 28
    (cgroup / "job" / "memory.max").write_text(str(1 << 28))
    assert resource_limits.usable_memory() == 1 << 28


def test_ranks_share_the_cpus_of_a_host_unless_the_launcher_has_bound_them(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member(monkeypatch, "0::/\n")
    assert resource_limits.cpus_per_rank(1) == 16
    assert resource_limits.cpus_per_rank(4) == 4
    assert resource_limits.cpus_per_rank(32) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4) if pid == 0 else range(16)))
    assert resource_limits.cpus_per_rank(4) == 4, "bound to 4 of its parent's 16"


@pytest.mark.parametrize(
    ("told", "cpus", "memory"),
    [
        ({"SLURM_CPUS_ON_NODE": "4", "SLURM_MEM_PER_NODE": "100"}, 4, 100 << 20),
        ({"SLURM_CPUS_ON_NODE": "64", "SLURM_MEM_PER_NODE": "0"}, 16, None),
        ({}, 16, None),
    ],
    ids=["less than the machine", "more than the mask", "not told"],
)
def test_limits_of_the_batch_system_count_without_cgroups_too(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], cpus: int, memory: int | None
) -> None:
    member(monkeypatch, "0::/\n")
    machine = resource_limits.usable_memory()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert resource_limits.usable_cpus() == cpus
    assert resource_limits.usable_memory() == (memory or machine)
