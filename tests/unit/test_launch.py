"""The launch line as a pure function of options and site."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpcray.cluster.launch import LaunchError, Site, compose, find_mpirun, main, starts_here
from hpcray.cluster.options import LaunchOptions, parse_options, parse_size

SITE = Site(python="/env/bin/python", mpirun="/env/bin/mpirun", root=False, environ={})
RANK = ["/env/bin/python", "-m", "hpcray"]


def line(argv: str, site: Site = SITE) -> list[str]:
    return compose(parse_options(argv.split()), site)


def test_one_host_as_four_nodes() -> None:
    assert line("-n 4 train.py --epochs 3") == [
        "/env/bin/mpirun",
        *("--host", "localhost", "-n", "4", "--map-by", "node:OVERSUBSCRIBE", "--bind-to", "none"),
        *RANK,
        *("train.py", "--epochs", "3"),
    ]


def test_one_node_by_default() -> None:
    assert line("train.py")[1:5] == ["--host", "localhost", "-n", "1"]


@pytest.mark.parametrize(("root", "present"), [(True, True), (False, False)])
def test_root_is_allowed_only_as_root(root: bool, present: bool) -> None:
    site = Site(python=SITE.python, mpirun=SITE.mpirun, root=root, environ={})
    assert ("--allow-run-as-root" in line("-n 2 s.py", site)) is present


def test_hosts_get_one_node_each() -> None:
    composed = line("--hosts a,b,c s.py")
    assert composed[1:5] == ["--host", "a,b,c", "-n", "3"]
    assert line("--hosts a,b -n 4 s.py")[1:5] == ["--host", "a,b", "-n", "4"]


def test_hostfile_gives_each_host_one_node_unless_told() -> None:
    assert line("--hostfile hosts s.py")[1:5] == ["--hostfile", "hosts", "--map-by", "ppr:1:node"]
    assert line("--hostfile hosts -n 4 s.py")[1:7] == [
        *("--hostfile", "hosts", "-n", "4", "--map-by", "node:OVERSUBSCRIBE"),
    ]


def test_node_options_reach_every_rank_before_the_script() -> None:
    composed = line("-n 2 --cpus-per-node 8 --object-store 2g s.py --object-store 1g")
    assert composed[composed.index("/env/bin/python") :] == [
        *RANK,
        *("--num-cpus", "8", "--object-store-memory", str(2 << 30), "s.py", "--object-store", "1g"),
    ]


def test_a_module_with_options_of_its_own() -> None:
    assert line("-n 2 -m pkg.train -n 7 --dry-run")[-5:] == ["-m", "pkg.train", "-n", "7", "--dry-run"]
    assert not parse_options(["-m", "pkg.train", "--dry-run"]).dry_run


def test_remote_hosts_are_told_the_environment_and_local_ones_inherit_it() -> None:
    environ = {"HPCRAY_TICK": "1", "UCX_TLS": "tcp", "PYTHONPATH": "/x", "HOME": "/h", "OMPI_MCA_pml": "ucx"}
    site = Site(python=SITE.python, mpirun=SITE.mpirun, root=False, environ=environ)
    composed = line("--hosts a,b -x HOME s.py", site)
    exported = [composed[i + 1] for i, word in enumerate(composed) if word == "-x"]
    assert exported == ["HOME", "HPCRAY_TICK", "PYTHONPATH", "UCX_TLS"]
    assert "-x" not in line("-n 4 s.py", site)


def test_srun_line() -> None:
    site = Site(python=SITE.python, mpirun="", root=True, environ={"SLURM_JOB_ID": "7"})
    assert line("--srun -n 4 s.py x", site) == [
        *("srun", "--mpi=pmix", "--ntasks-per-node=1", "--cpu-bind=none"),
        *("--no-kill", "--kill-on-bad-exit=0", "-W", "0", "-N", "4"),
        *RANK,
        *("s.py", "x"),
    ]


def test_srun_with_open_mpi_from_pypi_adds_what_the_site_has_not_set() -> None:
    environ = {"SLURM_JOB_ID": "7", "OMPI_MCA_pml": "cm"}
    composed = line("--srun s.py", Site(python=SITE.python, mpirun="", root=True, environ=environ, wheel="/env"))
    before = composed[: composed.index("srun")]
    assert before[:3] == ["env", "OPAL_PREFIX=/env", "PMIX_MCA_psec=^munge"]
    assert not [word for word in before if word.startswith("OMPI_MCA_pml")]


def test_srun_needs_an_allocation() -> None:
    with pytest.raises(LaunchError, match=r"allocation.*hint: salloc"):
        line("--srun s.py")


@pytest.mark.parametrize(
    ("argv", "here"),
    [
        ("-n 4 s.py", True),
        ("--hosts me,other s.py", True),
        ("--hosts me:2,other s.py", True),
        ("--hosts other,me s.py", False),
        ("--hostfile f s.py", False),
    ],
)
def test_where_rank_0_starts(argv: str, here: bool) -> None:
    site = Site(python="p", mpirun="m", root=False, environ={}, names=frozenset({"localhost", "me"}))
    assert starts_here(parse_options(argv.split()), site) is here


def test_no_input_is_forwarded_to_another_host_when_there_is_none() -> None:
    site = Site(python="p", mpirun="m", root=False, environ={}, no_input=True)
    assert "--stdin none" in " ".join(line("--hosts a,b s.py", site))
    assert "--stdin" not in line("-n 2 s.py", site)
    assert "--stdin" not in line("--hosts a,b s.py")


@pytest.mark.parametrize(
    ("text", "size"), [("2g", 2 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("100kb", 100 << 10), ("4096", 4096)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "g", "-1", "0", "2x", "1e9", "1 2"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="hint: write 2g"):
        parse_size(text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "no script given"),
        ("-n 4", "no script given"),
        ("-m", "no script given"),
        ("-n 0 s.py", "'0' is not a positive whole number"),
        ("-n four s.py", "'four' is not a positive whole number"),
        ("--hosts a,,b s.py", "empty host name"),
        ("--hosts a --hostfile f s.py", "exclude each other"),
        ("--object-store lots s.py", "is not a size"),
        ("--cpus-per-node -1 s.py", "'-1' is not a number of CPUs"),
        ("--cpus-per-node many s.py", "'many' is not a number of CPUs"),
        ("--srun --hosts a s.py", "from the allocation"),
        ("--wrong s.py", "unrecognized"),
    ],
)
def test_wrong_command_lines_are_explained(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_script_may_follow_two_dashes() -> None:
    assert parse_options(["-n", "2", "--", "s.py", "-n", "3"]) == LaunchOptions(command=("s.py", "-n", "3"), nodes=2)


def program(directory: Path, name: str = "mpirun") -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_mpirun_beside_python_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, sites = program(tmp_path / "env"), program(tmp_path / "site")
    monkeypatch.setenv("PATH", str(sites.parent))
    assert find_mpirun("", str(ours.parent)) == str(ours)
    assert find_mpirun("", str(tmp_path)) == str(sites)
    assert find_mpirun(str(sites), str(ours.parent)) == str(sites)


def test_no_mpirun_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"no mpirun in .*hpcray\[mpi\]"):
        find_mpirun("", str(tmp_path))
    with pytest.raises(LaunchError, match="no such program"):
        find_mpirun("elsewhere/mpirun", str(tmp_path))


def test_dry_run_prints_a_line_for_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mpirun = program(tmp_path)
    assert main(["--mpirun", str(mpirun), "-n", "2", "--dry-run", "s.py", "a b"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(str(mpirun))
    assert printed.endswith("-m hpcray s.py 'a b'\n")
    assert ("--allow-run-as-root" in printed) is (os.geteuid() == 0)


@pytest.mark.parametrize("argv", ["-np 4 s.py", "-n 4 s.py", "-n4 s.py", "--nodes 4 s.py"])
def test_the_number_of_nodes_as_mpi_users_write_it(argv: str) -> None:
    assert parse_options(argv.split()).nodes == 4
