"""`ray.experimental`: the key-value store of the job, locations of objects, progress bars of workers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hpcray.api.objects import wait
from hpcray.api.session import is_initialized, post_init_hooks, require_session
from hpcray.common.ids import PUT_INDEX, node_of, owner_of
from hpcray.core.core_worker.object_entry import INLINE, STORED
from hpcray.experimental import internal_kv, tqdm_ray
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.tensors.tensor_transports import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransport,
    TensorTransportManager,
    TensorTransportMetadata,
    publish_all,
    register,
)

__all__ = [
    "CommunicatorMetadata",
    "FetchRequest",
    "TensorTransportManager",
    "TensorTransportMetadata",
    "deregister_nixl_memory",
    "get_local_object_locations",
    "get_object_locations",
    "internal_kv",
    "register_nixl_memory",
    "register_nixl_memory_pool",
    "register_tensor_transport",
    "set_nixl_cuda_stream",
    "set_target_device_for_ref",
    "set_target_for_ref",
    "tqdm_ray",
    "wait_tensor_freed",
]

locations = sys.modules[f"{__name__}.locations"] = sys.modules[__name__]  # Ray's module of this name

Location = dict[str, Any]

_OWNERS_ANSWER = 1.0  # seconds; an owner answers at once for an object that is ready, and for a pending one when it is


def get_object_locations(obj_refs: Sequence[ObjectRef[Any]], timeout_ms: int = -1) -> dict[ObjectRef[Any], Location]:
    """Return the locations and sizes of objects, as their owners know them now; it does not wait for pending ones.

    Args:
        obj_refs: refs of any objects.
        timeout_ms: milliseconds to wait for the owners' answers; -1: as long as an owner that is alive needs.

    Returns:
        By ref: `node_ids` (in hex, of nodes that have a copy or, on the same host, have mapped one; [] for a pending
        object, and for a small result, which is sent in messages),
        `object_size` in bytes (None for a pending object), and `did_spill` (always False: spilled copies count as
        copies of the node).

    Raises:
        RuntimeError: hpcray is not initialized.
    """
    process = _joined()
    refs = list(dict.fromkeys(obj_refs))
    borrowed = [ref for ref in refs if owner_of(ref._id) != process.me]
    if borrowed:
        limit = _OWNERS_ANSWER if timeout_ms < 0 else min(timeout_ms / 1000, _OWNERS_ANSWER)
        wait(borrowed, num_returns=len(borrowed), timeout=limit, fetch_local=False)
    return _located(process, refs)


def get_local_object_locations(obj_refs: Sequence[ObjectRef[Any]]) -> dict[ObjectRef[Any], Location]:
    """Return the locations and sizes that this process knows, without messages to other processes.

    Raises:
        RuntimeError: hpcray is not initialized.
    """
    return _located(_joined(), list(dict.fromkeys(obj_refs)))


def _joined() -> CoreWorker:
    if not is_initialized():
        raise RuntimeError("Ray hasn't been initialized. hint: call init() first")
    return require_session()


def wait_tensor_freed(tensor: Any, timeout: float | None = None) -> None:
    """Wait until no device object has this tensor any more: then it can be written to, and no reader sees it change.

    Args:
        tensor: was returned by a call with `tensor_transport`, or given to `put` with `_tensor_transport`.
        timeout: in seconds; None waits without limit.

    Raises:
        TimeoutError: refs to a value with this tensor are left after `timeout`.
    """
    from hpcray.tensors.device_objects import DeviceObjects  # few programs use it

    DeviceObjects.of(require_session()).wait_freed(tensor, timeout)


def set_target_for_ref(ref: ObjectRef[Any], target: Sequence[Any]) -> None:
    """Have `get` read the tensors of a device object into these, which the value then has.

    A tensor of another process is copied once, from the object store or the memory of a device. The targets may be on
    any device, and are not kept alive: when one is gone, `get` makes new tensors. A later call for the same ref
    replaces them. Arguments of tasks do not look at them.

    Args:
        ref: of a value with `tensor_transport`. `get` raises a ValueError if it is of another one.
        target: PyTorch's tensors, as many as the value has, in the order in which it is pickled, each of the same shape
            and dtype; else `get` raises a ValueError, and changes none of them.

    Raises:
        TypeError: `ref` is no ref, or `target` has something else than PyTorch's tensors.
    """
    targets = list(target)
    torch = sys.modules.get("torch")
    for each in targets:
        if torch is None or not isinstance(each, torch.Tensor):
            raise TypeError(f"set_target_for_ref() takes a list of torch.Tensor, and it has a {type(each).__name__}")
    _set_target(ref, targets)


def set_target_device_for_ref(ref: ObjectRef[Any], target_device: str) -> None:
    """Have `get` return the tensors of a device object on this device, as in "cpu" and "cuda:0".

    A later call for the same ref, also of `set_target_for_ref`, replaces it.

    Raises:
        TypeError: `ref` is no ref. RuntimeError: PyTorch knows no such device.
    """
    import torch

    _set_target(ref, None, str(torch.device(target_device)))


def _set_target(ref: ObjectRef[Any], buffers: Sequence[Any] | None, device: str = "") -> None:
    from hpcray.tensors.read_targets import ReadTargets  # few programs use it

    if not isinstance(ref, ObjectRef):
        raise TypeError(f"{ref!r} is no ObjectRef")
    ReadTargets.of(require_session()).set(ref, buffers, device)


def register_nixl_memory(tensor: Any) -> None:
    """Accept what Ray's transport `nixl` profits from. Here it changes nothing: memory of device objects is mapped or
    registered by hpcray when it is first read, and stays so."""


def deregister_nixl_memory(tensor: Any) -> None:
    """Accept the end of `register_nixl_memory`, without an effect as well."""


def register_nixl_memory_pool(size: int, device: Any) -> None:
    """Accept what Ray's transport `nixl` profits from, without an effect. Tensors are not copied when they are put."""


def set_nixl_cuda_stream(stream: Any) -> None:
    """Accept what Ray's transport `nixl` profits from, without an effect: readers wait for an event on the current
    stream, and no processor waits for a device."""


def register_tensor_transport(
    transport_name: str, devices: Sequence[str], transport_manager_class: type[TensorTransportManager], data_type: type
) -> None:
    """Add a way of tensors between processes, for `tensor_transport=` in all processes of the job.

    Where it fails, tensors go through the object store, and a warning is printed.

    Args:
        transport_name: its name; upper and lower case are the same.
        devices: kinds of devices whose tensors it takes, as in "cpu" and "cuda".
        transport_manager_class: reads and writes tensors; each process makes one instance.
        data_type: the class of its tensors, for example `torch.Tensor`.

    Raises:
        ValueError: the class is no `TensorTransportManager`, or the name is one of hpcray's own.
        NotImplementedError: the transport is not one-sided.
    """
    register(transport_name, TensorTransport(tuple(devices), transport_manager_class, data_type))
    if _publish not in post_init_hooks:
        post_init_hooks.append(_publish)


def _publish() -> None:
    publish_all(require_session())


def _located(process: CoreWorker, refs: list[ObjectRef[Any]]) -> dict[ObjectRef[Any], Location]:
    names = {node["Index"]: node["NodeID"] for node in process.gcs.nodes()} if refs else {}
    found: dict[ObjectRef[Any], Location] = {}
    with process.engine.lock:
        for ref in refs:
            oid = ref._id
            entry = process.table.entries.get(oid)
            where = [] if entry is None else list(entry.nodes or ())
            if entry is not None and entry.mapping is not None and node_of(process.me) not in where:
                where.append(node_of(process.me))  # a copy here, or one of a neighbor's store that is mapped here
            size = None
            if entry is not None and entry.state == STORED:
                size = entry.size
            elif entry is not None and entry.state == INLINE:
                size = len(entry.value)
                if oid.endswith(PUT_INDEX):  # it has its owner's node as its place, as in Ray, where a store has it
                    where = where or [node_of(oid)]
            nodes = [names[node] for node in where if node in names]
            found[ref] = {"node_ids": nodes, "object_size": size, "did_spill": False}
    return found
