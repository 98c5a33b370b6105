"""A head core from the rows of another one that is no more.

It knows what the other knew and decides as it would have, but for what is only about time (how long who has waited) and
for what raylets tell it anyway: what is free, and who lacks what.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from hpcray.base.ids import node_of
from hpcray.core.gcs import notes
from hpcray.core.gcs.actor import DEAD, Actor
from hpcray.core.gcs.adopting import AdoptingActors, AdoptingGroups
from hpcray.core.gcs.groups import Group
from hpcray.core.gcs.journal import ACTOR_ID, GROUP_ID, ActorRow, GroupRow, NodeRow, Replica, SessionRow, decode_spec
from hpcray.core.gcs.placement_groups import REMOVED
from hpcray.core.gcs.queries import Queries
from hpcray.core.scheduler.placement import ClusterView
from hpcray.wire import messages as m

FORMER_KEPT = 16
ATTEMPTS = 1 << 20
"""Attempts at placing a group that another head has made are numbered below those of its successor."""


@dataclass(frozen=True)
class Cores:
    """The tables of a fresh head core."""

    view: ClusterView
    actors: AdoptingActors
    groups: AdoptingGroups
    queries: Queries


@dataclass
class Members:
    """What the rows say of the nodes.

    Attributes:
        session: the job's name.
        infos: all nodes, dead ones too.
        dead: why, in the order of their deaths.
    """

    session: str
    job: m.JobInfo | None
    infos: list[m.NodeInfo]
    dead: dict[int, str]


def members(replica: Replica) -> Members:
    """Who is in, and who was."""
    found = [msgspec.msgpack.decode(row, type=NodeRow) for _, row in replica.of(notes.NODE)]
    infos = sorted((row.info for row in found), key=lambda info: info.index)
    dead = {row.info.index: row.reason for row in sorted(found, key=lambda row: row.epoch) if row.epoch}
    row = replica.rows.get((notes.SESSION, b""))
    session = SessionRow("", None) if row is None else msgspec.msgpack.decode(row, type=SessionRow)
    return Members(session.session, session.job, infos, dead)


def fill(cores: Cores, now: float, replica: Replica) -> Members:
    """Put the rows into the tables of a fresh head core."""
    who = members(replica)
    alive = [info for info in who.infos if info.index not in who.dead]
    cores.queries.infos = who.infos
    cores.view.up(alive)
    cores.view.dead.update(who.dead)
    ended = [proc for proc, _ in replica.of(notes.ENDED)]
    cores.actors.early.recall((ident for ident, _ in replica.of(notes.FORGOTTEN)), ended, who.dead)
    cores.groups.recall((ident.hex() for ident, _ in replica.of(notes.GONE)), ended)
    over = _Over(set(ended), who.dead)
    _fill_actors(cores.actors, now, replica, over)
    _fill_groups(cores.groups, now, replica, over)
    for key, value in replica.of(notes.VALUE):
        cores.queries.kv.adopt(key, value)
    for key, value in replica.of(notes.ANSWER):
        if key[:8] not in over.ended and node_of(key) not in over.nodes:
            cores.queries.answers.adopt(key, value)
    return who


@dataclass(frozen=True)
class _Over:
    """Who watches nothing any more: the rows of watchers are not taken away one by one."""

    ended: set[bytes]
    nodes: dict[int, str]

    def watchers(self, replica: Replica, table: int, length: int) -> dict[bytes, set[bytes]]:
        found: dict[bytes, set[bytes]] = {}
        for key, _ in replica.of(table):
            ident, proc = key[:length], key[length:]
            if proc not in self.ended and node_of(proc) not in self.nodes:
                found.setdefault(ident, set()).add(proc)
        return found


def _fill_actors(table: AdoptingActors, now: float, replica: Replica, over: _Over) -> None:
    watchers = over.watchers(replica, notes.WATCH, ACTOR_ID)
    for ident, row in replica.of(notes.ACTOR):
        how = msgspec.msgpack.decode(row, type=ActorRow)
        actor = Actor(
            decode_spec(replica.rows[notes.SPEC, ident]),
            how.state, how.node, how.worker, how.restarts, how.reason, how.error,
            out_of_scope=how.out_of_scope, complete=how.complete, since=now, former=deque(how.former, FORMER_KEPT),
        )  # fmt: skip
        if how.state != DEAD:
            actor.watchers = watchers.get(ident, set())
        table.adopt(actor)
    for ident, procs in watchers.items():
        if ident not in table.actors and table.early.may_come(ident):
            table.early.of(ident).watchers |= procs
    for ident, why in replica.of(notes.KILLED):
        if ident not in table.actors and table.early.may_come(ident):
            table.early.of(ident).killed = why.decode()


def _fill_groups(table: AdoptingGroups, now: float, replica: Replica, over: _Over) -> None:
    watchers = over.watchers(replica, notes.GROUP_WATCH, GROUP_ID)
    for ident, row in replica.of(notes.GROUP):
        how = msgspec.msgpack.decode(row, type=GroupRow)
        group = Group(how.spec, how.state, how.nodes, attempt=ATTEMPTS, since=now, told=now, reason=how.reason)
        if how.state != REMOVED:
            group.watchers = watchers.get(ident, set())
        table.adopt(group)
    for ident, procs in watchers.items():
        if table.find(ident) is None and not table.removed(ident.hex()):
            table.early().setdefault(ident, set()).update(procs)
