"""The PMIx server of MPI ranks on one host, in this process: what Open MPI's mpirun is to its ranks, without its ports.

Ranks of Open MPI find each other through a PMIx server, which they reach over TCP on the loopback interface. PMIx takes
the uid that a TCP peer claims for the peer's own, and mpirun starts programs for every process that connects: any other
user of the host could run programs as the job's user. The server here is the PMIx library that belongs to the MPI
library, with these differences:

- Every connection is accepted by this module, which asks the kernel whose process is at the other end. The library
  gets only those of this user, through a socket in a private directory. So a stranger's connection costs one look at
  the kernel's table, whether or not it says something.
- The port is closed as soon as all ranks have connected.
- It starts no programs and takes no tools: nothing in it would answer such a request.

The structures are those of the PMIx standard, whose versions 4 and 5 share them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hpcray.launch.tcp_peers import is_own_connection
from hpcray.platform.mpi_directory import NAME, TESTED, installation_of, memory_settings

_POLL = "EVENT_NOEPOLL"
"""Variable of libevent: descriptors are polled by their numbers, so that another socket can take a number's place."""
_SUCCESS = 0
_DONE = -157  # PMIX_OPERATION_SUCCEEDED: no callback follows
_STRING, _UINT16, _UINT32, _INFO, _ARRAY, _RANK, _REGEX = 3, 13, 14, 24, 39, 40, 49
_CALLBACKS = 40  # more than the structure has in any version; those that we lack are NULL
_CHUNK = 1 << 16
_ACCEPT_PAUSE = 0.01  # seconds
_BACKLOG = 1024
_STACK = 256 << 10


class PmixError(Exception):
    """The library does not work as a server here; the message says why."""


class _Data(ctypes.Union):
    _fields_ = [
        ("pointer", ctypes.c_void_p),
        ("uint32", ctypes.c_uint32),
        ("uint16", ctypes.c_uint16),
        ("room", ctypes.c_char * 24),
    ]


class _Value(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("data", _Data)]


class _Info(ctypes.Structure):
    _fields_ = [("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value)]


class _DataArray(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("size", ctypes.c_size_t), ("array", ctypes.c_void_p)]


class _Proc(ctypes.Structure):
    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


_Pointer, _Size, _Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_Completed = ctypes.CFUNCTYPE(None, _Int, _Pointer)
_ClientCallback = ctypes.CFUNCTYPE(_Int, ctypes.POINTER(_Proc), _Pointer, _Pointer, _Pointer)
_AbortCallback = ctypes.CFUNCTYPE(
    _Int, ctypes.POINTER(_Proc), _Pointer, _Int, ctypes.c_char_p, _Pointer, _Size, _Pointer, _Pointer
)
_FenceCallback = ctypes.CFUNCTYPE(_Int, _Pointer, _Size, _Pointer, _Size, _Pointer, _Size, _Pointer, _Pointer)
_ModexDone = ctypes.CFUNCTYPE(None, _Int, _Pointer, _Size, _Pointer, _Pointer, _Pointer)


class PmixServer:
    """Serves the ranks of one MPI world, all on this host. One per process.

    Args:
        library: path of the PMIx library.
        ranks: number of ranks.
        directory: a private directory for the server's files.
        on_abort: called, in a thread of the library, when a rank calls MPI_Abort, with its rank and the code.

    Raises:
        PmixError: the library is missing, of another version, or refuses to work.
    """

    def __init__(self, library: str, ranks: int, directory: str, on_abort: Callable[[int, int], None]) -> None:
        self._ranks = ranks
        self._on_abort = on_abort
        self._kept: list[Any] = []  # what the library has pointers to
        self._missing = set(range(ranks))
        self._namespace = f"hpcray-{os.urandom(8).hex()}".encode()
        self._directory = directory
        self._prefix = installation_of(library)
        self._gate = os.path.join(directory, "pmix")
        self._door: socket.socket | None = None
        self._closing = threading.Lock()
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise PmixError(f"{library} cannot be loaded: {error}") from None
        self._check_version()
        before = _listening()
        os.environ.update({_POLL: "1", "TMPDIR": directory})  # this process starts ranks with other variables
        if not os.environ.get("HOME"):  # the library crashes where the system does not know the user either
            os.environ["HOME"] = home if os.path.isabs(home := os.path.expanduser("~")) else "/"
        self._start(directory)
        for fd, listener in _listening().items():
            if fd not in before:
                self._take_over(fd, listener)
        self._register(socket.gethostname())

    def environ(self, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables by which a process becomes this rank, and has MPI make its files in the server's directory.

        Args:
            rank: which one.
            environ: the environment that they are added to.
        """
        proc, found = _Proc(self._namespace, rank), ctypes.POINTER(ctypes.c_char_p)()
        _check(self._library.PMIx_server_setup_fork(ctypes.byref(proc), ctypes.byref(found)), "PMIx_server_setup_fork")
        variables: dict[str, str] = {}
        index = 0
        while (entry := found[index]) is not None:
            name, _, text = os.fsdecode(entry).partition("=")
            variables[name] = text
            index += 1
        size = str(self._ranks)
        variables.update(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=size)
        variables.update(OMPI_COMM_WORLD_LOCAL_RANK=str(rank), OMPI_COMM_WORLD_LOCAL_SIZE=size)
        variables.update(OMPI_COMM_WORLD_NODE_RANK=str(rank), OMPI_UNIVERSE_SIZE=size)
        return {**variables, **memory_settings(self._directory, environ, self._prefix)}

    def close_port(self) -> None:
        """Take no connection any more. May be called twice."""
        with self._closing:
            door, self._door = self._door, None
        if door is not None:
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            door.close()
            with contextlib.suppress(OSError):
                os.unlink(self._gate)

    # ------------------------------------------------------------ the library

    def _check_version(self) -> None:
        version = self._library.PMIx_Get_version
        version.restype = ctypes.c_char_p
        text = version().decode(errors="replace")  # "OpenPMIx 5.0.11rc1 (PMIx Standard: 5.1, …)"
        major = text.removeprefix(NAME.decode()).partition(".")[0]
        if not major.isdecimal() or int(major) not in TESTED:
            raise PmixError(f"its PMIx library says {text!r}, and only version {TESTED[0]} is known to work")

    def _start(self, directory: str) -> None:
        callbacks = (
            _ClientCallback(self._connected),
            _ClientCallback(lambda proc, peer, then, data: _DONE),  # PMIx_Finalize
            _AbortCallback(self._abort),
            _FenceCallback(self._fence),
        )
        module = (_Pointer * _CALLBACKS)()
        for index, callback in enumerate(callbacks):
            module[index] = ctypes.cast(callback, _Pointer)
        places = self._infos([self._text("pmix.srvr.tmpdir", directory), self._text("pmix.sys.tmpdir", directory)])
        self._kept += [callbacks, module]
        _check(self._library.PMIx_server_init(ctypes.byref(module), places, _Size(len(places))), "PMIx_server_init")

    def _register(self, host: str) -> None:
        ranks = range(self._ranks)
        listed = ",".join(map(str, ranks))
        size = self._ranks
        here = [self._text("pmix.lpeers", listed), self._number("pmix.local.size", size)]
        job = [
            self._text("pmix.nmap", f"raw:{host}", _REGEX),
            self._text("pmix.pmap", f"raw:{listed}", _REGEX),
            self._text("pmix.jobid", self._namespace.decode()),
            self._text("pmix.nsdir", os.path.dirname(self._gate)),
            self._text("pmix.tmpdir", os.path.dirname(self._gate)),
            *(self._number(f"pmix.{key}.size", size) for key in ("job", "univ", "max")),
            self._number("pmix.job.napps", 1),
            self._number("pmix.num.nodes", 1),
            self._number("pmix.lldr", 0, _RANK),
            *here,
        ]
        node = [
            self._text("pmix.hname", host),
            self._number("pmix.nodeid", 0),
            self._number("pmix.node.size", size),
            *here,
        ]
        rows = [self._array("pmix.job.arr", job), self._array("pmix.node.arr", node)]
        for rank in ranks:
            keys = ("pmix.rank", "pmix.grank", "pmix.apprank")
            about = [self._number(key, rank, _RANK) for key in keys]
            about += [self._number(key, rank, _UINT16) for key in ("pmix.lrank", "pmix.nrank")]
            about += [self._number(key, 0) for key in ("pmix.appnum", "pmix.nodeid")]
            rows.append(self._array("pmix.pdata", [*about, self._text("pmix.hname", host)]))
        infos, library = self._infos(rows), self._library
        self._call(
            "PMIx_server_register_nspace",
            lambda then: library.PMIx_server_register_nspace(
                self._namespace, size, infos, _Size(len(infos)), then, None
            ),
        )
        for rank in ranks:
            self._register_client(_Proc(self._namespace, rank))

    def _register_client(self, proc: _Proc) -> None:
        register = self._library.PMIx_server_register_client
        self._call(
            "PMIx_server_register_client",
            lambda then: register(ctypes.byref(proc), os.getuid(), os.getgid(), None, then, None),
        )

    def _call(self, name: str, function: Callable[[Any], int]) -> None:
        """Call a function of the library that reports its end to a callback, and wait for that."""
        ended, status = threading.Event(), [_SUCCESS]

        def completed(code: int, _: object) -> None:
            status[0] = code
            ended.set()

        then = _Completed(completed)
        self._kept.append(then)
        code = function(then)
        if code == _SUCCESS:
            ended.wait()
            code = status[0]
        _check(code, name)

    def _connected(self, proc: Any, peer: int, then: int, data: int) -> int:
        self._missing.discard(proc.contents.rank)
        if not self._missing:
            self.close_port()
        return _DONE

    def _abort(self, proc: Any, peer: int, code: int, text: bytes, procs: int, count: int, then: int, data: int) -> int:
        self._on_abort(proc.contents.rank, code)
        return _DONE

    def _fence(
        self, procs: int, count: int, infos: int, length: int, blob: int, size: int, then: int, data: int
    ) -> int:
        _ModexDone(then)(_SUCCESS, blob, size, data, None, None)  # all ranks are here: there is nothing to add
        return _SUCCESS

    # ------------------------------------------------------------ values

    def _text(self, key: str, text: str, kind: int = _STRING) -> _Info:
        room = ctypes.create_string_buffer(os.fsencode(text))
        self._kept.append(room)
        found = _Info(key.encode())
        found.value.type = kind
        found.value.data.pointer = ctypes.addressof(room)
        return found

    def _number(self, key: str, number: int, kind: int = _UINT32) -> _Info:
        found = _Info(key.encode())
        found.value.type = kind
        if kind == _UINT16:
            found.value.data.uint16 = number
        else:
            found.value.data.uint32 = number
        return found

    def _array(self, key: str, rows: Sequence[_Info]) -> _Info:
        infos = self._infos(rows)
        array = _DataArray(_INFO, len(rows), ctypes.addressof(infos))
        self._kept.append(array)
        found = _Info(key.encode())
        found.value.type = _ARRAY
        found.value.data.pointer = ctypes.addressof(array)
        return found

    def _infos(self, rows: Sequence[_Info]) -> ctypes.Array[_Info]:
        found = (_Info * len(rows))(*rows)
        self._kept.append(found)
        return found

    # ------------------------------------------------------------ the port

    def _take_over(self, fd: int, door: socket.socket) -> None:
        """Accept in the library's place. It goes on with another socket under the number of its own."""
        with socket.socket(socket.AF_UNIX) as gate:
            gate.bind(self._gate)
            gate.listen(_BACKLOG)
            gate.setblocking(False)
            os.dup2(gate.fileno(), fd, inheritable=False)
        door.setblocking(True)
        # Who has been as quick as the library itself sees an end: the job's ranks do not exist yet.
        for other in _connected_over_tcp():
            with other, contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
        self._door = door
        previous = threading.stack_size(_STACK)
        threading.Thread(target=self._accept, args=(door,), name="hpcray-pmix", daemon=True).start()
        threading.stack_size(previous)

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                peer, _ = door.accept()
            except OSError:
                if self._door is None:
                    return
                time.sleep(_ACCEPT_PAUSE)  # there is no descriptor for it
                continue
            inner = socket.socket(socket.AF_UNIX)
            try:
                if not is_own_connection(peer):
                    raise ConnectionRefusedError
                inner.connect(self._gate)
            except OSError:
                peer.close()
                inner.close()
                continue
            for source, sink in ((peer, inner), (inner, peer)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _listening() -> dict[int, socket.socket]:
    """Copies of the TCP sockets on which this process listens, by descriptor."""
    return {fd: one for fd, one in _tcp_sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _connected_over_tcp() -> list[socket.socket]:
    """Copies of the TCP sockets of this process that have a peer."""
    return [one for _, one in _tcp_sockets() if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    copies: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) not in copies and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                one = socket.socket(fileno=os.dup(int(name)))
                copies.add(one.fileno())  # it may have the number that the listing had
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield int(name), one
                else:
                    one.close()
        except OSError:
            continue  # closed meanwhile, as the descriptor of the listing itself


def _check(code: int, name: str) -> None:
    if code not in (_SUCCESS, _DONE):
        raise PmixError(f"{name} failed with code {code}")
