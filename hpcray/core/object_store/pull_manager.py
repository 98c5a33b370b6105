"""The receiving side of transfers: which objects the data plane fills, which node is the next source, which pulls wait.

A pull whose data link broke is not over while the node at the other end lives: the link may come back, and the node
may be the only one that has the object. Such a pull pauses, longer each time, and tries the same node again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcray.common.ids import PROC_BYTES, TASK_BYTES, raylet_of
from hpcray.common.labels import NO_PLACES, Place, nearness
from hpcray.core.effects import Effect, Send, StartReceive
from hpcray.core.object_store.push_manager import PushManager, chunk_count
from hpcray.core.object_store.stored_object import PullState, StoredObject, StoredObjectState
from hpcray.protocol.messages import Pull, PullElsewhere, PullRefused

CHUNK_BYTES = 4 << 20
"""Bytes of a chunk, by default: a large object travels in chunks, so that what has come can be passed on."""
MAX_LINK_RETRIES = 5
"""Times that a pull tries nodes again whose data link broke, before the object counts as lost."""
FIRST_LINK_RETRY_DELAY = 0.25
"""Seconds before the first of these; twice as many before each further one."""
MIN_ACTIVE_PULLS = 4
"""Number of pulls that are always under way: one slow source must not hold up the others."""
ACTIVE_PULL_BYTES = 256 << 20
"""More pulls are under way while their objects have fewer bytes than this."""
PRIORITIES = 3
"""Priorities go from 0, the most urgent, to one less than this."""

_PAGE = 4096
_TAG_NODE_SHIFT = 48
_MAX_REDIRECTED_ATTEMPTS = 3  # after so many failures we insist that the node sends by itself
_SOURCE_CHANGED = "it is received from another node than was thought"


class PullAdmission:
    """The pulls of one node, by priority, oldest first.

    A pull that is not admitted has no block and no receive. Those of lower priority do not count against others, so a
    `get` never waits for what is prefetched. An admitted pull may still wait for a block; the caller serves those
    requests by priority, too.
    """

    def __init__(self) -> None:
        self._active: dict[bytes, StoredObject] = {}
        self._active_counts = [0] * PRIORITIES
        self._active_bytes = [0] * PRIORITIES
        self._waiting: list[dict[bytes, StoredObject]] = [{} for _ in range(PRIORITIES)]

    def admit(self, obj: StoredObject) -> bool:
        """True if the pull may begin now; if not, `admit_next` returns it later."""
        if self._may_begin(obj.priority) and not any(self._waiting[: obj.priority + 1]):
            self._activate(obj)
            return True
        self._waiting[obj.priority][obj.id] = obj
        return False

    def raise_priority(self, obj: StoredObject, priority: int) -> None:
        """The object is needed more urgently than was known."""
        if priority >= obj.priority:
            return
        if self._active.get(obj.id) is obj:
            self._deactivate(obj)
            obj.priority = priority
            self._activate(obj)
        elif self._waiting[obj.priority].pop(obj.id, None) is not None:
            self._waiting[priority][obj.id] = obj
        obj.priority = priority

    def readmit(self, obj: StoredObject) -> None:
        """A pull that paused goes on, before those that have not begun."""
        if self._active.get(obj.id) is not obj:
            self._activate(obj)

    def admit_next(self) -> StoredObject | None:
        """A pull that may begin now and did not before."""
        for priority, queue in enumerate(self._waiting):
            if queue:
                if not self._may_begin(priority):
                    return None
                obj = queue.pop(next(iter(queue)))
                self._activate(obj)
                return obj
        return None

    def remove_pull(self, obj: StoredObject) -> None:
        """The object is here, or will not come."""
        if self._active.get(obj.id) is obj:
            self._deactivate(obj)
        else:
            self._waiting[obj.priority].pop(obj.id, None)

    def is_waiting(self, obj: StoredObject) -> bool:
        """True if the pull has not been admitted yet."""
        return self._waiting[obj.priority].get(obj.id) is obj

    def waiting(self) -> list[StoredObject]:
        """The objects whose pulls have not been admitted, the most urgent first."""
        return [obj for queue in self._waiting for obj in queue.values()]

    def incoming_bytes(self) -> int:
        """Bytes of the objects that have a block already and are on their way."""
        return sum(obj.size for obj in self._active.values() if obj.offset >= 0)

    def __len__(self) -> int:
        """Number of pulls that wait for their turn."""
        return sum(map(len, self._waiting))

    def _activate(self, obj: StoredObject) -> None:
        self._active[obj.id] = obj
        self._active_counts[obj.priority] += 1
        self._active_bytes[obj.priority] += obj.size

    def _deactivate(self, obj: StoredObject) -> None:
        del self._active[obj.id]
        self._active_counts[obj.priority] -= 1
        self._active_bytes[obj.priority] -= obj.size

    def _may_begin(self, priority: int) -> bool:
        ranks = slice(priority + 1)
        return sum(self._active_counts[ranks]) < MIN_ACTIVE_PULLS or sum(self._active_bytes[ranks]) < ACTIVE_PULL_BYTES

    def check_invariants(self, objects: dict[bytes, StoredObject]) -> None:
        """Every pull is one of an object of the store, and nothing waits that could begin."""
        for priority in range(PRIORITIES):
            active = [obj for obj in self._active.values() if obj.priority == priority]
            assert len(active) == self._active_counts[priority], f"{len(active)} active pulls of priority {priority}"
            assert sum(obj.size for obj in active) == self._active_bytes[priority], "bytes of active pulls"
            for obj in self._waiting[priority].values():
                assert obj.priority == priority and obj.offset < 0, f"{obj.id.hex()} waits, and has a block"
                assert not self._may_begin(priority), f"the pull of {obj.id.hex()} could begin"
        for obj in (*self._active.values(), *(obj for queue in self._waiting for obj in queue.values())):
            assert objects.get(obj.id) is obj, f"a pull of {obj.id.hex()}, which is not in the store"


class PullManager:
    """Pulls of replicas, and their receives by tag.

    A method that ends an attempt returns what the lifecycle has to do about it: nothing here calls back.

    Args:
        node: index of this node.
        pushes: the sending side: what has arrived of an object is passed on.
        dead_nodes: nodes that are no sources any more; kept up to date by the store.
        chunk: most bytes of a piece of a large object.
        places: of the nodes in the network, where they are known; kept up to date by the store.

    Attributes:
        admission: which pulls are under way and which wait for their turn.
        completed: count of the objects that arrived whole. received_bytes: bytes that arrived.
        last_progress: when a chunk arrived last.
        paused: pulls that wait before they try a node behind a broken link again.
    """

    def __init__(
        self,
        node: int,
        pushes: PushManager,
        dead_nodes: set[int],
        chunk: int = CHUNK_BYTES,
        places: Mapping[int, Place] = NO_PLACES,
    ) -> None:
        self.admission = PullAdmission()
        self.completed = self.received_bytes = 0
        self.last_progress = float("-inf")
        self.paused: dict[bytes, StoredObject] = {}
        self._node = node
        self._pushes = pushes
        self._dead_nodes = dead_nodes
        self._chunk = chunk
        self._places = places
        self._tags_used = 0
        self._receiving: dict[int, StoredObject] = {}
        self._attempts: dict[int, StoredObject] = {}

    # ------------------------------------------------------------ asking

    def add_sources(self, obj: StoredObject, nodes: list[int]) -> PullState:
        """The object may be pulled from these nodes too."""
        obj.pull = obj.pull or PullState()
        others = [node for node in nodes if node != self._node]
        if len(others) > 1:
            obj.pull.add_sources(others, self._start_position(obj.id), self._nearness if self._places else None)
        else:
            obj.pull.add_sources(others, 0)
        return obj.pull

    def _nearness(self, node: int) -> int:
        return nearness(self._places.get(self._node, ()), self._places.get(node, ()))

    def try_next_source(self, now: float, obj: StoredObject, out: list[Effect]) -> tuple[str, str] | None:
        """Try the next source of the object, or pause until a broken link may work again.

        Returns:
            None while there is hope; where no source is left, or nothing waits for the object, the kind
            ("lost" or "full") and the reason of the failure.
        """
        pull = obj.pull
        assert pull is not None
        if pull.failed:
            # Our number among the readers changes: the nodes that wait here turn to the root again, too.
            self._pushes.refuse_waiting(obj, _SOURCE_CHANGED, out, again=True, hints=pull.possible_sources())
            pull.forget_root()
        if obj.requested and (self._request_chunks(obj, pull, out) or self._pause(now, obj, pull)):
            return None
        return self.failure_of(obj)

    def due_retries(self, now: float) -> list[StoredObject]:
        """The paused pulls whose pause is over; each is to be continued by `try_next_source`."""
        due = []
        for obj in list(self.paused.values()):
            pull = obj.pull
            assert pull is not None and pull.retry_at is not None
            if pull.retry_at <= now:
                pull.retry_broken_links(self._dead_nodes)
                del self.paused[obj.id]
                self.admission.readmit(obj)
                due.append(obj)
        return due

    def failure_of(self, obj: StoredObject) -> tuple[str, str]:
        """Kind and reason for a pull that failed."""
        assert obj.pull is not None
        failures = "; ".join(obj.pull.failures) or "none has it"
        reason = f"object {obj.id.hex()} could not be read from any node ({failures})"
        return "full" if obj.pull.full else "lost", reason

    def remove_pull(self, obj: StoredObject) -> None:
        """The object is here, or will not come."""
        self.admission.remove_pull(obj)
        self.paused.pop(obj.id, None)

    def _request_chunks(self, obj: StoredObject, pull: PullState, out: list[Effect]) -> bool:
        """Post the receives and send Pull to the next living node; False when none is left."""
        node = pull.pop_source(self._dead_nodes)
        if node < 0:
            return False
        if self.paused.pop(obj.id, None) is not None:
            self.admission.readmit(obj)
        each = self._chunk_for(obj.size)
        chunks, first = chunk_count(obj.size, each), pull.chunks_received
        tag = self._new_tags(chunks - first)
        pull.start_attempt(node, tag, {tag + index - first: index for index in range(first, chunks)})
        self._attempts[tag] = obj
        # The receives are posted first: the bytes may come at once.
        for chunk_tag, index in pull.posted.items():
            at = index * each
            self._receiving[chunk_tag] = obj
            out.append(StartReceive(obj.id, node, chunk_tag, obj.offset + at, min(each, obj.size - at)))
        root = pull.root if pull.order >= 0 else -1
        chunk = each if chunks > 1 else 0
        whole = pull.refusals >= _MAX_REDIRECTED_ATTEMPTS
        out.append(Send(raylet_of(node), Pull(obj.id, tag, obj.size, chunk, first, root, pull.order, whole)))
        return True

    def _pause(self, now: float, obj: StoredObject, pull: PullState) -> bool:
        """Wait before the nodes behind broken links are tried again; False where there are none, or no more retries."""
        if pull.retry_at is None:
            if pull.link_retries >= MAX_LINK_RETRIES:
                return False
            pull.retry_at = now + FIRST_LINK_RETRY_DELAY * (1 << pull.link_retries)
            pull.link_retries += 1
        if not obj.awaited or self._dead_nodes.issuperset(pull.broken_links):
            pull.retry_at = None
            return False
        self.paused[obj.id] = obj
        self.admission.remove_pull(obj)  # others may begin meanwhile
        return True

    # ------------------------------------------------------------ answers and ends

    def pull_refused(self, msg: PullRefused, out: list[Effect]) -> None:
        """The source will not send (any more)."""
        obj = self._attempts.get(msg.tag)
        if obj is None or obj.pull is None:
            return
        pull = obj.pull
        pull.full |= msg.full
        self.add_sources(obj, msg.nodes)
        if msg.link_broken and not pull.cancelled:
            pull.broken_links[pull.node] = None
        pull.cancel_attempt(msg.reason, out, blame=not msg.again)

    def pull_redirected(self, msg: PullElsewhere, out: list[Effect]) -> None:
        """The source has named another node, which is already receiving the object."""
        obj = self._attempts.get(msg.tag)
        if obj is not None and obj.pull is not None:
            obj.pull.redirect_to(msg.node, msg.order, out)
            self._pushes.refuse_waiting(obj, _SOURCE_CHANGED, out, again=True, below=msg.order)

    def receive_ended(self, now: float, tag: int, error: str | None, out: list[Effect]) -> StoredObject | None:
        """The receive is over. Returns the object if all receives of the attempt are (see `is_complete`)."""
        obj = self._receiving.pop(tag, None)
        if obj is None:
            return None
        pull = obj.pull
        assert pull is not None
        first, had = pull.tag, pull.chunks_received
        pull.receive_ended(tag, error, out)
        if pull.chunks_received > had:
            self.last_progress = now
            here = min(obj.size, pull.chunks_received * self._chunk_for(obj.size))
            self.received_bytes += max(0, here - obj.received_bytes)
            obj.received_bytes = here
            if obj.pushes:
                self._pushes.push_arrived(obj, out)
        if pull.posted:
            return None
        del self._attempts[first]
        return obj

    def is_complete(self, obj: StoredObject) -> bool:
        """True if all chunks of the object are here."""
        return obj.pull is not None and obj.pull.chunks_received == chunk_count(obj.size, self._chunk)

    def source_died(self, node: int, out: list[Effect]) -> None:
        """Objects that the dead node was the source of are pulled from the next one."""
        for obj in list(self._attempts.values()):
            if obj.pull is not None and obj.pull.node == node:
                obj.pull.cancel_attempt("the node died", out, blame=False)

    def rows(self) -> list[dict[str, Any]]:
        """The pulls: id and size of the object, bytes that are here, the node that sends, and whether it does."""
        under_way = [(obj, "receives") for obj in self._attempts.values()]
        paused = [(obj, "pauses") for obj in self.paused.values()]
        waiting = [(obj, "waits") for obj in self.admission.waiting()]
        return [
            {
                "id": obj.id,
                "size": obj.size,
                "done": obj.received_bytes,
                "node": obj.pull.node if obj.pull is not None else -1,
                "state": state,
            }
            for obj, state in (*under_way, *paused, *waiting)
        ]

    def __len__(self) -> int:
        """Number of objects on their way."""
        return len(self._attempts)

    # ------------------------------------------------------------ chunks and tags

    def _start_position(self, ident: bytes) -> int:
        """Where in a list of nodes to begin: different from object to object and from asker to asker."""
        counters = int.from_bytes(ident[PROC_BYTES:TASK_BYTES], "big") + int.from_bytes(ident[TASK_BYTES:], "big")
        return counters + self._node

    def _chunk_for(self, size: int) -> int:
        """Bytes of each chunk of an object of `size` bytes, but for the last: no chunk is much shorter than others."""
        even = -(-size // chunk_count(size, self._chunk))
        return min(self._chunk, -(-even // _PAGE) * _PAGE)

    def _new_tags(self, number: int) -> int:
        """The first of so many tags, one behind the other, that no other transfer to this node has, or had."""
        first = self._tags_used + 1
        self._tags_used += number
        return transfer_tag(self._node, first)

    def check_invariants(self, objects: dict[bytes, StoredObject]) -> None:
        """Every receive and every paused pull belongs to an object of the store that is being pulled."""
        self.admission.check_invariants(objects)
        for obj in (*self._receiving.values(), *self._attempts.values(), *self.paused.values()):
            name = obj.id.hex()
            assert objects.get(obj.id) is obj, f"{name} is received, and not in the store"
            assert obj.state is StoredObjectState.PULLING, f"{name} is received, and {obj.state.value}"
        for obj in objects.values():
            pull, name = obj.pull, obj.id.hex()
            if obj.state is StoredObjectState.PULLING:
                assert pull is not None
                assert (obj.id in self.paused) == (pull.retry_at is not None), f"{name} is paused, and has no time"
                assert (pull.tag >= 0) != (obj.id in self.paused), f"{name} has neither a source nor a pause"
                assert self._attempts.get(pull.tag) is (obj if pull.tag >= 0 else None), f"{name}: another attempt"
            elif pull is not None:
                assert not pull.posted and pull.tag < 0 and pull.retry_at is None, f"{name} is {obj.state.value}"
        posted = {tag for obj in objects.values() if obj.pull is not None for tag in obj.pull.posted}
        assert posted == self._receiving.keys(), "the posted receives and those of the pulls differ"


def transfer_tag(node: int, counter: int) -> int:
    """Tag of a transfer to `node`: node index u16 | counter u48, counted by the receiving node.

    One u64 names one transfer among all of the job: the receiver's counter makes it unique at the receiver, the node
    index at a sender that serves several receivers.
    """
    return node << _TAG_NODE_SHIFT | counter & (1 << _TAG_NODE_SHIFT) - 1
