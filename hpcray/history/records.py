"""The records of a history: what nodes write while a job runs, and what readers find when it has ended.

Times are Unix times in seconds, by the clock of the node that writes. No record has values of arguments or of
environment variables. A reader skips records that it does not know: a later version may write more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypedDict, Union

import msgspec
from msgspec import Struct

from hpcray.common.figures import FunctionRow

# Readers refuse other values: a history may be of another version, and no file of it is to end a command.
Time = Annotated[float, msgspec.Meta(ge=0, lt=1e11)]
Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]


class Began(Struct, array_like=True, tag=1):
    """A node takes part in the job: first record of each file.

    Attributes:
        at: when. job, run: the two directories of the history. node, nodes: its number, and how many there were.
        pid, started: of its raylet; `started` in clock ticks since the host's start, as the kernel counts, so that a
            later process with the same pid is another one. boot: id of the host's boot.
        program: command line of the program; "": not known here. total: resources. offset: seconds that this clock is
            ahead of the head's, None: not known. logs: directory of workers' log files that stay, "" for none.
        end: when the batch system ends the job, 0: not known. period: seconds between two looks.
        earlier: whether this file continues another one of this node. submitted: directory of the job of
            `hpcray submit` that started it, "": none did.
    """

    at: Time
    job: str
    run: str
    node: int
    nodes: int
    host: str
    pid: int
    started: int
    boot: str
    program: str
    total: dict[str, Amount]
    logs: str = ""
    end: float = 0.0
    period: float = 1.0
    earlier: bool = False
    offset: float | None = None
    slurm: dict[str, str] = {}
    python: str = ""
    submitted: str = ""


class Figures(Struct, array_like=True, tag=2):
    """The resources of a node and their use: `NodeFigures.row`."""

    at: Time
    row: dict[str, Any]


class Functions(Struct, array_like=True, tag=3):
    """Counts and times of a node since its start, by function; later rows replace earlier ones. partial: some runs were
    not seen."""

    at: Time
    functions: dict[str, FunctionRow]
    partial: bool = False


class Tasks(Struct, array_like=True, tag=4):
    """Tasks and calls that have ended in a process: all, or where they were many, a sample with all failed and the
    slowest ones.

    Attributes:
        names: of the functions. rows: id, number of the name, end, microseconds, whether it failed. seen: how many
            there were. errors: id, class and text.
    """

    at: Time
    proc: bytes
    pid: int
    actor: bytes
    names: list[str]
    rows: list[tuple[bytes, int, Time, Count, bool]]
    seen: int
    errors: list[tuple[bytes, str, str]] = []


class Running(Struct, array_like=True, tag=5):
    """The work of a process at a moment. Replaces the record before it.

    Attributes:
        running: task id, name, seconds.
        queued: tasks and calls of its own that have not been sent, by name. lacking: those of them that wait for their
            arguments. sent: those that were sent and have not been answered.
        waits: calls of `get` under way.
        made: number in the last id that it has made for a task or an object.
        since: until when the record before was true; 0.0: not known.
    """

    at: Time
    proc: bytes
    pid: int  # 0: as in the record before
    running: list[tuple[bytes, str, Amount]] = []
    queued: dict[str, Count] = {}
    waits: int = 0
    lacking: dict[str, Count] = {}
    sent: dict[str, Count] = {}
    made: Count = 0
    since: float = 0.0


class Process(Struct, array_like=True, tag=6):
    """A process has joined ("joined") or is gone ("gone"). kind: as in `Hello`. exit: Ray's word for how it ended."""

    at: Time
    proc: bytes
    pid: int
    kind: str
    what: str
    reason: str = ""
    exit: str = ""
    actor: bytes = b""


class Line(Struct, array_like=True, tag=7):
    """The raylet has printed a line."""

    at: Time
    severity: str
    text: str


class NodeDeath(Struct, array_like=True, tag=8):
    """The head has declared a node dead."""

    at: Time
    node: int
    reason: str


class ClusterState(Struct, array_like=True, tag=9):
    """The tables of the head: actors and placement groups that have changed, by id, and all nodes."""

    at: Time
    actors: dict[bytes, dict[str, Any]] = {}
    groups: dict[bytes, dict[str, Any]] = {}
    nodes: list[dict[str, Any]] = []


class Reason(Struct, array_like=True, tag=10):
    """Why the job ends: `NodeEventLog.explain_end`."""

    at: Time
    kind: str
    text: str
    proc: bytes = b""


class Ended(Struct, array_like=True, tag=11):
    """The node's processes were asked to leave, with this code; the job has ended in good order, or this node has."""

    at: Time
    code: int


class Alive(Struct, array_like=True, tag=12):
    """Nothing has happened, and the node lives."""

    at: Time


class FunctionCoreTime(Struct, array_like=True):
    """Seconds of core time of the runs of one function or method: on a CPU, off it, on objects, and blocked, as in
    `CoreTime`. beside: CPU time beside it."""

    on: Amount = 0.0
    off: Amount = 0.0
    objects: Amount = 0.0
    blocked: Amount = 0.0
    beside: Amount = 0.0


class CoreTime(Struct, array_like=True, tag=13):
    """Seconds of a node's core time since its start, by what the cores did (`hpcray.history.node_history`). beside:
    measured CPU time that is not the tasks' on their cores, by whose it is. functions: those that have changed."""

    at: Time
    rows: dict[str, Amount]
    beside: dict[str, Amount] = {}
    functions: dict[str, FunctionCoreTime] = {}


class Gap(Struct, array_like=True, tag=14):
    """Something could not be written here, for this reason: what came next is missing, up to the next record."""

    at: Time
    reason: str


class Objects(Struct, array_like=True, tag=15):
    """The largest objects of a node's store, as far as they are not as at the look before.

    Attributes:
        since: when that was. changed: size in bytes, state, and whether it is a copy of another node's, by id.
        gone: those that are there no more. unseen: those that may be there, and are not among the largest any more.
    """

    at: Time
    since: Time
    changed: dict[bytes, tuple[Count, str, bool]] = {}
    gone: list[bytes] = []
    unseen: list[bytes] = []


Record = Union[
    Began,
    Figures,
    Functions,
    Tasks,
    Running,
    Process,
    Line,
    NodeDeath,
    ClusterState,
    Reason,
    Ended,
    Alive,
    CoreTime,
    Gap,
    Objects,
]


class Ask(Struct, array_like=True, tag=0):
    """r→p: what has come since the last question? Answer: NewRecords. work: and what runs and waits?"""

    work: bool = True


class ProcessTime(Struct, array_like=True):
    """Seconds of a process since its start.

    Attributes:
        busy: of tasks and calls, running ones included; of several at a time the sum. cpu: of CPU time.
        moving, moving_cpu, after, lent, fetching: see `hpcray.runtime.core_worker.context.ObjectTime`.
        cores: how many its tasks have now, or had last. elapsed: of the calls that run, by name.
    """

    busy: float = 0.0
    cpu: float = 0.0
    moving: float = 0.0
    moving_cpu: float = 0.0
    after: float = 0.0
    lent: float = 0.0
    fetching: float = 0.0
    cores: float = 0.0
    elapsed: dict[str, float] = {}


class NewRecords(Struct, array_like=True, tag=1):
    """p→r, answer to Ask. functions: rows that have changed, since the start of the process. partial: some runs were
    not seen. seen: tasks that have ended since the last question. records: to be written. quiet: nothing is new. spent:
    its time; None without `work`. took: seconds that the answer took."""

    functions: dict[str, FunctionRow]
    partial: bool
    seen: int
    records: list[msgspec.Raw]
    quiet: bool
    spent: ProcessTime | None
    took: float


encode = msgspec.msgpack.Encoder().encode


@cache
def _decoders() -> tuple[Callable[[bytes], list[Any]], Callable[[bytes], list[msgspec.Raw]], Callable[[Any], Any]]:
    """Made by readers alone: workers are not to pay for them."""
    return (
        msgspec.msgpack.Decoder(list[Record]).decode,
        msgspec.msgpack.Decoder(list[msgspec.Raw]).decode,
        msgspec.msgpack.Decoder(Record).decode,
    )


class _Memory(TypedDict):
    used: Amount
    limit: Amount


class _Store(TypedDict):
    used: Amount
    capacity: Amount
    on_disk: Amount


class _Cpu(TypedDict):
    job: Amount


class _Wire(TypedDict):
    sent: tuple[Count, Amount]


class _FiguresRow(TypedDict):
    """The part of `NodeFigures.row` that readers of histories use."""

    resources: dict[str, tuple[Amount, Amount]]
    cpu: _Cpu
    memory: _Memory
    store: _Store
    wire: _Wire


class _ActorRow(TypedDict, total=False):
    class_name: str
    name: str | None
    state: str
    reason: str | None
    node: int | None
    pid: int | None
    restarts: int | None


class _GroupRow(TypedDict, total=False):
    name: str | None
    state: str
    strategy: str
    bundles: list[dict[str, Amount]]
    nodes: list[int]


_Functions = dict[str, tuple[Count, Count, Count, dict[Annotated[int, msgspec.Meta(ge=0, le=1000)], Count]]]


def is_readable(record: Any) -> bool:
    """Return True if the tables of a record are those that readers know; else it is of another version."""
    try:
        match record:
            case Figures():
                msgspec.convert(record.row, _FiguresRow)
            case Functions():
                msgspec.convert(record.functions, _Functions)
            case ClusterState():
                msgspec.convert(record.actors, dict[bytes, _ActorRow])
                msgspec.convert(record.groups, dict[bytes, _GroupRow])
    except msgspec.ValidationError:
        return False
    return True


def decode(content: bytes) -> tuple[list[Any], int]:
    """The records of a block, and how many of them are not known to this version."""
    whole, parts, one = _decoders()
    try:
        return whole(content), 0
    except msgspec.DecodeError:
        pass
    found, unknown = [], 0
    try:
        for part in parts(content):
            try:
                found.append(one(part))
            except msgspec.DecodeError:
                unknown += 1
    except msgspec.DecodeError:
        unknown += 1
    return found, unknown
