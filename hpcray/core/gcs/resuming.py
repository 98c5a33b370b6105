"""What the next run of a job takes from the journal of the one before: names and actors that were to outlive their
makers, placement groups likewise, and the key-value store.

Processes and objects are gone with the run. So an actor begins anew, with its constructor's arguments, where these say
all that it takes; its ids are new ones. What cannot come back is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from hpcray.base.bundle_names import group_of
from hpcray.base.ids import raylet_of
from hpcray.core.gcs import notes
from hpcray.core.gcs.actor import DEAD, Actor
from hpcray.core.gcs.groups import Group
from hpcray.core.gcs.journal import ActorRow, GroupRow, Replica, decode_spec
from hpcray.core.gcs.placement_groups import REMOVED
from hpcray.core.gcs.restoring import Cores
from hpcray.core.scheduler.wants import node_affinity
from hpcray.wire.messages import ActorSpec, CreateActor, CreateGroup, GcsCall, Message, Shape

_ABOUT = ("named_actor", "list_named_actors", "placement_group", "kv_")
"""Queries that begin so are about what may come back."""
_REFS = (b"placed_ref", b"ObjectRef", b"ActorHandle", b"PlacementGroup")
_LIVE = (b"placed_ref",)
"""What pickled arguments contain, and a pickled class, that hold something of the run that is over."""


@dataclass
class Resumed:
    """What came back.

    Attributes:
        actors, groups, values: how many.
        lost: of each actor and group that did not, what it is and why.
    """

    actors: int = 0
    groups: int = 0
    values: int = 0
    lost: list[str] = field(default_factory=list)


def resume(cores: Cores, now: float, replica: Replica) -> Resumed:
    """Put what outlives a run into the tables of a head core whose cluster has just come up."""
    found, ids = Resumed(), _Ids()
    for ident, row in replica.of(notes.GROUP):
        how = msgspec.msgpack.decode(row, type=GroupRow)
        if how.state != REMOVED and not how.spec.owner:
            spec = msgspec.structs.replace(how.spec, group=ids.of(ident))
            cores.groups.adopt(Group(spec, nodes=[-1] * len(spec.bundles), since=now, told=now))
            cores.groups.notes.add(notes.GROUP, spec.group)
            found.groups += 1
    for ident, row in replica.of(notes.ACTOR):
        state = msgspec.msgpack.decode(row, type=ActorRow)
        old = decode_spec(replica.rows[notes.SPEC, ident])
        if state.state == DEAD or not old.detached:
            continue
        if reason := _why_not(old, state, ids):
            found.lost.append(f"{old.class_name} {old.name!r}: {reason}")
            continue
        new = msgspec.structs.replace(
            old, actor=ids.of(ident), place=_elsewhere(old.place, ids), hold=_elsewhere(old.hold, ids)
        )
        actor = Actor(new, since=now)
        cores.actors.adopt(actor)
        cores.actors.notes.add(notes.SPEC, new.actor)
        found.actors += 1
    for key, value in replica.of(notes.VALUE):
        cores.queries.kv.adopt(key, value)
        cores.queries.kv.notes.add(notes.VALUE, key)
        found.values += 1
    return found


def waits_for_the_past(msg: Message) -> bool:
    """Whether a message is to be dealt with when what comes back is back."""
    if isinstance(msg, GcsCall):
        return msg.method.startswith(_ABOUT)
    return isinstance(msg, (CreateActor, CreateGroup))


class _Ids:
    """New ids for old ones. The raylet of node 0 is their maker, and hears why one waits: it makes no others."""

    def __init__(self) -> None:
        self._new: dict[bytes, bytes] = {}

    def of(self, old: bytes) -> bytes:
        return self._new.setdefault(old, raylet_of(0) + (len(self._new) + 1).to_bytes(5, "big"))

    def get(self, old: str) -> str | None:
        """In hex; None for what has not come back."""
        new = self._new.get(bytes.fromhex(old))
        return None if new is None else new.hex()


def _why_not(spec: ActorSpec, row: ActorRow, ids: _Ids) -> str:
    """Why an actor does not come back; "" when it does."""
    if not row.complete:
        return "its constructor's arguments were not there yet"
    if row.out_of_scope:
        return "nobody wanted it any more"
    if spec.refs:
        return "its constructor takes large arguments, which were in the memory of the nodes"
    if _has(_REFS, spec.args, *(spec.inline or ())) or _has(_LIVE, spec.cls):
        return "its constructor takes refs or handles, which were of that run"
    group = group_of(spec.place.resources) or group_of(spec.hold.resources)
    if group and ids.get(group) is None:
        return "its placement group does not come back"
    return ""


def _elsewhere(shape: Shape, ids: _Ids) -> Shape:
    """The same request in this run: nodes are others, groups have other names."""
    strategy = "" if node_affinity(shape.strategy) is not None else shape.strategy
    group = group_of(shape.resources)
    if not group:
        return msgspec.structs.replace(shape, strategy=strategy)
    new = ids.get(group) or group
    resources = tuple(sorted((name.replace(group, new), units) for name, units in shape.resources))
    return msgspec.structs.replace(shape, resources=resources, strategy=strategy)


def _has(words: Iterable[bytes], *texts: bytes) -> bool:
    return any(word in text for word in words for text in texts)
