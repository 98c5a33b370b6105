"""Identifiers: short byte strings that contain the process that made them.

Layout (big endian)::

    proc id    8 B   node index u16 | process number u32 | run u16
    task id   13 B   proc id of the submitter | counter u40
    object id 16 B   task id | index u24      (index 0: a put; 1..: the returns of the task; the last: tensors)
    actor id  13 B   the task id of the actor's creation

The run is the number of the job's run: of a requeued job how often it was requeued, of a job that goes on from a
journal one more than in the run before, else a random one (`first_run`). So ids that a program keeps, in a pickle, mean
nothing in another run. Raylets have run 0 in every run: their ids are made from the node index alone.

The owner of an object is the process that made its id, so an id alone is enough to find the owner: a reference
travels as 16 bytes. Process number 0 of a node is its raylet; one of these hosts the GCS, node 0's at first.
"""

from __future__ import annotations

import struct
import zlib

PROC_BYTES = 8
TASK_BYTES = 13
OBJECT_BYTES = 16

_PROC = struct.Struct(">HIH")

RUN_MASK = 0xFFFF
_FIRST_RUNS = 0x8000  # set in the number of a job's first run: no requeued job counts as far
PUT_INDEX = b"\0\0\0"
FIRST_RETURN = b"\0\0\1"
RESIDENT_INDEX = b"\xff\xff\xff"
"""Index of a resident object: a part of a value that stays in the process that made it, such as tensors on a device.

The value refers to it, so that it lives as long; where its process dies, the value is made again."""
NIL_PROC = b"\xff" * PROC_BYTES


class Ident(bytes):
    """Base class of the ids that programs see: bytes with the accessors of Ray's ids."""

    __slots__ = ()

    def binary(self) -> bytes:
        """Return the id as plain bytes."""
        return bytes(self)

    def is_nil(self) -> bool:
        """Return True for the nil id and the empty id."""
        return not self or self == b"\xff" * len(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hex()})"

    __str__ = __repr__


class TaskID(Ident):
    """Id of a task."""

    __slots__ = ()


class ActorID(Ident):
    """Id of an actor."""

    __slots__ = ()


class JobID(Ident):
    """Id of a job."""

    __slots__ = ()


def make_proc(node: int, number: int, run: int = 0) -> bytes:
    """Id of process `number` on node `node`, in the job's run number `run` (its low 16 bits count)."""
    return _PROC.pack(node, number, run & RUN_MASK)


def job_id_of(number: int) -> str:
    """Return the id of the job with this number, in hex."""
    return number.to_bytes(4, "little").hex()


def first_run(session: str) -> int:
    """Return the number of a job's first run: 15 bits of the session's name, which is random."""
    return _FIRST_RUNS | (zlib.crc32(session.encode()) & ~_FIRST_RUNS & RUN_MASK)


def run_of(ident: bytes) -> int:
    """Return the run in a proc, task, actor or object id."""
    run: int = _PROC.unpack_from(ident)[2]
    return run


def raylet_of(node: int) -> bytes:
    """Return the proc id of the raylet of a node."""
    return _PROC.pack(node, 0, 0)


HEAD = raylet_of(0xFFFE)
"""Address of the GCS. Routers map it to the raylet that hosts the GCS, whose id its own messages have as source."""


def node_of(ident: bytes) -> int:
    """Return the node index in a proc, task, actor or object id."""
    return (ident[0] << 8) | ident[1]


def number_of(proc: bytes) -> int:
    """Return the process number in a proc, task, actor or object id."""
    number: int = _PROC.unpack_from(proc)[1]
    return number


def owner_of(ident: bytes) -> bytes:
    """Return the owner of a task, actor or object: the process that made its id."""
    return ident[:PROC_BYTES]


def task_of(object_id: bytes) -> bytes:
    """Return the id of the task that returned or put an object."""
    return object_id[:TASK_BYTES]


def return_index(index: int) -> bytes:
    """Return the 3-byte suffix of a task's return number `index`, from 0."""
    return (index + 1).to_bytes(3, "big")


def show_proc(proc: bytes) -> str:
    """Format a proc id as `raylet 2`, `process 2.17` (node and process number), or `the head`."""
    if proc == HEAD:
        return "the head"
    node, number, _ = _PROC.unpack_from(proc)
    return f"raylet {node}" if number == 0 else f"process {node}.{number}"
