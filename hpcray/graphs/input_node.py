"""The node that begins a graph, and the parts of what it is given."""

from __future__ import annotations

from typing import Any, ClassVar

from hpcray.graphs.dag_node import DAGNode
from hpcray.graphs.format_utils import get_dag_node_str

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

    def _execute_impl(self, *args: Any, **kwargs: Any) -> Any:
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

    def _execute_impl(self, *args: Any, **kwargs: Any) -> Any:
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
