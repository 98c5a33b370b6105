"""Identifiers: short byte strings that say who made them.

Layout (big endian)::

    proc id    8 B   node index u16 | process number u32 | incarnation u16
    task id   13 B   proc id of the submitter | counter u40
    object id 16 B   task id | index u24      (index 0: a put; 1..: the returns of the task)
    actor id  13 B   the task id of the actor's creation

The owner of an object is the process that made its id, so an id alone is enough to find the owner: a reference
travels as 16 bytes. Process number 0 of a node is its raylet; one of these hosts the GCS, node 0's at first.
"""

from __future__ import annotations

import struct

PROC_BYTES = 8
TASK_BYTES = 13
OBJECT_BYTES = 16

_PROC = struct.Struct(">HIH")

PUT_INDEX = b"\0\0\0"
FIRST_RETURN = b"\0\0\1"
NIL_PROC = b"\xff" * PROC_BYTES


class Ident(bytes):
    """An id as programs see it: bytes, with the accessors of Ray's ids."""

    __slots__ = ()

    def binary(self) -> bytes:
        """The id as bytes."""
        return bytes(self)

    def is_nil(self) -> bool:
        """Whether it names nothing."""
        return not self or self == b"\xff" * len(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hex()})"

    __str__ = __repr__


class TaskID(Ident):
    """A task's id."""

    __slots__ = ()


class ActorID(Ident):
    """An actor's id."""

    __slots__ = ()


class JobID(Ident):
    """A job's id."""

    __slots__ = ()


def make_proc(node: int, number: int, incarnation: int = 0) -> bytes:
    """Id of process `number` on node `node`."""
    return _PROC.pack(node, number, incarnation)


def raylet_of(node: int) -> bytes:
    """Proc id of the raylet of node `node`."""
    return _PROC.pack(node, 0, 0)


HEAD = raylet_of(0xFFFE)
"""The GCS, in whichever raylet it is: routers find it. What it says itself comes from that raylet."""


def node_of(ident: bytes) -> int:
    """Node index in a proc, task, actor or object id."""
    return (ident[0] << 8) | ident[1]


def number_of(proc: bytes) -> int:
    """Process number (on its node) in a proc, task, actor or object id."""
    number: int = _PROC.unpack_from(proc)[1]
    return number


def owner_of(ident: bytes) -> bytes:
    """Proc id of the process that made a task, actor or object id, and so owns it."""
    return ident[:PROC_BYTES]


def task_of(object_id: bytes) -> bytes:
    """Id of the task whose return (or put) the object is."""
    return object_id[:TASK_BYTES]


def return_index(index: int) -> bytes:
    """The 3-byte suffix of a task's `index`-th return, counted from 0."""
    return (index + 1).to_bytes(3, "big")


def show_proc(proc: bytes) -> str:
    """`raylet 2`, `process 2.17` (node and process number), or `the head`, for people."""
    if proc == HEAD:
        return "the head"
    node, number, _ = _PROC.unpack_from(proc)
    return f"raylet {node}" if number == 0 else f"process {node}.{number}"
