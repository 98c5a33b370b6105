"""Ways of tensors between processes that programs bring along (`ray.experimental.register_tensor_transport`)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import cloudpickle

from hpcray.common.exceptions import RaySystemError
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.object_refs import ObjectRef

BUILT_IN = ("auto", "cuda_ipc", "gloo", "nccl", "nixl", "object_store", "ucx")
_SPACE = "hpcray:tensor transports"
"""Namespace of the job's key-value store."""


@dataclass
class CommunicatorMetadata:
    """Facts that both ends of a transfer have to know; transports extend it."""


@dataclass
class TensorTransportMetadata:
    """Facts that a reader has to know of the tensors of one object; transports extend it.

    Attributes:
        tensor_meta: shape and dtype of each tensor.
        tensor_device: the kind of device that they are on.
    """

    tensor_meta: list[Any]
    tensor_device: str | None = None


@dataclass
class FetchRequest:
    """A transfer under way. tensors: what came, where the transfer waited for it."""

    obj_id: str = ""
    tensors: list[Any] = field(default_factory=list)


class TensorTransportManager(ABC):
    """A way of tensors between processes. Each process that makes or reads such tensors has one of each class.

    The names and arguments are Ray's. Here every process may make and read device objects, so no handles of actors are
    known: `get_communicator_metadata` gets None for both, and is called by the reader.
    """

    @abstractmethod
    def tensor_transport_backend(self) -> str:
        """Return the name of the transport."""

    @staticmethod
    @abstractmethod
    def is_one_sided() -> bool:
        """Return True if readers read without help of the process that has the tensors. Only such ones work here."""

    @staticmethod
    @abstractmethod
    def can_abort_transport() -> bool:
        """Return True if `abort_transport` works."""

    @abstractmethod
    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True if an actor has what the transport needs. (Not asked here.)"""

    @abstractmethod
    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> TensorTransportMetadata:
        """Return what readers have to know of these tensors. Called where they were made, before anyone reads."""

    @abstractmethod
    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        """Return what both ends have to know."""

    @abstractmethod
    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Return the tensors of an object, in the reader. target_buffers: None here."""

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> FetchRequest:
        """Begin to read the tensors of an object; by default `recv_multiple_tensors` reads them at once."""
        found = self.recv_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return FetchRequest(obj_id, found)

    def wait_fetch_complete(self, fetch_request: FetchRequest, timeout: float = -1) -> list[Any]:
        """Return what `fetch_multiple_tensors` reads, once it is there.

        Args:
            timeout: in seconds; -1 for no limit.

        Raises:
            TimeoutError: it did not come in time.
        """
        return fetch_request.tensors

    @abstractmethod
    def send_multiple_tensors(
        self,
        tensors: list[Any],
        tensor_transport_metadata: TensorTransportMetadata,
        communicator_metadata: CommunicatorMetadata,
    ) -> None:
        """Send tensors. (Never called here: only one-sided transports work.)"""

    @abstractmethod
    def garbage_collect(self, obj_id: str, tensor_transport_meta: TensorTransportMetadata, tensors: list[Any]) -> None:
        """Let go of what belongs to an object that is freed. Called where it was made."""

    @abstractmethod
    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """End a transfer that failed."""


class TensorTransport(NamedTuple):
    """A registered transport. devices: kinds of devices whose tensors it takes; data_type: the class of its tensors."""

    devices: tuple[str, ...]
    manager_class: type[TensorTransportManager]
    data_type: type


_lock = threading.Lock()
_registered: dict[str, TensorTransport] = {}
_managers: dict[str, TensorTransportManager] = {}


def register(name: str, transport: TensorTransport) -> None:
    """Make a transport known to this process, and to all processes of its job.

    Raises:
        ValueError: the class is not one of transports, or the name is one of hpcray's own.
        NotImplementedError: the transport is not one-sided.
    """
    kind = transport.manager_class
    if not (isinstance(kind, type) and issubclass(kind, TensorTransportManager)):
        raise ValueError(f"transport_manager_class {kind!r} is not a subclass of TensorTransportManager")
    if name.lower() in BUILT_IN:
        raise ValueError(f"the tensor transport {name!r} exists; hint: choose a name other than {', '.join(BUILT_IN)}")
    if not kind.is_one_sided():
        raise NotImplementedError(
            f"the tensor transport {name!r} is two-sided; hint: only those work whose readers need no help of the "
            "process that has the tensors (is_one_sided)"
        )
    with _lock:
        _registered[name.lower()] = transport
        _managers.pop(name.lower(), None)
    if current.process is not None:
        _publish(current.process, name.lower())


def publish_all(process: CoreWorker) -> None:
    """Make the transports of this process known to the job that it has just joined."""
    for name in list(_registered):
        _publish(process, name)


def _publish(process: CoreWorker, name: str) -> None:
    process.gcs.call("kv_put", name.encode(), cloudpickle.dumps(_registered[name], 5), True, _SPACE)


def is_registered(name: str) -> bool:
    """Return True if a transport of this name was registered in this process, or in its job."""
    return name in _registered or (current.process is not None and _look_up(current.process, name))


def fetch(
    process: CoreWorker, ref: ObjectRef[Any], transport: str, known: Any, targets: list[Any] | None
) -> Sequence[Any]:
    """Return the tensors of an object of another process, by a registered transport.

    Args:
        known: what their process says of them. targets: tensors that it may read into; None: none.
    """
    manager = find(process, transport)[1]
    shared = manager.get_communicator_metadata(None, None, transport)
    deadline = process.local.deadline
    request = manager.fetch_multiple_tensors(ref._id.hex(), known, shared, targets)
    left = -1 if deadline is None else max(0.0, deadline - monotonic())
    found: Sequence[Any] = manager.wait_fetch_complete(request, left)
    return found


def find(process: CoreWorker, name: str) -> tuple[TensorTransport, TensorTransportManager]:
    """Return a registered transport, and its manager in this process.

    Raises:
        RaySystemError: the job has no such transport.
    """
    if name not in _registered and not _look_up(process, name):
        raise RaySystemError(
            f"no tensor transport {name!r} is registered in this job; hint: register_tensor_transport in the driver"
        )
    transport = _registered[name]
    with _lock:
        manager = _managers.get(name)
        if manager is None:
            manager = _managers[name] = transport.manager_class()
    return transport, manager


def _look_up(process: CoreWorker, name: str) -> bool:
    blob = process.gcs.call("kv_get", name.encode(), _SPACE)
    if not blob:
        return False
    with _lock:
        _registered.setdefault(name, cloudpickle.loads(blob))
    return True
