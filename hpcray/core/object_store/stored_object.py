"""The record of one object in an object store, of its pull and of its pushes, and the table of its states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from heapq import heappop, heappush

from msgspec import Struct, field

from hpcray.common.ids import node_of, owner_of
from hpcray.common.labels import Place
from hpcray.core.effects import CancelReceive, Effect
from hpcray.protocol.messages import Pull
from hpcray.protocol.messages.objects import OVERFLOW

ROOT = -1
"""In place of a node: the root itself sends."""
_CHUNKS_PER_LEVEL = 4
_MIN_DEPTH = 2
_Place = tuple[int, int, int]  # depth, order, node


class BroadcastTree:
    """The tree below one root for one object, while many nodes request it: which node gets it from which.

    Where the places of nodes in the network are known, each switch has a tree of its own, below the first of its nodes
    that requests the object, and so the object crosses the link of each switch once. A switch passes it on to others
    only if the root's has two such others already: it would cross the link of that switch again, on its way out.

    The node that has the object (the *root*) sends it to one or two others, and redirects all further ones to nodes
    that have begun to receive it, which relay each chunk as soon as they have it. The shape follows from two costs: a
    node with two children sends to each at half its speed, and each level of depth costs the time of one chunk. So the
    first readers form a chain, which costs hardly more than one transfer; when it has a quarter as many links as the
    object has chunks, each node gets a second child, whose chains grow likewise, and an object that one chunk holds
    goes down a binary tree.

    Args:
        chunks: in how many pieces the object travels.
        place: of the root in the network.
    """

    def __init__(self, chunks: int, place: Place = ()) -> None:
        depth = max(_MIN_DEPTH, chunks // _CHUNKS_PER_LEVEL)
        self._new_trees = partial(_new_trees, depth)
        self._trees = self._new_trees(place, 0, (0, 0, ROOT))

    def join(self, node: int, order: int, dead: Collection[int], place: Place = ()) -> int:
        """The node from which `node` gets the object: ROOT, or another node that has joined before.

        Args:
            node: index of the node that asks.
            order: its number: higher than that of any other before.
            dead: nodes that relay nothing.
            place: of the node in the network.
        """
        level = len(place)
        while place[:level] not in self._trees or not self._trees[place[:level]].lives(dead):
            if not level:
                break
            level -= 1  # the first of its switch, or the first after all others there have died
        depth, parent = self._trees[place[:level]].find_parent(dead)
        found = (depth + 1, order, node)
        self._trees[place[:level]].add(found)
        self._trees |= self._new_trees(place, level + 1, (0, order, node))
        return parent


def _new_trees(depth: int, place: Place, level: int, root: _Place) -> dict[Place, _SwitchTree]:
    """The trees of the switches on the path to a node, from a level on. Between switches there are no long chains."""
    levels = range(level, len(place) + 1)
    return {place[:below]: _SwitchTree(depth if below == len(place) else 1, root) for below in levels}


class _SwitchTree:
    """The part of a tree that is behind one switch; without places it is all of it.

    Args:
        depth: see `BroadcastTree`.
        root: the first one there.
    """

    def __init__(self, depth: int, root: _Place) -> None:
        self._depth = depth
        self._leaves: list[_Place] = [root]
        self._singles: list[_Place] = []

    def lives(self, dead: Collection[int]) -> bool:
        """Return True if a node here still relays the object."""
        return any(place[2] not in dead for heap in (self._leaves, self._singles) for place in heap)

    def add(self, place: _Place) -> None:
        """A node joins."""
        heappush(self._leaves, place)

    def find_parent(self, dead: Collection[int]) -> tuple[int, int]:
        """Depth and node of the one that is to send to one more."""
        for heap in (self._leaves, self._singles):
            while heap and heap[0][2] in dead:
                heappop(heap)
        grow = self._leaves and (self._leaves[0][0] < self._depth or not self._singles)
        heap = self._leaves if grow else self._singles
        if not heap:
            return 0, ROOT  # all others are dead, and the root has two already
        place = heappop(heap)
        if grow:
            heappush(self._singles, place)
        return place[0], place[2]


class StoredObjectState(Enum):
    """States of an object in one store. WAITING: it has no block yet, the store is full. RESERVING: it gets a range of
    the overflow file instead. SPILLED: it has no block, its bytes lie on disk."""

    WAITING = "waiting"
    RESERVING = "reserving"
    CREATING = "creating"
    PULLING = "pulling"
    SEALED = "sealed"
    SPILLED = "spilled"
    RESTORING = "restoring"


_S = StoredObjectState
TRANSITIONS: Mapping[StoredObjectState, frozenset[StoredObjectState]] = {
    _S.WAITING: frozenset({_S.CREATING, _S.PULLING, _S.RESTORING, _S.SPILLED, _S.RESERVING}),
    _S.RESERVING: frozenset({_S.CREATING, _S.PULLING, _S.WAITING}),
    _S.CREATING: frozenset({_S.SEALED, _S.PULLING}),
    _S.PULLING: frozenset({_S.SEALED}),
    _S.SEALED: frozenset({_S.SPILLED}),
    _S.SPILLED: frozenset({_S.WAITING}),
    _S.RESTORING: frozenset({_S.SEALED, _S.SPILLED, _S.PULLING}),
}
"""For each state, the states that may follow. An object begins WAITING and may leave the store from any state."""


class SpillSlot(Struct, frozen=True):
    """Place of an object on disk: segment, and bytes in it. number: in the order of writing."""

    segment: int
    offset: int
    size: int
    number: int = 0


class ChunkedPush(Struct, eq=False):
    """One object on its way to another node, chunk by chunk.

    Attributes:
        tag: of the first chunk that the receiver requested; those of the others follow.
        chunk: bytes of a chunk; the last one may be shorter.
        first: number of the first chunk that the receiver requested.
        next: the chunk that is sent next.
        order: number of the receiver among those that wait for chunks still to come here.
        flying: sends under way.
        over: no more chunks are sent.
    """

    obj: StoredObject
    node: int
    tag: int
    chunk: int
    first: int
    next: int
    order: int
    flying: int = 0
    over: bool = False

    def size_of(self, tag: int) -> int:
        """Bytes of the chunk with this tag."""
        at = (tag - self.tag + self.first) * self.chunk
        return max(0, min(self.chunk, self.obj.size - at))

    @property
    def complete(self) -> bool:
        """True if every chunk was handed to the data plane."""
        return self.next * self.chunk >= max(1, self.obj.size)


class PullState(Struct, eq=False):
    """The sources of a replica, tried one after the other, and what has arrived.

    An object travels in chunks, each with a receive of its own; the tags of one attempt follow each other. After a
    failure the next node is to send what is missing behind the last gap.

    Attributes:
        sources_left: nodes still to try, the next one first.
        known_sources: every node this pull has known. A node that refuses is not tried twice.
        node: the source now; -1 before the first.
        tag: the first one of this attempt; -1 for none.
        posted: the receives that are not over, tag to number of the chunk.
        cancelled: CancelReceive was issued for them; the block is busy until the data plane has reported all ends.
        chunks_received: so many chunks at the front of the object are here.
        root: the source that may have redirected us, and others, to nodes that relay the object.
        order: the number that the root gave us among the readers of the object; -1: none.
        refusals: so many nodes would not, or could not, send.
        failed: the attempt is over without success.
        parent: the node that the root named; the next source once the receives from the root are over.
        failures: why each source so far did not deliver.
        full: one of them has the object, but no room to read it back from disk.
        broken_links: nodes that were sending when the data link broke: they may still have the object.
        link_retries: so many times the pull has waited before it tried such nodes again.
        retry_at: until then the pull is paused, before the nodes of `broken_links` are tried again; None: it is not.
    """

    sources_left: list[int] = field(default_factory=list)
    known_sources: set[int] = field(default_factory=set)
    node: int = -1
    tag: int = -1
    posted: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False
    chunks_received: int = 0
    root: int = -1
    order: int = -1
    refusals: int = 0
    failed: bool = False
    parent: int = -1
    failures: list[str] = field(default_factory=list)
    full: bool = False
    broken_links: dict[int, None] = field(default_factory=dict)
    link_retries: int = 0
    retry_at: float | None = None
    _out_of_order: set[int] = field(default_factory=set)

    def add_sources(self, nodes: Sequence[int], start: int, near: Callable[[int], int] | None = None) -> None:
        """Add nodes not known yet, from position `start` (modulo their number) on, so that askers spread.

        Args:
            near: how near a node is; nearer ones come first.
        """
        fresh = [node for node in dict.fromkeys(nodes) if node not in self.known_sources]
        if fresh:
            cut = start % len(fresh)
            fresh = fresh[cut:] + fresh[:cut]
            self.sources_left += sorted(fresh, key=near, reverse=True) if near is not None else fresh
            self.known_sources.update(fresh)

    def pop_source(self, dead_nodes: Collection[int]) -> int:
        """Take the next living node off the list of sources; -1: none is left."""
        parent, self.parent = self.parent, -1
        if parent >= 0:
            self.known_sources.add(parent)
            # Should the parent fail, the root is tried again.
            self.sources_left = [parent, self.root, *(node for node in self.sources_left if node != parent)]
        while self.sources_left:
            node = self.sources_left.pop(0)
            if node not in dead_nodes:
                return node
            self.failures.append(f"node {node}: the node died")
            self.root = self.order = -1
        return -1

    def start_attempt(self, node: int, tag: int, tags: Mapping[int, int]) -> None:
        """Receives with these tags (each with the number of its chunk) are posted, and `node` is the source."""
        self.node, self.tag, self.retry_at = node, tag, None
        if self.root < 0:
            self.root = node
        self._out_of_order.clear()
        self.posted.update(tags)

    def possible_sources(self) -> list[int]:
        """Nodes that may have the object whole."""
        return [*([self.root] if self.root >= 0 else []), *(node for node in self.sources_left if node != self.root)]

    def can_relay_to(self, msg: Pull) -> bool:
        """True if the sender of `msg` may wait here for chunks that are still to come.

        Nodes that wait for each other in a circle would wait for ever. So only those wait whom the root of this very
        attempt has sent, with a higher number than ours; and when our root or our number changes, they are refused.
        """
        return self.tag >= 0 and msg.root == self.root and self.order < msg.order

    def cancel_attempt(self, reason: str, out: list[Effect], blame: bool = True) -> None:
        """Take the posted receives back; the data plane reports their ends, and only then the next node is tried.

        Args:
            blame: whether it counts among `refusals`: not where the next attempt has no reason to end likewise.
        """
        if not self.cancelled:
            self.failures.append(f"node {self.node}: {reason}")
            self.failed = True
            self.refusals += blame
            self._cancel_receives(out)

    def forget_root(self) -> None:
        """An attempt has failed and no node waits here: the next source is our root."""
        self.failed = False
        self.root = self.order = -1

    def redirect_to(self, parent: int, order: int, out: list[Effect]) -> None:
        """The root names `parent` as the source, and gives us the number `order`."""
        if not self.cancelled:
            self.parent, self.order = parent, order
            self._cancel_receives(out)

    def receive_ended(self, tag: int, error: str | None, out: list[Effect]) -> None:
        """A posted receive is over. After a failed one, which means a broken data link, the others are taken back."""
        index = self.posted.pop(tag)
        if error is None:
            self._out_of_order.add(index)
            while self.chunks_received in self._out_of_order:
                self._out_of_order.discard(self.chunks_received)
                self.chunks_received += 1
        elif not self.cancelled:
            self.broken_links[self.node] = None
            self.cancel_attempt(error, out)
        if not self.posted:
            self.tag = -1
            self.cancelled = False

    def retry_broken_links(self, dead_nodes: Collection[int]) -> None:
        """The pause is over: the living nodes behind broken links are sources again."""
        self.retry_at = None
        self.sources_left += [
            node for node in self.broken_links if node not in dead_nodes and node not in self.sources_left
        ]
        self.broken_links.clear()

    def _cancel_receives(self, out: list[Effect]) -> None:
        self.cancelled = True
        out.extend(CancelReceive(tag) for tag in self.posted)


class StoredObject(Struct, eq=False):
    """All that the store knows of one object.

    Attributes:
        creator: the process that fills it; None for a replica, which the data plane fills.
        since: when it began to wait for a block.
        pins: processes that may have it mapped; a set, since a process holds one pin however many views it has.
        io_reads: transfers to other nodes and writes to disk that read its block or its place on disk.
        openers: processes that wait to read it, in order of asking.
        waiting_pulls: other nodes' pulls that wait until it is sealed, or read back from disk.
        freed: its owner dropped it (or died): it goes with the last pin, and the last process that it is kept for.
        pull: where to get a replica; present for an object in creation too, in case its creator dies.
        announcer: the process that was made to announce this replica to the owner; None: no process yet.
        spill_slot: where its bytes lie on disk, whether or not they are in memory too.
        priority: of its pull: see `protocol.messages.Open`.
        received_bytes: bytes at its front that have arrived, while it is received.
        pushes: the nodes that are being sent it from memory, by tag.
        broadcast_tree: which of these nodes gets it from which, while there are any.
        forgotten: it left the store; only sends that are not over hold its block.
        prefetched: it is fetched before any process asks for it.
        replica_pinners: processes for which this replica of another node's object stays, in memory or on disk.
        replica_pin_waiters: those of `replica_pinners` that have not heard yet that it is here, in order of asking.
        promoted: this replica took the primary's place: it stays until it is freed.
    """

    id: bytes
    size: int
    creator: bytes | None
    since: float
    state: StoredObjectState = StoredObjectState.WAITING
    offset: int = -1
    pins: set[bytes] = field(default_factory=set)
    io_reads: int = 0
    openers: dict[bytes, None] = field(default_factory=dict)
    waiting_pulls: list[tuple[int, Pull]] = field(default_factory=list)
    freed: bool = False
    pull: PullState | None = None
    announcer: bytes | None = None
    spill_slot: SpillSlot | None = None
    priority: int = 0
    received_bytes: int = 0
    pushes: dict[int, ChunkedPush] = field(default_factory=dict)
    broadcast_tree: BroadcastTree | None = None
    forgotten: bool = False
    prefetched: bool = False
    replica_pinners: set[bytes] = field(default_factory=set)
    replica_pin_waiters: dict[bytes, None] = field(default_factory=dict)
    promoted: bool = False

    def change_state(self, state: StoredObjectState) -> None:
        """Go on to a state that `TRANSITIONS` allows."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"object {self.id.hex()} must not go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def awaited(self) -> bool:
        """True if a process or another node waits for it."""
        return bool(self.openers or self.replica_pin_waiters or self.waiting_pulls or self.pushes)

    @property
    def requested(self) -> bool:
        """True if a process or another node waits for it, or soon will."""
        return self.prefetched or self.awaited

    def has_client(self, proc: bytes) -> bool:
        """True if the death of this process changes anything here, were it not the owner."""
        return (
            proc in self.pins
            or proc in self.openers
            or proc in self.replica_pinners
            or self.announcer == proc
            or (self.creator == proc and self.being_created)
        )

    @property
    def being_created(self) -> bool:
        """True if its creator has not sealed it."""
        return self.spill_slot is None and (
            self.state is StoredObjectState.WAITING
            or self.state is StoredObjectState.CREATING
            or self.state is StoredObjectState.RESERVING
        )

    @property
    def only_on_disk(self) -> bool:
        """True if its bytes lie on disk, and are not on their way back."""
        return self.spill_slot is not None and self.state in (StoredObjectState.SPILLED, StoredObjectState.WAITING)

    @property
    def overflows(self) -> bool:
        """True if its bytes lie in the overflow file, or will."""
        return self.offset >= OVERFLOW

    @property
    def preserved(self) -> bool:
        """True if it goes to disk where a mere copy would be evicted: a primary, a pinned or a promoted replica."""
        return self.creator is not None or self.promoted or bool(self.replica_pinners)

    @property
    def kept(self) -> bool:
        """True if it stays for a process that does not own it, as its owner has left, or is about to."""
        owner = owner_of(self.id)
        return any(proc != owner for proc in self.replica_pinners)

    @property
    def unneeded(self) -> bool:
        """True if it goes as soon as nothing reads it."""
        return self.freed and not (self.replica_pinners and self.kept)

    @property
    def idle(self) -> bool:
        """Sealed, and nothing reads it."""
        return self.state is StoredObjectState.SEALED and not self.pins and not self.io_reads


class ObjectsByClient:
    """The objects of one store, by the processes that are clients of them and by their owners.

    Attributes:
        awaited_elsewhere: those that other nodes wait for (`StoredObject.waiting_pulls`).
    """

    def __init__(self) -> None:
        self.awaited_elsewhere: dict[bytes, StoredObject] = {}
        self._by_client: dict[bytes, dict[bytes, StoredObject]] = {}
        self._by_owner: dict[bytes, dict[bytes, StoredObject]] = {}

    def pinners(self) -> list[bytes]:
        """The processes that have an object pinned."""
        return [proc for proc, objects in self._by_client.items() if any(proc in obj.pins for obj in objects.values())]

    def clients(self) -> list[bytes]:
        """The processes that are clients of an object."""
        return list(self._by_client)

    def objects_of_client(self, proc: bytes) -> list[StoredObject]:
        """Objects of which the process is a client (`StoredObject.has_client`)."""
        return list(self._by_client.get(proc, {}).values())

    def objects_of_owner(self, proc: bytes) -> list[StoredObject]:
        """Objects that the process owns, in whatever store their primary copy is."""
        return list(self._by_owner.get(proc, {}).values())

    def objects_of_owning_node(self, node: int) -> list[StoredObject]:
        """Objects that processes of the node own."""
        owners = [proc for proc in self._by_owner if node_of(proc) == node]
        return [obj for proc in owners for obj in self._by_owner[proc].values()]

    def add_object(self, obj: StoredObject) -> None:
        """An object came into the store."""
        self._by_owner.setdefault(owner_of(obj.id), {})[obj.id] = obj
        if obj.creator is not None:
            self.add_client(obj.creator, obj)

    def remove_object(self, obj: StoredObject) -> None:
        """The object left the store."""
        self.awaited_elsewhere.pop(obj.id, None)
        _discard(self._by_owner, owner_of(obj.id), obj)
        for proc in {*obj.pins, *obj.openers, *obj.replica_pinners, obj.creator, obj.announcer}:
            if proc is not None:
                _discard(self._by_client, proc, obj)

    def add_waiting_pull(self, obj: StoredObject, node: int, msg: Pull) -> None:
        """A node waits for an object that is being made, or read back from disk."""
        obj.waiting_pulls.append((node, msg))
        self.awaited_elsewhere[obj.id] = obj

    def take_waiting_pulls(self, obj: StoredObject) -> list[tuple[int, Pull]]:
        """Return what nodes wait for, and forget it."""
        self.awaited_elsewhere.pop(obj.id, None)
        waiting, obj.waiting_pulls = obj.waiting_pulls, []
        return waiting

    def add_client(self, proc: bytes, obj: StoredObject) -> None:
        """The process becomes a client of the object."""
        self._by_client.setdefault(proc, {})[obj.id] = obj

    def drop_client(self, proc: bytes, obj: StoredObject) -> None:
        """The process gave up one part in the object; it stays a client where it has another."""
        if not obj.has_client(proc):
            _discard(self._by_client, proc, obj)

    def __len__(self) -> int:
        """Number of pairs of process and object."""
        return sum(map(len, self._by_client.values()))

    def check_invariants(self, objects: dict[bytes, StoredObject], own_raylet: bytes) -> None:
        """The index and the objects agree; the raylet that announces replicas itself needs no entry."""
        indexed = {(proc, ident) for proc, held in self._by_client.items() for ident in held}
        clients = {
            (proc, obj.id)
            for obj in objects.values()
            for proc in {*obj.pins, *obj.openers, *obj.replica_pinners, obj.announcer, obj.creator}
            if proc is not None and proc != own_raylet and obj.has_client(proc)
        }
        assert clients <= indexed, f"not in the index: {clients - indexed}"
        for proc, ident in indexed:
            obj = objects.get(ident)
            assert obj is not None and self._by_client[proc][ident] is obj, f"{ident.hex()} left, and has a client"
            assert obj.has_client(proc) or obj.creator == proc, f"a process is indexed for {ident.hex()} without a part"
        owned = {obj.id: obj for held in self._by_owner.values() for obj in held.values()}
        assert owned == objects, "the index by owner and the objects differ"


def _discard(index: dict[bytes, dict[bytes, StoredObject]], key: bytes, obj: StoredObject) -> None:
    objects = index.get(key)
    if objects is not None and objects.pop(obj.id, None) is not None and not objects:
        del index[key]
