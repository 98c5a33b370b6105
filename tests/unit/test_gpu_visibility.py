"""Which GPUs a node offers, their type, and what a worker gets to see."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcray.common.exceptions import StartupError
from hpcray.common.resources import ASSIGNED_GPUS, UNIT
from hpcray.platform import accelerators, numa_binding
from hpcray.platform.accelerators import (
    apply_gpu_visibility,
    assigned_gpus,
    gpu_ids_are_indices,
    gpu_type,
    gpu_type_of_model,
    node_gpus,
    record_node_environment,
)
from hpcray.runtime.node.options import NodeOptions, total_resources

FOUR = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No GPU, whatever this machine has; and no trace of what a test makes this process believe."""
    for name in ("_NVIDIA", "_NVIDIA_GPUS", "_KFD_NODES", "_DEVICES"):
        monkeypatch.setattr(accelerators, name, tmp_path / "none")
    yield
    accelerators._Confinement.ids = ()
    accelerators._Confinement.numbered = True
    accelerators._Confinement.base = None
    accelerators._Confinement.done = {}


class TestNode:
    def test_a_node_offers_the_gpus_that_it_was_given(self) -> None:
        assert node_gpus(None, 1, FOUR) == ("4", "5", "6", "7")
        assert node_gpus(2, 1, FOUR) == ("4", "5")
        assert node_gpus(0, 1, FOUR) == ()
        assert node_gpus(None, 1, {}) == ()

    def test_gpus_are_made_up_on_a_node_that_was_given_none(self) -> None:
        assert node_gpus(3, 1, {}) == ("0", "1", "2")

    def test_more_gpus_than_a_node_was_given_are_refused(self) -> None:
        with pytest.raises(StartupError, match=r"have 5 GPUs, but it was given 4: CUDA_VISIBLE_DEVICES='4,5,6,7'"):
            node_gpus(5, 1, FOUR)
        with pytest.raises(StartupError, match="given 0"):
            node_gpus(1, 1, {"CUDA_VISIBLE_DEVICES": ""})

    def test_a_fraction_of_a_gpu_for_a_node_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must be a whole number"):
            node_gpus(1.5, 1, {})

    @pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"])
    def test_ranks_that_share_a_host_share_its_list_of_gpus(self, variable: str) -> None:
        parts = [node_gpus(None, 3, {**FOUR, variable: str(rank)}) for rank in range(3)]
        assert parts == [("4", "5"), ("6",), ("7",)]
        with pytest.raises(StartupError, match=r"given 1.*3 rank\(s\)"):
            node_gpus(2, 3, {**FOUR, variable: "1"})

    def test_one_gpu_for_four_ranks_of_a_host_is_refused_or_shared_on_purpose(self) -> None:
        ranks = [{"CUDA_VISIBLE_DEVICES": "0", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)} for rank in range(4)]
        assert node_gpus(1, 4, ranks[0]) == ("0",)
        for rank in ranks[1:]:
            with pytest.raises(StartupError, match=r"given 0.*4 rank\(s\).*HPCRAY_SHARE_GPUS=1 has the ranks"):
                node_gpus(1, 4, rank)
        assert [node_gpus(1, 4, {**rank, "HPCRAY_SHARE_GPUS": "1"}) for rank in ranks] == [("0",)] * 4
        assert node_gpus(None, 4, {**ranks[3], "HPCRAY_SHARE_GPUS": "1"}) == ("0",)

    def test_ranks_with_gpus_of_their_own_from_srun_keep_them(self) -> None:
        """What Slurm 22.05 sets for `srun -n2 --gpus-per-task=1`."""
        step = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2", "SLURM_LOCALID": "1"}
        assert node_gpus(None, 2, {**step, "CUDA_VISIBLE_DEVICES": "1", "SLURM_STEP_GPUS": "1"}) == ("1",)
        locked_away = {**step, "CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "1"}
        assert node_gpus(None, 2, locked_away) == ("0",)
        shared = {**step, "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "0,1"}
        assert node_gpus(None, 2, shared) == ("1",)

    def test_variables_of_the_allocation_bind_no_rank_of_mpirun(self) -> None:
        rank = {**FOUR, "SLURM_GPUS_ON_NODE": "8", "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        assert node_gpus(None, 2, rank) == ("6", "7")


class TestType:
    @pytest.mark.parametrize(
        ("model", "name"),
        [
            ("NVIDIA A100-SXM4-40GB", "A100"),
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("Tesla V100-SXM2-16GB", "V100"),
            ("NVIDIA GH200 480GB", "GH200"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
            ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
        ],
    )
    def test_the_gpu_type_follows_from_the_model_name(self, model: str, name: str) -> None:
        assert gpu_type_of_model(model) == name

    def test_the_gpu_type_is_read_from_the_nvidia_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        about = tmp_path / "gpus" / "0000:01:00.0" / "information"
        about.parent.mkdir(parents=True)
        about.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 43\n")
        monkeypatch.setattr(accelerators, "_NVIDIA_GPUS", tmp_path / "gpus")
        assert gpu_type({"SLURM_GPUS_PER_NODE": "a100:2"}) == "H100"

    def test_the_gpu_type_is_read_from_the_amd_topology(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for node, text in (("0", "simd_count 0\ndevice_id 0\n"), ("1", f"simd_count 440\ndevice_id {0x7408}\n")):
            (tmp_path / node).mkdir()
            (tmp_path / node / "properties").write_text(text)
        monkeypatch.setattr(accelerators, "_KFD_NODES", tmp_path)
        assert gpu_type({}) == "AMD-Instinct-MI250X"

    @pytest.mark.parametrize(
        ("environ", "name"),
        [
            ({"SLURM_GPUS_PER_NODE": "a100:2"}, "A100"),
            ({"SLURM_GPUS_PER_NODE": "2"}, ""),
            ({"SLURM_GPUS_PER_NODE": "gpu:2"}, ""),
            ({"SLURM_GPUS": "gpu:h100:8"}, "H100"),
            ({"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu:v100=1"}, "V100"),
            ({"SLURM_TRES_PER_TASK": "gres/gpu=1"}, ""),
            ({}, ""),
        ],
    )
    def test_the_gpu_type_is_read_from_the_variables_of_slurm(self, environ: dict[str, str], name: str) -> None:
        assert gpu_type(environ) == name

    def test_the_gpu_type_is_a_resource_of_the_node(self) -> None:
        total = total_resources(NodeOptions(num_cpus=2), "10.0.0.1", 1, 1, 0, 2, "H100")
        assert total["GPU"] == 2 * UNIT and total["accelerator_type:H100"] == UNIT
        assert "GPU" not in total_resources(NodeOptions(num_cpus=2), "10.0.0.1", 1, 1, 0)


def worker(node: dict[str, str], **extra: str) -> dict[str, str]:
    """The environment of a worker of a node with this one, forked with these."""
    record_node_environment(node)
    environ = {**node, **extra}
    apply_gpu_visibility(environ)
    return environ


class TestWorker:
    def test_a_worker_sees_its_own_gpus_only(self) -> None:
        environ = worker(FOUR, **{ASSIGNED_GPUS: "5,7"})
        assert environ == {"CUDA_VISIBLE_DEVICES": "5,7"}
        assert assigned_gpus() == ["5", "7"] and not gpu_ids_are_indices()

    def test_made_up_gpus_have_numbers_as_ids(self) -> None:
        assert worker({}, **{ASSIGNED_GPUS: "1"}) == {"CUDA_VISIBLE_DEVICES": "1"}
        assert assigned_gpus() == ["1"] and gpu_ids_are_indices()

    def test_a_worker_on_amd_sees_its_own_gpus_only(self) -> None:
        node = {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"}
        environ = worker(node, **{ASSIGNED_GPUS: "5"})
        assert environ == {"ROCR_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": "0"}

    def test_variables_set_later_do_not_undo_the_confinement_to_gpus(self) -> None:
        environ = worker(FOUR, **{ASSIGNED_GPUS: "6", "CUDA_VISIBLE_DEVICES": "0"})
        assert environ["CUDA_VISIBLE_DEVICES"] == "6"
        environ["CUDA_VISIBLE_DEVICES"] = "0,1,2"
        apply_gpu_visibility(environ)
        assert environ["CUDA_VISIBLE_DEVICES"] == "6"

    def test_a_worker_without_gpus_sees_those_of_the_node(self) -> None:
        assert worker(FOUR) == FOUR and assigned_gpus() == []

    @pytest.mark.parametrize("word", ["1", "true", "True"])
    def test_override_on_zero_hides_all_gpus_from_a_worker_without(self, word: str) -> None:
        name = accelerators.OVERRIDE_ON_ZERO
        assert worker({**FOUR, name: word})["CUDA_VISIBLE_DEVICES"] == ""
        assert worker({**FOUR, name: "0"})["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"

    def test_a_noset_variable_leaves_the_visible_gpus_to_the_program(self) -> None:
        noset = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        environ = worker(FOUR, **{ASSIGNED_GPUS: "6"}, **noset)
        assert environ == {**FOUR, **noset} and assigned_gpus() == ["6"], "they are its own all the same"

    def test_a_noset_variable_of_the_job_counts_after_the_fork(self) -> None:
        for node in (FOUR, {}):
            environ = worker(node, **{ASSIGNED_GPUS: "6"})
            assert environ["CUDA_VISIBLE_DEVICES"] == "6"
            environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            apply_gpu_visibility(environ)
            assert environ.get("CUDA_VISIBLE_DEVICES") == node.get("CUDA_VISIBLE_DEVICES")
            environ["CUDA_VISIBLE_DEVICES"] = "6"
            apply_gpu_visibility(environ)
            assert environ["CUDA_VISIBLE_DEVICES"] == "6", "now it is the program's own word"


class TestThreads:
    @pytest.fixture(autouse=True)
    def unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(numa_binding.OMP_NUM_THREADS, "")  # so that monkeypatch takes away again what the tests set
        monkeypatch.delenv(numa_binding.OMP_NUM_THREADS)
        monkeypatch.setattr(numa_binding._ThreadLimit, "cpus", 0)
        monkeypatch.setattr(numa_binding._ThreadLimit, "text", None)
        monkeypatch.setattr(numa_binding._ThreadLimit, "loaded", 1)
        monkeypatch.setitem(sys.modules, "torch", None)  # another test may have loaded it

    @pytest.mark.parametrize(("units", "count"), [(0, "1"), (UNIT // 2, "1"), (UNIT, "1"), (5 * UNIT // 2, "2")])
    def test_a_task_has_as_many_threads_as_cpus(self, units: int, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "threadpoolctl", _Limits())
        numa_binding.set_thread_count(units)
        assert numa_binding.os.environ[numa_binding.OMP_NUM_THREADS] == count

    @pytest.mark.parametrize(
        ("variables", "expected"),
        [
            ({"OMP_NUM_THREADS": "3"}, {"openblas": 3, "mkl": 3, "openmp": 3, "torch": 3}),
            ({"OMP_NUM_THREADS": "3,2"}, {"openblas": 3, "mkl": 3, "openmp": 3, "torch": 3}),
            ({"OPENBLAS_NUM_THREADS": "3"}, {"openblas": 3, "mkl": 2, "openmp": 2, "torch": 2}),
            ({"MKL_NUM_THREADS": "3", "OMP_NUM_THREADS": "1"}, {"openblas": 1, "mkl": 3, "openmp": 1, "torch": 1}),
            ({"OMP_NUM_THREADS": "99"}, {"openblas": 4, "mkl": 4, "openmp": 4, "torch": 4}),
            ({"OMP_NUM_THREADS": "many"}, {"openblas": 4, "mkl": 4, "openmp": 4, "torch": 4}),
        ],
        ids=str,
    )
    def test_what_the_user_has_set_holds_in_libraries_that_the_fork_server_has_limited(
        self, variables: dict[str, str], expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = _Limits("openblas", "mkl", "openmp")
        monkeypatch.setitem(sys.modules, "threadpoolctl", limits)
        said: list[int] = []
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(set_num_threads=said.append))
        monkeypatch.setattr(numa_binding.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        numa_binding.limit_loaded_libraries_to_one_thread()
        assert {one.num_threads for one in limits.lib_controllers} == {1} and said == [1]
        numa_binding.set_thread_count(2 * UNIT)
        assert {one.internal_api: one.num_threads for one in limits.lib_controllers} | {"torch": said[-1]} == expected
        assert numa_binding.os.environ[numa_binding.OMP_NUM_THREADS] == variables.get("OMP_NUM_THREADS", "2")

    def test_threads_are_set_for_each_lease_and_for_loaded_libraries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limits = _Limits()
        monkeypatch.setitem(sys.modules, "threadpoolctl", limits)
        for cpus, count in ((1, "1"), (3, "3"), (2, "2"), (1, "1")):
            assert numa_binding.thread_count_changes(cpus * UNIT)
            numa_binding.set_thread_count(cpus * UNIT)
            assert not numa_binding.thread_count_changes(cpus * UNIT)
            assert numa_binding.os.environ[numa_binding.OMP_NUM_THREADS] == count
        assert limits.said == [3, 2, 1]

    def test_pytorch_has_a_number_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "threadpoolctl", _Limits())
        torch = types.SimpleNamespace(set_num_threads=(said := []).append)
        monkeypatch.setitem(sys.modules, "torch", torch)
        numa_binding.limit_loaded_libraries_to_one_thread()
        for cpus in (1, 3, 1):
            numa_binding.set_thread_count(cpus * UNIT)
        assert said == [1, 3, 1]

    def test_libraries_of_the_fork_server_have_one_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limits = _Limits()
        monkeypatch.setitem(sys.modules, "threadpoolctl", limits)
        numa_binding.limit_loaded_libraries_to_one_thread()
        assert numa_binding.OMP_NUM_THREADS not in numa_binding.os.environ and limits.said == [1]


class _Limits:
    """Stands for the module threadpoolctl. said: the numbers that the first library was given."""

    def __init__(self, *names: str) -> None:
        self.said: list[int] = []
        self.lib_controllers = [_Library(name, self.said) for name in names or ("openblas",)]

    def ThreadpoolController(self) -> _Limits:
        return self


class _Library:
    def __init__(self, name: str, said: list[int]) -> None:
        self.internal_api, self.num_threads, self._said = name, 4, said

    def set_num_threads(self, count: int) -> None:
        self.num_threads = count
        self._said.append(count)
