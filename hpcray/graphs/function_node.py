"""Nodes that are tasks."""

from __future__ import annotations

from typing import Any, ClassVar

from hpcray.graphs.dag_node import DAGNode
from hpcray.graphs.format_utils import get_dag_node_str


class FunctionNode(DAGNode):
    """A task of a graph: the result of `function.bind(...)`.

    Args:
        func_body: the function. remote: the remote function that it became; by default `func_body` is one.
    """

    KIND: ClassVar[str] = "function"

    def __init__(
        self,
        func_body: Any,
        func_args: Any,
        func_kwargs: dict[str, Any],
        func_options: dict[str, Any],
        other_args_to_resolve: dict[str, Any] | None = None,
        remote: Any = None,
    ) -> None:
        self._body = func_body
        self._remote = func_body if remote is None else remote
        super().__init__(func_args, func_kwargs, func_options, other_args_to_resolve)

    def _copy_impl(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        return FunctionNode(self._body, new_args, new_kwargs, new_options, new_other_args_to_resolve, self._remote)

    def _execute_impl(self, *args: Any, **kwargs: Any) -> Any:
        return self._remote.remote(*self._bound_args, **self._bound_kwargs)

    def __str__(self) -> str:
        return get_dag_node_str(self, self._body)
