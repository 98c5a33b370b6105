"""Limits of the machine: each ends in an error that names it, and the same job then runs 100 more tasks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.jobs import ROOT
from helpers.leaks import LeakCheck

TIMEOUT = 120.0

BEGIN = """\
import errno, os, resource, sys, time
import hpcray as ray


@ray.remote
def add(value):
    return value + 1


@ray.remote(num_cpus=0)
class Actor:
    def f(self):
        return 1


def refused(actors, *words):
    "Some of them cannot be had, and the error says why."
    deadline = time.monotonic() + 60
    while True:
        try:
            ray.get([actor.f.remote() for actor in actors], timeout=0.3)
        except ray.exceptions.GetTimeoutError as error:
            if all(word in str(error) for word in words):
                return
            assert time.monotonic() < deadline, str(error)
        else:
            raise AssertionError("all of them are there")


def goes_on():
    assert ray.get([add.remote(i) for i in range(100)], timeout=60) == list(range(1, 101))
    print("went on", flush=True)


"""


def run(
    tmp_path: Path, code: str, *prefix: str, environ: dict[str, str] | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """A program of its own, from its start to its end."""
    script = tmp_path / "program.py"
    script.write_text(before + BEGIN + code)
    return subprocess.run(
        [*prefix, sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip


def went_on(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0 and "went on" in done.stdout, f"{done.stdout}\n{done.stderr}"


def open_files(count: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({count}, {count}))\n"


@pytest.mark.slow
def test_few_open_files(tmp_path: Path, leak_check: LeakCheck) -> None:
    code = """
ray.init(num_cpus=2, object_store_memory=64 << 20)


@ray.remote
def take_all():
    held = []
    while True:
        held.append(open(os.devnull))


actors = [Actor.remote() for _ in range(10)]
assert ray.get([actor.f.remote() for actor in actors]) == [1] * 10
held = []
try:
    while True:
        held.append(open(os.devnull))
except OSError as error:
    assert error.errno == errno.EMFILE
assert ray.get([add.remote(i) for i in range(10)], timeout=60) == list(range(1, 11)), "the driver has none left"
del held
try:
    ray.get(take_all.remote())
except OSError as error:
    assert error.errno == errno.EMFILE and isinstance(error, ray.exceptions.RayTaskError)
else:
    raise AssertionError("it was let have them all")
actors += [Actor.remote() for _ in range(40)]
refused(actors, "its limit, as its raylet may have 64 open files; hint: raise ulimit -n")
for actor in actors:
    ray.kill(actor)
goes_on()
"""
    went_on(run(tmp_path, code, before=open_files(64)))


def test_at_the_limit_of_workers_those_that_own_objects_stay(tmp_path: Path, leak_check: LeakCheck) -> None:
    code = """
ray.init(num_cpus=2, max_workers=2, idle_worker_timeout=5.0)
in_env = lambda name, function: ray.remote(runtime_env={"env_vars": {"X": name}})(function)
put = lambda number: [ray.put(number)]
slow = ray.remote(lambda: time.sleep(0.2))
(first,), _ = ray.get([ray.remote(put).remote(7), slow.remote()])
(second,) = ray.get(in_env("1", put).remote(8), timeout=60)
assert ray.get(first, timeout=60) == 7, "the other worker has made room"
waiting = in_env("2", put).remote(9)
try:
    ray.get(waiting, timeout=4)
except ray.exceptions.GetTimeoutError as error:
    assert "2 of them have no task, and own objects" in str(error), error
assert ray.get([first, second]) == [7, 8]
del first
(third,) = ray.get(waiting, timeout=60)
assert ray.get([second, third]) == [8, 9]
print("went on")
"""
    went_on(run(tmp_path, code, before="import time\n"))


def test_too_few_open_files_to_start(tmp_path: Path, leak_check: LeakCheck) -> None:
    code = """
try:
    ray.init(num_cpus=1)
except ray.exceptions.StartupError as error:
    assert "24 open files" in str(error) and "ulimit -n" in str(error)
assert not ray.is_initialized()
print("went on")
"""
    went_on(run(tmp_path, code, before=open_files(24)))


def as_nobody(directory: Path) -> Sequence[str]:
    """A prefix that makes a command another user's, who may read what we may: RLIMIT_NPROC does not bind root."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, with setpriv")
    for path in (directory, Path(os.environ["HPCRAY_TMPDIR"])):
        os.chown(path, 23456, 23456)
    caps = "-all,+dac_read_search"
    user = ["--reuid=23456", "--regid=23456", "--clear-groups"]
    return ["setpriv", *user, f"--inh-caps={caps}", f"--ambient-caps={caps}"]


@pytest.mark.slow
def test_few_processes(tmp_path: Path, leak_check: LeakCheck) -> None:
    """200 actors where about 30 fit: those are right, the others wait, and say why."""
    code = """
resource.setrlimit(resource.RLIMIT_NPROC, (60, 60))
ray.init(num_cpus=2, object_store_memory=64 << 20)
actors = [Actor.remote() for _ in range(200)]
refused(actors, "cannot start workers", "ulimit -u")
refs = [actor.f.remote() for actor in actors]
ready, rest = ray.wait(refs, num_returns=10, timeout=60)
assert ray.get(ready) == [1] * 10 and rest
for actor in actors:
    ray.kill(actor)
goes_on()
"""
    went_on(run(tmp_path, code, *as_nobody(tmp_path)))


def in_a_namespace(*commands: str) -> Sequence[str]:
    """A prefix that runs a command where these mounts are made first; nobody else sees them."""
    mounts = " && ".join(commands)
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mounts], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this system lets nobody mount a file system")
    return ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh"]


def test_a_tiny_dev_shm(tmp_path: Path, leak_check: LeakCheck) -> None:
    """The object store is no file there: nothing depends on its size."""
    code = """
import numpy as np
ray.init(num_cpus=2, object_store_memory=64 << 20)
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 65536
ref = ray.put(np.arange(4 << 20))
assert ray.get(add.remote(ref))[-1] == 4 << 20
goes_on()
"""
    went_on(run(tmp_path, code, *in_a_namespace("mount -t tmpfs -o size=64k tmpfs /dev/shm")))


def in_a_cgroup(limit: int) -> Sequence[str]:
    """A prefix that runs a command in a memory cgroup of its own, which goes with it."""
    top = Path("/sys/fs/cgroup/memory")
    cgroup = top / f"hpcray-test-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(str(limit))
        cgroup.rmdir()
    except OSError:
        pytest.skip("no memory cgroup (version 1) can be made here")
    begin = f"mkdir {cgroup} && echo {limit} > {cgroup}/memory.limit_in_bytes && echo $$ > {cgroup}/cgroup.procs"
    end = f"echo $$ > {top}/cgroup.procs; for i in 1 2 3 4 5 6 7 8 9; do rmdir {cgroup} && break; sleep 1; done"
    return ["sh", "-c", f'{begin} && "$@"; code=$?; {end}; exit $code', "sh"]


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.05], ids=["faster than the watcher", "slowly"])
def test_a_memory_hog_in_a_cgroup(pause: float, tmp_path: Path, leak_check: LeakCheck) -> None:
    """Whoever ends it, the kernel or the watcher: the job hears the same."""
    code = f"""
ray.init(num_cpus=2, object_store_memory=64 << 20)


@ray.remote(max_retries=0)
def hog():
    blocks = []
    for _ in range(200):
        blocks.append(b"x" * (20 << 20))
        time.sleep({pause})


try:
    ray.get(hog.remote())
except ray.exceptions.OutOfMemoryError as error:
    assert "running low on memory" in str(error) and "cgroup" in str(error), str(error)
else:
    raise AssertionError("it has more memory than there is")
goes_on()
"""
    went_on(run(tmp_path, code, *in_a_cgroup(1 << 30)))


@pytest.mark.slow
def test_a_full_disk_to_spill_to(tmp_path: Path, leak_check: LeakCheck) -> None:
    code = """
import numpy as np
ray.init(num_cpus=2, object_store_memory=32 << 20, spill_dir=sys.path[0] + "/disk")
refs = []
try:
    for i in range(40):
        refs.append(ray.put(np.full(1 << 19, i)))
except ray.exceptions.OutOfDiskError as error:
    assert "No space left on device" in str(error) and "is full" in str(error), str(error)
else:
    raise AssertionError("it had room for all of them")
assert 4 < len(refs) < 40
del refs[-2:]
assert [int(ray.get(ref)[0]) for ref in refs] == list(range(len(refs))), "what was put is not lost"
del refs
goes_on()
assert int(ray.get(ray.put(np.full(1 << 20, 7)))[0]) == 7
"""
    (tmp_path / "disk").mkdir()
    went_on(run(tmp_path, code, *in_a_namespace(f"mount -t tmpfs -o size=8m tmpfs {tmp_path / 'disk'}")))


def test_workers_that_hang_before_they_are_up(tmp_path: Path, leak_check: LeakCheck) -> None:
    """As a library's lock can make them that was held when they were forked."""
    (tmp_path / "hangs.py").write_text("""\
import os, time

def child():
    with open(os.environ["MARKS"], "a") as file:
        file.write("x")
    if os.path.getsize(os.environ["MARKS"]) <= 3:
        time.sleep(600)

os.register_at_fork(after_in_child=child)
""")
    code = """
ray.init(num_cpus=2, object_store_memory=64 << 20, preload="hangs", worker_start_timeout=1.0)
goes_on()
assert os.path.getsize(os.environ["MARKS"]) >= 4
"""
    environ = {"MARKS": str(tmp_path / "marks"), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    went_on(run(tmp_path, code, environ=environ))


def test_too_many_values_of_a_generator(tmp_path: Path, leak_check: LeakCheck) -> None:
    code = """
@ray.remote
def values(count):
    yield from range(count)


ray.init(num_cpus=1, object_store_memory=64 << 20)
assert [ray.get(ref) for ref in values.remote(3)] == [0, 1, 2]
*first, last = values.remote(5)
assert ray.get(first) == [0, 1, 2]
try:
    ray.get(last)
except ValueError as error:
    assert "at most 3 values" in str(error)
else:
    raise AssertionError("it may yield as many as it likes")
goes_on()
"""
    went_on(run(tmp_path, code, environ={"RAY_max_num_generator_returns": "3"}))
