"""A cleaner of temporary files removes what a running job has there: new tasks run, or the job ends with the reason."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hpcray as ray
from hpcray.common.ids import raylet_of
from hpcray.diagnostics.cluster_query import ClusterQuery
from hpcray.platform.sockets import bind_private
from hpcray.runtime.core_worker.core_worker import current

PROGRAM = """\
import glob, os, shutil, subprocess, sys, time
import hpcray as ray
from hpcray.util.state import list_logs

what, tmp = sys.argv[1:]
ray.init(num_cpus=2, object_store_memory=100 << 20)
session = ray.get_runtime_context().gcs_address


@ray.remote
def speak(text):
    print(text)
    return text


@ray.remote(num_cpus=0)
class Actor:
    def call(self, other=None):
        return ray.get(other.call.remote(), timeout=10) if other else os.getpid()


@ray.remote(num_cpus=0)
def nested():
    return ray.get(speak.remote("from a task"), timeout=10)


actor = Actor.remote()
ray.get([speak.remote("before"), actor.call.remote()])
print("ready", flush=True)
time.sleep(0.3)  # the log files are read
if what == "session":
    shutil.rmtree(session)
elif what == "everything":
    shutil.rmtree(tmp)
elif what == "logs":
    shutil.rmtree(session + "/logs")
elif what == "kept":
    shutil.rmtree(os.environ["HPCRAY_LOG_DIR"])
elif what == "sockets":
    for path in glob.glob(session + "/*.s"):
        os.unlink(path)
elif what == "lock":
    os.unlink(session + "/lock")
elif what == "taken":
    shutil.rmtree(tmp)
    open(tmp, "w").close()
before = time.monotonic()
ray.get(speak.remote("soon after"), timeout=10)
envs = [speak.options(num_cpus=0.1, runtime_env={"env_vars": {"A": str(n)}}).remote(f"new {n}") for n in range(4)]
ray.get(envs, timeout=10)
ray.get(Actor.remote().call.remote(actor), timeout=10)
ray.get(nested.remote(), timeout=10)
assert len(ray.get([ray.put(bytes(30 << 20)) for _ in range(6)], timeout=10)) == 6
print("took", time.monotonic() - before, flush=True)
time.sleep(1.5)  # all is made again by then, and all that was printed is read
for name in ("r.s", "lock", "info.json", "logs"):
    assert os.path.exists(session + "/" + name), name
assert list_logs(node_id=ray.get_runtime_context().get_node_id())
child = "import hpcray as ray; ray.init(address='auto'); print('joined', ray.get(ray.remote(lambda: 5).remote()))"
print(subprocess.run([sys.executable, "-c", child], text=True, capture_output=True, check=True).stdout, flush=True)
ray.get(speak.remote("at last"), timeout=10)
ray.shutdown()
print("left", glob.glob(tmp + "/hpcray-*"), flush=True)
"""


def run(what: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    tmp = tmp_path / "t"
    tmp.mkdir(mode=0o700)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = os.environ | {"HPCRAY_TMPDIR": str(tmp), "TMPDIR": str(tmp)}
    if what == "kept":
        env["HPCRAY_LOG_DIR"] = str(tmp_path / "kept")
    command = [sys.executable, str(program), what, str(tmp)]
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=90, cwd=tmp_path)


slow = [pytest.param(what, marks=pytest.mark.slow) for what in ("everything", "kept", "sockets", "lock")]


@pytest.mark.parametrize("what", ["session", "logs", *slow])
def test_what_was_removed_is_made_again(what: str, tmp_path: Path) -> None:
    ran = run(what, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "joined 5" in ran.stdout and "left []" in ran.stdout
    assert "removed while the job runs, and is made again; hint: HPCRAY_TMPDIR" in ran.stderr
    assert "Traceback" not in ran.stderr
    for text in ("soon after", *(f"new {n}" for n in range(4)), "from a task", "at last"):
        assert f") {text}\n" in ran.stdout, (text, ran.stdout, ran.stderr)


def test_the_job_ends_with_the_reason_where_the_place_is_taken(tmp_path: Path) -> None:
    ran = run("taken", tmp_path)
    assert ran.returncode not in (0, 124), ran.stdout
    assert "took" not in ran.stdout and "GetTimeoutError" not in ran.stderr
    assert f"{tmp_path}/t" in ran.stderr and "and cannot be made again, so this node ends" in ran.stderr


FAILING = """\
import time
import hpcray as ray

ray.init(num_cpus=1, _system_config={"prestart": 0})
try:
    ray.get(ray.remote(lambda: 1).remote(), timeout=4)
except ray.exceptions.GetTimeoutError as error:
    print("timed out:", error)
ray.get(ray.remote(lambda: 1).remote(), timeout=30)
"""
SABOTAGE = """\
import os, sys, time
from hpcray.processes import worker_main as module

listen = module.listen


def failing(*args):
    with open(os.environ["FAILED"], "a") as file:
        print(time.monotonic(), file=file)
    if os.path.exists(os.environ["FAILED"] + ".well"):
        return listen(*args)
    raise OSError(28, "the made-up cause")


module.listen = failing
"""


def test_starts_that_fail_in_the_same_way_are_told_with_their_cause(tmp_path: Path) -> None:
    (tmp_path / "sabotage.py").write_text(SABOTAGE)
    (tmp_path / "program.py").write_text(FAILING)
    env = os.environ | {"HPCRAY_PRELOAD": "sabotage", "FAILED": str(tmp_path / "failed"), "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "program.py"],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    ) as program:
        assert program.stdout is not None
        said = iter(program.stdout.readline, "")
        text = ""
        for line in said:
            text += line
            if line.startswith("timed out:"):
                break
        (tmp_path / "failed.well").touch()
        text += program.stdout.read()
    assert program.returncode == 0, text
    cause = "node 0 cannot start workers: exit code 1: OSError: [Errno 28] the made-up cause"
    assert text.count(cause) >= 2, "it is told, and the error of get() says it too:\n" + text
    assert text.count("Traceback") == 1, text
    tries = [float(line) for line in (tmp_path / "failed").read_text().split()]
    assert 3 <= len(tries) <= 5, tries


class Full(socket.socket):
    def bind(self, path: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_socket_without_room_says_where_room_is_missing(tmp_path: Path) -> None:
    """That is the cause why no worker starts, and the error of get() passes it on. It is the same for all workers, or
    each would be told anew, with a traceback."""
    with Full(socket.AF_UNIX) as full, pytest.raises(OSError, match="No space left on device") as raised:
        bind_private(full, str(tmp_path / "3.s"))
    assert f": {tmp_path}; hint: make room there, or set HPCRAY_TMPDIR" in str(raised.value)
    assert raised.value.errno == errno.ENOSPC
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(FileNotFoundError, match=f"{tmp_path}/no$"):
        bind_private(one, str(tmp_path / "no" / "3.s"))


def test_a_question_that_cannot_be_answered_does_not_end_the_node() -> None:
    ray.init(num_cpus=1)
    try:
        process = current.process
        assert process is not None
        query = ClusterQuery(process, patience=5.0)
        raylet = raylet_of(0)
        assert query.ask([raylet], "node")[raylet]["host"]
        for question, args in [
            ("object", (1, 2)),
            ("log_piece", (3,)),
            ("figures", ()),
            ("os", ()),
        ]:
            assert query.ask([raylet], question, *args) == {}, question
        assert ray.get(ray.remote(lambda: 5).remote(), timeout=20) == 5
        assert query.ask([raylet], "node")[raylet]["host"]
    finally:
        ray.shutdown()
