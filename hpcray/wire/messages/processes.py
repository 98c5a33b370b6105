"""Messages between a process and its raylet, as it joins and leaves. See `wire.messages`."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Hello(Struct, array_like=True, tag=1):
    """p→r, first frame of a connection (source id NIL for a driver). kind: "driver", "attached", "worker"; or
    "guest", with its own id: a process of another node of this host, which wants to read in this store."""

    pid: int
    kind: str
    secret: bytes


class JobInfo(Struct, array_like=True, frozen=True):
    """What the driver's process tells every worker."""

    job_id: str
    namespace: str
    sys_path: tuple[str, ...]
    cwd: str
    env: tuple[tuple[str, str], ...] = ()


class RunInfo(Struct, array_like=True, frozen=True):
    """What the head knows about this run of the job, for everybody.

    end: Unix time at which the batch system ends it, 0 if unknown. drain_at: Unix time at which it begins to drain, 0
    for never by itself. checkpoints: the job's checkpoint directory, "" for none. restarts: how often it was requeued.
    signals: the numbers of the signals that begin a drain. exit_code: of a program that ends with work left to do.
    """

    end: float = 0.0
    drain_at: float = 0.0
    checkpoints: str = ""
    restarts: int = 0
    signals: tuple[int, ...] = ()
    exit_code: int = 75


class Welcome(Struct, array_like=True, tag=2):
    """r→p, answer to Hello; the arena's file descriptor travels beside it (SCM_RIGHTS). head: the node where it is.
    neighbours: the session directories of the other nodes of this host, by node."""

    proc: bytes
    node_id: str
    session_dir: str
    arena_size: int
    cluster_size: int
    host: str
    job: JobInfo | None
    config: dict[str, Any]
    run: RunInfo = RunInfo()
    head: int = 0
    neighbours: dict[int, str] = {}


class SetJob(Struct, array_like=True, tag=3):
    """driver→r→g→every r→every p. A worker applies it before it runs anything that came after it."""

    job: JobInfo


class Exit(Struct, array_like=True, tag=4):
    """r→p: leave now. From a driver to its raylet, and on to the head: end the job with this exit code."""

    code: int = 0


class ProcDied(Struct, array_like=True, tag=5):
    """r→p, r→r: a process is gone. Sent to those that may hold a lease on it, write to it, or share objects with it."""

    proc: bytes
    reason: str


class Undeliverable(Struct, array_like=True, tag=6):
    """r→p: a frame of yours could not reach this process; it is dead or never was."""

    proc: bytes
    reason: str


class Knock(Struct, array_like=True, tag=7):
    """p→p, through raylets: a connection to you has ended. Who lives says nothing; of who is dead a raylet tells."""
