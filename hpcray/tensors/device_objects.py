"""Device objects: values whose tensors stay in the process that made them (Ray Direct Transport).

The value is pickled without its tensors, which stay here as an object of their own, owned by this process. What travels
is the rest of the value and a ref to that object; so the tensors live as long as the value does. A reader in this
process gets the tensors themselves. The first reader elsewhere has them written into the node's store, as if they had
been put there, and from then on they are read like any object.

The value that a task returns outlives its process. Where this one ends in order, it writes the whole value into the
store, and notifies its owner (`before_exit`). Where it dies, the owner has the task run again.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from hpcray.common.exceptions import GetTimeoutError, ObjectLostError, RaySystemError
from hpcray.common.ids import RESIDENT_INDEX, owner_of, raylet_of, task_of
from hpcray.core.core_worker.object_entry import INLINE, Waiter
from hpcray.protocol import messages as m
from hpcray.protocol.out_of_band import pickling, views_of_tensors
from hpcray.protocol.serialization import Serialized, deserialize, serialize, serialize_error
from hpcray.runtime.core_worker.context import BEHIND_CHECK
from hpcray.runtime.core_worker.core_worker import CoreWorker, current, need_process
from hpcray.runtime.core_worker.extensions import Extension
from hpcray.runtime.core_worker.object_refs import ObjectRef, arrived_ref, new_ref
from hpcray.runtime.core_worker.threads import CallThread
from hpcray.tensors.device_driver import DeviceDriver, DeviceDriverError
from hpcray.tensors.device_mappings import DIRECT, MAPPED, Place
from hpcray.tensors.device_memory import (
    DeviceDescriptor,
    DeviceMemoryOwner,
    DeviceMemoryReader,
    empty_device_caches,
    find_driver,
    is_only_here,
    is_out_of_memory,
    source_driver,
    wait_for_devices,
)
from hpcray.tensors.device_object_table import DeviceObjectTable
from hpcray.tensors.device_pieces import PieceReader, PieceWriter, TensorPieces, error_blob
from hpcray.tensors.direct_tensors import DirectTensors, DirectTransferError, choose
from hpcray.tensors.messages import (
    CloseTensors,
    OpenTensors,
    PullTensors,
    TensorMessage,
    TensorsOpened,
    TensorsPushed,
)
from hpcray.tensors.tensor_kinds import (
    ValueParts,
    ValuePickler,
    WholeValue,
    device_of,
    load_whole_value,
    sizes_of,
    version_of,
)

if TYPE_CHECKING:
    from hpcray.tensors.read_targets import TensorPlacement
    from hpcray.tensors.tensor_transports import TensorTransportMetadata

_DEVICES: dict[str, tuple[str, ...]] = {"gloo": ("cpu",), "nccl": ("cuda",), "cuda_ipc": ("cuda",)}
"""The only kinds of devices whose tensors a transport takes, as in Ray."""
_ANY_DEVICE = ("auto", "nixl", "ucx")
_ANSWER_TIMEOUT = 10.0
"""Seconds after which a process that does not say whether its tensors are there is not asked again: they are copied."""
_ATTEMPTS = 64
"""Objects that are looked at, when there is a new one and no room, for one that can move."""
_FREED_CHECK = 0.02
"""Seconds between two looks at what has died in this process."""
COPIES, PARTS = "copies", "parts"
"""See `ThreadState.read_as`."""


class DeviceObjects(Extension):
    """The device objects of one process, made with the first of them."""

    name = "tensors"
    messages = TensorMessage

    def __init__(self, process: CoreWorker) -> None:
        super().__init__(process)
        self._process = process
        self._limit = process.config.device_object_memory
        self._table = DeviceObjectTable(moves=self._limit > 0)
        self._asked: dict[bytes, list[_TensorsRequest]] = {}
        self._versions: dict[bytes, int] = {}
        """PyTorch's count of the writes to tensors, when they were copied to the store."""
        self._freed = threading.Condition()
        self._devices = threading.RLock()
        self._exports = CallThread("hpcray-device-objects")
        self._copying = threading.Lock()  # an object is written to the store by one thread
        self._pieces: dict[bytes, tuple[bytes, TensorPieces]] = {}
        """Blob and description of those that are exported in pieces; b"" where some pieces could not be written."""
        self._mapped: dict[DeviceDriver, DeviceMemoryReader] = {}
        self._exported: dict[DeviceDriver, DeviceMemoryOwner] = {}
        self.direct: DirectTensors | None = None
        """Transfers between devices of hosts; None before the first object of a device was made or read here."""

    def add(
        self, tensors: Sequence[Any], value: bytes, transport: str = "", only_direct: bool = False
    ) -> tuple[ObjectRef[Any], TensorTransportMetadata | DeviceDescriptor | None]:
        """Keep tensors here.

        Args:
            value: id of the object that is their value; b"" where this process puts it.
            transport: name of a registered one; "" for those of hpcray. only_direct: as in `DeviceDescriptor`.

        Returns:
            The ref of the object that has them, and what readers by that transport have to know.
        """
        process = self._process
        error = RaySystemError("the tensors of a device object are read with its value, not by themselves")
        blob = serialize_error(error)  # an error does not travel with its ref
        sizes = sizes_of(tensors)
        with process.engine.lock:
            oid = process.next_task_id() + RESIDENT_INDEX
        known: TensorTransportMetadata | DeviceDescriptor | None = None
        collect: Callable[[], None] | None = None
        driver = None if transport else source_driver(tensors)
        if driver is not None:
            known, collect = self._describe(driver, oid, tensors)
        if transport:
            from hpcray.tensors.tensor_transports import find  # few programs use it

            manager = find(process, transport)[1]
            known = manager.extract_tensor_transport_metadata(oid.hex(), list(tensors))
            collect = partial(manager.garbage_collect, oid.hex(), known, list(tensors))
        if self._limit and isinstance(known, DeviceDescriptor):
            known = known._replace(moves=True)
        if only_direct and isinstance(known, DeviceDescriptor):
            known = known._replace(only_direct=True)
        with process.engine.lock:
            process.table.put_inline(oid, blob)
            process.table.when_freed(oid, partial(self._drop, oid, collect))
            self._table.add(oid, tensors, value, sizes, fixed=bool(transport))
        if self._limit:
            self._make_room({}, oid)
        return new_ref(oid), known

    def _describe(
        self, driver: DeviceDriver, oid: bytes, tensors: Sequence[Any]
    ) -> tuple[DeviceDescriptor | None, Callable[[], None] | None]:
        """Return what readers have to know of tensors in device memory, and its end; None where only copies of them
        can be read."""
        with self._devices:
            exports = self._exported.get(driver)
            if exports is None:
                exports = self._exported[driver] = DeviceMemoryOwner(driver, self._process.me)
            try:
                known = exports.describe(oid, tensors)
            except DeviceDriverError as error:
                self._warn("", f"other processes cannot map device memory ({error}): tensors are copied for them")
                return None, None

        wire = self._find_direct(driver).transports
        if wire:
            numbers = driver.devices()
            known = known._replace(wire=wire, numbers={name: numbers[name] for name in known.place.devices})

        def collect() -> None:
            with self._devices:
                exports.drop(oid)

        return known, collect

    def _find_direct(self, driver: DeviceDriver) -> DirectTensors:
        with self._process.engine.lock:
            if self.direct is None:
                find, release = self._find_for, self._table.end_reader
                self.direct = DirectTensors(self._process, self.send, driver, find, release, self._order_after)
            return self.direct

    def on_message(self, source: bytes, message: TensorMessage) -> None:
        """Handle a message of the device objects of another process."""
        if isinstance(message, OpenTensors):
            self.send(source, TensorsOpened(message.id, self._table.note_reader(message.id, source)))
        elif isinstance(message, TensorsOpened):
            self._on_tensors_opened(message)
        elif isinstance(message, CloseTensors):
            self._table.end_reader(message.id, source)
        elif isinstance(message, PullTensors):
            self._on_pull(source, message)
        elif self.direct is not None:
            if isinstance(message, TensorsPushed):
                self.direct.on_pushed(source, message)
            else:
                self.direct.on_cancel(source, message)

    def _on_pull(self, source: bytes, message: PullTensors) -> None:
        """A process asks for tensors that it cannot map."""
        tensors, driver = self._table.find(message.id), find_driver()
        if tensors and driver is not None:
            self._find_direct(driver).on_pull(source, message)
        else:
            gone = "they are not on their device any more"
            self.send(source, TensorsPushed(message.id, message.pull, gone, True))

    def _find_for(self, oid: bytes, reader: bytes) -> Sequence[Any] | None:
        return self._table.find(oid) if self._table.note_reader(oid, reader) else None

    def _read_directly(
        self, driver: DeviceDriver, ref: ObjectRef[Any], known: DeviceDescriptor
    ) -> Sequence[Any] | None:
        """The tensors, in memory of a device of this process; None where they do not come this way."""
        read = partial(self._find_direct(driver).read, ref, known, self._process.local.deadline)
        try:
            found: Sequence[Any] | None = self._read_with_room(ref._id, read)
            return found
        except DirectTransferError as error:
            self._warn("direct", f"tensors do not pass from device to device ({error}): they go through the hosts")
            return None

    def _read_on_device(self, ref: ObjectRef[Any], known: DeviceDescriptor) -> Sequence[Any] | None:
        """The tensors in the memory of their process, or in memory of a device of this one; None where there is no way
        but through the host."""
        driver, private = find_driver(), self._process.local.read_as == COPIES
        if driver is None:
            choose(None, known, Place(self._process.me, "", ()), private)
            return None
        with self._devices:
            mapped = self._mapped.get(driver)
            if mapped is None:
                mapped = self._mapped[driver] = DeviceMemoryReader(driver, self._process.me)
        way = choose(self._find_direct(driver), known, mapped.place, private)
        if way == DIRECT:
            return self._read_directly(driver, ref, known)
        if way != MAPPED:
            return None
        held: object = ref
        if known.moves:
            if not self._ask(ref._id):
                return None  # they have moved, and are in the object store
            held = _Reading(self._process, ref)
        try:
            return mapped.read(known, held)
        except DeviceDriverError as error:
            self._warn("", f"device memory cannot be mapped ({error}): tensors go through the object store")
            return None

    # ------------------------------------------------------------ too many on a device

    def _make_room(self, wanted: Mapping[str, int], kept: bytes = b"", limit: int | None = None) -> bool:
        """Move tensors to the object store, the least recently used ones first, until no device has more than `limit`
        bytes (by default the budget), `wanted` included. Those stay that the program has, or other processes.

        Returns:
            Whether any have moved.
        """
        most = self._limit if limit is None else limit
        engine, moved = self._process.engine, False
        with engine.lock:
            candidates = self._table.surplus(most, wanted, kept)
        if limit is None:
            candidates = candidates[:_ATTEMPTS]
        for oid in candidates:
            with engine.lock:
                if not self._table.is_over(most, wanted):
                    break
            try:
                moved = self._move_to_store(oid) or moved
            except Exception as error:  # no room in the store, or a tensor that does not pickle
                self._warn("move", f"tensors cannot move to the object store ({error}): they stay on their device")
                break
        return moved

    def _move_to_store(self, oid: bytes) -> bool:
        """Have the tensors of an object in the object store only. Returns False where they stay."""
        process = self._process
        with process.engine.lock:
            process.drain()  # of objects that are gone already nothing has to be copied
            # Those that stay count as used now, so that others are looked at the next time.
            tensors = self._table.find(oid) if self._table.may_move(oid) else None
            if tensors is None or not is_only_here(tensors):
                return False
        before = pickling.storages, pickling.storages_of  # of the value that this thread pickles, perhaps
        try:
            with self._copying:
                if oid not in self._table.exported:
                    self._copied(oid, tensors, always=True)
        finally:
            pickling.storages, pickling.storages_of = before
        with process.engine.lock:
            if oid not in self._table.exported or not self._table.may_move(oid) or not is_only_here(tensors):
                return False
            if self._versions.get(oid, 0) != version_of(tensors):
                return False  # they were written to after they were copied
            self._table.move_out(oid)
            process.engine.flush()
        with self._devices:
            for exports in self._exported.values():
                exports.drop(oid)
        return True

    def _moved_back(self, oid: bytes, ref: ObjectRef[Any], left: float | None) -> Sequence[Any]:
        """The tensors of an object of this process that have moved to the store: they are on their device again."""
        with self._process.engine.lock:
            sizes = self._table.sizes(oid)
        self._make_room(sizes, oid)
        tensors: Sequence[Any] = self._read_with_room(oid, partial(self._read_copies, ref, left))
        own = list(tensors)
        with self._process.engine.lock:
            back = self._table.move_back(oid, own)
            if back is own:  # else another thread was first, and may have written to them
                self._versions[oid] = version_of(own)
            return back

    def _read_with_room(self, oid: bytes, read: Callable[[], Any]) -> Any:
        """Read the tensors of an object. Where a device has no memory for them, others move away first."""
        try:
            return read()
        except Exception as error:
            if not self._limit or not is_out_of_memory(error) or not self._make_room({}, oid, limit=0):
                raise
        empty_device_caches()
        return read()

    def _read_copies(self, ref: ObjectRef[Any], left: float | None) -> Any:
        """The tensors of an object as others read them, in memory of this process; raises as `get_one`."""
        deadline = None if left is None else monotonic() + left
        with self._process.engine.lock:
            blob, own = self._pieces.get(ref._id, (b"", None))
        if own is not None and blob:
            found: Any = own._replace(refs=list(own.refs))
        else:
            found = self._process.reader.get_one(ref, left)
        if not isinstance(found, TensorPieces):
            return found
        return PieceReader(self._process, found, partial(self._warn, "pieces")).read(deadline)

    def _ask(self, oid: bytes) -> bool:
        """Ask the process that has tensors whether they are where they were. They stay there if so."""
        process = self._process
        question = _TensorsRequest()
        with process.engine.lock:
            self._asked.setdefault(oid, []).append(question)
            self.send(owner_of(oid), OpenTensors(oid))
            try:
                process.block(question.waiter, monotonic() + _ANSWER_TIMEOUT)
            finally:
                asked = self._asked[oid]
                asked.remove(question)
                if not asked:
                    del self._asked[oid]
                if not question.answered:  # an answer that comes later has counted this process
                    self.send(owner_of(oid), CloseTensors(oid))
                    process.engine.flush()
        return question.kept

    def _on_tensors_opened(self, msg: TensorsOpened) -> None:
        """The answer to `OpenTensors`."""
        for question in self._asked.get(msg.id, ()):
            if not question.answered:
                question.answered, question.kept = True, msg.kept
                question.waiter.count = 0
                self._process.engine.notify(question.waiter)
                break

    def process_died(self, proc: bytes) -> None:
        """A process is gone, as a reader and as one that was asked (lock held)."""
        self._table.process_died(proc)
        if self.direct is not None:
            self.direct.process_died(proc)
        for oid, questions in self._asked.items():
            if owner_of(oid) == proc:
                for question in questions:
                    question.waiter.count = 0
                    self._process.engine.notify(question.waiter)

    # ------------------------------------------------------------ warnings, and the tensors of a value

    def _warn(self, transport: str, text: str) -> None:
        """Print a warning, the first time for this transport."""
        with self._process.engine.lock:
            first = self._process.warn_once(f"transport:{transport}")
        if first:
            print(f"hpcray: {text}", file=sys.stderr, flush=True)

    def tensors(
        self, ref: ObjectRef[Any], transport: str = "", known: Any = None, placement: TensorPlacement | None = None
    ) -> Sequence[Any]:
        """Return the tensors of an object: the same ones in this process; elsewhere those of a device in their memory,
        where it can be mapped, else copies.

        Args:
            transport, known: as in `add`.
            placement: where their content will be copied to; they may be views of the store then, which must not be
                written to.

        Raises:
            ObjectLostError: the process that had them is gone.
            GetTimeoutError: they did not come before the `get` that reads them had to end.
        """
        process, local = self._process, self._process.local
        with process.engine.lock:
            found = self._table.find(ref._id)
            away = found is None and self._table.has_moved_out(ref._id)
        if away and local.read_as != COPIES:
            return self._moved_back(ref._id, ref, _time_left(local.deadline))
        if found is not None:
            if local.read_as != COPIES:
                return found
            blob, _ = serialize(list(found))
            own: Sequence[Any] = deserialize(blob.join() if isinstance(blob, Serialized) else blob)
            return own
        if transport and local.read_as != COPIES:
            try:
                from hpcray.tensors.tensor_transports import fetch  # few programs use it

                return fetch(
                    process, ref, transport, known, None if placement is None else placement.buffers_for(known)
                )
            except Exception as error:
                problem = f"the tensor transport {transport!r} failed ({type(error).__name__}: {error})"
                self._warn(transport, f"{problem}: tensors go through the object store")
        elif isinstance(known, DeviceDescriptor):
            found = self._read_on_device(ref, known)
            if found is not None:
                return found
        copies: Sequence[Any]
        with views_of_tensors(placement is not None and placement.buffers is not None):
            copies = self._read_with_room(ref._id, partial(self._read_copies, ref, _time_left(local.deadline)))
        return copies

    def value_again(self, value: bytes, tensors: ObjectRef[Any], error: ObjectLostError) -> Any:
        """Return a value whose tensors are lost: its owner has it made again, or has it whole.

        Args:
            value: its id. tensors: those that are lost.

        Raises:
            ObjectLostError: it cannot be made again, or by a call of this actor only that waits behind this one.
        """
        process, deadline = self._process, self._process.local.deadline
        ref = arrived_ref(value)
        with process.engine.lock:
            process.resident_lost(value, tensors._id, f"its tensors are lost: {error}")
            process.engine.flush()
        while True:
            left = math.inf if deadline is None else max(0.0, deadline - monotonic())
            try:
                return process.reader.get_one(ref, min(left, BEHIND_CHECK))
            except GetTimeoutError:
                if left <= BEHIND_CHECK:
                    raise
            if current.worker is not None and current.worker.run_earlier_calls(task_of(value)):
                continue
            if current.worker is not None and current.worker.holds_up(task_of(value)):
                why = (
                    "the call that would make it again is of this actor, and waits behind the call that reads it; "
                    "hint: max_concurrency=2, or read it in another actor"
                )
                raise ObjectLostError(value.hex(), details=why)

    def wait_freed(self, tensor: Any, timeout: float | None) -> None:
        """Wait until no object has this tensor any more.

        Raises:
            TimeoutError: one still has it after `timeout` seconds.
        """
        end = None if timeout is None else monotonic() + timeout
        while True:
            with self._process.engine.lock:
                self._process.check_alive()
                self._process.drain()
                self._process.engine.flush()
                if not self._table.holds(tensor):
                    return
            left = _FREED_CHECK if end is None else min(_FREED_CHECK, end - monotonic())
            if left <= 0:
                raise TimeoutError(
                    f"the tensor was not freed within {timeout} seconds. hint: it is freed when all ObjectRefs of the "
                    "values that contain it have gone out of scope"
                )
            with self._freed:
                self._freed.wait(left)

    def device_totals(self) -> dict[str, tuple[int, int]]:
        """Return the number of objects and their bytes by device."""
        return self._table.totals()

    def close(self) -> None:
        """End the threads of device objects."""
        self._exports.close()
        if self.direct is not None:
            self.direct.close()
        for mapped in self._mapped.values():
            mapped.close()

    def _drop(self, oid: bytes, collect: Callable[[], None] | None) -> None:
        self._table.remove(oid)
        self._versions.pop(oid, None)
        self._pieces.pop(oid, None)
        if collect is not None:
            self._process.engine.call_soon(collect)
        with self._freed:
            self._freed.notify_all()

    # ------------------------------------------------------------ readers in other processes

    def on_object_get(self, source: bytes, message: m.ObjectGet) -> bool:
        """Return True where a borrower asks for tensors that are nowhere but here: they are copied first, in a thread
        of ours, and the answer follows; it comes at once where they are being copied in pieces."""
        if self._answer_pieces(source, message.id):
            return True
        if self._table.find(message.id) is None or message.id in self._table.exported:
            return False
        self._exports.start()
        self._exports.put(partial(self._export, source, message))
        return True

    def _answer_pieces(self, src: bytes, oid: bytes) -> bool:
        blob, _ = self._pieces.get(oid, (b"", None))
        if blob:
            self._process.engine.send(src, m.ObjectReady(oid, 0, blob, 0, []))
        return bool(blob)

    def _export(self, src: bytes, msg: m.ObjectGet) -> None:
        process, engine = self._process, self._process.engine
        answer = b""
        with self._copying:
            with engine.lock:
                tensors = None if msg.id in self._table.exported else self._table.find(msg.id)
            if tensors is not None:
                try:
                    answered = self._export_in_pieces(src, msg.id, tensors)
                    if answered:
                        return
                    if answered is None:
                        answer = self._copied(msg.id, tensors)
                except Exception as error:  # no room in the store, or a tensor that does not pickle
                    answer = error_blob(error)
        with engine.lock:
            if process.dead is not None:
                return
            if answer:
                engine.send(src, m.ObjectReady(msg.id, 0, answer, 0, []))
            elif not self._answer_pieces(src, msg.id):
                process.answer_object_get(src, msg)
            engine.flush()

    def _export_in_pieces(self, src: bytes, oid: bytes, tensors: Sequence[Any]) -> bool | None:
        """Copy the tensors in pieces, of which the reader knows before.

        Returns:
            True: the reader has its answer, which is an error for pieces that cannot be written. False: the object is
            freed. None: the tensors are to be copied as a whole.
        """
        process = self._process
        writer = PieceWriter.of(process, oid, tensors, partial(self._warn, "pieces"))
        if writer is None:
            return None
        version, answered = version_of(tensors) if self._limit else 0, []

        def announce(blob: bytes, found: TensorPieces) -> bool:
            with process.engine.lock:
                if self._table.find(oid) is None:
                    return False
                self._pieces[oid] = blob, found
                self._table.note_export(oid)
                if self._limit:
                    self._versions[oid] = version
                answered.append(self._answer_pieces(src, oid))
                process.engine.flush()
            return True

        def is_wanted() -> bool:
            process.check_alive()
            return oid in self._pieces

        try:
            whole = not writer.write(partial(self._order_after, oid, tensors), announce, is_wanted)
        except Exception:
            if not answered:
                raise
            with process.engine.lock:  # the next reader has them copied again
                if oid in self._pieces:
                    self._pieces[oid] = b"", self._pieces[oid][1]
                self._table.export_failed(oid)
            return True
        return None if whole else bool(answered)

    def _copied(self, oid: bytes, tensors: Sequence[Any], always: bool = False) -> bytes:
        """The blob of the tensors as they are now; b"" for a large one, or any with `always`: it is in our node's store
        then."""
        process, raylet = self._process, raylet_of(self._process.node)
        version = version_of(tensors) if self._limit else 0
        self._order_after(oid, tensors)
        blob, _ = serialize(list(tensors))
        size = blob.size if isinstance(blob, Serialized) else len(blob)
        if size <= process.config.inline_limit and not always:
            return blob.join() if isinstance(blob, Serialized) else blob
        offset, size = process.stores.writer.write(oid, blob)
        with process.engine.lock:
            entry = process.table.entries.get(oid)
            if entry is not None and entry.state == INLINE and self._table.find(oid) is not None:
                process.table.put_stored(oid, offset, size, None)
                self._table.note_export(oid)
                if self._limit:
                    self._versions[oid] = version
            else:  # it was freed meanwhile
                process.engine.send(raylet, m.Release([oid]))
                process.engine.send(raylet, m.Free([oid], []))
        return b""

    def _order_after(self, oid: bytes, tensors: Sequence[Any]) -> None:
        """Have copies that this thread makes of tensors follow the work that fills them."""
        with self._devices:
            ordered = any(exports.order_after(oid) for exports in self._exported.values())
        if not ordered:
            wait_for_devices(tensors)

    # ------------------------------------------------------------ the end of this process

    def outgoing_value(self, value: Any, transport: str, object_id: bytes) -> DeviceValue:
        """Return what is pickled in place of a value whose tensors stay here."""
        return DeviceValue(value, transport, object_id)

    @property
    def keeps_resources(self) -> bool:
        """Device objects are in the memory of the devices that the process holds."""
        return True

    def movable_objects(self) -> set[bytes]:
        """Return the objects that `before_exit` would move."""
        return {oid for oid, _ in self._table.returned()}

    def before_exit(self) -> None:
        """Write the values that other processes own, and whose tensors are here, into the node's store, whole. Their
        owners get them from there from now on. What cannot be written stays here, and is lost with this process."""
        process = self._process
        with process.engine.lock:
            process.drain()
            entries = process.table.entries
            needed = [(oid, value) for oid, value in self._table.returned() if entries[oid].borrowers]
        for oid, value in needed:
            try:
                self._move(oid, value)
            except ObjectLostError:
                continue  # its owner is gone, or has freed it meanwhile
            except Exception as error:  # there is no room, or a tensor does not pickle
                text = f"hpcray: the tensors of object {value.hex()} end with their process: {error}"
                print(text, file=sys.stderr, flush=True)

    def _move(self, oid: bytes, value: bytes) -> None:
        process, local = self._process, self._process.local
        ref = arrived_ref(value)
        before, local.read_as = local.read_as, PARTS
        try:
            parts = process.reader.get_one(ref, None)
        finally:
            local.read_as = before
        with process.engine.lock:
            tensors = self._table.find(oid)
            away = self._table.has_moved_out(oid)
            process.drain()  # views of the block in whose place the value is written
        if away:
            tensors = self._read_copies(arrived_ref(oid), None)
        if tensors is None or not isinstance(parts, ValueParts):
            return  # it was freed, or is whole already
        self._order_after(oid, tensors)
        blob, _ = serialize(WholeValue(tensors, parts))
        size = blob.size if isinstance(blob, Serialized) else len(blob)
        stored = size > process.config.inline_limit
        content = b""
        if stored:
            process.stores.writer.write(value, blob)
        else:
            content = blob.join() if isinstance(blob, Serialized) else blob
        with process.engine.lock:
            process.engine.send(owner_of(value), m.ResidentMoved(value, oid, content, size if stored else 0))
            if stored:
                process.engine.send(raylet_of(process.node), m.Release([value]))
            process.engine.flush()


class _TensorsRequest:
    """A reader's question whether tensors are where they were. kept: the answer; False without one."""

    def __init__(self) -> None:
        self.waiter = Waiter()
        self.answered = self.kept = False


class _Reading:
    """Mapped tensors of another process, which keeps them where they are until this object is dropped."""

    def __init__(self, process: CoreWorker, ref: ObjectRef[Any]) -> None:
        self._process, self._ref = process, ref

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing() and self._process.dead is None:
            self._process.engine.call_soon(partial(_end_reading, self._process, self._ref))


def _end_reading(process: CoreWorker, ref: ObjectRef[Any]) -> None:
    with process.engine.lock:
        if process.dead is None:
            DeviceObjects.of(process).send(owner_of(ref._id), CloseTensors(ref._id))
            process.engine.flush()


def _time_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())


class DeviceValue:
    """Stands for a value that is to be pickled without its tensors; what is unpickled is the value.

    Args:
        transport: name of the transport; some take the tensors of one kind of device only.
        ident: id of the object that the value is; b"" where this process puts it.

    Raises:
        ValueError: (when pickled) the transport does not take the tensors.
    """

    def __init__(self, value: Any, transport: str, ident: bytes = b"") -> None:
        self._value = value
        self._transport = transport
        self._ident = ident

    def __repr__(self) -> str:  # for the error that it does not pickle
        return repr(self._value)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        process = need_process()
        wanted: tuple[str, ...] | None = _DEVICES.get(self._transport)
        kind: type | None = None
        own = wanted is None and self._transport not in _ANY_DEVICE
        if own:
            from hpcray.tensors.tensor_transports import find

            found = find(process, self._transport)[0]
            wanted, kind = found.devices, found.data_type
        tensors: list[Any] = []
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        ValuePickler(file, tensors, buffers, kind).dump(self._value)
        if wanted is not None:
            self._check_devices(tensors, wanted)
        if not tensors:
            return _load_value, (None, file.getvalue(), buffers)
        ref, known = DeviceObjects.of(process).add(
            tensors, self._ident, self._transport if own else "", self._transport == "ucx"
        )
        more = (self._ident,) if known is None else (self._ident, self._transport if own else "", known)
        return _load_value, (ref, file.getvalue(), buffers, *more)

    def _check_devices(self, tensors: Sequence[Any], wanted: Sequence[str]) -> None:
        for kind in (device_of(tensor).partition(":")[0] for tensor in tensors):
            if kind not in wanted:
                raise ValueError(
                    f"Tensor transport backend {self._transport.upper()} does not support tensor transfer on device "
                    f"{kind}. hint: tensor_transport='auto' takes tensors of any device"
                )


def _load_value(
    ref: ObjectRef[Any] | None, stream: bytes, buffers: Sequence[Any], ident: bytes = b"", transport: str = "",
    known: Any = None,
) -> Any:  # fmt: skip
    """The value that a `DeviceValue` stands for, in any process."""
    if ref is None:
        return load_whole_value((), stream, buffers)
    process = need_process()
    if process.local.read_as == PARTS:
        return ValueParts(stream, [bytes(buffer) for buffer in buffers])
    objects = DeviceObjects.of(process)
    placement, process.local.read_target = process.local.read_target, None
    try:
        tensors = objects.tensors(ref, transport, known, placement)
    except ObjectLostError as error:
        if not ident:
            raise
        process.local.read_target = placement
        return objects.value_again(ident, ref, error)
    process.local.read_target = placement
    return load_whole_value(tensors, stream, buffers)
