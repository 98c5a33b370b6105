"""What /proc tells of processes: their work since the last look, and what their threads wait for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from hpcray.diagnostics.process_activity import ActivityMeter, kernel_wait, waits_of
from hpcray.diagnostics.wait_kinds import CHILD, LOCK, POLL, READ, TIMED
from hpcray.platform.process_tree import descendants

WAITS = {
    TIMED: "import time; time.sleep(60)",
    LOCK: "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    READ: "import os; os.read(os.pipe()[0], 1)",
    POLL: "import os, select; select.select([os.pipe()[0]], [], [])",
    CHILD: "import subprocess; subprocess.run(['sleep', '60'])",
}


@pytest.fixture
def start():
    children = []

    def begin(code: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", f"print(1, flush=True); {code}"], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def settled(call, wanted, patience=10.0):
    deadline = time.monotonic() + patience
    while (found := call()) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("kind", list(WAITS))
def test_the_kind_of_a_wait(start, kind):
    pid = start(WAITS[kind]).pid
    seen = settled(lambda: kernel_wait(pid, pid).kind, kind)
    if seen == "hidden":
        pytest.skip("the kernel hides what processes wait for")
    assert seen == kind
    first = kernel_wait(pid, pid)
    time.sleep(0.2)
    assert kernel_wait(pid, pid) == first, "the same wait goes on"
    if kind == READ:
        assert first.target.startswith("pipe:")


def test_a_loop_that_sleeps_waits_anew_each_time(start):
    pid = start("import time\nwhile True: time.sleep(0.02)").pid
    before = kernel_wait(pid, pid).switches
    time.sleep(0.5)
    assert kernel_wait(pid, pid).switches > before


def test_only_work_counts(start):
    still = start(WAITS[LOCK])
    meter = ActivityMeter()
    meter.look([still.pid], ())
    time.sleep(0.1)
    first = meter.look([still.pid], ())
    time.sleep(0.3)
    again = meter.look([still.pid], ())
    assert (again.moved, again.cpu, again.processes) == (first.moved, first.cpu, 1)


def test_writing_a_few_bytes_is_work_and_waking_a_thread_is_none(start):
    writer = start("import os, time\nwhile True: os.write(os.open(os.devnull, os.O_WRONLY), b'.'); time.sleep(0.1)")
    meter = ActivityMeter()
    first = meter.look([writer.pid], ())
    time.sleep(0.5)
    assert meter.look([writer.pid], ()).moved > first.moved
    before = meter.look([writer.pid], (), [writer.pid]).moved
    time.sleep(0.5)
    assert meter.look([writer.pid], (), [writer.pid]).moved == before, "it is known to be asleep"


def test_what_descendants_do_counts_and_so_does_their_end(start):
    parent = start("import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])")
    meter = ActivityMeter()
    meter.look([parent.pid], ())
    time.sleep(1.0)
    first = meter.look([parent.pid], ())
    time.sleep(1.0)
    second = meter.look([parent.pid], ())
    assert second.processes == 2 and second.cpu > first.cpu
    for pid in descendants(parent.pid):
        os.kill(pid, signal.SIGKILL)
    assert settled(lambda: meter.look([parent.pid], ()).moved > second.moved, True)


def test_a_stopped_process_is_seen(start):
    child = start(WAITS[TIMED])
    os.kill(child.pid, signal.SIGSTOP)
    meter = ActivityMeter()
    assert settled(lambda: meter.look([child.pid], ()).stopped, [child.pid]) == [child.pid]


def test_connections_and_listeners(start):
    listener = start("import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(60)")
    plain = start(WAITS[TIMED])
    found = {one.pid: one for one in waits_of([listener.pid, plain.pid], ())}
    assert len(found[listener.pid].listens) == 1 and not found[plain.pid].listens
    assert not found[listener.pid].connections
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        ends = {":".join(map(str, one.getsockname())) for one in (client, accepted)}
        mine = next(one for one in waits_of([os.getpid()], list(found)) if one.pid == os.getpid())
        assert mine.ours is False
        assert {own for own, _ in mine.connections} == {other for _, other in mine.connections} == ends
        spared = waits_of([os.getpid()], [os.getpid()])[0]
        assert spared.ours and spared.connections == mine.connections and not spared.threads


def waits_at(one):
    return {target for thread in one.threads for target in thread.target.split()}


def seen_in(child, kind, roots=None):
    """The waits of a child, once it is in one of this kind at something."""
    found = None
    for _ in range(500):
        found = next(one for one in waits_of(roots or [child.pid], ()) if one.pid == child.pid)
        if any(thread.kind == "hidden" for thread in found.threads):
            pytest.skip("the kernel hides what processes wait for")
        if any(thread.kind == kind and thread.target for thread in found.threads):
            return found
        time.sleep(0.02)
    raise AssertionError(found)


POLLED = {
    "select": "import select; select.select([r], [], [])",
    "poll": "import select; p = select.poll(); p.register(r); p.poll()",
    "epoll": "import select; p = select.epoll(); p.register(r); p.poll()",
    "selectors": "import selectors; s = selectors.DefaultSelector(); s.register(r, 1); s.select()",
}


@pytest.mark.parametrize("how", list(POLLED))
def test_what_is_polled_is_known_and_whether_others_have_its_other_end(start, how):
    alone = seen_in(start(f"import os; r, w = os.pipe(); {POLLED[how]}"), POLL)
    assert len(waits_at(alone)) == 1 and not alone.outside
    read, write = os.pipe()
    try:
        os.set_inheritable(read, True)
        child = subprocess.Popen([sys.executable, "-c", f"r = {read}; {POLLED[how]}"], pass_fds=[read])
        try:
            assert seen_in(child, POLL).outside == list(waits_at(seen_in(child, POLL)))
            here = seen_in(child, POLL, [os.getpid()])
            assert not here.outside, "the other end is in a process of these"
        finally:
            child.kill()
            child.wait()
    finally:
        os.close(read)
        os.close(write)


def test_what_polls_its_input_or_a_file_is_not_told_by_pipes_and_sockets(start):
    child = subprocess.Popen([sys.executable, "-c", "import select; select.select([0], [], [])"], stdin=subprocess.PIPE)
    try:
        assert settled(lambda: kernel_wait(child.pid, child.pid).kind, POLL) in (POLL, "hidden")
        assert kernel_wait(child.pid, child.pid).target == ""
    finally:
        child.communicate(b"x")


SOCKETS = {
    "pair": ("a, b = socket.socketpair(); a.recv(1)", False),
    "udp": ("a = socket.socket(type=socket.SOCK_DGRAM); a.bind(('127.0.0.1', 0)); a.recv(1)", True),
    "unix datagrams": ("a = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); a.bind(''); a.recv(1)", True),
}


@pytest.mark.parametrize("how", list(SOCKETS))
def test_a_socket_without_a_connection_may_be_written_to_by_all(start, how):
    code, outside = SOCKETS[how]
    found = seen_in(start(f"import socket; {code}"), READ)
    assert bool(found.outside) == outside


def test_a_unix_socket_whose_other_end_is_elsewhere(start):
    mine, its = socket.socketpair()
    with mine, its:
        os.set_inheritable(its.fileno(), True)
        code = f"import socket; socket.socket(fileno={its.fileno()}).recv(1)"
        with subprocess.Popen([sys.executable, "-c", code], pass_fds=[its.fileno()]) as child:
            its.close()
            assert seen_in(child, READ).outside
            assert not seen_in(child, READ, [os.getpid()]).outside
            mine.send(b"x")
