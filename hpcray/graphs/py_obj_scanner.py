"""Nodes of graphs that are nested in arguments: found, and replaced by what they stand for."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import cloudpickle

from hpcray.graphs.base import DAGNodeBase

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
