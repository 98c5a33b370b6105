"""What another user of the same machine tries, and does not get. See docs/security.md."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import Job, as_module
from helpers.leaks import LeakCheck, wait_until
from helpers.ports import listening, port_of
from helpers.strangers import UID, as_stranger, needs_stranger, stranger_says

import hpcray as ray
from hpcray.common.exceptions import RaySystemError
from hpcray.common.ids import NIL_PROC, make_proc, raylet_of
from hpcray.diagnostics.introspection import ObjectInventory
from hpcray.platform.session_directory import SessionDirectory, live_sessions
from hpcray.protocol import messages as m
from hpcray.protocol.frames import pack
from hpcray.runtime.core_worker.core_worker import connect
from hpcray.runtime.core_worker.io_engine import IoEngine

# Opens everything it is given, as files, directories and sockets; prints what it could.
BURGLAR = """\
import os, socket, sys
for path in sys.argv[1:]:
    for what, attempt in {
        "list": lambda: os.listdir(path),
        "read": lambda: open(path, "rb").read(1),
        "write": lambda: os.open(path, os.O_WRONLY),
        "make": lambda: os.close(os.open(path + "/new", os.O_CREAT | os.O_WRONLY)),
        "connect": lambda: socket.socket(socket.AF_UNIX).connect(path),
        "follow": lambda: os.readlink(path),
        "remove": lambda: os.remove(path),
        "rename": lambda: os.rename(path, path + ".gone"),
    }.items():
        try:
            attempt()
        except OSError:
            pass
        else:
            print(what, path)
print("tried", len(sys.argv) - 1)
"""

# Listens where it is told to; prints how many bytes came.
IMPOSTOR = """\
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
print("listening", flush=True)
try:
    listener.settimeout(60)
    peer, _ = listener.accept()
    peer.settimeout(60)
    print("got", len(peer.recv(1000)), flush=True)
except ConnectionError:
    print("got 0", flush=True)
"""


@pytest.fixture
def stranger() -> None:
    needs_stranger()


@pytest.fixture
def session(leak_check: LeakCheck) -> Iterator[str]:
    """A session of ours, with a worker and an object in the store; its directory."""
    ray.init(num_cpus=1, object_store_memory=32 << 20)
    ray.get(ray.remote(os.getpid).remote())
    held = ray.put(bytes(1 << 20))
    yield str(leak_check.sessions()[0])
    del held
    ray.shutdown()


@pytest.fixture
def public(leak_check: LeakCheck) -> Path:
    """The temporary directory of the test, open to everybody as /tmp is."""
    leak_check.tmp.chmod(0o1777)
    return leak_check.tmp


def sockets_of(session: str) -> list[str]:
    """Paths of the sockets of a node's processes, once all of them listen: a worker may be coming up."""

    def listens(path: str) -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(path) == 0

    def found() -> list[str]:
        return sorted(str(path) for path in Path(session).glob("*.s"))

    wait_until(lambda: all(listens(path) for path in found()), "all sockets to listen")
    assert len(found()) >= 3, "raylet, worker, driver"
    return found()


def still_works() -> None:
    assert ray.get(ray.remote(lambda: 42).remote(), timeout=60) == 42


# ---------------------------------------------------------------- looking in


def test_stranger_opens_no_file_no_directory_no_socket(stranger: None, session: str, public: Path) -> None:
    things = [str(path) for path in Path(session).parent.rglob("*")]
    assert any(thing.endswith("r.s") for thing in things) and any(thing.endswith("info.json") for thing in things)
    assert stranger_says(BURGLAR, os.path.dirname(session), *things) == f"tried {len(things) + 1}\n"
    still_works()


def test_stranger_gets_at_no_process(stranger: None, session: str, public: Path, leak_check: LeakCheck) -> None:
    processes = leak_check.processes()
    assert {"hpcray-raylet", "hpcray-template", "hpcray-worker"} <= set(processes.values())
    things: list[str] = []
    for pid in [*processes, os.getpid()]:
        things += [f"/proc/{pid}/{name}" for name in ("environ", "mem", "fd", "cwd", "map_files")]
        things += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    arenas = [thing for thing in things if "/fd/" in thing and "hpcray-arena" in _target(thing)]
    assert len(arenas) >= 3, "the raylet, the worker and we hold the store"
    assert stat.S_IMODE(os.stat(arenas[0]).st_mode) == 0o600
    assert stranger_says(BURGLAR, *things) == f"tried {len(things)}\n"


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_every_socket_turns_a_stranger_away_even_where_the_directory_is_open(
    stranger: None, session: str, public: Path
) -> None:
    sockets = sockets_of(session)
    assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in sockets), "closed by themselves"
    for path in (os.path.dirname(session), session):
        os.chmod(path, 0o711)
    for path in sockets:
        os.chmod(path, 0o666)
    said = stranger_says(
        """\
import socket, sys
from hpcray.common.ids import NIL_PROC, raylet_of
from hpcray.protocol.frames import pack
from hpcray.protocol.messages import Exit, Hello, encode
for path in sys.argv[1:]:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(path)
    try:
        sock.sendall(pack(raylet_of(0), NIL_PROC, encode([Hello(1, "driver")])))
        sock.sendall(pack(raylet_of(0), raylet_of(0), encode([Exit(3)])))
        print(len(sock.recv(1000)))
    except ConnectionError:
        print(0)
""",
        *sockets,
        load=("hpcray.protocol.messages",),
    )
    assert said.split() == ["0"] * len(sockets)
    still_works()


# ---------------------------------------------------------------- lying in wait

FAKE_SESSION = """\
import fcntl, json, os, socket, sys, time
root, uid = sys.argv[1], sys.argv[2]
path = os.path.join(root, "hpcray-" + uid, "0123abcd")
os.makedirs(path)
lock = os.open(path + "/lock", os.O_CREAT | os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
json.dump(dict(path=path, pid=os.getpid(), session="job", node=0, node_id="a", host="h", slurm_job="", started=9e9),
          open(path + "/info.json", "w"))
for open_to_all in (path + "/lock", path + "/info.json"):
    os.chmod(open_to_all, 0o666)
listener = socket.socket(socket.AF_UNIX)
listener.bind(path + "/r.s")
os.chmod(path + "/r.s", 0o777)
listener.listen()
listener.settimeout(0.0)
print(path, flush=True)
sys.stdin.read()
try:
    peer, _ = listener.accept()
    print("somebody came")
except BlockingIOError:
    print("nobody came")
"""


def test_planted_session_is_not_joined_and_not_used(stranger: None, leak_check: LeakCheck, public: Path) -> None:
    child = as_stranger(FAKE_SESSION, public, os.getuid())
    assert child.stdin is not None and child.stdout is not None
    fake = child.stdout.readline().strip()
    assert Path(fake, "r.s").is_socket()
    assert live_sessions() == []
    with pytest.raises(ConnectionError, match="no running hpcray node of this user"):
        ray.init(address="auto")
    with pytest.raises(ConnectionError, match=f"belongs to uid {UID}"):
        ray.init(address=fake)
    with pytest.raises(Exception, match=f"belongs to uid {UID}.*hint: set HPCRAY_TMPDIR"):
        ray.init(num_cpus=1)
    with pytest.raises(RaySystemError, match="another user"):
        connect(fake, "attached", ObjectInventory)
    assert child.communicate("\n", timeout=60)[0] == "somebody came\n", "only the last one, which looked who is there"
    subprocess.run(["rm", "-r", os.path.dirname(fake)], check=True)


def test_planted_link_is_not_followed(stranger: None, leak_check: LeakCheck, public: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    name = f"hpcray-{os.getuid()}"
    stranger_says("import os, sys; os.symlink(sys.argv[1], sys.argv[2])", tmp_path, public / name)
    assert live_sessions() == []
    with pytest.raises(Exception, match="cannot use"):
        SessionDirectory.create()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (public / name).unlink()


def test_driver_says_nothing_to_an_impostor(stranger: None, public: Path) -> None:
    path = public / "r.s"
    child = as_stranger(IMPOSTOR, path)
    assert child.stdout is not None and child.stdout.readline() == "listening\n"
    with pytest.raises(RaySystemError, match="who listens there is another user"):
        connect(str(public), "worker", ObjectInventory)
    assert child.communicate(timeout=60)[0] == "got 0\n"
    path.unlink()


def test_process_goes_through_its_raylet_rather_than_to_an_impostor(stranger: None, public: Path) -> None:
    me, other = make_proc(0, 2), make_proc(0, 7)
    ours, raylet = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    child = as_stranger(IMPOSTOR, public / "7.s")
    assert child.stdout is not None and child.stdout.readline() == "listening\n"
    engine = IoEngine(me, str(public), ours)
    engine.send(other, m.Exit(0))
    engine.flush()
    assert raylet.recv(1000)[4:12] == other
    assert child.communicate(timeout=60)[0] == "got 0\n"
    engine._kick.close()
    engine.links.close()
    raylet.close()
    (public / "7.s").unlink()


# ---------------------------------------------------------------- garbage


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_no_pickle_is_opened_before_a_process_has_joined(session: str, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "boom"), 5)
    task = m.encode([m.ObjectReady(b"x" * 14, 0, bomb + b"\0", 0, [])])
    for path in sockets_of(session):
        head = raylet_of(0)
        for nonsense in (bomb, pack(head, NIL_PROC, bomb), pack(head, head, task), os.urandom(4096)):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(60)
                sock.connect(path)
                sock.sendall(nonsense)
                sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""
    still_works()
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- ports


def test_one_node_has_no_port_at_all(session: str, leak_check: LeakCheck) -> None:
    processes = leak_check.processes()
    assert len(processes) >= 3
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        assert len(listening([os.getpid()])) == 1, "the test would see one"
    assert listening([*processes, os.getpid()]) == []


HOLD = """\
import os, sys
import hpcray as ray
ray.init()
pids = {ray.get(ray.remote(os.getpid).options(scheduling_strategy="SPREAD").remote()) for _ in range(8)}
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    import time; time.sleep(0.05)
"""


def test_ranks_of_one_host_have_no_port_and_no_open_shared_memory(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = tmp_path / "hold.py"
    script.write_text(HOLD)
    go = tmp_path / "go"
    with Job(as_module(2, script, str(go))) as job:
        if job.line() != "ready":
            pytest.fail(job.wait().err)
        processes = leak_check.processes()
        ours = [pid for pid, name in processes.items() if name.startswith(("hpcray-", "python"))]
        assert sum(name == "hpcray-raylet" for name in processes.values()) == 2
        assert listening(ours) == []
        for pid in ours:
            maps = Path(f"/proc/{pid}/map_files")
            shared = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.split()[1] == "rw-s"]
            assert not [line for line in shared if "SYSV" in line], "System V segments of UCX are open to our group"
            # The kernel lets nobody but root look through map_files.
            for line in shared if os.getuid() == 0 else []:
                assert os.stat(maps / line.split()[0]).st_mode & 0o077 == 0, line
        go.touch()
        ended = job.wait()
        assert ended.code == 0, ended.err


# ---------------------------------------------------------------- UCX, from outside

UCX_PEER = """\
import sys, time
from hpcray.transport.ucx_engine import UcxEngine
from hpcray.transport.ucx_data import UcxData
secret, address = bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2])
engine = UcxEngine(1, secret)
data = UcxData(engine)
arena = bytearray(b"EVIL" * 25_000)
data.register(memoryview(arena))
data.connect(0, address, True)
data.send(0, 7, 0, 100_000)
engine.ring(0, 1000)
if secret != bytes(32):
    for tag in (7, 1 << 32 | 7, 2 << 60 | 1 << 32 | 7, 1 << 60, 6 << 60, 7 << 60):
        engine.endpoint(0).tag_send(engine.array(arena), engine.lib.UCXXTag(tag))
end = time.monotonic() + 60
while not data.progress() and time.monotonic() < end:
    time.sleep(0.001)
print("sent", flush=True)
sys.stdin.read()
"""


UCX_FLOOD = """\
import os, sys, time
from hpcray.transport.ucx_engine import UcxEngine
from hpcray.transport.ucx_data import UcxData
engine = UcxEngine(1, os.urandom(32))
data = UcxData(engine)
data.connect(0, bytes.fromhex(sys.argv[1]), True)
array = engine.array(bytearray(8000))
sent = []
for number in range(500):
    for kind in (0, 1, 2, 6, 9, 15):
        sent.append(engine.endpoint(0).tag_send(array, engine.lib.UCXXTag(kind << 60 | 5)))
    for _ in range(100):
        engine.progress()
end = time.monotonic() + 30
while time.monotonic() < end and not all(one.completed for one in sent):
    engine.progress()
print(f"sent {sum(one.completed for one in sent)}", flush=True)
sys.stdin.read()
"""


UCX_TWO = """\
import sys, time
from hpcray.transport.ucx_engine import UcxEngine
from hpcray.transport.ucx_data import UcxData
engine = UcxEngine(1, bytes(32))
data = UcxData(engine)
data.register(memoryview(bytearray(b"GOOD" * 25_000)))
data.connect(0, bytes.fromhex(sys.argv[1]), True)
for number in (7, 8):
    data.send(0, number, 0, 100_000)
    end = time.monotonic() + 60
    while not data.progress() and time.monotonic() < end:
        time.sleep(0.001)
    print(f"sent {number}", flush=True)
    sys.stdin.readline()
"""

# Connections that send nothing, noise, or what UCX's own begin with; the last ones stay open.
UCX_NOISE = """\
import os, socket, sys
held = []
for number in range(int(sys.argv[1])):
    for port in sys.argv[2:]:
        one = socket.socket()
        try:
            one.settimeout(1)
            one.connect(("127.0.0.1", int(port)))
            one.send((b"", os.urandom(8), os.urandom(300), b"CCSUPCT" + os.urandom(57))[number % 4])
        except OSError:
            continue
        if number > 100:
            held.append(one)
print("held", len(held), flush=True)
sys.stdin.readline()
"""


UCX_LOAD = ("hpcray.transport.ucx_data", "ucxx._lib.libucxx", "encodings.ascii")


@pytest.fixture
def ucx(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The engine and the data plane of a node, which other users of the host can reach."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    try:
        from hpcray.transport.ucx_data import UcxData
        from hpcray.transport.ucx_engine import UcxEngine

        engine = UcxEngine(0, bytes(32))
    except Exception as error:
        pytest.skip(f"no UCX: {error}")
    return engine, UcxData(engine)


def test_ucx_keeps_no_messages_of_strangers(stranger: None, ucx: tuple[Any, Any]) -> None:
    """They cost memory for as long as the job lasted, if their tags were of no class that hpcray receives."""
    engine, data = ucx
    arena = bytearray(100)
    data.register(memoryview(arena))
    grown = []
    for _ in range(3):  # what UCX has taken once, it keeps and uses again
        before = resident()
        child = as_stranger(UCX_FLOOD, engine.address().hex(), load=UCX_LOAD)
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        said, deadline = b"", time.monotonic() + 60
        while b"sent 3000\n" not in said and time.monotonic() < deadline:
            data.progress()
            engine.heard()
            engine.failed()
            with contextlib.suppress(BlockingIOError):
                said += os.read(child.stdout.fileno(), 1000)
        for _ in range(100):
            data.progress()
            engine.heard()
            engine.failed()
            time.sleep(0.005)
        child.communicate("", timeout=30)
        assert b"sent 3000\n" in said, said  # UCX may warn before and after
        probe, lib = engine.worker.tag_probe, engine.lib
        assert not probe(lib.UCXXTag(0), lib.UCXXTagMask(0), False).matched, "nothing is left of them"
        grown.append(resident() - before)
    assert min(grown[1:]) < 10 << 20, f"of 24 MB: {grown}"


@pytest.mark.parametrize("few", [False, True])
def test_ucx_says_little_of_strangers_connections_and_its_own_go_on(
    request: pytest.FixtureRequest, stranger: None, ucx: tuple[Any, Any], capfd: pytest.CaptureFixture[str], few: bool
) -> None:
    """Where they take all descriptors UCX closes its port, with a line: what is connected by then stays.

    That is seen in a process of its own: UCX leaves a handler of the closed port behind when it ends, and the next one
    that starts in the same process may wait for ever for a lock in freed memory.
    """
    if few and "HPCRAY_TEST_ALONE" not in os.environ:
        environ = {**os.environ, "HPCRAY_TEST_ALONE": "1", "PYTEST_ADDOPTS": ""}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{request.node.name}"],
            env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
        return
    engine, data = ucx
    arena = bytearray(100_000)
    data.register(memoryview(arena))
    engine.address()
    ports = {port_of(line) for line in listening([os.getpid()])}

    def until(child: subprocess.Popen[str], text: bytes) -> None:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        said, deadline = b"", time.monotonic() + 60
        while text not in said:
            assert time.monotonic() < deadline and child.poll() is None, said
            reports.extend(data.progress())
            engine.heard()
            with contextlib.suppress(BlockingIOError):
                said += os.read(child.stdout.fileno(), 10_000)

    reports: list[object] = []
    data.receive(1, 7, 0, len(arena))
    good = as_stranger(UCX_TWO, engine.address().hex(), load=UCX_LOAD)
    until(good, b"sent 7")
    noise = as_stranger(UCX_NOISE, 300, *ports, load=("encodings.idna",))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if few:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limit[1]))
    capfd.readouterr()
    try:
        until(noise, b"held")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    said = "".join(capfd.readouterr())
    assert said.count("\n") <= (len(ports) if few else 0), said
    data.receive(1, 8, 0, len(arena))
    assert good.stdin is not None
    good.stdin.write("\n")
    good.stdin.flush()
    until(good, b"sent 8")
    deadline = time.monotonic() + 30
    while len(reports) < 2 and time.monotonic() < deadline:
        reports.extend(data.progress())
    assert reports == [("received", 1, 7, None), ("received", 1, 8, None)] and bytes(arena) == b"GOOD" * 25_000
    for child in (good, noise):
        child.kill()
        child.communicate()
    data.close()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ucx_matches_nothing_from_who_does_not_know_the_secret(stranger: None, ucx: tuple[Any, Any]) -> None:
    engine, data = ucx
    arena = bytearray(100_000)
    data.register(memoryview(arena))
    data.receive(1, 7, 0, len(arena))
    bells: list[tuple[int, int]] = []

    def hear(child: subprocess.Popen[str]) -> list[object]:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        reports: list[object] = []
        said = b""
        while b"sent" not in said:
            reports += data.progress()
            bells.extend(engine.heard())
            with contextlib.suppress(BlockingIOError):
                said += os.read(child.stdout.fileno(), 10_000)
            assert child.poll() is None, said
        for _ in range(1000):
            reports += data.progress()
            bells.extend(engine.heard())
        return reports

    def speaker(secret: bytes) -> subprocess.Popen[str]:
        return as_stranger(UCX_PEER, secret.hex(), engine.address().hex(), load=UCX_LOAD)

    evil = speaker(os.urandom(32))
    assert hear(evil) == [] and bells == [] and not any(arena)
    good = speaker(bytes(32))
    assert hear(good) == [("received", 1, 7, None)], "the same message from who knows it arrives"
    assert bells == [(1, 1000)] and bytes(arena) == b"EVIL" * 25_000
    for child in (evil, good):
        child.kill()
        child.communicate()
    data.close()
