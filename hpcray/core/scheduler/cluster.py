"""Unmet demand of all nodes and where it is sent: the cluster's half of the scheduler.

An *ask* is what one holder's class lacks, as its raylet last reported. A *flight* is a GrantFor whose effect that
report does not show yet. A flight ends when the node refuses it, when the report goes down, or when it has had time to
arrive; so no lost or crossing message can hide demand for good, and surplus is at most what was in flight once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from hpcray.base.bundle_names import group_of, plain
from hpcray.base.ids import node_of, raylet_of
from hpcray.base.labels import PREFIX, show_strategy
from hpcray.base.resources import to_amounts
from hpcray.core.effects import Effect, Send
from hpcray.core.scheduler.asks import Ask, Flight
from hpcray.core.scheduler.crowd import Crowd
from hpcray.core.scheduler.placement import ClusterView
from hpcray.core.scheduler.telling import REPORT_AFTER
from hpcray.core.scheduler.wants import near_node, node_affinity
from hpcray.wire.messages import GrantFor, GrantRefused, GroupState, Infeasible, ProcDied, Shape, Unmet

SETTLE = 1.0
"""A GrantFor that was not refused has reached its holder, and the holder's report the head, within this time."""
BOUND_SETTLE = 3.0
"""The same for requests that may queue at their node for `raylet.PATIENCE`."""
PARK_AFTER = 1.0
"""An ask that found no room for this long queues at a busy node: local demand there must not starve it."""
PARKS_PER_NODE, PARKS_AT_ONCE = 4, 64
"""At most so many are parked per node, tick and shape, and in all per tick and shape."""
STAY_PARKED = 30.0
"""Who queues at a busy node comes back to the same one for this long: a node is kept free for longer with each try."""
ROUNDS_KEPT = 2
"""What the node where its arguments are will begin in so many rounds is not sent elsewhere, unless nothing begins."""
Key = tuple[bytes, int]


class ClusterScheduler:
    """Sends unmet demand to nodes that can serve it.

    Attributes:
        group_removed: whether the placement group with this id (in hex) is removed.
        locality_wait: for this long, in seconds, work waits for the node where its arguments are, however idle the
            others may be.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._asks: dict[Key, Ask] = {}
        self._open: dict[Shape, OrderedDict[Key, Ask]] = {}
        self._sent_to: dict[bytes, set[int]] = {}
        self._parked_last = -1
        self._crowd = Crowd(view)
        self.group_removed: Callable[[str], bool] = lambda group: False
        self.locality_wait = 1.0

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
            ask = self._asks[key] = Ask(msg.holder, msg.klass, msg.shape, began=now, since=now, hungry=now)
        if msg.count < ask.count:
            ask.land(ask.count - msg.count)
            ask.hungry = now
            ask.parked_at = now
        ask.count = msg.count
        self._place(now, ask, None, out)
        out = _merged(out)
        if ask.open():
            self._crowd.waits(now, ask, out)
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
            if ask.open():
                self._crowd.waits(now, ask, out)
        return out

    def node_grew(self, now: float, node: int) -> list[Effect]:
        """A node has more room than was thought."""
        out: list[Effect] = []
        for shape in list(self._open):
            if self._view.nodes[node].fits(shape):
                self._share(now, shape, node, out)
        return out

    def tick(self, now: float) -> list[Effect]:
        """Forget what has landed, retry what is open."""
        out: list[Effect] = []
        self._view.worth_asking()
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
            stale = [ask for ask in asks.values() if now - ask.since >= PARK_AFTER and self._may_park(now, ask)]
            for ask in stale[: min(PARKS_AT_ONCE, PARKS_PER_NODE * len(self._view.nodes))]:
                self._park(now, ask, out)
        self._crowd.tick(now, self._open, out)
        return out

    def cluster_changed(self, now: float) -> list[Effect]:
        """Nodes came: place everything again."""
        self._crowd.forget()
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
            row = rows.get(ask.anywhere)
            if row is None:
                row = rows[ask.anywhere] = {
                    "resources": to_amounts(plain(dict(ask.shape.resources))),
                    "strategy": show_place(ask.anywhere.strategy),
                    "count": 0,
                    "holders": 0,
                    "feasible": bool(self._view.feasible(ask.anywhere)),
                }
            row["count"] += ask.count
            row["holders"] += 1
        return list(rows.values())

    def demand(self) -> dict[int, int]:
        """How many leases the processes of each node lack."""
        found: dict[int, int] = {}
        for ask in self._asks.values():
            found[node_of(ask.holder)] = found.get(node_of(ask.holder), 0) + ask.count
        return found

    # ------------------------------------------------------------ inside

    def _retry(self, now: float, out: list[Effect]) -> None:
        for shape in list(self._open):
            if not self._view.feasible(shape):
                self._warn(shape, out)
            elif _bound(shape) or self._view.any_room(shape):
                self._share(now, shape, None, out)

    def _share(self, now: float, shape: Shape, only: int | None, out: list[Effect]) -> None:
        """Serve all open asks of a shape: one alone gets all it can, several get one each, round after round."""
        asks = self._open.get(shape)
        bound = _bound(shape)
        progress = True
        while asks and progress:
            progress = False
            for key, ask in list(asks.items()):
                limit = None if len(asks) == 1 else 1
                if self._place(now, ask, only, out, limit):
                    progress = True
                    if key in asks:
                        asks.move_to_end(key)
                elif ask.open() and not bound and not self._has_room(shape, only):
                    out[:] = _merged(out)
                    return
            asks = self._open.get(shape)
        out[:] = _merged(out)

    def _has_room(self, shape: Shape, only: int | None) -> bool:
        return self._view.any_room(shape) if only is None else self._view.nodes[only].fits(shape)

    def _place(self, now: float, ask: Ask, only: int | None, out: list[Effect], limit: int | None = None) -> int:
        """Send what is open of an ask to nodes with room (or to `only`); how many were sent."""
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
        if ask.near is not None and self._can_be_near(ask):
            return self._place_near(now, ask, ask.near, count, only, out)
        # A process's own node decides by itself what goes there.
        home = -1 if ask.anywhere.strategy or ask.near is not None else node_of(ask.holder)
        return self._spread(now, ask, count, only, home, out)

    def _spread(self, now: float, ask: Ask, count: int, only: int | None, but: int, out: list[Effect]) -> int:
        sent = 0
        for node, part in self._view.choose(ask.anywhere, count, only, but):
            self._send(now, ask, node, part, ask.anywhere, False, out)
            sent += part
        return sent

    def _can_be_near(self, ask: Ask) -> bool:
        """Whether the node where the arguments are could serve the ask."""
        state = self._view.nodes.get(ask.near if ask.near is not None else -1)
        if state is None:
            return False
        total, lasting = state.total, state.lasting
        return all(total.get(name, 0) - lasting.get(name, 0) >= units for name, units in ask.shape.resources)

    def _place_near(self, now: float, ask: Ask, near: int, count: int, only: int | None, out: list[Effect]) -> int:
        """Queue where the arguments are; what that node cannot begin soon may go where there is room."""
        stuck = now - ask.hungry >= self.locality_wait
        sent = self._spread(now, ask, count, only, near, out) if stuck else 0
        if near != node_of(ask.holder):
            sent += self._bind(now, ask, near, count - sent, out)
        spare = ask.open() - ROUNDS_KEPT * self._view.nodes[near].capacity(ask.shape)
        if stuck or now - ask.began < self.locality_wait or spare <= 0:
            return sent
        return sent + self._spread(now, ask, min(count - sent, spare), only, near, out)

    def _bind(self, now: float, ask: Ask, node: int, count: int, out: list[Effect]) -> int:
        """Queue at the node that is wanted, never more than it can run at once."""
        queued = sum(flight.count for flight in ask.flights)
        count = min(count, self._view.nodes[node].capacity(ask.shape) - queued)
        if count <= 0:
            return 0
        shape = ask.shape if ask.near is None else Shape(ask.shape.resources, f"node:{node}", ask.shape.env)
        self._send(now, ask, node, count, shape, True, out)
        return count

    def _may_park(self, now: float, ask: Ask) -> bool:
        """Whether an ask that finds no room queues at a busy node. Work that is near its arguments waits there."""
        if any(flight.bound for flight in ask.flights):
            return False
        patience = max(REPORT_AFTER / 2, self.locality_wait)
        return ask.near is None or now - ask.hungry >= patience or not self._can_be_near(ask)

    def _park(self, now: float, ask: Ask, out: list[Effect]) -> None:
        """Queue one request at a busy node: at the one where it queued before, for others the nodes in turn."""
        nodes = self._view.feasible(ask.anywhere)
        home = -1 if ask.anywhere.strategy else node_of(ask.holder)
        node = ask.parked
        if now - ask.parked_at >= STAY_PARKED or node not in self._view.nodes:
            after = bisect_right(nodes, self._parked_last)
            turns = [nodes[(after + step) % len(nodes)] for step in range(min(2, len(nodes)))]
            node = next((n for n in turns if n != home), -1)
            if node < 0:
                return
            self._parked_last = ask.parked = node
            ask.parked_at = now
        shape = Shape(ask.shape.resources, f"node:{node}", ask.shape.env)
        self._send(now, ask, node, 1, shape, True, out, parked=True)

    def _send(
        self, now: float, ask: Ask, node: int, count: int, shape: Shape, bound: bool, out: list[Effect],
        parked: bool = False,
    ) -> None:  # fmt: skip
        until = now + (BOUND_SETTLE if bound else SETTLE)
        last = ask.flights[-1] if ask.flights else None
        if last is not None and (last.node, last.until, last.bound) == (node, until, bound):
            last.count += count
        else:
            ask.flights.append(Flight(node, count, until, bound))
        ask.since = now
        self._sent_to.setdefault(ask.holder, set()).add(node)
        out.append(Send(raylet_of(node), GrantFor(ask.holder, ask.klass, shape, count, parked)))
        self._index(ask)

    def _withdraw(self, ask: Ask, out: list[Effect]) -> None:
        """Nothing is wanted any more: take back what queues at nodes."""
        nodes = {flight.node for flight in ask.flights if flight.bound}
        if ask.parked in self._view.nodes:
            nodes.add(ask.parked)
        out.extend(Send(raylet_of(node), GrantFor(ask.holder, ask.klass, ask.shape, 0)) for node in sorted(nodes))

    def tell_removed(self, group: str, out: list[Effect]) -> None:
        """A placement group is removed: whoever asks for something in it should stop to wait."""
        for shape in list(self._open):
            if group_of(shape.resources) == group:
                self._warn(shape, out)

    def _warn(self, shape: Shape, out: list[Effect]) -> None:
        group = group_of(shape.resources)
        if group:
            if self.group_removed(group):
                state = GroupState(bytes.fromhex(group), "REMOVED", "it was removed")
                out.extend(Send(holder, state) for holder in {key[0]: None for key in self._open.get(shape, ())})
            return
        for ask in self._open.get(shape, {}).values():
            if not ask.warned and self._view.nodes:
                ask.warned = True
                reason = self._view.why_infeasible(shape, "a task")
                out.append(Send(ask.holder, Infeasible(ask.klass, reason)))

    def _index(self, ask: Ask) -> None:
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


def show_place(strategy: str) -> str:
    """A strategy for people."""
    return show_strategy(strategy) if strategy.startswith(PREFIX) else strategy


def _bound(shape: Shape) -> bool:
    """Whether it may be sent to a node that has no room."""
    return node_affinity(shape.strategy) is not None or near_node(shape.strategy) is not None


def _merged(out: list[Effect]) -> list[Effect]:
    """One GrantFor of those that differ only in their count."""
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
    return rest
