"""GPUDirect: tensors from a device of another host to a device of this one, by UCX. The shell of `tensor_pulls`.

The reader asks for the ranges of memory that the tensors cover (`PullTensors`). The process that has them waits until
the work that fills them is done, and sends each range from the device (`DeviceWire`). The tensors stay there until all
has been sent, or the reader gives up or is dead. Where this way does not work, `read` returns None: they go through the
host, as without it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from hpcray.common.exceptions import GetTimeoutError, RaySystemError
from hpcray.common.ids import node_of, owner_of
from hpcray.core.core_worker.object_entry import Waiter
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.tensors.device_driver import DeviceDriver, DeviceDriverError
from hpcray.tensors.device_mappings import HOST, Place, choose_way
from hpcray.tensors.device_memory import DeviceDescriptor, covered_bytes, locate, tensor_at
from hpcray.tensors.device_pieces import TransferStreams
from hpcray.tensors.messages import CancelTensors, PullTensors, TensorMessage, TensorsPushed
from hpcray.tensors.tensor_pulls import (
    LEAST_RATE,
    OPEN,
    PullRange,
    TensorPull,
    TensorPulls,
    TensorPullState,
    TensorSends,
    are_within,
    divide_ranges,
)
from hpcray.tensors.ucx_device import DeviceBuffer, DeviceWire, find_transports, tag_of
from hpcray.transport.base import TransportError

_LOOK_PERIOD = 1.0
"""Seconds between two looks whether a pull is late."""


class DirectTransferError(Exception):
    """Tensors do not pass directly between two processes."""


def choose(direct: DirectTensors | None, known: DeviceDescriptor, reader: Place, private: bool) -> str:
    """Choose the way of tensors to this process (`choose_way`).

    Args:
        direct: None: this process has no device. reader: the place of this process. private: as for `choose_way`.

    Raises:
        RaySystemError: they are to pass directly, and cannot.
    """
    if direct is not None:
        reader = direct.place_for(reader, known)
    way = choose_way(known.place, reader, private, known.covered() if known.wire else 0, known.only_direct)
    if way == HOST and known.only_direct and not private:
        raise _not_direct("it has no GPU" if direct is None else direct.why_not(known))
    return way


def _not_direct(why: str) -> RaySystemError:
    return RaySystemError(
        f"tensor_transport='ucx': the tensors cannot pass from their device to one of this process: {why}; hint: with "
        "'auto' they pass through the hosts where there is no other way, with _use_object_store=True this get does that"
    )


class DirectTensors:
    """Tensors that one process pulls from devices of other hosts, and sends from its own.

    Args:
        send: queues a message for the device objects of another process (lock held).
        driver: of its devices. find: returns the tensors of an object of this process, which stay where they are until
            `release` is called with the same arguments, object and reader; None: they are not there any more (both:
            lock held). order: has later work of the calling thread's streams follow that which fills the tensors of
            an object.

    Attributes:
        transports: those of UCX by which this process sends and receives; "" where it does not.
    """

    def __init__(
        self,
        process: CoreWorker,
        send: Callable[[bytes, TensorMessage], object],
        driver: DeviceDriver,
        find: Callable[[bytes, bytes], Sequence[Any] | None],
        release: Callable[[bytes, bytes], object],
        order: Callable[[bytes, Sequence[Any]], object],
    ) -> None:
        self._process, self._driver, self._send_message = process, driver, send
        self._find, self._release, self._order = find, release, order
        setting = process.config.device_transports
        self._is_auto = setting == "auto"
        self.transports, self._why_not = find_transports(setting)
        self._pulls = TensorPulls(LEAST_RATE if self._is_auto else 0.0)
        self._sends = TensorSends()
        self._waiters: dict[int, Waiter] = {}
        self._wire: DeviceWire | None = None
        self._preparing: dict[bytes, list[tuple[bytes, PullTensors]]] = {}
        """Requests, by object, that wait until the work is done that fills the tensors."""

    # ------------------------------------------------------------ the reader

    def place_for(self, reader: Place, known: DeviceDescriptor) -> Place:
        """Return the place of this process as a reader of some tensors: without a wire where that is known not to
        work."""
        with self._process.engine.lock:
            problem = self._pulls.problem(node_of(known.process), monotonic())
        return reader._replace(wire="" if problem and not known.only_direct else self.transports)

    def why_not(self, known: DeviceDescriptor) -> str:
        """Return why tensors do not pass directly to this process, if they do not."""
        if self._why_not:
            return self._why_not
        if not known.wire:
            return "the process that has them does not send any, by HPCRAY_DEVICE_TRANSPORTS or as its host has no RDMA"
        return f"the process that has them uses the UCX transports {known.wire}, this one {self.transports}"

    def read(self, ref: ObjectRef[Any], known: DeviceDescriptor, deadline: float | None) -> list[Any] | None:
        """Return the tensors, in memory of a device of this process.

        Args:
            deadline: time at which to give up (`monotonic`).

        Returns:
            None where they are not where they were, their process is dead, or UCX has no RDMA.

        Raises:
            DirectTransferError: they do not come this way. RaySystemError: the same, and there is to be no other one.
            GetTimeoutError: they had not come by then. OutOfMemoryError: (PyTorch's) the device has no room.
        """
        try:
            return self._read(ref, known, deadline)
        except DirectTransferError as error:
            if known.only_direct:
                raise _not_direct(str(error)) from None
            if self._is_auto and not self.transports:
                return None  # UCX as it is on PyPI: no news
            raise

    def _read(self, ref: ObjectRef[Any], known: DeviceDescriptor, deadline: float | None) -> list[Any] | None:
        try:
            address = self._start_wire()
        except TransportError as error:
            raise DirectTransferError(f"{error}") from None
        driver, names = self._driver, {number: name for name, number in self._driver.devices().items()}
        spans = covered_bytes(known.tensors, len(known.storages))
        storages, devices = [], []
        for number, (low, high) in enumerate(spans):
            devices.append(names.get(known.numbers[known.device_of(number)]) or driver.current_device())
            storages.append(driver.empty(devices[-1], high - low))
        try:
            self._await_streams(devices)
            pull = self._pull(ref._id, spans, (storages, devices), (address, known.only_direct), deadline)
        except DeviceDriverError as error:
            raise DirectTransferError(f"{error}") from None
        if pull.state is TensorPullState.CANCELLED:
            raise GetTimeoutError(f"the tensors of object {ref._id.hex()} did not come from node {pull.node} in time")
        if pull.state is TensorPullState.FAILED:
            raise DirectTransferError(pull.reason)
        if pull.state is not TensorPullState.DONE:
            return None
        return [tensor_at(storages[each.storage], each, spans[each.storage][0]) for each in known.tensors]

    def _pull(
        self, oid: bytes, spans: Sequence[tuple[int, int]], into: tuple[Sequence[Any], Sequence[str]],
        to: tuple[bytes, bool], deadline: float | None,
    ) -> TensorPull:  # fmt: skip
        """Have parts of storages sent, and wait for them. Returns the pull when it has ended.

        Args:
            into: the memory for each part, and its device. to: the address of this process, and whether there is to be
                no other way.
        """
        wanted = divide_ranges([PullRange(at, 0, high - low) for at, (low, high) in enumerate(spans)])
        process, wire, key = self._process, self._open_wire(), os.urandom(16)
        source, waiter = owner_of(oid), Waiter()
        with process.engine.lock:
            number = self._pulls.begin(source, node_of(source), [size for _, _, size in wanted])
            self._waiters[number] = waiter
        try:
            for message, part in enumerate(wanted):
                storage, device = into[0][part.storage], into[1][part.storage]
                buffer = self._buffer(device, storage, part.first, part.size)
                wire.expect(number, tag_of(key, message), buffer, partial(self._landed, number, message))
            ranges = [(at, spans[at][0] + first, size) for at, first, size in wanted]
            with process.engine.lock:
                self._send_message(source, PullTensors(oid, number, key, to[0], ranges, to[1]))
                process.engine.flush()
                self._await(number, waiter, deadline)
        finally:
            with process.engine.lock:
                del self._waiters[number]
                pull = self._pulls.take_out(number)
                if pull.state is not TensorPullState.DONE and process.dead is None:
                    self._send_message(source, CancelTensors(oid, number))
                    process.engine.flush()
            wire.withdraw(number)
        return pull

    def _await(self, number: int, waiter: Waiter, deadline: float | None) -> None:
        """Wait until a pull has ended, or for the deadline (lock held)."""
        pull = self._pulls.find(number)
        assert pull is not None
        while pull.state in OPEN:
            now = monotonic()
            if self._pulls.expire(number, now) or (deadline is not None and now >= deadline):
                return
            until = min(now + _LOOK_PERIOD, *(end for end in (pull.limit, deadline) if end is not None), math.inf)
            self._process.block(waiter, until)

    def _await_streams(self, devices: Iterable[str], order: Callable[[], object] = lambda: None) -> None:
        """Wait until work of the current streams is done, which may still use the memory that they have given back.

        Args:
            order: has the streams follow other work first.
        """
        used = sorted(set(devices))
        with TransferStreams(self._driver, used) as streams:
            order()
            for device in used:
                streams.end(device, streams.begin(device, _nothing))

    def _buffer(self, device: str, storage: Any, first: int, size: int) -> DeviceBuffer:
        content = self._driver.expose(device, storage.data_ptr() + first, size, storage)
        return DeviceBuffer(content, size, partial(self._driver.activate, device))

    def _open_wire(self) -> DeviceWire:
        """Return the UCX worker of this process; makes it at the first call.

        Raises:
            TransportError: the process has left the job, or has no transports.
        """
        with self._process.engine.lock:
            if self._process.dead is not None or not self.transports:
                raise TransportError(self._process.dead or self._why_not)
            if self._wire is None:
                self._wire = DeviceWire(self.transports)
            return self._wire

    def _start_wire(self) -> bytes:
        """Return the address by which others send to this process.

        Raises:
            TransportError: UCX does not start here; nor will it later.
        """
        try:
            return self._open_wire().address()
        except TransportError as error:
            self.transports, self._why_not = "", f"{error}"
            raise

    def _landed(self, number: int, message: int, reason: str) -> None:
        """A message is here, or cannot be received. Called by the thread of UCX."""
        with self._process.engine.lock:
            if reason:
                self._pulls.broke(number, reason, monotonic())
            elif self._pulls.landed(number, message, monotonic()):
                self._notify(number)

    def on_pushed(self, src: bytes, msg: TensorsPushed) -> None:
        """The answer to `PullTensors` (lock held)."""
        now = monotonic()
        if msg.reason:
            self._pulls.refused(msg.pull, src, msg.reason, msg.gone, now)
        else:
            self._pulls.coming(msg.pull, src, now)
        pull = self._pulls.find(msg.pull)
        if pull is not None and pull.state not in OPEN:
            self._notify(msg.pull)

    def _notify(self, number: int) -> None:
        waiter = self._waiters.get(number)
        if waiter is not None and waiter.count:
            waiter.count = 0
            self._process.engine.notify(waiter)

    # ------------------------------------------------------------ the process that has the tensors

    def on_pull(self, src: bytes, msg: PullTensors) -> None:
        """A reader asks for tensors (lock held)."""
        if self._sends.is_busy(msg.id) and not msg.only:
            self._refuse(src, msg, "other readers get them now", gone=True)
            return
        tensors = self._find(msg.id, src)
        if tensors is None:
            self._refuse(src, msg, "they are not on their device any more", gone=True)
            return
        if not self._sends.begin(src, msg.pull, msg.id, len(msg.ranges)):
            self._release(msg.id, src)
            return
        waiting = self._preparing.get(msg.id)
        if waiting is not None:
            waiting.append((src, msg))
            return
        self._preparing[msg.id] = [(src, msg)]
        # A thread for each object: the work that fills one may wait for a process that reads another one first.
        args = (msg.id, tensors)
        threading.Thread(target=self._prepare, args=args, name="hpcray-direct-tensors", daemon=True).start()

    def _prepare(self, oid: bytes, tensors: Sequence[Any]) -> None:
        """Send tensors when the work that fills them is done."""
        problem, found = "", []
        try:
            found = [(storage, self._driver.device_of(tensor)) for storage, tensor in locate(tensors)[0]]
            self._await_streams((device for _, device in found), partial(self._order, oid, tensors))
            self._start_wire()
        except Exception as error:
            problem = f"{error}" or type(error).__name__
        with self._process.engine.lock:
            requests = self._preparing.pop(oid)
        for src, msg in requests:
            if problem:
                self._sending_failed(src, msg, problem)
            else:
                self._serve(src, msg, found)

    def _serve(self, src: bytes, msg: PullTensors, storages: Sequence[tuple[Any, str]]) -> None:
        """Send what a reader asks for. storages: those of the tensors, with their devices."""
        try:
            if not are_within([PullRange(*each) for each in msg.ranges], [one.nbytes() for one, _ in storages]):
                raise RaySystemError("the reader asks for memory that the tensors do not have")
            wire = self._open_wire()
            buffers = [self._buffer(storages[at][1], storages[at][0], first, size) for at, first, size in msg.ranges]
        except Exception as error:
            self._sending_failed(src, msg, f"{error}")
            return
        with self._process.engine.lock:
            if self._process.dead is not None or not self._sends.is_wanted(src, msg.pull):
                return
            self._send_message(src, TensorsPushed(msg.id, msg.pull))
            self._process.engine.flush()
        for message, buffer in enumerate(buffers):
            tag, done = tag_of(msg.key, message), partial(self._sent, src, msg, message)
            wire.send((src, msg.pull), src, msg.address, tag, buffer, done)
        if not buffers:
            self._end_sending(src, msg.pull)

    def _sent(self, src: bytes, msg: PullTensors, message: int, reason: str) -> None:
        """A message has been sent, or cannot be. Called by the thread of UCX."""
        if reason:
            self._sending_failed(src, msg, reason)
            return
        with self._process.engine.lock:
            oid = self._sends.sent(src, msg.pull, message)
            if oid:
                self._release(oid, src)

    def _end_sending(self, src: bytes, pull: int) -> bool:
        """Send nothing more for a pull. Returns whether something was left to send."""
        with self._process.engine.lock:
            oid = self._sends.end(src, pull)
            if oid:
                self._release(oid, src)
            if self._wire is not None:
                self._wire.withdraw((src, pull))
        return bool(oid)

    def _sending_failed(self, src: bytes, msg: PullTensors, reason: str) -> None:
        if self._end_sending(src, msg.pull):
            with self._process.engine.lock:
                if self._process.dead is None:
                    self._refuse(src, msg, reason)

    def _refuse(self, src: bytes, msg: PullTensors, reason: str, gone: bool = False) -> None:
        self._send_message(src, TensorsPushed(msg.id, msg.pull, reason or "unknown", gone))
        self._process.engine.flush()

    def on_cancel(self, src: bytes, msg: CancelTensors) -> None:
        """A reader does not wait any more (lock held)."""
        self._end_sending(src, msg.pull)

    # ------------------------------------------------------------ ends

    def process_died(self, proc: bytes) -> None:
        """A process is gone, as a reader and as one that has tensors (lock held)."""
        for number in self._pulls.process_died(proc):
            self._notify(number)
        for number, oid in self._sends.process_died(proc):
            self._release(oid, proc)
            if self._wire is not None:
                self._wire.withdraw((proc, number))
        if self._wire is not None:
            self._wire.forget(proc)

    def close(self) -> None:
        """End the thread of UCX."""
        if self._wire is not None:
            self._wire.close()


def _nothing(driver: DeviceDriver) -> None:
    """Copy nothing: what is waited for is the work before."""
