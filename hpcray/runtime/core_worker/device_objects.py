"""Device objects: values whose tensors stay in the process that made them (Ray Direct Transport).

The value is pickled without its tensors, which stay here as an object of their own, owned by this process. What travels
is the rest of the value and a ref to that object; so the tensors live as long as the value does. A reader in this
process gets the tensors themselves. The first reader elsewhere has them written into the node's store, as if they had
been put there, and from then on they are read like any object.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from hpcray.common.exceptions import RaySystemError
from hpcray.common.ids import PUT_INDEX, raylet_of
from hpcray.core.core_worker.device_objects import DeviceObjectTable
from hpcray.core.core_worker.object_entry import INLINE
from hpcray.protocol import messages as m
from hpcray.protocol.out_of_band import Pickler
from hpcray.protocol.serialization import Serialized, serialize, serialize_error
from hpcray.runtime.core_worker.call_thread import CallThread
from hpcray.runtime.core_worker.core_worker import CoreWorker, need_process
from hpcray.runtime.core_worker.object_refs import ObjectRef, new_ref

if TYPE_CHECKING:
    from hpcray.runtime.core_worker.handler_tables import Handler

_DEVICES = {"gloo": "cpu", "nccl": "cuda", "cuda_ipc": "cuda"}
"""The only kind of device whose tensors a transport takes, as in Ray."""
_FREED_CHECK = 0.02
"""Seconds between two looks at what has died in this process."""


class DeviceObjects:
    """The device objects of one process, made with the first of them.

    Args:
        process: whose requests for values come here first from now on.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self._table = DeviceObjectTable()
        self._freed = threading.Condition()
        self._exports = CallThread("hpcray-device-objects")
        self._on_other_get: Handler = process.handlers[m.ObjectGet]
        process.handlers[m.ObjectGet] = self._on_object_get

    @classmethod
    def of(cls, process: CoreWorker) -> DeviceObjects:
        """Return those of this process; makes them at the first call."""
        with process.engine.lock:
            if process.device_objects is None:
                process.device_objects = cls(process)
            found: DeviceObjects = process.device_objects
            return found

    def add(self, tensors: Sequence[Any]) -> ObjectRef[Any]:
        """Keep tensors here. Returns the ref of the object that has them."""
        process = self._process
        error = RaySystemError("the tensors of a device object are read with its value, not by themselves")
        blob = serialize_error(error)  # an error does not travel with its ref
        with process.engine.lock:
            oid = process.next_task_id() + PUT_INDEX
            process.table.put_inline(oid, blob)
            process.table.when_freed(oid, partial(self._drop, oid))
            self._table.add(oid, tensors)
        return new_ref(oid)

    def tensors(self, ref: ObjectRef[Any]) -> Sequence[Any]:
        """Return the tensors of an object: the same ones in this process, copies of them elsewhere.

        Raises:
            ObjectLostError: the process that had them is gone.
        """
        with self._process.engine.lock:
            found = self._table.find(ref._id)
        if found is not None:
            return found
        copies: Sequence[Any] = self._process.get_one(ref, None)
        return copies

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

    def close(self) -> None:
        """End the thread that exports."""
        self._exports.close()

    def _drop(self, oid: bytes) -> None:
        self._table.remove(oid)
        with self._freed:
            self._freed.notify_all()

    # ------------------------------------------------------------ readers in other processes

    def _on_object_get(self, src: bytes, msg: m.ObjectGet) -> None:
        """A borrower asks for a value (lock held). Tensors are copied first, in a thread of ours."""
        if self._table.find(msg.id) is None or msg.id in self._table.exported:
            self._on_other_get(src, msg)
            return
        self._exports.start()
        self._exports.put(partial(self._export, src, msg))

    def _export(self, src: bytes, msg: m.ObjectGet) -> None:
        process, engine = self._process, self._process.engine
        with engine.lock:
            tensors = None if msg.id in self._table.exported else self._table.find(msg.id)
        answer = b""
        if tensors is not None:
            try:
                answer = self._copied(msg.id, tensors)
            except Exception as error:  # no room in the store, or a tensor that does not pickle
                answer = serialize_error(error)
        with engine.lock:
            if process.dead is not None:
                return
            if answer:
                engine.send(src, m.ObjectReady(msg.id, 0, answer, 0, []))
            else:
                self._on_other_get(src, msg)
            engine.flush()

    def _copied(self, oid: bytes, tensors: Sequence[Any]) -> bytes:
        """The blob of the tensors as they are now; b"" for a large one, which is in our node's store then."""
        process, raylet = self._process, raylet_of(self._process.node)
        blob, _ = serialize(list(tensors))
        if (blob.size if isinstance(blob, Serialized) else len(blob)) <= process.config.inline_limit:
            return blob.join() if isinstance(blob, Serialized) else blob
        offset, size = process.writer.write(oid, blob)
        with process.engine.lock:
            entry = process.table.entries.get(oid)
            if entry is not None and entry.state == INLINE and self._table.find(oid) is not None:
                process.table.put_stored(oid, offset, size, None)
                self._table.note_export(oid)
            else:  # it was freed meanwhile
                process.engine.send(raylet, m.Release([oid]))
                process.engine.send(raylet, m.Free([oid], []))
        return b""


class DeviceValue:
    """Stands for a value that is to be pickled without its tensors; what is unpickled is the value.

    Args:
        transport: name of the transport; some take the tensors of one kind of device only.

    Raises:
        ValueError: (when pickled) the transport does not take the tensors.
    """

    def __init__(self, value: Any, transport: str) -> None:
        self._value = value
        self._transport = transport

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        tensors: list[Any] = []
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _ValuePickler(file, tensors, buffers).dump(self._value)
        wanted = _DEVICES.get(self._transport)
        for tensor in tensors:
            if wanted is not None and tensor.device.type != wanted:
                raise ValueError(
                    f"Tensor transport backend {self._transport.upper()} does not support tensor transfer on device "
                    f"{tensor.device.type}. hint: tensor_transport='auto' takes tensors of any device"
                )
        ref = DeviceObjects.of(need_process()).add(tensors) if tensors else None
        return _load_value, (ref, file.getvalue(), buffers)


class _ValuePickler(Pickler):
    """Pickles a value with numbers in the places of its tensors."""

    def __init__(self, file: io.BytesIO, tensors: list[Any], buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        torch = sys.modules.get("torch")
        self._kind: Any = () if torch is None else torch.Tensor
        self._tensors = tensors
        self._numbers: dict[int, int] = {}

    def persistent_id(self, item: Any) -> int | None:
        """Return the number of a tensor; None for all else."""
        if not isinstance(item, self._kind):
            return None
        number = self._numbers.setdefault(id(item), len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(item)
        return number


class _ValueReader(pickle.Unpickler):
    def __init__(self, stream: bytes, buffers: Sequence[Any], tensors: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(stream), buffers=buffers)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


def _load_value(ref: ObjectRef[Any] | None, stream: bytes, buffers: Sequence[Any]) -> Any:
    tensors = () if ref is None else DeviceObjects.of(need_process()).tensors(ref)
    return _ValueReader(stream, buffers, tensors).load()


def reply_with_device_values(
    options: Callable[[bytes], Any], reply: Callable[..., None], src: bytes, task: bytes, num_returns: int, value: Any,
    error: BaseException | None, *rest: Any,
) -> None:  # fmt: skip
    """Reply to a task or call; where it has a tensor transport its tensors stay here.

    Args:
        options: returns the options of a task, None for none. reply: sends the reply (`Replies.reply`).
    """
    own = options(task)
    if error is None and own is not None and own.transport and value is not None:
        stay = partial(DeviceValue, transport=own.transport)
        if num_returns == 1:
            value = stay(value)
        elif num_returns > 1 and hasattr(value, "__iter__"):
            value = (stay(item) for item in value)
    reply(src, task, num_returns, value, error, *rest)
