"""The functions get, put, wait and cancel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from time import monotonic
from typing import Any, Generic, TypeVar, cast, overload

from hpcray.api.options import transport_of
from hpcray.api.session import require_session
from hpcray.protocol.serializability import not_serializable
from hpcray.protocol.serialization import SerializationError
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.generators import ObjectRefGenerator
from hpcray.runtime.core_worker.object_refs import ObjectRef

T = TypeVar("T")
_ONE = 1
_LIST_EXPECTED = "wait() expected a list of ray.ObjectRef or ray.ObjectRefGenerator"
_REFS_ALONE = {ObjectRef}
_ident = attrgetter("_id")


class WaitableRefs(Generic[T]):
    """Refs that come with a way of waiting for them; `get` of it returns their values (`hpcray.progress`)."""

    def wait(self, timeout: float | None = None) -> list[ObjectRef[Any]]:
        """Wait until all refs are ready, and return them in the order in which they were given.

        Args:
            timeout: in seconds; None waits without limit.

        Raises:
            GetTimeoutError: not all were ready in time.
        """
        raise NotImplementedError


@overload
def get(object_refs: ObjectRef[T], *, timeout: float | None = None, _use_object_store: bool = False) -> T: ...


@overload
def get(
    object_refs: Sequence[ObjectRef[T]], *, timeout: float | None = None, _use_object_store: bool = False
) -> list[T]: ...


@overload
def get(
    object_refs: WaitableRefs[ObjectRef[T]], *, timeout: float | None = None, _use_object_store: bool = False
) -> list[T]: ...


@overload
def get(
    object_refs: ObjectRefGenerator[T], *, timeout: float | None = None, _use_object_store: bool = False
) -> ObjectRefGenerator[T]: ...


def get(
    object_refs: ObjectRef[Any] | Sequence[ObjectRef[Any]] | WaitableRefs[ObjectRef[Any]] | ObjectRefGenerator[Any],
    *,
    timeout: float | None = None,
    _use_object_store: bool = False,
) -> Any:
    """Return the value of a ref, or the values of a list of refs. Arrays are read-only views of the object store.

    Args:
        object_refs: a ref or a list of refs, or what `progress` has made of one; a generator of refs is returned as it
            is.
        timeout: in seconds; None or -1 waits without limit, 0 does not wait.
        _use_object_store: device objects are read through the object store: as copies, also of tensors of this process.

    Returns:
        The value, or the list of values in the order of the refs.

    Raises:
        ValueError, TypeError: `object_refs` is neither a ref nor a list of refs.
        GetTimeoutError: a value did not arrive within `timeout`.
        RayTaskError: the task raised an exception; the error is also an instance of the exception's class.
        RayError: the object is lost, the task was cancelled, or the actor died.
    """
    process = current.process or require_session()
    if timeout is not None or _use_object_store:
        if timeout == -1:
            if _of_compiled_graph(object_refs):  # to it, no timeout means its default one
                return cast(Any, object_refs).get(-1)
            if isinstance(object_refs, list) and any(map(_of_compiled_graph, object_refs)):
                return _get_of_compiled_graph(object_refs, -1)
            timeout = None
        if not process.local.reading:
            return _get_with(process, object_refs, timeout, _use_object_store)
    if isinstance(object_refs, ObjectRef):
        return process.reader.get_one(object_refs, timeout)
    if not isinstance(object_refs, list):
        if isinstance(object_refs, ObjectRefGenerator):
            return object_refs
        if _of_compiled_graph(object_refs):
            return cast(Any, object_refs).get(timeout)
        if isinstance(object_refs, WaitableRefs):
            return get(object_refs.wait(timeout))
        raise ValueError(
            f"Invalid type of object refs, {type(object_refs)}, is given. "
            f"'object_refs' must either be an ObjectRef or a list of ObjectRefs.{process.diagnostics.hint(object_refs)}"
        )
    refs = list(object_refs)
    if set(map(type, refs)) != _REFS_ALONE:
        if any(map(_of_compiled_graph, refs)):
            return _get_of_compiled_graph(refs, timeout)
        for ref in refs:
            if not isinstance(ref, ObjectRef):
                raise TypeError(
                    f"Attempting to call `get` on the value {ref!r}, which is not an ray.ObjectRef."
                    f"{process.diagnostics.hint(ref)}"
                )
    return process.reader.get(refs, timeout) if refs else []


def _get_with(process: CoreWorker, object_refs: Any, timeout: float | None, copies: bool) -> Any:
    """`get`, while what reads tensors of other processes knows its options."""
    local = process.local
    local.reading = True
    try:
        local.deadline = None if timeout is None else monotonic() + timeout
        local.read_as = "copies" if copies else ""
        return get(object_refs, timeout=timeout)
    finally:
        local.reading, local.deadline, local.read_as = False, None, ""


def _of_compiled_graph(ref: Any) -> bool:
    """Return True for a `CompiledDAGRef`. Where there is one, the module of its class has been imported."""
    module = sys.modules.get("hpcray.graphs.compiled_dag_ref")
    return module is not None and isinstance(ref, module.CompiledDAGRef)


def _get_of_compiled_graph(refs: list[Any], timeout: float | None) -> list[Any]:
    if not all(map(_of_compiled_graph, refs)):
        raise ValueError(
            "Invalid type of object refs. 'object_refs' must be a list of CompiledDAGRefs if there is any "
            "CompiledDAGRef within it. "
        )
    return [ref.get(timeout) for ref in refs]


def put(value: T, *, replicas: int = 1, _owner: Any = None, _tensor_transport: str | None = None) -> ObjectRef[T]:
    """Store a value in the object store.

    Args:
        value: any value that cloudpickle can pickle, but no ref.
        replicas: number of nodes that keep a copy, this one included; the copies exist when `put` returns. Where fewer
            nodes have room, a warning is logged once. Values up to the inline limit are stored in this process, without
            replicas.
        _tensor_transport: the tensors in the value stay in this process until another one reads them; "auto", or
            another transport's name.

    Returns:
        The ref of the object.

    Raises:
        TypeError: the value is a ref, or does not pickle.
        ValueError: `replicas` is not positive.
        ObjectStoreFullError: no room became free within ten seconds, or the value is larger than the store.
    """
    if isinstance(value, ObjectRef):
        raise TypeError(
            "Calling 'put' on an ray.ObjectRef is not allowed. If you really want to do this, you can wrap the "
            "ray.ObjectRef in a list and call 'put' on it."
        )
    if replicas is _ONE and _owner is None and _tensor_transport is None:
        try:
            return (current.process or require_session()).put(value)
        except SerializationError as error:
            raise not_serializable("the put value %", value) from error
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise ValueError(f"replicas={replicas!r} is not a number of nodes; hint: 2 keeps a second copy on another node")
    if _owner is not None:
        raise ValueError(
            "The experimental `_owner` argument to `ray.put` has been removed in Ray 2.56. hint: the process that puts "
            "owns; let the actor that is to own the object call put()"
        )
    process = current.process or require_session()
    if transport := transport_of(_tensor_transport):
        extension = process.extensions.of_transport(transport)
        ref: ObjectRef[T] = process.put(extension.outgoing_value(value, transport, b""))
    else:
        ref = process.put(value)
    if replicas > 1:
        process.stores.replicator.replicate(ref, replicas)
    return ref


@overload
def wait(
    ray_waitables: Sequence[ObjectRef[T]],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
) -> tuple[list[ObjectRef[T]], list[ObjectRef[T]]]: ...


@overload
def wait(
    ray_waitables: Sequence[ObjectRef[Any] | ObjectRefGenerator[Any]],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
) -> tuple[list[Any], list[Any]]: ...


def wait(
    ray_waitables: Sequence[ObjectRef[Any] | ObjectRefGenerator[Any]],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
) -> tuple[list[Any], list[Any]]:
    """Wait until `num_returns` of the refs are ready, or until the timeout.

    Args:
        ray_waitables: list of distinct refs and generators. A generator is ready when its next ref is.
        num_returns: number of refs to wait for, at most the length of the list.
        timeout: in seconds; None waits without limit.
        fetch_local: also copy large values to this node's object store; a ref is then ready when its copy is here.

    Returns:
        (ready, not ready), each in the order of the argument. The first list has at most `num_returns` entries.

    Raises:
        TypeError: `ray_waitables` is not a list of refs. ValueError: duplicates, or `num_returns` is out of range.
    """
    process = current.process or require_session()
    if isinstance(ray_waitables, (ObjectRef, ObjectRefGenerator)):
        raise TypeError(f"{_LIST_EXPECTED}, got a single ray.ObjectRef or ray.ObjectRefGenerator {ray_waitables}")
    if not isinstance(ray_waitables, list):
        raise TypeError(f"{_LIST_EXPECTED}, got {type(ray_waitables)}")
    refs: list[Any] = ray_waitables
    if num_returns > 0 and (timeout is None or timeout >= 0):
        found = process.waits.wait_again(refs, num_returns, timeout, fetch_local)
        if found is not None:
            return found
    for ref in refs if set(map(type, refs)) != _REFS_ALONE else ():
        if not isinstance(ref, ObjectRef):
            if any(isinstance(item, ObjectRefGenerator) for item in refs):
                return _wait_for_next(refs, num_returns, timeout, fetch_local)
            raise TypeError(f"{_LIST_EXPECTED}, got list containing {type(ref)}")
    if timeout is not None and timeout < 0:
        raise ValueError(f"The 'timeout' argument must be nonnegative. Received {timeout}")
    if not refs:
        return [], []
    if len(set(map(_ident, refs))) != len(refs):
        raise ValueError("Wait requires a list of unique ray_waitables.")
    if num_returns <= 0:
        raise ValueError(f"Invalid number of objects to return {num_returns}.")
    if num_returns > len(refs):
        raise ValueError(
            "num_returns cannot be greater than the number of ray_waitables provided to ray.wait: "
            f"{num_returns} > {len(refs)}."
        )
    return process.waits.wait(refs, num_returns, timeout, fetch_local)


def _wait_for_next(
    waitables: list[Any], num_returns: int, timeout: float | None, fetch_local: bool
) -> tuple[list[Any], list[Any]]:
    """`wait` for a list with generators. A generator is ready when its next ref is, or when it has ended."""
    peeked = [item.peek() if isinstance(item, ObjectRefGenerator) else item for item in waitables]
    if len(set(map(id, waitables))) != len(waitables):
        raise ValueError("Wait requires a list of unique ray_waitables.")
    refs = [put(None) if ref is None else ref for ref in peeked]
    ready, _ = wait(refs, num_returns=num_returns, timeout=timeout, fetch_local=fetch_local)
    done = set(ready)
    pairs = list(zip(waitables, refs, strict=True))
    return [item for item, ref in pairs if ref in done], [item for item, ref in pairs if ref not in done]


def cancel(ref: ObjectRef[Any] | ObjectRefGenerator[Any], *, force: bool = False, recursive: bool = True) -> None:
    """Cancel a task or actor call. A queued one never runs; in a running task KeyboardInterrupt is raised.

    Args:
        ref: a result of the task, or its generator.
        force: kill the worker process of a running task.
        recursive: also cancel the tasks that the task has started.

    Raises:
        TypeError: `ref` is not a ref. ValueError: `force` with an actor call.
    """
    process = current.process or require_session()
    if isinstance(ref, ObjectRefGenerator):
        ref = ref.completed()
    if not isinstance(ref, ObjectRef):
        raise TypeError(f"ray.cancel() only supported for object refs. For actors, try ray.kill(). Got: {type(ref)}.")
    process.submitter.cancellation.cancel(ref, force, recursive)
