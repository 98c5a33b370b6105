"""Graphs of tasks and actor calls, by Ray's names: `.bind()` makes nodes, which are executed or compiled."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcray.graphs.class_node import ClassMethodNode, ClassNode
    from hpcray.graphs.compiled_dag_node import CompiledDAG
    from hpcray.graphs.constants import (
        BIND_INDEX_KEY,
        COLLECTIVE_OPERATION_KEY,
        DAGNODE_TYPE_KEY,
        IS_CLASS_METHOD_OUTPUT_KEY,
        PARENT_CLASS_NODE_KEY,
        PREV_CLASS_METHOD_CALL_KEY,
    )
    from hpcray.graphs.context import DAGContext
    from hpcray.graphs.dag_node import DAGNode
    from hpcray.graphs.function_node import FunctionNode
    from hpcray.graphs.input_node import DAGInputData, InputAttributeNode, InputNode
    from hpcray.graphs.output_node import MultiOutputNode
    from hpcray.graphs.vis_utils import plot

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
    **{name: "constants" for name in __all__ if name.endswith("_KEY")},
    "ClassMethodNode": "class_node",
    "ClassNode": "class_node",
    "CompiledDAG": "compiled_dag_node",
    "DAGContext": "context",
    "DAGInputData": "input_node",
    "DAGNode": "dag_node",
    "FunctionNode": "function_node",
    "InputAttributeNode": "input_node",
    "InputNode": "input_node",
    "MultiOutputNode": "output_node",
    "plot": "vis_utils",
}


def __getattr__(name: str) -> Any:
    # Imported at the first use, since every worker and every command imports `hpcray`.
    if name in _WHERE:
        return getattr(importlib.import_module(f"hpcray.graphs.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
