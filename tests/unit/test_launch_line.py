"""The launch line as a pure function of options and site."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from hpcray.__main__ import parse
from hpcray.cli.launch import main, parse_options
from hpcray.common.config import parse_size
from hpcray.launch.launch_line import (
    EPILOG,
    LaunchError,
    LaunchOptions,
    LaunchSite,
    SrunSite,
    compose,
    compose_step,
    find_mpirun,
    has_open_ports,
    protocol,
    starts_here,
    try_srun,
)
from hpcray.launch.local_ranks import local_arguments
from hpcray.platform.allocation import read_allocation
from hpcray.platform.process_control import module_line
from hpcray.runtime.node.options import NodeOptions

SITE = LaunchSite(python="/env/bin/python", mpirun="/env/bin/mpirun", root=False, environ={})
RANK = module_line("hpcray", python="/env/bin/python")


def line(argv: str, site: LaunchSite = SITE) -> list[str]:
    return compose(parse_options(argv.split()), site)


def test_n_4_starts_four_ranks_on_this_host() -> None:
    assert line("-n 4 train.py --epochs 3") == [
        "/env/bin/mpirun",
        *("--host", "localhost", "-n", "4", "--map-by", "node:OVERSUBSCRIBE", "--bind-to", "none"),
        *RANK,
        *("train.py", "--epochs", "3"),
    ]


def test_the_default_is_one_node() -> None:
    assert line("train.py")[1:5] == ["--host", "localhost", "-n", "1"]


@pytest.mark.parametrize(("root", "present"), [(True, True), (False, False)])
def test_allow_run_as_root_is_added_for_root_only(root: bool, present: bool) -> None:
    site = LaunchSite(python=SITE.python, mpirun=SITE.mpirun, root=root, environ={})
    assert ("--allow-run-as-root" in line("-n 2 s.py", site)) is present


@pytest.mark.parametrize(
    ("argv", "ucx"),
    [("-n 4 s.py", False), ("--hosts a s.py", False), ("--hosts a,b s.py", True), ("--hostfile h s.py", True)],
)
def test_a_recovering_mpirun_lets_the_other_ranks_outlive_a_dead_one(argv: str, ucx: bool) -> None:
    site = replace(SITE, recovers=True)
    composed = line(argv, site)
    assert composed[1] == "--enable-recovery" and ("pml" in composed) is ucx
    assert "pml" not in line(argv, replace(site, environ={"OMPI_MCA_pml": "cm"})), "the user's own choice"
    assert "--enable-recovery" not in line(argv)


def test_hosts_get_one_node_each() -> None:
    composed = line("--hosts a,b,c s.py")
    assert composed[1:5] == ["--host", "a,b,c", "-n", "3"]
    assert line("--hosts a,b -n 4 s.py")[1:5] == ["--host", "a,b", "-n", "4"]


def test_each_host_of_a_hostfile_gets_one_node_without_n() -> None:
    assert line("--hostfile hosts s.py")[1:5] == ["--hostfile", "hosts", "--map-by", "ppr:1:node"]
    assert line("--hostfile hosts -n 4 s.py")[1:7] == [
        *("--hostfile", "hosts", "-n", "4", "--map-by", "node:OVERSUBSCRIBE"),
    ]


def test_node_options_reach_every_rank_before_the_script() -> None:
    composed = line("-n 2 --cpus-per-node 8 --object-store 2g s.py --object-store 1g")
    assert composed == line(f"-n 2 --num-cpus 8 --object-store-memory {2 << 30} s.py --object-store 1g")
    assert composed[composed.index("/env/bin/python") :] == [
        *RANK,
        *("--num-cpus", "8", "--object-store-memory", str(2 << 30), "s.py", "--object-store", "1g"),
    ]


def test_options_after_a_module_belong_to_the_module() -> None:
    assert line("-n 2 -m pkg.train -n 7 --dry-run")[-5:] == ["-m", "pkg.train", "-n", "7", "--dry-run"]
    assert not parse_options(["-m", "pkg.train", "--dry-run"]).dry_run


def test_the_environment_is_exported_to_remote_hosts_and_inherited_by_local_ranks() -> None:
    environ = {"HPCRAY_TICK": "1", "UCX_TLS": "tcp", "PYTHONPATH": "/x", "HOME": "/h", "OMPI_MCA_pml": "ucx"}
    site = LaunchSite(python=SITE.python, mpirun=SITE.mpirun, root=False, environ=environ)
    composed = line("--hosts a,b -x HOME s.py", site)
    exported = [composed[i + 1] for i, word in enumerate(composed) if word == "-x"]
    assert exported == ["HOME", "HPCRAY_TICK", "PYTHONPATH", "UCX_TLS"]
    assert "-x" not in line("-n 4 s.py", site)


ONE_PER_NODE = ["--no-kill", "--kill-on-bad-exit=0", "-W", "0"]


def in_job(argv: str, problem: str = "", mpi: str = "pmix", **environ: str) -> list[str]:
    """The line inside an allocation of four nodes with 16 CPUs each, unless `environ` says other."""
    told = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_JOB_CPUS_PER_NODE": "16(x4)",
        "SLURMD_NODENAME": "n1",
        **environ,
    }
    slurm = SrunSite(read_allocation(told, "n1"), told, mpi, problem)
    return line(argv, LaunchSite(python=SITE.python, mpirun="/env/bin/mpirun", root=False, environ=told, slurm=slurm))


@pytest.mark.parametrize("flag", ["", "--srun "])
def test_inside_an_allocation_srun_starts_one_rank_per_node_with_all_cpus(flag: str) -> None:
    assert in_job(flag + "s.py x") == [
        *("srun", "--mpi=pmix", "-N", "4", "-n", "4", "--ntasks-per-node=1", "--cpus-per-task=16"),
        *ONE_PER_NODE,
        *RANK,
        *("s.py", "x"),
    ]


def test_srun_gets_the_cleanup_epilog_unless_the_user_has_one_or_pmix_would_end_the_step() -> None:
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}

    def with_epilog(mpi: str = "pmi2", **environ: str) -> list[str]:
        slurm = SrunSite(read_allocation(told, "n1"), {**told, **environ}, mpi, epilog="/x/epilog.sh")
        return line("s.py", LaunchSite(python=SITE.python, mpirun="", root=False, environ=told, slurm=slurm))

    assert "--task-epilog=/x/epilog.sh" in with_epilog()
    assert "--task-epilog=/x/epilog.sh" not in with_epilog(SLURM_TASK_EPILOG="/mine")
    assert "--task-epilog=/x/epilog.sh" not in with_epilog("pmix"), "the death of one rank would end the step"
    assert os.access(EPILOG, os.X_OK)


def test_n_may_be_smaller_than_the_job_but_not_larger() -> None:
    assert in_job("-n 2 s.py")[2:6] == ["-N", "2", "-n", "2"]
    with pytest.raises(LaunchError, match=r"job 7 has 4 nodes.*hint: .*--mpirun mpirun for 5 ranks"):
        in_job("-n 5 s.py")


@pytest.mark.parametrize(
    "environ", [{"SLURM_JOB_CPUS_PER_NODE": "16(x2),8(x2)"}, {"SLURM_HINT": "nomultithread"}], ids=["mixed", "hint"]
)
def test_nodes_with_different_cpu_counts_start_without_cpu_binding(environ: dict[str, str]) -> None:
    composed = in_job("s.py", **environ)
    assert "--cpu-bind=none" in composed
    assert not [word for word in composed if word.startswith("--cpus-per-task")]


def test_gpus_per_task_become_gpus_of_the_node() -> None:
    composed = in_job("s.py", SLURM_GPUS_PER_TASK="a100:1", SLURM_TASKS_PER_NODE="4(x4)")
    assert composed[:4] == ["env", "-u", "SLURM_GPUS_PER_TASK", "srun"]
    assert "--gpus-per-node=a100:4" in composed


def test_a_step_inside_a_step_overlaps_and_export_none_of_sbatch_is_overridden() -> None:
    assert "--overlap" in in_job("s.py", SLURM_STEP_ID="0")
    assert "--overlap" not in in_job("s.py", SLURM_STEP_ID="4294967290")
    assert "--overlap" in in_job("--overlap s.py")
    assert "--export=ALL" in in_job("s.py", SLURM_EXPORT_ENV="NONE")
    assert "--export=ALL" not in in_job("s.py", SLURM_EXPORT_ENV="ALL,X=1")


def test_the_doctors_step_overlaps_and_runs_without_mpi_where_srun_has_none() -> None:
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    slurm = SrunSite(read_allocation(told, "login"), told)
    assert compose_step(slurm, ["x"])[:2] == ["srun", "--mpi=pmix"] and "--overlap" in compose_step(slurm, ["x"])
    assert compose_step(SrunSite(slurm.allocation, told, problem="no pmix"), ["x"])[1] == "--mpi=none"


def test_a_heterogeneous_job_starts_on_all_of_its_nodes() -> None:
    parts = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    assert in_job("s.py", **parts)[2:5] == ["--het-group=0-1", "--ntasks-per-node=1", "--cpu-bind=none"]
    with pytest.raises(LaunchError, match="heterogeneous"):
        in_job("-n 2 s.py", **parts)


def test_without_pmix_mpirun_starts_the_ranks_unless_srun_is_required() -> None:
    problem = "can not load PMIx library"
    assert in_job("-n 2 s.py", problem)[:7] == [
        *("/env/bin/mpirun", "-n", "2", "--map-by", "ppr:1:node:OVERSUBSCRIBE", "--bind-to", "none"),
    ]
    with pytest.raises(LaunchError, match=r"--mpi=pmix does not work here: can not load PMIx.*hint: --mpirun"):
        in_job("--srun s.py", problem)


def test_explicit_hosts_or_mpirun_are_used_in_an_allocation_too() -> None:
    assert in_job("--hosts a,b s.py")[:3] == ["/env/bin/mpirun", "--host", "a,b"]
    assert in_job("--mpirun mpirun -n 4 s.py")[:5] == ["/env/bin/mpirun", "--host", "localhost", "-n", "4"]


def test_srun_needs_an_allocation() -> None:
    with pytest.raises(LaunchError, match=r"allocation.*hint: salloc"):
        line("--srun s.py")


@pytest.mark.parametrize(
    ("chosen", "mpich", "used"),
    [
        ("", False, "pmix"),
        ("", True, "pmi2"),
        ("pmix_v4", False, "pmix_v4"),
        ("none", False, "pmix"),
        ("pmi2", False, "pmix"),
        ("cray_shasta", True, "cray_shasta"),
    ],
)
def test_srun_s_protocol_is_the_librarys_in_the_version_of_the_site(chosen: str, mpich: bool, used: str) -> None:
    assert protocol({"SLURM_MPI_TYPE": chosen}, mpich) == used


MISSING = "srun: error:  mpi/pmix_v4: init: (null) [0]: mpi_pmix.c:195: pmi/pmix: can not load PMIx library"


@pytest.mark.parametrize(
    ("says", "code", "problem"),
    [
        (MISSING, 1, "can not load PMIx library (is libpmix.so there?"),
        ("srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types", 1, "Invalid MPI type 'pmix'"),
        ("srun: error: Unable to create step for job 7: Requested nodes are busy", 1, ""),
        ("srun: error: some warning about Invalid MPI type", 0, ""),
    ],
)
def test_a_trial_step_finds_out_that_srun_cannot_start_mpi(tmp_path: Path, says: str, code: int, problem: str) -> None:
    program(tmp_path, "srun").write_text(f'#!/bin/sh\necho "{says}" >&2\nexit {code}\n')
    found = try_srun("pmix", {"PATH": str(tmp_path)})
    assert problem in found and bool(found) is bool(problem)


def test_a_missing_srun_is_reported(tmp_path: Path) -> None:
    assert try_srun("pmix", {"PATH": str(tmp_path)}) == "there is no srun on PATH"


def test_require_rdma_and_as_ray_reach_every_rank() -> None:
    assert line("-n 2 --require-rdma s.py")[-2:] == ["--require-rdma", "s.py"]
    assert line("-n 2 --as-ray s.py")[-2:] == ["--as-ray", "s.py"]


def test_rank_0_runs_beside_the_batch_script_and_not_beside_the_shell_of_salloc() -> None:
    for host, here in (("n1", True), ("login", False)):
        told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}
        site = LaunchSite(
            python="p", mpirun="", root=False, environ=told, slurm=SrunSite(read_allocation(told, host), told)
        )
        assert starts_here(parse_options(["s.py"]), site) is here


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
def test_rank_0_starts_on_the_first_host(argv: str, here: bool) -> None:
    site = LaunchSite(python="p", mpirun="m", root=False, environ={}, names=frozenset({"localhost", "me"}))
    assert starts_here(parse_options(argv.split()), site) is here


@pytest.mark.parametrize(("first", "here"), [("me", True), ("other", False), ("", False)])
def test_rank_0_runs_on_the_first_host_of_the_hostfile(first: str, here: bool) -> None:
    hosts = (first, "b") if first else ()
    site = LaunchSite(python="p", mpirun="m", root=False, environ={}, names=frozenset({"me"}), hostfile=hosts)
    assert starts_here(parse_options(["--hostfile", "f", "s.py"]), site) is here


@pytest.mark.parametrize(
    ("argv", "here"),
    [
        ("-n 4 --driver-rank 3 s.py", True),
        ("--hosts me,b --driver-rank 1 s.py", False),
        ("--hosts a,me --driver-rank 1 s.py", True),
        ("--hosts a,me -n 4 --driver-rank 3 s.py", True),
        ("--hostfile f --driver-rank 1 s.py", True),
        ("--hostfile f s.py", False),
    ],
)
def test_the_program_starts_on_the_host_of_the_driver_rank(argv: str, here: bool) -> None:
    site = LaunchSite(python="p", mpirun="m", root=False, environ={}, names=frozenset({"me"}), hostfile=("a", "me"))
    assert starts_here(parse_options(argv.split()), site) is here
    number = argv.split("--driver-rank ")[1][0] if "--driver-rank" in argv else ""
    assert (f"-m hpcray --driver-rank {number} s.py" in " ".join(line(argv, site))) is bool(number)


def test_the_program_s_rank_may_come_from_the_environment_and_gets_the_input() -> None:
    site = LaunchSite(python="p", mpirun="m", root=False, environ={"HPCRAY_DRIVER_RANK": "1"}, names=frozenset({"a"}))
    assert not starts_here(parse_options(["--hosts", "a,b", "s.py"]), site)
    assert "--stdin 1 " in " ".join(line("--hosts a,b s.py", site))


def test_a_driver_rank_beyond_the_last_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["-n", "3", "--driver-rank", "3", "s.py"])
    assert "there are the ranks 0 to 2" in capsys.readouterr().err


def test_stdin_none_is_used_for_a_remote_rank_0_without_input() -> None:
    site = LaunchSite(python="p", mpirun="m", root=False, environ={}, no_input=True)
    assert "--stdin none" in " ".join(line("--hosts a,b s.py", site))
    assert "--stdin" not in line("-n 2 s.py", site)
    assert "--stdin" not in line("--hosts a,b s.py")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2g", 2 << 30),
        ("512M", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("100kb", 100 << 10),
        ("4096", 4096),
        ("1e9", 10**9),
        ("1e+09", 10**9),
    ],
)
def test_sizes_may_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "g", "-1", "0", "2x", "1 2"])
def test_wrong_sizes_are_refused_with_a_hint(text: str) -> None:
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
        ("--wrong s.py", "No such option"),
    ],
)
def test_wrong_command_lines_are_explained(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(argv.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_script_may_follow_two_dashes() -> None:
    assert parse_options(["-n", "2", "--", "s.py", "-n", "3"]) == LaunchOptions(
        NodeOptions(distributed=True, driver=["s.py", "-n", "3"]), nodes=2
    )


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


def test_a_missing_mpirun_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_n_np_and_nodes_are_the_same_option(argv: str) -> None:
    assert parse_options(argv.split()).nodes == 4


# ---------------------------------------------------------------- the options of a rank


@pytest.mark.parametrize(
    "options",
    [
        NodeOptions(distributed=True, driver=["s.py"]),
        NodeOptions(
            distributed=True, num_cpus=0, num_gpus=0, config={"driver_rank": 0}, driver=["-m", "pkg", "--as-ray"]
        ),
        NodeOptions(
            distributed=True,
            num_cpus=2.5,
            memory=1e9,
            resources={"disk": 2},
            as_ray=True,
            broadcast_env="/env",
            config={"object_store_memory": 1 << 31, "require_rdma": True, "driver_rank": 3},
            driver=["-c", "print(1)", "--num-cpus", "4"],
        ),
    ],
)
def test_a_rank_reads_the_options_that_the_launch_line_gives_it(options: NodeOptions) -> None:
    assert NodeOptions.from_argv(options.to_argv()) == options
    assert parse(options.to_argv()) == options


def test_a_rank_takes_values_after_an_equals_sign_and_a_script_after_two_dashes() -> None:
    found = parse(["--num-cpus=4", "--", "s.py", "--num-cpus", "8"])
    assert (found.num_cpus, found.driver) == (4, ["s.py", "--num-cpus", "8"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "no script given; hint: python -m hpcray script.py"),
        ("--num-cpus 2", "no script given"),
        ("-m", "no script given"),
        ("-c", "no script given"),
        ("--num-cpus", "--num-cpus needs a value"),
        ("--num-cpus many s.py", "--num-cpus: could not convert string to float: 'many'"),
        ("--driver-rank -1 s.py", "--driver-rank: '-1' is not a whole number"),
        ("--resources disk s.py", "--resources: 'disk' is not a JSON object; hint: '{\"disk\": 2}'"),
        ("--as-ray=yes s.py", "--as-ray takes no value"),
        ("--num 2 s.py", "unrecognized option --num"),
    ],
)
def test_a_rank_explains_a_wrong_command_line(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_both_helps_name_every_option_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--num-cpus", "2", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"  {word}" in text for word in ("--num-cpus K", "--resources JSON", "--require-rdma", "-m", "-c"))
    with pytest.raises(SystemExit) as caught:
        parse_options(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    flags = ("--cpus-per-node K", "--gpus-per-node K", "--object-store SIZE", "--driver-rank N", "--broadcast-env DIR")
    assert all(word in text for word in (*flags, "--require-rdma", "--as-ray", "hpcray-launch -n 4 --dry-run train.py"))


# ---------------------------------------------------------------- ports


def test_ranks_of_one_host_start_without_mpirun_where_its_library_is_known() -> None:
    site = LaunchSite(
        "/py", "/m/mpirun", False, {}, names=frozenset({"localhost", "me"}), recovers=True, pmix="/m/pmix"
    )
    options = LaunchOptions(NodeOptions(driver=("a.py",)), nodes=3)
    line = compose(options, site)
    ranks = module_line("hpcray", "a.py", python="/py")
    assert local_arguments(line) == ["3", "/m/pmix", "recover", *ranks]
    assert not has_open_ports(options, site)
    here = replace(options, nodes=None, hosts=("me", "localhost"))
    assert local_arguments(compose(here, site)) == ["2", "/m/pmix", "recover", *ranks]
    for other in (replace(options, hosts=("me", "b")), replace(options, hostfile="hosts.txt")):
        assert local_arguments(compose(other, site)) is None and has_open_ports(other, site)
    unknown = replace(site, pmix="")
    assert compose(options, unknown)[0] == "/m/mpirun" and has_open_ports(options, unknown)
    assert not has_open_ports(options, replace(unknown, environ={"PMIX_MCA_psec": "munge"}))
    assert has_open_ports(options, replace(unknown, launcher="mpich"))
