"""Another user runs programs as the job's user, through the port by which MPI ranks find each other. Or does not."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job
from helpers.leaks import LeakCheck, wait_until
from helpers.ports import listening, port_of
from helpers.strangers import as_stranger, stranger_says

from hpcray.launch.local_ranks import EXIT_MPI_FAILED, compose_local
from hpcray.platform.mpi_directory import find_library
from hpcray.platform.process_tree import descendants

LIBRARY = find_library(shutil.which("mpirun") or "")
pytestmark = pytest.mark.skipif(not LIBRARY, reason="no Open MPI whose PMIx library hpcray knows")

# A program, or the ranks that it runs, which waits until there is the file `argv[1]`, and makes `argv[1].up` first.
HOLD = """\
import os, sys, time
import hpcray as ray
path = os.path.abspath(sys.argv[1])
def wait(comm=None):
    open(path + ".up", "w").close()
    while not os.path.exists(path):
        time.sleep(0.02)
    return comm and comm.Get_size()
ray.init()
if sys.argv[2] == "program":
    ray.get([ray.remote(os.getpid).options(scheduling_strategy="SPREAD").remote() for _ in range(4)])
    wait()
else:
    assert ray.mpi.run(wait, ranks=2, cpus_per_rank=0.5) == [2, 2]
print("end", flush=True)
"""

ATTACK = """\
import sys
from helpers.pmix_tool import claim_to_be_root, spawn
try:
    claim_to_be_root()
except OSError as error:
    print("no namespace", error)
else:
    print(spawn(sys.argv[1], sys.argv[2]))
"""

# Connects to whatever the job's user begins to listen on, as soon as that can be seen, and says nothing; prints how
# many connections it has made.
SILENT = """\
import select, socket, sys, time
uid, held = sys.argv[1], {}
def listeners():
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        words = line.split()
        address, _, port = words[1].partition(":")
        if words[7] == uid and words[3] == "0A" and address in ("0100007F", "00000000"):
            yield port
seen = set(listeners())  # of other tests
print("looking", flush=True)
while not select.select([sys.stdin], [], [], 0.001)[0]:
    for port in listeners():
        if port not in seen:
            seen.add(port)
            try:
                held[port] = socket.create_connection(("127.0.0.1", int(port, 16)), 1)
            except OSError:
                pass
print(len(held))
"""


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    return script


def launch(ranks: int, *words: object) -> list[str]:
    return [sys.executable, "-m", "hpcray.cli.launch", "-n", str(ranks), *map(str, words)]


def is_up(job: Job, go: Path) -> bool:
    if job.child.poll() is not None:
        pytest.fail(job.wait().err)
    return Path(f"{go}.up").exists()


@pytest.fixture(params=["program", "mpi.run"])
def held(request: pytest.FixtureRequest, leak_check: LeakCheck, hold: Path, tmp_path: Path) -> Iterator[list[int]]:
    """The processes of a job of one host that has come up: a program on two nodes, or MPI ranks of `mpi.run` too."""
    go = tmp_path / "go"
    with Job(launch(2, "--cpus-per-node", 2, hold, go, request.param)) as job:
        wait_until(lambda: is_up(job, go), "the job")
        yield [job.pid, *descendants(job.pid)]
        go.touch()
        ended = job.wait()
        assert ended.code == 0, ended.err


def test_nothing_below_the_launcher_listens_or_shares_what_is_outside_of_its_directory(held: list[int]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        ports = [port_of(line) for line in listening([os.getpid()])]  # tests before this one may have left some here
        assert sock.getsockname()[1] in ports, "the test would see one"
    assert len(held) >= 8
    assert listening(held) == []
    # Segments of UCX have no name for long; but a process killed within that time left one in /dev/shm.
    mapped = [line for pid in held for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm" in line]
    assert [line for line in mapped if "/ucx_shm_posix_" in line], "the test would see them"
    assert not [line for line in mapped if f"/dev/shm/hpcray-{os.getuid()}-" not in line]


def attacked(uri: str, mark: Path) -> str:
    said = stranger_says(ATTACK, uri, f"id -u > {mark}", load=("helpers.pmix_tool", "encodings.ascii")).splitlines()[-1]
    if said.startswith("no namespace"):
        pytest.skip(said)
    return said


def test_a_stranger_starts_no_program_while_ranks_come_up(stranger: None, leak_check: LeakCheck, public: Path) -> None:
    """Ranks that never start MPI: the port stays open, and anybody may come."""
    line = compose_local(sys.executable, 2, LIBRARY, False, ["sleep", "60"])
    with Job(line) as job:
        wait_until(lambda: len(leak_check.processes("sleep")) == 2, "the ranks")
        (port,) = {port_of(found) for found in listening([job.pid])}
        mark = public / "mark"
        assert attacked(f"pmix-server.{job.pid};tcp4://127.0.0.1:{port}", mark).startswith("tool_init -")
        job.send(signal.SIGTERM)
        assert job.wait().code == 128 + signal.SIGTERM
    assert not mark.exists()


def test_the_attack_works_on_a_plain_mpirun(stranger: None, leak_check: LeakCheck, public: Path) -> None:
    """What the tests above would see, if there were anything to see."""
    with Job(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "1", "sleep", "60"]) as job:
        wait_until(lambda: leak_check.processes("sleep"), "the rank")
        (starter,) = leak_check.processes("prterun")
        name = f"prterun-{socket.gethostname()}-{starter}@0.0"
        mark = public / "mark"
        said = [
            attacked(f"{name};tcp4://127.0.0.1:{port_of(line)}", mark)
            for line in listening([starter])
            if line.split()[2].startswith("0100007F")
        ]
        assert "spawned" in said
        wait_until(lambda: mark.exists() and mark.read_text() == f"{os.getuid()}\n", "a program as the job's user")
        mark.unlink()
        job.send(signal.SIGTERM)
        job.wait()


@pytest.fixture
def public(leak_check: LeakCheck) -> Path:
    leak_check.tmp.chmod(0o1777)
    return leak_check.tmp


def test_silent_connections_delay_neither_start_nor_end(
    stranger: None, leak_check: LeakCheck, hold: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    lurker = as_stranger(SILENT, os.getuid(), load=("encodings.idna",))
    assert lurker.stdout is not None and lurker.stdout.readline() == "looking\n"
    with Job(launch(2, hold, go, "program")) as job:
        wait_until(lambda: is_up(job, go), "the job")
        began = time.monotonic()
        go.touch()
        ended = job.wait()
        assert (ended.code, ended.out.splitlines()[-1:]) == (0, ["end"]), ended.err
        assert time.monotonic() - began < 15
    out, _ = lurker.communicate("\n", timeout=60)
    assert lurker.returncode == 0, out


def test_a_rank_that_aborts_ends_the_others(leak_check: LeakCheck) -> None:
    code = "import time; from mpi4py import MPI; c = MPI.COMM_WORLD; c.Barrier(); c.rank == 1 and c.Abort(7); "
    code += "time.sleep(60)"
    with Job(compose_local(sys.executable, 2, LIBRARY, True, [sys.executable, "-c", code])) as job:
        assert job.wait().code == 7


@pytest.mark.parametrize(
    ("ranks", "recover", "given", "found"),
    [(1, True, "", "1"), (1, True, "0", "0"), (1, False, "", ""), (0, False, "", "1")],
)
def test_ranks_that_share_cores_yield_while_they_wait(ranks: int, recover: bool, given: str, found: str) -> None:
    """As under mpirun. ranks: 0: more than there are cores here."""
    name = "OMPI_MCA_mpi_yield_when_idle"
    ranks = ranks or len(os.sched_getaffinity(0)) + 1
    code = f"import os; os.write(1, os.environ.get('{name}', '').encode() + b'\\n')"
    line = compose_local(sys.executable, ranks, LIBRARY, recover, [sys.executable, "-c", code])
    with Job(line, {name: given} if given else {}) as job:
        assert job.wait().out == f"{found}\n" * ranks


def test_ranks_end_with_the_launcher(leak_check: LeakCheck) -> None:
    with Job(compose_local(sys.executable, 2, LIBRARY, True, ["sleep", "60"])) as job:
        wait_until(lambda: len(leak_check.processes("sleep")) == 2, "the ranks")
        job.send(signal.SIGKILL)
        wait_until(lambda: not leak_check.processes("sleep"), "their end")
    run = Job(compose_local(sys.executable, 1, LIBRARY, True, ["true"]))
    assert run.wait().code == 0, "and removes what the killed one has left"


# In the first tries, MPI does not start in rank 1.
FAIL = """\
import os, sys
from hpcray.cli.launch import main
from hpcray.launch.pmix_server import PmixServer
times, environ = int(sys.argv[1]), PmixServer.environ
def failing(self, rank, given):
    found = environ(self, rank, given)
    names = [f"{sys.argv[2]}.{number}" for number in range(times)]
    if rank == 1 and (free := [name for name in names if not os.path.exists(name)]):
        open(free[0], "w").close()
        found["OMPI_MCA_pml"] = "none_of_that_name"
    return found
PmixServer.environ = failing
sys.exit(main(["-n", "2", sys.argv[3]]))
"""


@pytest.mark.parametrize("times", [1, 2])
def test_where_mpi_does_not_start_it_is_tried_once_more(leak_check: LeakCheck, tmp_path: Path, times: int) -> None:
    program = tmp_path / "program.py"
    program.write_text("import hpcray as ray; ray.init(); print(len(ray.nodes()))")
    with Job([sys.executable, "-c", FAIL, str(times), str(tmp_path / "failed"), str(program)]) as job:
        ended = job.wait()
    assert ended.err.count("nothing has run yet, and it is tried once more") == 1, ended.err
    assert (ended.code, ended.out) == ((0, "2\n") if times == 1 else (EXIT_MPI_FAILED, "")), ended.err


def test_the_code_is_that_of_the_first_rank_that_failed(leak_check: LeakCheck) -> None:
    code = (
        "import os, sys, time; r = int(os.environ['PMIX_RANK']); time.sleep(0.3 * r if r < 2 else 60); sys.exit(3 + r)"
    )
    with Job(compose_local(sys.executable, 3, LIBRARY, False, [sys.executable, "-c", code])) as job:
        assert job.wait().code == 3


def test_the_library_of_an_unknown_version_is_left_alone(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libpmix.so.2"
    library.parent.mkdir()
    mpirun = tmp_path / "bin" / "mpirun"
    assert find_library(str(mpirun)) == ""
    library.write_bytes(b"....OpenPMIx 9.1.0 (PMIx Standard)")
    assert find_library(str(mpirun)) == ""
    library.write_bytes(b"....OpenPMIx 5.1.0 (PMIx Standard)")
    assert find_library(str(mpirun)) == str(library)
    assert ROOT.is_dir()
