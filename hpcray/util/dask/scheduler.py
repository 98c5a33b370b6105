"""A Dask scheduler: a node of the graph is a task, an edge is a ref."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import dask
from dask._task_spec import Alias, DataNode, GraphNode, Task, convert_legacy_graph
from dask.order import order
from dask.utils import funcname

from hpcray.api.decorator import remote
from hpcray.api.objects import get
from hpcray.runtime.refs import ObjectRef

Graph = Mapping[Hashable, GraphNode]


def ray_dask_get(
    dsk: Any,
    keys: Any,
    *,
    ray_remote_args: Mapping[str, Any] | None = None,
    ray_persist: bool = False,
    **_: Any,
) -> Any:
    """Compute keys of a Dask graph. Every node is a task; what it needs travels between the nodes of the job by itself.

    Use it as `collection.compute(scheduler=ray_dask_get)`, or for all with `enable_dask_on_ray()`.

    Args:
        dsk: the graph.
        keys: one key, or lists of keys, nested to any depth.
        ray_remote_args: options of all tasks, as for `@remote`. Annotations of a layer (`dask.annotate(...)` with
            `ray_remote_args={...}`) count more.
        ray_persist: return refs instead of values; a graph made of them goes on from there.

    Returns:
        The values in the shape of `keys`.

    Raises:
        Whatever a node of the graph raised (also a RayTaskError). ValueError: the graph has a cycle.
    """
    graph, annotations = _read(dsk), _annotations(dsk)
    wanted = list(dict.fromkeys(_flat(keys)))
    done: dict[Hashable, Any] = {}
    common = dict(ray_remote_args or {})
    for key in _sorted(graph, wanted):
        done[key] = _started(graph[key], done, {**common, **annotations.get(key, {})})
    found = done if ray_persist else _values({key: done[key] for key in wanted})
    return _shaped(keys, found)


def ray_dask_get_sync(dsk: Any, keys: Any, **_: Any) -> Any:
    """Compute keys of a Dask graph here, one node after the other: for finding errors.

    Raises:
        Whatever a node of the graph raised.
    """
    graph = _read(dsk)
    done: dict[Hashable, Any] = {}
    for key in _sorted(graph, list(_flat(keys))):
        node = _with_values(graph[key])
        done[key] = node({name: done[name] for name in node.dependencies})
    return _shaped(keys, done)


def enable_dask_on_ray() -> Any:
    """Compute all Dask collections with `ray_dask_get` from now on, or inside of a `with`."""
    return dask.config.set(scheduler=ray_dask_get)


def disable_dask_on_ray() -> Any:
    """Compute Dask collections with Dask's own schedulers again."""
    return dask.config.set(scheduler=None)


def _compute(node: GraphNode, names: list[Hashable], *values: Any) -> Any:
    """Run a node; the values of the nodes that it needs have arrived."""
    return _with_values(node)(dict(zip(names, values, strict=True)))


_task = remote(_compute)


def _started(node: GraphNode, done: Mapping[Hashable, Any], options: dict[str, Any]) -> Any:
    """The ref of a node's value, or the value of one that holds it."""
    if isinstance(node, Alias):
        return done[node.target]
    if isinstance(node, DataNode):
        return node()
    names = list(node.dependencies)
    task = _task.options(**{"name": f"dask:{funcname(getattr(node, 'func', node))}", **options})
    return task.remote(node, names, *[done[name] for name in names])


def _sorted(graph: Graph, wanted: list[Hashable]) -> list[Hashable]:
    """What the wanted keys need, each after what it needs itself, in the order that Dask finds best otherwise."""
    rank = order(graph)
    found: dict[Hashable, None] = {}
    inside: set[Hashable] = set()
    stack = sorted(set(wanted), key=rank.__getitem__, reverse=True)
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
    """A graph of any kind: a dict, layers, or an expression that makes one."""
    graph = dsk if isinstance(dsk, Mapping) else dsk.__dask_graph__()
    converted: Graph = convert_legacy_graph(dict(graph))
    return converted


def _annotations(dsk: Any) -> dict[Hashable, dict[str, Any]]:
    """The annotation `ray_remote_args`, by key."""
    if hasattr(dsk, "__dask_annotations__"):
        return dsk.__dask_annotations__().get("ray_remote_args", {})  # type: ignore[no-any-return]
    found: dict[Hashable, dict[str, Any]] = {}
    for layer in getattr(dsk, "layers", {}).values():
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
    """A node with values for the refs of a persisted graph: where nodes were fused, they are deep inside."""
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


def _values(found: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """The same with the values of all refs, asked for together."""
    refs = {key: value for key, value in found.items() if isinstance(value, ObjectRef)}
    return {**found, **dict(zip(refs, get(list(refs.values())), strict=True))}
