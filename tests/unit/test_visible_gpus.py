"""Which GPUs count as ours: the environment inside an allocation, the machine only outside of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcray.platform import accelerators as gpus
from hpcray.platform.accelerators import gpu_visibility_variable, gpu_visibility_variables, visible_gpus

JOB = {"SLURM_JOB_ID": "2"}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, unless the test adds some."""
    monkeypatch.setattr(gpus, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(gpus, "_KFD_NODES", tmp_path / "kfd")
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path / "dev")
    return tmp_path


def nvidia(machine: Path, count: int = 4) -> None:
    for index in range(count):
        (machine / "nvidia" / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)


def amd(machine: Path, count: int = 4) -> None:
    for index in range(count + 1):
        node = machine / "kfd" / str(index)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(str(index * 1000))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0,1", ["0", "1"]),
        ("3, 1", ["3", "1"]),
        ("GPU-8c50,GPU-77", ["GPU-8c50", "GPU-77"]),
        ("MIG-41b3/1/0", ["MIG-41b3/1/0"]),
        ("", []),
        ("uuid1,uuid2", ["uuid1", "uuid2"]),
        ("0,none,1", ["0"]),
        ("void", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["0"]),
        ("0,0", ["0"]),
    ],
)
@pytest.mark.parametrize("around", [{}, JOB])
def test_the_list_in_cuda_visible_devices_is_read_up_to_the_first_invalid_id(
    text: str, ids: list[str], around: dict[str, str], machine: Path
) -> None:
    nvidia(machine)
    assert visible_gpus({**around, "CUDA_VISIBLE_DEVICES": text}) == tuple(ids)


def test_inside_an_allocation_the_gpus_of_the_machine_do_not_count(machine: Path) -> None:
    nvidia(machine)
    assert visible_gpus({}) == ("0", "1", "2", "3")
    assert visible_gpus(JOB) == ()


@pytest.mark.parametrize(
    ("variable", "text", "ids"),
    [("SLURM_STEP_GPUS", "2,3", "23"), ("SLURM_JOB_GPUS", "0-2", "012"), ("SLURM_JOB_GPUS", "gpu:1", "1")],
)
def test_without_the_vendors_variable_the_list_of_slurm_counts(
    machine: Path, variable: str, text: str, ids: str
) -> None:
    assert visible_gpus({**JOB, variable: text}) == tuple(ids)


def test_the_gpus_of_a_step_take_precedence_over_those_of_the_job() -> None:
    assert visible_gpus({**JOB, "SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "1"}) == ("1",)


def test_where_other_gpus_are_locked_away_ours_are_numbered_from_zero(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = machine / "dev"
    devices.mkdir()
    for index in range(4):
        (devices / f"nvidia{index}").touch()
    (devices / "nvidiactl").touch()
    environ = {**JOB, "SLURM_STEP_GPUS": "2,3"}
    assert visible_gpus(environ) == ("2", "3")

    def locked(path: Path, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "open", locked)
    assert visible_gpus(environ) == ("0", "1")


def test_a_worker_is_confined_to_its_gpus_on_nvidia() -> None:
    assert gpu_visibility_variables(("1", "3"), JOB) == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert gpu_visibility_variables((), {}) == {"CUDA_VISIBLE_DEVICES": ""}
    # Slurm without AutoDetect sets the variables of every vendor.
    both = {**JOB, "CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}
    assert gpu_visibility_variables(("1",), both) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_the_gpus_of_an_amd_machine_are_found(machine: Path) -> None:
    amd(machine)
    assert visible_gpus({}) == ("0", "1", "2", "3")
    assert visible_gpus(JOB) == ()
    both = {**JOB, "CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "0,1"}
    assert visible_gpus(both) == ("0", "1")
    assert gpu_visibility_variable(both) == "ROCR_VISIBLE_DEVICES"
    assert gpu_visibility_variables(("1",), both) == {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}


def test_indices_of_hip_count_within_the_list_of_rocr(machine: Path) -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}
    assert visible_gpus(environ) == ("6", "4")
    assert gpu_visibility_variables(("6",), environ) == {"ROCR_VISIBLE_DEVICES": "6", "HIP_VISIBLE_DEVICES": "0"}
    assert visible_gpus({"HIP_VISIBLE_DEVICES": "1"}) == ("1",)
    assert gpu_visibility_variable({"HIP_VISIBLE_DEVICES": "1"}) == "HIP_VISIBLE_DEVICES"


def test_a_machine_without_gpus_has_none_visible() -> None:
    assert visible_gpus({}) == ()
    assert gpu_visibility_variable({}) == "CUDA_VISIBLE_DEVICES"


def test_made_up_gpus_are_none_of_the_machine(machine: Path) -> None:
    made_up = {"HPCRAY_MADE_UP_GPUS": "1"}
    nvidia(machine, 1)
    assert visible_gpus({}) == ("0",) and visible_gpus(made_up) == ()
    assert gpus.node_gpus(2, 1, made_up) == ("0", "1")
    assert visible_gpus({**made_up, "CUDA_VISIBLE_DEVICES": "0"}) == ("0",)


def test_made_up_gpus_are_none_of_a_machine_of_amd(machine: Path) -> None:
    amd(machine, 1)
    assert visible_gpus({}) == ("0",) and visible_gpus({"HPCRAY_MADE_UP_GPUS": "1"}) == ()
