"""Nodes that are actors and calls of them."""

from __future__ import annotations

from typing import Any, ClassVar

from hpcray.graphs.collective_operation import CollectiveOperation
from hpcray.graphs.constants import (
    BIND_INDEX_KEY,
    COLLECTIVE_OPERATION_KEY,
    IS_CLASS_METHOD_OUTPUT_KEY,
    PARENT_CLASS_NODE_KEY,
    PREV_CLASS_METHOD_CALL_KEY,
)
from hpcray.graphs.dag_node import DAGNode
from hpcray.graphs.format_utils import get_dag_node_str


class ClassNode(DAGNode):
    """An actor of a graph: the result of `ActorClass.bind(...)`. Its methods are nodes too: `node.method.bind(...)`.

    Args:
        cls: the class. remote: the actor class that it became; by default `cls` is one.
    """

    KIND: ClassVar[str] = "class"
    _last_call: ClassMethodNode | None

    def __init__(
        self,
        cls: Any,
        cls_args: Any,
        cls_kwargs: dict[str, Any],
        cls_options: dict[str, Any],
        other_args_to_resolve: dict[str, Any] | None = None,
        remote: Any = None,
    ) -> None:
        self._body = cls
        self._remote = cls if remote is None else remote
        self._last_call = None
        super().__init__(cls_args, cls_kwargs, cls_options, other_args_to_resolve)
        if any(child.KIND == "input" for child in self._get_all_child_nodes()):
            raise ValueError(
                "InputNode handles user dynamic input the DAG, and cannot be used as args, kwargs, or "
                "other_args_to_resolve in ClassNode constructor because it is not available at class construction or "
                "binding time."
            )

    def _copy_impl(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        return ClassNode(self._body, new_args, new_kwargs, new_options, new_other_args_to_resolve, self._remote)

    def _execute_impl(self, *args: Any, **kwargs: Any) -> Any:
        return self._remote.remote(*self._bound_args, **self._bound_kwargs)

    def __getattr__(self, method_name: str) -> Any:
        if method_name.startswith("__") or "_body" not in self.__dict__:
            raise AttributeError(method_name)
        if method_name == "bind" and "bind" not in dir(self._body):
            raise AttributeError(f".bind() cannot be used again on {type(self)} ")
        getattr(self._body, method_name)
        return _UnboundClassMethodNode(self, method_name, {})

    def __str__(self) -> str:
        return get_dag_node_str(self, self._body)


class _UnboundClassMethodNode:
    """A method of a `ClassNode`. `bind` makes a node of it."""

    def __init__(self, actor: ClassNode, method_name: str, options: dict[str, Any]) -> None:
        self._actor = actor
        self._method_name = method_name
        self._options = options

    def bind(self, *args: Any, **kwargs: Any) -> ClassMethodNode:
        """Make a node that calls the method, after all calls of the same actor that were bound before."""
        other = {PARENT_CLASS_NODE_KEY: self._actor, PREV_CLASS_METHOD_CALL_KEY: self._actor._last_call}
        node = ClassMethodNode(self._method_name, args, kwargs, self._options, other)
        self._actor._last_call = node
        return node

    def __getattr__(self, attr: str) -> Any:
        if attr == "remote":
            raise AttributeError(
                ".remote() cannot be used on ClassMethodNodes. Use .bind() instead to express an symbolic actor call."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attr!r}")

    def options(self, **options: Any) -> _UnboundClassMethodNode:
        """Set the options of the call."""
        self._options = options
        return self


class ClassMethodNode(DAGNode):
    """A call of an actor, or one of the values of a call that returns several (`is_class_method_output`).

    Attributes:
        operation: what the actor does in the place of a call: its part in a collective operation.
    """

    KIND: ClassVar[str] = "method"

    def __init__(
        self,
        method_name: str,
        method_args: Any,
        method_kwargs: dict[str, Any],
        method_options: dict[str, Any],
        other_args_to_resolve: dict[str, Any],
    ) -> None:
        self._method_name = method_name
        self._parent_class_node = other_args_to_resolve.get(PARENT_CLASS_NODE_KEY)
        self._prev_class_method_call = other_args_to_resolve.get(PREV_CLASS_METHOD_CALL_KEY)
        self._bind_index = other_args_to_resolve.get(BIND_INDEX_KEY)
        self.operation: CollectiveOperation | None = other_args_to_resolve.get(COLLECTIVE_OPERATION_KEY)
        self._is_class_method_output = bool(other_args_to_resolve.get(IS_CLASS_METHOD_OUTPUT_KEY, False))
        super().__init__(method_args, method_kwargs, method_options, other_args_to_resolve)

    def _copy_impl(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        return ClassMethodNode(self._method_name, new_args, new_kwargs, new_options, new_other_args_to_resolve)

    def _execute_impl(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_class_method_output:
            values, index = self._bound_args
            return values[index]
        if self.operation is not None:
            raise NotImplementedError("collective operations are only supported with dag.experimental_compile()")
        options = {name: value for name, value in self._bound_options.items() if value is not None}
        method = self._get_remote_method(self._method_name)
        return (method.options(**options) if options else method).remote(*self._bound_args, **self._bound_kwargs)

    def __str__(self) -> str:
        return get_dag_node_str(self, f"{self._method_name}()")

    def __repr__(self) -> str:
        return str(self)

    def get_method_name(self) -> str:
        """Return the name of the method."""
        return self._method_name

    def _get_bind_index(self) -> Any:
        return self._bind_index

    def _get_remote_method(self, method_name: str) -> Any:
        return getattr(self._parent_class_node, method_name)

    def _get_actor_handle(self) -> Any:
        """The handle of the actor; None if the graph makes the actor."""
        return None if isinstance(self._parent_class_node, ClassNode) else self._parent_class_node

    @property
    def num_returns(self) -> int:
        """The number of values that the call returns."""
        if self._is_class_method_output:
            call: ClassMethodNode = self._bound_args[0]
            return call.num_returns
        given = self._bound_options.get("num_returns")
        found: int = self._get_remote_method(self._method_name)._num_returns if given is None else given
        return found

    @property
    def is_class_method_call(self) -> bool:
        """True for a call."""
        return not self._is_class_method_output

    @property
    def is_class_method_output(self) -> bool:
        """True for one of the values of a call that returns several."""
        return self._is_class_method_output

    @property
    def class_method_call(self) -> ClassMethodNode | None:
        """The call that this is a value of; None for a call."""
        return self._bound_args[0] if self._is_class_method_output else None

    @property
    def output_idx(self) -> int | None:
        """Which value of its call this is; None for a call."""
        return self._bound_args[1] if self._is_class_method_output else None


def bind_method(
    handle: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> ClassMethodNode | tuple[ClassMethodNode, ...]:
    """Make the node of a call of an actor that exists: one node, or one for each of several return values."""
    index = handle.__dict__.setdefault("_ray_dag_bind_index", 0)
    handle.__dict__["_ray_dag_bind_index"] = index + 1
    other = {PARENT_CLASS_NODE_KEY: handle, PREV_CLASS_METHOD_CALL_KEY: None, BIND_INDEX_KEY: index}
    node = ClassMethodNode(name, args, kwargs, options, other)
    count = node.num_returns
    if not isinstance(count, int) or count <= 1:
        return node
    output = {IS_CLASS_METHOD_OUTPUT_KEY: True, PARENT_CLASS_NODE_KEY: handle}
    return tuple(ClassMethodNode(f"return_idx_{at}", (node, at), {}, {}, dict(output)) for at in range(count))
