"""What hpcray knows of its allocation, what it refuses to start with and why, and the doctor, on a real Slurm."""

from __future__ import annotations

import json
import shutil

import programs
import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm

DOCTOR = ("python", "-m", "hpcray.cli", "doctor")
ALLOCATION = """\
import json
import msgspec
from hpcray.platform.allocation import read_allocation
from hpcray.platform.accelerators import visible_gpus
found = read_allocation()
print(json.dumps({**msgspec.to_builtins(found), "in_step": found.in_step, "gpus": visible_gpus()}), flush=True)
"""


def test_the_allocation_of_a_step(slurm: Slurm) -> None:
    script = slurm.write(ALLOCATION)
    ended = slurm.run(
        # srun outside an allocation makes its own, and does not tell its tasks the memory.
        *("salloc", "-N3", "--ntasks-per-node=1", "-c2", "--mem=500", "--gres=gpu:1", "srun", "-c2", "python", script),
    )
    assert ended.code == 0, ended.err
    found = {facts["rank"]: facts for facts in map(json.loads, ended.out.splitlines())}
    assert sorted(found) == [0, 1, 2]
    for rank, facts in found.items():
        assert facts["nodes"] == ["n1", "n2", "n3"]
        assert (facts["kind"], facts["in_step"], facts["node"], facts["ranks"]) == ("slurm", True, rank, 3)
        assert (facts["cpus_here"], facts["cpus_per_task"], facts["cpus_per_node"]) == (2, 2, [2, 2, 2])
        assert facts["memory_here"] == 500 << 20
        assert len(facts["gpus"]) == 1


def test_the_launcher_gives_the_node_what_its_tasks_would_have(slurm: Slurm) -> None:
    script = slurm.write(
        "import hpcray as ray\nray.init()\nfound = ray.cluster_resources()\n"
        "print(len(ray.nodes()), int(found['GPU']), flush=True)\n"
    )
    ended = slurm.run("salloc", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "hpcray-launch", script)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "2 4"


@pytest.mark.parametrize(
    ("environ", "options", "said"),
    [
        ({"OMPI_MCA_mpi_ft_enable": "1"}, [], "hint: unset OMPI_MCA_mpi_ft_enable"),
        pytest.param(
            {},
            ["--require-rdma"],
            "RDMA is required, but rank 0 on n1 has none (UCX devices between hosts: tcp/",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ulfm", "rdma"],
)
def test_a_start_that_cannot_work_is_reported_once(
    slurm: Slurm, environ: dict[str, str], options: list[str], said: str
) -> None:
    script = slurm.write(programs.HOSTS)
    ended = slurm.run(*SRUN, "-N2", "python", "-m", "hpcray", *options, script, environ=environ)
    assert ended.code != 0
    assert ended.err.count("hpcray:") == 1 and said in ended.err


def test_a_rank_that_cannot_start_is_reported_and_not_awaited(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    slurm.said("mount", "-o", "remount,size=1m", "/dev/shm", host="n2")
    try:
        line = [*SRUN, "-w", "n1,n2", "-N2", "python", "-m", "hpcray", script]
        ended = slurm.run(*line, environ={"HPCRAY_START_TIMEOUT": "600"})
    finally:
        slurm.said("mount", "-o", "remount,size=4g", "/dev/shm", host="n2")
    assert ended.code != 0
    assert "rank 1 on n2 does not start, and so the job does not: /dev/shm on n2 has" in ended.err


def test_without_pmix_the_launcher_says_so_and_takes_mpirun(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    srun = slurm.place / "srun"
    real = shutil.which("srun")
    # As srun says it where libpmix.so cannot be found.
    srun.write_text(
        "#!/bin/sh\nfor word; do case $word in --mpi=pmix) "
        'echo "srun: error:  mpi/pmix_v4: init: pmi/pmix: can not load PMIx library" >&2; exit 1;; esac; done\n'
        f'exec {real} "$@"\n'
    )
    srun.chmod(0o755)
    path = f"PATH={slurm.place}:{slurm.environ()['PATH']}"
    ended = slurm.run("salloc", "-N2", "env", path, "hpcray-launch", script)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "hosts n1 n2"
    assert "can not load PMIx library (is libpmix.so there?" in ended.err and "Starting with mpirun" in ended.err


def test_the_doctor_examines_every_node_of_an_allocation(slurm: Slurm) -> None:
    ended = slurm.run("salloc", "-N4", "--time=30", "--gres=gpu:2", *DOCTOR, "--json", "--require-rdma")
    assert ended.code == 1, "RDMA is required and not there: " + ended.err
    rows = {(row["topic"], row["name"]): row for row in json.loads(ended.out)}
    assert [name for (_, name), row in rows.items() if row["level"] == "fail"] == ["RDMA"]
    assert rows["Slurm", "allocation"]["value"].endswith("4 nodes: n[1-4]")
    assert rows["Slurm", "srun --mpi=pmix"]["level"] == rows["MPI", "start-up"]["level"] == "ok"
    assert rows["MPI", "start-up"]["nodes"] == ["n1", "n2", "n3", "n4"]
    assert rows["Slurm", "time left"]["value"] in ("29 min", "30 min")
    assert rows["clocks", "skew"]["level"] == "ok"
    assert rows["host", "GPUs"]["value"].startswith("2: 0, 1")


TASK = """\
from hpcray.state import doctor_step
from hpcray.state.doctor import DoctorFinding
found = [DoctorFinding("host", f"row {i}", "x" * 100, "ok") for i in range(20)]
doctor_step.examine = lambda *rest: found
doctor_step.main()
"""
ASK = """\
import json, sys
from hpcray.state.doctor_step import examine_nodes
said = examine_nodes(["srun", "--overlap", sys.executable, sys.argv[1]], ["n1", "n2", "n3", "n4"])
print(json.dumps([said.missing, {node: len(found) for node, found in said.reports.items()}]))
"""


def test_long_reports_that_come_at_the_same_moment_are_all_read(slurm: Slurm) -> None:
    task, ask = slurm.write(TASK, "task.py"), slurm.write(ASK, "ask.py")
    ended = slurm.run("salloc", "-N4", "python", ask, task, environ={"SLURM_UNBUFFEREDIO": "1"})
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == [[], {"n1": 20, "n2": 20, "n3": 20, "n4": 20}]


IMPATIENT = """\
from hpcray.state import doctor_step
doctor_step._SILENCE_TIMEOUT = 8.0
from hpcray.cli.__main__ import main
main(["doctor", "--json"])
"""


@pytest.mark.slow
def test_nodes_that_hang_are_named_by_the_doctor_and_leave_nothing(slurm: Slurm) -> None:
    # Python does not come up on n2; on n3 a program that the doctor asks hangs and will not be ended.
    slurm.write(
        "import os, time\nif os.environ.get('SLURMD_NODENAME') == 'n2':\n    time.sleep(1000)\n", "sitecustomize.py"
    )
    srun = slurm.write(
        '#!/bin/sh\nif [ "$SLURMD_NODENAME$1" = n3--version ]; then trap "" TERM; while sleep 1; do :; done; fi\n'
        f'exec {shutil.which("srun")} "$@"\n',
        "srun",
    )
    environ = {"PATH": f"{srun.parent}:{slurm.environ()['PATH']}", "PYTHONPATH": f"{srun.parent}:{slurm.source}"}
    ended = slurm.run("salloc", "-N4", "python", slurm.write(IMPATIENT), environ=environ)
    assert ended.code == 1, ended.err
    rows = {row["name"]: row for row in json.loads(ended.out)}
    assert rows["nodes without a report"]["value"] == "n2: no word for 8 s"
    assert (rows["no report"]["nodes"], rows["no report"]["level"]) == (["n3"], "fail")
    assert rows["no report"]["value"] == "asking mpirun and srun; no word for 8 s"
    assert rows["CPUs"]["nodes"] == ["n1", "n4"]
