"""What the doctor says about what it finds; the probing itself is replaced."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from hpcray.state import doctor
from hpcray.state.doctor import FAIL, NOTE, OK, WARN, Finding

WIRES: dict[str, Any] = {
    "mpi": "Open MPI v5.0.11",
    "mpi4py": "4.1.2",
    "ucx": "1.21.0",
    "libucx": "/lib/libucp.so",
    "transports": ["tcp/eth0", "posix/memory"],
    "rdma": False,
}


def level_of(findings: list[Finding], name: str) -> str:
    (found,) = [finding for finding in findings if finding.name == name]
    return found.level


def banner(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    return {"mpirun": str(path)}


def test_mpirun_of_the_same_mpi(tmp_path: Path) -> None:
    found = doctor._mpi(WIRES, banner(tmp_path, "mpirun (Open MPI) 5.0.11"))
    assert level_of(found, "library") == level_of(found, "mpirun") == OK


def test_mpirun_of_another_mpi_is_a_failure(tmp_path: Path) -> None:
    found = doctor._mpi(WIRES, banner(tmp_path, "HYDRA build details:"))
    assert level_of(found, "mpirun") == FAIL
    assert "alone" in found[-1].hint


def test_no_launcher_and_no_mpi_are_failures() -> None:
    assert level_of(doctor._mpi(WIRES, {}), "launcher") == FAIL
    assert level_of(doctor._mpi({**WIRES, "mpi": "no MPI: ...", "mpi4py": ""}, {}), "library") == FAIL
    assert level_of(doctor._mpi({"error": "code -11"}, {}), "library") == FAIL


def test_ucx_without_adapters_talks_tcp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    assert level_of(doctor._ucx(WIRES, False), "RDMA") == NOTE
    assert level_of(doctor._ucx(WIRES, True), "RDMA") == FAIL


def test_an_idle_rdma_adapter_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    found = doctor._ucx(WIRES, False)
    assert "mlx5_0 (active, 200 Gb/sec (4X HDR))" in [finding.value for finding in found]
    assert level_of(found, "RDMA") == WARN
    assert level_of(doctor._ucx({**WIRES, "rdma": True}, True), "RDMA") == OK


def test_without_ucx_bytes_go_over_mpi() -> None:
    found = doctor._ucx({**WIRES, "libucx": "", "ucx": "no UCX: ImportError"}, False)
    assert level_of(found, "library") == WARN
    assert "over MPI" in found[0].value


@pytest.mark.parametrize(
    ("soft", "level"), [(1024, WARN), (1 << 20, OK), (resource.RLIM_INFINITY, OK)], ids=["few", "many", "unlimited"]
)
def test_limits(soft: int, level: str) -> None:
    found = doctor._limits(lambda number: (soft, soft), rdma=False)
    assert {finding.level for finding in found} == {level}
    assert len(doctor._limits(lambda number: (soft, soft), rdma=True)) == len(found) + 1


def test_a_temporary_directory_that_cannot_hold_sockets_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HPCRAY_TMPDIR", "/tmp")
    assert doctor._directory()[0].level == OK
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("HPCRAY_TMPDIR", str(deep))
    (found,) = doctor._directory()
    assert found.level == WARN
    assert "too long" in found.hint


def test_a_program_that_fails_is_said_not_to_work(tmp_path: Path) -> None:
    path = tmp_path / "srun"
    path.write_text("#!/bin/sh\necho 'srun: error: no controller' >&2\nexit 1\n")
    path.chmod(0o755)
    (found,) = [finding for finding in doctor._mpi(WIRES, {"srun": str(path)}) if finding.name == "srun"]
    assert found.value == f"{path}: does not work: srun: error: no controller"
