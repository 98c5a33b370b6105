"""Another user has made the files before that MPI is going to make in /dev/shm, and lets everybody write them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job
from helpers.leaks import LeakCheck, wait_until
from helpers.strangers import UID

from hpcray.launch.local_ranks import compose_local
from hpcray.platform.mpi_directory import MpiDirectory, find_library, memory_settings, remove_abandoned

LIBRARY = find_library(shutil.which("mpirun") or "")
RULE = Path("/proc/sys/fs/protected_regular")

# Its /dev/shm is its own: planted names would meet every other job of this machine.
PLANT_AND_RUN = """\
import json, os, socket, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777,nr_inodes=1000000", "tmpfs", "/dev/shm"], check=True)
if (pid := os.fork()) == 0:
    os.setresgid(STRANGER, STRANGER, STRANGER)
    os.setresuid(STRANGER, STRANGER, STRANGER)
    os.umask(0)
    host = socket.gethostname()
    for end in ("0001.0", "0001.1", "0000.0", "0000.1"):
        for number in range(1 << 16):
            name = f"/dev/shm/sm_segment.{host}.{sys.argv[1]}.{number:x}{end}"
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
done = [subprocess.run(line, capture_output=True, text=True) for line in json.loads(sys.argv[2])]
empty, left = 0, []
for entry in os.scandir("/dev/shm"):
    if entry.stat().st_uid != STRANGER:
        left.append(entry.name)
    else:
        empty += not entry.stat().st_size
print(json.dumps([[(one.returncode, one.stdout, one.stderr[-2000:]) for one in done], empty, left]))
"""

PROGRAM = """\
import os
import hpcray as ray

def windows(comm):
    from mpi4py import MPI
    window = MPI.Win.Allocate_shared(4096, comm=comm)
    window.Fence()
    window.Free()
    return comm.allreduce(1)

ray.init()
ray.get([ray.remote(os.getpid).options(scheduling_strategy="SPREAD").remote() for _ in range(4)])
print(ray.mpi.run(windows, ranks=2, cpus_per_rank=0.5))
"""


@pytest.fixture(params=["0", "1"])
def protected_regular(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether the kernel refuses to open other users' files with O_CREAT in directories such as /dev/shm."""
    before = RULE.read_text()
    try:
        RULE.write_text(request.param)
    except OSError as error:
        pytest.skip(str(error))
    yield
    RULE.write_text(before)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")
def test_mpi_uses_no_planted_file(
    stranger: None, protected_regular: None, leak_check: LeakCheck, tmp_path: Path
) -> None:
    program, script = tmp_path / "program.py", tmp_path / "plant.py"
    program.write_text(PROGRAM)
    script.write_text(PLANT_AND_RUN.replace("STRANGER", str(UID)))
    launch = [sys.executable, "-m", "hpcray.cli.launch", "-n", "2", "--cpus-per-node", "2"]
    lines = [[*launch, str(program)], [*launch, "--launcher", "openmpi", str(program)]]
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, str(script), str(os.getuid()), json.dumps(lines)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    ended, empty, left = json.loads(done.stdout)
    assert [(code, out) for code, out, _ in ended] == [(0, "[2, 2]\n")] * 2, ended
    assert empty == 4 << 16, "others have been used, and those of them that belonged to root's job were removed"
    assert not left


def test_a_directory_that_a_dead_process_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = "import os, sys; from hpcray.platform.mpi_directory import MpiDirectory; "
    code += "made = MpiDirectory.create(sys.argv[1]); open(made.path + '/file', 'w'); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    (dead,) = tmp_path.iterdir()
    living = MpiDirectory.create(str(tmp_path))
    assert not dead.exists()
    assert os.stat(living.path).st_mode & 0o777 == 0o700
    remove_abandoned(str(tmp_path))
    assert os.path.isdir(living.path), "its lock is held"
    living.remove()
    living.remove()
    assert not list(tmp_path.iterdir())


def test_without_memory_it_is_in_no_directory_that_another_user_could_exchange(
    stranger: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcray.platform.mpi_directory._MEMORY", str(tmp_path / "none"))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.setenv("TMPDIR", str(theirs))
    for owner, parent in ((os.getuid(), str(theirs)), (UID, "/tmp")):
        os.chown(theirs, owner, -1)
        made = MpiDirectory.create()
        assert os.path.dirname(made.path) == parent
        made.remove()


# A rank whose launcher is killed while it starts MPI: SIGTERM does not interrupt that.
ORPHAN = """\
import os, signal, sys, time
from hpcray.platform.mpi_directory import private_memory
from hpcray.transport.startup import start_mpi
signal.signal(signal.SIGTERM, signal.SIG_IGN)
launcher = os.getppid()
print(os.getpid(), flush=True)
while os.getppid() == launcher:
    time.sleep(0.01)
with private_memory(os.environ):
    start_mpi(True)
"""


@pytest.mark.skipif(not LIBRARY, reason="no Open MPI whose PMIx library hpcray knows")
def test_ranks_whose_launcher_was_killed_leave_nothing_where_others_look(
    leak_check: LeakCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI makes a session directory of its own where the launcher does not answer, and leaves it there."""
    place = tmp_path / "t"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with Job(compose_local(sys.executable, 2, LIBRARY, True, [sys.executable, "-c", ORPHAN])) as job:
        ranks = [job.line(), job.line()]
        job.send(signal.SIGKILL)
        wait_until(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks), "their end")
    assert list(place.iterdir()) == []
    remove_abandoned()


def test_links_and_directories_of_others_are_not_removed(stranger: None, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(0o700)
    places = tmp_path / "places"
    places.mkdir()
    (places / f"hpcray-{os.getuid()}-{'0' * 16}").symlink_to(target)
    theirs = places / f"hpcray-{os.getuid()}-{'1' * 16}"
    theirs.mkdir(0o700)
    os.chown(theirs, UID, UID)
    remove_abandoned(str(places))
    assert target.is_dir() and theirs.is_dir() and len(list(places.iterdir())) == 2


def test_settings_of_the_site_and_the_user_are_kept(tmp_path: Path) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    names = ["OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory"]
    names += ["OMPI_MCA_osc_sm_backing_directory", "OMPI_MCA_osc_rdma_backing_directory"]
    environ = {"HOME": str(home)}
    assert memory_settings("/private", environ, str(site)) == dict.fromkeys(names, "/private")
    (site / "etc").mkdir(parents=True)
    (site / "etc/openmpi-mca-params.conf").write_text("# comment\nbtl_sm_backing_directory = /scratch\n")
    (home / ".openmpi").mkdir(parents=True)
    (home / ".openmpi/mca-params.conf").write_text("osc_sm_backing_directory=/mine # here\n")
    left = memory_settings("/private", {**environ, names[1]: "/set"}, str(site))
    assert left == {names[3]: "/private"}
