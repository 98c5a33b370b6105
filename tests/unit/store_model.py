"""Four node stores, their processes and a data plane, in one thread, and a simple model of what must hold.

All nodes are of one host: processes read in the stores of others too, in place (as guests), each over a link of its
own; all else that they say there goes through their raylets, another way. The process of a node that is dead for the
cluster may read on where it is a guest, until its link ends.

No block that somebody reads or writes is handed out again; whoever opened an object sees that object's bytes for as
long as it is pinned, however often they went to disk and back; nothing is lost or refused without a reason. And at the
end: every request was answered, and when all references are dropped nothing but evictable copies is left.
"""

from __future__ import annotations

from store_steps import Processes
from store_world import TIMEOUT, UNIT

from hpcray.common.ids import make_proc, node_of, raylet_of
from hpcray.core.effects import Effect
from hpcray.core.object_store.pull_manager import MAX_LINK_RETRIES


class Cluster(Processes):
    """Everything is a step that takes a number to choose with; a step that cannot be taken does nothing.

    Args:
        spill_threshold: as for `ObjectStore`.
        nodes: how many there are.
        chunk: bytes of a chunk, at most CHUNK.
    """

    # ------------------------------------------------------------ wires, disks and deaths

    def move(self, pick: int) -> None:
        """Both sides of a transfer are there: the bytes go over."""
        both = [tag for tag in self.receives if tag in self.sends and tag not in self.moved]
        if both:
            tag = both[pick % len(both)]
            receive, send = self.receives[tag], self.sends[tag]
            assert (receive.id, receive.size, receive.peer) == (send.id, send.size, send.node)
            assert self.holds(send.node, send.offset, send.size, send.id), "the source was overwritten meanwhile"
            for unit in self.units(receive.offset, receive.size):
                self.memory[receive.node][unit] = receive.id
            self.moved.add(tag)

    def report(self, pick: int) -> None:
        """The data plane tells the end of a receive or of a send."""
        over = [(True, tag) for tag in self.receives if tag in self.moved or tag in self.cancelled]
        over += [
            (False, tag)
            for tag, send in self.sends.items()
            if tag in self.moved or send.peer not in self.stores or tag not in self.receives
        ]
        if over:
            receiving, tag = over[pick % len(over)]
            if receiving:
                self.end_receive(tag, None if tag in self.moved else "cancelled")
            else:
                self.end_send(tag, None if tag in self.moved or pick & 1 else "the peer is gone")

    def break_transfer(self, pick: int) -> None:
        """A transfer fails, noticed by both sides or by one."""
        open_ = [tag for tag in {**self.receives, **self.sends} if tag not in self.moved]
        if open_:
            tag = open_[pick % len(open_)]
            self.objects[(self.receives.get(tag) or self.sends[tag]).id].excused = True
            if tag in self.sends and (pick & 1 or tag not in self.receives):
                self.end_send(tag, "broken")
            elif tag in self.receives:
                self.end_receive(tag, "broken")

    def break_link(self, pick: int) -> None:
        """The data link between two living nodes breaks under a transfer, noticed by either side. Nothing may be lost
        by it: a node asks as often as it breaks here for one object, and once more."""
        open_ = [
            tag
            for tag, receive in self.receives.items()
            if tag not in self.moved | self.cancelled
            and receive.peer in self.stores
            and self.link_breaks[receive.node, receive.id] < MAX_LINK_RETRIES
        ]
        if open_:
            tag = open_[pick % len(open_)]
            receive = self.receives[tag]
            self.link_breaks[receive.node, receive.id] += 1
            if tag in self.sends and pick & 1:
                self.end_send(tag, "the link broke")
            else:
                self.end_receive(tag, "the link broke")

    def unpin(self, pick: int) -> None:
        """A process that was asked to gives up what it has pinned."""
        if self.unpins:
            link = sorted(self.unpins)[pick % len(self.unpins)]
            self.unpins.discard(link)
            for part in list(self.pinned):
                if part[:2] == link:
                    self.visits["unpinned"] += link[1] != node_of(link[0])
                    self.let_go(part)

    def disk(self, pick: int) -> None:
        """A write to disk, or a read, is done."""
        jobs = [*self.writes, *self.reads, *self.reserves]
        if jobs:
            job = jobs[pick % len(jobs)]
            if isinstance(job, int):
                self.end_write(job, None)
            elif job in self.reserves:
                self.end_reserve(job, None)
            else:
                self.end_read(job, None)

    def break_disk(self, pick: int) -> None:
        """A write to disk, or a read, fails."""
        jobs = [*self.writes, *self.reads, *self.reserves]
        if jobs and pick % 2 == 0:
            job = jobs[pick // 2 % len(jobs)]
            if isinstance(job, int):
                self.end_write(job, "no space left on device")
            elif job in self.reserves:
                self.end_reserve(job, "no space left on device")
            else:
                self.objects[self.read_ids[job]].excused = True
                self.end_read(job, "input/output error")

    def stall(self, pick: int) -> None:
        """Some of what a disk was told to do does not end for long; or it answers again."""
        node = self.living_nodes()[pick % len(self.stores)]
        jobs = [b""] * (node in self.writes) + [name for at, name in (*self.reads, *self.reserves) if at == node]
        stuck = [job for at, job in enumerate(jobs) if pick // 8 >> at & 1]
        self.stalls += bool(stuck)
        self.tell_stalled(node, stuck)

    def tell_stalled(self, node: int, stuck: list[bytes]) -> None:
        if stuck:
            self.stalled.add(node)
        else:
            self.stalled.discard(node)
        self.apply(node, self.stores[node].disk_stalled(self.now, stuck, "the disk has not answered" if stuck else ""))

    def end_write(self, node: int, error: str | None) -> None:
        write = self.writes.pop(node)
        for piece in write.pieces:
            for at in range(0, piece.size, UNIT) if error is None else ():
                self.disks[node][write.segment, piece.position + at] = self.memory[node][(piece.offset + at) // UNIT]
        self.apply(node, self.stores[node].spill_write_ended(self.now, error))

    def end_read(self, job: tuple[int, bytes], error: str | None) -> None:
        node, name = job
        read, ident = self.reads.pop(job), self.read_ids.pop(job)
        for at in range(0, read.piece.size, UNIT) if error is None else ():
            found = self.disks[node].get((read.segment, read.piece.position + at))
            # What is read for another node may have been given up meanwhile; then it must not be sent.
            assert found == ident or (found is None and name != ident), "the disk does not hold what is read from it"
            self.memory[node][(read.piece.offset + at) // UNIT] = found or b"nothing"
        self.apply(node, self.stores[node].spill_read_ended(self.now, name, error))

    def end_reserve(self, job: tuple[int, bytes], error: str | None) -> None:
        del self.reserves[job]
        self.apply(job[0], self.stores[job[0]].spill_read_ended(self.now, job[1], error))

    def end_receive(self, tag: int, error: str | None) -> None:
        node = self.receives.pop(tag).node
        self.cancelled.discard(tag)
        self.apply(node, self.stores[node].receive_ended(self.now, tag, error))

    def end_send(self, tag: int, error: str | None) -> None:
        node = self.sends.pop(tag).node
        self.apply(node, self.stores[node].send_ended(self.now, tag, error))

    def kill(self, pick: int) -> None:
        """A process dies, and another one takes its place."""
        if pick % 4 == 0:
            proc = self.alive()[pick // 4 % len(self.alive())]
            self.forget_proc(proc)
            self.procs.append(make_proc(node_of(proc), len(self.procs) + 1))
            for node in self.stores:
                # To its own raylet it is the end of its connection; to the others, a message of that raylet.
                src = proc if node == node_of(proc) else raylet_of(node_of(proc))
                self.say(src, raylet_of(node), lambda store, proc=proc: store.process_died(self.now, proc))

    def forget_proc(self, proc: bytes) -> None:
        self.dead.add(proc)
        for link in sorted(link for link in self.links - self.ghosts if link[0] == proc):
            self.close_link(*link)
        self.deaths += 1
        for _, ident in [*self.creating, *self.unsealed]:
            if _ == proc:
                self.objects[ident].excused = True
        for parts in (self.pinning_replicas, self.pinned_replicas):
            parts -= {part for part in parts if part[0] == proc}
        self.lent = {part: count for part, count in self.lent.items() if part[0] != proc}
        for book in (self.creating, self.unsealed):
            for key in [key for key in book if key[0] == proc]:
                del book[key]
        self.forget_parts(lambda part: part[0] == proc and not self.reads_at(proc, part[1]))

    def crash(self, pick: int) -> None:
        """A node goes with all it had; the others hear of it sooner or later."""
        if len(self.stores) > 1 and pick % 128 == 0:
            node = self.living_nodes()[pick // 128 % len(self.stores)]
            del self.stores[node]
            for number, proc in enumerate(self.procs):
                if node_of(proc) == node and proc not in self.dead:
                    for link in [link for link in self.links if link[0] == proc and link[1] in self.stores]:
                        if pick // 1000 >> number % 3 & 1:
                            self.ghosts.add(link)
                    self.forget_proc(proc)
            for obj in self.objects.values():
                if node in obj.locations:
                    obj.locations.remove(node)
                    obj.excused = True
            for parts in (
                self.pinning_replicas,
                self.pinned_replicas,
                self.unanswered_replica_pins,
                self.confirmed_replica_pins,
            ):
                parts -= {part for part in parts if part[1] == node}
            self.lent = {part: count for part, count in self.lent.items() if part[1] != node}
            self.ghosts = {link for link in self.ghosts if link[1] != node}
            self.links = {link for link in self.links if link[1] != node}
            self.forget_parts(lambda part: part[1] == node)
            self.writes.pop(node, None)
            self.stalled.discard(node)
            for job in [job for job in self.reserves if job[0] == node]:
                del self.reserves[job]
            for job in [job for job in self.reads if job[0] == node]:
                del self.reads[job], self.read_ids[job]
            for book in (self.receives, self.sends):
                for tag in [tag for tag, transfer in book.items() if transfer.node == node]:
                    del book[tag]
                    if book is self.receives:  # a receive elsewhere, of what it sent, stays cancelled
                        self.cancelled.discard(tag)
            for key in [key for key in self.channels if node_of(key[1]) == node]:
                if (key[1], node_of(key[0])) not in self.ghosts or key[2]:
                    del self.channels[key]
            for other in self.stores:
                self.say(raylet_of(node), raylet_of(other), lambda store, other=other: self.bury(other, node))

    def bury(self, node: int, dead: int) -> list[Effect]:
        """A store hears that a node is dead, from which some may still read here."""
        self.buried.add((node, dead))
        guests = {proc for proc, where in self.links if where == node and node_of(proc) == dead}
        self.visits["stayed"] += len(guests)
        return self.stores[node].node_died(self.now, dead, guests)

    def wait(self, pick: int) -> None:
        self.now += pick % 5
        for node, store in list(self.stores.items()):
            self.apply(node, store.tick(self.now))

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """Everything that is under way ends."""
        for _ in range(100_000):
            if any(self.channels.values()):
                self.deliver(0)
            elif any(tag in self.sends and tag not in self.moved for tag in self.receives):
                self.move(0)
            elif any(tag in self.moved or tag in self.cancelled for tag in self.receives) or self.sends:
                self.report(0)
            elif self.writes or self.reads or self.reserves:
                self.disk(0)
            else:
                return
        raise AssertionError("it never settles")

    def finish(self) -> None:
        for node in list(self.stalled):
            self.tell_stalled(node, [])
        for link in sorted(self.ghosts):
            self.close_link(*link)
        self.settle()
        for _ in range(4):
            for proc, ident in list(self.unsealed):
                self.seal(list(self.unsealed).index((proc, ident)))
            self.settle()
            self.now += TIMEOUT
            self.wait(0)
            self.settle()
        assert not self.creating, "a Create was never answered"
        assert not self.opening, "an Open was never answered"
        assert not self.unanswered and not self.unanswered_replica_pins
        assert not self.receives and not self.sends
        for proc, ident in list(self.unsealed):
            self.seal(list(self.unsealed).index((proc, ident)))
        for part in list(self.pinned):
            self.let_go(part)
        while self.lent:
            self.read_file(0)
        self.settle()
        assert not self.pinning_replicas, "a node that is to keep a copy never answered"
        for _, node, ident in self.pinned_replicas:
            held = self.stores[node].lifecycle.objects.get(ident)
            assert held is not None and (held.offset >= 0 or held.spill_slot is not None), "a kept copy is gone"
        for store in self.stores.values():
            assert all(held.spill_slot is None or held.preserved for held in store.lifecycle.objects.values()), (
                "on disk for nobody"
            )
            parts = set(store.lifecycle.clients.clients()) | set(store.lifecycle.spills.loans.borrowers())
            for held in store.lifecycle.objects.values():
                parts |= {*held.pins, *held.openers, *held.replica_pinners, *held.replica_pin_waiters}
            assert not parts & self.dead, "the dead hold something"
        for obj in self.objects.values():
            if obj.owner not in self.dead and obj.locations and not obj.freed:
                self.drop(obj)
        self.settle()
        for store in self.stores.values():
            left = store.snapshot()
            assert left["used"] == left["evictable"], f"leaked: {left}"
            assert left["spilled"] == left["restoring"] == left["on_disk"] == left["segments"] == 0, f"on disk: {left}"
            assert not self.disks[left["node"]]
            assert left["waiting"] == left["creating"] == left["pulling"] == left["pinned"] == 0
            assert self.deaths or left["objects"] == 0, f"copies nobody knows of: {left}"
