"""Names of nodes for people."""

from __future__ import annotations

from collections import Counter
from typing import Any


class _DAGNodeNameGenerator:
    """Gives each node of a graph a name of its own: what is asked for again gets a number."""

    def __init__(self) -> None:
        self._given: Counter[str] = Counter()

    def get_node_name(self, node: Any) -> str:
        """Return a name for a node.

        Raises:
            ValueError: it is no node of a graph.
        """
        kind = getattr(node, "KIND", None)
        if kind == "input":
            return "INPUT_NODE"
        if kind == "output":
            return "MultiOutputNode"
        if kind == "attribute":
            return f"INPUT_ATTRIBUTE_NODE_{node._key}"
        if kind == "method":
            name = node.get_options().get("name") or node.get_method_name()
        elif kind in ("class", "function"):
            name = node.get_options().get("name") or node._body.__name__
        elif hasattr(node, "get_deployment_name"):
            name = node.get_deployment_name()
        else:
            raise ValueError("get_node_name() should only be called on DAGNode instances.")
        before = self._given[name]
        self._given[name] += 1
        return f"{name}_{before}" if before else str(name)

    def reset(self) -> None:
        """Forget all names that were given."""
        self._given.clear()

    def __enter__(self) -> _DAGNodeNameGenerator:
        return self

    def __exit__(self, *args: Any) -> None:
        self.reset()
