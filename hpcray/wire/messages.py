"""Every message of hpcray, by conversation. Each is a tagged msgspec struct, encoded as a msgpack array.

`p` process (driver or worker), `r` raylet, `g` the GCS (in raylet 0). All ids are bytes (`base.ids`), resource amounts
are units (`base.resources`), times are seconds, sizes are bytes.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec
from msgspec import Struct

Resources = dict[str, int]


class Shape(Struct, array_like=True, frozen=True):
    """What a lease or an actor asks of a node. Equal shapes share leases.

    resources: units; strategy: "" (hybrid), "SPREAD", "node:<index>[:soft]", or "group[:capture]" for a request in a
    placement group; env: environment variables that the worker must have (a worker serves one env for life).
    """

    resources: tuple[tuple[str, int], ...]
    strategy: str = ""
    env: tuple[tuple[str, str], ...] = ()


# ---------------------------------------------------------------- process <-> its raylet: joining and leaving


class Hello(Struct, array_like=True, tag=1):
    """p→r, first frame of a connection (source id NIL for a driver). kind: "driver", "attached" or "worker"."""

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
    """r→p, answer to Hello; the arena's file descriptor travels beside it (SCM_RIGHTS)."""

    proc: bytes
    node_id: str
    session_dir: str
    arena_size: int
    cluster_size: int
    host: str
    job: JobInfo | None
    config: dict[str, Any]
    run: RunInfo = RunInfo()


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


# ---------------------------------------------------------------- leases


class Demand(Struct, array_like=True, tag=10):
    """p→own r. `total` is cumulative: leases this holder has ever received *from its own raylet* for this class, plus
    those it wants now. The raylet's outstanding count is `total` minus what it granted itself: no double grants."""

    klass: int
    shape: Shape
    total: int


class LeaseGranted(Struct, array_like=True, tag=11):
    """r (any node)→p."""

    klass: int
    lease: bytes
    worker: bytes


class LeaseReturn(Struct, array_like=True, tag=12):
    """p→the granting r. bad: the worker must not be reused."""

    lease: bytes
    bad: bool = False


class ReclaimIdle(Struct, array_like=True, tag=13):
    """r→p: others wait; give back leases of this node that are idle now, and shrink as tasks finish."""


class Blocked(Struct, array_like=True, tag=14):
    """worker→own r: its task waits in get/wait; its CPU may be lent."""


class Unblocked(Struct, array_like=True, tag=15):
    """worker→own r: it runs again and takes its CPU back at once (over-commitment is allowed here)."""


class Infeasible(Struct, array_like=True, tag=16):
    """r→p: no node of the cluster can ever run this shape; the reason names what every node has.

    waits: it could be run, but has waited for long; said again from time to time.
    """

    klass: int
    reason: str
    waits: bool = False


class LeaseRevoked(Struct, array_like=True, tag=17):
    """r→holder: the leased worker died."""

    lease: bytes
    worker: bytes
    reason: str


# ---------------------------------------------------------------- scheduling between raylets and the head


class Unmet(Struct, array_like=True, tag=20):
    """r→g: outstanding demand of one holder's class that this node cannot serve now (absolute; 0 withdraws)."""

    holder: bytes
    klass: int
    shape: Shape
    count: int


class GrantFor(Struct, array_like=True, tag=21):
    """g→r: try to grant up to `count` leases to this holder."""

    holder: bytes
    klass: int
    shape: Shape
    count: int


class GrantRefused(Struct, array_like=True, tag=22):
    """r→g: this many of a GrantFor did not fit any more."""

    holder: bytes
    klass: int
    count: int


class NodeView(Struct, array_like=True, tag=23):
    """r→g: available resources of a node (absolute, versioned; sent when they changed, coalesced per loop turn).
    bundles: what is free in bundles of placement groups, as far as that changed."""

    node: int
    version: int
    available: Resources
    bundles: Resources = {}


# ---------------------------------------------------------------- nodes


class NodeInfo(Struct, array_like=True, frozen=True):
    """One node as the GCS knows it."""

    index: int
    node_id: str
    host: str
    address: str
    pid: int
    total: Resources
    data_address: bytes
    data_plane: str
    arena_size: int


class NodeHello(Struct, array_like=True, tag=30):
    """r→g at start-up."""

    info: NodeInfo


class NodeTable(Struct, array_like=True, tag=31):
    """g→every r when all are in: the cluster is up."""

    session: str
    nodes: list[NodeInfo]
    run: RunInfo = RunInfo()


class NodeReady(Struct, array_like=True, tag=32):
    """r→g: the table is applied, data endpoints are connected."""

    node: int


class Stop(Struct, array_like=True, tag=33):
    """g→every r: end the job; r answers NodeStopped when its processes are gone."""

    code: int


class NodeStopped(Struct, array_like=True, tag=34):
    """r→g."""

    node: int


class Heartbeat(Struct, array_like=True, tag=35):
    """r→g and g→r, every period."""

    node: int


class NodeDied(Struct, array_like=True, tag=36):
    """g→every r→every p."""

    node: int
    reason: str


# ---------------------------------------------------------------- the announced end of the job


class DrainRequest(Struct, array_like=True, tag=110):
    """p→g, r→g: the job should drain. seconds: how long that may take; 0: what the settings say. signal: what brought
    it, 0 for none."""

    reason: str
    seconds: float = 0.0
    signal: int = 0


class Drain(Struct, array_like=True, tag=111):
    """g→every r→every p: nothing new is started, `seconds` are left. Sent again when that became less."""

    reason: str
    seconds: float


class DrainReady(Struct, array_like=True, tag=112):
    """driver→g: its callbacks have run, the actors may be saved. interested: whether the program takes part in the
    drain: has callbacks, has asked, has seen an error of it. Sent again when that changes."""

    interested: bool = True


class SaveActor(Struct, array_like=True, tag=113):
    """g→worker of an actor: write its checkpoint between two calls, and run no call after that."""


class ActorSaved(Struct, array_like=True, tag=114):
    """worker→g. path: the checkpoint, "" when the actor has none to write. error: why it could not be written."""

    path: str
    error: str = ""


class DrainOver(Struct, array_like=True, tag=115):
    """g→every r→its drivers: every checkpoint that could be written is; the program may end."""


# ---------------------------------------------------------------- GCS: actors, names, queries


class ArgRef(Struct, array_like=True):
    """An argument (or value) that is in node stores: take it from one of `nodes`."""

    id: bytes
    size: int
    nodes: list[int]


class ActorSpec(Struct, array_like=True):
    """All that it takes to make an actor. `cls` is the pickled class, `args` the pickled (args, kwargs)."""

    actor: bytes
    class_name: str
    cls: bytes
    args: bytes
    refs: list[ArgRef]
    place: Shape
    hold: Shape
    name: str
    namespace: str
    detached: bool
    max_restarts: int
    max_task_retries: int
    max_concurrency: int
    methods: dict[str, dict[str, Any]]
    max_pending_calls: int = -1
    inline: list[bytes] | None = None
    concurrency_groups: dict[str, int] = {}
    out_of_order: bool = False
    max_runtime: float = 0.0


class CreateActor(Struct, array_like=True, tag=40):
    """p→g. Answered by GcsReply(req): ok with b"" when registered, or an error (name taken). ready False: the arguments
    of the constructor are not there yet; it is registered, but not placed until the same comes again with them."""

    req: int
    spec: ActorSpec
    ready: bool = True


class StartActor(Struct, array_like=True, tag=41):
    """g→r: place this actor on your node."""

    spec: ActorSpec
    restarts: int


class StartActorRefused(Struct, array_like=True, tag=42):
    """r→g: it does not fit any more (or no worker could be started: reason non-empty)."""

    actor: bytes
    reason: str


class BecomeActor(Struct, array_like=True, tag=43):
    """r→worker: run the constructor, then serve this actor for life."""

    spec: ActorSpec
    restarts: int


class ActorReady(Struct, array_like=True, tag=44):
    """worker→g. error: b"" or the pickled exception of the constructor (`wire.serialization` error blob)."""

    actor: bytes
    error: bytes
    borrowed: list[bytes]


class ActorGone(Struct, array_like=True, tag=45):
    """r→g: the actor's process is gone. intended: exit_actor, terminate or kill (no restart)."""

    actor: bytes
    worker: bytes
    reason: str
    intended: bool


class WatchActor(Struct, array_like=True, tag=46):
    """p→g: tell me this actor's state, now and at each change."""

    actor: bytes


class ActorState(Struct, array_like=True, tag=47):
    """g→watchers. state: PENDING, ALIVE, RESTARTING, DEAD. error: the constructor's exception, when that is why."""

    actor: bytes
    state: str
    worker: bytes
    restarts: int
    reason: str
    error: bytes


class KillActor(Struct, array_like=True, tag=48):
    """p→g→r."""

    actor: bytes
    no_restart: bool
    reason: str


class ActorOutOfScope(Struct, array_like=True, tag=49):
    """owner→g: the last handle is gone; let queued calls finish, then end it."""

    actor: bytes


class TerminateActor(Struct, array_like=True, tag=50):
    """g→worker of the actor: finish what is queued, then leave."""

    actor: bytes


class GcsCall(Struct, array_like=True, tag=51):
    """p→g: one query. method: see `core.gcs`; args and value are msgpack."""

    req: int
    method: str
    args: bytes


class GcsReply(Struct, array_like=True, tag=52):
    """g→p. ok False: `value` is a UTF-8 message."""

    req: int
    ok: bool
    value: bytes


class ActorLeaving(Struct, array_like=True, tag=53):
    """worker→own r: the actor ends on purpose (exit_actor, terminate); the exit that follows is no crash."""

    actor: bytes
    reason: str


# ---------------------------------------------------------------- placement groups


class GroupSpec(Struct, array_like=True):
    """All that a placement group is. bundles: units. owner: the process whose end removes it, b"" for the job."""

    group: bytes
    bundles: list[Resources]
    strategy: str
    name: str = ""
    namespace: str = ""
    owner: bytes = b""


class CreateGroup(Struct, array_like=True, tag=130):
    """p→g. Answered by GcsReply(req) when req is not 0; the creator gets a GroupState at each change."""

    req: int
    spec: GroupSpec


class WatchGroup(Struct, array_like=True, tag=131):
    """p→g: tell me this group's state, now and at each change."""

    group: bytes


class GroupState(Struct, array_like=True, tag=132):
    """g→watchers, and whoever has tasks for a removed group. state: PENDING, CREATED, RESCHEDULING, REMOVED."""

    group: bytes
    state: str
    reason: str = ""


class RemoveGroup(Struct, array_like=True, tag=133):
    """p→g: end what runs in it, and give its resources back."""

    group: bytes


class PrepareBundles(Struct, array_like=True, tag=134):
    """g→r: hold these bundles (by index), all or none. Answer: BundlesPrepared. commit: no other node is asked, so they
    may be used at once."""

    group: bytes
    attempt: int
    bundles: dict[int, Resources]
    commit: bool


class BundlesPrepared(Struct, array_like=True, tag=135):
    """r→g. ok False: there is no room, nothing is held."""

    group: bytes
    attempt: int
    ok: bool


class CommitBundles(Struct, array_like=True, tag=136):
    """g→r: the group has all its bundles; what you prepared may be used."""

    group: bytes


class ReturnBundles(Struct, array_like=True, tag=137):
    """g→r: give these back, prepared or committed, and kill what runs in them."""

    group: bytes
    indices: list[int]
    reason: str


# ---------------------------------------------------------------- node store


class Create(Struct, array_like=True, tag=60):
    """p→own r: allocate `size` bytes for this object. Answer: Created or StoreError."""

    id: bytes
    size: int


class Created(Struct, array_like=True, tag=61):
    """r→p. The object is unsealed and pinned by its creator."""

    id: bytes
    offset: int
    size: int


class StoreError(Struct, array_like=True, tag=62):
    """r→p: Create or Open failed. kind: "full", "lost", "exists"."""

    id: bytes
    kind: str
    reason: str


class Seal(Struct, array_like=True, tag=63):
    """p→own r: the bytes are written; they never change again. The creator's pin stays until Release."""

    id: bytes


class Open(Struct, array_like=True, tag=64):
    """p→own r: pin the object for me; pull it from one of `nodes` if it is not here. Answer: Opened or StoreError."""

    id: bytes
    size: int
    nodes: list[int]


class Opened(Struct, array_like=True, tag=65):
    """r→p. pulled: a copy was made on this node for it (the opener tells the owner with AddLocation)."""

    id: bytes
    offset: int
    size: int
    pulled: bool


class Release(Struct, array_like=True, tag=66):
    """p→own r: my pins on these objects are gone (one pin per process and object, however many views)."""

    ids: list[bytes]


class Free(Struct, array_like=True, tag=67):
    """owner→own r→the rs of `nodes`: no reference is left; drop the object when its last pin goes."""

    ids: list[bytes]
    nodes: list[int]


class Unpin(Struct, array_like=True, tag=70):
    """r→its p: room is short; Release what you have pinned and nobody reads, up to about `size` bytes."""

    size: int


class ListStore(Struct, array_like=True, tag=71):
    """p→any r: what is in your store? The `limit` largest objects. Answer: GcsReply(req)."""

    req: int
    limit: int


class Pull(Struct, array_like=True, tag=68):
    """destination r→source r: send object `id` over the data plane with this tag."""

    id: bytes
    tag: int
    size: int


class PullRefused(Struct, array_like=True, tag=69):
    """source r→destination r: it is not (or no longer) here; full: it is, on disk, but there is no room to read it."""

    id: bytes
    tag: int
    reason: str
    full: bool = False


# ---------------------------------------------------------------- process <-> process: tasks


class FunctionDef(Struct, array_like=True, tag=80):
    """submitter→worker, once per connection and function, ahead of its first task. id: 16-byte digest of the blob.
    max_calls: the worker leaves after so many calls of it; 0 means never."""

    id: bytes
    name: str
    blob: bytes
    max_calls: int = 0


class PushTask(Struct, array_like=True, tag=81):
    """submitter→leased worker. args: serialized (args, kwargs) with placeholders for `refs` and `inline` values."""

    task: bytes
    fn: bytes
    args: bytes
    num_returns: int = 1
    refs: list[ArgRef] | None = None
    inline: list[bytes] | None = None


class ActorCall(Struct, array_like=True, tag=82):
    """caller→actor. Calls of one caller arrive, and start, in the order sent."""

    task: bytes
    method: str
    args: bytes
    num_returns: int = 1
    refs: list[ArgRef] | None = None
    inline: list[bytes] | None = None


class TaskDone(Struct, array_like=True, tag=83):
    """worker→submitter: one small return value. us: run time in microseconds."""

    task: bytes
    value: bytes
    us: int


class Returned(Struct, array_like=True):
    """One return value: inline (`size` 0) or in the worker's node store."""

    value: bytes
    size: int = 0
    contained: list[bytes] | None = None


class TaskReply(Struct, array_like=True, tag=84):
    """worker→submitter, the general form. status: 0 ok, 1 the user's exception (value of every return is the error
    blob), 2 cancelled. borrowed: refs from the arguments that the submitter owns and the worker still holds."""

    task: bytes
    status: int
    returns: list[Returned]
    us: int
    borrowed: list[bytes] | None = None


class TakeBack(Struct, array_like=True, tag=85):
    """submitter→worker: give back the tasks of mine that you have not started. leaving: the answer to a worker that
    leaves, and the last word to it."""

    leaving: bool = False


class TakenBack(Struct, array_like=True, tag=86):
    """worker→submitter: these tasks will not run here. asked: False when the worker gave them back by itself because
    it blocks in get. leaving: nor will any other that was sent; the worker has had its `max_calls`, or (asked) runs its
    last call now."""

    tasks: list[bytes]
    asked: bool
    leaving: bool = False


class CancelTask(Struct, array_like=True, tag=87):
    """submitter→worker."""

    task: bytes
    force: bool
    recursive: bool


class Leased(Struct, array_like=True, tag=88):
    """submitter→worker, ahead of its first task under a lease: what the lease holds, its environment, how it was
    placed."""

    resources: tuple[tuple[str, int], ...]
    env: tuple[tuple[str, str], ...] = ()
    strategy: str = ""


class CancelRef(Struct, array_like=True, tag=120):
    """borrower→owner: cancel the task that makes this object."""

    id: bytes
    force: bool
    recursive: bool


class CallOptions(Struct, array_like=True, tag=121):
    """submitter→worker, ahead of a task or call that has options of its own. name: its option `name`; group: the
    concurrency group it shall run in; skip: so many of the values that it yields came from an earlier run; window: so
    many may be sent that were not taken, -1: any number."""

    task: bytes
    name: str = ""
    group: str = ""
    skip: int = 0
    window: int = -1


class StreamItem(Struct, array_like=True, tag=122):
    """worker→submitter: value number `index` of what a task (`num_returns` -1) yields, from 0."""

    task: bytes
    index: int
    item: Returned


class StreamTaken(Struct, array_like=True, tag=123):
    """submitter→worker: so many values were taken."""

    task: bytes
    count: int


# ---------------------------------------------------------------- process <-> process: ownership


class ObjectGet(Struct, array_like=True, tag=90):
    """p→owner: tell me when this object is ready. Answer: ObjectReady (perhaps much later)."""

    id: bytes


class ObjectReady(Struct, array_like=True, tag=91):
    """owner→p. The value (size 0), or where its copies are. status: 0 ok, 2 unknown here (freed)."""

    id: bytes
    status: int
    value: bytes
    size: int
    nodes: list[int]


class BorrowAdd(Struct, array_like=True, tag=92):
    """p→owner: I hold these; or, with another `borrower`: keep these for it until it takes them (a pledge). seq > 0:
    answer with BorrowAck(seq)."""

    ids: list[bytes]
    borrower: bytes
    seq: int


class BorrowAck(Struct, array_like=True, tag=93):
    """owner→p. seq 0: no answer, only so that we hear of each other's death."""

    seq: int


class BorrowDrop(Struct, array_like=True, tag=94):
    """p→owner: `borrower` holds one count less of each of these."""

    ids: list[bytes]
    borrower: bytes


class AddLocation(Struct, array_like=True, tag=95):
    """p→owner: this node has a sealed copy now."""

    id: bytes
    node: int


class BorrowTake(Struct, array_like=True, tag=96):
    """p→owner: what `giver` had you keep for me I hold myself now."""

    ids: list[bytes]
    giver: bytes


class BorrowAsk(Struct, array_like=True, tag=97):
    """owner→p: `giver` is dead, and had me keep objects for you. Say when nothing of it can reach you any more."""

    giver: bytes


class BorrowEnd(Struct, array_like=True, tag=98):
    """p→owner, answer to BorrowAsk: what I have not taken by now I never will."""

    giver: bytes


class FreeAsked(Struct, array_like=True, tag=99):
    """p→owner: its user wants these gone, whoever refers to them."""

    ids: list[bytes]


class ListRefs(Struct, array_like=True, tag=100):
    """p→owner: what do you know of these? Answer: GcsReply(req)."""

    req: int
    ids: list[bytes]


Message = Union[
    Hello, Welcome, SetJob, Exit, ProcDied, Undeliverable,
    Demand, LeaseGranted, LeaseReturn, ReclaimIdle, Blocked, Unblocked, Infeasible, LeaseRevoked,
    Unmet, GrantFor, GrantRefused, NodeView,
    NodeHello, NodeTable, NodeReady, Stop, NodeStopped, Heartbeat, NodeDied,
    DrainRequest, Drain, DrainReady, SaveActor, ActorSaved, DrainOver,
    CreateActor, StartActor, StartActorRefused, BecomeActor, ActorReady, ActorGone, WatchActor, ActorState, KillActor,
    ActorOutOfScope, TerminateActor, GcsCall, GcsReply, ActorLeaving,
    CreateGroup, WatchGroup, GroupState, RemoveGroup, PrepareBundles, BundlesPrepared, CommitBundles, ReturnBundles,
    Create, Created, StoreError, Seal, Open, Opened, Release, Free, Pull, PullRefused, Unpin, ListStore,
    FunctionDef, PushTask, ActorCall, TaskDone, TaskReply, TakeBack, TakenBack, CancelTask, Leased,
    CancelRef, CallOptions, StreamItem, StreamTaken,
    ObjectGet, ObjectReady, BorrowAdd, BorrowAck, BorrowDrop, AddLocation, BorrowTake, BorrowAsk, BorrowEnd,
    FreeAsked, ListRefs,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[Message])

encode = _encoder.encode
decode = _decoder.decode
