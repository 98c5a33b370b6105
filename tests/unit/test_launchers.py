"""Launchers beside srun and Open MPI's: their lines, by stand-ins that record their arguments, and who is who."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT

from hpcray.cli.launch import parse_options
from hpcray.common.rank_variables import LAUNCHER_PREFIXES
from hpcray.launch.launch_line import (
    FLUX,
    INTEL_MPI,
    LAUNCHERS,
    MPICH,
    OPEN_MPI,
    PALS,
    LaunchError,
    LaunchSite,
    Placement,
    SrunSite,
    compose,
    find_launcher,
    find_mpirun,
    recognise,
    starts_here,
)
from hpcray.platform.allocation import read_allocation
from hpcray.platform.launcher_environment import strip_launcher_variables
from hpcray.platform.process_control import module_line
from hpcray.transport.startup import Launch, read_launch

BANNERS = {
    OPEN_MPI: "mpirun (Open MPI) 5.0.11",
    MPICH: "HYDRA build details:\n    Version:  4.0.2",
    INTEL_MPI: "Intel(R) MPI Library for Linux* OS, Version 2021.19 Build 20260101",
    PALS: "mpiexec version 1.4.0, PALS",
}
STAND_IN = """\
#!{python}
import json, os, sys
if "--version" in sys.argv:
    print({banner!r})
elif sys.argv[1:] == ["getattr", "size"]:
    print(3)
else:
    json.dump([os.path.basename(sys.argv[0]), *sys.argv[1:]], open({record!r}, "w"))
"""
OUTER = ("SLURM_", "PBS_", "FLUX_", "HPCRAY_", *LAUNCHER_PREFIXES)


def stand_in(tmp_path: Path, name: str, banner: str = "") -> Path:
    directory = tmp_path / "bin"
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(STAND_IN.format(python=sys.executable, banner=banner, record=str(tmp_path / "argv.json")))
    program.chmod(0o755)
    return directory


def launched(tmp_path: Path, *argv: str, **environ: str) -> list[str]:
    """What the stand-in got from `hpcray-launch`, without the words that follow the interpreter."""
    given = {name: text for name, text in os.environ.items() if not name.startswith(OUTER)}
    given |= {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environ}
    line = [sys.executable, "-m", "hpcray.cli.launch", *argv, "p.py"]
    done = subprocess.run(line, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    words: list[str] = json.loads((tmp_path / "argv.json").read_text())
    assert words[words.index(sys.executable) :] == module_line("hpcray", "p.py")
    return words[: words.index(sys.executable)]


@pytest.mark.parametrize("name", BANNERS)
def test_a_launcher_is_recognised_by_what_it_says(tmp_path: Path, name: str) -> None:
    assert recognise(str(stand_in(tmp_path, "mpirun", BANNERS[name]) / "mpirun")) == name


def test_mpich_starts_one_rank_per_host_and_keeps_the_others_when_one_dies(tmp_path: Path) -> None:
    mpirun = str(stand_in(tmp_path, "mpirun", BANNERS[MPICH]) / "mpirun")
    start = ["mpirun", "-disable-auto-cleanup", "-bind-to", "none"]
    assert launched(tmp_path, "-n", "4", "--mpirun", mpirun) == [*start, "-hosts", "localhost", "-n", "4"]
    hosts = [*start, "-hosts", "a,b", "-ppn", "1", "-n", "2"]
    assert launched(tmp_path, "--hosts", "a,b", "--mpirun", mpirun) == hosts
    (tmp_path / "hosts").write_text("a:8\nb:8\nc:8\n")
    file = str(tmp_path / "hosts")
    found = launched(tmp_path, "--hostfile", file, "--mpirun", mpirun)
    assert found == [*start, "-f", file, "-ppn", "1", "-n", "3"]


def test_intel_mpi_is_told_not_to_bind_its_ranks(tmp_path: Path) -> None:
    mpirun = str(stand_in(tmp_path, "mpirun", BANNERS[INTEL_MPI]) / "mpirun")
    line = ["mpirun", "-genv", "I_MPI_PIN", "0", "-hosts", "localhost", "-n", "2"]
    assert launched(tmp_path, "-n", "2", "--mpirun", mpirun) == line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (MPICH, ["-disable-auto-cleanup", "-bind-to", "none", "-f", "FILE", "-ppn", "1", "-n", "2"]),
        (INTEL_MPI, ["-genv", "I_MPI_PIN", "0", "-f", "FILE", "-ppn", "1", "-n", "2"]),
        (PALS, ["--no-abort-on-failure", "--cpu-bind", "none", "--genvall", "-n", "2", "--ppn", "1"]),
        (OPEN_MPI, ["--hostfile", "FILE", "--map-by", "ppr:1:node:OVERSUBSCRIBE", "--bind-to", "none"]),
    ],
)
def test_a_pbs_job_gets_one_rank_on_each_of_its_nodes(tmp_path: Path, name: str, words: list[str]) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("n1.site\nn1.site\nn2.site\nn2.site\n")
    environ = {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "12.server"}
    slurm = SrunSite(read_allocation(environ, "n1"), environ)
    site = LaunchSite("python", "/x/mpirun", False, environ, slurm=slurm, launcher=name)
    expected = ["/x/mpirun", *(str(nodes) if word == "FILE" else word for word in words)]
    options = parse_options(["p.py"])
    assert compose(options, site) == [*expected, *module_line("hpcray", "p.py", python="python")]
    assert starts_here(options, site) and not starts_here(parse_options(["--driver-rank", "1", "p.py"]), site)


def test_flux_gives_every_rank_a_node_of_its_own_and_outlives_ranks(tmp_path: Path) -> None:
    stand_in(tmp_path, "flux")
    start = ["flux", "run", "--exclusive", "-o", "cpu-affinity=off", "-o", "exit-timeout=none"]
    assert launched(tmp_path, FLUX_URI="local:///x") == [*start, "-N", "3", "-n", "3"], "all nodes of the instance"
    assert launched(tmp_path, "-n", "2", FLUX_URI="local:///x") == [*start, "-N", "2", "-n", "2"]
    assert launched(tmp_path, "-n", "2", "--launcher", "flux") == [*start, "-N", "2", "-n", "2"]


def test_every_launcher_puts_the_command_last() -> None:
    assert set(LAUNCHERS) == {MPICH, INTEL_MPI, PALS, FLUX}
    for launcher in LAUNCHERS.values():
        for where in (Placement("x"), Placement("x", 3, ("a", "b")), Placement("x", hostfile="f"), Placement("x", 2)):
            assert launcher.line(where, ["python", "p.py"])[-2:] == ["python", "p.py"]


def test_a_launcher_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="--mpirun nothere: no such program"):
        find_launcher("nothere")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no mpirun in"):
        find_mpirun("", str(tmp_path))
    monkeypatch.setenv("PATH", str(stand_in(tmp_path, "mpiexec")))
    assert find_mpirun("", str(tmp_path)) == str(tmp_path / "bin" / "mpiexec")


RANKS = {
    "MPICH and Intel MPI": ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, "pmi", "pid-", 2),
    "MVAPICH2's mpirun_rsh": (
        {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "0",
         "MV2_COMM_WORLD_LOCAL_SIZE": "2", "PMI_ID": "3", "PMI_PORT": "n1:35001", "MPISPAWN_ID": "1"}, "pmi", "pid-", 2
    ),
    "mpirun_rsh of MVAPICH 3 and newer": (
        {"MVP_COMM_WORLD_RANK": "3", "MVP_COMM_WORLD_SIZE": "4", "MVP_COMM_WORLD_LOCAL_RANK": "0",
         "MVP_COMM_WORLD_LOCAL_SIZE": "2", "PMI_ID": "3", "PMI_PORT": "n1:35001", "MPISPAWN_ID": "1"}, "pmi", "pid-", 2
    ),
    "PALS": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_SIZE": "1", "PALS_APID": "7", "PALS_RANKID": "3"}, "pmi", "7", 1
    ),
    "Flux": (
        {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "4", "FLUX_JOB_ID": "f2", "PMI_RANK": "3",
         "PMI_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "flux", "f2", 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("launcher", RANKS)
def test_a_rank_knows_itself(launcher: str) -> None:
    environ, kind, job, here = RANKS[launcher]
    found = read_launch(environ)
    assert (found.kind, found.rank, found.size, found.here) == (kind, 3, 4, here)
    assert found.job.startswith(job)
    given = read_allocation(environ, "n1")
    assert (given.rank, given.ranks, given.ranks_here) == (3, 4, here)


def test_a_process_of_the_user_does_not_take_itself_for_a_rank() -> None:
    for environ, _, _, _ in RANKS.values():
        left = {name: text for name, text in environ.items() if not name.startswith("SLURM_")}
        strip_launcher_variables(left)
        assert read_launch(left) == Launch()
        assert set(left) <= {"FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "FLUX_JOB_ID"}


def test_ranks_of_one_host_are_started_without_any_package() -> None:
    """`python -E -S` does not search the paths of packages."""
    program = ROOT / "hpcray" / "launch" / "local_ranks.py"
    ended = subprocess.run([sys.executable, "-E", "-S", program], capture_output=True, text=True, timeout=30)
    assert "not enough values to unpack" in ended.stderr, ended.stderr
