"""NCCL by ctypes, without PyTorch's process groups: the library that PyTorch's wheel brings along, or the system's.

No GPU has run it yet. Source: NCCL's `nccl.h`, 2.14 and later (communicators that do not block).
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

SUCCESS, IN_PROGRESS = 0, 7
_ID_BYTES = 128
_VERSION = 21400
_MAGIC = 0xCAFEBEEF
DATA_TYPES = {
    "int8": 0, "uint8": 1, "bool": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11,
}  # fmt: skip
"""ncclDataType_t by the names of PyTorch's dtypes."""
SUM, PRODUCT, MAX, MIN, AVERAGE = range(5)
"""ncclRedOp_t."""


class NcclError(Exception):
    """NCCL, or what is to be NCCL, refuses."""


class Nccl(Protocol):
    """The part of NCCL that groups use, on the current device of this process.

    Pointers are of memory of the device, sizes in elements, types those of DATA_TYPES; streams are CUDA's handles.
    Calls return a code: SUCCESS, IN_PROGRESS (`state` says when it is over), or that of an error.
    """

    def new_id(self) -> bytes:
        """Return an id, by which the ranks of a communicator find each other. Raises NcclError."""

    def init(self, size: int, rank: int, ident: bytes) -> tuple[Any, int]:
        """Begin to make a communicator; returns it, and a code."""

    def state(self, comm: Any) -> int:
        """Return a code: what the last call came to, or what has gone wrong since."""

    def error_text(self, code: int) -> str:
        """Return what a code means."""

    def destroy(self, comm: Any) -> int:
        """Give a communicator up when its operations have ended."""

    def abort(self, comm: Any) -> None:
        """Give a communicator up at once: operations under way end, with nothing in their tensors to rely on."""

    def group_start(self) -> int:
        """Begin a group of calls, which run together."""

    def group_end(self) -> int:
        """End a group of calls."""

    def call(self, name: str, comm: Any, stream: int, *args: int) -> int:
        """Queue the operation `name` as work of a stream; `args` are those that NCCL's has before the communicator."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14; later ones take the rest from their defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_ARGUMENTS = {
    "AllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT),
    "Reduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT),
    "Broadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT),
    "AllGather": (_POINTER, _POINTER, _SIZE, _INT),
    "ReduceScatter": (_POINTER, _POINTER, _SIZE, _INT, _INT),
    "Send": (_POINTER, _SIZE, _INT, _INT),
    "Recv": (_POINTER, _SIZE, _INT, _INT),
}
"""Types of the arguments of ncclAllReduce etc. before the communicator and the stream."""


def _library_paths() -> Iterator[str]:
    yield "libnccl.so.2"  # the one that PyTorch has loaded, or the system's
    # Of the wheel nvidia-nccl-cu12 or -cu13, on which PyTorch's depends.
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        yield from map(str, sorted(Path(place).glob("*/lib/libnccl.so*")))


class NcclLibrary:
    """NCCL itself.

    Raises:
        NcclError: it is not there, or too old.
    """

    def __init__(self) -> None:
        problem = "libnccl.so.2 was not found"
        for path in _library_paths():
            try:
                self._nccl: Any = ctypes.CDLL(path)
                break
            except OSError as error:
                problem = str(error)
        else:
            raise NcclError(f"{problem}; hint: PyTorch's wheels for CUDA bring NCCL along")
        if not hasattr(self._nccl, "ncclCommInitRankConfig"):
            raise NcclError("this NCCL is older than 2.14")
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p

    def new_id(self) -> bytes:
        ident = _Id()
        code = self._nccl.ncclGetUniqueId(ctypes.byref(ident))
        if code:
            raise NcclError(f"ncclGetUniqueId: {self.error_text(code)}")
        return ctypes.string_at(ctypes.byref(ident), _ID_BYTES)

    def init(self, size: int, rank: int, ident: bytes) -> tuple[Any, int]:
        comm = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _VERSION, 0)
        code = self._nccl.ncclCommInitRankConfig(
            ctypes.byref(comm), _INT(size), _Id.from_buffer_copy(ident), _INT(rank), ctypes.byref(config)
        )
        return comm, int(code)

    def state(self, comm: Any) -> int:
        found = ctypes.c_int()
        code = self._nccl.ncclCommGetAsyncError(comm, ctypes.byref(found))
        return int(code or found.value)

    def error_text(self, code: int) -> str:
        text = self._nccl.ncclGetErrorString(_INT(code))
        return (text or b"").decode(errors="replace") or f"NCCL error {code}"

    def destroy(self, comm: Any) -> int:
        return int(self._nccl.ncclCommDestroy(comm))

    def abort(self, comm: Any) -> None:
        self._nccl.ncclCommAbort(comm)

    def group_start(self) -> int:
        return int(self._nccl.ncclGroupStart())

    def group_end(self) -> int:
        return int(self._nccl.ncclGroupEnd())

    def call(self, name: str, comm: Any, stream: int, *args: int) -> int:
        function = getattr(self._nccl, f"nccl{name}")
        typed = [kind(value) for kind, value in zip(_ARGUMENTS[name], args, strict=True)]
        return int(function(*typed, comm, ctypes.c_void_p(stream)))
