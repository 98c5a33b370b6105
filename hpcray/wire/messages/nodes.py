"""Messages of nodes: joining, dying, the announced end of the job. See `wire.messages`."""

from __future__ import annotations

from msgspec import Struct

from hpcray.wire.messages.processes import RunInfo
from hpcray.wire.messages.shapes import Resources


class NodeInfo(Struct, array_like=True, frozen=True):
    """One node as the GCS knows it. session_dir: where its processes listen, for other nodes of its host; "": not for
    them."""

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
    """r→g and g→r, every period. epoch: number of nodes that have died, as far as the sender knows. settled: how many
    of this node's messages to the head its successor would know of."""

    node: int
    epoch: int = 0
    settled: int = 0


class NodeDied(Struct, array_like=True, tag=36):
    """g→every r→every p, and to the dead node itself, which has to end if it can read this. reason: its host, and what
    was noticed. epoch: this is the so-manieth death; a node that died stays dead."""

    node: int
    reason: str
    epoch: int = 0


class Ping(Struct, array_like=True, tag=38):
    """r→r: I hear nothing from the head. Answer: Heartbeat."""

    node: int


class PeerFailed(Struct, array_like=True, tag=37):
    """r→g: I cannot reach that node, and the head decides which of us goes. About itself: I end."""

    node: int
    reason: str


class HeadMoved(Struct, array_like=True, tag=140):
    """r→its p: another raylet is the head now. What was asked and not answered is asked again, with the same number."""

    node: int
    epoch: int


class Held(Struct, array_like=True, tag=141):
    """r→g, first of all after a move: what is here by the old head's word and has begun. What is not in it is not here.

    actors: actor, worker (b"" while that is being forked), restarts. bundles: group, index, whether it may be used.
    """

    node: int
    actors: list[tuple[bytes, bytes, int]]
    bundles: list[tuple[bytes, int, bool]]


class DriverMayStart(Struct, array_like=True, tag=142):
    """g→the r that has the program, when that is not the head's: every node is up."""


class DriverIs(Struct, array_like=True, tag=143):
    """r→g: the job's driver has joined this node, which is not the head's."""

    proc: bytes


class DriverEnded(Struct, array_like=True, tag=144):
    """r→g: the driver, of this node, has ended or says goodbye. code: the program's exit code."""

    code: int


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
