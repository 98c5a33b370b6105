"""The ends of other raylets of a host are seen at once for all, also where a process is not reaped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hpcray.transport.ucx_engine import _ProcessEnds


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("with_descriptor", [True, False])
def test_a_process_that_has_ended_is_found_until_it_is_forgotten(
    child: subprocess.Popen[bytes], with_descriptor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError("no descriptor is left")

    if not with_descriptor:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    ends = _ProcessEnds()
    ends.watch(1, os.getpid())
    ends.watch(2, child.pid)
    assert ends.ended() == []
    child.kill()
    deadline = time.monotonic() + 60
    while not ends.ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ends.ended() == [2] == ends.ended(), "it is not reaped yet"
    ends.forget(2)
    assert ends.ended() == []
    ends.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_at_its_end_a_process_closes_what_listens_and_nothing_else() -> None:
    code = """
import socket
from hpcray.platform.sockets import close_listeners
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
served, _ = listener.accept()
close_listeners()
client.sendall(b"x")
assert served.recv(1) == b"x"
try:
    socket.create_connection(client.getpeername(), 5)
except ConnectionRefusedError:
    print("refused")
listener.detach()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr


def test_a_process_that_is_late_closes_what_listens_before_it_breaks_off() -> None:
    code = """
import os, socket, time
from hpcray.runtime.node import shutdown
listener = socket.create_server(("127.0.0.1", 0))
leave = os._exit
def look(code):
    try:
        socket.create_connection(address, 5)
    except ConnectionRefusedError:
        print("refused", flush=True)
    leave(code)
address, os._exit = listener.getsockname(), look
with shutdown.watchdog(0.05, "", 3):
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "refused\n"), done.stderr
