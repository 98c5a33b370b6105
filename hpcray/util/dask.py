"""Dask collections computed by tasks of the job: each node of the graph is a task, each edge a ref."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

try:
    import dask
    from dask._task_spec import Alias, DataNode, GraphNode, Task, convert_legacy_graph
    from dask.order import order
    from dask.utils import funcname
except ImportError as error:
    raise ImportError(f"hpcray.util.dask needs dask 2024.12 or newer ({error}); hint: pip install dask") from error

from hpcray.api.decorator import remote
from hpcray.api.objects import get
from hpcray.runtime.core_worker.object_refs import ObjectRef

__all__ = ["disable_dask_on_ray", "enable_dask_on_ray", "ray_dask_get", "ray_dask_get_sync"]

Graph = Mapping[Hashable, GraphNode]
scheduler = sys.modules[f"{__name__}.scheduler"] = sys.modules[__name__]  # Ray's module of this name


def ray_dask_get(
    dsk: Any, keys: Any, *, ray_remote_args: Mapping[str, Any] | None = None, ray_persist: bool = False, **_: Any
) -> Any:
    """Compute keys of a Dask graph, with a task for every node of the graph.

    Use it as `collection.compute(scheduler=ray_dask_get)`, or for all collections with `enable_dask_on_ray()`.

    Args:
        dsk: the graph.
        keys: one key, or lists of keys, nested to any depth.
        ray_remote_args: options of all tasks, as for `@remote`. Annotations of a layer (`dask.annotate(...)` with
            `ray_remote_args={...}`) take precedence.
        ray_persist: return refs instead of values; further graphs can be built from them.

    Returns:
        The values in the shape of `keys`.

    Raises:
        RayTaskError: a node of the graph raised; also an instance of its exception's class.
        ValueError: the graph has a cycle.
    """
    graph, annotations = _read(dsk), _annotations(dsk)
    targets = list(dict.fromkeys(_flat(keys)))
    done: dict[Hashable, Any] = {}
    common = dict(ray_remote_args or {})
    for key in _sorted(graph, targets):
        done[key] = _started(graph[key], done, {**common, **annotations.get(key, {})})
    found = done if ray_persist else _values({key: done[key] for key in targets})
    return _shaped(keys, found)


def ray_dask_get_sync(dsk: Any, keys: Any, **_: Any) -> Any:
    """Compute keys of a Dask graph in this process, one node after the other, for debugging."""
    graph = _read(dsk)
    done: dict[Hashable, Any] = {}
    for key in _sorted(graph, list(_flat(keys))):
        node = _with_values(graph[key])
        done[key] = node({name: done[name] for name in node.dependencies})
    return _shaped(keys, done)


def enable_dask_on_ray() -> Any:
    """Make `ray_dask_get` Dask's default scheduler, or its scheduler inside a `with` block."""
    return dask.config.set(scheduler=ray_dask_get)


def disable_dask_on_ray() -> Any:
    """Make Dask's own schedulers the default again."""
    return dask.config.set(scheduler=None)


def _compute(node: GraphNode, names: list[Hashable], *values: Any) -> Any:
    return _with_values(node)(dict(zip(names, values, strict=True)))


_task = remote(_compute)


def _started(node: GraphNode, done: Mapping[Hashable, Any], options: dict[str, Any]) -> Any:
    """Return the ref of a node's value, or the value itself of a node that contains it."""
    if isinstance(node, Alias):
        return done[node.target]
    if isinstance(node, DataNode):
        return node()
    names = list(node.dependencies)
    task = _task.options(**{"name": f"dask:{funcname(getattr(node, 'func', node))}", **options})
    return task.remote(node, names, *[done[name] for name in names])


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
    """Return the annotation `ray_remote_args` by key."""
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


def _values(found: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    refs = {key: value for key, value in found.items() if isinstance(value, ObjectRef)}
    return {**found, **dict(zip(refs, get(list(refs.values())), strict=True))}
