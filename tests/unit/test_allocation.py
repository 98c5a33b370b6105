"""What is read from recorded environments: Slurm's (22.05), mpirun's, PBS's; and what counts as not told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpcray.platform import allocation
from hpcray.platform.allocation import (
    Allocation,
    HetGroup,
    ask_end_time,
    compress_nodes,
    end_time,
    expand_counts,
    expand_nodes,
    job_to_ask,
    parse_hostfile,
    read_allocation,
)
from hpcray.platform.spill_files import TmpDirectory, file_system_type, tmp_directories

# sbatch -N2 --ntasks-per-node=1 --cpus-per-task=2 --mem=500, in the script
BATCH = {
    "SLURMD_NODENAME": "n1",
    "SLURM_CPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_MEM_PER_NODE": "500",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
# ... and of task 1 of `srun` in it
STEP = {
    **BATCH,
    "SLURMD_NODENAME": "n2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
# salloc -N1 --mem-per-cpu=100 -c2 : -N2 -c1, in its shell
HET = {
    "SLURM_CPUS_PER_TASK_HET_GROUP_0": "2",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "2",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "1(x2)",
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_ID_HET_GROUP_0": "3",
    "SLURM_JOB_ID_HET_GROUP_1": "4",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n[1-3,7],gpu[01-04]", "n1 n2 n3 n7 gpu01 gpu02 gpu03 gpu04"),
        ("login", "login"),
        ("a,b", "a b"),
        ("c[098-101]", "c098 c099 c100 c101"),
        ("r[1-2]n[1,3]", "r1n1 r1n3 r2n1 r2n3"),
        ("rack[0-1]-x.site", "rack0-x.site rack1-x.site"),
        ("", ""),
    ],
)
def test_a_node_list_in_short_form_is_expanded_in_order(text: str, nodes: str) -> None:
    assert expand_nodes(text) == tuple(nodes.split())


@pytest.mark.parametrize("text", ["n[1-3", "n]1[", "n[a-b]", "n[1-99999999999]", "n[1-[2]]"])
def test_an_invalid_node_list_is_refused_and_shown(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes"):
        expand_nodes(text)


@pytest.mark.parametrize("text", ["n[1-3,7],x", "gpu[01-04]", "a,b", "c[098-101]", "n1", ""])
def test_compressing_an_expanded_node_list_gives_the_short_form_back(text: str) -> None:
    assert expand_nodes(compress_nodes(expand_nodes(text))) == expand_nodes(text)
    if text.partition("[")[0] != "c":
        assert compress_nodes(expand_nodes(text)) == text


def test_repeated_counts_per_node_are_expanded() -> None:
    assert expand_counts("16(x2),8") == (16, 16, 8)
    assert expand_counts("4") == (4,)
    with pytest.raises(ValueError, match="not a list of numbers"):
        expand_counts("16x2")


def test_hostfiles_of_open_mpi_mpich_and_pbs_are_parsed() -> None:
    assert parse_hostfile("# mine\na slots=4\nb\n") == (("a", 4), ("b", 1))
    assert parse_hostfile("a:4\nb:2  # two\n") == (("a", 4), ("b", 2))
    assert parse_hostfile("a\na\nb\n") == (("a", 2), ("b", 1))


def test_the_allocation_of_a_batch_script_is_read_from_the_environment() -> None:
    found = read_allocation(BATCH, "n1")
    assert (found.kind, found.job, found.nodes, found.node) == ("slurm", "2", ("n1", "n2"), 0)
    assert (found.in_step, found.rank, found.ranks) == (False, 0, 1), "a batch script is no rank"
    assert (found.cpus_here, found.cpus_per_node, found.cpus_per_task) == (2, (2, 2), 2)
    assert found.memory_here == 500 << 20


def test_the_allocation_of_a_task_of_srun_is_read_from_the_environment() -> None:
    found = read_allocation(STEP, "n2")
    assert (found.in_step, found.rank, found.ranks, found.ranks_here, found.node) == (True, 1, 2, 1, 1)
    assert found.cpus_meant == 2


def test_a_step_on_some_nodes_of_the_job_has_these_nodes_only() -> None:
    environ = {**STEP, "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[2,4]", "SLURMD_NODENAME": "n4"}
    found = read_allocation(environ, "n4")
    assert (found.nodes, found.node) == (("n2", "n4"), 1)


def test_the_shell_of_salloc_is_not_in_a_step() -> None:
    assert not read_allocation({**STEP, "SLURM_STEP_ID": "4294967290"}, "n2").in_step


def test_tasks_per_node_may_differ_between_nodes() -> None:
    environ = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_STEP_NUM_TASKS": "4"}
    assert read_allocation(environ, "n2").ranks_here == 1
    assert read_allocation({**environ, "SLURM_NODEID": "0"}, "n1").ranks_here == 3


def test_a_heterogeneous_job_has_its_parts_and_all_their_nodes() -> None:
    found = read_allocation(HET, "ctl")
    assert found.het == (HetGroup("3", ("n1",)), HetGroup("4", ("n2", "n3")))
    assert found.nodes == ("n1", "n2", "n3")
    assert found.cpus_per_node == (2, 1, 1)
    assert (found.node, found.cpus_here) == (None, None), "salloc's shell may be on a host that is not of the job"


def test_values_that_mpirun_copies_from_its_own_node_are_ignored_elsewhere() -> None:
    ranks = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    found = read_allocation({**BATCH, **ranks, "SLURM_JOB_CPUS_PER_NODE": "2,16"}, "n2.site.org")
    assert (found.rank, found.ranks, found.ranks_here) == (1, 2, 1)
    assert (found.node, found.cpus_here) == (1, 16), "SLURM_CPUS_ON_NODE=2 is told of n1"


@pytest.mark.parametrize(
    ("given", "memory"),
    [
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_NODE": "", "SLURM_MEM_PER_CPU": "100"}, 200 << 20),
        ({"SLURM_MEM_PER_NODE": "", "SLURM_MEM_PER_GPU": "1000", "SLURM_GPUS_ON_NODE": "4"}, 4000 << 20),
        ({"SLURM_MEM_PER_NODE": "lots"}, None),
    ],
)
def test_the_memory_of_a_job_is_read_per_node_per_cpu_and_per_gpu(given: dict[str, str], memory: int | None) -> None:
    assert read_allocation({**STEP, **given}, "n2").memory_here == memory


def test_requeues_and_the_array_index_are_read() -> None:
    found = read_allocation({**BATCH, "SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_TASK_ID": "7"}, "n1")
    assert (found.restarts, found.array_task) == (2, 7)


def test_outside_slurm_ranks_are_read_from_the_variables_of_mpirun() -> None:
    assert read_allocation({}, "laptop") == Allocation()
    mpich = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    assert read_allocation(mpich, "laptop") == Allocation(kind="mpirun", rank=3, ranks=4, ranks_here=2)


def test_the_nodes_of_a_pbs_job_are_read_from_its_node_file(tmp_path: Path) -> None:
    nodefile = tmp_path / "nodes"
    nodefile.write_text("a.site\na.site\nb.site\n")
    found = read_allocation({"PBS_NODEFILE": str(nodefile), "PBS_JOBID": "9.head"}, "b")
    assert (found.kind, found.job, found.nodes, found.node) == ("pbs", "9.head", ("a", "b"), 1)
    assert found.cpus_per_node == (2, 1)
    assert read_allocation({"PBS_NODEFILE": str(tmp_path / "none")}, "b").nodes == ()


# ---------------------------------------------------------------- the end of the job


@pytest.mark.parametrize(
    ("text", "end"), [("1795000000", 1795000000.0), ("4294967295", None), ("0", None), ("", None), ("soon", None)]
)
def test_the_end_of_the_time_limit_is_read_from_the_environment(text: str, end: float | None) -> None:
    assert end_time({"SLURM_JOB_END_TIME": text}) == end
    assert read_allocation({**BATCH, "SLURM_JOB_END_TIME": text}, "n1").end == end


def squeue(tmp_path: Path, says: str) -> dict[str, str]:
    path = tmp_path / "squeue"
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}


def test_the_controller_is_queried_for_the_end_time_if_the_environment_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = squeue(tmp_path, "echo 1-00:00:30")
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert ask_end_time(environ) == 1000 + 86430
    assert ask_end_time({**environ, "SLURM_JOB_END_TIME": "5000"}) == 5000, "what is told is not asked"
    assert ask_end_time({}) is None


def test_a_task_of_a_job_array_queries_its_own_end_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SLURM_JOB_ID may be that of the whole array, of which squeue shows every task, and scontrol requeues all."""
    environ = squeue(tmp_path, 'case "$*" in *--jobs\\ 7_2*) echo 30;; *) echo 10; echo 20; echo 30;; esac')
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    task = {**environ, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert ask_end_time(task) == 1030
    assert (job_to_ask(task), job_to_ask(environ), job_to_ask({})) == ("7_2", "7", "")
    assert ask_end_time(environ) == 1010, "of a heterogeneous job all parts are shown, with the same time"


@pytest.mark.parametrize("says", ["echo UNLIMITED", "echo INVALID", "exit 1", "sleep 30"])
def test_a_controller_without_an_answer_gives_no_end_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    environ = squeue(tmp_path, f"exec {says}" if says.startswith("sleep") else says)
    monkeypatch.setenv("PATH", environ["PATH"])
    assert ask_end_time(environ, timeout=1.0) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("1-02:03:04", 93784), ("02:03:04", 7384), ("04:59", 299), ("7", 7), ("N/A", None)]
)
def test_the_remaining_time_that_squeue_prints_is_parsed(text: str, seconds: float | None) -> None:
    assert allocation.parse_time_left(text + "\n") == seconds


# ---------------------------------------------------------------- temporary directories

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /tmp rw - tmpfs tmpfs rw
31 22 0:31 / /scratch rw - lustre mds@o2ib:/fs rw
32 31 0:32 / /scratch/local\\040disk rw master:3 - xfs /dev/nvme0n1 rw
33 22 0:33 / /tmp rw - xfs /dev/nvme0n2 rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", "ext4"),
        ("/tmpx", "ext4"),
        ("/tmp/x", "xfs"),
        ("/scratch", "lustre"),
        ("/scratch/local disk/x", "xfs"),
    ],
)
def test_the_type_of_the_file_system_of_a_path_is_read_from_the_mounts(path: str, kind: str) -> None:
    assert file_system_type(path, MOUNTS) == kind


def test_directories_on_network_file_systems_are_not_node_local() -> None:
    names = ("lustre", "nfs4", "fuse.sshfs", "xfs", "tmpfs", "")
    kinds = {kind: TmpDirectory("/x", "", kind, 0, True) for kind in names}
    assert [kind for kind, found in kinds.items() if found.node_local] == ["xfs", "tmpfs", ""]
    assert [kind for kind, found in kinds.items() if found.in_memory] == ["tmpfs"]


def test_only_temporary_directories_that_exist_are_listed_each_once(tmp_path: Path) -> None:
    environ = {"SLURM_TMPDIR": str(tmp_path), "TMPDIR": str(tmp_path), "LOCAL_SCRATCH": str(tmp_path / "none")}
    found = tmp_directories(environ)
    assert [(entry.path, entry.variable) for entry in found] == [(str(tmp_path), "SLURM_TMPDIR"), ("/tmp", "")]
    assert found[0].writable and found[0].free > 0
