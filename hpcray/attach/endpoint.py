"""The common part of both ends of an attachment: a loop over descriptors, the line over its pipe, and channels.

A payload of the line is `operation u8 | channel u32 | rest`. A channel stands for one connection to a raylet: the near
end, on the driver's host, has accepted it, and the far end, in the job, has made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from hpcray.attach.line import PIECE, LineError, ResumableLine
from hpcray.platform.sockets import SOCKET_BUFFER, send_pieces
from hpcray.protocol.frames import FrameReader, pack
from hpcray.protocol.messages import Message, encode

OPERATION = struct.Struct("<BI")
OPEN, WELCOME, FRAMES, CLOSE, BYTES, FILE = range(6)
"""A driver connects; the raylet's answer; frames; the connection ends (why); bytes of the store; bytes of a file."""
PLACE = struct.Struct("<Q")
SMALL = 64 << 10
"""Bytes of an object that travel as urgent payload: they delay nothing, and need no turn."""
_READ = 1 << 20
_PIPE = 1 << 20  # bytes that a pipe holds, where the system lets it
_ROOM = 512 << 10  # bytes of records that are made at a time: what is urgent waits behind no more
_MOST_UNSENT = 16 << 20  # bytes for one process; the other end is asked to wait


class Channel:
    """One connection to a raylet, or of a driver.

    Attributes:
        raylet: proc id of the raylet; b"" until it is known. proc: of the driver.
        unsent: what the process at the other end of the socket has not taken yet.
    """

    def __init__(self, number: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        self.number, self.sock = number, sock
        self.reader = FrameReader()
        self.raylet = self.proc = b""
        self.unsent: list[bytes | memoryview] = []
        self.reading = True


class Endpoint(ABC):
    """One end. Subclasses handle payloads and frames.

    Attributes:
        line: see `ResumableLine`. channels: by number. running: the loop goes on.
    """

    def __init__(self) -> None:
        self.line = ResumableLine()
        self.channels: dict[int, Channel] = {}
        self.running = True
        self.selector = selectors.DefaultSelector()
        self._pipe: tuple[int, int] | None = None
        self._unsent: list[bytes | memoryview] = []

    # ------------------------------------------------------------ for subclasses

    @abstractmethod
    def on_payload(self, operation: int, number: int, body: memoryview) -> None:
        """Handle a payload of the other end."""

    @abstractmethod
    def on_frames(self, channel: Channel, frames: Sequence[memoryview]) -> None:
        """Handle frames that have come over the socket of a channel."""

    @abstractmethod
    def on_channel_lost(self, channel: Channel, reason: str) -> None:
        """The socket of a channel has ended."""

    @abstractmethod
    def on_pipe_lost(self, reason: str) -> None:
        """The present pipe does not carry any more."""

    @abstractmethod
    def tick(self, now: float) -> float:
        """Take care of what is due; return the seconds until there may be more."""

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until `running` is False."""
        while self.running:
            now = time.monotonic()
            wait = self.tick(now)
            if self._pipe is not None:
                if self.line.is_silent(now):
                    self.lose_pipe("nothing has come for too long")
                    continue
                self.flush()
                wait = min(wait, self.line.next_look(now))
            self._watch_sources()
            for key, events in self.selector.select(wait):
                call: Callable[[int], None] = key.data
                call(events)

    def watch(self, fd: int, events: int, call: Callable[[int], None]) -> None:
        """Call for events of a descriptor; 0 for no more."""
        known = fd in self.selector.get_map()
        if not events:
            if known:
                self.selector.unregister(fd)
        elif known:
            if self.selector.get_key(fd).events != events:
                self.selector.modify(fd, events, call)
        else:
            self.selector.register(fd, events, call)

    def _watch_sources(self) -> None:
        """Read from processes only while the line takes more."""
        full = self.line.is_full
        self.line.holds_back = any(
            sum(map(len, channel.unsent)) > _MOST_UNSENT for channel in self.channels.values() if channel.unsent
        )
        for channel in self.channels.values():
            events = (0 if full else selectors.EVENT_READ) | (selectors.EVENT_WRITE if channel.unsent else 0)
            self.watch(channel.sock.fileno(), events, self._caller(channel))

    def _caller(self, channel: Channel) -> Callable[[int], None]:
        def ready(events: int) -> None:
            if events & selectors.EVENT_WRITE:
                self._write(channel)
            if events & selectors.EVENT_READ and self.channels.get(channel.number) is channel:
                self._read(channel)

        return ready

    # ------------------------------------------------------------ the pipe

    def use_pipe(self, read: int, write: int, first: bytes = b"") -> None:
        """Use a pipe from now on. first: what has been read from it already."""
        if self._pipe is not None:
            self.lose_pipe("another pipe takes its place")
        for fd in {read, write}:
            os.set_blocking(fd, False)
            enlarge(fd)
        self._pipe = (read, write)
        self._unsent.clear()
        self.line.pipe_opened(time.monotonic())
        self._watch_pipe()
        if first:
            self._feed(first)

    def lose_pipe(self, reason: str) -> None:
        """Give up the present pipe."""
        if self._pipe is None:
            return
        for fd in set(self._pipe):
            self.watch(fd, 0, self._pipe_ready)
        self._pipe = None
        self._unsent.clear()
        self.line.pipe_lost()
        self.on_pipe_lost(reason)

    def _watch_pipe(self) -> None:
        if self._pipe is None:
            return
        read, write = self._pipe
        wanted = selectors.EVENT_WRITE if self._unsent else 0
        if read == write:
            self.watch(read, selectors.EVENT_READ | wanted, self._pipe_ready)
        else:
            self.watch(read, selectors.EVENT_READ, self._pipe_ready)
            self.watch(write, wanted, self._pipe_ready)

    def _pipe_ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.flush()
        if events & selectors.EVENT_READ and self._pipe is not None:
            try:
                data = os.read(self._pipe[0], _READ)
            except BlockingIOError:
                return
            except OSError as error:
                self.lose_pipe(str(error))
                return
            if data:
                self._feed(data)
            else:
                self.lose_pipe("it has ended")

    def _feed(self, data: bytes) -> None:
        try:
            payloads = self.line.feed(data, time.monotonic())
        except LineError as error:
            self.lose_pipe(f"what has come is not of the other end: {error}")
            return
        for payload in payloads:
            operation, number = OPERATION.unpack_from(payload)
            self.on_payload(operation, number, memoryview(payload)[OPERATION.size :])

    def flush(self) -> None:
        """Write to the pipe what it takes."""
        while self._pipe is not None:
            if not self._unsent:
                self._unsent = [*self.line.take(time.monotonic(), _ROOM)]
                if not self._unsent:
                    break
            try:
                sent = os.writev(self._pipe[1], self._unsent[:512])
            except BlockingIOError:
                break
            except OSError as error:
                self.lose_pipe(str(error))
                return
            self._drop_sent(sent)
        self._watch_pipe()

    def _drop_sent(self, sent: int) -> None:
        gone = 0
        for piece in self._unsent:
            if sent < len(piece):
                break
            sent -= len(piece)
            gone += 1
        del self._unsent[:gone]
        if sent:
            self._unsent[0] = memoryview(self._unsent[0])[sent:]

    # ------------------------------------------------------------ channels

    def send(self, operation: int, number: int, body: bytes = b"") -> None:
        """Queue an urgent payload."""
        self.line.send(OPERATION.pack(operation, number) + body)

    def to_process(self, channel: Channel, *messages: Message, source: bytes = b"") -> None:
        """Send messages to the process at the other end of a channel's socket."""
        dest = channel.proc if source else channel.raylet
        self.write(channel, pack(dest, source or channel.proc, encode(list(messages))))

    def write(self, channel: Channel, frame: bytes | memoryview) -> None:
        """Write a frame, or several, to the socket of a channel."""
        channel.unsent.append(frame)
        self._write(channel)

    def _write(self, channel: Channel) -> None:
        try:
            send_pieces(channel.sock, channel.unsent, SOCKET_BUFFER)
        except OSError:
            channel.unsent.clear()  # reading finds the end

    def _read(self, channel: Channel) -> None:
        try:
            data = channel.sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self.on_channel_lost(channel, str(error))
            return
        if not data:
            self.on_channel_lost(channel, "its connection ended")
            return
        frames = list(channel.reader.feed(data))
        if frames:
            self.on_frames(channel, frames)

    def drop(self, channel: Channel) -> None:
        """Close the socket of a channel, and forget it."""
        if self.channels.pop(channel.number, None) is not None:
            self.line.drop_channel(channel.number)
            self.watch(channel.sock.fileno(), 0, self._pipe_ready)
            channel.sock.close()


def enlarge(fd: int) -> None:
    """Have the kernel take more at a time, where this is a pipe, or a socket."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE)  # type: ignore[attr-defined,unused-ignore]


def frames_of(body: memoryview) -> Iterator[memoryview]:
    """Cut a payload of whole frames into these."""
    at = 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "little") + 4
        yield body[at : at + size]
        at += size


def payload(operation: int, number: int, *parts: bytes | memoryview) -> bytes:
    """Return a payload."""
    return b"".join((OPERATION.pack(operation, number), *parts))


def in_pieces(size: int, read: Callable[[int, int], bytes], wrap: Callable[[int, bytes], bytes]) -> Iterator[bytes]:
    """Make the payloads of a long value.

    Args:
        size: its bytes. read: returns so many bytes from a position on. wrap: makes a payload of a position and bytes.
    """
    for at in range(0, size, PIECE):
        yield wrap(at, read(at, min(PIECE, size - at)))
