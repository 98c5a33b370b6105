"""What the doctor says about what it finds; the probing itself is replaced."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.machines import machine

from hpcray.cli import site as cli
from hpcray.platform.allocation import read_allocation
from hpcray.platform.spill_files import TmpDirectory
from hpcray.state import doctor, doctor_step
from hpcray.state.doctor import FAIL, NOTE, OK, WARN, DoctorFinding, DoctorRow, merge
from hpcray.transport import startup

WIRES: dict[str, Any] = {
    "mpi": "Open MPI v5.0.11",
    "mpi_text": "Open MPI v5.0.11, package: x",
    "mpi4py": "4.1.2",
    "ucx": "1.21.0",
    "libucx": "/lib/libucp.so",
    "transports": ["tcp/eth0", "posix/memory"],
    "rdma": False,
}
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_CPUS_PER_NODE": "16(x4)",
}


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may themselves run in an allocation."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_", "CUDA_"))]:
        monkeypatch.delenv(name)


def named(findings: list[DoctorFinding], name: str) -> DoctorFinding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def level_of(findings: list[DoctorFinding], name: str) -> str:
    return named(findings, name).level


def program(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


# ---------------------------------------------------------------- MPI, UCX, RDMA


def test_an_mpirun_of_mpi4pys_library_is_green(tmp_path: Path) -> None:
    mpirun = program(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    found = doctor.examine_mpi(WIRES, {"mpirun": mpirun})
    assert level_of(found, "library") == level_of(found, "mpirun") == OK


def test_mpirun_of_another_mpi_is_a_failure(tmp_path: Path) -> None:
    found = doctor.examine_mpi(WIRES, {"mpirun": program(tmp_path, "mpirun", "echo 'HYDRA build details:'")})
    assert level_of(found, "mpirun") == FAIL
    assert "alone" in named(found, "mpirun").hint


def test_whom_the_ports_of_mpirun_are_open_to(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    mpirun = program(tmp_path / "bin", "mpirun", "echo 'mpirun (Open MPI) 4.1.2'")
    row = named(doctor.examine_mpi(WIRES, {"mpirun": mpirun}), "mpirun's ports")
    assert (row.level, row.value) == (WARN, "open to the other users of its hosts") and "security.md" in row.hint
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libpmix.so.2").write_bytes(b"OpenPMIx 5.0.11 (PMIx Standard: 5.1)")
    row = named(doctor.examine_mpi(WIRES, {"mpirun": mpirun}), "mpirun's ports")
    assert row.level not in (WARN, FAIL) and row.value.startswith("none on one host")


HYDRA = "HYDRA build details:\\n    Version:                                 {}\\n    Release Date:     Fri Sep 25"


@pytest.mark.parametrize(
    ("text", "shown", "version"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25", "MPICH 5.0.2", "5.0.2"),
        ("MPICH Version:\t4.0.2\nMPICH Device:\tch4:ofi", "MPICH 4.0.2", "4.0.2"),
        ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date  :", "MVAPICH2 2.3.7", "3.2"),
        ("MVAPICH Version:\t3.0\nMVAPICH Release date:", "MVAPICH 3.0", "4.0"),
    ],
)
def test_versions_of_mpich_and_mvapich_are_readable(tmp_path: Path, text: str, shown: str, version: str) -> None:
    """MPICH's mpiexec gives its version in the second line; MVAPICH has MPICH's mpiexec."""
    mpirun = program(tmp_path, "mpirun", f"printf '{HYDRA.format(version)}\\n'")
    found = doctor.examine_mpi({**WIRES, "mpi": startup.library_name(text), "mpi_text": text}, {"mpirun": mpirun})
    assert (named(found, "library").value, level_of(found, "library")) == (shown, OK)
    assert (named(found, "mpirun").value, level_of(found, "mpirun")) == (f"{mpirun}: Hydra {version}", OK)


def test_no_launcher_and_no_mpi_are_failures() -> None:
    assert level_of(doctor.examine_mpi(WIRES, {}), "launcher") == FAIL
    assert level_of(doctor.examine_mpi({**WIRES, "mpi": "no MPI: ...", "mpi4py": ""}, {}), "library") == FAIL
    assert level_of(doctor.examine_mpi({"error": "code -11"}, {}), "library") == FAIL


def test_a_launcher_that_fails_is_reported_with_its_message(tmp_path: Path) -> None:
    path = program(tmp_path, "srun", "echo 'srun: error: no controller' >&2\nexit 1")
    found = doctor.examine_mpi(WIRES, {"srun": path})
    assert named(found, "srun").value == f"{path}: does not work: srun: error: no controller"


def test_a_task_of_srun_examines_the_start_up_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    }
    monkeypatch.setattr(doctor, "open_mpi_wheel_prefix", lambda: "/env")
    assert doctor.examine_start(WIRES, {}) == []
    (found,) = doctor.examine_start(WIRES, {**task, "PMIX_RANK": "0"})
    assert (found.level, found.value) == (OK, "srun gives PMIx")
    (found,) = doctor.examine_start(WIRES, {**task, "PMI_FD": "3"})
    assert found.level == FAIL and found.hint.startswith("srun --mpi=pmix")
    ulfm = {**task, "PMIX_RANK": "0", "OMPI_MCA_mpi_ft_enable": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert [finding.level for finding in doctor.examine_start(WIRES, ulfm)] == [OK, FAIL, WARN]
    monkeypatch.setattr(doctor, "open_mpi_wheel_prefix", lambda: "")
    of_the_site = doctor.examine_start(WIRES, {**task, "PMIX_RANK": "0"})
    assert "OMPI_MCA_pml=ucx" in named(of_the_site, "loss of a rank").hint
    assert len(doctor.examine_start(WIRES, {**task, "PMIX_RANK": "0", "OMPI_MCA_pml": "cm"})) == 1


def test_ucx_without_adapters_uses_tcp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    assert level_of(doctor.examine_ucx(WIRES, False), "RDMA") == NOTE
    required = named(doctor.examine_ucx(WIRES, True), "RDMA")
    assert required.level == FAIL and required.hint


def test_an_idle_rdma_adapter_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    found = doctor.examine_ucx(WIRES, False)
    assert "mlx5_0 (active, 200 Gb/sec (4X HDR))" in [finding.value for finding in found]
    assert level_of(found, "RDMA") == WARN
    assert level_of(doctor.examine_ucx({**WIRES, "rdma": True}, True), "RDMA") == OK


def test_without_ucx_bytes_go_over_mpi() -> None:
    found = doctor.examine_ucx({**WIRES, "libucx": "", "ucx": "no UCX: ImportError"}, False)
    assert level_of(found, "library") == WARN
    assert "over MPI" in found[0].value


def test_the_build_of_ucx_is_known_from_its_modules(tmp_path: Path) -> None:
    (tmp_path / "ucx").mkdir()
    for name in ("libuct_ib.so.0", "libuct_cuda.so", "libuct_ib_mlx5.so.0", "libucm_cuda.so"):
        (tmp_path / "ucx" / name).touch()
    found = doctor.examine_ucx({**WIRES, "libucx": str(tmp_path / "libucp.so")}, False)
    assert named(found, "build").value == "cuda, ib, ib_mlx5"


def test_the_adapter_on_the_own_numa_node_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_NETWORK", tmp_path / "none")
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path)
    for index in range(2):
        device = tmp_path / f"mlx5_{index}" / "device"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{index}\n")
    assert doctor.nearest_adapters({1}) == ["mlx5_1"]
    assert doctor.nearest_adapters({0, 1}) == ["mlx5_0", "mlx5_1"]


# ---------------------------------------------------------------- the host


@pytest.mark.parametrize(
    ("soft", "level"), [(1024, WARN), (1 << 31, OK), (resource.RLIM_INFINITY, OK)], ids=["few", "many", "unlimited"]
)
def test_low_resource_limits_are_warnings(soft: int, level: str) -> None:
    found = doctor.examine_limits(lambda number: (soft, soft), rdma=True)
    assert {finding.level for finding in found} == {level}
    assert level_of(doctor.examine_limits(lambda number: (soft, soft), rdma=False), "locked memory") == OK


def test_a_temporary_directory_too_deep_for_sockets_is_a_warning(tmp_path: Path) -> None:
    fine = named(doctor.examine_directories({"HPCRAY_TMPDIR": "/tmp"}), "session directory")
    assert fine.level == OK
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    bad = named(doctor.examine_directories({"HPCRAY_TMPDIR": str(deep)}), "session directory")
    assert bad.level == WARN and "too long" in bad.hint


def test_a_session_directory_on_a_shared_file_system_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "inspect_tmp_directory", lambda path: TmpDirectory(path, "", "lustre", 1 << 40, True))
    found = named(doctor.examine_directories({"HPCRAY_TMPDIR": "/tmp"}), "session directory")
    assert found.level == WARN and "on lustre, which all nodes share" in found.hint


@pytest.mark.parametrize(
    ("entry", "text", "level"),
    [
        (TmpDirectory("/s", "TMPDIR", "nfs4", 789 << 30, True), "/s: nfs4 (shared), 780 GiB free", NOTE),
        (TmpDirectory("/s", "", "tmpfs", 5 << 30, True), "/s: tmpfs (memory), 5 GiB free", NOTE),
        (TmpDirectory("/s", "TMPDIR", "xfs", 1 << 20, True), "/s: xfs (node-local), 1 MiB free", WARN),
        (TmpDirectory("/s", "TMPDIR", "xfs", 1 << 40, False), "/s: xfs (node-local), 1000 GiB free", WARN),
    ],
)
def test_temporary_directories_are_shown_with_type_and_free_space(entry: TmpDirectory, text: str, level: str) -> None:
    found = doctor._temporary(entry)
    assert (found.value, found.level) == (text, level)
    assert bool(found.hint) is (level == WARN)


def test_limits_on_cpus_and_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {
        **JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_MEM_PER_NODE": "50",
    }
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    cpus = named(doctor.examine_cpus(step), "CPUs")
    assert cpus.value.startswith("1 of 16 usable (affinity 16,") and "Slurm 1)" in cpus.value
    assert cpus.level == WARN and "--cpus-per-task" in cpus.hint
    assert named(doctor.examine_memory(step), "memory").value.startswith("50 MiB usable")


def test_the_doctor_notes_that_nodes_of_a_host_share_no_stores() -> None:
    assert named(doctor.examine_memory({"HPCRAY_SAME_HOST": "0"}), "neighbors").level == NOTE
    assert len(doctor.examine_memory({"HPCRAY_SAME_HOST": "1"})) == len(doctor.examine_memory({})) == 2


def test_binding_shows_cores_numa_nodes_and_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(tmp_path, monkeypatch)
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path / "sys/class/infiniband")

    def rows(cores: set[int], **environ: str) -> dict[str, str]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
        return {finding.name: finding.value for finding in doctor.examine_binding(environ)}

    both = rows(set(range(16)), CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert both["binding"] == "cores 0-15, NUMA nodes 0-1, network mlx5_0, mlx5_1"
    assert both["workers"] == "with GPU 0, 1: cores 0-7; with GPU 2, 3: cores 8-15; others: the cores of their rank"
    assert "RDMA ports" not in both, "UCX chooses"
    one = rows({9, 10}, CUDA_VISIBLE_DEVICES="3")
    assert one["binding"] == "cores 9-10, NUMA node 1, network mlx5_1"
    assert one["workers"] == "the cores of their rank"
    assert one["RDMA ports"] == "mlx5_1:1 (UCX_NET_DEVICES, if UCX has them)"
    site = rows({9, 10}, UCX_NET_DEVICES="mlx5_0:1", HPCRAY_BIND="0")
    assert site["RDMA ports"] == "mlx5_0:1 (UCX_NET_DEVICES of the site or the user)"
    assert site["workers"] == "the cores of their rank (HPCRAY_BIND=0)"
    assert doctor.runs([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_gpus_shown_are_those_of_the_job() -> None:
    (found,) = doctor.examine_gpus({**JOB, "CUDA_VISIBLE_DEVICES": "0,GPU-7"})
    assert (found.level, found.value) == (OK, "2: 0, GPU-7 (CUDA_VISIBLE_DEVICES); several ranks here divide them")
    (found,) = doctor.examine_gpus({**JOB, "CUDA_VISIBLE_DEVICES": "0", "HPCRAY_SHARE_GPUS": "1"})
    assert found.value.endswith("each of several ranks here offers all of them")
    (found,) = doctor.examine_gpus(JOB)
    assert found.value == "none"


def test_a_missing_dev_shm_is_a_failure() -> None:
    assert doctor.examine_shared_memory("/no/such/directory").level == FAIL


# ---------------------------------------------------------------- the job


def test_the_job_is_shown_with_nodes_start_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_step, "ask_end_time", lambda environ: time.time() + 7300)
    found = doctor_step.examine_job(read_allocation(JOB, "n1"), "pmix", "", JOB)
    assert named(found, "allocation").value == "job 7, 4 nodes: n[1-4]"
    assert named(found, "srun --mpi=pmix").level == OK
    assert (named(found, "time left").value, level_of(found, "time left")) == ("2 h 1 min", OK)
    assert "--no-kill" in named(found, "loss of a node").hint


@pytest.mark.parametrize(("end", "level"), [(None, NOTE), (300.0, WARN), (-5.0, WARN)])
def test_little_time_left_is_a_warning(monkeypatch: pytest.MonkeyPatch, end: float | None, level: str) -> None:
    monkeypatch.setattr(doctor_step, "ask_end_time", lambda environ: None if end is None else time.time() + end)
    found = doctor_step.examine_job(read_allocation(JOB, "n1"), "pmix", "can not load PMIx library", JOB)
    assert level_of(found, "time left") == level
    assert level_of(found, "srun --mpi=pmix") == FAIL and "mpirun" in named(found, "srun --mpi=pmix").hint


@pytest.mark.parametrize(
    ("offsets", "level"),
    [
        ({"a": (0.001, 0.002), "b": (-0.002, 0.002)}, OK),
        ({"a": (0.0, 0.01), "b": (5.0, 0.01)}, WARN),
        ({"a": (0.0, 0.01), "b": (3600.0, 0.01)}, FAIL),
        ({"a": (0.0, 2.0), "b": (2.5, 2.0)}, OK),
        ({"a": (0.0, 0.01)}, NOTE),
    ],
)
def test_clock_skew_is_judged_beyond_its_uncertainty(offsets: dict[str, tuple[float, float]], level: str) -> None:
    found = doctor_step.judge_clocks(offsets)
    assert found.level == level
    if level in (WARN, FAIL):
        assert "b is ahead of a" in found.value and "NTP" in found.hint


# ---------------------------------------------------------------- all nodes; their queries: test_doctor_step.py

SAME = DoctorFinding("host", "CPUs", "16", OK)


def test_equal_findings_of_several_nodes_are_one_row_in_the_order_of_the_report() -> None:
    odd = DoctorFinding("host", "/dev/shm", "full", FAIL, "clean up")
    fine = DoctorFinding("host", "/dev/shm", "free", OK)
    rows = merge({"n1": [SAME, fine], "n2": [SAME, odd], "n3": [SAME, fine]})
    assert rows == [DoctorRow(SAME, ("n1", "n2", "n3")), DoctorRow(fine, ("n1", "n3")), DoctorRow(odd, ("n2",))]


# ---------------------------------------------------------------- the command


def test_hpcray_doctor_prints_hints_and_exits_with_1_on_red(monkeypatch: pytest.MonkeyPatch) -> None:
    red = DoctorFinding("MPI", "library", "none", FAIL, "install one")
    monkeypatch.setattr(cli, "examine", lambda require_rdma: [SAME, red])
    done = CliRunner().invoke(cli.doctor)
    assert done.exit_code == 1
    assert "ok   CPUs" in done.output and "FAIL library" in done.output and "hint: install one" in done.output
    as_json = json.loads(CliRunner().invoke(cli.doctor, ["--json"]).output)
    assert [(row["level"], row["nodes"]) for row in as_json] == [("ok", []), ("fail", [])]
    monkeypatch.setattr(
        cli, "examine", lambda require_rdma: [DoctorFinding("limits", "open files", "1024", WARN, "more")]
    )
    assert CliRunner().invoke(cli.doctor).exit_code == 0, "yellow is no failure"


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "troubleshooting.md"


def test_the_doctor_reports_in_the_documentation_have_the_rows_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_step, "ask_end_time", lambda environ: time.time() + 1800)
    monkeypatch.setattr(doctor, "probe_wires", lambda: WIRES)
    monkeypatch.setattr(doctor, "find_launchers", lambda: {"mpirun": "/bin/true"})
    here = {finding.name for finding in doctor.examine()}
    job = {finding.name for finding in doctor_step.examine_job(read_allocation(JOB, "n1"), "pmix", "", JOB)}
    blocks = PAGE.read_text().split("hpcray doctor\n")[1:3]
    shown = [
        {line[7:25].strip() for line in block.partition("```")[0].splitlines() if line[:2] == "  "} for block in blocks
    ]
    names = [{name for name in found if name and not name.startswith("hint:")} for found in shown]
    of_the_site = {"srun", "tmp", "TMPDIR", "HPCRAY_TMPDIR"}
    assert names[0] - of_the_site == here - of_the_site
    assert names[1] - of_the_site == (here | job | {"skew", "start-up"}) - of_the_site
