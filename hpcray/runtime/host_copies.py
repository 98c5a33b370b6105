"""The receiving side of transfers between nodes of one host: bytes are copied out of the arena of who offers them."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

from hpcray.host.copiers import Copiers, copy
from hpcray.host.peers import connect_private
from hpcray.host.window import Window
from hpcray.runtime.host_links import (
    ACK,
    DATA_SOCKET,
    GREETING,
    HELLO,
    MAGIC,
    OFFER,
    READY,
    HostLink,
    LinkError,
    Watch,
)
from hpcray.transport.base import Report

_INLINE = 1 << 20
"""Bytes up to which a copy is made at once: some 0.1 ms. To hand it to a thread and to hear of it takes as long."""
_INLINE_ALONE = 4 << 20
"""The same where there is one thread: it copies no faster, it only leaves the raylet free, and an own core it lacks."""
_PROMPT = 256 << 10
"""Bytes from which on a copy is acknowledged before the next one begins: its sender then offers more meanwhile."""
_SLICE = 0.001
_AHEAD = 2  # copies that each thread has got, so that it need not wait for the next


class _Source:
    """A node whose arena we read."""

    __slots__ = ("gone", "link", "node", "running", "window")

    def __init__(self, node: int) -> None:
        self.node = node
        self.link: HostLink
        self.window: Window | None = None
        self.running = 0
        self.gone = ""


class _Copy:
    """One offer that was wanted; a `copiers.Job`."""

    __slots__ = ("begun", "dropped", "size", "source", "tag", "target", "whose")

    def __init__(self, whose: _Source, tag: int, source: int, target: int, size: int) -> None:
        self.whose = whose
        self.tag = tag
        self.source = source
        self.target = target
        self.size = size
        self.begun = False
        self.dropped = False


class Copies:
    """Connects to the nodes of this host, and copies what they offer and somebody expects.

    Args:
        node: our number.
        base: address of our arena.
        huge: as `Config.huge_pages`.
        threads: most threads for the large ones.
        withdraw: called with the tag of an offer that is wanted: nothing may write to its range any more but we. False
            where that cannot be promised.
        watch: gets the descriptors.
        done: gets the reports.
    """

    def __init__(
        self,
        node: int,
        base: int,
        huge: str,
        threads: int,
        withdraw: Callable[[int], bool],
        watch: Watch,
        done: list[Report],
    ) -> None:
        self._node = node
        self._base = base
        self._huge = huge
        self._copiers: Copiers[_Copy] = Copiers(threads)
        self._inline = _INLINE if threads > 1 else _INLINE_ALONE
        self._withdraw = withdraw
        self._watch = watch
        self._done = done
        self._sources: dict[int, _Source] = {}
        self._expected: dict[int, tuple[int, int, int]] = {}  # node, offset, size, by tag
        self._copies: dict[int, _Copy] = {}  # offered, and not reported yet
        self._small: deque[_Copy] = deque()
        self._large: deque[_Copy] = deque()
        watch.add(self._copiers.fileno(), lambda event: self._copiers.woke())

    def meet(self, node: int, directory: str) -> None:
        """Ask for a view into the arena of a node of this host. Where that fails, it is as if it were of another host.

        Args:
            directory: its session directory.
        """
        try:
            sock = connect_private(os.path.join(directory, DATA_SOCKET), socket.SOCK_SEQPACKET, timeout=0.0)
        except OSError:
            return
        try:
            sock.send(HELLO.pack(MAGIC, self._node))
        except OSError:
            sock.close()
            return
        source = self._sources[node] = _Source(node)
        source.link = HostLink(sock, node, self._watch, lambda link: self._ready(source))

    def expect(self, node: int, tag: int, offset: int, size: int) -> None:
        """These bytes may be offered."""
        if node in self._sources:
            self._expected[tag] = (node, offset, size)

    def came(self, tag: int) -> None:
        """It has come by another way."""
        self._expected.pop(tag, None)

    def cancel(self, tag: int) -> bool | None:
        """See `DataPlane.cancel`; None for what is not offered."""
        self._expected.pop(tag, None)
        found = self._copies.get(tag)
        if found is None:
            rows = (row for source in self._sources.values() for row in source.link.rows)
            return False if any(report is not None and report[2] == tag for _, report in rows) else None
        if found.begun:
            return False
        del self._copies[tag]
        found.dropped = True
        self._acknowledge(found.whose, tag, None)
        self._flush(found.whose)
        return True

    def forget(self, node: int, why: str) -> None:
        """`node` is dead: what it offered ends with this error, as soon as nobody writes there any more."""
        source = self._sources.get(node)
        if source is not None:
            self._lose(source, why)

    def busy(self) -> bool:
        """Whether anything is expected, or being copied."""
        return bool(self._expected or self._copies)

    def hungry(self) -> bool:
        """Whether there is something to copy at once."""
        return bool(self._small)

    def work(self) -> bool:
        """Copy for about a millisecond, and see what the threads have done; whether there was anything to do."""
        if not (self._copies or self._small or self._large or self._copiers.outstanding):
            return False  # of the queues, all may have been dropped: they are emptied here
        touched: dict[int, _Source] = {}
        for ended in self._copiers.finished():
            ended.whose.running -= 1
            self._landed(ended, touched)
        self._start_large()
        end = time.monotonic() + _SLICE
        while self._small:
            small = self._small.popleft()
            if not small.dropped:
                small.begun = True
                copy(small)
                self._landed(small, touched)
                if small.size >= _PROMPT:
                    self._flush(small.whose)
                if time.monotonic() > end:
                    break
        for source in touched.values():
            if not source.gone:
                self._flush(source)
        return bool(touched)

    def close(self) -> None:
        """Drop everything, without reports; what is being copied is waited for."""
        self._watch.remove(self._copiers.fileno())
        self._copiers.close()
        for source in self._sources.values():
            source.link.close()
        for source in {*self._sources.values(), *(one.whose for one in self._copies.values())}:
            source.running = 0
            self._unmap(source)
        self._sources.clear()
        self._expected.clear()
        self._copies.clear()
        self._small.clear()
        self._large.clear()

    # ------------------------------------------------------------ offers

    def _ready(self, source: _Source) -> None:
        try:
            if source.window is None:
                self._greeted(source)
            else:
                for packet in source.link.packets():
                    for tag, offset, size in OFFER.iter_unpack(packet):
                        self._offered(source, source.window, tag, offset, size)
        except (LinkError, OSError, struct.error) as error:
            self._lose(source, str(error))
            return
        if source.link.rows:
            self._flush(source)

    def _greeted(self, source: _Source) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(source.link.sock, GREETING.size, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        try:
            magic, node, size = GREETING.unpack(packet)
            if magic != MAGIC or node != source.node or len(fds) != 1:
                raise LinkError(f"not node {source.node}")
            source.window = Window(fds[0], size, self._huge)
        finally:
            for fd in fds:
                os.close(fd)
        source.link.sock.send(READY)

    def _offered(self, source: _Source, window: Window, tag: int, offset: int, size: int) -> None:
        node, target, expected = self._expected.get(tag, (source.node, 0, -1))
        if node != source.node or not 0 < size <= window.size - offset:
            raise LinkError(f"node {source.node} offers what it cannot have")
        if expected >= 0:
            del self._expected[tag]
            if self._withdraw(tag):
                if size == expected:
                    self._wanted(_Copy(source, tag, window.address + offset, self._base + target, size))
                    return
                self._done.append(("received", node, tag, f"{size} bytes came, {expected} were expected"))
        self._acknowledge(source, tag, None)  # nobody wants it (any more)

    def _wanted(self, new: _Copy) -> None:
        self._copies[new.tag] = new
        (self._small if new.size <= self._inline else self._large).append(new)

    def _start_large(self) -> None:
        copiers = self._copiers
        while self._large and copiers.outstanding < copiers.most * _AHEAD:
            large = self._large.popleft()
            if not large.dropped:
                large.begun = True
                large.whose.running += 1
                copiers.start(large)

    def _landed(self, ended: _Copy, touched: dict[int, _Source]) -> None:
        """That its bytes are the right ones is certain once the acknowledgement is written: see `Offers._lose`."""
        del self._copies[ended.tag]
        source = ended.whose
        if source.gone:
            self._done.append(("received", source.node, ended.tag, source.gone))
            self._unmap(source)
        else:
            self._acknowledge(source, ended.tag, ("received", source.node, ended.tag, None))
            touched[source.node] = source

    # ------------------------------------------------------------ acknowledgements, ends

    def _acknowledge(self, source: _Source, tag: int, report: Report | None) -> None:
        source.link.rows.append((ACK.pack(tag), report))

    def _flush(self, source: _Source) -> None:
        try:
            source.link.flush(self._done)
        except OSError as error:
            self._lose(source, f"node {source.node} has closed the connection: {error}")

    def _lose(self, source: _Source, why: str) -> None:
        if source.gone:
            return
        source.gone = why
        source.link.close()
        del self._sources[source.node]
        node = source.node
        self._done += [("received", node, report[2], why) for _, report in source.link.rows if report is not None]
        for tag in [tag for tag, place in self._expected.items() if place[0] == node]:
            del self._expected[tag]  # who sends it now takes the other way
        for waiting in [one for one in self._copies.values() if one.whose is source and not one.begun]:
            del self._copies[waiting.tag]
            waiting.dropped = True
            self._done.append(("received", node, waiting.tag, why))
        self._unmap(source)

    def _unmap(self, source: _Source) -> None:
        if source.window is not None and not source.running:
            source.window.close()
            source.window = None
