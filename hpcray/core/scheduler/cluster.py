"""Unmet demand of all nodes and where it is sent: the cluster's half of the scheduler.

An *ask* is what one holder's class lacks, as its raylet last reported. A *flight* is a GrantFor whose effect that
report does not show yet. A flight ends when the node refuses it, when the report goes down, or when it has had time to
arrive; so no lost or crossing message can hide demand for good, and surplus is at most what was in flight once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hpcray.base.bundle_names import bundle_of, plain
from hpcray.base.ids import node_of, raylet_of
from hpcray.base.resources import to_amounts
from hpcray.core.effects import Effect, Send
from hpcray.core.scheduler.placement import REPORT_AFTER, ClusterView
from hpcray.core.scheduler.wants import node_affinity
from hpcray.wire.messages import GrantFor, GrantRefused, GroupState, Infeasible, ProcDied, Shape, Unmet

SETTLE = 1.0
"""A GrantFor that was not refused has reached its holder, and the holder's report the head, within this time."""
BOUND_SETTLE = 3.0
"""The same for requests that may queue at their node for `raylet.PATIENCE`."""
PARK_AFTER = 1.0
"""An ask that found no room for this long queues at a busy node: local demand there must not starve it."""
PARKS_PER_NODE = 4
"""At most so many are parked per node, tick and shape."""

Key = tuple[bytes, int]


@dataclass(slots=True)
class _Flight:
    node: int
    count: int
    until: float
    bound: bool


@dataclass(slots=True, eq=False)
class _Ask:
    """`hungry`: since when it has got nothing, as far as its reports show; reporting that begins a new wait."""

    holder: bytes
    klass: int
    shape: Shape
    count: int = 0
    since: float = 0.0
    hungry: float = 0.0
    warned: bool = False
    flights: list[_Flight] = field(default_factory=list)

    def open(self) -> int:
        return max(0, self.count - sum(flight.count for flight in self.flights))

    def land(self, count: int, node: int | None = None) -> None:
        """`count` of what is in flight (to `node`) has arrived or was refused; the oldest first."""
        for flight in self.flights:
            if node is None or flight.node == node:
                part = min(count, flight.count)
                flight.count -= part
                count -= part
        self.flights = [flight for flight in self.flights if flight.count]


class ClusterScheduler:
    """Sends unmet demand to nodes that can serve it.

    Attributes:
        group_removed: whether the placement group with this id (in hex) is removed.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._asks: dict[Key, _Ask] = {}
        self._open: dict[Shape, OrderedDict[Key, _Ask]] = {}
        self._sent_to: dict[bytes, set[int]] = {}
        self._parked_last = -1
        self.group_removed: Callable[[str], bool] = lambda group: False

    def unmet(self, now: float, msg: Unmet) -> list[Effect]:
        """A raylet reports what one of its processes lacks."""
        key = (msg.holder, msg.klass)
        ask = self._asks.get(key)
        out: list[Effect] = []
        if msg.count == 0:
            if ask is not None:
                self._withdraw(ask, out)
                self._drop(key)
            return out
        if ask is None:
            ask = self._asks[key] = _Ask(msg.holder, msg.klass, msg.shape, since=now, hungry=now)
        if msg.count < ask.count:
            ask.land(ask.count - msg.count)
            ask.hungry = now
        ask.count = msg.count
        self._place(now, ask, None, out)
        return out

    def refused(self, now: float, node: int, msg: GrantRefused) -> list[Effect]:
        """A node could not serve what it was sent."""
        out: list[Effect] = []
        ask = self._asks.get((msg.holder, msg.klass))
        if ask is not None:
            ask.land(msg.count, node)
            state = self._view.nodes.get(node)
            if state is not None:
                state.shunned.add(ask.shape.resources)
            self._place(now, ask, None, out)
        return out

    def node_grew(self, now: float, node: int) -> list[Effect]:
        """A node has more room than was thought."""
        out: list[Effect] = []
        for shape in list(self._open):
            if self._view.nodes[node].fits(shape):
                self._share(now, shape, [node], out)
        return out

    def tick(self, now: float) -> list[Effect]:
        """Forget what has landed, retry what is open."""
        out: list[Effect] = []
        for state in self._view.nodes.values():
            state.shunned.clear()
        for ask in self._asks.values():
            if ask.flights and any(flight.until <= now for flight in ask.flights):
                ask.flights = [flight for flight in ask.flights if flight.until > now]
                self._index(ask)
            if now - ask.hungry >= REPORT_AFTER and self._view.feasible(ask.shape):
                ask.hungry = now
                reason = self._view.why_waiting(ask.shape, "a task")
                out.append(Send(ask.holder, Infeasible(ask.klass, reason, waits=True)))
        self._retry(now, out)
        for asks in list(self._open.values()):
            stale = [ask for ask in asks.values() if now - ask.since >= PARK_AFTER]
            for ask in stale[: PARKS_PER_NODE * len(self._view.nodes)]:
                if not any(flight.bound for flight in ask.flights):
                    self._park(now, ask, out)
        return out

    def cluster_changed(self, now: float) -> list[Effect]:
        """Nodes came: place everything again."""
        out: list[Effect] = []
        self._retry(now, out)
        return out

    def holder_died(self, holder: bytes, reason: str) -> list[Effect]:
        """A process is gone. The nodes that were sent something for it learn it from here, after what was sent."""
        for key in [key for key in self._asks if key[0] == holder]:
            self._drop(key)
        nodes = self._sent_to.pop(holder, set()) - {node_of(holder)}
        return [Send(raylet_of(n), ProcDied(holder, reason)) for n in sorted(nodes) if n in self._view.nodes]

    def node_died(self, now: float, node: int) -> list[Effect]:
        """A node is gone, with its processes and what was on the way to it."""
        out: list[Effect] = []
        for key in [key for key in self._asks if node_of(key[0]) == node]:
            self._drop(key)
        for holder in [holder for holder in self._sent_to if node_of(holder) == node]:
            del self._sent_to[holder]
        for ask in self._asks.values():
            ask.flights = [flight for flight in ask.flights if flight.node != node]
            self._index(ask)
        self._retry(now, out)
        return out

    def pending(self) -> list[dict[str, Any]]:
        """Unmet demand by shape; counts are those that raylets report, coarse above 64."""
        rows: dict[Shape, dict[str, Any]] = {}
        for ask in self._asks.values():
            row = rows.get(ask.shape)
            if row is None:
                row = rows[ask.shape] = {
                    "resources": to_amounts(plain(dict(ask.shape.resources))),
                    "strategy": ask.shape.strategy,
                    "count": 0,
                    "holders": 0,
                    "feasible": bool(self._view.feasible(ask.shape)),
                }
            row["count"] += ask.count
            row["holders"] += 1
        return list(rows.values())

    # ------------------------------------------------------------ inside

    def _retry(self, now: float, out: list[Effect]) -> None:
        for shape in list(self._open):
            feasible = self._view.feasible(shape)
            if not feasible:
                self._warn(shape, out)
            elif node_affinity(shape.strategy) is not None or self._any_room(shape, feasible):
                self._share(now, shape, None, out)

    def _share(self, now: float, shape: Shape, nodes: list[int] | None, out: list[Effect]) -> None:
        """Serve all open asks of a shape: one alone gets all it can, several get one each, round after round."""
        asks = self._open.get(shape)
        bound = node_affinity(shape.strategy) is not None
        progress = True
        while asks and progress:
            progress = False
            for key, ask in list(asks.items()):
                limit = None if len(asks) == 1 else 1
                if self._place(now, ask, nodes, out, limit):
                    progress = True
                    if key in asks:
                        asks.move_to_end(key)
                elif ask.open() and not bound and not self._any_room(shape, nodes):
                    return _merge(out)
            asks = self._open.get(shape)
        return _merge(out)

    def _any_room(self, shape: Shape, nodes: list[int] | None) -> bool:
        nodes = self._view.feasible(shape) if nodes is None else nodes
        return any(self._view.nodes[node].fits(shape) for node in nodes)

    def _place(
        self, now: float, ask: _Ask, nodes: Iterable[int] | None, out: list[Effect], limit: int | None = None
    ) -> int:
        """Send what is open of an ask to nodes with room (among `nodes`); how many were sent."""
        self._index(ask)
        count = ask.open() if limit is None else min(limit, ask.open())
        if not count:
            return 0
        shape = ask.shape
        feasible = self._view.feasible(shape)
        if not feasible:
            self._warn(shape, out)
            return 0
        affinity = node_affinity(shape.strategy)
        if affinity is not None and feasible == [affinity[0]]:
            return self._bind(now, ask, affinity[0], count, out)
        candidates = [n for n in self._candidates(ask, feasible) if nodes is None or n in nodes]
        sent = 0
        for node, part in self._view.choose(shape, count, candidates):
            self._send(now, ask, node, part, shape, False, out)
            sent += part
        return sent

    def _candidates(self, ask: _Ask, feasible: list[int]) -> list[int]:
        """Without the holder's own node where that one decides by itself."""
        if ask.shape.strategy:
            return feasible
        home = node_of(ask.holder)
        return [node for node in feasible if node != home]

    def _bind(self, now: float, ask: _Ask, node: int, count: int, out: list[Effect]) -> int:
        """Queue at the only node that will do, never more than it can run at once."""
        queued = sum(flight.count for flight in ask.flights)
        count = min(count, self._view.nodes[node].capacity(ask.shape) - queued)
        if count <= 0:
            return 0
        self._send(now, ask, node, count, ask.shape, True, out)
        return count

    def _park(self, now: float, ask: _Ask, out: list[Effect]) -> None:
        """Queue one request at a busy node, the nodes in turn."""
        nodes = self._candidates(ask, self._view.feasible(ask.shape))
        if not nodes:
            return
        node = next((n for n in nodes if n > self._parked_last), nodes[0])
        self._parked_last = node
        shape = Shape(ask.shape.resources, f"node:{node}", ask.shape.env)
        self._send(now, ask, node, 1, shape, True, out)

    def _send(self, now: float, ask: _Ask, node: int, count: int, shape: Shape, bound: bool, out: list[Effect]) -> None:
        until = now + (BOUND_SETTLE if bound else SETTLE)
        last = ask.flights[-1] if ask.flights else None
        if last is not None and (last.node, last.until, last.bound) == (node, until, bound):
            last.count += count
        else:
            ask.flights.append(_Flight(node, count, until, bound))
        ask.since = now
        self._sent_to.setdefault(ask.holder, set()).add(node)
        out.append(Send(raylet_of(node), GrantFor(ask.holder, ask.klass, shape, count)))
        self._index(ask)

    def _withdraw(self, ask: _Ask, out: list[Effect]) -> None:
        """Nothing is wanted any more: take back what queues at nodes."""
        nodes = sorted({flight.node for flight in ask.flights if flight.bound})
        out.extend(Send(raylet_of(node), GrantFor(ask.holder, ask.klass, ask.shape, 0)) for node in nodes)

    def tell_removed(self, group: str, out: list[Effect]) -> None:
        """A placement group is removed: whoever asks for something in it should stop to wait."""
        for shape in list(self._open):
            bundle = bundle_of(shape.resources)
            if bundle is not None and bundle[0] == group:
                self._warn(shape, out)

    def _warn(self, shape: Shape, out: list[Effect]) -> None:
        bundle = bundle_of(shape.resources)
        if bundle is not None:
            if self.group_removed(bundle[0]):
                state = GroupState(bytes.fromhex(bundle[0]), "REMOVED", "it was removed")
                out.extend(Send(holder, state) for holder in {key[0]: None for key in self._open.get(shape, ())})
            return
        for ask in self._open.get(shape, {}).values():
            if not ask.warned and self._view.nodes:
                ask.warned = True
                reason = self._view.why_infeasible(shape, "a task")
                out.append(Send(ask.holder, Infeasible(ask.klass, reason)))

    def _index(self, ask: _Ask) -> None:
        key = (ask.holder, ask.klass)
        asks = self._open.get(ask.shape)
        if ask.open():
            if asks is None:
                asks = self._open[ask.shape] = OrderedDict()
            asks.setdefault(key, ask)
        elif asks is not None and asks.pop(key, None) is not None and not asks:
            del self._open[ask.shape]

    def _drop(self, key: Key) -> None:
        ask = self._asks.pop(key)
        ask.count = 0
        self._index(ask)


def _merge(out: list[Effect]) -> None:
    """Make one GrantFor of those that differ only in their count."""
    merged: dict[tuple[bytes, bytes, int, Shape], GrantFor] = {}
    rest: list[Effect] = []
    for effect in out:
        if not isinstance(effect, Send) or not isinstance(effect.msg, GrantFor) or not effect.msg.count:
            rest.append(effect)
            continue
        msg = effect.msg
        known = merged.get((effect.dest, msg.holder, msg.klass, msg.shape))
        if known is None:
            merged[effect.dest, msg.holder, msg.klass, msg.shape] = msg
            rest.append(effect)
        else:
            known.count += msg.count
    out[:] = rest
