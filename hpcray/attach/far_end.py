"""The far end of an attachment: it runs in the job, beside the raylet that the drivers of the near end join.

It connects to the raylet for each of them, and stays connected while the pipe is broken: so the job sees drivers that
are slow at worst. What is in the node's shared memory it sends along with the messages that name it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from hpcray.attach.endpoint import (
    BYTES,
    CLOSE,
    FILE,
    FRAMES,
    OPEN,
    PLACE,
    SMALL,
    WELCOME,
    Channel,
    Endpoint,
    in_pieces,
    payload,
)
from hpcray.attach.line import Transfer
from hpcray.platform.arena import Arena
from hpcray.platform.sockets import bind_private, connect_private, is_same_user
from hpcray.protocol import messages as m
from hpcray.protocol.frames import FrameReader, pack
from hpcray.runtime.core_worker.neighbor_store_client import map_arena
from hpcray.runtime.core_worker.peer_sockets import greet

_PATIENCE = 30.0
"""Seconds in which the raylet has to answer."""
_FILE_READ = os.O_RDONLY | os.O_CLOEXEC


def socket_path(session_dir: str, ident: str) -> str:
    """Where the far end of an attachment waits for pipes."""
    return os.path.join(session_dir, f"a{ident}.s")


class FarEnd(Endpoint):
    """The far end of one attachment.

    Args:
        session_dir: of the node. ident: of the attachment.
        wait: seconds for which it waits for a new pipe.
    """

    def __init__(self, session_dir: str, ident: str, wait: float) -> None:
        super().__init__()
        self._session_dir, self._wait = session_dir, wait
        self._path = socket_path(session_dir, ident)
        self._arena: Arena | None = None
        self._bridge: socket.socket | None = None
        self._without_pipe_since = time.monotonic()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind_private(self._listener, self._path)
        self._listener.listen(8)
        self._listener.setblocking(False)
        self.watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Close all that is open."""
        for channel in list(self.channels.values()):
            self.drop(channel)
        self.lose_pipe("the attachment ends")
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        if self._arena is not None:
            self._arena.close()
        self.selector.close()

    def tick(self, now: float) -> float:
        if self.line.ended:
            self.running = False
            return 0.0
        if self._bridge is not None:
            return 60.0
        left = self._without_pipe_since + self._wait - now
        if left <= 0:
            self.running = False
        return max(0.0, min(left, 60.0))

    def on_pipe_lost(self, reason: str) -> None:
        if self._bridge is not None:
            self._bridge.close()  # its bridge ends, and so does the step
            self._bridge = None
        self._without_pipe_since = time.monotonic()

    def _accept(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            if not is_same_user(sock):
                sock.close()
                return
            self.lose_pipe("another pipe takes its place")
            self._bridge = sock
            self.use_pipe(sock.fileno(), sock.fileno())

    # ------------------------------------------------------------ from the near end

    def on_payload(self, operation: int, number: int, body: memoryview) -> None:
        if operation == OPEN:
            self._open(number)
            return
        channel = self.channels.get(number)
        if channel is None:
            return  # it has ended, and the near end does not know yet
        if operation == FRAMES:
            self.write(channel, body)
        elif operation == BYTES:
            (offset,) = PLACE.unpack_from(body)
            assert self._arena is not None
            data = body[PLACE.size :]
            self._arena.view(offset, len(data))[:] = data
        elif operation == CLOSE:
            self.drop(channel)

    def _open(self, number: int) -> None:
        """Join the node for a driver."""
        try:
            sock = connect_private(os.path.join(self._session_dir, "r.s"), timeout=_PATIENCE)
            greet(sock, m.Hello(os.getpid(), m.ATTACHED))
            data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
            reader = FrameReader()
            frames = list(reader.feed(data))
            while not frames:
                if not (data := sock.recv(1 << 16)):
                    raise ConnectionError("it has closed the connection")
                frames = list(reader.feed(data))
            (welcome,) = m.decode(frames[0][20:])
            assert isinstance(welcome, m.Welcome)
            if self._arena is None:
                self._arena = map_arena(fds[0], welcome)
            else:
                os.close(fds[0])
        except (OSError, ValueError, IndexError) as error:
            self.send(CLOSE, number, f"the raylet does not answer: {error}".encode())
            return
        channel = self.channels[number] = Channel(number, sock)
        channel.reader = reader
        channel.proc, channel.raylet = bytes(frames[0][4:12]), bytes(frames[0][12:20])
        self.send(WELCOME, number, bytes(frames[0]))
        if len(frames) > 1:
            self.on_frames(channel, frames[1:])

    # ------------------------------------------------------------ from the raylet

    def on_channel_lost(self, channel: Channel, reason: str) -> None:
        number = channel.number
        self.drop(channel)
        self.send(CLOSE, number, b"the node of the job has ended, or does not answer any more")

    def on_frames(self, channel: Channel, frames: Sequence[memoryview]) -> None:
        plain: list[memoryview | bytes] = []
        for frame in frames:
            if frame[12:20] != channel.raylet:
                plain.append(frame)
                continue
            kept = [msg for msg in m.decode(frame[20:]) if not self._handle(channel, msg, plain)]
            if kept:
                plain.append(pack(channel.proc, channel.raylet, m.encode(kept)))
        if plain:
            self.line.send(payload(FRAMES, channel.number, *plain))

    def _handle(self, channel: Channel, msg: m.Message, plain: list[memoryview | bytes]) -> bool:
        """Handle a message of the raylet that names shared memory. Returns False where it travels as it is."""
        if isinstance(msg, m.Opened):
            self._send_object(channel, msg)
        elif isinstance(msg, m.OnDisk):
            self._send_file(channel, msg)
        elif isinstance(msg, m.SlotFrame):
            assert self._arena is not None
            plain.append(bytes(self._arena.view(msg.offset, msg.size)))
            self.to_process(channel, m.FrameRead(msg.offset))
        elif isinstance(msg, m.FrameSlots):
            self.to_process(channel, m.FrameSlotsReturned(msg.offsets))
        elif isinstance(msg, m.ReclaimFrameSlots):
            self.to_process(channel, m.FrameSlotsReturned([]))
        else:
            return False
        return True

    def _send_object(self, channel: Channel, msg: m.Opened) -> None:
        arena, number, offset = self._arena, channel.number, msg.offset
        assert arena is not None
        opened = payload(FRAMES, number, pack(channel.proc, channel.raylet, m.encode([msg])))

        def read(at: int, size: int) -> bytes:
            return bytes(arena.view(offset + at, size))

        def wrap(at: int, data: bytes) -> bytes:
            return payload(BYTES, number, PLACE.pack(offset + at), data)

        self._send_long(channel, msg.size, read, wrap, opened)

    def _send_file(self, channel: Channel, msg: m.OnDisk) -> None:
        number = channel.number
        lent = payload(FRAMES, number, pack(channel.proc, channel.raylet, m.encode([msg])))
        try:
            fd = os.open(msg.path, _FILE_READ)
        except OSError as error:
            self.to_process(channel, m.DiskRead(msg.id, str(error), msg.size))
            return

        def read(at: int, size: int) -> bytes:
            return os.pread(fd, size, msg.position + at)

        def wrap(at: int, data: bytes) -> bytes:
            return payload(FILE, number, msg.id, PLACE.pack(at), data)

        self._send_long(channel, msg.size, read, wrap, lent, lambda: os.close(fd))

    def _send_long(
        self,
        channel: Channel,
        size: int,
        read: Callable[[int, int], bytes],
        wrap: Callable[[int, bytes], bytes],
        last: bytes,
        done: Callable[[], object] = lambda: None,
    ) -> None:
        if size <= SMALL:
            self.line.send(wrap(0, read(0, size)))
            self.line.send(last)
            done()
            return

        def pieces() -> Iterator[bytes]:
            try:
                yield from in_pieces(size, read, wrap)
            finally:
                done()

        self.line.transfer(Transfer(channel.number, pieces(), [last]))
