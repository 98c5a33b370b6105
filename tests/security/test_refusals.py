"""Connections of other users cost neither a line each nor a traceback each."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket

import pytest
from helpers.strangers import as_stranger, needs_stranger

from hpcray.launch import tcp_peers
from hpcray.launch.tcp_peers import RefusalLog, is_own_connection, refuse_strangers, sum_up_refusals

CONNECT = """\
import socket, sys, time
held = []
for number in range(int(sys.argv[2])):
    try:
        one = socket.socket()
        one.settimeout(5)
        one.connect(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        break
    if number % 2:
        one.close()
    else:
        held.append(one)
print("done", flush=True)
"""


# Sends a request and resets the connection: its port is free at once, and what it has sent can still be read.
SEND_AND_RESET = """\
import socket, struct, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
one.sendall(b"a request of another user")
one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
print(one.getsockname()[1])
one.close()
"""


@pytest.mark.parametrize("who", ["the HTTP port", "the port of PMIx"])
def test_a_request_whose_sender_left_its_port_to_this_user_is_not_read(who: str) -> None:
    """Whose a port is, is asked by the port: it must still be the port of the connection that was accepted."""
    needs_stranger()

    async def serve(kind: type[asyncio.Protocol]) -> None:
        server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", 0)
        meet(server.sockets[0].getsockname()[1])  # the loop stands still, as when an application computes
        await asyncio.sleep(0.2)
        server.close()

    def meet(port: int) -> None:
        child = as_stranger(SEND_AND_RESET, port, load=("encodings.idna",))
        out, _ = child.communicate(timeout=60)
        mine = socket.socket()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        mine.bind(("127.0.0.1", int(out)))
        mine.connect(("127.0.0.1", port))
        kept.append(mine)

    kept: list[socket.socket] = []
    heard: list[bytes] = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            heard.append(b"")

        def data_received(self, data: bytes) -> None:
            heard.append(data)

    if who == "the HTTP port":
        asyncio.run(serve(refuse_strangers(Protocol, lambda: False, logging.getLogger("refusals"))))
        assert heard == [b""], "the connection of this user, which has sent nothing, and no other"
    else:
        with socket.create_server(("127.0.0.1", 0)) as door:
            meet(door.getsockname()[1])
            first, second = door.accept()[0], door.accept()[0]
            with first, second:
                assert [is_own_connection(first), is_own_connection(second)] == [False, True]
    for one in kept:
        one.close()


def test_refusals_are_summed_up(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RefusalLog(logging.getLogger("refusals"))
    for _ in range(1000):
        log.note("refused")
    assert [record.getMessage() for record in caplog.records] == ["refused"]
    log._due.clear()
    log.note("refused")
    log.note("another kind")
    said = ["refused", "refused (1000 since the last line)", "another kind"]
    assert [record.getMessage() for record in caplog.records] == said


def test_many_connections_of_a_stranger_are_a_line_or_two(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_stranger()
    # After EMFILE asyncio waits for a second: with three descriptors, for minutes in all.
    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.01)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def serve() -> int:
        loop = asyncio.get_running_loop()
        sum_up_refusals(logging.getLogger("refusals"))
        kind = refuse_strangers(asyncio.Protocol, lambda: False, logging.getLogger("refusals"))
        server = await loop.create_server(kind, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        child = as_stranger(CONNECT, port, 600)
        used = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used.fileno() + 3, limit[1]))  # so that there are too few
        try:
            while child.poll() is None:
                await asyncio.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            used.close()
        assert child.stdout is not None and child.stdout.read() == "done\n"
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            stream.close()
        # The server lives: this user is served.
        _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 30)
        writer.close()
        server.close()
        return port

    asyncio.run(serve())
    assert 1 <= len(caplog.records) <= 4, [record.getMessage() for record in caplog.records]
    assert not [record for record in caplog.records if record.exc_info], "no traceback"


def test_other_errors_of_the_loop_are_reported_as_ever() -> None:
    asked: list[object] = []

    class Loop:
        def default_exception_handler(self, context: object) -> None:
            asked.append(context)

    log = RefusalLog(logging.getLogger("refusals"))
    log.handle(Loop(), {"exception": OSError(errno.EMFILE, "Too many open files")})  # type: ignore[arg-type]
    log.handle(Loop(), {"message": "something else"})  # type: ignore[arg-type]
    assert asked == [{"message": "something else"}] and tcp_peers._INTERVAL == 60.0
