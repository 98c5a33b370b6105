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


def test_connections_to_other_hosts_and_listeners(start):
    listener = start("import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(60)")
    plain = start(WAITS[TIMED])
    found = {one.pid: one for one in waits_of([listener.pid, plain.pid], ())}
    assert found[listener.pid].listens and not found[plain.pid].listens
    assert not found[listener.pid].peers
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert not waits_of([os.getpid()], list(found))[0].peers, "loopback is no other host"
