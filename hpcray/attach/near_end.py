"""The near end of an attachment: a process on the driver's host that stands in for the raylet of a node of the job.

It has a session directory with a socket, as a raylet has; a driver joins it, and commands that the driver starts may do
so too. Frames go through the pipe to the far end, which passes them to the raylet. Where a message names the node's
shared memory, its content goes along: what a driver has written before its Seal, what it is to read before the Opened.

It is a process of its own: a program that computes, or that Ctrl-Z has stopped, says nothing for long, and its job must
not take the line for broken.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from hpcray.attach.carrier import Carrier, CarrierError, JobPlace
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
    frames_of,
    in_pieces,
    payload,
)
from hpcray.attach.line import Transfer
from hpcray.common.ids import OBJECT_BYTES
from hpcray.common.terminal_text import plain_line
from hpcray.platform.arena import OverflowMapping
from hpcray.platform.direct_io import open_unnamed_file
from hpcray.platform.session_directory import SessionDirectory
from hpcray.platform.sockets import bind_private, is_same_user
from hpcray.protocol import messages as m
from hpcray.protocol.frames import pack
from hpcray.protocol.messages.objects import OVERFLOW

_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each new attempt to get a pipe; the last one again and again."""
_NO_DRIVER = 1.0
"""Seconds without a driver after which the attachment ends."""
_FAREWELL = 3.0
"""Seconds in which the far end may take note of the end."""


class Attaching(msgspec.Struct, frozen=True):
    """The order for a near end.

    Attributes:
        place: where the job is, and how to get there.
        wait: seconds for which a broken line is repaired.
        directory: for the copy of the node's shared memory.
    """

    place: JobPlace
    wait: float
    directory: str


class Ready(msgspec.Struct, frozen=True):
    """The reply to an order: the session directory, or the reason why there is none."""

    session_dir: str = ""
    error: str = ""


@dataclass
class _Block:
    offset: int
    size: int
    uploading: bool = False
    released: bool = False


@dataclass
class _Driver:
    """One driver's share of the node's store.

    Attributes:
        blocks: objects that it has pinned. held: of those whose content is on its way, the transfer.
        files: of objects on disk that it reads, copies.
        failed: objects for whose content there was no space here. not_written: those whose copy could not be written.
    """

    blocks: dict[bytes, _Block] = field(default_factory=dict)
    held: dict[bytes, Transfer] = field(default_factory=dict)
    files: dict[bytes, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    not_written: dict[bytes, str] = field(default_factory=dict)


class NearEnd(Endpoint):
    """The near end of one attachment.

    Args:
        order: what to do. carrier: its pipe, which is open. life: a descriptor that ends with the program.
    """

    def __init__(self, order: Attaching, carrier: Carrier, life: int) -> None:
        super().__init__()
        self._order, self._carrier = order, carrier
        self._next: Carrier | None = None
        self._attempts = 0
        self._attempt_at = 0.0
        self._lost_at: float | None = None
        self._mirror: Mirror | None = None
        self._drivers: dict[int, _Driver] = {}
        self._welcomed: set[int] = set()
        self._numbers = 0
        self._alone_since: float | None = None
        self._gone = ""
        os.environ["SLURM_JOB_ID"] = carrier.far.slurm_job  # for `publish`
        self.directory = SessionDirectory.create()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind_private(self._listener, os.path.join(self.directory.path, "r.s"))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self.watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)
        self._life = life
        self.watch(life, selectors.EVENT_READ, self._program_ended)
        far = carrier.far
        self.directory.publish(far.session_name, far.node, far.node_id, far.nodes, far.end, relayed=True)
        self._take(carrier)

    def close(self) -> None:
        """Take leave of the far end, and remove all that is here."""
        if self.line.connected and self._carrier.running:
            self._carrier.say_bye(b"".join(self._unsent) + self.line.bye(), _FAREWELL)
        self._carrier.end(_FAREWELL if self.line.connected else 0.0)
        if self._next is not None:
            self._next.end(0.0)
        for channel in list(self.channels.values()):
            self._forget(channel)
        self._listener.close()
        if self._mirror is not None:
            self._mirror.close()
        self.directory.remove()

    # ------------------------------------------------------------ the pipe

    def _take(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._lost_at, self._attempts = None, 0
        self.use_pipe(carrier.output, carrier.input, carrier.rest)

    def on_pipe_lost(self, reason: str) -> None:
        self._lost_at = self._attempt_at = time.monotonic()
        said = self._carrier.complaint()
        self._carrier.end(0.0)
        if self.running and not self._gone:
            _say(f"the line to {self._carrier.far.name()} is broken ({said or reason}); it is opened again")

    def tick(self, now: float) -> float:
        if self._gone and not self.channels:
            self.running = False
        if not self.channels and self._welcomed:
            self._alone_since = self._alone_since or now
            if now - self._alone_since > _NO_DRIVER:
                self.running = False
        else:
            self._alone_since = None
        if self._lost_at is not None and not self._gone:
            self._repair(now)
            return 0.05
        return 1.0 if self._alone_since is None else 0.1

    def _repair(self, now: float) -> None:
        assert self._lost_at is not None
        lost_for = now - self._lost_at
        if self._next is None:
            if now < self._attempt_at:
                return
            try:
                place = self._order.place.again(self._carrier.far, elsewhere=self._attempts % 3 == 2)
                self._next = Carrier(place, self._carrier.ident, self._order.wait)
            except CarrierError as error:
                self._give_up(str(error))
                return
        problem, carrier = "", self._next
        try:
            if carrier.advance():
                self._next = None
                _say(f"the line to {carrier.far.name()} is open again, after {lost_for:.1f} s; nothing was lost")
                self._take(carrier)
                return
        except CarrierError as error:
            problem = str(error)
            carrier.end(0.0)
            self._next = None
            pause = _PAUSES[min(self._attempts, len(_PAUSES) - 1)]
            self._attempts += 1
            self._attempt_at = now + pause
            if error.final:
                self._give_up(problem)
                return
        if lost_for > self._order.wait:
            self._give_up(
                f"it was broken for {lost_for:.0f} s, longer than HPCRAY_ATTACH_WAIT={self._order.wait:g} allows"
                f"{f': {problem}' if problem else ''}"
            )

    def _give_up(self, reason: str) -> None:
        self._gone = reason
        _say(
            f"the line to {self._carrier.far.name()} is lost: {reason}. What this program owned is gone. hint: "
            "init() again joins the job anew, if it runs; named detached actors of the namespace are still there"
        )
        for channel in list(self.channels.values()):
            self._forget(channel)
        self.running = False

    def _program_ended(self, events: int) -> None:
        self.running = False

    # ------------------------------------------------------------ drivers

    def _accept(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            if not is_same_user(sock):
                sock.close()
                return
            self._numbers += 1
            self.channels[self._numbers] = Channel(self._numbers, sock)
            self._drivers[self._numbers] = _Driver()

    def on_channel_lost(self, channel: Channel, reason: str) -> None:
        if channel.proc:
            self.send(CLOSE, channel.number)
        self._forget(channel)

    def _forget(self, channel: Channel) -> None:
        driver = self._drivers.pop(channel.number)
        self.drop(channel)
        for block in driver.blocks.values():
            if self._mirror is not None:
                self._mirror.give_back(block.offset, block.size)
        for fd in driver.files.values():
            os.close(fd)

    def on_frames(self, channel: Channel, frames: Sequence[memoryview]) -> None:
        if not channel.raylet:
            if len(frames) != 1 or channel.number in self._welcomed:
                self._forget(channel)
                return
            self._welcomed.add(channel.number)
            self.send(OPEN, channel.number)
            return
        driver = self._drivers[channel.number]
        plain: list[memoryview | bytes] = []
        for frame in frames:
            if frame[4:12] != channel.raylet:
                plain.append(frame)
                continue
            for msg in m.decode(frame[20:]):
                self._from_driver(channel, driver, msg, plain)
        if plain:
            self.line.send(payload(FRAMES, channel.number, *plain))

    def _from_driver(self, channel: Channel, driver: _Driver, msg: m.Message, plain: list[memoryview | bytes]) -> None:
        """Handle a message of a driver for the raylet; what may travel at once is added to `plain`."""
        if isinstance(msg, m.Release) and not msg.unpin_replica and len(msg.ids) > 1:
            for one in msg.ids:
                self._from_driver(channel, driver, m.Release([one]), plain)
            return
        if isinstance(msg, m.Free) and len(msg.ids) > 1 and driver.held:
            for one in msg.ids:
                self._from_driver(channel, driver, m.Free([one], msg.nodes), plain)
            return
        ident: bytes = getattr(msg, "id", b"") or (getattr(msg, "ids", None) or [b""])[0]
        frame = pack(channel.raylet, channel.proc, m.encode([msg]))
        if isinstance(msg, m.Release) and not msg.unpin_replica:
            self._released(driver, ident)
        elif isinstance(msg, m.DiskRead) and (fd := driver.files.pop(ident, -1)) >= 0:
            os.close(fd)
        held = driver.held.get(ident)
        if held is not None and held.ended:
            del driver.held[ident]
            held = None
        if held is not None:
            held.after.append(payload(FRAMES, channel.number, frame))
        elif isinstance(msg, m.Seal) and ident in driver.blocks:
            self._upload(channel, driver, ident, frame, plain)
        else:
            plain.append(frame)

    def _released(self, driver: _Driver, ident: bytes) -> None:
        block = driver.blocks.get(ident)
        if block is not None and block.uploading:
            block.released = True
        elif block is not None and self._mirror is not None:
            del driver.blocks[ident]
            self._mirror.give_back(block.offset, block.size)

    def _upload(
        self, channel: Channel, driver: _Driver, ident: bytes, seal: bytes, plain: list[memoryview | bytes]
    ) -> None:
        """Send what a driver has written, then its Seal."""
        mirror, block, number = self._mirror, driver.blocks[ident], channel.number
        assert mirror is not None

        def read(at: int, size: int) -> bytes:
            return mirror.read(block.offset + at, size)

        def wrap(at: int, data: bytes) -> bytes:
            return payload(BYTES, number, PLACE.pack(block.offset + at), data)

        if block.size <= SMALL:
            self.line.send(wrap(0, read(0, block.size)))
            plain.append(seal)
            return

        def pieces() -> Iterator[bytes]:
            yield from in_pieces(block.size, read, wrap)
            block.uploading = False
            if block.released:
                self._released(driver, ident)

        block.uploading = True
        transfer = driver.held[ident] = Transfer(number, pieces(), [payload(FRAMES, number, seal)])
        self.line.transfer(transfer)

    # ------------------------------------------------------------ from the far end

    def on_payload(self, operation: int, number: int, body: memoryview) -> None:
        channel = self.channels.get(number)
        if channel is None:
            if operation == WELCOME:
                self.send(CLOSE, number)  # the driver has left meanwhile
            return
        driver = self._drivers[number]
        if operation == FRAMES:
            self._to_driver(channel, driver, body)
        elif operation == BYTES:
            (offset,) = PLACE.unpack_from(body)
            assert self._mirror is not None
            try:
                self._mirror.write(offset, body[PLACE.size :])
            except OSError as error:
                driver.failed[number] = str(error)
        elif operation == FILE:
            ident = bytes(body[:OBJECT_BYTES])
            (at,) = PLACE.unpack_from(body, OBJECT_BYTES)
            try:
                if ident not in driver.files:
                    driver.files[ident] = open_unnamed_file(self._order.directory, direct=False)
                _write(driver.files[ident], at, body[OBJECT_BYTES + PLACE.size :])
            except OSError as error:  # later pieces may have room again: a hole would read as zeros
                driver.not_written.setdefault(ident, str(error))
        elif operation == WELCOME:
            self._welcome(channel, body)
        elif operation == CLOSE:
            _say(f"{self._carrier.far.name()}: {bytes(body).decode()}")
            self._forget(channel)

    def _welcome(self, channel: Channel, frame: memoryview) -> None:
        (welcome,) = m.decode(frame[20:])
        assert isinstance(welcome, m.Welcome)
        channel.proc, channel.raylet = bytes(frame[4:12]), bytes(frame[12:20])
        try:
            if self._mirror is None:
                self._mirror = Mirror(self._order.directory, welcome.arena_size + welcome.reserve)
            told = msgspec.structs.replace(
                welcome,
                session_dir=self.directory.path,
                neighbors={},
                overflow=self._mirror.overflow,
                config={**welcome.config, "huge_pages": "off"},
                run=msgspec.structs.replace(welcome.run, signals=()),  # this program's are not for the job
            )
            frame_here = pack(channel.proc, channel.raylet, m.encode([told]))
            sent = socket.send_fds(channel.sock, [frame_here], [self._mirror.fd])
        except OSError as error:
            _say(f"the driver cannot be served: {error}")
            self.on_channel_lost(channel, str(error))
            return
        if sent < len(frame_here):
            self.write(channel, frame_here[sent:])

    def _to_driver(self, channel: Channel, driver: _Driver, body: memoryview) -> None:
        out: list[memoryview | bytes] = []
        for frame in frames_of(body):
            if frame[12:20] != channel.raylet:
                out.append(frame)
                continue
            messages = m.decode(frame[20:])
            kept = [self._adapted(channel, driver, msg) for msg in messages]
            if all(new is old for new, old in zip(kept, messages, strict=True)):
                out.append(frame)
            else:
                out.append(pack(channel.proc, channel.raylet, m.encode(kept)))
        channel.unsent += out
        self._write(channel)

    def _adapted(self, channel: Channel, driver: _Driver, msg: m.Message) -> m.Message:
        """Return what a driver gets for a message of the raylet."""
        if isinstance(msg, (m.Created, m.Opened)):
            problem = driver.failed.pop(channel.number, "")
            assert self._mirror is not None
            try:
                if not problem:
                    self._mirror.take(msg.offset, msg.size)
            except OSError as error:
                problem = str(error)
            if problem:
                return self._no_room(channel, m.Release([msg.id]), msg.id, msg.size, problem)
            driver.blocks[msg.id] = _Block(msg.offset, msg.size)
        elif isinstance(msg, m.OnDisk) and (problem := driver.not_written.pop(msg.id, "")):
            if (fd := driver.files.pop(msg.id, -1)) >= 0:
                os.close(fd)
            return self._no_room(channel, m.DiskRead(msg.id), msg.id, msg.size, problem)
        elif isinstance(msg, m.OnDisk) and msg.id in driver.files:
            return m.OnDisk(msg.id, f"/proc/{os.getpid()}/fd/{driver.files[msg.id]}", 0, msg.size)
        return msg

    def _no_room(self, channel: Channel, given_back: m.Message, ident: bytes, size: int, problem: str) -> m.StoreError:
        """Give back to the raylet what a driver cannot have; return what the driver gets instead."""
        frame = pack(channel.raylet, channel.proc, m.encode([given_back]))
        self.line.send(payload(FRAMES, channel.number, frame))
        text = (
            f"{problem}: the {size} bytes of object {ident.hex()} have no room in {self._order.directory} of this "
            "host. hint: HPCRAY_ATTACH_DIR names a directory with more"
        )
        return m.StoreError(ident, "full", text)


def _write(fd: int, at: int, data: memoryview) -> None:
    """Write all of it, or raise OSError."""
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def _say(text: str) -> None:
    print(f"hpcray: {plain_line(text)}", file=sys.stderr, flush=True)


# ------------------------------------------------------------ mirror
# The near end's copy of a node's shared memory: what drivers here read and write, at the offsets that it has there.
#
# It is a sparse file without a name, as large as the arena, in a temporary directory: a driver maps it as it would
# map the arena. Space is taken for the objects that are in use here, and given back with them; what is in the file
# may go to the disk, so a value that is longer than this host's memory has room, too.


class Mirror:
    """The memory of one node.

    Args:
        directory: where the file is made.
        size: of the arena, with what is behind the objects.

    Raises:
        OSError: such a file cannot be made there.
    """

    def __init__(self, directory: str, size: int) -> None:
        self._arena, self._overflow = OverflowMapping.create(directory), OverflowMapping.create(directory)
        if not self._arena.path or not self._overflow.path:
            raise OSError(f"no file can be made in {directory}; hint: HPCRAY_ATTACH_DIR names a directory on a disk")
        self.fd = os.open(self._arena.path, os.O_RDWR | os.O_CLOEXEC)
        self._overflow_fd = os.open(self._overflow.path, os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._users: dict[int, int] = {}

    @property
    def overflow(self) -> str:
        """Path of the file for offsets from OVERFLOW on."""
        return self._overflow.path

    def take(self, offset: int, size: int) -> None:
        """Take space for an object that a driver is to write or read.

        Raises:
            OSError: there is none.
        """
        self._file(offset).reserve(offset % OVERFLOW, size)
        self._users[offset] = self._users.get(offset, 0) + 1

    def give_back(self, offset: int, size: int) -> None:
        """A driver does not use an object any more."""
        left = self._users.get(offset, 0) - 1
        if left > 0:
            self._users[offset] = left
            return
        self._users.pop(offset, None)
        start = -(-offset // _PAGE) * _PAGE  # pages that it shares with a neighbor stay
        end = (offset + size) // _PAGE * _PAGE
        if end > start:
            self._file(offset).release(start % OVERFLOW, end - start)

    def read(self, offset: int, size: int) -> bytes:
        """Return what a driver has written."""
        return os.pread(self._fd(offset), size, offset % OVERFLOW)

    def write(self, offset: int, data: memoryview) -> None:
        """Write what a driver will read.

        Raises:
            OSError: there is no space.
        """
        _write(self._fd(offset), offset % OVERFLOW, data)

    def close(self) -> None:
        """Close the files; what drivers have mapped stays until they end."""
        os.close(self.fd)
        os.close(self._overflow_fd)
        self._arena.close()
        self._overflow.close()

    def _file(self, offset: int) -> OverflowMapping:
        return self._overflow if offset >= OVERFLOW else self._arena

    def _fd(self, offset: int) -> int:
        return self._overflow_fd if offset >= OVERFLOW else self.fd


_PAGE = os.sysconf("SC_PAGESIZE")
