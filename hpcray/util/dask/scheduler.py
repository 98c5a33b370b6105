"""The schedulers: a graph computed by tasks of the job, or in this process."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dask
from dask._task_spec import Alias, DataNode, GraphNode, Task, convert_legacy_graph
from dask.callbacks import local_callbacks, unpack_callbacks
from dask.order import order
from dask.utils import funcname

from hpcray.api.decorator import remote
from hpcray.api.objects import get, put
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.util.dask.callbacks import (
    RayCallbacks,
    local_ray_callbacks,
    normalize_ray_callback,
    show_progress,
    unpack_ray_callbacks,
)

Graph = Mapping[Hashable, GraphNode]
TOP_LEVEL_RESOURCES_ERR_MSG = (
    'Use ray_remote_args={"resources": {...}} instead of resources={...} to specify required Ray task resources; see '
    "https://docs.ray.io/en/master/ray-core/package-ref.html#ray-remote."
)


def ray_dask_get(
    dsk: Any,
    keys: Any,
    *,
    ray_remote_args: Mapping[str, Any] | None = None,
    ray_persist: bool = False,
    ray_callbacks: Iterable[Any] | None = None,
    _ray_enable_progress_bar: bool = False,
    **options: Any,
) -> Any:
    """Compute keys of a Dask graph, with a task for every node of the graph.

    Use it as `collection.compute(scheduler=ray_dask_get)`, or for all collections with `enable_dask_on_ray()`.

    Args:
        dsk: the graph.
        keys: one key, or lists of keys, nested to any depth.
        ray_remote_args: options of all tasks, as for `@remote`. Annotations of a layer (`dask.annotate(...)` with
            `ray_remote_args={...}`) take precedence.
        ray_persist: return refs instead of values; further graphs can be built from them.
        ray_callbacks: instead of those in force (`RayDaskCallback`).
        _ray_enable_progress_bar: show a bar, which a `ProgressBarCallback` in force counts for.
        options: Dask's for schedulers; those for threads (`num_workers`, `pool`) have no effect.

    Returns:
        The values in the shape of `keys`.

    Raises:
        RayTaskError: a node of the graph raised; also an instance of its exception's class.
        ValueError: the graph has a cycle, or `resources` are given beside `ray_remote_args`.
    """
    common = _common_options(options, ray_remote_args)
    annotations = _annotations(dsk)

    def start(node: GraphNode, key: Hashable, deps: dict[Hashable, Any], hooks: RayCallbacks) -> Any:
        task = _task.options(
            **{"name": f"dask:{funcname(getattr(node, 'func', node))}", **common, **annotations.get(key, {})}
        )
        around = None
        if hooks.ray_pretask_cbs or hooks.ray_posttask_cbs:
            around = hooks.ray_pretask_cbs, hooks.ray_posttask_cbs, key
        return task.remote(node, list(deps), around, *deps.values())

    def values(found: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        refs = {key: value for key, value in found.items() if isinstance(value, ObjectRef)}
        if _ray_enable_progress_bar and refs:
            show_progress(list(refs.values()))
        return {**found, **dict(zip(refs, get(list(refs.values())), strict=True))}

    return _run(dsk, keys, start, None if ray_persist else values, ray_callbacks)


def ray_dask_get_sync(
    dsk: Any, keys: Any, *, ray_persist: bool = False, ray_callbacks: Iterable[Any] | None = None, **_: Any
) -> Any:
    """Compute keys of a Dask graph in this process, one node after the other, for debugging."""

    def start(node: GraphNode, key: Hashable, deps: dict[Hashable, Any], hooks: RayCallbacks) -> Any:
        around = hooks.ray_pretask_cbs, hooks.ray_posttask_cbs, key
        value = _compute(node, list(deps), around, *(_with_values(value) for value in deps.values()))
        return put(value) if ray_persist or hooks.ray_postsubmit_cbs else value

    def values(found: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        return {key: _with_values(value) for key, value in found.items()}

    return _run(dsk, keys, start, None if ray_persist else values, ray_callbacks)


def enable_dask_on_ray(shuffle: str | None = "tasks", use_shuffle_optimization: bool | None = True) -> Any:
    """Make `ray_dask_get` Dask's default scheduler, or its scheduler inside a `with` block.

    Args:
        shuffle: the way of Dask's shuffles; "disk" needs a file system that all nodes see.
        use_shuffle_optimization: has no effect: Dask's shuffle needs none since 2025.1.
    """
    return dask.config.set({"scheduler": ray_dask_get, "dataframe.shuffle.method": shuffle})


def disable_dask_on_ray() -> Any:
    """Make Dask's own schedulers the default again."""
    return dask.config.set({"scheduler": None, "dataframe.shuffle.method": None})


def _run(
    dsk: Any,
    keys: Any,
    start: Callable[[GraphNode, Hashable, dict[Hashable, Any], RayCallbacks], Any],
    values: Callable[[Mapping[Hashable, Any]], dict[Hashable, Any]] | None,
    ray_callbacks: Iterable[Any] | None,
) -> Any:
    """Start all nodes in order, then return the values of the keys; the values themselves if `values` is None."""
    graph = _read(dsk)
    targets = list(dict.fromkeys(_flat(keys)))
    done: dict[Hashable, Any] = {}
    given = None if ray_callbacks is None else [normalize_ray_callback(each) for each in ray_callbacks]
    with local_ray_callbacks(given) as active, _dask_callbacks(graph) as ended:
        hooks = unpack_ray_callbacks(active)
        for key in _sorted(graph, targets):
            done[key] = _started(graph[key], key, done, start, hooks)
            if ended is not None:
                ended(key, done[key])
        for callback in hooks.ray_postsubmit_all_cbs or ():
            callback(_shaped(keys, done), dict(graph))
        found = {key: done[key] for key in targets}
        done.clear()  # what only other nodes need is freed when they have had it
        result = _shaped(keys, found if values is None else values(found))
        for callback in hooks.ray_finish_cbs or ():
            callback(result)
    return result


def _started(
    node: GraphNode,
    key: Hashable,
    done: Mapping[Hashable, Any],
    start: Callable[[GraphNode, Hashable, dict[Hashable, Any], RayCallbacks], Any],
    hooks: RayCallbacks,
) -> Any:
    """Return the ref of a node's value, or the value itself of a node that contains it."""
    if isinstance(node, DataNode):
        return node()
    deps = {name: done[name] for name in node.dependencies}
    for answer in [callback(node, key, deps) for callback in hooks.ray_presubmit_cbs or ()]:
        if answer is not None:
            return answer
    if isinstance(node, Alias):
        return done[node.target]
    found = start(node, key, deps, hooks)
    for callback in hooks.ray_postsubmit_cbs or ():
        callback(node, key, deps, found)
    return found


@contextmanager
def _dask_callbacks(graph: Graph) -> Iterator[Callable[[Hashable, Any], None] | None]:
    """Call Dask's own callbacks, such as its progress bar, while a graph is submitted. Gives a function for the end of
    a node, which is its submission; None if there are no callbacks."""
    with local_callbacks() as callbacks:
        if not callbacks:
            yield None
            return
        begin, begun, before, after, finish = unpack_callbacks(callbacks)
        dependencies = {key: set(node.dependencies) for key, node in graph.items()}
        state: dict[str, Any] = {
            "cache": {}, "dependencies": dependencies, "finished": set(), "ready": list(graph), "running": set(),
            "waiting": {}, "released": set(),
        }  # fmt: skip
        for callback in begin:
            callback(graph)
        for callback in begun:
            callback(graph, state)

        def ended(key: Hashable, value: Any) -> None:
            for callback in before:
                callback(key, graph, state)
            state["cache"][key] = value
            state["finished"].add(key)
            state["ready"].remove(key)
            for callback in after:
                callback(key, value, graph, state, 0)

        failed = True
        try:
            yield ended
            failed = False
        finally:
            for callback in finish:
                callback(graph, state, failed)


def _common_options(options: Mapping[str, Any], ray_remote_args: Mapping[str, Any] | None) -> dict[str, Any]:
    annotations = dask.get_annotations()
    if "resources" in options or "resources" in annotations:
        raise ValueError(TOP_LEVEL_RESOURCES_ERR_MSG)
    return {**(ray_remote_args or {}), **annotations.get("ray_remote_args", {})}


def _compute(node: GraphNode, names: Sequence[Hashable], around: tuple[Any, Any, Hashable] | None, *values: Any) -> Any:
    if around is None:
        return _with_values(node)(dict(zip(names, values, strict=True)))
    before, after, key = around
    count = max(len(before or ()), len(after or ()))
    states = [None if callback is None else callback(key, list(values)) for callback in before or [None] * count]
    result = _with_values(node)(dict(zip(names, values, strict=True)))
    for callback, state in zip(after or [None] * count, states, strict=True):
        if callback is not None:
            callback(key, result, state)
    return result


_task = remote(_compute)


def _sorted(graph: Graph, targets: list[Hashable]) -> list[Hashable]:
    """Return the keys and all of their dependencies in topological order, otherwise in Dask's preferred order."""
    rank = order(graph)
    found: dict[Hashable, None] = {}
    inside: set[Hashable] = set()
    stack = sorted(set(targets), key=rank.__getitem__, reverse=True)
    while stack:
        key = stack[-1]
        if key in found:
            stack.pop()
            continue
        needed = [name for name in graph[key].dependencies if name not in found]
        if not needed:
            found[key] = None
            inside.discard(key)
            stack.pop()
            continue
        if key in inside:
            raise ValueError(f"the graph has a cycle through {key!r}")
        inside.add(key)
        stack += sorted(needed, key=rank.__getitem__, reverse=True)
    return list(found)


def _read(dsk: Any) -> Graph:
    """Convert a graph of any kind (a dict, layers, or an expression) to a dict of nodes."""
    graph = dsk if isinstance(dsk, Mapping) else dsk.__dask_graph__()
    converted: Graph = convert_legacy_graph(dict(graph))
    return converted


def _annotations(dsk: Any) -> dict[Hashable, dict[str, Any]]:
    """Return the annotation `ray_remote_args` by key.

    Raises:
        ValueError: a layer is annotated with `resources`.
    """
    if hasattr(dsk, "__dask_annotations__"):
        annotations = dsk.__dask_annotations__()
        if "resources" in annotations:
            raise ValueError(TOP_LEVEL_RESOURCES_ERR_MSG)
        return annotations.get("ray_remote_args", {})  # type: ignore[no-any-return]
    found: dict[Hashable, dict[str, Any]] = {}
    for layer in getattr(dsk, "layers", {}).values():
        if "resources" in (layer.annotations or {}):
            raise ValueError(TOP_LEVEL_RESOURCES_ERR_MSG)
        options = (layer.annotations or {}).get("ray_remote_args")
        if options:
            found.update(dict.fromkeys(layer, options))
    return found


def _flat(keys: Any) -> Iterable[Hashable]:
    if not isinstance(keys, list):
        yield keys
        return
    for key in keys:
        yield from _flat(key)


def _shaped(keys: Any, found: Mapping[Hashable, Any]) -> Any:
    return [_shaped(key, found) for key in keys] if isinstance(keys, list) else found[keys]


def _with_values(part: Any) -> Any:
    """Replace the refs of a persisted graph by values. In fused nodes the refs are nested."""
    if isinstance(part, ObjectRef):
        return get(part)
    if isinstance(part, DataNode):
        return DataNode(part.key, get(part.value)) if isinstance(part.value, ObjectRef) else part
    if isinstance(part, Task):
        args = tuple(_with_values(arg) for arg in part.args)
        if any(new is not old for new, old in zip(args, part.args, strict=True)):
            part = part.copy()
            part.args = args
    elif type(part) is dict and any(isinstance(value, GraphNode) for value in part.values()):
        nodes = {key: _with_values(value) for key, value in part.items()}
        return nodes if any(nodes[key] is not part[key] for key in part) else part
    return part


# ------------------------------------------------------------ persistence
# `persist` of Dask's collections: what is computed stays in the object store, and the collection has refs to it.
#
# And the optimisation of data frames, of which nothing is left to be done.


_dask_persist = dask.persist


def ray_dask_persist(*args: Any, **kwargs: Any) -> Any:
    """Compute collections, leave their parts in the object store, and return collections of refs to them.

    As `dask.persist`, which does the same where a scheduler of hpcray's is in force.
    """
    return _dask_persist(*args, **{**kwargs, "ray_persist": True})


def _keeping_refs(persist: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler is not given the difference between `compute` and `persist` by Dask, only by this, as in Ray."""

    @functools.wraps(persist)
    def keep_refs(*args: Any, **kwargs: Any) -> Any:
        scheduler = kwargs.get("scheduler") or dask.config.get("scheduler", None)
        if callable(scheduler):  # not one of Dask's own, which have names, nor a client of dask.distributed
            kwargs.setdefault("ray_persist", True)
        return persist(*args, **kwargs)

    return keep_refs


def dataframe_optimize(dsk: Any, keys: Any, **kwargs: Any) -> None:
    """Warn, as Ray does, and leave the graph as it is: the shuffle that Ray rewrites is gone from Dask since 2025.1."""
    warnings.warn(
        "Custom dataframe shuffle optimization only works on dask>=2024.11.0,<2025.1.0, you are on version "
        f"{dask.__version__}. Doing no additional optimization aside from the default one.",
        stacklevel=2,
    )


dask.persist = _keeping_refs(_dask_persist)
dask.base.DaskMethodsMixin.persist = _keeping_refs(dask.base.DaskMethodsMixin.persist)


# ------------------------------------------------------------ common
# The refs inside of values that are nested in each other.


def unpack_object_refs(*args: Any) -> tuple[list[ObjectRef[Any]], Callable[[Sequence[Any]], tuple[Any, ...]]]:
    """Find the refs in lists, tuples, sets, dicts and dataclasses, nested to any depth.

    Returns:
        The refs, each once, and a function that takes their values, in this order, and returns `args` with the values
        in the places of the refs.
    """
    places: dict[ObjectRef[Any], int] = {}
    kept = [_unpacked(arg, places) for arg in args]

    def repack(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(_packed(each, values) for each in kept)

    return list(places), repack


class _Place:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Made:
    """A container: how it is made of its parts."""

    __slots__ = ("make", "parts")

    def __init__(self, make: Callable[[list[Any]], Any], parts: list[Any]) -> None:
        self.make, self.parts = make, parts


def _unpacked(value: Any, places: dict[ObjectRef[Any], int]) -> Any:
    if isinstance(value, ObjectRef):
        return _Place(places.setdefault(value, len(places)))
    kind: Any = list if isinstance(value, Iterator) else type(value)
    if kind in (list, tuple, set):
        return _Made(kind, [_unpacked(part, places) for part in value])
    if kind in (dict, OrderedDict):
        return _Made(kind, [_Made(tuple, [_unpacked(part, places) for part in item]) for item in value.items()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [_unpacked(getattr(value, name), places) for name in names]
        return _Made(lambda parts: kind(**dict(zip(names, parts, strict=True))), parts)
    return value


def _packed(kept: Any, values: Sequence[Any]) -> Any:
    if type(kept) is _Place:
        return values[kept.index]
    if type(kept) is _Made:
        return kept.make([_packed(part, values) for part in kept.parts])
    return kept
