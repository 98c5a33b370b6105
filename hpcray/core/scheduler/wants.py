"""All wants a raylet knows: those of its own processes, those the head sent, and actors that shall start here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hpcray.base.bundle_names import CAPTURING, GROUP, plain
from hpcray.base.ids import HEAD, node_of
from hpcray.base.labels import PREFIX as LABELS
from hpcray.base.resources import Resources, to_amounts
from hpcray.core.scheduler.queue import FIRST_WINDOW, Want
from hpcray.wire.messages import ActorSpec, GrantFor, Shape, Unmet

FORGET_AFTER = 10.0
REMEMBER_AGED = 120.0
"""So long, for one that resources were set aside for: it may come back from other nodes."""
NEAR = "near:"
EXACT_UP_TO = 64
ACTOR_KLASS = -1


def node_affinity(strategy: str) -> tuple[int, bool] | None:
    """Node index and softness of a "node:<index>[:soft]" strategy, None for others.

    Raises:
        ValueError: the strategy is none of the known ones.
    """
    if strategy in ("", "SPREAD", GROUP, CAPTURING) or strategy.startswith((LABELS, NEAR)):
        return None
    word, _, rest = strategy.partition(":")
    index, _, soft = rest.partition(":")
    if word != "node" or not index.isdigit() or soft not in ("", "soft"):
        raise ValueError(f"strategy {strategy!r} is none of '', 'SPREAD', 'node:<index>[:soft]', 'group[:capture]'")
    return int(index), bool(soft)


def near_node(strategy: str) -> int | None:
    """The node where the arguments are of a "near:<index>" strategy, None for others."""
    return int(strategy[len(NEAR) :]) if strategy.startswith(NEAR) else None


def bound_to(shape: Shape, node: int) -> bool:
    """Whether the shape names this node."""
    affinity = node_affinity(shape.strategy)
    return affinity is not None and affinity[0] == node


def coarse(count: int) -> int:
    """`count` rounded down to four binary digits when it is large: long queues that grow and shrink are no news."""
    if count <= EXACT_UP_TO:
        return count
    shift = count.bit_length() - 4
    return count >> shift << shift


class WantTable:
    """Finds and makes wants, and says what the head should know of them."""

    def __init__(self, node: int, alone: bool, feasible: Callable[[Resources], bool]) -> None:
        self._node = node
        self._alone = alone
        self._feasible = feasible
        self._wants: dict[bytes, dict[int, Want]] = {}
        self._grouped: dict[str, list[Want]] = {}
        self.actors: dict[bytes, Want] = {}

    def holders(self) -> list[bytes]:
        """Everybody who has or had a want."""
        return list(self._wants)

    def local(self, holder: bytes, klass: int, shape: Shape) -> Want:
        """The want of a process of this node."""
        mine = self._wants.setdefault(holder, {})
        want = mine.get(klass)
        if want is None:
            want = mine[klass] = self._note(Want(holder, klass, shape, local=True, own=self._serves(shape)))
        return want

    def asked_by_head(self, msg: GrantFor) -> Want | None:
        """The want a GrantFor speaks of; None when its holder, a process of this node, is gone."""
        mine = self._wants.get(msg.holder, {})
        want = mine.get(msg.klass)
        if want is None and node_of(msg.holder) != self._node:
            want = self._note(Want(msg.holder, msg.klass, msg.shape, local=False, own=False))
            self._wants.setdefault(msg.holder, {})[msg.klass] = want
        return want

    def actor(self, spec: ActorSpec, restarts: int) -> Want:
        """The want of an actor; one that was sent back a moment ago keeps its place in time."""
        want = self.actors.get(spec.actor)
        if want is None:
            shape = Shape(spec.hold.resources, spec.place.strategy, spec.hold.env or spec.place.env)
            want = self.actors[spec.actor] = self._note(Want(HEAD, ACTOR_KLASS, shape, local=False, own=False))
        want.spec = spec
        want.restarts = restarts
        return want

    def in_group(self, group: str) -> list[Want]:
        """The wants for a placement group; those of this node by what the node has of it now."""
        found = self._grouped.get(group, [])
        for want in found:
            want.own = want.local and self._serves(want.shape)
        return found

    def forget_group(self, group: str) -> None:
        """The node will have no bundle of it any more."""
        self._grouped.pop(group, None)

    def _note(self, want: Want) -> Want:
        if want.bundle is not None:
            self._grouped.setdefault(want.bundle[0], []).append(want)
        return want

    def drop(self, holder: bytes) -> list[Want]:
        """Forget a dead holder; its wants, emptied."""
        gone = list(self._wants.pop(holder, {}).values())
        for want in gone:
            want.total = want.bound = 0
        return gone

    def mine_alone(self, want: Want) -> bool:
        """Whether no other node could serve a want of this node, so that the head need not hear of it."""
        return want.local and want.own and (self._alone or bound_to(want.shape, self._node))

    def unmet(self, want: Want) -> Unmet | None:
        """What the head should hear about a want of this node, None when it knows already."""
        if not want.local or self.mine_alone(want):
            return None
        count = coarse(want.missing())
        if count == want.reported:
            return None
        want.reported = count
        return Unmet(want.holder, want.klass, want.shape, count)

    def untold(self) -> list[Want]:
        """The head knows nothing of the wants of this node any more: all of them."""
        mine = [want for holder in self._wants.values() for want in holder.values() if want.local]
        for want in mine:
            want.reported = 0
        return mine

    def forget_foreign(self, now: float) -> None:
        """Drop wants of other nodes (and of actors) that have been over for a while."""
        for holder in [holder for holder in self._wants if node_of(holder) != self._node]:
            mine = self._wants[holder]
            for klass in [klass for klass, want in mine.items() if _over(want, now)]:
                del mine[klass]
            if not mine:
                del self._wants[holder]
        for actor in [actor for actor, want in self.actors.items() if _over(want, now)]:
            del self.actors[actor]

    def pending(self) -> list[dict[str, Any]]:
        """One row per want that lacks something."""
        return [
            {"holder": w.holder, "klass": w.klass, "resources": to_amounts(plain(w.request)), "missing": w.missing(),
             "strategy": w.shape.strategy, "starting": w.starting, "actor": w.spec.class_name if w.spec else ""}
            for w in self._all() if w.missing() or w.starting
        ]  # fmt: skip

    def _all(self) -> Iterator[Want]:
        for mine in self._wants.values():
            yield from mine.values()
        yield from self.actors.values()

    def _serves(self, shape: Shape) -> bool:
        """Whether this raylet decides by itself, without the head."""
        if not self._feasible(dict(shape.resources)):
            return False
        if shape.strategy == "SPREAD":
            return self._alone
        if shape.strategy.startswith(NEAR):
            return self._alone or near_node(shape.strategy) == self._node
        return shape.strategy in ("", GROUP, CAPTURING) or bound_to(shape, self._node)


def _over(want: Want, now: float) -> bool:
    keep = FORGET_AFTER if want.window == FIRST_WINDOW else REMEMBER_AGED
    return not want.bound and not want.starting and now - max(want.since, want.left) > keep
