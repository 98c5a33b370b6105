"""The model of `store_model`: what processes and owners do, and what they hear."""

from __future__ import annotations

from collections.abc import Callable

from store_world import SIZES, UNIT, Object, Part, Stores

from hpcray.common.ids import PUT_INDEX, node_of, number_of, raylet_of
from hpcray.core.effects import Effect
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.protocol import messages as m


class Processes(Stores):
    """Each step takes a number to choose with."""

    def create(self, pick: int) -> None:
        alive = self.alive()
        proc, owner = alive[pick % len(alive)], self.procs[-1 - pick // 7 % min(len(self.procs), 10)]
        self.counter += 1
        ident = owner + self.counter.to_bytes(5, "big") + PUT_INDEX
        size = SIZES[pick % len(SIZES)] * UNIT
        self.objects[ident] = Object(ident, size, owner, excused=owner in self.dead)
        self.creating[proc, ident] = self.now
        self.to_raylet(proc, m.Create(ident, size))

    def seal(self, pick: int) -> None:
        if self.unsealed:
            proc, ident = list(self.unsealed)[pick % len(self.unsealed)]
            offset = self.unsealed.pop((proc, ident))
            obj = self.objects[ident]
            for unit in self.units(offset, obj.size):
                self.memory[node_of(proc)][unit] = ident
            self.pinned[proc, node_of(proc), ident] = offset
            obj.locations.append(node_of(proc))
            self.to_raylet(proc, m.Seal(ident))

    def open(self, pick: int) -> None:
        proc = self.alive()[pick % len(self.alive())]
        known = self.readable(proc, node_of(proc))
        if known:
            obj = known[pick // 5 % len(known)]
            part = (proc, node_of(proc), obj.id)
            self.opening[part] = self.now
            self.tell(part, m.Open(obj.id, obj.size, list(obj.locations), pick // 3 % 3))

    def readable(self, proc: bytes, node: int) -> list[Object]:
        """What it may open there."""
        busy = self.opening.keys() | self.pinned.keys()
        return [
            obj for obj in self.objects.values() if obj.locations and not obj.freed and (proc, node, obj.id) not in busy
        ]

    def visit(self, pick: int) -> None:
        """A process opens in another node's store what is there, comes there, or has been there."""
        guests = [(proc, node) for proc in self.alive() for node in self.stores if node != node_of(proc)]
        guests += sorted(self.ghosts)
        if not guests:
            return
        proc, node = guests[pick % len(guests)]
        known = self.readable(proc, node)
        own = [obj for obj in known if {(proc, node, obj.id)} & (self.pinned_replicas | self.pinning_replicas)]
        there = [obj for obj in known if node in obj.locations or obj.id in self.stores[node].lifecycle.objects]
        known = (own or there or known) if pick // 3 % 3 == 0 else (there or known) if pick // 3 % 3 == 1 else known
        if known:
            obj = known[pick // 9 % len(known)]
            self.links.add((proc, node))
            self.opening[proc, node, obj.id] = self.now
            self.tell((proc, node, obj.id), m.Open(obj.id, obj.size, [], pick // 2 % 3))

    def pin_read_replica(self, pick: int) -> None:
        """An owner that reads its object in another store, or is about to, has it kept there."""
        parts = [
            part
            for part in [*self.opening, *self.pinned]
            if part[1] != node_of(part[0]) and part[0] not in self.dead and self.objects[part[2]].owner == part[0]
        ]
        parts = [
            part
            for part in parts
            if part not in self.pinned_replicas | self.pinning_replicas and not self.objects[part[2]].freed
        ]
        if parts:
            self.request_replica_pin(parts[pick % len(parts)])

    def end_ghost(self, pick: int) -> None:
        """The guest of a dead node ends."""
        if self.ghosts and pick % 4 == 0:
            proc, node = sorted(self.ghosts)[pick // 4 % len(self.ghosts)]
            self.close_link(proc, node)

    def close_link(self, proc: bytes, node: int) -> None:
        self.ghosts.discard((proc, node))
        self.forget_parts(lambda part: part[:2] == (proc, node))
        self.channels.pop((raylet_of(node), proc, 0), None)

        def closed(store: ObjectStore) -> list[Effect]:
            self.links.discard((proc, node))
            if (node, node_of(proc)) in self.buried:
                return store.process_died(self.now, proc)
            return []

        self.say(proc, raylet_of(node), closed)

    def prefetch(self, pick: int) -> None:
        """Somebody has a node fetch an object."""
        known = [obj for obj in self.objects.values() if obj.locations and not obj.freed]
        if known:
            obj, node = known[pick // 5 % len(known)], self.living_nodes()[pick % len(self.stores)]
            proc = self.alive()[pick // 3 % len(self.alive())]
            self.say(proc, raylet_of(node), m.Prefetch([m.ArgRef(obj.id, obj.size, list(obj.locations))]))

    def toggle_replica_pin(self, pick: int) -> None:
        """An owner has another node keep a copy; or gives up one that is kept."""
        node = self.living_nodes()[pick % len(self.stores)]
        known = [
            obj
            for obj in self.objects.values()
            if obj.locations and not obj.freed and obj.owner in self.alive() and node_of(obj.owner) != node
        ]
        if known:
            obj = known[pick // 5 % len(known)]
            key = (obj.owner, node, obj.id)
            if key in self.pinned_replicas:
                self.pinned_replicas.discard(key)
                self.say(obj.owner, raylet_of(node), m.Release([obj.id], unpin_replica=True), 1)
            elif key not in self.pinning_replicas:
                self.request_replica_pin(key)

    def request_replica_pin(self, part: Part) -> None:
        proc, node, ident = part
        obj = self.objects[ident]
        self.pinning_replicas.add(part)
        self.say(proc, raylet_of(node), m.Open(ident, obj.size, list(obj.locations), pin_replica=True), 1)

    def raise_priority(self, pick: int) -> None:
        """Somebody needs more urgently what it has asked for."""
        if self.opening:
            part = list(self.opening)[pick % len(self.opening)]
            self.tell(part, m.RaisePriority(part[2], 0))

    def read_file(self, pick: int) -> None:
        """A process reads what was lent to it on disk."""
        if self.lent:
            _, node, ident = key = list(self.lent)[pick % len(self.lent)]
            if key in self.opening:
                return  # it has not heard of it yet
            assert ident in self.disks[node].values(), "what was lent is not on disk any more"
            self.lent[key] -= 1
            if not self.lent[key]:
                del self.lent[key]
            self.tell(key, m.DiskRead(ident))

    def break_file(self, pick: int) -> None:
        """It cannot read it."""
        if self.lent:
            key = list(self.lent)[pick % len(self.lent)]
            ident = key[2]
            if {key} & (self.opening.keys() | self.pinned.keys()):
                return
            self.lent[key] -= 1
            if not self.lent[key]:
                del self.lent[key]
            obj = self.objects[ident]
            obj.excused = True
            self.broken += 1
            self.opening[key] = self.now
            self.tell(key, m.DiskRead(ident, "input/output error", obj.size, list(obj.locations)))

    def release(self, pick: int) -> None:
        if self.pinned:
            self.let_go(list(self.pinned)[pick % len(self.pinned)])

    def let_go(self, part: Part) -> None:
        proc, node, ident = part
        offset = self.pinned.pop(part)
        assert self.holds(node, offset, self.objects[ident].size, ident), "a pinned object was overwritten"
        del self.granted[part]
        self.visits["read"] += node != node_of(proc)
        self.visits["read and kept"] += part in self.pinned_replicas
        self.visits["read by a ghost"] += proc in self.dead
        self.tell(part, m.Release([ident]))

    def abort(self, pick: int) -> None:
        """A creator gives up before the seal."""
        if self.unsealed:
            proc, ident = list(self.unsealed)[pick % len(self.unsealed)]
            del self.unsealed[proc, ident], self.granted[proc, node_of(proc), ident]
            self.to_raylet(proc, m.Release([ident]))

    def free(self, pick: int) -> None:
        ready = [obj for obj in self.objects.values() if obj.locations and not obj.freed and obj.owner not in self.dead]
        if ready:
            self.drop(ready[pick % len(ready)])

    def drop(self, obj: Object) -> None:
        obj.freed = True
        for key in [
            key for key in self.pinned_replicas | self.pinning_replicas if key[0] == obj.owner and key[2] == obj.id
        ]:
            self.pinned_replicas.discard(key)
            self.pinning_replicas.discard(key)
            self.say(obj.owner, raylet_of(key[1]), m.Release([obj.id], unpin_replica=True), 1)
        self.to_raylet(obj.owner, m.Free([obj.id], list(obj.locations)))

    def deliver(self, pick: int) -> None:
        busy = [key for key, channel in self.channels.items() if channel]
        if busy:
            key = busy[pick % len(busy)]
            msg = self.channels[key].popleft()
            if not key[2] or (node_of(key[1]), node_of(key[0])) not in self.buried:
                self.arrive(key[0], key[1], msg)

    def arrive(self, src: bytes, dest: bytes, msg: object) -> None:
        node = node_of(dest)
        if number_of(dest):
            if isinstance(msg, m.ReplicaPinned):
                self.replica_pin_answered(dest, node_of(src), msg)
            else:
                self.answered(dest, node_of(src), msg)
        elif node in self.stores:
            store = self.stores[node]
            if isinstance(msg, Callable):  # type: ignore[arg-type]
                self.apply(node, msg(store))  # type: ignore[operator]
            else:
                self.heard(node, src, msg)
                self.apply(node, store.handle(self.now, src, msg))  # type: ignore[arg-type]

    def heard(self, node: int, src: bytes, msg: object) -> None:
        """A store is about to react to this; what it owes from now on, and no more."""
        if isinstance(msg, m.Open):
            if self.reads_at(src, node):
                (self.unanswered_replica_pins if msg.pin_replica else self.unanswered).add((src, node, msg.id))
        elif isinstance(msg, m.DiskRead) and msg.error and (src, node, msg.id) in self.opening:
            self.unanswered.add((src, node, msg.id))
        elif isinstance(msg, m.Release) and msg.unpin_replica:
            parts = {(src, node, ident) for ident in msg.ids}
            self.unanswered_replica_pins -= parts
            self.confirmed_replica_pins -= parts

    def replica_pin_answered(self, proc: bytes, node: int, msg: m.ReplicaPinned) -> None:
        """A node keeps a copy for its owner, or cannot, or cannot any more."""
        key = (proc, node, msg.id)
        asked = key in self.pinning_replicas
        self.pinning_replicas.discard(key)
        obj = self.objects[msg.id]
        if msg.reason:
            self.pinned_replicas.discard(key)
            known = obj.excused or obj.freed or proc in self.dead
            said = "object store of node" in msg.reason or "the disk has not answered" in msg.reason
            assert known or said, f"not kept, without a reason: {msg.reason}"
        elif proc not in self.dead and node in self.stores:  # else it was said before the node died
            assert asked or obj.freed
            if node not in obj.locations:
                obj.locations.append(node)
            if obj.freed:
                self.to_raylet(proc, m.Free([obj.id], [node]))
            else:
                self.pinned_replicas.add(key)

    def answered(self, proc: bytes, node: int, msg: object) -> None:
        """A process hears from the store of a node."""
        if not self.reads_at(proc, node) or node not in self.stores:
            return
        if isinstance(msg, m.AddLocation):
            obj = self.objects[msg.id]
            if obj.freed:
                self.to_raylet(proc, m.Free([obj.id], [msg.node]))
            elif msg.node not in obj.locations and msg.node in self.stores:
                obj.locations.append(msg.node)
            return
        if isinstance(msg, m.OnDisk):
            del self.opening[proc, node, msg.id]
            return
        if isinstance(msg, m.Created):
            del self.creating[proc, msg.id]
            self.unsealed[proc, msg.id] = msg.offset
        elif isinstance(msg, m.Opened):
            del self.opening[proc, node, msg.id]
            self.pinned[proc, node, msg.id] = msg.offset
            obj = self.objects[msg.id]
            self.visits["had it pulled"] += (proc, node, msg.id) in self.sent_to_own_node
            self.sent_to_own_node.discard((proc, node, msg.id))
            if msg.pulled and proc not in self.dead:
                if node not in obj.locations:
                    obj.locations.append(node)
                if obj.freed and obj.owner not in self.dead:
                    self.to_raylet(obj.owner, m.Free([obj.id], [node]))
        else:
            assert isinstance(msg, m.StoreError)
            asked = self.opening.pop((proc, node, msg.id), None)
            if asked is None:
                asked = self.creating.pop((proc, msg.id))
            obj = self.objects[msg.id]
            if msg.kind == "full" and node != node_of(proc):
                self.pull_on_own_node(proc, obj)
            elif msg.kind == "full":
                assert self.now - asked >= 0 and self.waited(msg.id), "full, but did not wait"
            else:
                assert msg.kind == "lost"
                self.visits["nothing there"] += node != node_of(proc)
                assert node != node_of(proc) or obj.excused or obj.freed or obj.owner in self.dead, (
                    f"lost without a reason: {msg.reason}"
                )

    def pull_on_own_node(self, proc: bytes, obj: Object) -> None:
        """A guest has heard that there is no room for what lies on disk there: it has its own node pull that."""
        part = (proc, node_of(proc), obj.id)
        if proc not in self.dead and obj in self.readable(proc, node_of(proc)):
            self.visits["no room there"] += 1
            self.sent_to_own_node.add(part)
            self.opening[part] = self.now
            self.tell(part, m.Open(obj.id, obj.size, list(obj.locations)))
