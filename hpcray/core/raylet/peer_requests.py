"""Requests of this node for leases of other nodes that are sent there by its raylet, and not through the GCS.

In a large cluster the GCS cannot take part in every lease that one node grants to a process of another. For three kinds
of requests the raylet of the process knows enough to select nodes itself:

near        the node that has the arguments: there the request queues (here, if it is this one).
in a group  the nodes that have the bundles of a placement group, which the GCS has sent once: the request queues at all
            of them, the first with room grants it, and it is withdrawn from the others (late binding).
anywhere    what any node may serve. Nodes in turn, near ones first, are asked to grant it at once;
            after some refusals it queues at a few others, late bound as above.

The GCS takes a request over as soon as there is something to decide: when nodes refuse or die, or after a time that
each kind has. So every request is at the GCS in the end, whatever was lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import gcd

from msgspec import Struct, field

from hpcray.common.ids import raylet_of
from hpcray.common.labels import NEAR, Place, nearest_nodes, place_of
from hpcray.common.resources import ANY, LATE_BOUND_NODES
from hpcray.core.effects import Effect, Send
from hpcray.core.raylet.lease_requests import LeaseRequest
from hpcray.protocol import messages as m

MOST_COMING = 64
"""Leases of one request that a node is asked for at once, at most; more when some have arrived. A request for more
leases that any node may serve is the GCS's at once: it has a view of all nodes, and sends each of them one message."""
PROBES = 4
"""Nodes that are asked at once for leases that any node may serve."""
REFUSALS = 3
"""Refusals in a row after which such a request queues at other nodes."""
QUEUES = 3
"""Nodes where it queues then."""
SPILLED_WAIT, SPILLED_FOR = 0.1, 2.0
"""Seconds without a lease after which the GCS takes such a request over, and seconds after which it does so anyhow."""
GROUP_WAIT = 8.0
"""Seconds without a lease after which the GCS takes over a request in a placement group."""
GROUPS_KEPT = 1 << 12
"""Placement groups whose nodes are remembered; of others the GCS sends them again."""
IN_GROUP, ANYWHERE = "in a group", "anywhere"
"""Kinds of requests, beside `NEAR`."""
TURNS_AFTER_REFUSAL = 16
"""Choices of a node in which near ones do not come first after one of them has refused a request."""
_FACTOR = 2654435761


class PeerRequest(Struct, eq=False):
    """A request that other nodes know, and the GCS does not.

    Attributes:
        nodes: where it queues, or may.
        count, received: leases that its holder lacked, and had ever received of other nodes, when it last changed.
        coming: how many leases nodes were asked for that have not arrived. Of requests that queue at several nodes:
            how many each of them may grant.
        refusals: how often it was refused since a lease came.
    """

    request: LeaseRequest
    kind: str
    nodes: list[int] = field(default_factory=list)
    count: int = 0
    received: int = 0
    coming: int = 0
    refusals: int = 0

    @property
    def is_late_bound(self) -> bool:
        """True if it queues at several nodes, or may."""
        return self.kind == IN_GROUP or (self.kind == ANYWHERE and bool(self.nodes))

    def due(self, locality_wait: float) -> float:
        """The time at which the GCS takes it over."""
        request = self.request
        if self.kind == NEAR:
            return request.peers_since + locality_wait
        if self.kind == IN_GROUP:
            return request.peers_served_at + GROUP_WAIT
        return min(request.peers_served_at + SPILLED_WAIT, request.peers_since + SPILLED_FOR)


class PeerRequests:
    """Sends requests of this node to other nodes, see above.

    Args:
        node: index of this node.
        locality_wait: seconds for which a request waits for the node that has its arguments.
        cluster_size: number of nodes, those that have died included.
        enabled: whether the cluster is large.
        spare_gpus: whether nodes with GPUs are to refuse what asks for none: this one has none either.

    Attributes:
        enabled: as given; False: the GCS gets all requests.
        due_at: no request is overdue before.
    """

    def __init__(
        self, node: int, locality_wait: float, cluster_size: int, enabled: bool, spare_gpus: bool = False
    ) -> None:
        self.enabled = enabled
        self._node = node
        self._spare_gpus = spare_gpus
        self._locality_wait = locality_wait
        self._open: dict[tuple[bytes, int], PeerRequest] = {}
        self.due_at = float("inf")
        self._sent_to: dict[bytes, set[int]] = {}  # by holder, also those that have refused
        self._dead: set[int] = set()
        self._groups: OrderedDict[str, Sequence[int]] = OrderedDict()
        self._turn = 0
        self._places: dict[int, Place] = {}
        self._nearest: list[int] = []
        self._turns_left = 0
        self.cluster_grew(cluster_size, enabled)

    def cluster_grew(self, cluster_size: int, enabled: bool) -> None:
        """The cluster has so many nodes now. enabled: whether it is large."""
        self.enabled = enabled
        self._size = cluster_size
        step = 1 + self._node * _FACTOR % max(1, cluster_size - 1)
        while gcd(step, cluster_size) > 1:
            step += 1
        self._step = step

    def nodes_placed(self, nodes: Iterable[m.NodeInfo]) -> None:
        """Note where nodes are in the network. The first call is about this one too."""
        self._places.update((info.index, place_of(info.labels)) for info in nodes)
        self._nearest = nearest_nodes(self._node, self._places)

    def note_group_nodes(self, groups: Iterable[tuple[bytes, list[int]]]) -> None:
        """Note the node of each bundle of these placement groups, as the GCS has sent them."""
        for group, nodes in groups:
            self._groups[group.hex()] = nodes
            self._groups.move_to_end(group.hex())
            if len(self._groups) > GROUPS_KEPT:
                self._groups.popitem(last=False)

    def update(self, now: float, request: LeaseRequest, out: list[Effect]) -> bool:
        """Counts of a request have changed. Returns True if other nodes know of it; else the GCS has to."""
        key = (request.holder, request.scheduling_class)
        peer, count = self._open.get(key), request.unserved()
        if peer is None:
            if not count or (peer := self._open_request(now, request)) is None:
                return False
            self._open[key] = peer
        arrived = max(peer.count - count, request.received - peer.received)
        if arrived > 0:
            request.peers_served_at, peer.refusals = now, 0
        peer.received = request.received
        if not count:
            del self._open[key]
            self._withdraw(peer, peer.nodes, out)
            return True
        if peer.kind == ANYWHERE and count > MOST_COMING:
            self._close(peer, out)
            return False
        if peer.is_late_bound:
            self._queue_at_all(peer, count, arrived > 0, out)
            return True
        peer.coming, peer.count = max(0, peer.coming - max(0, arrived)), count
        if peer.kind == ANYWHERE:
            return self._probe(peer, out)
        lacking = min(count, max(1, request.capacity), MOST_COMING) - peer.coming
        if lacking > 0 and peer.nodes:
            peer.coming += lacking
            self._send(peer, peer.nodes[0], lacking, out)
        return True

    def nothing_coming(self, request: LeaseRequest) -> None:
        """The holder repeats a request: it has returned a lease, and what was coming may be that one."""
        peer = self._open.get((request.holder, request.scheduling_class))
        if peer is not None:
            peer.coming = 0

    def overdue(self, now: float, out: list[Effect]) -> list[LeaseRequest]:
        """The requests that have waited long enough: the GCS takes them over, what queues elsewhere is withdrawn."""
        dues = [(peer.due(self._locality_wait), peer) for peer in self._open.values()]
        self.due_at = min((due for due, _ in dues if due > now), default=float("inf"))
        return [self._close(peer, out) for due, peer in dues if due <= now]

    def refused(
        self, node: int, holder: bytes, scheduling_class: int, count: int, out: list[Effect]
    ) -> LeaseRequest | None:
        """A node does not serve a request, or no further: returns it; None if the GCS has it already."""
        peer = self._open.get((holder, scheduling_class))
        if peer is None:
            return None
        peer.request.asked -= count
        if peer.kind == ANYWHERE and not peer.nodes:
            peer.coming = max(0, peer.coming - count)
            peer.refusals += 1
            self._turns_left = TURNS_AFTER_REFUSAL if node in self._nearest else self._turns_left
        elif node not in peer.nodes:
            return None
        elif peer.kind == ANYWHERE and len(peer.nodes) > 1:
            self._withdraw(peer, [node], out)  # it may have been a part, or a probe of before
            peer.nodes.remove(node)
        else:
            if peer.request.bundle is not None:
                self._groups.pop(peer.request.bundle[0], None)
            self._close(peer, out)
        return peer.request

    def node_died(self, node: int, out: list[Effect]) -> list[LeaseRequest]:
        """A node is dead: returns the requests that the GCS takes over."""
        self._dead.add(node)
        for group in [group for group, nodes in self._groups.items() if node in nodes]:
            del self._groups[group]
        found = []
        for peer in list(self._open.values()):
            if node in peer.nodes:
                peer.nodes.remove(node)
                found.append(self._close(peer, out))
            elif peer.kind == ANYWHERE and not peer.nodes:
                found.append(self._close(peer, out))  # perhaps it was this node that was asked
        return found

    def holder_died(self, holder: bytes, reason: str) -> list[Effect]:
        """A process of this node is gone. The nodes that were asked for leases for it learn that after the requests."""
        for key in [key for key in self._open if key[0] == holder]:
            del self._open[key]
        nodes = self._sent_to.pop(holder, set()) - self._dead - {self._node}
        return [Send(raylet_of(node), m.ProcDied(holder, reason)) for node in sorted(nodes)]

    def check_invariants(self, requests: Iterable[LeaseRequest]) -> None:
        """Raise AssertionError unless each request is at other nodes, or at the GCS, and nowhere twice.

        Args:
            requests: all of this node.
        """
        for one in requests:
            peer = self._open.get((one.holder, one.scheduling_class))
            if peer is None:
                continue
            where = f"{one.unserved()} leases {peer.kind} {peer.nodes} for {one.holder.hex()}"
            assert peer.request is one and peer.count == one.unserved() > 0, f"{where}: {peer.count} are noted"
            alone = peer.kind == NEAR and not peer.nodes
            assert (peer.coming > 0) != alone, f"{where}: {peer.coming} are coming"
            assert not self._dead & set(peer.nodes), f"{where}: a node is dead"
            assert peer.is_late_bound or peer.coming <= peer.count, f"{where}: {peer.coming} are coming"
            assert peer.due(self._locality_wait) >= self.due_at, f"{where}: the GCS does not take over"
            assert not one.reported_count, f"{where}: the GCS has them too"

    def _open_request(self, now: float, request: LeaseRequest) -> PeerRequest | None:
        """The request as one for other nodes; None where the GCS is to have it."""
        if not self.enabled or request.at_gcs or request.reported_count:
            return None
        if request.near is not None:
            if self._locality_wait <= 0 or request.near in self._dead:
                return None
            if request.near == self._node and not request.decided_here:
                return None
            peer = PeerRequest(request, NEAR, [request.near] if request.near != self._node else [])
        elif request.bundle is not None:
            if not (nodes := self._nodes_of_group(request)):
                return None
            peer = PeerRequest(request, IN_GROUP, nodes)
        elif request.spills:
            peer = PeerRequest(request, ANYWHERE)
        else:
            return None
        request.peers_since = request.peers_served_at = now
        peer.received = request.received
        self.due_at = min(self.due_at, peer.due(self._locality_wait))
        return peer

    def _nodes_of_group(self, request: LeaseRequest) -> list[int]:
        """The other nodes that may serve a request in a group; none where they are too many, or not known."""
        assert request.bundle is not None
        group, index = request.bundle
        at = self._groups.get(group)
        if at is None or index >= len(at):
            return []
        nodes = {at[index]} if index != ANY else set(at)
        nodes.discard(self._node)
        return sorted(nodes) if len(nodes) <= LATE_BOUND_NODES and not nodes & self._dead else []

    def _probe(self, peer: PeerRequest, out: list[Effect]) -> bool:
        """Ask the next nodes for what is lacking, or let it queue at them after refusals. False: the GCS gets it."""
        lacking = peer.count - peer.coming
        if lacking <= 0:
            return True
        queue = peer.refusals >= REFUSALS
        nodes = self._next_nodes(QUEUES if queue else min(PROBES, lacking), peer.request.shape.strategy != "")
        if not nodes:
            self._close(peer, out)
            return False
        if queue:
            peer.nodes = nodes
            self._queue_at_all(peer, peer.count, True, out)
            return True
        peer.coming += lacking
        for index, node in enumerate(nodes):
            self._send(peer, node, (lacking + index) // len(nodes), out, wait=False)
        return True

    def _queue_at_all(self, peer: PeerRequest, count: int, again: bool, out: list[Effect]) -> None:
        """Let so many queue at each node; where it is the same as before only if some of it has been granted."""
        peer.count = count
        each = min(MOST_COMING, count if peer.kind == IN_GROUP else (count + 1) // 2)
        if each != peer.coming or again:
            peer.coming = each
            for node in peer.nodes:
                self._send(peer, node, each, out)

    def _next_nodes(self, count: int, itself: bool) -> list[int]:
        """The next living nodes in turn, in an order of this raylet's own; the nearest come first.

        Args:
            itself: this node too, and near nodes as all others.
        """
        found: list[int] = []
        if not self._turns_left and not itself:
            self._nearest = self._nearest[count:] + self._nearest[:count]
            found = [node for node in self._nearest[-count:] if node not in self._dead]
        self._turns_left = max(0, self._turns_left - count)
        for _ in range(0 if found else self._size):
            self._turn = (self._turn + self._step) % self._size
            node = self._turn
            if node not in self._dead and (itself or node != self._node):
                found.append(node)
                if len(found) == count:
                    break
        return found

    def _close(self, peer: PeerRequest, out: list[Effect]) -> LeaseRequest:
        """The GCS takes the request over, until nothing is lacking."""
        del self._open[peer.request.holder, peer.request.scheduling_class]
        peer.request.at_gcs = True
        self._withdraw(peer, peer.nodes, out)
        return peer.request

    def _withdraw(self, peer: PeerRequest, nodes: Iterable[int], out: list[Effect]) -> None:
        """Let nothing of a request queue at these nodes any more."""
        if peer.request.asked <= peer.request.received:
            return  # all that nodes were ever asked for has arrived, or was refused
        for node in nodes:
            self._send(peer, node, 0, out)

    def _send(self, peer: PeerRequest, node: int, count: int, out: list[Effect], wait: bool = True) -> None:
        request = peer.request
        request.asked += count
        self._sent_to.setdefault(request.holder, set()).add(node)
        absolute, spare = wait and peer.kind != NEAR, self._spare_gpus and peer.kind == ANYWHERE
        message = m.PeerLeaseRequest(
            request.holder, request.scheduling_class, request.shape, count, wait, absolute, spare
        )
        out.append(Send(raylet_of(node), message))
