"""Messages between a process and its raylet, as it joins and leaves."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from hpcray.common.labels import Place

WORKER, DRIVER, ATTACHED, GUEST = "worker", "driver", "attached", "guest"
"""Values of `Hello.kind`. A guest is a process of another node of this host that reads in this store."""

LOW_MEMORY = "Task was killed due to the node running low on memory."
"""Prefix of the death reason of a worker that the node's memory monitor killed."""
NOTHING_BESIDE = "Nothing else that ran on the node used much memory."
"""In that reason: the end of other tasks and actors would make no room for it."""
USER_EXIT = "Worker exits by an user request."
"""Part of the death reason of a worker whose actor, or task, ended it on purpose."""
CONSTRUCTOR_RAISED = "Worker exits because there was an exception in the actor's constructor."
"""Death reason of a worker whose actor's constructor raised."""


def out_of_memory(reason: str) -> str:
    """The memory monitor's part of a death reason; "" for a death that the monitor did not cause."""
    _, prefix, explanation = reason.partition(LOW_MEMORY)
    return prefix + explanation


class Hello(Struct, array_like=True, tag=1):
    """p→r, first frame of a connection (source id NIL for a driver). kind: "driver", "attached", "worker"; or
    "guest", with its own id: a process of another node of this host that reads in this store."""

    pid: int
    kind: str


class CollectGarbage(Struct, array_like=True, tag=8):
    """g→r→p: run Python's garbage collector: cycles that nothing reaches may hold refs and actor handles. No answer."""


class RequestGarbageCollection(Struct, array_like=True, tag=9):
    """p→g, r→g: have all processes of the job collect garbage, soon. No answer."""


class JobInfo(Struct, array_like=True, frozen=True):
    """Facts that a driver sets for its workers. driver: its proc id, if it shows what they print. preload: modules that
    each node imports once, before it forks further workers. names_tasks: whether their output says which task prints:
    it goes to the cell of a notebook that has started the task. ends_with: the driver's proc id, if the cluster goes on
    without it."""

    job_id: str
    namespace: str
    sys_path: tuple[str, ...]
    cwd: str
    env: tuple[tuple[str, str], ...] = ()
    driver: bytes = b""
    preload: tuple[str, ...] = ()
    names_tasks: bool = False
    ends_with: bytes = b""


class RunInfo(Struct, array_like=True, frozen=True):
    """What the head knows about this run of the job, for everybody.

    end: Unix time at which the batch system ends it, 0 if unknown. drain_at: Unix time at which it begins to drain, 0
    for never by itself. checkpoints: the job's checkpoint directory, "" for none. restarts: how often it was requeued.
    signals: the numbers of the signals that begin a drain. exit_code: of a program that ends with work left to do.
    number: which run of the job it is, counted from 0; part of the ids of its processes.
    """

    end: float = 0.0
    drain_at: float = 0.0
    checkpoints: str = ""
    restarts: int = 0
    signals: tuple[int, ...] = ()
    exit_code: int = 75
    number: int = 0


class Welcome(Struct, array_like=True, tag=2):
    """r→p, answer to Hello; the arena's file descriptor travels beside it (SCM_RIGHTS). head: the node where it is.
    neighbors: the session directories of the other nodes of this host, by node. overflow: path of the overflow file
    of this store. reserve: bytes behind the objects in the arena that the receiver maps, too: frame slots are there.
    places: of the nodes in the network, where they are known."""

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
    neighbors: dict[int, str] = {}
    overflow: str = ""
    reserve: int = 0
    places: dict[int, Place] = {}


class SetJob(Struct, array_like=True, tag=3):
    """first driver→r→g→every r→its workers, which apply it before they run anything that came after it. Later drivers
    send theirs with the runtime environment of their tasks."""

    job: JobInfo


class Exit(Struct, array_like=True, tag=4):
    """r→p, driver→own r→g: leave now. From a driver: end the job with this exit code. if_unused: a worker stays where
    it owns objects that would be lost with it; answer: ExitRefused. Its device objects are moved into the store."""

    code: int = 0
    if_unused: bool = False


class ProcDied(Struct, array_like=True, tag=5):
    """r→p, r→r: a process is gone. Sent to those that may hold a lease on it, write to it, or share objects with
    it."""

    proc: bytes
    reason: str


class Undeliverable(Struct, array_like=True, tag=6):
    """r→p: a frame of the receiver could not reach this process; it is dead or never was. kept_at: nodes that keep
    objects of it, as it has left with its node."""

    proc: bytes
    reason: str
    kept_at: list[int] = []


class ProbeViaRaylet(Struct, array_like=True, tag=7):
    """p→p, through raylets: a connection to the receiver has ended. A living receiver does not answer; the raylet
    of a dead one answers Undeliverable."""


class ExitRefused(Struct, array_like=True, tag=39):
    """worker→r, answer to Exit(if_unused): the worker owns objects that are in use, and goes on."""


class Introspect(Struct, array_like=True, tag=180):
    """p→any p or r: a question about the receiver. what: see `diagnostics.introspection` (processes) and
    `diagnostics.raylet_introspection` (raylets); args: msgpack. Answer: GcsReply(req)."""

    req: int
    what: str
    args: bytes = b""


class ListRetriableTasks(Struct, array_like=True, tag=181):
    """r→holder of leases: memory is short; which tasks do these workers of the sender run for the receiver? Answer:
    RetriableTasks."""

    number: int
    workers: list[bytes]


class RetriableTasks(Struct, array_like=True, tag=182):
    """holder of leases→r: one row per worker: its proc id, the name of its task, whether that task may run again."""

    number: int
    rows: list[tuple[bytes, str, bool]]


class LastFigures(Struct, array_like=True, tag=183):
    """worker→own r: the worker ends in good order; figures: what it has run, packed as its reply to "last"."""

    figures: bytes


class EndReason(Struct, array_like=True, tag=184):
    """p→own r: the job ends, or is about to end, for this reason (`NodeEventLog.explain_end`). No answer."""

    kind: str
    text: str


class FrameSlots(Struct, array_like=True, tag=210):
    """r→p: the receiver may write a frame for a process of another node into the memory at each of these offsets of the
    arena, once (SlotFrame)."""

    offsets: list[int]


class SlotFrame(Struct, array_like=True, tag=211):
    """p→own r, r→p: a frame of `size` bytes lies at `offset` of the arena. The raylet forwards it, as if it had come
    instead of this message; a process reads it, and answers FrameRead."""

    offset: int
    size: int


class FrameRead(Struct, array_like=True, tag=212):
    """p→own r: the frame at this offset is read."""

    offset: int


class ReclaimFrameSlots(Struct, array_like=True, tag=213):
    """r→p: another process needs frame slots. Answer: FrameSlotsReturned."""


class FrameSlotsReturned(Struct, array_like=True, tag=214):
    """p→own r: the sender will not write into these."""

    offsets: list[int]


class ExtensionMessage(Struct, array_like=True, tag=230):
    """p→p, r→p, p→own r: a message between two halves of a feature. extension: its name. body: the message, as the
    feature has encoded it (`hpcray.runtime.core_worker.extensions`)."""

    extension: str
    body: bytes


# ------------------------------------------------------------ output
# Messages about what workers print.


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
