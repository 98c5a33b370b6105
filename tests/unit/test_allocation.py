"""What is read from recorded environments: Slurm's (22.05), mpirun's, PBS's; and what counts as not told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpcray.host import allocation
from hpcray.host.allocation import Allocation, HetGroup, ask_end_time, end_time, job_to_ask, read_allocation
from hpcray.host.allocation_nodes import compress_nodes, expand_counts, expand_nodes, parse_hostfile
from hpcray.host.allocation_tmp import Directory, directories, file_system

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
def test_node_lists(text: str, nodes: str) -> None:
    assert expand_nodes(text) == tuple(nodes.split())


@pytest.mark.parametrize("text", ["n[1-3", "n]1[", "n[a-b]", "n[1-99999999999]", "n[1-[2]]"])
def test_what_is_no_node_list_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of nodes"):
        expand_nodes(text)


@pytest.mark.parametrize("text", ["n[1-3,7],x", "gpu[01-04]", "a,b", "c[098-101]", "n1", ""])
def test_node_lists_and_back(text: str) -> None:
    assert expand_nodes(compress_nodes(expand_nodes(text))) == expand_nodes(text)
    if text.partition("[")[0] != "c":
        assert compress_nodes(expand_nodes(text)) == text


def test_counts() -> None:
    assert expand_counts("16(x2),8") == (16, 16, 8)
    assert expand_counts("4") == (4,)
    with pytest.raises(ValueError, match="not a list of numbers"):
        expand_counts("16x2")


def test_hostfiles_of_open_mpi_mpich_and_pbs() -> None:
    assert parse_hostfile("# mine\na slots=4\nb\n") == (("a", 4), ("b", 1))
    assert parse_hostfile("a:4\nb:2  # two\n") == (("a", 4), ("b", 2))
    assert parse_hostfile("a\na\nb\n") == (("a", 2), ("b", 1))


def test_batch_script() -> None:
    found = read_allocation(BATCH, "n1")
    assert (found.kind, found.job, found.nodes, found.node) == ("slurm", "2", ("n1", "n2"), 0)
    assert (found.in_step, found.rank, found.ranks) == (False, 0, 1), "a batch script is no rank"
    assert (found.cpus_here, found.cpus_per_node, found.cpus_per_task) == (2, (2, 2), 2)
    assert found.memory_here == 500 << 20


def test_step() -> None:
    found = read_allocation(STEP, "n2")
    assert (found.in_step, found.rank, found.ranks, found.ranks_here, found.node) == (True, 1, 2, 1, 1)
    assert found.shares_node(2) is False
    assert found.shares_node(64) is True
    assert found.cpus_meant == 2


def test_a_step_on_some_nodes_of_the_job() -> None:
    environ = {**STEP, "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[2,4]", "SLURMD_NODENAME": "n4"}
    found = read_allocation(environ, "n4")
    assert (found.nodes, found.node) == (("n2", "n4"), 1)


def test_the_shell_of_salloc_is_no_step() -> None:
    assert not read_allocation({**STEP, "SLURM_STEP_ID": "4294967290"}, "n2").in_step


def test_tasks_per_node_that_differ() -> None:
    environ = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_STEP_NUM_TASKS": "4"}
    assert read_allocation(environ, "n2").ranks_here == 1
    assert read_allocation({**environ, "SLURM_NODEID": "0"}, "n1").ranks_here == 3


def test_heterogeneous_job() -> None:
    found = read_allocation(HET, "ctl")
    assert found.het == (HetGroup("3", ("n1",)), HetGroup("4", ("n2", "n3")))
    assert found.nodes == ("n1", "n2", "n3")
    assert found.cpus_per_node == (2, 1, 1)
    assert (found.node, found.cpus_here) == (None, None), "salloc's shell may be on a host that is not of the job"


def test_mpirun_carries_the_values_of_its_own_node_everywhere() -> None:
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
def test_memory(given: dict[str, str], memory: int | None) -> None:
    assert read_allocation({**STEP, **given}, "n2").memory_here == memory


def test_restarts_and_arrays() -> None:
    found = read_allocation({**BATCH, "SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_TASK_ID": "7"}, "n1")
    assert (found.restarts, found.array_task) == (2, 7)


def test_outside_slurm() -> None:
    assert read_allocation({}, "laptop") == Allocation()
    mpich = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}
    assert read_allocation(mpich, "laptop") == Allocation(kind="mpirun", rank=3, ranks=4, ranks_here=2)


def test_pbs_tells_its_nodes_in_a_file(tmp_path: Path) -> None:
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
def test_end_time(text: str, end: float | None) -> None:
    assert end_time({"SLURM_JOB_END_TIME": text}) == end
    assert read_allocation({**BATCH, "SLURM_JOB_END_TIME": text}, "n1").end == end


def squeue(tmp_path: Path, says: str) -> dict[str, str]:
    path = tmp_path / "squeue"
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}


def test_the_controller_is_asked_where_the_environment_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = squeue(tmp_path, "echo 1-00:00:30")
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert ask_end_time(environ) == 1000 + 86430
    assert ask_end_time({**environ, "SLURM_JOB_END_TIME": "5000"}) == 5000, "what is told is not asked"
    assert ask_end_time({}) is None


def test_a_task_of_an_array_asks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SLURM_JOB_ID may be that of the whole array, of which squeue shows every task, and scontrol requeues all."""
    environ = squeue(tmp_path, 'case "$*" in *--jobs\\ 7_2*) echo 30;; *) echo 10; echo 20; echo 30;; esac')
    monkeypatch.setenv("PATH", environ["PATH"])
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    task = {**environ, "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert ask_end_time(task) == 1030
    assert (job_to_ask(task), job_to_ask(environ), job_to_ask({})) == ("7_2", "7", "")
    assert ask_end_time(environ) == 1010, "of a heterogeneous job all parts are shown, with the same time"


@pytest.mark.parametrize("says", ["echo UNLIMITED", "echo INVALID", "exit 1", "sleep 30"])
def test_a_controller_that_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    environ = squeue(tmp_path, f"exec {says}" if says.startswith("sleep") else says)
    monkeypatch.setenv("PATH", environ["PATH"])
    assert ask_end_time(environ, timeout=1.0) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("1-02:03:04", 93784), ("02:03:04", 7384), ("04:59", 299), ("7", 7), ("N/A", None)]
)
def test_time_left(text: str, seconds: float | None) -> None:
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
def test_file_systems(path: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == kind


def test_which_directories_are_of_this_node() -> None:
    kinds = {kind: Directory("/x", "", kind, 0, True) for kind in ("lustre", "nfs4", "fuse.sshfs", "xfs", "tmpfs", "")}
    assert [kind for kind, found in kinds.items() if found.node_local] == ["xfs", "tmpfs", ""]
    assert [kind for kind, found in kinds.items() if found.in_memory] == ["tmpfs"]


def test_directories_are_those_that_are_there(tmp_path: Path) -> None:
    environ = {"SLURM_TMPDIR": str(tmp_path), "TMPDIR": str(tmp_path), "LOCAL_SCRATCH": str(tmp_path / "none")}
    found = directories(environ)
    assert [(entry.path, entry.variable) for entry in found] == [(str(tmp_path), "SLURM_TMPDIR"), ("/tmp", "")]
    assert found[0].writable and found[0].free > 0
