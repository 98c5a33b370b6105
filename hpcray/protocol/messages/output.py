"""Messages about what workers print."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["FlushOutput", "OutputFlushed", "OutputLost", "OutputPrinted", "WorkerOutput"]


class WorkerOutput(Struct, array_like=True, tag=170):
    """r→driver: a worker of the driver's job has printed this. error: on standard error. last: the worker has ended.
    Answer, when it is printed: OutputPrinted."""

    worker: bytes
    pid: int
    ip: str
    error: bool
    data: bytes
    last: bool = False


class OutputPrinted(Struct, array_like=True, tag=171):
    """driver→r: so many bytes of WorkerOutput are printed; a raylet has only few on the way."""

    size: int


class FlushOutput(Struct, array_like=True, tag=172):
    """driver→every r: the driver ends; send all that its workers have printed so far. Answer, after it:
    OutputFlushed."""


class OutputFlushed(Struct, array_like=True, tag=173):
    """r→driver: the answer to FlushOutput."""


class OutputLost(Struct, array_like=True, tag=174):
    """w→r: what the worker prints cannot be written. No answer."""

    text: str
