"""Messages of nodes: joining, dying, the announced end of the job."""

from __future__ import annotations

from msgspec import Struct

from hpcray.common.labels import Place
from hpcray.protocol.messages.gcs import GcsReply
from hpcray.protocol.messages.leases import Resources
from hpcray.protocol.messages.processes import RunInfo


class NodeInfo(Struct, array_like=True, frozen=True):
    """One node as the GCS knows it. session_dir: where its processes listen, for other nodes of its host; "": not for
    them. name: "": its address is its name. joined: it has joined the running job. world: the node of rank 0 of its
    `mpirun` or `srun`. instance: the batch job that the
    autoscaler started it by. end: Unix time at which the node has to have left; 0: not before the job ends.
    note: the setting `end_note`."""

    index: int
    node_id: str
    host: str
    address: str
    pid: int
    total: Resources
    data_address: bytes
    data_plane: str
    arena_size: int
    labels: dict[str, str] = {}
    session_dir: str = ""
    name: str = ""
    joined: bool = False
    world: int = 0
    instance: str = ""
    end: float = 0.0
    note: str = ""


class RegisterNode(Struct, array_like=True, tag=30):
    """r→g: a node joins, at start-up."""

    info: NodeInfo


class NodeTable(Struct, array_like=True, tag=31):
    """g→every r when all are in: the cluster is up. g→a node that joins the running job: the nodes to connect to. dead:
    the nodes that have died, in the order of their deaths."""

    session: str
    nodes: list[NodeInfo]
    run: RunInfo = RunInfo()
    dead: list[NodeDied] = []


class NodeReady(Struct, array_like=True, tag=32):
    """r→g: the NodeTable is applied, data endpoints are connected."""

    node: int


class NodeJoined(Struct, array_like=True, tag=200):
    """g→every r: these nodes join the running job. Answer: NodeAcquainted. g→one of them: all others have answered."""

    nodes: list[NodeInfo]


class NodeAcquainted(Struct, array_like=True, tag=201):
    """r→g: the sender has connected to the nodes of a NodeJoined. problems: to which it cannot, and why."""

    nodes: list[int]
    problems: dict[int, str] = {}


class ClusterGrew(Struct, array_like=True, tag=202):
    """r→its p: nodes have joined the job. cluster_size: number of nodes, those that have died included. neighbors,
    places: as in Welcome."""

    cluster_size: int
    neighbors: dict[int, str]
    places: dict[int, Place] = {}


class OpenJob(Struct, array_like=True, tag=203):
    """p→g: let nodes join the job from now on. other_hosts: of other hosts too. Answer: GcsReply(req) with what a node
    needs for that, as JSON (`runtime.node.join_token.JoinToken`). path: the file that will hold it, which a later head
    writes anew."""

    req: int
    other_hosts: bool = False
    path: str = ""


class RemoveNode(Struct, array_like=True, tag=204):
    """p→g: have this node leave the job, within so many seconds. Answer: GcsReply(req) when it is gone."""

    req: int
    node: int
    seconds: float


class LeaveRequest(Struct, array_like=True, tag=205):
    """r→g: the sender has to leave the job within so many seconds. Answer: Leave."""

    reason: str
    seconds: float


class Leave(Struct, array_like=True, tag=206):
    """g→r: the node leaves the job, and has so many seconds for that: it starts nothing new. Answer: NodeIdle."""

    seconds: float


class NodeIdle(Struct, array_like=True, tag=207):
    """r→g: the node leaves the job, and no task runs on it any more."""

    node: int


class Evacuate(Struct, array_like=True, tag=208):
    """g→every r→its p: copy objects of yours that only `node` has to one of `targets`. On the node that leaves: have
    the borrowers of your objects keep them (KeepCopies). Answer: Evacuated."""

    node: int
    targets: list[int]


class Evacuated(Struct, array_like=True, tag=209):
    """p→its r, r→g: the sender, or no process of it, owns an object that only `node` has; on the node that leaves: or
    one that a process elsewhere refers to. kept_at: the nodes that keep such objects now."""

    node: int
    kept_at: list[int] = []


class LeaveIdle(Struct, array_like=True, tag=220):
    """g→r: leave the job, unless a process of yours is of use. Answer: LeaveRequest, or NodeOccupied."""


class NodeOccupied(Struct, array_like=True, tag=221):
    """r→g: the sender stays: a task runs there, or a worker owns objects that others refer to."""

    node: int


class Stop(Struct, array_like=True, tag=33):
    """g→every r: end the job. Answer: NodeStopped when the processes of the node are gone."""

    code: int


class NodeStopped(Struct, array_like=True, tag=34):
    """r→g: all processes of the node are gone."""

    node: int


class Heartbeat(Struct, array_like=True, tag=35):
    """r→g, g→r: sent every period. epoch: number of nodes that have died, as far as the sender knows. settled: how
    many of this node's messages to the head its successor would know of. standby: the node that would succeed it; -1:
    none."""

    node: int
    epoch: int = 0
    settled: int = 0
    standby: int = -1


class NodeDied(Struct, array_like=True, tag=36):
    """g→every r→every p: a node is dead; the dead node gets this too, and ends if it can read it. reason: its host,
    and what was noticed. epoch: number of this death, counted from 1; a dead node stays dead. kept_at: other nodes that
    keep objects which its processes owned, where it has left in good order."""

    node: int
    reason: str
    epoch: int = 0
    kept_at: list[int] = []


class Ping(Struct, array_like=True, tag=38):
    """r→r: no heartbeat of the head has arrived. Answer: Heartbeat."""

    node: int


class PeerFailed(Struct, array_like=True, tag=37):
    """r→g: the sender cannot reach this node; the head decides which of the two ends. About the sender itself: it
    ends."""

    node: int
    reason: str


class HeadMoved(Struct, array_like=True, tag=140):
    """r→its p: another raylet is the head now. A process repeats its unanswered requests, with the same numbers."""

    node: int
    epoch: int


class NodeInventory(Struct, array_like=True, tag=141):
    """r→g, first of all after a move of the head: the actors and bundles of the node that have begun. One that is
    missing in it is not there.

    actors: actor, worker (b"" while that is being forked), restarts. bundles: group, index, whether it may be used.
    """

    node: int
    actors: list[tuple[bytes, bytes, int]]
    bundles: list[tuple[bytes, int, bool]]


class StartDriver(Struct, array_like=True, tag=142):
    """g→r of the program, when that is not the head's: every node is up."""


class DriverRegistered(Struct, array_like=True, tag=143):
    """r→g: the job's driver has joined this node, which is not the head's."""

    proc: bytes


class DriverEnded(Struct, array_like=True, tag=144):
    """r→g: the driver, of this node, has ended or is about to end. code: the program's exit code."""

    code: int


class DrainRequest(Struct, array_like=True, tag=110):
    """p→g, r→g: the job should drain. seconds: how long that may take; 0: as configured. signal: the one that
    caused it, 0 for none."""

    reason: str
    seconds: float = 0.0
    signal: int = 0


class Drain(Struct, array_like=True, tag=111):
    """g→every r→every p: start nothing new, `seconds` are left. Sent again when that became less."""

    reason: str
    seconds: float


class DrainReady(Struct, array_like=True, tag=112):
    """driver→g: its callbacks have run, the actors may be saved. interested: whether the program takes part in the
    drain: has callbacks, has queried it, has had an error of it. Sent again when that changes."""

    interested: bool = True


class SaveActor(Struct, array_like=True, tag=113):
    """g→worker of an actor: write its checkpoint between two calls, and run no call after that."""


class ActorSaved(Struct, array_like=True, tag=114):
    """worker→g: the actor is saved. path: the checkpoint, "" when the actor has none to write. error: why it could
    not be written."""

    path: str
    error: str = ""


class DrainOver(Struct, array_like=True, tag=115):
    """g→every r→its drivers: every checkpoint that could be written is; the program may end."""


class RowChange(Struct, array_like=True, frozen=True):
    """One row of the GCS's tables (`core.gcs.state_log`) as it is now. row None: the row was deleted."""

    table: int
    key: bytes
    row: bytes | None


class StateLogAppend(Struct, array_like=True, tag=190):
    """g→r of the standby: rows that have changed. whole: these are all rows, and replace all earlier ones. taken:
    by node, how many of its messages to the head the rows contain. answers: replies that processes get once the
    standby has the rows. numbers: how many nodes have been given a number."""

    serial: int
    changes: list[RowChange]
    whole: bool
    taken: dict[int, int]
    answers: list[tuple[bytes, GcsReply]] = []
    numbers: int = 0


class StateLogAck(Struct, array_like=True, tag=191):
    """r of the standby→g: the rows of StateLogAppend `serial` are stored. 0: the sender is the standby no more, as the
    head has said."""

    serial: int


class HeadLost(Struct, array_like=True, tag=192):
    """r→r of the standby: this node cannot reach the head. The standby itself determines whether the head is dead. From
    the head itself: it leaves the job, and the standby takes over. kept_at: then, as in NodeDied."""

    node: int
    reason: str
    kept_at: list[int] = []


class NewHead(Struct, array_like=True, tag=193):
    """r of the standby→every r: the head has died, and the sender replaces it. taken: how many of the receiver's
    messages to the old head the sender has; the receiver sends the others again, then NodeInventory. died: the old
    head's death."""

    node: int
    term: int
    taken: int
    died: NodeDied
