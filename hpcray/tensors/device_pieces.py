"""Device objects that pass through the host in pieces: while one is written, the one before is read.

A large device object that a reader cannot map is not written to the node's store as a whole. Its memory is divided into
pieces, each of which is an object of its own, owned by the process that has the tensors. Readers get to know of all of
them before the first one is written (`TensorPieces`). They fetch them in order, from this node's store or, by the
object plane, from another one's, and copy each to their device, or to memory of the host, as soon as it is there. A
piece is read when it is sealed, so no reader sees one that is half written; tensors are there when all pieces are.

Copies between device and host are those of a stream of its own, two at a time, from and to registered memory
(`registered_memory`). Where the driver refuses, PyTorch copies.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any, NamedTuple

from hpcray.common.exceptions import ObjectLostError, RaySystemError
from hpcray.common.ids import PUT_INDEX, raylet_of
from hpcray.protocol import messages as m
from hpcray.protocol.out_of_band import DeviceBytes, around_buffer, bytes_in, host_storage, torch_view
from hpcray.protocol.serialization import SerializationError, Serialized, serialize, serialize_error
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.object_refs import ObjectRef, new_ref
from hpcray.runtime.core_worker.object_writer import ReservedContent
from hpcray.tensors.device_driver import DeviceDriver, DeviceDriverError
from hpcray.tensors.device_memory import (
    TensorLocation,
    covered_bytes,
    find_driver,
    locate,
    source_driver,
    tensor_at,
)
from hpcray.tensors.registered_memory import transfer_memory
from hpcray.tensors.tensor_pulls import PIECED_SIZE, PieceRange, bytes_of, divide, piece_size

_UNDER_WAY = 2
"""Copies that a stream has at most: one is at work, the next one follows it without a pause."""
_REQUESTED = 2
"""Blocks of the store that are requested before they are needed."""
_AHEAD = 4
"""Pieces that are fetched before they are needed."""
_ANNOUNCED_SIZE = 1 << 20
"""Bytes that readers are sent at most before the first piece; they grow with the number of tensors."""


class StoragePart(NamedTuple):
    """The part of a storage that tensors cover. low: where it begins in the storage. size: both are in bytes.
    device: number of the device, in the process that has it."""

    low: int
    size: int
    device: int


class TensorPieces(NamedTuple):
    """Description of tensors in pieces, for readers. refs: of the objects that the pieces are."""

    parts: list[StoragePart]
    tensors: list[TensorLocation]
    pieces: list[list[PieceRange]]
    refs: list[ObjectRef[Any]]


class TransferStreams:
    """Streams of one thread for copies between memory of the host and devices.

    A context, in which the current streams of the thread are these. No copy is under way when it has ended.

    Args:
        devices: those with a stream.

    Raises:
        DeviceDriverError: (when entered) the driver refuses.
    """

    def __init__(self, driver: DeviceDriver, devices: Sequence[str]) -> None:
        self._driver, self._devices = driver, devices
        self._opened = ExitStack()
        self._events: list[tuple[str, Any]] = []
        self._unused: list[tuple[str, Any]] = []

    def __enter__(self) -> TransferStreams:
        with ExitStack() as opened:
            opened.callback(self._close_events)
            for device in self._devices:
                opened.enter_context(self._driver.transfer_stream(device))
                opened.callback(self._drain, device)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def begin(self, device: str, copy: Callable[[DeviceDriver], object]) -> Any:
        """Begin copies.

        Args:
            copy: gives the driver the copies.

        Returns:
            The event of their end.

        Raises:
            DeviceDriverError: the driver refuses. None of them is under way.
        """
        event = self._event(device)
        try:
            copy(self._driver)
            self._driver.record(device, event)
        except DeviceDriverError:
            self._unused.append((device, event))
            self._drain(device)  # some may have begun
            raise
        return event

    def end(self, device: str, event: Any) -> None:
        """Wait for the end of copies.

        Raises:
            DeviceDriverError: the driver does not say that they went well.
        """
        self._unused.append((device, event))
        self._driver.await_event(device, event)

    def _event(self, device: str) -> Any:
        for each in self._unused:
            if each[0] == device:
                self._unused.remove(each)
                return each[1]
        event = self._driver.new_local_event(device)
        self._events.append((device, event))
        return event

    def _drain(self, device: str) -> None:
        with contextlib.suppress(DeviceDriverError):  # a device in this state copies nothing any more
            event = self._event(device)
            self._driver.record(device, event)
            self.end(device, event)

    def _close_events(self) -> None:
        for device, event in self._events:
            with contextlib.suppress(DeviceDriverError):
                self._driver.close_event(device, event)


class _PieceTransfer:
    """The copy of a piece.

    number: of the piece. event: of its end; None: it has ended. content: of the piece in the store. host: NumPy's array
    of the same bytes, from or to which they are copied. kept: what ends with the copy. offset: in the arena. device: of
    the stream.
    """

    __slots__ = ("content", "device", "event", "host", "kept", "number", "offset")

    def __init__(self, number: int) -> None:
        self.number, self.offset, self.device = number, 0, ""
        self.event: Any = None
        self.content: Any = None
        self.host: Any = None
        self.kept = ExitStack()

    def use(self, process: CoreWorker, content: Any) -> int:
        """Find the memory for these bytes; returns its address."""
        import numpy

        self.content = content
        self.host = self.kept.enter_context(transfer_memory(process, numpy.frombuffer(content, numpy.uint8)))
        address: int = self.host.__array_interface__["data"][0]
        return address

    def close(self) -> None:
        """Give up the memory; the copy has ended."""
        self.host = None
        self.kept.close()
        self.content = None


_PIECE = around_buffer(memoryview)
_Ordinarily = Callable[[_PieceTransfer], object]


class _PieceCopies:
    """Copies of pieces that are under way, the oldest first: work of streams or, where the driver refuses, PyTorch's.

    Args:
        warn: called with the reason where the driver refuses.

    Attributes:
        streams: None: PyTorch copies all.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self.streams: TransferStreams | None = None
        self.under_way: deque[_PieceTransfer] = deque()
        self._warn = warn

    def begin(
        self, copy: _PieceTransfer, device: str, copies: Callable[[DeviceDriver], object], ordinarily: _Ordinarily
    ) -> None:
        """Begin the copy of a piece.

        Args:
            copies: gives the driver what belongs to it. ordinarily: has PyTorch copy it, at once.
        """
        copy.device = device
        if self.streams is not None:
            try:
                copy.event = self.streams.begin(device, copies)
            except DeviceDriverError as error:
                self.refused(error)
        if copy.event is None:
            ordinarily(copy)

    def end(self, copy: _PieceTransfer, ordinarily: _Ordinarily) -> None:
        """Wait until a piece is copied, and give up its memory. ordinarily: as in `begin`."""
        if copy.event is not None and self.streams is not None:
            try:
                self.streams.end(copy.device, copy.event)
            except DeviceDriverError as error:
                self.refused(error)
                ordinarily(copy)
            copy.event = None
        copy.close()

    def refused(self, error: DeviceDriverError) -> None:
        """The driver does not copy."""
        self._warn(f"a GPU's driver does not copy tensors in pieces ({error}): PyTorch copies them")


class PieceWriter:
    """Writes the tensors of a device object into the node's store, in pieces.

    Args:
        oid: id of the object. warn: called with the reason where the driver refuses.
    """

    def __init__(
        self, process: CoreWorker, driver: DeviceDriver, oid: bytes, tensors: Sequence[Any],
        warn: Callable[[str], object],
    ) -> None:  # fmt: skip
        self._process, self._driver, self._oid, self._warn = process, driver, oid, warn
        self._copies = _PieceCopies(warn)
        self._under_way = self._copies.under_way
        self._refs: list[ObjectRef[Any]] = []
        self._requested = self._begun = self._written = 0
        self._storages: list[Any] = []
        self._names: list[str] = []  # of the devices of the storages
        self._locations: list[TensorLocation] = []
        self._parts = self._find_parts(tensors)
        self._pieces: list[list[PieceRange]] = []
        self._devices: list[str] = []  # of the pieces
        self._divide()

    @classmethod
    def of(
        cls, process: CoreWorker, oid: bytes, tensors: Sequence[Any], warn: Callable[[str], object]
    ) -> PieceWriter | None:
        """Return the writer of these tensors; None where pieces do not pay off, or are not possible."""
        driver = source_driver(tensors)
        if driver is None:
            return None
        try:
            made = cls(process, driver, oid, tensors, warn)
        except DeviceDriverError:
            return None
        return made if sum(part.size for part in made._parts) >= PIECED_SIZE else None

    def write(
        self, order: Callable[[], object], announce: Callable[[bytes, TensorPieces], bool], wanted: Callable[[], bool]
    ) -> bool:
        """Write all pieces.

        Args:
            order: has later work of this thread's streams follow that which fills the tensors. announce: called before
                the first piece is written, with what readers have to know, and its blob; returns whether the object
                still exists. wanted: returns the same, later.

        Returns:
            False where the whole is to be written instead: the driver refuses. Nothing was announced.

        Raises:
            ObjectStoreFullError, OutOfDiskError, RuntimeError (PyTorch's), ...: the rest cannot be written; readers of
                that get this error.
        """
        # Where the value is made again meanwhile, its readers may be the last ones to know of these tensors.
        problem: BaseException = ObjectLostError(self._oid.hex(), details="it was freed while it was read")
        try:
            with ExitStack() as opened:
                try:
                    self._copies.streams = opened.enter_context(
                        TransferStreams(self._driver, sorted(set(self._devices)))
                    )
                    order()
                except DeviceDriverError as error:
                    self._warn(f"a GPU's driver does not copy tensors in pieces ({error}): PyTorch copies them whole")
                    return False
                self._create_refs()
                found = TensorPieces(self._parts, self._locations, self._pieces, list(self._refs))
                blob, _ = serialize(found)
                if isinstance(blob, Serialized) or len(blob) > _ANNOUNCED_SIZE:
                    return False
                if announce(blob, found):
                    self._write_all(wanted)
            return True
        except BaseException as error:
            problem = error
            raise
        finally:
            self._end(problem)
            del problem  # or its traceback, through this frame, keeps it and the tensors

    def _find_parts(self, tensors: Sequence[Any]) -> list[StoragePart]:
        """Find the storages, and return the parts of them that tensors cover."""
        storages, self._locations = locate(tensors)
        self._storages = [storage for storage, _ in storages]
        self._names = [self._driver.device_of(tensor) for _, tensor in storages]
        covered = covered_bytes(self._locations, len(storages))
        devices = self._driver.devices()
        return [
            StoragePart(low, high - low, devices[name]) for (low, high), name in zip(covered, self._names, strict=True)
        ]

    def _divide(self) -> None:
        """Divide the parts; each piece is of one device."""
        largest = piece_size(sum(part.size for part in self._parts), self._process.stores.arena.size)
        for name in dict.fromkeys(self._names):
            numbers = [number for number, each in enumerate(self._names) if each == name]
            for piece in divide([self._parts[number].size for number in numbers], largest):
                self._pieces.append([part._replace(storage=numbers[part.storage]) for part in piece])
                self._devices.append(name)

    def _create_refs(self) -> None:
        process = self._process
        with process.engine.lock:
            for _ in self._pieces:
                oid = process.next_task_id() + PUT_INDEX
                process.table.create(oid)
                self._refs.append(new_ref(oid))

    def _write_all(self, wanted: Callable[[], bool]) -> None:
        for number in range(len(self._pieces)):
            if not wanted():
                break
            self._request_blocks(number + 1 + _REQUESTED)
            self._begin(_PieceTransfer(number))
            if len(self._under_way) == _UNDER_WAY:
                self._finish(self._under_way[0])
        while self._under_way:
            self._finish(self._under_way[0])

    def _request_blocks(self, end: int) -> None:
        """Request the blocks of the pieces before this one."""
        while self._requested < min(end, len(self._pieces)):
            number = self._requested
            self._requested += 1
            self._process.stores.writer.request(self._refs[number]._id, self._blob(number).size)

    def _begin(self, copy: _PieceTransfer) -> None:
        """Begin the copy of a piece into a block of the store."""
        process, piece, device = self._process, self._pieces[copy.number], self._devices[copy.number]
        copy.offset = process.stores.writer.create(self._refs[copy.number]._id, self._blob(copy.number).size)
        self._begun += 1
        self._under_way.append(copy)
        address = copy.use(process, process.stores.arena.view(copy.offset, bytes_of(piece)))

        def copies(driver: DeviceDriver) -> None:
            for part in piece:
                source = self._storages[part.storage].data_ptr() + self._parts[part.storage].low + part.first
                driver.copy_to_host(device, address + part.at, source, part.size)

        self._copies.begin(copy, device, copies, self._copy_ordinarily)

    def _finish(self, copy: _PieceTransfer) -> None:
        """Wait until a piece is written, and seal it."""
        process, ref, blob = self._process, self._refs[copy.number], self._blob(copy.number)
        self._copies.end(copy, self._copy_ordinarily)
        blob.write_end(lambda at, content: process.stores.arena.write(copy.offset + at, content))
        with process.engine.lock:
            process.engine.send(raylet_of(process.node), m.Seal(ref._id))
            self._under_way.remove(copy)
            process.table.put_stored(ref._id, copy.offset, blob.size, None)
            self._written += 1
            process.engine.flush()

    def _blob(self, number: int) -> Serialized:
        return Serialized(_PIECE, [ReservedContent(bytes_of(self._pieces[number]))])

    def _copy_ordinarily(self, copy: _PieceTransfer) -> None:
        for part in self._pieces[copy.number]:
            first = self._parts[part.storage].low + part.first
            source = DeviceBytes(self._storages[part.storage], first, first + part.size)
            source.copy_to(memoryview(copy.host[part.at : part.at + part.size]))

    def _end(self, problem: BaseException) -> None:
        """No copy is under way any more. What is not written is this error."""
        process, unwritten = self._process, self._refs[self._written :]
        for copy in self._under_way:
            copy.close()
        with process.engine.lock:
            for copy in self._under_way:
                process.engine.send(raylet_of(process.node), m.Release([self._refs[copy.number]._id]))
            for ref in self._refs[self._begun : self._requested]:
                process.stores.writer.withdraw(ref._id)
            if unwritten:
                blob = error_blob(problem)
                for ref in unwritten:
                    process.table.set_inline(ref._id, blob)
            process.engine.flush()
        self._under_way.clear()


class PieceReader:
    """Reads tensors that are in pieces: onto the device with the number of theirs, or the current one; without a
    device, into memory of the host.

    Args:
        found: what has come from the process that has the tensors; its refs go as their pieces are read. warn: as for
            `PieceWriter`.

    Raises:
        OutOfMemoryError: (PyTorch's) the device has no room. `found` can be read again.
    """

    def __init__(self, process: CoreWorker, found: TensorPieces, warn: Callable[[str], object]) -> None:
        self._process, self._found = process, found
        self._copies = _PieceCopies(warn)
        self._under_way = self._copies.under_way
        self._storages: list[Any] = []
        self._names: list[str] = []
        self._driver = find_driver()
        if self._driver is None:
            self._storages += [host_storage(part.size) for part in found.parts]
            return
        names = {number: name for name, number in self._driver.devices().items()}
        for part in found.parts:
            self._names.append(names.get(part.device) or self._driver.current_device())
            self._storages.append(self._driver.empty(self._names[-1], part.size))

    def read(self, deadline: float | None) -> list[Any]:
        """Return the tensors when all pieces are there.

        Args:
            deadline: time at which to give up (`monotonic`).

        Raises:
            GetTimeoutError: they were not. ObjectLostError, RayError: what a piece is instead.
        """
        try:
            with ExitStack() as opened:
                if self._driver is not None:
                    try:
                        self._copies.streams = opened.enter_context(
                            TransferStreams(self._driver, sorted(set(self._names)))
                        )
                    except DeviceDriverError as error:
                        self._copies.refused(error)
                self._read_all(deadline)
        finally:
            for copy in self._under_way:
                copy.close()
            self._under_way.clear()
        parts = self._found.parts
        return [tensor_at(self._storages[each.storage], each, parts[each.storage].low) for each in self._found.tensors]

    def _read_all(self, deadline: float | None) -> None:
        refs, process = deque(self._found.refs), self._process
        self._found.refs.clear()
        for ref in list(refs)[:_AHEAD]:
            process.reader.when_ready_here(ref, _nothing)
        for number in range(len(self._found.pieces)):
            if len(refs) > _AHEAD:
                process.reader.when_ready_here(refs[_AHEAD], _nothing)
            left = None if deadline is None else max(0.0, deadline - monotonic())
            process.local.plain_views = True  # a copy registers what it reads, and its block is free when it has ended
            try:
                content = process.reader.get_one(refs.popleft(), left)
            finally:
                process.local.plain_views = False
            self._begin(_PieceTransfer(number), content)
            del content
            if len(self._under_way) == _UNDER_WAY:
                self._finish()
        while self._under_way:
            self._finish()

    def _begin(self, copy: _PieceTransfer, content: memoryview) -> None:
        """Begin the copy of a piece to where it belongs."""
        import numpy

        piece = self._found.pieces[copy.number]
        self._under_way.append(copy)
        if self._driver is None:
            copy.host = numpy.frombuffer(content, numpy.uint8)
            self._copy_ordinarily(copy)
            return
        address = copy.use(self._process, content)

        def copies(driver: DeviceDriver) -> None:
            for part in piece:
                target = self._storages[part.storage].data_ptr() + part.first
                driver.copy_to_device(self._names[part.storage], target, address + part.at, part.size)

        self._copies.begin(copy, self._names[piece[0].storage], copies, self._copy_ordinarily)

    def _finish(self) -> None:
        """Wait until the first piece that is under way is where it belongs."""
        copy = self._under_way[0]
        self._copies.end(copy, self._copy_ordinarily)
        self._under_way.popleft()

    def _copy_ordinarily(self, copy: _PieceTransfer) -> None:
        for part in self._found.pieces[copy.number]:
            target = bytes_in(self._storages[part.storage], part.first, part.size)
            target.copy_(torch_view(copy.host[part.at : part.at + part.size]))


def _nothing() -> None:
    """Have a piece fetched; it is awaited later."""


def error_blob(error: BaseException) -> bytes:
    """Return the blob of an error that a reader waits for. One that does not pickle, as it has a value, goes as its
    text."""
    if isinstance(error, SerializationError):
        error = TypeError(str(error))
    try:
        return serialize_error(error)
    except Exception:
        return serialize_error(RaySystemError(f"its tensors cannot be copied: {type(error).__name__}: {error}"))
