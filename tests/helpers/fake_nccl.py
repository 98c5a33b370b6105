"""An NCCL without GPUs: ranks exchange files, their "device" is the memory of the host.

It notes in the file `misuse` of its directory what NCCL does not forgive: operations that differ between ranks, calls
of a communicator that was given up or is still being made. An operation whose peers do not come for a while stays under
way.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpcray.tensors import nccl_library
from hpcray.tensors.nccl_library import DATA_TYPES, IN_PROGRESS, SUCCESS

_PATIENCE = 0.5
"""Seconds after which an operation is taken for one that hangs."""
_TYPES = {code: getattr(torch, name) for name, code in DATA_TYPES.items() if name != "bool"}
_REDUCE: dict[int, Callable[[Any], Any]] = {
    nccl_library.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    nccl_library.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
    nccl_library.MIN: lambda rows: rows.amin(0),
    nccl_library.MAX: lambda rows: rows.amax(0),
    nccl_library.AVERAGE: lambda rows: (rows.sum(0) / len(rows)).to(rows.dtype),
}
_STOPPED = 6  # ncclRemoteError


class Comm:
    """A communicator of one rank."""

    def __init__(self, place: Path, size: int, rank: int) -> None:
        self.place, self.size, self.rank = place, size, rank
        self.count = 0
        self.messages: dict[tuple[str, int, int], int] = {}
        self.alive = True


class FakeNccl:
    """NCCL of one process.

    Args:
        directory: of all processes.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.hung = 0
        """Operations that are under way and will not end."""
        self.group: list[tuple[str, Any, tuple[int, ...]]] | None = None
        self.live: list[Comm] = []

    def new_id(self) -> bytes:
        return os.urandom(64).hex().encode()

    def init(self, size: int, rank: int, ident: bytes) -> tuple[Comm, int]:
        comm = Comm(self.directory / ident.decode()[:32], size, rank)
        comm.place.mkdir(exist_ok=True)
        (comm.place / f"rank-{rank}").touch()
        self.live.append(comm)
        return comm, IN_PROGRESS

    def state(self, comm: Comm) -> int:
        if (comm.place / "failed").exists():
            return _STOPPED
        ready = len(list(comm.place.glob("rank-*"))) == comm.size
        return SUCCESS if ready else IN_PROGRESS

    def error_text(self, code: int) -> str:
        return {_STOPPED: "remote process exited or there was a network error"}.get(code, f"code {code}")

    def destroy(self, comm: Comm) -> int:
        if self.hung:
            self.misuse("a communicator was destroyed while an operation is under way")
        self._end(comm)
        return SUCCESS

    def abort(self, comm: Comm) -> None:
        self.hung = 0
        self._end(comm)

    def _end(self, comm: Comm) -> None:
        if not comm.alive:
            self.misuse("a communicator was given up twice")
        comm.alive = False
        self.live.remove(comm)

    def misuse(self, text: str) -> None:
        """Note what NCCL does not forgive."""
        with (self.directory / "misuse").open("a", encoding="utf-8") as file:
            file.write(f"process {os.getpid()}: {text}\n")

    def group_start(self) -> int:
        if self.group is not None:
            self.misuse("a group in a group")
        self.group = []
        return SUCCESS

    def group_end(self) -> int:
        calls, self.group = self.group or [], None
        for sends in (True, False):
            for name, comm, args in calls:
                if (name == "Send") == sends:
                    self._execute(name, comm, args)
        return SUCCESS

    def call(self, name: str, comm: Comm, stream: int, *args: int) -> int:
        if stream != FakeStreams.HANDLE:
            self.misuse(f"{name} in stream {stream}")
        if not comm.alive or self.state(comm) == IN_PROGRESS:
            self.misuse(f"{name} of a communicator that is not there")
        if self.group is not None:
            self.group.append((name, comm, args))
        else:
            self._execute(name, comm, args)
        return SUCCESS

    def _execute(self, name: str, comm: Comm, args: tuple[int, ...]) -> None:
        if self.hung:
            self.hung += 1  # the stream waits for what came before
            return
        if name == "Send":
            pointer, count, kind, peer = args
            self._write(self._message(comm, "sent", comm.rank, peer), _tensor(pointer, count, kind))
            return
        if name == "Recv":
            pointer, count, kind, peer = args
            found = self._read(self._message(comm, "received", peer, comm.rank))
            if found is not None:
                _tensor(pointer, count, kind).copy_(found)
            return
        comm.count += 1
        place = comm.place / f"{comm.count}"
        place.mkdir(exist_ok=True)
        (place / f"call-{name}-{'-'.join(map(str, args[2:]))}").touch()
        source, target, count, kind, *rest = args
        whole = count * comm.size if name == "ReduceScatter" else count
        self._write(place / f"from-{comm.rank}", _tensor(source, whole, kind))
        rows = [self._read(place / f"from-{rank}") for rank in range(comm.size)]
        if None in [row if row is None else 0 for row in rows]:
            return
        if len(list(place.glob("call-*"))) > 1:
            self.misuse(f"the ranks call {sorted(path.name for path in place.glob('call-*'))}")
            return
        stacked = torch.stack([row for row in rows if row is not None])
        if name == "AllReduce" or (name == "Reduce" and comm.rank == rest[1]):
            _tensor(target, count, kind).copy_(_REDUCE[rest[0]](stacked))
        elif name == "Broadcast":
            _tensor(target, count, kind).copy_(stacked[rest[0]])
        elif name == "AllGather":
            _tensor(target, count * comm.size, kind).copy_(stacked.reshape(-1))
        elif name == "ReduceScatter":
            own = _REDUCE[rest[0]](stacked)[comm.rank * count : (comm.rank + 1) * count]
            _tensor(target, count, kind).copy_(own)

    def _message(self, comm: Comm, what: str, source: int, to: int) -> Path:
        number = comm.messages[what, source, to] = comm.messages.get((what, source, to), 0) + 1
        return comm.place / f"message-{source}-{to}-{number}"

    def _write(self, path: Path, tensor: Any) -> None:
        made = path.with_name(path.name + f".{os.getpid()}.new")
        torch.save(tensor.clone(), made)
        made.rename(path)

    def _read(self, path: Path) -> Any:
        deadline = time.monotonic() + _PATIENCE
        while not path.exists():
            if time.monotonic() > deadline:
                self.hung += 1
                return None
            time.sleep(0.001)
        return torch.load(path)


class FakeStreams:
    """Streams of one process."""

    HANDLE = 77

    def __init__(self, library: FakeNccl) -> None:
        self._library = library

    def device(self) -> str:
        return "cpu"

    def current(self) -> int:
        return self.HANDLE

    def mark(self) -> Callable[[], bool]:
        hung = self._library.hung
        return lambda: not hung

    def synchronize(self) -> None:
        deadline = time.monotonic() + 30
        while self._library.hung and time.monotonic() < deadline:
            time.sleep(0.01)


def _tensor(pointer: int, count: int, kind: int) -> Any:
    """Memory at an address."""
    dtype = _TYPES[kind]
    if not count:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype)
