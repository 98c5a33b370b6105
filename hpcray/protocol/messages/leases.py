"""Messages about leases, and the types that several kinds of message carry."""

from __future__ import annotations

from msgspec import Struct

Resources = dict[str, int]


class Shape(Struct, array_like=True, frozen=True):
    """What a lease or an actor asks of a node. Equal shapes share leases.

    resources: units; strategy: "" (hybrid), "SPREAD", "node:<index>[:soft|:fail]", "labels:<conditions>"
    (`common.labels`), "near:<index>" for tasks whose arguments are on that node, or "group[:capture]" for a request in
    a placement group; env: environment variables that the worker must have (a worker serves one env for life).
    """

    resources: tuple[tuple[str, int], ...]
    strategy: str = ""
    env: tuple[tuple[str, str], ...] = ()


class RequestLeases(Struct, array_like=True, tag=10):
    """p→own r. `total` is cumulative: leases this holder has ever received *from its own raylet* for this scheduling
    class, plus those it requests now. The raylet's outstanding count is `total` minus what it granted itself: no lease
    is granted twice. received: leases ever received from other nodes for this scheduling class: what was coming from
    there and is not among them is still on its way."""

    scheduling_class: int
    shape: Shape
    total: int
    received: int = 0


class LeaseGranted(Struct, array_like=True, tag=11):
    """r (any node)→p: a lease. contended: other requests wait for its resources; the holder returns it as soon as
    it has no task for it."""

    scheduling_class: int
    lease: bytes
    worker: bytes
    contended: bool = False


class ReturnLease(Struct, array_like=True, tag=12):
    """p→the granting r. bad: the worker must not be reused."""

    lease: bytes
    bad: bool = False


class ReclaimIdle(Struct, array_like=True, tag=13):
    """r→p: other requests wait; return the leases of this node that are idle, and keep none that becomes idle.
    busy: also those at work, once their pushed tasks are done."""

    busy: bool = True


class Blocked(Struct, array_like=True, tag=14):
    """worker→own r: its task waits in get/wait; others may use its CPU. retired: it has had its `max_calls`, and stays
    only as long as others refer to its objects: its lease has ended, and others may use all that it held."""

    retired: bool = False


class Unblocked(Struct, array_like=True, tag=15):
    """worker→own r: it runs again and takes its CPU back at once (over-commitment is allowed here)."""


class Infeasible(Struct, array_like=True, tag=16):
    """r→p: no node of the cluster can ever run this shape; the reason names what every node has.

    waits: the shape could be run, but its request has waited for long; repeated from time to time. fails: the tasks of
    this class end in an error, as the nodes that they name cannot run them.
    """

    scheduling_class: int
    reason: str
    waits: bool = False
    fails: bool = False


class LeaseRevoked(Struct, array_like=True, tag=17):
    """r→holder: the leased worker died."""

    lease: bytes
    worker: bytes
    reason: str


class LeasesCapped(Struct, array_like=True, tag=18):
    """r→holder: a node has room for a further lease of this class, and holds it back for a while: the tasks that have
    the others are blocked. reason: for the user, when that takes as long as it ever does."""

    scheduling_class: int
    reason: str = ""


class UnmetLeaseRequest(Struct, array_like=True, tag=20):
    """r→g: leases of one holder's scheduling class that this node cannot grant now (absolute count; 0 withdraws).
    shared: it has room, and leaves the choice of the node to the GCS for a moment. waited, unserved_for: for how long
    they were lacking before this report, and the holder has got none (see PeerLeaseRequest). received: as in
    RequestLeases."""

    holder: bytes
    scheduling_class: int
    shape: Shape
    count: int
    shared: bool = False
    waited: float = 0.0
    unserved_for: float = 0.0
    received: int = 0


class GrantLeases(Struct, array_like=True, tag=21):
    """g→r: try to grant up to `count` leases to this holder. absolute: `count` replaces what earlier messages let queue
    at this node, instead of adding to it."""

    holder: bytes
    scheduling_class: int
    shape: Shape
    count: int
    absolute: bool = False


class GrantLeasesRefused(Struct, array_like=True, tag=22):
    """r→g: this many leases of a GrantLeases did not fit any more."""

    holder: bytes
    scheduling_class: int
    count: int


class PeerLeaseRequest(Struct, array_like=True, tag=25):
    """r→r: a process of the sender's node lacks `count` more leases: for tasks whose arguments are on the receiver's
    node, or that it may serve like other nodes. It grants them, or lets them queue. 0 withdraws what queues there.

    wait: False: what is not granted at once is refused. absolute: as in GrantLeases. spare_gpus: a node with GPUs
    refuses what asks for none."""

    holder: bytes
    scheduling_class: int
    shape: Shape
    count: int
    wait: bool = True
    absolute: bool = False
    spare_gpus: bool = False


class PeerLeasesRefused(Struct, array_like=True, tag=26):
    """r→r: this many leases of a PeerLeaseRequest were not granted, and do not queue any more: another node, or the
    GCS, is to serve them."""

    holder: bytes
    scheduling_class: int
    count: int


class PlacementGroupNodes(Struct, array_like=True, tag=27):
    """g→r: the node of each bundle of these placement groups (-1: none). The raylet may send requests in the groups
    there."""

    groups: list[tuple[bytes, list[int]]]


class NodeView(Struct, array_like=True, tag=23):
    """r→g: available resources of a node, those that changed since its last view (amounts are absolute, views numbered;
    they come in order). bundles: the same for what is free in bundles of placement groups; lasting: for what actors and
    bundles hold."""

    node: int
    version: int
    available: Resources
    bundles: Resources = {}
    lasting: Resources = {}


class ResourceContention(Struct, array_like=True, tag=24):
    """g→r: requests wait because these resources are short. No lease that holds any of them should idle, here either,
    except those of this holder's scheduling class, if it is the only one that waits. An empty list: none waits."""

    lacking: list[str] = []
    holder: bytes = b""
    scheduling_class: int = 0
