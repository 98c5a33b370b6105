"""The joblib backend: each batch of calls is a task."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle
import numpy as np
from joblib._parallel_backends import AutoBatchingMixin, FallbackToBackend, ParallelBackendBase, SequentialBackend
from joblib.parallel import BatchedCalls

from hpcray.api.objects import put
from hpcray.common.task_errors import RayTaskError
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.util.dispatcher import total_cpus
from hpcray.util.executor import Executor

_SHARE_FROM = 1 << 20
"""Bytes from which an array is stored once for all calls and arrives read-only, as in joblib's own processes."""


if not hasattr(ParallelBackendBase, "retrieve_result"):
    raise ImportError("this one has no ParallelBackendBase.retrieve_result")


class RayBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs the calls of `joblib.Parallel` as tasks, `n_jobs` at a time at most; -1 means all CPUs of the cluster.

    Args:
        ray_remote_args: options of the tasks, as for `@remote`.
        backend_kwargs: joblib's own.
    """

    default_n_jobs = -1
    uses_threads = False
    supports_sharedmem = False

    def __init__(self, *args: Any, ray_remote_args: dict[str, Any] | None = None, **backend_kwargs: Any) -> None:
        super().__init__(*args, **backend_kwargs)
        self._options = dict(ray_remote_args or {})
        self._executor: Executor | None = None
        self._shared: dict[int, tuple[Any, ObjectRef[Any]]] = {}

    @property
    def supports_retrieve_callback(self) -> bool:
        """False in a task, which waits for results itself so that it lends its CPU."""
        return current.worker is None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of concurrent calls."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if n_jobs > 0:
            return n_jobs
        return max(1, int(total_cpus()) + 1 + n_jobs)

    def configure(
        self, n_jobs: int = 1, parallel: Any = None, ray_remote_args: dict[str, Any] | None = None, **_: Any
    ) -> int:
        """Prepare for a `Parallel`, whose `ray_remote_args` take the place of the backend's."""
        n_jobs = self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        if ray_remote_args is not None:
            self._options = dict(ray_remote_args)
        self._executor = Executor(n_jobs, **self._options)
        return n_jobs

    def submit(self, func: Any, callback: Callable[[Any], object] | None = None) -> Any:
        assert self._executor is not None
        shared: list[ObjectRef[Any]] = []
        future = self._executor.submit(_run, cloudpickle.dumps(self._lightened(func, shared)), *shared)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Any) -> Any:
        """Return the results of a batch that has ended."""
        return self.retrieve_result(out)

    def retrieve_result(self, out: Any, timeout: float | None = None) -> Any:
        """Wait for the results of a batch."""
        try:
            return pickle.loads(out.result(timeout))
        except RayTaskError as error:
            _raise_cause(error)

    def stop_call(self) -> None:
        """Release the shared arrays at the end of a `Parallel`."""
        self._shared.clear()

    def terminate(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._executor = None
        self._shared.clear()
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel running and queued batches."""
        if self._executor is not None:
            self._executor.terminate()
        self._executor = None
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

    def _lightened(self, call: Any, shared: list[ObjectRef[Any]]) -> Any:
        """Replace the large arrays of a batch by placeholders, and append their refs to `shared`."""
        if not isinstance(call, BatchedCalls):
            return call
        light = copy.copy(call)
        light.items = _with_arguments(call.items, lambda value: self._stand_in(value, shared))
        return light

    def _stand_in(self, value: Any, shared: list[ObjectRef[Any]]) -> Any:
        if type(value) is not np.ndarray or value.nbytes < _SHARE_FROM or value.dtype.hasobject:
            return value
        known = self._shared.get(id(value))
        if known is None:
            known = self._shared[id(value)] = (value, put(value))
        if known[1] not in shared:
            shared.append(known[1])
        return _Shared(shared.index(known[1]))


class _Shared:
    """Placeholder of an array that is passed as a ref beside the batch."""

    def __init__(self, index: int) -> None:
        self.index = index


def _run(blob: bytes, *shared: Any) -> bytes:
    """Run a batch in a worker. Arguments and results are pickled in band, so that they arrive writable."""
    call = pickle.loads(blob)
    if shared:
        call.items = _with_arguments(call.items, lambda value: shared[value.index] if type(value) is _Shared else value)
    return cloudpickle.dumps(call())  # type: ignore[no-any-return]


def _with_arguments(items: list[Any], replace: Callable[[Any], Any]) -> list[Any]:
    """Return the calls of a batch with each argument replaced by `replace(argument)`."""
    return [
        (function, tuple(map(replace, args)), {name: replace(value) for name, value in kwargs.items()})
        for function, args, kwargs in items
    ]


def _raise_cause(error: RayTaskError) -> NoReturn:
    raise error.cause from error
