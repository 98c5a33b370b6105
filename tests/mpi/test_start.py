"""Starting: every way in, what the driver finds there, and clear errors where it does not work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import MPIRUN, ROOT, Job, as_module, embedded, under_mpirun
from helpers.leaks import LeakCheck
from helpers.scripts import IDLE, write

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")
pytestmark = pytest.mark.timeout(180)
TIMES = int(os.environ.get("HPCRAY_TEST_TIMES", "200"))
"""Starts of `test_many_starts_and_stops`."""

# Prints what it finds as one line of JSON.
LOOK = """\
import json, os, sys
import hpcray as ray
ray.init()
@ray.remote
def look():
    return {name: value for name, value in os.environ.items() if name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}
facts = {
    "argv": sys.argv,
    "path": sys.path[0],
    "nodes": len(ray.nodes()),
    "ids": sorted({node["NodeID"] for node in ray.nodes()}),
    "resources": ray.cluster_resources(),
    "mpi in workers": ray.get(look.remote()),
    "mpi in driver": [name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))],
    "modules": [name for name in ("mpi4py", "ucxx", "rich", "click") if name in sys.modules],
    # Open MPI 5 never closes the stdin of rank 0.
    "stdin": sys.stdin.read() if "stdin" in sys.argv else "",
}
print("facts", json.dumps(facts), flush=True)
"""


def facts_of(out: str) -> dict[str, object]:
    """What LOOK printed."""
    (line,) = (line for line in out.splitlines() if line.startswith("facts "))
    found: dict[str, object] = json.loads(line.removeprefix("facts "))
    return found


def test_embedded(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(tmp_path, LOOK)
    with Job(embedded(script, "a", "b c")) as job:
        ended = job.wait()
    assert ended.code == 0, ended.err
    facts = facts_of(ended.out)
    assert facts["argv"] == [str(script), "a", "b c"]
    assert facts["nodes"] == 1
    assert facts["modules"] == [], "a plain init() needs none of these"


def test_embedded_node_opens_no_port_and_loads_no_mpi(leak_check: LeakCheck, tmp_path: Path) -> None:
    with Job(embedded(write(tmp_path, IDLE))) as job:
        assert job.line().startswith("ready")
        pids = [job.pid, *leak_check.processes()]
        for pid in pids:
            listening = [line for line in _sockets(pid) if line.startswith("tcp")]
            assert not listening
        (raylet,) = leak_check.processes("hpcray-raylet")
        maps = Path(f"/proc/{raylet}/maps").read_text()
        assert "libmpi" not in maps and "libucp" not in maps


@needs_mpirun
def test_module_under_mpirun(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(tmp_path, LOOK)
    with Job(as_module(3, script, "--num-cpus", "7", "-m")) as job:
        ended = job.wait()
    assert ended.code == 0, ended.err
    facts = facts_of(ended.out)
    assert facts["argv"] == [str(script), "--num-cpus", "7", "-m"], "what follows the script is the script's"
    assert facts["path"] == str(tmp_path)
    assert facts["nodes"] == len(facts["ids"]) == 3  # type: ignore[arg-type]
    assert facts["mpi in workers"] == {}
    assert facts["mpi in driver"] == []


@needs_mpirun
def test_script_under_mpirun(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(tmp_path, LOOK + "print('only once')\n")
    with Job(under_mpirun(3, script, "x")) as job:
        ended = job.wait()
    assert ended.code == 0, ended.err
    facts = facts_of(ended.out)
    assert facts["argv"] == [str(script), "x"]
    assert facts["nodes"] == 3
    assert facts["mpi in workers"] == {}
    assert ended.out.count("only once") == 1, "init() comes back on rank 0 only"


@needs_mpirun
def test_options_of_the_node(leak_check: LeakCheck, tmp_path: Path) -> None:
    options = ["--num-cpus", "3", "--resources", '{"disk": 2.5}', "--object-store-memory", str(64 << 20)]
    command = [*MPIRUN, "-n", "2", sys.executable, "-m", "hpcray", *options, str(write(tmp_path, LOOK))]
    with Job(command) as job:
        ended = job.wait()
    resources = facts_of(ended.out)["resources"]
    assert isinstance(resources, dict)
    assert (resources["CPU"], resources["disk"], resources["object_store_memory"]) == (6, 5, 128 << 20)
    assert resources["node:__internal_head__"] == 1


@pytest.mark.parametrize("driver", [["-c", "{text}", "x"], ["-m", "program", "x"]])
def test_code_and_module_as_driver(leak_check: LeakCheck, tmp_path: Path, driver: list[str]) -> None:
    text = "import sys, hpcray as ray; ray.init(); print(sys.argv[1], ray.get(ray.put(5)), flush=True); sys.exit(4)"
    write(tmp_path, text)
    command = [sys.executable, "-m", "hpcray", *(part.replace("{text}", text) for part in driver)]
    with Job(command, {"PYTHONPATH": f"{ROOT}:{tmp_path}"}) as job:
        ended = job.wait()
    assert (ended.code, ended.out) == (4, "x 5\n"), ended.err


def test_stdin_reaches_the_driver(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(tmp_path, LOOK)
    ended = subprocess.run(
        [sys.executable, "-m", "hpcray", str(script), "stdin"],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert facts_of(ended.stdout)["stdin"] == "one\ntwo\n"


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=needs_mpirun)])
def test_attach(leak_check: LeakCheck, tmp_path: Path, ranks: int) -> None:
    script = write(tmp_path, IDLE)
    second = write(
        tmp_path,
        "import os, sys, hpcray as ray\n"
        "ray.init(address='auto')\n"
        "print(len(ray.nodes()), ray.get(ray.remote(os.getppid).remote()))\n"
        "ray.shutdown()\n"
        "print(ray.is_initialized())\n",
        "second.py",
    )
    with Job(under_mpirun(ranks, script) if ranks else embedded(script)) as job:
        assert job.line().startswith("ready")
        templates = leak_check.processes("hpcray-template")
        for _ in range(2):
            with Job(embedded(second)) as attached:
                ended = attached.wait()
            nodes, template, initialized = ended.out.split()
            assert (ended.code, int(nodes), initialized) == (0, max(1, ranks), "False"), ended.err
            assert int(template) in templates
        assert job.child.poll() is None, "an attached driver that leaves ends nothing"


def test_nothing_to_attach_to(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(tmp_path, "import hpcray as ray\nray.init(address='auto')\n")
    with Job(embedded(script)) as job:
        ended = job.wait()
    assert ended.code == 1
    assert "ConnectionError: no running hpcray node" in ended.err
    assert "hint:" in ended.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("num_cpus=-1", "num_cpus cannot be negative; got -1"),
        ("object_store_memory=1000", "object store of 1000 bytes is too small"),
        ("address='nowhere'", "address 'nowhere' is not valid"),
        ("address='/nowhere'", "no live hpcray node at '/nowhere'"),
        ("resources={'x': 0.00001}", "resource x cannot go beyond 0.0001; got 1e-05"),
    ],
)
def test_errors_name_the_cause(leak_check: LeakCheck, tmp_path: Path, arguments: str, message: str) -> None:
    script = write(tmp_path, f"import hpcray as ray\nray.init({arguments})\n")
    with Job(embedded(script)) as job:
        ended = job.wait()
    assert ended.code == 1
    assert message in ended.err


def test_bad_setting_in_the_environment(leak_check: LeakCheck, tmp_path: Path) -> None:
    with Job(embedded(write(tmp_path, LOOK)), {"HPCRAY_TICK": "often"}) as job:
        ended = job.wait()
    assert ended.code == 1
    assert "HPCRAY_TICK='often' is not a valid float" in ended.err


@pytest.mark.slow
@needs_mpirun
def test_missing_rank_is_named(leak_check: LeakCheck, tmp_path: Path) -> None:
    # Rank 1 does something else for a long time: it never comes to MPI_Init.
    script = write(
        tmp_path,
        "import os, time, hpcray as ray\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    time.sleep(600)\n"
        "ray.init()\n",
    )
    # Long enough for the other two to come up on a busy machine: else they end before they know who is missing.
    with Job(under_mpirun(3, script), {"HPCRAY_START_TIMEOUT": "8"}) as job:
        ended = job.wait(60)
    assert ended.code != 0
    assert "missing on" in ended.err and "rank 1" in ended.err


@needs_mpirun
def test_second_init_of_a_rank_is_refused(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import hpcray as ray\n"
        "ray.init()\n"
        "ray.shutdown()\n"
        "try:\n"
        "    ray.init()\n"
        "except ray.exceptions.StartupError as error:\n"
        "    print('refused', 'a second time' in str(error), flush=True)\n"
        "ray.init(address='local')\n"
        "print('local', len(ray.nodes()), flush=True)\n",
    )
    with Job(under_mpirun(2, script)) as job:
        ended = job.wait()
    assert (ended.code, ended.out.splitlines()) == (0, ["refused True", "local 1"]), ended.err


def test_sessions_one_after_the_other(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, hpcray as ray\n"
        "def descriptors():\n"
        "    return len(os.listdir('/proc/self/fd'))\n"
        "counts = []\n"
        "for turn in range(8):\n"
        "    ray.init(num_cpus=1)\n"
        "    assert ray.get(ray.remote(lambda: turn).remote()) == turn\n"
        "    ray.shutdown()\n"
        "    counts.append(descriptors())\n"
        "print(len(set(counts[1:])), flush=True)\n",
    )
    with Job(embedded(script)) as job:
        ended = job.wait()
    assert (ended.code, ended.out) == (0, "1\n"), f"descriptors pile up: {ended.err}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_starts_and_stops(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(
        tmp_path, "import hpcray as ray\nray.init(num_cpus=1)\nassert ray.get(ray.remote(lambda: 1).remote()) == 1\n"
    )
    for _ in range(TIMES):
        with Job(embedded(script)) as job:
            assert job.wait().code == 0
        leak_check.check()


def _sockets(pid: int) -> list[str]:
    """`tcp <state>` for each TCP socket of a process that listens."""
    try:
        inodes = {
            target[8:-1]
            for link in Path(f"/proc/{pid}/fd").iterdir()
            if (target := str(link.readlink())).startswith("socket:[")
        }
        rows = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        ]
    except OSError:
        return []
    return [f"tcp {row[3]}" for row in rows if row[3] == "0A" and row[9] in inodes]
