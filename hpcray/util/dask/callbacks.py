"""Callbacks of a Dask graph: before and after each of its tasks, in the driver and in the worker."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

from dask.callbacks import Callback

from hpcray.api.actor import get_actor
from hpcray.api.decorator import remote
from hpcray.api.objects import get, wait
from hpcray.runtime.core_worker.object_refs import ObjectRef

CBS = ("ray_presubmit", "ray_postsubmit", "ray_pretask", "ray_posttask", "ray_postsubmit_all", "ray_finish")
"""Names of the callbacks, as `RayDaskCallback` takes them; its methods have an underscore before them."""
PROGRESS_ACTOR = "_dask_on_ray_pb"
_POLL_INTERVAL = 0.1
_LAST_REPORTS = 1.0  # seconds that reports of nodes may come later than the values


class RayCallback(NamedTuple):
    """The callbacks of one `RayDaskCallback`; None for each that it does not have."""

    ray_presubmit: Any
    ray_postsubmit: Any
    ray_pretask: Any
    ray_posttask: Any
    ray_postsubmit_all: Any
    ray_finish: Any


class RayCallbacks(NamedTuple):
    """The callbacks of several `RayDaskCallback`s, by kind. Those before and after a task are as many, in one order."""

    ray_presubmit_cbs: Any
    ray_postsubmit_cbs: Any
    ray_pretask_cbs: Any
    ray_posttask_cbs: Any
    ray_postsubmit_all_cbs: Any
    ray_finish_cbs: Any


class RayDaskCallback(Callback):  # type: ignore[misc]
    """A callback of Dask's with further hooks, for graphs that `ray_dask_get` computes.

    Subclasses override the methods, or give functions: `RayDaskCallback(ray_finish=print)`. Use it in a `with` block.
    `ray_pretask` and `ray_posttask` run in workers, so a callback has to be pickled.

    Attributes:
        ray_active: the callbacks in force.
    """

    ray_active: ClassVar[set[RayCallback]] = set()

    def __init__(self, **kwargs: Any) -> None:
        for name in CBS:
            function = kwargs.pop(name, None)
            if function is not None:
                setattr(self, f"_{name}", function)
        super().__init__(**kwargs)

    @property
    def _ray_callback(self) -> RayCallback:
        return RayCallback(*(getattr(self, f"_{name}", None) for name in CBS))

    def __enter__(self) -> RayDaskCallback:
        self._ray_cm = add_ray_callbacks(self)
        self._ray_cm.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._ray_cm.__exit__(*args)

    def register(self) -> None:
        """Have the callback called until `unregister`."""
        RayDaskCallback.ray_active.add(self._ray_callback)
        super().register()

    def unregister(self) -> None:
        """Have it called no more."""
        RayDaskCallback.ray_active.remove(self._ray_callback)
        super().unregister()

    def _ray_presubmit(self, task: Any, key: Any, deps: dict[Any, Any]) -> Any:
        """Called before a task is submitted. A value other than None stands for the task's, which is not submitted.

        Args:
            task: the node of the graph. key: its key. deps: values or refs of what it depends on, by key.
        """

    def _ray_postsubmit(self, task: Any, key: Any, deps: dict[Any, Any], object_ref: ObjectRef[Any]) -> None:
        """Called when a task was submitted, whose value `object_ref` is."""

    def _ray_pretask(self, key: Any, object_refs: list[Any]) -> Any:
        """Called in the worker before a task. What it returns is given to `_ray_posttask`.

        Args:
            key: of the node. object_refs: the values of the refs that it depends on.
        """

    def _ray_posttask(self, key: Any, result: Any, pre_state: Any) -> None:
        """Called in the worker after a task, with its value and what `_ray_pretask` returned."""

    def _ray_postsubmit_all(self, object_refs: list[Any], dsk: Any) -> None:
        """Called when all tasks are submitted, with the refs of the keys that are computed, and the graph."""

    def _ray_finish(self, result: Any) -> None:
        """Called with the result of the graph."""


class add_ray_callbacks:
    """Context manager: callbacks in force inside of it."""

    def __init__(self, *callbacks: RayDaskCallback | RayCallback) -> None:
        self.callbacks = [normalize_ray_callback(each) for each in callbacks]
        RayDaskCallback.ray_active.update(self.callbacks)

    def __enter__(self) -> add_ray_callbacks:
        return self

    def __exit__(self, *args: Any) -> None:
        RayDaskCallback.ray_active.difference_update(self.callbacks)


def normalize_ray_callback(cb: RayDaskCallback | RayCallback) -> RayCallback:
    """Return the callbacks as a tuple.

    Raises:
        TypeError: it is neither of the two.
    """
    if isinstance(cb, RayDaskCallback):
        return cb._ray_callback
    if isinstance(cb, RayCallback):
        return cb
    raise TypeError("Callbacks must be either 'RayDaskCallback' or 'RayCallback' namedtuple")


def unpack_ray_callbacks(cbs: Iterable[RayCallback] | None) -> RayCallbacks:
    """Return the callbacks by kind; None for a kind that none of them has."""
    given = list(cbs or ())
    if not given:
        return RayCallbacks(*[()] * len(CBS))
    kinds: list[Any] = []
    for name, functions in zip(CBS, zip(*given, strict=True), strict=True):
        paired = name in ("ray_pretask", "ray_posttask")  # by their places: a gap has to stay
        kinds.append([function for function in functions if function or paired] or None)
    return RayCallbacks(*kinds)


@contextlib.contextmanager
def local_ray_callbacks(callbacks: Iterable[RayCallback] | None = None) -> Iterator[Any]:
    """Give the callbacks of a graph that is computed inside of the block; graphs inside of that one have none.

    Args:
        callbacks: None: those in force.
    """
    outer = RayDaskCallback.ray_active
    if callbacks is None:
        RayDaskCallback.ray_active = set()
    try:
        yield (outer if callbacks is None else callbacks) or ()
    finally:
        if callbacks is None:
            RayDaskCallback.ray_active = outer


class _Progress:
    """Actor class: when each node of a graph was submitted, began and ended."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._submitted: dict[Any, datetime] = {}
        self._began: dict[Any, datetime] = {}
        self._ended: dict[Any, datetime] = {}

    def submit(self, key: Any, deps: Any, now: datetime) -> None:
        """A node was submitted."""
        self._submitted[key] = now

    def task_scheduled(self, key: Any, now: datetime) -> None:
        """A node begins."""
        self._began[key] = now

    def finish(self, key: Any, now: datetime) -> None:
        """A node has ended."""
        self._ended[key] = now

    def result(self) -> tuple[int, int]:
        """Return the numbers of nodes submitted and ended."""
        return len(self._submitted), len(self._ended)

    def report(self) -> dict[Any, Any]:
        """Return the seconds that each node waited and ran, and the order of submission."""
        found: dict[Any, Any] = {}
        for key, ended in self._ended.items():
            began, submitted = self._began.get(key, ended), self._submitted.get(key, ended)
            found[key] = {
                "execution_time": (ended - began).total_seconds(),
                "scheduling_time": (began - submitted).total_seconds(),
            }
        found["submission_order"] = list(self._submitted.items())
        return found

    def ready(self) -> None:
        """Answer when the actor runs."""


class ProgressBarCallback(RayDaskCallback):
    """Counts the nodes of a graph in an actor, from which `compute(_ray_enable_progress_bar=True)` shows a bar."""

    def __init__(self) -> None:
        super().__init__()
        try:
            self.pb = get_actor(PROGRESS_ACTOR)
            get(self.pb.reset.remote())
        except ValueError:
            self.pb = remote(num_cpus=0)(_Progress).options(name=PROGRESS_ACTOR).remote()
            get(self.pb.ready.remote())

    def _ray_postsubmit(self, task: Any, key: Any, deps: dict[Any, Any], object_ref: ObjectRef[Any]) -> None:
        self.pb.submit.remote(key, None, datetime.now())

    def _ray_pretask(self, key: Any, object_refs: list[Any]) -> None:
        self.pb.task_scheduled.remote(key, datetime.now())

    def _ray_posttask(self, key: Any, result: Any, pre_state: Any) -> None:
        self.pb.finish.remote(key, datetime.now())

    def _ray_finish(self, result: Any) -> None:
        print("All tasks are completed.")


def show_progress(refs: list[ObjectRef[Any]]) -> None:
    """Show a bar until all these refs are ready, then the times of the nodes."""
    from pprint import pprint

    from tqdm import tqdm

    tracker, deadline = get_actor(PROGRESS_ACTOR), math.inf
    with tqdm(total=get(tracker.result.remote())[0], position=0) as bar:
        while True:
            ready, _ = wait(refs, num_returns=len(refs), timeout=_POLL_INTERVAL, fetch_local=False)
            ended = get(tracker.result.remote())[1]
            bar.update(ended - bar.n)
            if len(ready) == len(refs):
                deadline = min(deadline, time.monotonic() + _LAST_REPORTS)
                if ended >= bar.total or time.monotonic() >= deadline:
                    break
    pprint(get(tracker.report.remote()))
