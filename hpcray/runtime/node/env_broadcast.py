"""`--broadcast-env`: a directory read once per job, by rank 0, and copied to every node before its workers start.

Rank 0 packs it into a stream while the stream is already sent down a tree (`core/broadcast.py`); each node keeps it in
an unnamed file until its children have it, and unpacks it into its session directory. All nodes continue together. The
raylet does not run yet, so this module has a small loop of its own over the control transport.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from hpcray.common.exceptions import StartupError
from hpcray.core import broadcast as tree
from hpcray.platform.archive import pack_directory, unpack_directory
from hpcray.platform.direct_io import open_unnamed_file
from hpcray.platform.path_relocation import PathRelocation
from hpcray.transport.base import Backoff, ControlTransport, PeerLost

DIRECTORY = "env"
CHUNK = 4 << 20
_HEAD, _CHUNK, _ACK, _END, _DONE, _GO, _FAIL, _UP, _DOWN = range(9)
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
    path: str, command: Sequence[str], control: ControlTransport | None, session_dir: str, timeout: float
) -> PathRelocation:
    """Copy a directory of rank 0 to all nodes. Collective; returns when every node has it.

    Args:
        path: the directory; only rank 0 reads it.
        command: the driver's command line, the script first.
        control: None for one node.
        session_dir: where the copy goes.
        timeout: seconds without any progress after which it fails.

    Raises:
        StartupError: nothing would be imported from it; a node could not read, store or unpack it; or there was no
            progress. A partial copy is removed with the session directory.
    """
    sharing = _Sharing(control, session_dir, timeout)
    moved = sharing.run(path, command)
    sharing.close()  # not after a failure: a thread may still write to it, until this process ends
    return moved


class _Sharing:
    def __init__(self, control: ControlTransport | None, session_dir: str, timeout: float) -> None:
        self._control = control
        self._rank, size = (control.rank, control.size) if control is not None else (0, 1)
        self._relay = tree.Relay(self._rank, size)
        self._children = tree.children(self._rank, size)
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
            moved = self._turn()
            if moved:
                backoff.touch()
            elif time.monotonic() - self._moved_at > self._timeout:
                why = f"nothing moved for {self._timeout:g} s, waiting for {self._relay.waits_for()}"
                self._fail(f"{why}; hint: HPCRAY_START_TIMEOUT sets the time in seconds")
            else:
                time.sleep(max(backoff.delay(), 0.0005))

    def _begin(self, path: str, command: Sequence[str]) -> None:
        try:
            self._names = check_broadcast(path, command)
        except StartupError as error:
            self._do(self._relay.failed(str(error)))
            return
        self._send_all(_HEAD, json.dumps(self._names).encode())
        self._in_thread(self._pack, self._packed)

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
            self._names = json.loads(body)
            self._send_all(_HEAD, body)
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
            self._reported_by_rank0 = not relay.over and self._rank != 0
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
        for child in self._children:
            self._send(child, kind, body)

    def _report_progress(self) -> None:
        """Report progress to node 0 from time to time, which reports it to all nodes: they time out without."""
        now = time.monotonic()
        if now - self._reported_at > _PROGRESS_INTERVAL and not self._relay.over:
            self._reported_at = now
            if self._rank:
                self._send(tree.parent(self._rank), _UP, b"")
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
