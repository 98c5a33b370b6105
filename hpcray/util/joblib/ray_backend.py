"""The joblib backend: a batch of calls is a task."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle
import numpy as np
from joblib._parallel_backends import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)
from joblib.parallel import BatchedCalls

from hpcray.api.context import cluster_resources
from hpcray.api.objects import put
from hpcray.base.errors import RayTaskError
from hpcray.executor import Executor
from hpcray.runtime.refs import ObjectRef, current

_SHARE_FROM = 1 << 20
"""Bytes from which an array is stored once for all calls, and arrives read-only, as joblib's own processes have it."""


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
        """Not inside of a task: it must wait for results itself, so that its CPU is lent."""
        return current.worker is None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many calls run at a time."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        if n_jobs > 0:
            return n_jobs
        return max(1, int(cluster_resources().get("CPU", 1)) + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        """Get ready for one `Parallel`."""
        n_jobs = self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        self._executor = Executor(n_jobs, **self._options)
        return n_jobs

    def submit(self, func: Any, callback: Callable[[Any], object] | None = None) -> Any:
        """Start a batch."""
        assert self._executor is not None
        shared: list[ObjectRef[Any]] = []
        future = self._executor.submit(_run, cloudpickle.dumps(self._lightened(func, shared)), *shared)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, out: Any) -> Any:
        """The results of a batch that has ended."""
        return self.retrieve_result(out)

    def retrieve_result(self, out: Any, timeout: float | None = None) -> Any:
        """Wait for the results of a batch."""
        try:
            return pickle.loads(out.result(timeout))
        except RayTaskError as error:
            _raise_cause(error)

    def stop_call(self) -> None:
        """The calls of a `Parallel` have ended."""
        self._shared.clear()

    def terminate(self) -> None:
        """Nothing more is to come."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._executor = None
        self._shared.clear()
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel what runs and what waits."""
        if self._executor is not None:
            self._executor.terminate()
        self._executor = None
        if ensure_ready:
            self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

    def _lightened(self, call: Any, shared: list[ObjectRef[Any]]) -> Any:
        """The batch without its large arrays, which are put into `shared`."""
        if not isinstance(call, BatchedCalls):
            return call
        light = copy.copy(call)
        light.items = [
            (
                function,
                tuple(self._stand_in(value, shared) for value in args),
                {name: self._stand_in(value, shared) for name, value in kwargs.items()},
            )
            for function, args, kwargs in call.items
        ]
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
    """Stands for an array that travels beside the batch."""

    def __init__(self, index: int) -> None:
        self.index = index


def _run(blob: bytes, *shared: Any) -> bytes:
    """Run a batch in a worker. Both ways are pickled in band, so that what arrives can be written to."""
    call = pickle.loads(blob)
    if shared:
        call.items = [
            (
                function,
                tuple(_real(value, shared) for value in args),
                {name: _real(value, shared) for name, value in kwargs.items()},
            )
            for function, args, kwargs in call.items
        ]
    return cloudpickle.dumps(call())  # type: ignore[no-any-return]


def _real(value: Any, shared: tuple[Any, ...]) -> Any:
    return shared[value.index] if type(value) is _Shared else value


def _raise_cause(error: RayTaskError) -> NoReturn:
    raise error.cause from error
