"""A process of the ownership simulation: a real object table, and the least of a runtime around it.

The runtime does what `hpcray/runtime` does, without bytes, threads and sockets: a value is the tuple of the refs inside
it, a task is a frame with variables, and a ref that dies is noticed at the process's next turn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ownership_departures import KeepsCopies
from ownership_parts import ERROR, LARGE, OK, Frame, Ref, Submitted, View, blob_of, refs_in
from ownership_visits import Visiting

from hpcray.common.ids import FIRST_RETURN, PUT_INDEX, node_of, number_of, raylet_of
from hpcray.core.core_worker.object_recovery import DEPENDENCY, ObjectRecovery
from hpcray.core.core_worker.object_table import INLINE, LINEAGE_ONLY, PENDING, ObjectTable, Waiter
from hpcray.protocol import messages as m

if TYPE_CHECKING:
    from ownership_world import World


class Process:
    """See the module."""

    def __init__(self, world: World, proc: bytes) -> None:
        self.world = world
        self.id = proc
        self.node = node_of(proc)
        self.alive = True
        self.live: Counter[bytes] = Counter()
        self.released: deque[Any] = deque()
        self.state = Frame()
        self.frames: list[Frame] = [self.state]
        self.pinned: list[Ref] = []
        self.tasks: dict[bytes, Submitted] = {}
        self.gets: list[tuple[Frame, Ref, Waiter]] = []
        self.table = world.make_table(
            proc, self.send, self.notify, self.lost, world.lineage_limit, self.remake, entries=world.watched(self)
        )
        self.visiting = Visiting(self)
        self.keeping = KeepsCopies(self)
        self.table.pins.use_neighbors(world.neighbors(self.node), self.visiting)
        self.table.recovery.hibernate = self.hibernate  # type: ignore[method-assign]
        self.to_remake: deque[Submitted] = deque()
        self.remaking = False
        self.held: list[Submitted] | None = None
        self.counter = 0
        self.reads = 0

    # ------------------------------------------------------------ plumbing

    def send(self, dest: bytes, msg: m.Message) -> None:
        self.world.send(self.id, dest, msg)

    def notify(self, waiter: Waiter) -> None:
        if waiter.callback is not None:
            waiter.callback()

    def lost(self, oid: bytes, reason: str, why: str) -> bytes:
        self.world.check_loss(self, oid, reason, why)
        return f"{why}: {reason}".encode() + ERROR

    def drain(self) -> None:
        self.table.bury(self.released)

    def turn(self) -> None:
        """What happens between two events: deaths of refs are noticed, threads that wait in get go on."""
        self.drain()
        for get in [g for g in self.gets if g[2].count <= 0]:
            self.gets.remove(get)
            self.table.pins.end_read([get[1].id])
            self.read(get[0], get[1])
        self.drain()

    def new_id(self) -> bytes:
        self.counter += 1
        return self.id + self.counter.to_bytes(5, "big")

    # ------------------------------------------------------------ what programs do

    def put(self, frame: Frame, contained: list[Ref], large: bool) -> None:
        oid = self.new_id() + PUT_INDEX
        frame.vars.append(Ref(self, oid))
        self.world.values[oid] = tuple(ref.id for ref in contained)
        if large:
            self.world.stores[self.node].created(oid, self.id, self.world.values[oid])
            self.table.create(oid)
            self.table.put_stored(oid, 64, LARGE, contained or None)
        else:
            self.table.put_inline(oid, blob_of(contained), contained or None)

    def submit(self, frame: Frame, worker: bytes, args: list[Ref], slots: list[Ref]) -> None:
        task = Submitted(self.new_id(), worker, args, slots, self.world.draw_retries())
        self.world.retries[task.id] = task.retries
        self.world.submitted[task.id] = task
        oid = task.id + FIRST_RETURN
        self.tasks[task.id] = task
        self.table.create(oid, task)
        frame.vars.append(Ref(self, oid))
        self.resolve(task)

    def resolve(self, task: Submitted) -> None:
        waiter = Waiter(len(task.slots), callback=lambda: self.push(task))
        for slot in task.slots:
            if self.table.wait_ready(slot.id, waiter):
                waiter.count -= 1
        if waiter.count == 0:
            self.push(task)

    def push(self, task: Submitted) -> None:
        if self.tasks.get(task.id) is not task or task.sent:
            return
        task.sent = True
        refs: list[m.ArgRef] = []
        inline: list[bytes] = []
        for slot in task.slots:
            entry = self.table.entries[slot.id]
            if entry.state == INLINE and entry.value.endswith(ERROR):
                self.world.check_error(self, slot.id, entry.value)
                self.argument_lost(task, slot.id)
                self.fail(task)
                return
            if entry.state == INLINE:
                inline.append(entry.value)
            else:
                inline.append(b"")
                refs.append(m.ArgRef(slot.id, entry.size, list(entry.nodes or [])))
        self.send(task.worker, m.PushTask(task.id, b"", blob_of(task.args), 1, refs, inline))

    def fail(self, task: Submitted) -> None:
        self.tasks.pop(task.id, None)
        self.world.values.setdefault(task.id + FIRST_RETURN, ())
        self.table.set_inline(task.id + FIRST_RETURN, b"the task failed" + ERROR)
        task.let_go()
        self.ended(task)

    # ------------------------------------------------------------ what is lost is made again

    def hibernate(self, oid: bytes, entry: Any) -> None:
        ObjectRecovery.hibernate(self.table.recovery, oid, entry)
        self.world.oracle.freed.append(oid)
        self.world.oracle.forgotten.add(oid)
        if entry.state == LINEAGE_ONLY or entry.value.endswith(ERROR):
            self.world.values.pop(oid, None)  # whoever asks for it again finds another one, or the error

    def remake(self, task: Submitted) -> None:
        self.to_remake.append(task)
        if self.remaking:
            return
        self.remaking = True
        while self.to_remake:
            self.remake_one(self.to_remake.popleft())
        self.remaking = False

    def remake_one(self, task: Submitted) -> None:
        kept = self.table.lineage.kept.get(task.id)
        if kept is None or kept.running:
            return
        self.table.lineage.run_begun(task.id)
        task.count()
        self.world.remade += 1
        self.world.oracle.named_again(kept.args, self.id)
        self.table.recovery.recount_args(kept.args)
        task.args, task.slots = ([Ref(self, oid) for oid in ids] for ids in (task.arg_ids, task.slot_ids))
        others = [other for other in self.world.acting if other is not self]
        task.worker, task.sent = self.world.one(others).id if others else b"", False
        self.tasks[task.id] = task
        self.resubmit(task)

    def resubmit(self, task: Submitted) -> None:
        if self.held is not None:
            self.held.append(task)
        elif not task.worker:
            self.fail(task)
        else:
            self.resolve(task)

    def ended(self, task: Submitted) -> None:
        self.table.lineage.run_ended(task.id)
        self.table.lineage.trim()

    def argument_lost(self, task: Submitted, argument: bytes) -> None:
        oid = task.id + FIRST_RETURN
        why, entry = self.table.recovery.why_lost.get(argument), self.table.entries.get(oid)
        if task.attempt and why is not None and entry is not None and entry.state == PENDING:
            self.table.recovery.settle_lost(oid, f"its argument {argument.hex()} cannot be had: {why}", DEPENDENCY)

    def node_died(self, node: int, kept_at: list[int]) -> None:
        """What `runtime.core_worker.task_retries` does."""
        table = self.table
        table.recovery.mark_node_dead(node)
        table.copies.node_left(node, kept_at)
        self.held = []
        workers = {task.worker for task in self.tasks.values() if node_of(task.worker) == node}
        met = {proc for proc in self.world.met.get(self.id, ()) if node_of(proc) == node}
        for proc in sorted(workers | met | table.recovery.processes_of(node)):
            self.peer_died(proc)
        self.visiting.lost(node)
        self.world.forget_answers(self, node)
        table.recovery.node_died(node, "power")
        table.copies.node_died(node)
        held, self.held = self.held, None
        for task in held:
            if self.tasks.get(task.id) is task:
                self.resubmit(task)

    def cancel(self, task: Submitted) -> None:
        task.cancelled = True
        if task.sent:
            self.send(task.worker, m.CancelTask(task.id, False, False))
        else:
            self.fail(task)

    def get(self, frame: Frame, ref: Ref) -> None:
        waiter = Waiter(eager=True)
        if self.table.wait_local(ref.id, waiter):
            self.read(frame, ref)
        else:
            self.gets.append((frame, ref, waiter))
            self.table.pins.begin_read([ref.id])

    def give_up(self, get: tuple[Frame, Ref, Waiter]) -> None:
        """The timeout of a get."""
        self.gets.remove(get)
        self.table.pins.end_read([get[1].id])
        self.table.remove_waiter([get[1].id], get[2])

    def read(self, frame: Frame, ref: Ref) -> None:
        entry = self.table.entries[ref.id]
        if ref.id in self.table.pins.files and not entry.available:
            self.visiting.begin_file(frame, ref)
            return
        if not entry.available:
            self.world.near["read again"] += 1
            self.get(frame, ref)  # the node where it was is dead since
            return
        self.reads += 1
        self.world.read_kept += node_of(ref.id) in self.world.kept_at and not entry.value.endswith(ERROR)
        if entry.state != INLINE:
            self.world.check_readable(self, ref.id)
            assert entry.mapping is not None
            self.table.pins.begin_view(ref.id)
            node = entry.mapping.node
            self.world.near["read"] += node != self.node
            self.world.near["read of the dead"] += node in self.table.dead_nodes
            frame.views.append(View(self, ref.id, node))
            contained = self.world.stores[node].content[ref.id]
            self.world.oracle.about_to_read(ref.id, contained)
            self.unpack(frame, contained)
        elif entry.value.endswith(ERROR):
            self.world.check_error(self, ref.id, entry.value)
        else:
            contained = refs_in(entry.value)
            # What was freed because its protector died may still be read where it is.
            assert ref.id in self.world.oracle.excused or contained == self.world.values[ref.id]
            self.unpack(frame, contained)

    def unpack(self, frame: Frame, contained: tuple[bytes, ...]) -> None:
        for oid in contained:
            self.table.refs.ref_deserialized(oid, None if frame.done else frame.protected)
            self.world.tell(self.table, oid)
            (self.state if frame.done else frame).vars.append(Ref(self, oid))

    # ------------------------------------------------------------ tasks that others submit

    def on_push(self, src: bytes, msg: m.PushTask) -> None:
        self.world.runs[msg.task] += 1
        assert self.world.retries[msg.task] or self.world.runs[msg.task] == 1, "a task that must not run twice does"
        frame = Frame(msg.task, src)
        self.frames.append(frame)
        self.unpack(frame, refs_in(msg.args))
        for blob in msg.inline or ():
            self.unpack(frame, refs_in(blob)) if blob else None
        for arg in msg.refs or ():
            self.table.refs.ref_deserialized(arg.id, frame.protected)
            ref = Ref(self, arg.id)
            frame.vars.append(ref)
            self.table.set_locations(arg.id, arg.size, arg.nodes)
            self.get(frame, ref)

    def finish(self, frame: Frame, returned: list[Ref], large: bool, late: bool, failed: bool = False) -> None:
        """A task ends and returns these of its refs. late: its variables die only after the reply was made."""
        assert frame.task is not None and frame.protected is not None
        oid = frame.task + FIRST_RETURN
        for get in [g for g in self.gets if g[0] is frame]:
            self.give_up(get)
        contained = tuple(ref.id for ref in returned)
        for inner in contained:
            self.table.refs.pledge_to(inner, frame.submitter)
        store = self.world.stores[self.node]
        if failed:
            item = m.Returned(b"cancelled" + ERROR)
        elif large and not store.pins.get(oid):
            store.created(oid, None, contained)
            item = m.Returned(b"", LARGE, list(contained) or None)
        else:
            item = m.Returned(b"".join(contained) + OK, 0, list(contained) or None)
        self.world.returned(oid, contained)
        held = frame.vars
        frame.vars = []
        frame.views.clear()
        self.frames.remove(frame)
        if not late:
            held.clear()
            returned.clear()
        self.drain()
        borrowed = self.table.refs.end_protection(frame.protected, frame.submitter) or None
        frame.done = True
        self.table.refs.send_after_acks(
            frame.submitter, m.TaskReply(frame.task, 2 if failed else 0, [item], 0, borrowed)
        )

    def on_cancel(self, msg: m.CancelTask) -> None:
        for frame in self.frames:
            if frame.task == msg.task:
                self.finish(frame, [], False, True, failed=True)
                return

    def on_reply(self, src: bytes, msg: m.TaskReply) -> None:
        table = self.table
        if msg.borrowed:
            table.refs.add_borrows_in_reply(src, msg.borrowed)
        task = self.tasks.pop(msg.task, None)
        (item,) = msg.returns
        if task is not None and task.worker != src:
            self.tasks[msg.task] = task  # the answer of an attempt that was given up
            task = None
        for oid in item.contained or ():
            table.refs.adopt_returned_ref(oid, src)
        contained = [Ref(self, oid) for oid in item.contained or ()]
        if task is None:
            return
        oid = msg.task + FIRST_RETURN
        if (item.size or contained) and oid in table.entries:
            table.recovery.keep_task(task, [oid], [ref.id for ref in task.args + task.slots], 0)
        if item.size:
            table.set_stored(oid, item.size, node_of(src), contained or None)
        else:
            table.set_inline(oid, item.value, contained or None)
        if self.tasks.get(task.id) is not task:  # else it is made again already
            task.let_go()
            self.ended(task)

    # ------------------------------------------------------------ messages

    def receive(self, src: bytes, msg: Any) -> None:
        table = self.table
        if type(msg) is m.PushTask:
            self.on_push(src, msg)
        elif type(msg) is m.TaskReply:
            self.on_reply(src, msg)
        elif type(msg) is m.CancelTask:
            self.on_cancel(msg)
        elif type(msg) is m.ObjectGet:
            table.on_object_get(src, msg.id)
        elif type(msg) is m.KeepCopies:
            self.keeping.on_keep(msg)
        elif type(msg) is m.ObjectReady and not number_of(src):
            table.copies.found(src, msg)
        elif type(msg) in FROM:
            FROM[type(msg)](table)(src, msg)
        elif type(msg) is m.ReplicaPinned:
            table.on_replica(msg.id, node_of(src), msg.reason)
        elif type(msg) in (m.Opened, m.StoreError) and src != self.raylet:
            self.visiting.on_answer(node_of(src), msg)
        else:
            HANDLERS[type(msg)](table)(msg)

    def peer_died(self, proc: bytes) -> None:
        """A process is gone. Its tasks run again elsewhere, or fail."""
        for task in [t for t in self.tasks.values() if t.worker == proc]:
            if task.id not in self.tasks:
                continue  # an argument of it failed a moment ago
            self.world.values.pop(task.id + FIRST_RETURN, None)  # if there was a reply, it will not come any more
            self.table.may_be_left_at(task.id + FIRST_RETURN, node_of(proc))
            others = [other for other in self.world.acting if other is not self]
            if not others or task.cancelled or (task.sent and task.retries == 0):
                self.fail(task)
            else:
                task.worker, was_sent, task.sent = self.world.one(others).id, task.sent, False
                if was_sent:
                    task.count()
                    self.resubmit(task)
        self.table.process_died(proc, "it died")

    @property
    def raylet(self) -> bytes:
        return raylet_of(self.node)


FROM: dict[type, Callable[[ObjectTable], Callable[[bytes, Any], None]]] = {
    m.ObjectLost: lambda table: table.recovery.on_object_lost,
    m.BorrowAdd: lambda table: table.refs.on_borrow_add,
    m.BorrowTake: lambda table: table.refs.on_borrow_take,
    m.SettleBorrows: lambda table: table.refs.on_borrow_ask,
    m.BorrowsSettled: lambda table: table.refs.on_borrow_end,
}
HANDLERS: dict[type, Callable[[ObjectTable], Callable[[Any], None]]] = {
    m.ObjectReady: lambda table: table.on_object_ready,
    m.BorrowAck: lambda table: table.refs.on_borrow_ack,
    m.BorrowDrop: lambda table: table.refs.on_borrow_drop,
    m.AddLocation: lambda table: table.recovery.on_add_location,
    m.Opened: lambda table: table.on_opened,
    m.StoreError: lambda table: table.on_store_error,
    m.OnDisk: lambda table: table.on_disk,
}
