"""The head dies, or seems to, in simulated clusters of whole raylets."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from raylets import SimNode, World, obeyed_in_order

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, raylet_of
from hpcray.common.resources import UNIT
from hpcray.core.gcs.actor_manager import ALIVE, DEAD
from hpcray.core.gcs.gcs import RecoveringGcs
from hpcray.protocol import messages as m

CPU = m.Shape((("CPU", UNIT),))
SPREAD = m.Shape((("CPU", UNIT),), "SPREAD")
NOTHING = m.Shape(())
MOST_HEAVY = 1
"""So many actors of each client take a CPU: two nodes are enough for all."""


class Client:
    """A process that creates actors and groups, writes values, and kills and removes some of what it made."""

    def __init__(self, node: SimNode) -> None:
        self.node = node
        self.me = node.client()
        self.number = 0
        self.actors: dict[bytes, m.ActorSpec] = {}
        self.killed: set[bytes] = set()
        self.groups: dict[bytes, m.GroupSpec] = {}
        self.removed: set[bytes] = set()
        self.values: dict[bytes, bytes] = {}
        self.waiting: dict[int, Any] = {}
        self.claims: dict[int, bytes] = {}
        self.heavy = 0
        node.on_moved[self.me] = self.head_moved

    def head_moved(self) -> None:
        """What is not answered is asked again, and what was heard last may not be the last."""
        for number in sorted(set(self.waiting) - set(self.answered())):
            self.node.say(self.me, self.waiting[number])
        for ident in self.actors:
            self.node.say(self.me, m.WatchActor(ident))
        for ident in self.groups:
            self.node.say(self.me, m.WatchGroup(ident))

    def ident(self) -> bytes:
        self.number += 1
        return self.me + self.number.to_bytes(5, "big")

    def create_actor(self, name: str = "", light: bool = True) -> None:
        ident = self.ident()
        self.heavy += not light
        hold = NOTHING if light or self.heavy > MOST_HEAVY else CPU
        spec = m.ActorSpec(
            ident, "A", b"class", b"args", [], SPREAD, hold, name, "ns", bool(name), -1, 0, 1, {}
        )  # fmt: skip
        self.actors[ident] = spec
        self.waiting[self.number] = m.CreateActor(self.number, spec)
        self.node.say(self.me, self.waiting[self.number])

    def create_group(self) -> None:
        ident = self.ident()
        self.groups[ident] = m.GroupSpec(ident, [{"CPU": UNIT // 100}] * 2, "SPREAD", "", "ns", self.me)
        self.node.say(self.me, m.CreateGroup(0, self.groups[ident]))

    def put(self) -> None:
        key = self.ident()
        self.values[key] = b"%d" % self.number
        args = msgspec.msgpack.encode([key, self.values[key], True, ""])
        self.waiting[self.number] = m.GcsCall(self.number, "kv_put", args)
        self.node.say(self.me, self.waiting[self.number])

    def claim(self, key: bytes) -> None:
        """Write a value that only the first may write."""
        self.ident()
        self.claims[self.number] = key
        args = msgspec.msgpack.encode([key, self.me + b"%d" % self.number, False, "claims"])
        self.waiting[self.number] = m.GcsCall(self.number, "kv_put", args)
        self.node.say(self.me, self.waiting[self.number])

    def kill(self, ident: bytes) -> None:
        self.killed.add(ident)
        self.node.say(self.me, m.KillActor(ident, True, "it was killed"))

    def remove(self, ident: bytes) -> None:
        self.removed.add(ident)
        self.node.say(self.me, m.RemoveGroup(ident))

    def heard(self, kind: type) -> list[Any]:
        return [msg for msg in self.node.inboxes[self.me] if isinstance(msg, kind)]

    def answered(self) -> dict[int, m.GcsReply]:
        return {reply.req: reply for reply in self.heard(m.GcsReply)}


def something(world: World, clients: list[Client]) -> None:
    """One of them does something."""
    client = world.random.choice(clients)
    if client.node.ended:
        return
    choice = world.random.random()
    if choice < 0.35:
        client.create_actor(light=world.random.random() < 0.8)
    elif choice < 0.45:
        client.create_actor(name=f"name{world.random.randrange(5)}")
    elif choice < 0.6:
        client.create_group()
    elif choice < 0.68:
        client.put()
    elif choice < 0.75:
        key = b"%d" % int(world.net.now * 10)
        for one in clients:
            if not one.node.ended:
                one.claim(key)
    elif choice < 0.85 and client.actors:
        client.kill(world.random.choice(list(client.actors)))
    elif choice < 0.92 and client.groups:
        client.remove(world.random.choice(list(client.groups)))
    else:
        workers = [(node, proc) for node in world.alive() for proc, actor in node.workers.items() if actor]
        if workers:
            node, proc = world.random.choice(workers)
            node.die(proc, "killed by signal 9")
            node.wake(world.net.now)


def work(world: World, clients: list[Client], until: float) -> None:
    while world.net.now < until:
        world.run(world.net.now + world.random.uniform(0.001, 0.05))
        something(world, clients)


def check(world: World, clients: list[Client]) -> None:
    """Nothing is lost, nothing is there twice, everybody knows."""
    head = world.head()
    table = head.actors.actors
    places = Counter(actor for node in world.alive() for actor in node.workers.values() if actor)
    assert not [actor for actor, count in places.items() if count > 1]
    for client in clients:
        answers = client.answered()
        assert not set(client.waiting) - set(answers), "every question is answered"
        states = {state.actor: state.state for state in client.heard(m.ActorStateUpdate)}
        for ident, spec in client.actors.items():
            number = int.from_bytes(ident[-5:], "big")
            if not answers[number].ok:
                assert b"name_taken" in answers[number].value and not places[ident]
                continue
            actor = table[ident]
            assert actor.state == (DEAD if ident in client.killed else ALIVE), (ident, actor)
            assert places[ident] == (actor.state == ALIVE)
            assert states[ident] == actor.state
            if actor.state == ALIVE:
                assert world.nodes[actor.node].workers[actor.worker] == ident
                assert not spec.name or head.actors.names["ns", spec.name] == ident
        for key, value in client.values.items():
            assert head.queries.kv.get(key, "") == value
    check_groups(world, clients)
    check_claims(world, clients)


def check_claims(world: World, clients: list[Client]) -> None:
    """Each was answered yes once, and what was written then is there."""
    winners: dict[bytes, list[bytes]] = {}
    for client in clients:
        for number, key in client.claims.items():
            said = [reply.value for reply in client.heard(m.GcsReply) if reply.req == number]
            if msgspec.msgpack.decode(said[0]):
                winners.setdefault(key, []).append(client.me + b"%d" % number)
    values = world.head().queries.kv
    assert all(owners == [values.get(key, "claims")] for key, owners in winners.items())


def check_groups(world: World, clients: list[Client]) -> None:
    held = {
        (group, index): (node.rank, usable)
        for node in world.alive()
        for group, index, usable in node.raylet.lease_manager._bundles.held_bundles()
    }
    wanted = {}
    for client in clients:
        states = {state.group: state.state for state in client.heard(m.PlacementGroupStateUpdate)}
        for ident in client.groups:
            group = world.head().groups.find(ident)
            assert group is not None
            assert group.state == states[ident] == ("REMOVED" if ident in client.removed else "CREATED")
            if group.state == "CREATED":
                wanted.update({(ident, index): (node, True) for index, node in enumerate(group.nodes)})
    assert held == wanted


def begun(seed: int, size: int = 4) -> tuple[World, list[Client]]:
    world = World(size, 1, seed)
    world.run(0.8)
    return world, [Client(world.nodes[rank]) for rank in range(1, size)]


def goes_on(seed: int) -> None:
    world, clients = begun(seed)
    work(world, clients, world.random.uniform(0.9, 2.0))
    if world.random.random() < 0.5:  # the standby hears nothing of the head's last moments
        world.cut = {frozenset((0, 1))}
    for _ in range(world.random.randrange(40)):
        something(world, clients)
    world.run(world.net.now + world.random.uniform(0.0, world.random.choice([0.04, 0.2])))
    world.nodes[0].end()
    world.mend()
    work(world, clients, world.net.now + world.random.uniform(0.1, 1.0))
    if world.random.random() < 0.4:  # another dies during the take-over, or soon after
        gone = world.nodes[world.random.choice([2, 3])]
        clients = [client for client in clients if client.node is not gone]
        forget_clients_of(world, gone)
        work(world, clients, world.net.now + world.random.uniform(0.05, 0.7))
    killed = world.net.now
    world.run(killed + 20.0)
    assert HEAD in world.nodes[1].router.mine
    check_leaders(world)
    check(world, clients)


def forget_clients_of(world: World, node: SimNode) -> None:
    node.end()


def check_leaders(world: World) -> None:
    for node in world.alive():
        assert obeyed_in_order(node), node.rank


@pytest.mark.parametrize("seed", range(8))
def test_the_job_goes_on_without_its_head(seed: int) -> None:
    goes_on(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_job_goes_on_without_its_head_many_times() -> None:
    for seed in range(100, 500):
        goes_on(seed)


@pytest.mark.parametrize("seed", range(2))
def test_a_head_that_is_cut_off_has_stopped_when_the_next_begins(seed: int) -> None:
    world, clients = begun(seed)
    work(world, clients, 1.5)
    world.cut = {frozenset((0, rank)) for rank in (1, 2, 3)}
    world.run(world.net.now + 30.0)
    old, new = world.nodes[0], world.nodes[1]
    assert HEAD in new.router.mine and old.leaving.begun
    first = min(when for when, rank, text in world.said if rank == 1 and "this node is the head" in text)
    assert old.leaving.at < first
    world.mend()
    work(world, clients, world.net.now + 1.0)
    world.run(world.net.now + 20.0)
    check_leaders(world)
    check(world, clients)


@pytest.mark.parametrize("seed", range(1))
def test_a_head_that_was_paused_is_obeyed_by_no_node_when_it_resumes(seed: int) -> None:
    world, clients = begun(seed)
    work(world, clients, 1.5)
    world.nodes[0].paused_until = world.net.now + 25.0
    work(world, clients, world.net.now + 8.0)
    world.run(world.net.now + 22.0)
    assert HEAD in world.nodes[1].router.mine and world.nodes[0].leaving.begun
    fenced = [node.cluster.fenced for node in world.nodes]
    assert fenced == [True, False, False, False], "the journal on disk is not the old head's any more"
    world.run(world.net.now + 20.0)
    check_leaders(world)
    check(world, clients)


def test_the_head_s_side_of_a_cut_does_not_get_another_head() -> None:
    """The program's node is alone on its side: it cannot tell that from its own loss, and the others keep the head."""
    world, _ = begun(1)
    world.cut = {frozenset((1, rank)) for rank in (0, 2, 3)}
    world.run(40.0)
    assert HEAD not in world.nodes[1].router.mine and world.nodes[1].leaving.begun
    assert world.nodes[0].leaving.begun, "where the program is gone the job ends"


def test_a_node_without_a_new_head_ends_after_a_timeout() -> None:
    world, _ = begun(2)
    world.nodes[0].end()
    world.nodes[1].end()
    world.run(30.0)
    assert all(world.nodes[rank].ended for rank in (2, 3))
    assert any("the head (node 0" in text for _, rank, text in world.said if rank == 2)


def test_a_broken_link_to_one_node_is_not_the_head_s_death() -> None:
    world, clients = begun(3)
    world.nodes[3].control.forgotten[0] = "its wire broke"
    work(world, clients[:2], 5.0)
    world.run(40.0)
    assert HEAD in world.nodes[0].router.mine and not world.nodes[0].leaving.begun
    assert world.nodes[3].leaving.begun and not world.nodes[2].leaving.begun


def test_the_standby_waits_until_a_silent_head_must_have_ended() -> None:
    """A node time-out longer than that of the head: the successor waits until a cut off head must have stopped."""
    world = World(4, 1, 5, Config(prestart=0, node_timeout=15.0, head_timeout=6.0))
    world.run(1.0)
    world.cut = {frozenset((0, rank)) for rank in (1, 2, 3)}
    world.run(60.0)
    if HEAD in world.nodes[1].router.mine:
        first = min(when for when, rank, text in world.said if rank == 1 and "this node is the head" in text)
        assert world.nodes[0].leaving.at < first


def test_messages_retained_for_a_new_head_are_dropped_in_time() -> None:
    world, clients = begun(4)
    work(world, clients, 10.0)
    kept = [len(node.router.to_head._retained) for node in world.nodes[1:]]
    sent = [node.router.to_head.sent for node in world.nodes[1:]]
    assert max(kept) < 60 < min(sent), (kept, sent)
    world.run(world.net.now + 5.0)
    world.nodes[0].end()
    world.run(world.net.now + 10.0)
    work(world, clients, world.net.now + 3.0)
    assert [len(node.router.to_head._retained) for node in world.nodes[1:]] == [0, 0, 0]
    world.run(world.net.now + 20.0)
    check(world, clients)


@pytest.mark.parametrize("known", [True, False])
def test_a_node_that_died_just_before_the_head_is_dead_for_all(known: bool) -> None:
    """The old head sent NodeDied to some nodes, the standby among them or not."""
    world, clients = begun(6)
    world.lossy = [True] * 4
    work(world, clients, 1.5)
    world.nodes[3].end()
    world.cut = {frozenset((0, 2))} if known else {frozenset((0, 1))}
    there = world.nodes[1 if known else 2].raylet.forgotten_nodes
    while 3 not in there:
        world.run(world.net.now + 0.005)
    world.nodes[0].end()
    world.mend()
    world.run(world.net.now + 25.0)
    assert [node.raylet.forgotten_nodes for node in world.nodes[1:3]] == [{0, 3}, {0, 3}]
    work(world, clients[:2], world.net.now + 1.0)
    world.run(world.net.now + 20.0)
    check(world, clients[:2])


def test_a_death_missing_only_in_the_replica_is_not_waited_for() -> None:
    """The old head declared a node dead to the standby, but the row of that death was lost with the head."""
    world, clients = begun(6)
    work(world, clients, 1.5)
    world.run(world.net.now + 3.0)
    standby = world.nodes[1].raylet
    standby.handlers[m.StateLogAppend] = lambda now, src, msg: ()
    world.nodes[3].end()
    while 3 not in standby.forgotten_nodes:
        world.run(world.net.now + 0.005)
    world.nodes[0].end()
    world.run(world.net.now + 25.0)
    assert isinstance(standby.head, RecoveringGcs) and not standby.head.awaited
    work(world, clients[:2], world.net.now + 1.0)
    world.run(world.net.now + 20.0)
    check(world, clients[:2])


def test_the_head_prints_why_a_restored_actor_waits() -> None:
    world, _ = begun(0)
    world.nodes[0].raylet.messages(raylet_of(0), [m.Infeasible(0, "nobody has GPUs")])
    assert world.said[-1][1:] == (0, "from the journal of an earlier run: nobody has GPUs")
