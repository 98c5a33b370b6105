"""The kinds of nodes of a graph: tasks, actors and their calls, the input, several results, collective operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hpcray.graphs.dag_node import (
    BIND_INDEX_KEY,
    COLLECTIVE_OPERATION_KEY,
    IS_CLASS_METHOD_OUTPUT_KEY,
    PARENT_CLASS_NODE_KEY,
    PREV_CLASS_METHOD_CALL_KEY,
    DAGNode,
    get_dag_node_str,
)

# ------------------------------------------------------------ collective operation
# Collective operations on tensors in compiled graphs, without a communicator of their own.
#
# The tensors of all actors travel to each of them over the graph's channels, in shared memory on one node, and each
# reduces them itself, in the order of the actors, so that all get the same bits.


_REDUCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "SUM": lambda torch, total, tensor: total.add_(tensor),
    "AVG": lambda torch, total, tensor: total.add_(tensor),
    "PRODUCT": lambda torch, total, tensor: total.mul_(tensor),
    "MAX": lambda torch, total, tensor: torch.maximum(total, tensor, out=total),
    "MIN": lambda torch, total, tensor: torch.minimum(total, tensor, out=total),
}
REDUCTIONS = frozenset(_REDUCTIONS)


@dataclass(frozen=True)
class CollectiveOperation:
    """The part of one actor in a collective operation.

    Attributes:
        kind: "allreduce", "allgather" or "reducescatter".
        reduction: one of `REDUCTIONS`; "" for "allgather".
        rank, size: of the actor, and of all of them.
    """

    kind: str
    reduction: str
    rank: int
    size: int

    def __call__(self, *tensors: Any) -> Any:
        """Return the result of this actor; a tuple where there are several tensors of each.

        Args:
            tensors: those of all actors, by rank; then the second ones of all, and so on.

        Raises:
            ValueError: one is no tensor of a CPU, or does not fit.
        """
        torch = sys.modules.get("torch")
        if torch is None or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ValueError("Expected a torch tensor for each input node")
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise ValueError("there are no GPU channels; hint: move tensors to the CPU in the methods")
        lists = [tensors[start : start + self.size] for start in range(0, len(tensors), self.size)]
        types = [found[self.rank].dtype for found in lists]
        if len(set(types)) > 1:
            raise ValueError(f"Expected all input tensors to have the same dtype, but got {types}")
        results = tuple(self._one(torch, found) for found in lists)
        return results if len(results) > 1 else results[0]

    def _one(self, torch: Any, tensors: tuple[Any, ...]) -> Any:
        if self.kind == "allgather":
            return torch.cat(tensors)
        if self.kind == "reducescatter":
            rows = tensors[0].shape[0]
            if rows % self.size:
                raise ValueError(
                    "Expected the first dimension of the input tensor to be divisible by the world size "
                    f"{self.size}, but it is {rows}"
                )
            tensors = tuple(tensor.chunk(self.size)[self.rank] for tensor in tensors)
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            _REDUCTIONS[self.reduction](torch, total, tensor)
        return (total / self.size).to(total.dtype) if self.reduction == "AVG" else total


# ------------------------------------------------------------ class node


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

    def _execute_impl(self, /, *args: Any, **kwargs: Any) -> Any:
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

    def bind(self, /, *args: Any, **kwargs: Any) -> ClassMethodNode:
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

    def _execute_impl(self, /, *args: Any, **kwargs: Any) -> Any:
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


# ------------------------------------------------------------ function node
# Nodes that are tasks.


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

    def _execute_impl(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._remote.remote(*self._bound_args, **self._bound_kwargs)

    def __str__(self) -> str:
        return get_dag_node_str(self, self._body)


# ------------------------------------------------------------ input node
# The node that begins a graph, and the parts of what it is given.


IN_CONTEXT_MANAGER = "__in_context_manager__"
_KEYS_ONLY = "Please only use int index or str as first-level key to access fields of dag input."


class InputNode(DAGNode):
    """The arguments of `execute`, used as a context manager: `with InputNode() as inp: dag = f.bind(inp)`.

    `inp` stands for the one argument, `inp[0]` for a positional one, `inp.x` and `inp["x"]` for the keyword `x`. Where
    `execute` is given one object, they stand for its items and attributes.

    Args:
        input_type: the type of the input, or of its parts by their keys.
    """

    KIND: ClassVar[str] = "input"
    input_attribute_nodes: dict[int | str, InputAttributeNode]

    def __init__(
        self,
        *args: Any,
        input_type: Any = None,
        _other_args_to_resolve: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if args or kwargs:
            raise ValueError("InputNode should not take any args or kwargs.")
        self.input_attribute_nodes = {}
        self.input_type = input_type
        other = _other_args_to_resolve or {}
        if isinstance(input_type, type):
            other["result_type_string"] = _type_to_string(input_type)
        super().__init__([], {}, {}, other)

    def _copy_impl(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        return InputNode(_other_args_to_resolve=new_other_args_to_resolve)

    def _execute_impl(self, /, *args: Any, **kwargs: Any) -> Any:
        assert self._in_context_manager(), (
            "InputNode is a singleton instance that should be only used in context manager for dag building and "
            "execution. See the docstring of class InputNode for examples."
        )
        return args[0] if len(args) == 1 and not kwargs else DAGInputData(*args, **kwargs)

    def _in_context_manager(self) -> bool:
        return bool(self._bound_other_args_to_resolve.get(IN_CONTEXT_MANAGER, False))

    def set_context(self, key: str, val: Any) -> None:
        """Set a field that copies of the node keep."""
        self._bound_other_args_to_resolve[key] = val

    def __str__(self) -> str:
        return get_dag_node_str(self, "__InputNode__")

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or "input_attribute_nodes" not in self.__dict__:
            raise AttributeError(key)
        return self._part(key, "__getattr__")

    def __getitem__(self, key: int | str) -> Any:
        assert isinstance(key, (str, int)), _KEYS_ONLY
        return self._part(key, "__getitem__")

    def _part(self, key: int | str, accessor: str) -> InputAttributeNode:
        found = self.input_attribute_nodes.get(key)
        if found is None:
            kinds = self.input_type if isinstance(self.input_type, dict) else {}
            kind = _type_to_string(kinds[key]) if accessor == "__getitem__" and key in kinds else None
            found = self.input_attribute_nodes[key] = InputAttributeNode(self, key, accessor, kind)
        return found

    def __enter__(self) -> InputNode:
        self.set_context(IN_CONTEXT_MANAGER, True)
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def get_result_type(self) -> Any:
        """Return the name of the type that `input_type` gave; None if it gave none."""
        return self._bound_other_args_to_resolve.get("result_type_string")


class InputAttributeNode(DAGNode):
    """A part of the input: a positional argument, a keyword, or an item or attribute of the one argument."""

    KIND: ClassVar[str] = "attribute"

    def __init__(
        self, dag_input_node: Any, key: int | str, accessor_method: str, input_type: str | None = None
    ) -> None:
        self._dag_input_node = dag_input_node
        self._key = key
        self._accessor_method = accessor_method
        other = {
            "dag_input_node": dag_input_node,
            "key": key,
            "accessor_method": accessor_method,
            "result_type_string": input_type,
        }
        super().__init__([], {}, {}, other)

    def _copy_impl(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        other = new_other_args_to_resolve
        return InputAttributeNode(
            other["dag_input_node"], other["key"], other["accessor_method"], other["result_type_string"]
        )

    def _execute_impl(self, /, *args: Any, **kwargs: Any) -> Any:
        given, key = self._dag_input_node, self._key
        if isinstance(given, DAGInputData) or self._accessor_method == "__getitem__" or isinstance(key, int):
            return given[key]
        return getattr(given, key)

    def __str__(self) -> str:
        return get_dag_node_str(self, f'["{self._key}"]')

    def get_result_type(self) -> Any:
        """Return the name of the type that the input node's `input_type` gave; None if it gave none."""
        return self._bound_other_args_to_resolve["result_type_string"]

    @property
    def key(self) -> int | str:
        """The index, keyword or attribute."""
        return self._key


class DAGInputData:
    """The arguments of `execute` where there is more than one: positional ones by index, keywords by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._args = list(args)
        self._kwargs = kwargs

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, int):
            return self._args[key]
        if isinstance(key, str):
            return self._kwargs[key]
        raise ValueError(_KEYS_ONLY)


def _type_to_string(kind: Any) -> str:
    if kind.__module__ == "builtins":
        return str(kind.__qualname__)
    return f"{kind.__module__}.{kind.__qualname__}"


# ------------------------------------------------------------ output node
# The node that ends a graph with several results.


class MultiOutputNode(DAGNode):
    """The end of a graph: `execute` returns a list with the result of each node in it."""

    KIND: ClassVar[str] = "output"

    def __init__(self, args: Any, other_args_to_resolve: dict[str, Any] | None = None) -> None:
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"Invalid input type for `args`, {type(args)}.")
        super().__init__(list(args), {}, {}, other_args_to_resolve)

    def _copy_impl(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        return MultiOutputNode(new_args, new_other_args_to_resolve)

    def _execute_impl(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._bound_args

    def __str__(self) -> str:
        return get_dag_node_str(self, "__MultiOutputNode__")
