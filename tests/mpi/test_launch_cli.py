"""`hpcray-launch` end to end: what goes in and out of a job, and how it ends. One host as several nodes."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job
from helpers.leaks import TEST_ID, LeakCheck, wait_until

pytestmark = pytest.mark.skipif(
    not (Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun")), reason="no mpirun"
)

DRIVER = '''\
"""Does as its first argument says. Uses the cluster, so that every node has been up."""
import os, sys, time
import hpcray as ray


@ray.remote(scheduling_strategy="SPREAD")
def where():
    return ray.get_runtime_context().get_node_id()


what, *rest = sys.argv[1:]
if what == "read":
    text = sys.stdin.read()
    print(len(text), text[:5], text[-4:], *rest)
elif what == "streams":
    print("tty", sys.stdout.isatty())
    print("to stderr", file=sys.stderr)
elif what == "nodes":
    ray.init()
    print(len(ray.nodes()), int(ray.cluster_resources()["CPU"]), ray.nodes()[0]["Resources"]["object_store_memory"])
elif what == "exit":
    sys.exit(int(rest[0]))
elif what == "raise":
    raise LookupError("as the test wants it")
elif what == "signal":
    os.kill(os.getpid(), int(rest[0]))
elif what == "wait":
    ray.init()
    ray.get([where.remote() for _ in range(4)])
    try:
        print("ready", os.getpid(), flush=True)  # in the `try`: the interrupt comes as soon as this is read
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)
'''


@pytest.fixture
def driver(tmp_path: Path, leak_check: LeakCheck) -> Iterator[Path]:
    """The script, under leak check: every test here ends with nothing left."""
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    yield path


def launch(*args: object) -> list[str]:
    return [sys.executable, "-m", "hpcray.cli.launch", *map(str, args)]


def environ() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def run(*args: object, stdin: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        launch(*args), input=stdin, capture_output=True, text=True, timeout=timeout, env=environ(), check=False
    )


def raylet_of_rank(rank: int) -> int:
    """The raylet of this test that mpirun started as `rank`."""
    marks = {f"OMPI_COMM_WORLD_RANK={rank}".encode(), f"{TEST_ID}={os.environ[TEST_ID]}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            is_raylet = path.with_name("comm").read_text() == "hpcray-raylet\n"
            if is_raylet and marks <= set(path.read_bytes().split(b"\0")):
                return int(path.parent.name)
    raise AssertionError(f"no raylet of rank {rank}")


def test_nodes_get_the_requested_cpus_and_store(driver: Path) -> None:
    done = run("-n", 3, "--cpus-per-node", 2, "--object-store", "64m", driver, "nodes")
    assert (done.returncode, done.stdout.split()) == (0, ["3", "6", str(float(64 << 20))])


def test_the_program_gets_stdin_to_its_end_and_its_arguments(driver: Path) -> None:
    text = "first " + "x" * 3_000_000 + " last"
    done = run("-n", 2, driver, "read", "-n", "7", "--dry-run", stdin=text)
    assert (done.returncode, done.stdout.split()) == (0, [str(len(text)), "first", "last", "-n", "7", "--dry-run"])


def test_hpcray_launch_runs_a_module(driver: Path) -> None:
    done = subprocess.run(
        launch("-n", 1, "-m", "driver", "exit", 5),
        cwd=driver.parent,
        env=environ(),
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 5


def test_stdout_and_stderr_stay_apart_and_are_no_terminal(driver: Path) -> None:
    done = run("-n", 2, driver, "streams")
    assert (done.stdout, done.stderr) == ("tty False\n", "to stderr\n")


@pytest.mark.parametrize("code", [0, 1, 3, 139])
def test_the_launcher_exits_with_the_programs_code(driver: Path, code: int) -> None:
    done = run("-n", 2, driver, "exit", code)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_traceback_of_the_program_is_the_last_output(driver: Path) -> None:
    done = run("-n", 2, driver, "raise")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "LookupError: as the test wants it"


def test_a_driver_that_dies_of_a_signal_gives_128_plus_its_number(driver: Path) -> None:
    assert run("-n", 2, driver, "signal", int(signal.SIGSEGV)).returncode == 128 + signal.SIGSEGV


def test_ctrl_c_reaches_the_program(driver: Path) -> None:
    with Job(launch("-n", 2, driver, "wait")) as job:
        assert job.line().startswith("ready")
        job.send(signal.SIGINT)
        ended = job.wait()
    assert (ended.code, ended.out) == (130, "interrupted\n")


def test_sigterm_ends_the_job(driver: Path) -> None:
    with Job(launch("-n", 2, driver, "wait")) as job:
        assert job.line().startswith("ready")
        job.send(signal.SIGTERM)
        assert job.wait().code == 128 + signal.SIGTERM


def test_a_killed_launcher_leaves_nothing(driver: Path) -> None:
    with Job(launch("-n", 2, driver, "wait")) as job:
        assert job.line().startswith("ready")
        job.send(signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize(("launcher", "name"), [((), "hpcray-ranks"), (("--launcher", "openmpi"), "prterun")])
def test_a_killed_launcher_of_ranks_leaves_nothing(
    driver: Path, leak_check: LeakCheck, launcher: Sequence[str], name: str
) -> None:
    with Job(launch("-n", 2, *launcher, driver, "wait")) as job:
        assert job.line().startswith("ready")
        (starter,) = leak_check.processes(name)
        os.kill(starter, signal.SIGKILL)
        assert job.wait().code != 0
    assert not list(Path("/tmp").glob(f"ompi.{starter}"))


# Rank 1 is slow to end MPI, in which rank 0 waits for it.
SLOW_END = """\
import os, sys, threading, time
def delay():
    while not hasattr(sys.modules.get("mpi4py.MPI"), "Finalize"):
        time.sleep(0.01)
    module = sys.modules["mpi4py.MPI"]
    end = module.Finalize
    module.Finalize = lambda: (time.sleep(5), end())
if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    threading.Thread(target=delay, daemon=True).start()
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_code_is_the_programs_when_mpi_takes_long_to_end(driver: Path, tmp_path: Path, code: int) -> None:
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(SLOW_END)
    path = os.pathsep.join([str(tmp_path / "late"), str(ROOT)])
    with Job(launch("-n", 2, driver, "exit", code), {"PYTHONPATH": path}) as job:
        assert job.wait().code == code


def test_a_killed_raylet_of_rank_0_ends_the_job_with_137(driver: Path) -> None:
    """What becomes of the death of another one: test_node_loss."""
    with Job(launch("-n", 2, driver, "wait")) as job:
        assert job.line().startswith("ready")
        os.kill(raylet_of_rank(0), signal.SIGKILL)
        assert job.wait().code == 128 + signal.SIGKILL


def test_a_killed_driver_ends_the_job_with_137(driver: Path) -> None:
    with Job(launch("-n", 2, driver, "wait")) as job:
        os.kill(int(job.line().split()[1]), signal.SIGKILL)
        assert job.wait().code == 128 + signal.SIGKILL


def test_the_program_reads_input_typed_at_the_terminal(driver: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, launch("-n", 1, driver, "read"), environ())
    try:
        os.write(terminal, b"typed at the terminal\n\x04")  # Ctrl-D: the end of the input
        shown = b""
        while b"22 typed" not in shown:
            shown += os.read(terminal, 4096)
        wait_until(lambda: (ended := os.waitpid(pid, os.WNOHANG))[0] == pid and ended[1] == 0, "the launcher's end")
    finally:
        os.close(terminal)


def test_dry_run_prints_a_line_that_runs(driver: Path) -> None:
    shown = run("-n", 2, "--dry-run", driver, "exit", 3)
    assert shown.returncode == 0
    done = subprocess.run(
        shown.stdout, shell=True, env=environ(), stdin=subprocess.DEVNULL, timeout=60, check=False, capture_output=True
    )
    assert done.returncode == 3
