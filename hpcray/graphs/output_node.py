"""The node that ends a graph with several results."""

from __future__ import annotations

from typing import Any, ClassVar

from hpcray.graphs.dag_node import DAGNode
from hpcray.graphs.format_utils import get_dag_node_str


class MultiOutputNode(DAGNode):
    """The end of a graph: `execute` returns a list with the result of each node in it."""

    KIND: ClassVar[str] = "output"

    def __init__(self, args: Any, other_args_to_resolve: dict[str, Any] | None = None) -> None:
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"Invalid input type for `args`, {type(args)}.")
        super().__init__(list(args), {}, {}, other_args_to_resolve)

    def _copy_impl(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        return MultiOutputNode(new_args, new_other_args_to_resolve)

    def _execute_impl(self, *args: Any, **kwargs: Any) -> Any:
        return self._bound_args

    def __str__(self) -> str:
        return get_dag_node_str(self, "__MultiOutputNode__")
