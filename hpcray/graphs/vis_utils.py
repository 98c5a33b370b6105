"""Graphs as pictures."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from typing import Any

from hpcray.graphs.dag_node import DAGNode

# ------------------------------------------------------------ utils
# Names of nodes for people.


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


# ------------------------------------------------------------ vis utils


def plot(dag: DAGNode, to_file: str | None = None) -> Any:
    """Write a picture of a graph.

    Args:
        to_file: where; the extension says in which format. Without it the picture is only shown, in a notebook.

    Raises:
        ImportError: the package `pydot` or the program Graphviz is not there.
    """
    graph = _dag_to_dot(dag)
    with tempfile.TemporaryDirectory() as directory:
        path = to_file or os.path.join(directory, "graph.png")
        graph.write(path, format=os.path.splitext(path)[1][1:] or "png")
        try:
            from IPython import display
        except ImportError:
            return None
        return display.Image(filename=path)


def _dag_to_dot(dag: DAGNode) -> Any:
    try:
        import pydot
    except ImportError:
        raise ImportError("pydot is required to plot DAG, install it with `pip install pydot`.") from None
    try:
        pydot.Dot.create(pydot.Dot())
    except (OSError, pydot.InvocationException):
        raise ImportError(
            "graphviz is required to plot DAG, download it from https://graphviz.gitlab.io/download/"
        ) from None
    nodes, edges = _get_nodes_and_edges(dag)
    names: dict[Any, str] = {}
    with _DAGNodeNameGenerator() as generator:
        for node in nodes:
            names[node] = generator.get_node_name(node)
    graph = pydot.Dot(rankdir="LR")
    for start, end in edges:
        graph.add_edge(pydot.Edge(names[start], names[end]))
    if not edges:
        graph.add_node(pydot.Node(names[nodes[0]]))
    return graph


def _get_nodes_and_edges(dag: DAGNode) -> tuple[list[Any], list[tuple[Any, Any]]]:
    nodes: list[Any] = []
    edges: list[tuple[Any, Any]] = []

    def visit(node: Any) -> Any:
        nodes.append(node)
        edges.extend((child, node) for child in node._get_all_child_nodes())
        return node

    dag.apply_recursive(visit)
    return nodes, edges
