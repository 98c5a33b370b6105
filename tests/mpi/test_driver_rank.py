"""`--driver-rank`: the program is a child of another rank than 0, and nothing else is different."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job, under_mpirun
from helpers.leaks import LeakCheck

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix
from hpcray.platform.session_directory import live_sessions

pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

BEGIN = """\
import os, signal, sys, time
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
nodes = [node["NodeID"] for node in ray.nodes()]


@ray.remote(num_cpus=0)
def where():
    return ray.get_runtime_context().get_node_id()


me = nodes.index(ray.get_runtime_context().get_node_id())
"""

STORY = """\
print("driver", me, sys.argv[1:], os.path.basename(os.getcwd()), sys.stdin.read(), flush=True)
print("nodes", [nodes.index(ray.get(where.options(scheduling_strategy=On(node, False)).remote())) for node in nodes])
print("near", nodes.index(ray.get(where.remote())))


@ray.remote(num_cpus=0)
def say():
    print("said")


ray.get([say.options(scheduling_strategy=On(node, False)).remote() for node in nodes])
if sys.argv[1] == "raise":
    raise LookupError("nothing found")
sys.exit(int(sys.argv[1]))
"""

WAITS = """\
{setup}
print("ready", os.getpid(), flush=True)
try:
    while True:
        time.sleep(0.05)
        ray.get(where.options(scheduling_strategy=On(nodes[-1], True)).remote())
except KeyboardInterrupt:
    print("interrupted", ray.get(where.remote()) == nodes[me], flush=True)
    sys.exit(9)
"""


def launch(tmp_path: Path, body: str, *args: str, rank: int, ranks: int = 3) -> list[str]:
    script = tmp_path / "program.py"
    script.write_text(BEGIN + body)
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(ranks), "--driver-rank", str(rank)]
    return [*line, "--cpus-per-node", "2", str(script), *args]


def run(command: list[str], cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, cwd=cwd, env=environ)


def raylet(node: int) -> int:
    (info,) = (info for info in live_sessions() if info.node == node)
    return info.pid


def waiting(job: Job) -> int:
    """The program's pid, once it says that it is ready."""
    word, pid = job.line().split()
    assert word == "ready"
    return int(pid)


def test_everything_reaches_the_user_as_ever(leak_check: LeakCheck, tmp_path: Path) -> None:
    done = run(launch(tmp_path, STORY, "7", "x y", rank=2), tmp_path, "typed")
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"driver 2 ['7', 'x y'] {tmp_path.name} typed", "nodes [0, 1, 2]", "near 2"], done
    said = sorted("ip=" in line for line in lines if line.startswith("(say pid=") and line.endswith(") said"))
    assert said == [False, False, False], "only what other hosts than the program's say has an address"
    assert done.returncode == 7 and done.stderr == ""
    leak_check.check()


@pytest.mark.slow
def test_an_exception_is_seen_once_and_the_exit_code_is_1(leak_check: LeakCheck, tmp_path: Path) -> None:
    done = run(launch(tmp_path, STORY, "raise", rank=1, ranks=2), tmp_path)
    assert done.returncode == 1 and done.stderr.count("LookupError: nothing found") == 1, done
    assert "mpirun" not in done.stderr and "prte" not in done.stderr
    leak_check.check()


@pytest.mark.slow
def test_there_must_be_such_a_rank(leak_check: LeakCheck, tmp_path: Path) -> None:
    command = launch(tmp_path, STORY, "0", rank=2, ranks=2)
    command[command.index("-n") : command.index("--driver-rank")] = ["--hosts", "localhost,localhost"]
    done = run(command, tmp_path)
    assert done.returncode == 1 and done.stderr.count("hpcray: ") == 1, done
    assert "and there are 2 ranks; hint: " in done.stderr
    leak_check.check()


@pytest.mark.slow
def test_ctrl_c_is_the_program_s(leak_check: LeakCheck, tmp_path: Path) -> None:
    with Job(launch(tmp_path, WAITS.format(setup=""), rank=1)) as job:
        waiting(job)
        job.send(signal.SIGINT)
        ended = job.wait()
    assert ended.code == 9 and ended.out.splitlines()[-1] == "interrupted True", ended
    leak_check.check()


@pytest.mark.slow
def test_a_program_that_does_not_end_is_ended(leak_check: LeakCheck, tmp_path: Path) -> None:
    setup = "signal.signal(signal.SIGTERM, lambda *args: None)"
    with Job(launch(tmp_path, WAITS.format(setup=setup), rank=1)) as job:
        waiting(job)
        job.send(signal.SIGTERM)
        ended = job.wait()
    assert ended.code == 143, ended
    leak_check.check()


@pytest.mark.slow
def test_a_killed_program_is_told_by_its_code(leak_check: LeakCheck, tmp_path: Path) -> None:
    with Job(launch(tmp_path, WAITS.format(setup=""), rank=2)) as job:
        os.kill(waiting(job), signal.SIGKILL)
        ended = job.wait()
    assert ended.code == 137, ended
    leak_check.check()


def test_the_death_of_the_program_s_node_ends_the_job(leak_check: LeakCheck, tmp_path: Path) -> None:
    with Job(launch(tmp_path, WAITS.format(setup=""), rank=1)) as job:
        waiting(job)
        os.kill(raylet(1), signal.SIGKILL)
        ended = job.wait()
    assert ended.code == 137 and "node 1 died, and with it the program" in ended.err, ended
    leak_check.check()


@pytest.mark.slow
def test_the_end_may_be_announced_to_the_program_s_node(leak_check: LeakCheck, tmp_path: Path) -> None:
    setup = 'ray.on_drain(lambda seconds: print("draining", seconds > 0, flush=True))'
    with Job(launch(tmp_path, WAITS.format(setup=setup), rank=1), {"HPCRAY_DRAIN_SIGNALS": "USR1"}) as job:
        waiting(job)
        job.send(signal.SIGUSR1)
        ended = job.wait()  # long before the margin of a minute is over
    assert ended.code == 75 and "draining True" in ended.out, ended
    assert "SIGUSR1 on node 1" in ended.err
    leak_check.check()


def test_when_the_head_has_moved_ctrl_c_is_the_program_s_still(leak_check: LeakCheck, tmp_path: Path) -> None:
    setup = 'print("first", flush=True)\nwhile all(node["Alive"] for node in ray.nodes()):\n    time.sleep(0.02)'
    with Job(launch(tmp_path, WAITS.format(setup=setup), rank=2)) as job:
        assert job.line() == "first"
        os.kill(raylet(0), signal.SIGKILL)
        waiting(job)
        job.send(signal.SIGINT)
        ended = job.wait()
    assert ended.code == 9 and ended.out.splitlines()[-1] == "interrupted True", ended
    leak_check.check()


@pytest.mark.slow
def test_a_script_in_every_rank_goes_on_in_that_one(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(BEGIN + 'print("driver", me, flush=True)\nsys.exit(3)\n')
    with Job(under_mpirun(2, script), {"HPCRAY_DRIVER_RANK": "1"}) as job:
        ended = job.wait()
    assert ended.code == 3 and ended.out == "driver 1\n", ended
    leak_check.check()
