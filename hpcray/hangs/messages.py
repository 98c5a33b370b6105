"""Waits of one process as another one gets to know them, and the messages of that."""

from __future__ import annotations

from typing import Union

from msgspec import Struct

COROUTINE = "coroutine"
"""Kind of a coroutine, beside those of `hpcray.diagnostics.wait_kinds`."""
DEBUGGER, SUBPROCESS, LOOP, OUTSIDE, QUEUE, REPEATS = "debugger", "subprocess", "loop", "outside", "queue", "repeats"


class WaitLook(Struct, array_like=True):
    """A `get`, `wait` or `await` that waits.

    Attributes:
        thread: its thread, or a number of its own for a coroutine. wanted: how many of `objects` it wants. objects:
            those that are not there. timeout: seconds after which it ends by itself; -1: never. call: the task or call
            that it is part of; b"": the program. place: `file.py:12 in f`. listed: whether `objects` are all of them.
            repeats: whether a wait with a timeout is part of a loop that ends only if something in the job moves.
    """

    thread: int
    wanted: int
    objects: list[bytes]
    timeout: float
    call: bytes
    place: str
    listed: bool = True
    repeats: bool = False


class CallLook(Struct, array_like=True):
    """A task or call that runs. thread: as in `WaitLook`, 0: in none that waits."""

    task: bytes
    name: str
    seconds: float
    thread: int
    place: str = ""


class ThreadLook(Struct, array_like=True):
    """A thread or coroutine of the program that is in no wait of hpcray's.

    Attributes:
        kind, target, descriptor, switches: see `KernelWait`; COROUTINE is one more kind. what: DEBUGGER, SUBPROCESS,
            LOOP (of events), OUTSIDE (its event loop has sockets or timers), QUEUE (it waits for the other side of a
            `hpcray.util.queue.Queue`), REPEATS (as in `WaitLook`) or "". place: where it is.
    """

    kind: str
    target: str
    descriptor: int
    switches: int
    what: str
    place: str


class ProcessLook(Struct):
    """One process as it is now.

    Attributes:
        proc, pid, kind: see `ProcessInfo`. submitted: how many tasks, calls and puts it has made. others: threads that
            do something else than to wait for objects. slots: calls that may run here at a time; 0: it is not known.
        actor, actor_class: what it is. holds: the actors that it could call, if it has `others`. driver: whether it is
            a program. handles_signals: whether it has handlers of signals by which others could wake it.
    """

    proc: bytes
    pid: int
    kind: str
    driver: bool
    submitted: int
    waits: list[WaitLook]
    calls: list[CallLook]
    others: list[ThreadLook]
    slots: int
    actor: bytes = b""
    actor_class: str = ""
    holds: list[bytes] = []
    handles_signals: bool = False


class Look(Struct, tag=0):
    """Look at yourself, and answer with `Looked`. kernel: also at what the kernel knows of your threads."""

    number: int
    kernel: bool = False


class Looked(Struct, tag=1):
    """The answer to a `Look` of this number."""

    number: int
    look: ProcessLook


class EndWait(Struct, tag=2):
    """An object can never be made: those that wait for it get a `HangError`.

    Attributes:
        chain: of the error. queued: whether the call that was to make it waits in its actor, and must not run later.
    """

    object: bytes
    chain: list[str]
    queued: bool


HangMessage = Union[Look, Looked, EndWait]
