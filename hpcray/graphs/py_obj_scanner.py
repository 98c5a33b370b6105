"""What nodes of graphs have beside their arguments, nodes that are nested in arguments, and nodes as text."""

from __future__ import annotations

import io
import pickle
from abc import ABC
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import cloudpickle

# ------------------------------------------------------------ base
# The mark of nodes of graphs, for modules that nodes are made of.


class DAGNodeBase(ABC):  # a mark: the methods are in `DAGNode`
    """Any node of a graph: what `py_obj_scanner` finds in arguments."""

    _stable_uuid: str
    _bound_args: Any
    _bound_kwargs: Any
    _bound_options: Any
    _bound_other_args_to_resolve: Any


# ------------------------------------------------------------ py obj scanner


Source = TypeVar("Source")
Target = TypeVar("Target")

_instances: dict[int, _PyObjScanner[Any, Any]] = {}
"""The scanners at work, by id: a pickle can name one by a number only."""


def _get_node(instance_id: int, node_index: int) -> Any:
    return _instances[instance_id]._replace_index(node_index)


class _PyObjScanner(cloudpickle.CloudPickler, Generic[Source, Target]):  # type: ignore[misc]
    """Finds the objects of some classes in a value, and makes copies of the value with others in their places.

    Args:
        source_type: the class or classes to look for.
    """

    def __init__(self, source_type: Any = DAGNodeBase) -> None:
        self.source_type = source_type
        self._buf = io.BytesIO()
        self._found: list[Any] | None = None
        self._replace_table: Mapping[Any, Any] = {}
        _instances[id(self)] = self
        super().__init__(self._buf)

    def reducer_override(self, obj: Any) -> Any:
        """Leave the objects that are looked for out of the pickle."""
        if isinstance(obj, self.source_type):
            assert self._found is not None
            self._found.append(obj)
            return _get_node, (id(self), len(self._found) - 1)
        return super().reducer_override(obj)

    def find_nodes(self, obj: Any) -> list[Any]:
        """Return what was looked for and is in `obj`, in the order of appearance. A scanner scans once."""
        assert self._found is None, "find_nodes cannot be called twice on the same PyObjScanner instance."
        self._found = []
        self.dump(obj)
        return self._found

    def replace_nodes(self, table: Mapping[Any, Any]) -> Any:
        """Return a copy of the value that was scanned, with `table[found]` in the place of each `found`."""
        assert self._found is not None, "find_nodes must be called first"
        self._replace_table = table
        self._buf.seek(0)
        return pickle.load(self._buf)

    def _replace_index(self, i: int) -> Any:
        assert self._found is not None
        return self._replace_table[self._found[i]]

    def clear(self) -> None:
        """Forget the scanner."""
        _instances.pop(id(self), None)

    def __del__(self) -> None:
        self.clear()


def nested_nodes(obj: Any) -> list[Any]:
    """Return the nodes in a value, in the order of appearance, with repetition."""
    scanner: _PyObjScanner[Any, Any] = _PyObjScanner()
    try:
        return scanner.find_nodes(obj)
    finally:
        scanner.clear()


def replaced(obj: Any, replacement: Any) -> Any:
    """Return a copy of a value with `replacement(node)` in the place of each node; called once for each."""
    scanner: _PyObjScanner[Any, Any] = _PyObjScanner()
    try:
        table: dict[Any, Any] = {}
        for node in scanner.find_nodes(obj):
            if node not in table:
                table[node] = replacement(node)
        return scanner.replace_nodes(table)
    finally:
        scanner.clear()


# ------------------------------------------------------------ constants
# Ray's names of what a node of a graph has beside its arguments.


PARENT_CLASS_NODE_KEY = "parent_class_node"
PREV_CLASS_METHOD_CALL_KEY = "prev_class_method_call"
BIND_INDEX_KEY = "bind_index"
IS_CLASS_METHOD_OUTPUT_KEY = "is_class_method_output"
COLLECTIVE_OPERATION_KEY = "collective_operation"
DAGNODE_TYPE_KEY = "__dag_node_type__"


# ------------------------------------------------------------ format utils
# Nodes of graphs as text.


_INDENT = " " * 4


def get_dag_node_str(dag_node: DAGNodeBase, body_line: Any) -> str:
    """Return the text of a node, with those of the nodes among its arguments below it."""
    options = [f"{key}: {value}" for key, value in dag_node._bound_options.items() if value]
    args = [line for arg in dag_node._bound_args for line in _lines_of(arg)]
    parts = {
        "body": str(body_line),
        "args": _block("[", args, "]"),
        "kwargs": _block("{", _named(dag_node._bound_kwargs), "}"),
        "options": _block("{", options, "}") if dag_node._bound_options else "{}",
        "other_args_to_resolve": _block("{", _named(dag_node._bound_other_args_to_resolve), "}"),
    }
    lines = "".join(f"{_INDENT}{name}={text}\n" for name, text in parts.items())
    return f"({type(dag_node).__name__}, {dag_node._stable_uuid})(\n{lines})"


def _lines_of(value: Any) -> list[str]:
    members: Iterable[Any] = (
        value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,)
    )
    whole = not isinstance(value, (list, dict, DAGNodeBase))
    return [line + ", " * whole for member in members for line in str(member).split("\n")]


def _named(values: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in values.items():
        first, *rest = _lines_of(value) or [""]
        found += [f"{key}:{_INDENT}{first}", *(f"{_INDENT}{line}" for line in rest)]
    return found


def _block(opening: str, lines: list[str], closing: str) -> str:
    if not lines:
        return opening + closing
    return "\n".join([opening, *(f"{_INDENT * 2}{line}" for line in lines), f"{_INDENT}{closing}"])
