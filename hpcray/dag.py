"""Graphs of tasks and actor calls, by Ray's names: `.bind()` makes nodes, which are executed or compiled."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcray.graphs.compiled_dag_node import CompiledDAG
    from hpcray.graphs.compiled_dag_ref import DAGContext
    from hpcray.graphs.dag_node import (
        BIND_INDEX_KEY,
        COLLECTIVE_OPERATION_KEY,
        DAGNODE_TYPE_KEY,
        IS_CLASS_METHOD_OUTPUT_KEY,
        PARENT_CLASS_NODE_KEY,
        PREV_CLASS_METHOD_CALL_KEY,
        DAGNode,
        plot,
    )
    from hpcray.graphs.nodes import (
        ClassMethodNode,
        ClassNode,
        DAGInputData,
        FunctionNode,
        InputAttributeNode,
        InputNode,
        MultiOutputNode,
    )

__all__ = [
    "BIND_INDEX_KEY",
    "COLLECTIVE_OPERATION_KEY",
    "DAGNODE_TYPE_KEY",
    "IS_CLASS_METHOD_OUTPUT_KEY",
    "PARENT_CLASS_NODE_KEY",
    "PREV_CLASS_METHOD_CALL_KEY",
    "ClassMethodNode",
    "ClassNode",
    "CompiledDAG",
    "DAGContext",
    "DAGInputData",
    "DAGNode",
    "FunctionNode",
    "InputAttributeNode",
    "InputNode",
    "MultiOutputNode",
    "plot",
]

_WHERE = {
    **{name: "dag_node" for name in __all__ if name.endswith("_KEY")},
    "ClassMethodNode": "nodes",
    "ClassNode": "nodes",
    "CompiledDAG": "compiled_dag_node",
    "DAGContext": "compiled_dag_ref",
    "DAGInputData": "nodes",
    "DAGNode": "dag_node",
    "FunctionNode": "nodes",
    "InputAttributeNode": "nodes",
    "InputNode": "nodes",
    "MultiOutputNode": "nodes",
    "plot": "dag_node",
}


def __getattr__(name: str) -> Any:
    # Imported at the first use, since every worker and every command imports `hpcray`.
    if name in _WHERE:
        return getattr(importlib.import_module(f"hpcray.graphs.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
