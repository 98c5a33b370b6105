"""Words for what threads and processes wait for: raylets see it, and the watch for hangs judges it."""

from __future__ import annotations

from msgspec import Struct

RUNNING, LOCK, TIMED, CHILD, READ, POLL, SIGNAL, ACCEPT, FILE_LOCK, MESSAGE, OTHER, HIDDEN = (
    "running", "lock", "timed", "child", "read", "poll", "signal", "accept", "file lock", "message", "other", "hidden",
)  # fmt: skip
"""Kinds of waits: it runs, or waits for a lock, for a time, a child process, bytes of one descriptor, events of
several, a signal, a connection, a lock of a file, a message of the job; another system call; the kernel hides it."""


class KernelWait(Struct, frozen=True):
    """The wait of one thread.

    Attributes:
        kind: one of those above. target, descriptor: what a READ, ACCEPT or FILE_LOCK waits at, as /proc names it, and
            its number; -1: none. The target of a POLL is all that it waits at, with spaces between, if these are pipes
            and sockets other than its input; "" if not. switches: how often the thread has waited so far: a wait that
            goes on leaves it as it is.
    """

    kind: str
    target: str = ""
    descriptor: int = -1
    switches: int = 0


class Activity(Struct):
    """Work of the processes of a node since the first look; each figure only grows.

    Attributes:
        cpu: seconds. moved: how often a process was seen that had read or written since the look before, had begun or
            ended. stopped: pids of those that a signal or a debugger has stopped now. processes: how many there are.
    """

    cpu: float = 0.0
    moved: int = 0
    stopped: list[int] = []
    processes: int = 0


class ProcessWait(Struct):
    """One process, and the waits of its threads.

    Attributes:
        state: the kernel's letter. ours: whether it runs nothing of a program's; its threads are left out.
        connections: its ends of TCP connections, as (own, other) addresses with ports. listens: the addresses at which
            it waits for TCP connections. outside: of the targets of its threads those with an end in a process that is
            none of this node's, or that any process may write to.
    """

    pid: int
    name: str
    state: str
    threads: list[KernelWait]
    connections: list[tuple[str, str]] = []
    listens: list[str] = []
    outside: list[str] = []
    ours: bool = False
