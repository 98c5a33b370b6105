"""`--broadcast-env`: a directory read once per job, by rank 0, and copied to every node before its workers start.

Rank 0 packs it into a stream while the stream is already sent down a tree (`broadcast_relay`); each node keeps it in
an unnamed file until its children have it, and unpacks it into its session directory. All nodes continue together. The
raylet does not run yet, so this module has a small loop of its own over the control transport.
"""

from __future__ import annotations

import io
import json
import os
import queue
import socket
import stat
import struct
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hpcray.common.exceptions import StartupError
from hpcray.common.labels import Place
from hpcray.platform.direct_io import open_unnamed_file
from hpcray.platform.path_relocation import PathRelocation
from hpcray.runtime_env import broadcast_relay as tree
from hpcray.transport.base import Backoff, ControlTransport, PeerLost

# ------------------------------------------------------------ archive
# A directory as one tar stream: read once, several files at a time, and unpacked elsewhere.


_READER_THREADS = 8
_MAX_READS_AHEAD = 64  # files
_SMALL_FILE = 1 << 20  # bytes; larger files are streamed


def pack_directory(directory: str, write: Callable[[bytes], object]) -> int:
    """Write `directory` as a tar stream. On a slow file system latency dominates: small files are read several at a
    time, each of them once.

    Returns:
        How many files, directories and links it holds. Sockets, pipes and devices are left out.

    Raises:
        OSError: something in it cannot be read, or `write` raises it.
    """
    count = 0
    with (
        ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="hpcray-pack") as readers,
        io.BufferedWriter(_Sink(write), _SMALL_FILE) as sink,
        tarfile.open(fileobj=sink, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        ahead: deque[Future[tuple[tarfile.TarInfo | None, bytes | None, str]]] = deque()
        paths = _walk(directory)
        while True:
            while len(ahead) < _MAX_READS_AHEAD and (found := next(paths, None)) is not None:
                ahead.append(readers.submit(_load, *found))
            if not ahead:
                return count
            info, data, path = ahead.popleft().result()
            if info is None:
                continue
            count += 1
            if data is not None:
                tar.addfile(info, io.BytesIO(data))
            elif info.isreg():
                with open(path, "rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)


def unpack_directory(fd: int, directory: str, progress: Callable[[], object]) -> int:
    """Unpack such a stream into `directory`, which is made, 0700.

    Args:
        fd: a file that holds the stream.
        progress: called after every file.

    Returns:
        How many files, directories and links there were.

    Raises:
        OSError: there is no space, or a file cannot be written.
        tarfile.TarError: the stream is damaged, or would write outside of `directory`.
    """
    os.mkdir(directory, 0o700)
    count = 0
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r:", errorlevel=2) as tar:
        if hasattr(tarfile, "tar_filter"):
            tar.extraction_filter = tarfile.tar_filter
        for info in tar:
            tar.extract(info, directory, set_attrs=not info.isdir(), numeric_owner=True)
            count += 1
            progress()
    return count


def _walk(directory: str) -> Iterator[tuple[str, str]]:
    """Absolute path and name in the archive of everything below, directories before what is in them."""
    todo = [("", directory)]
    while todo:
        name, path = todo.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                inner = f"{name}/{entry.name}" if name else entry.name
                yield entry.path, inner
                if entry.is_dir(follow_symlinks=False):
                    todo.append((inner, entry.path))


def _load(path: str, name: str) -> tuple[tarfile.TarInfo | None, bytes | None, str]:
    state = os.lstat(path)
    info = tarfile.TarInfo(name)
    # Whole seconds are what a .pyc remembers of its source; fractions would cost a second header for each file.
    info.mode, info.mtime = stat.S_IMODE(state.st_mode), int(state.st_mtime)
    info.uid, info.gid = os.getuid(), os.getgid()
    if stat.S_ISLNK(state.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISDIR(state.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISREG(state.st_mode):
        info.size = state.st_size
        if state.st_size <= _SMALL_FILE:
            with open(path, "rb") as file:
                data = file.read()
            info.size = len(data)
            return info, data, path
    else:
        return None, None, path
    return info, None, path


class _Sink(io.RawIOBase):
    def __init__(self, write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._write = write
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._write(bytes(data))
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at


# ------------------------------------------------------------ env broadcast


DIRECTORY = "env"
CHUNK = 4 << 20
_HEAD, _CHUNK, _ACK, _END, _DONE, _GO, _FAIL, _UP, _DOWN, _ASK, _PLACES = range(11)
_INDEX = struct.Struct("<I")
_PROGRESS_INTERVAL = 1.0
_FLUSH_TIMEOUT = 2.0


def check_broadcast(path: str, command: Sequence[str]) -> list[str]:
    """Return the names of the directory of `--broadcast-env path`: as given, and without symbolic links.

    Args:
        path: as the user gave it.
        command: the driver's command line, the script first.

    Raises:
        StartupError: it is no directory, or this program would import nothing from it.
    """
    names = list(dict.fromkeys([os.path.abspath(path), os.path.realpath(path)]))
    if not os.path.isdir(path):
        raise StartupError(f"--broadcast-env {path}: no such directory on {socket.gethostname()}; hint: check the path")
    script = [os.path.dirname(os.path.abspath(command[0]))] if command and not command[0].startswith("-") else []
    used = [*script, sys.prefix, *(entry for entry in sys.path if entry)]
    probe = PathRelocation([(name, "") for name in names])
    if all(probe.copy(place) == place for place in used):
        raise StartupError(
            f"--broadcast-env {path}: no module would be imported from there; hint: give the virtual environment that "
            f"this Python runs in ({sys.prefix}), or a directory that is in PYTHONPATH or holds the script"
        )
    return names


def share(
    path: str,
    command: Sequence[str],
    control: ControlTransport | None,
    session_dir: str,
    timeout: float,
    place: Place = (),
) -> PathRelocation:
    """Copy a directory of rank 0 to all nodes. Collective; returns when every node has it.

    Args:
        path: the directory; only rank 0 reads it.
        command: the driver's command line, the script first.
        control: None for one node.
        session_dir: where the copy goes.
        timeout: seconds without any progress after which it fails.
        place: of this node in the network. Where rank 0 has one, all are asked for theirs first.

    Raises:
        StartupError: nothing would be imported from it; a node could not read, store or unpack it; or there was no
            progress. A partial copy is removed with the session directory.
    """
    sharing = _Sharing(control, session_dir, timeout, place)
    moved = sharing.run(path, command)
    sharing.close()  # not after a failure: a thread may still write to it, until this process ends
    return moved


class _Sharing:
    def __init__(self, control: ControlTransport | None, session_dir: str, timeout: float, place: Place) -> None:
        self._control = control
        self._rank, self._nodes = (control.rank, control.size) if control is not None else (0, 1)
        self._relay = tree.Relay(self._rank, tree.parent(self._rank), tree.children(self._rank, self._nodes))
        self._heights = tree.heights([0, *(tree.parent(rank) for rank in range(1, self._nodes))])
        self._place = place
        self._places: dict[int, Place] = {self._rank: place}
        self._unheard: set[int] = set()
        self._told = False
        self._names: list[str] = []
        self._copy = os.path.join(session_dir, DIRECTORY)
        self._timeout = timeout
        self._fd = open_unnamed_file(session_dir, direct=False)
        self._size = 0
        self._cut = 0
        self._moves = 0
        self._moves_seen = 0
        self._reported_by_rank0 = False
        self._finished: queue.SimpleQueue[Callable[[], Iterable[tree.Effect]]] = queue.SimpleQueue()
        self._moved_at = self._reported_at = time.monotonic()

    def run(self, path: str, command: Sequence[str]) -> PathRelocation:
        try:
            if self._rank == 0:
                self._begin(path, command)
            self._loop()
        except KeyboardInterrupt:
            self._fail("interrupted")
        if self._relay.failure:
            self._flush()
            raise StartupError(self._relay.failure, reported_by="rank0" if self._reported_by_rank0 else "self")
        return PathRelocation([(name, self._copy) for name in self._names])

    def close(self) -> None:
        os.close(self._fd)

    def _loop(self) -> None:
        backoff = Backoff()
        while not self._relay.over:
            if self._turn():
                backoff.touch()
            elif time.monotonic() - self._moved_at > self._patience():
                unheard = "nodes " + ", ".join(map(str, sorted(self._unheard)))
                waits_for = unheard if self._unheard else self._relay.waits_for()
                why = f"nothing moved for {self._timeout:g} s, waiting for {waits_for}"
                self._fail(f"{why}; hint: HPCRAY_START_TIMEOUT sets the time in seconds")
            else:
                time.sleep(max(backoff.delay(), 0.0005))

    def _patience(self) -> float:
        """Seconds without progress after which this node gives up.

        Who sends to a silent node can name it: those above wait for longer the higher they are, and those that have
        reported to them for longer still.
        """
        told = self._told or self._relay.waits_for_go()
        return self._timeout * (2 + 0.2 * self._heights[0] if told else 1 + 0.2 * self._heights[self._rank])

    def _begin(self, path: str, command: Sequence[str]) -> None:
        try:
            self._names = check_broadcast(path, command)
        except StartupError as error:
            self._do(self._relay.failed(str(error)))
            return
        if self._place and self._nodes > 1:
            self._ask_places()
        else:
            self._send_head([])

    def _send_head(self, parents: list[int]) -> None:
        """Begin at rank 0. parents: who sends to each rank; []: the tree is the one that all begin with."""
        self._follow(parents)
        self._send_all(_HEAD, json.dumps([self._names, parents]).encode())
        self._in_thread(self._pack, self._packed)

    def _follow(self, parents: list[int]) -> None:
        if parents:
            before = self._relay
            receivers = [rank for rank, sender in enumerate(parents) if rank and sender == self._rank]
            known = [*before.receivers, *([before.sender] if self._rank else [])]
            self._relay = tree.Relay(self._rank, parents[self._rank], receivers, known)
            self._heights = tree.heights(parents)

    def _ask_places(self) -> None:
        self._unheard = set(self._relay.receivers)
        self._send_all(_ASK, b"")
        self._answer_place()

    def _answer_place(self) -> None:
        """Report the places of this node and of those below it, as soon as all of these have reported theirs."""
        if self._unheard or self._relay.over:
            return
        if self._rank:
            self._told = True
            self._send(self._relay.sender, _PLACES, json.dumps([*self._places.items()]).encode())
        else:
            self._send_head(tree.near_parents([self._places[rank] for rank in range(self._nodes)]))

    # ------------------------------------------------------------ one turn

    def _turn(self) -> bool:
        moved = False
        if self._control is not None:
            for source, data in self._control.poll():
                moved = True
                self._message(source, data[0], bytes(data[1:]))
            for rank, why in self._control.lost():
                self._fail(f"node {rank} is lost: {why}")
        if self._moves != self._moves_seen:
            self._moves_seen, moved = self._moves, True
            self._report_progress()
        if self._rank == 0:
            self._cut_chunks(self._size // CHUNK)
        while not self._finished.empty():
            moved = True
            self._do(self._finished.get()())
        if moved:
            self._moved_at = time.monotonic()
        return moved

    def _message(self, source: int, kind: int, body: bytes) -> None:
        relay = self._relay
        if kind == _HEAD:
            self._names, parents = json.loads(body)
            self._told = False
            if not self._relay.over:
                self._follow(parents)
            self._send_all(_HEAD, body)
        elif kind == _ASK:
            self._ask_places()
        elif kind == _PLACES:
            self._places.update((rank, tuple(place)) for rank, place in json.loads(body))
            self._unheard.discard(source)
            self._answer_place()
        elif kind == _CHUNK:
            self._store(source, body)
        elif kind == _ACK:
            self._do(relay.acked(source))
        elif kind == _END:
            self._do(relay.ended(*_INDEX.unpack(body)))
        elif kind == _DONE:
            self._do(relay.done(source))
        elif kind == _GO:
            self._do(relay.go())
        elif kind == _FAIL:
            self._reported_by_rank0 |= not relay.over and self._rank != 0
            self._do(relay.failed(body.decode(), source))
        elif kind == _DOWN:
            self._send_all(_DOWN, b"")
        if kind != _DOWN:
            self._report_progress()

    def _do(self, effects: Iterable[tree.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, tree.Pass):
                data = os.pread(self._fd, CHUNK, effect.index * CHUNK)
                self._send(effect.dest, _CHUNK, _INDEX.pack(effect.index) + data)
            elif isinstance(effect, tree.End):
                self._send(effect.dest, _END, _INDEX.pack(effect.count))
            elif isinstance(effect, tree.Complete):
                self._in_thread(self._unpack, self._relay.used)
            elif isinstance(effect, tree.Fail):
                self._send(effect.dest, _FAIL, effect.reason.encode())
            else:
                self._send(effect.dest, _DONE if isinstance(effect, tree.Done) else _GO, b"")

    def _store(self, source: int, body: bytes) -> None:
        try:
            os.pwrite(self._fd, memoryview(body)[_INDEX.size :], _INDEX.unpack_from(body)[0] * CHUNK)
        except OSError as error:
            self._fail(f"cannot store what comes: {error}; hint: HPCRAY_TMPDIR with more room")
            return
        self._send(source, _ACK, b"")
        self._do(self._relay.stored())

    def _cut_chunks(self, count: int) -> None:
        while self._cut < count and not self._relay.over:
            self._cut += 1
            self._do(self._relay.stored())

    def _packed(self) -> Iterable[tree.Effect]:
        self._cut_chunks(-(-self._size // CHUNK))
        return self._relay.ended(self._cut)

    # ------------------------------------------------------------ sending

    def _send(self, dest: int, kind: int, body: bytes) -> None:
        assert self._control is not None
        try:
            self._control.send(dest, bytes([kind]) + body)
        except PeerLost as error:
            if kind != _FAIL:
                self._fail(str(error))

    def _send_all(self, kind: int, body: bytes) -> None:
        for child in self._relay.receivers:
            self._send(child, kind, body)

    def _report_progress(self) -> None:
        """Report progress to node 0 from time to time, which reports it to all nodes: they time out without."""
        now = time.monotonic()
        if now - self._reported_at > _PROGRESS_INTERVAL and not self._relay.over:
            self._reported_at = now
            if self._rank:
                self._send(self._relay.sender, _UP, b"")
            else:
                self._send_all(_DOWN, b"")

    def _fail(self, reason: str) -> None:
        self._do(self._relay.failed(self._with_node(reason)))

    def _with_node(self, reason: str) -> str:
        return f"--broadcast-env: node {self._rank} on {socket.gethostname()}: {reason}"

    def _flush(self) -> None:
        deadline = time.monotonic() + _FLUSH_TIMEOUT
        while self._control is not None and self._control.pending() and time.monotonic() < deadline:
            self._control.poll()
            time.sleep(0.001)

    # ------------------------------------------------------------ in a thread

    def _in_thread(self, work: Callable[[], object], then: Callable[[], Iterable[tree.Effect]]) -> None:
        threading.Thread(target=self._work, args=(work, then), name="hpcray-broadcast", daemon=True).start()

    def _work(self, work: Callable[[], object], then: Callable[[], Iterable[tree.Effect]]) -> None:
        try:
            work()
        except (OSError, tarfile.TarError) as error:
            reason = self._with_node(f"{type(error).__name__}: {error}")
            self._finished.put(lambda: self._relay.failed(reason))
        else:
            self._finished.put(then)

    def _pack(self) -> None:
        pack_directory(self._names[0], self._append)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, self._size)
            self._size += done
            view = view[done:]
        self._moves += 1

    def _unpack(self) -> None:
        unpack_directory(self._fd, self._copy, self._progressed)

    def _progressed(self) -> None:
        self._moves += 1
