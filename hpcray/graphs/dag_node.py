"""The base of all nodes of graphs: arguments, walks over the graph, execution, compilation, text and pictures."""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import os
import pickle
import tempfile
import uuid
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import cloudpickle

from hpcray.common.exceptions import RayDeprecationWarning

if TYPE_CHECKING:
    from hpcray.graphs.compiled_dag_node import CompiledDAG

# ------------------------------------------------------------ base
# The mark of nodes of graphs, for modules that nodes are made of.


class DAGNodeBase(ABC):  # a mark: the methods are in `DAGNode`
    """Any node of a graph: what `_PyObjScanner` finds in arguments."""

    _stable_uuid: str
    _bound_args: Any
    _bound_kwargs: Any
    _bound_options: Any
    _bound_other_args_to_resolve: Any


# ------------------------------------------------------------ py obj scanner


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


# ------------------------------------------------------------ constants
# Ray's names of what a node of a graph has beside its arguments.


PARENT_CLASS_NODE_KEY = "parent_class_node"
PREV_CLASS_METHOD_CALL_KEY = "prev_class_method_call"
BIND_INDEX_KEY = "bind_index"
IS_CLASS_METHOD_OUTPUT_KEY = "is_class_method_output"
COLLECTIVE_OPERATION_KEY = "collective_operation"
DAGNODE_TYPE_KEY = "__dag_node_type__"


# ------------------------------------------------------------ format utils
# Nodes of graphs as text.


_INDENT = " " * 4


def get_dag_node_str(dag_node: DAGNodeBase, body_line: Any) -> str:
    """Return the text of a node, with those of the nodes among its arguments below it."""
    options = [f"{key}: {value}" for key, value in dag_node._bound_options.items() if value]
    args = [line for arg in dag_node._bound_args for line in _lines_of(arg)]
    parts = {
        "body": str(body_line),
        "args": _block("[", args, "]"),
        "kwargs": _block("{", _named(dag_node._bound_kwargs), "}"),
        "options": _block("{", options, "}") if dag_node._bound_options else "{}",
        "other_args_to_resolve": _block("{", _named(dag_node._bound_other_args_to_resolve), "}"),
    }
    lines = "".join(f"{_INDENT}{name}={text}\n" for name, text in parts.items())
    return f"({type(dag_node).__name__}, {dag_node._stable_uuid})(\n{lines})"


def _lines_of(value: Any) -> list[str]:
    members: Iterable[Any] = (
        value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,)
    )
    whole = not isinstance(value, (list, dict, DAGNodeBase))
    return [line + ", " * whole for member in members for line in str(member).split("\n")]


def _named(values: Mapping[str, Any]) -> list[str]:
    found = []
    for key, value in values.items():
        first, *rest = _lines_of(value) or [""]
        found += [f"{key}:{_INDENT}{first}", *(f"{_INDENT}{line}" for line in rest)]
    return found


def _block(opening: str, lines: list[str], closing: str) -> str:
    if not lines:
        return opening + closing
    return "\n".join([opening, *(f"{_INDENT * 2}{line}" for line in lines), f"{_INDENT}{closing}"])


# ------------------------------------------------------------ dag node

T = TypeVar("T")
_serials = itertools.count()
_DEVICES = ("default", "cpu", "gpu", "cuda")
_TRANSPORTS = ("auto", "nccl", "shm", "accelerator")


class DAGNode(DAGNodeBase):
    """A node of a graph: a task, an actor, a call of an actor, the input or the output. `.bind(...)` makes them.

    Attributes:
        KIND: function, class, method, input, attribute or output; "" for nodes of other libraries.
    """

    KIND: ClassVar[str] = ""

    def __init__(
        self, args: Any, kwargs: dict[str, Any], options: dict[str, Any], other_args_to_resolve: dict[str, Any] | None
    ) -> None:
        self._bound_args = args or []
        self._bound_kwargs = kwargs or {}
        self._bound_options = options or {}
        self._bound_other_args_to_resolve = other_args_to_resolve or {}
        self._stable_uuid = uuid.uuid4().hex
        self._serial = next(_serials)
        self._downstream_nodes: list[DAGNode] = []
        self._args_contain_nested_dag_node = False
        self._upstream_nodes: list[DAGNode] = self._collect_upstream_nodes()
        self.cache_from_last_execute: dict[str, Any] = {}
        self.type_hint: tuple[Any, str] = ("shm", "default")
        self.is_cgraph_output_node = False

    def _collect_upstream_nodes(self) -> list[DAGNode]:
        found: list[DAGNode] = []
        for arg in self._bound_args:
            nodes = [arg] if isinstance(arg, DAGNode) else _nodes_in(arg)
            self._args_contain_nested_dag_node |= bool(nodes) and nodes[0] is not arg
            found += nodes
        found += _nodes_in(self._bound_kwargs) + _nodes_in(self._bound_other_args_to_resolve)
        for node in found:
            node._downstream_nodes.append(self)
        return found

    # ------------------------------------------------------------ arguments

    def get_args(self) -> Any:
        """Return the positional arguments."""
        return self._bound_args

    def get_kwargs(self) -> dict[str, Any]:
        """Return a copy of the keyword arguments."""
        return dict(self._bound_kwargs)

    def get_options(self) -> dict[str, Any]:
        """Return a copy of the options."""
        return dict(self._bound_options)

    def get_other_args_to_resolve(self) -> dict[str, Any]:
        """Return a copy of what else may hold nodes, such as the actor of a call."""
        return dict(self._bound_other_args_to_resolve)

    def get_stable_uuid(self) -> str:
        """Return the id of the node, which its copies share."""
        return self._stable_uuid

    def with_tensor_transport(
        self,
        transport: Any = "auto",
        device: str = "default",
        _static_shape: bool = False,
        _direct_return: bool = False,
    ) -> Any:
        """Set how tensors in the result of this node travel in a compiled graph. Shared memory is the only way here.

        Args:
            transport: "auto" or "shm"; "nccl" and "accelerator" are refused when the graph is compiled.
            device: "default" or "cpu"; "gpu" and "cuda" are refused when the graph is compiled.

        Raises:
            ValueError: one of them is none of these.
        """
        if device not in _DEVICES:
            valid = ", ".join(f"'{name}'" for name in _DEVICES)
            raise ValueError(f"Invalid device '{device}'. Valid options are: {valid}.")
        if isinstance(transport, str) and transport not in _TRANSPORTS:
            raise ValueError(
                f"Invalid transport type: {transport}. Transport must be one of 'auto', 'nccl', 'shm', 'accelerator' "
                "or an instance of Communicator type."
            )
        self.type_hint = (transport, device)
        return self

    # ------------------------------------------------------------ execution

    def execute(self, /, *args: Any, _ray_cache_refs: bool = False, **kwargs: Any) -> Any:
        """Run the graph that ends here with tasks and actor calls.

        Args:
            args, kwargs: what the graph's `InputNode` stands for.
            _ray_cache_refs: keep the result of each node, see `get_object_refs_from_last_execute`.

        Returns:
            What this node is: a ref, an actor handle, a list of refs for a `MultiOutputNode`.
        """
        warnings.warn(
            "DAGNode.execute() is deprecated and will be removed in a future release.",
            RayDeprecationWarning,
            stacklevel=2,
        )

        def executor(node: DAGNode) -> Any:
            return node._execute_impl(*args, **kwargs)

        walk = _CachingFn(executor)
        result = self.apply_recursive(walk)
        if _ray_cache_refs:
            self.cache_from_last_execute = walk.cache
        return result

    def experimental_compile(
        self,
        _submit_timeout: float | None = None,
        _buffer_size_bytes: int | None = None,
        enable_asyncio: bool = False,
        _max_inflight_executions: int | None = None,
        _max_buffered_results: int | None = None,
        _overlap_gpu_communication: bool | None = None,
        _default_communicator: Any = "create",
    ) -> CompiledDAG:
        """Make the graph that ends here ready to run many times over channels between its actors.

        Args:
            _submit_timeout: seconds for which `execute` waits for room; -1 for any time.
            _buffer_size_bytes: size from which a value gets memory of its own.
            enable_asyncio: `execute_async` is used, and results are awaited.
            _max_inflight_executions: executions that may be submitted and not finished.
            _max_buffered_results: results that may wait in this process because a later one was asked for.
            _overlap_gpu_communication, _default_communicator: without effect: there are no GPU channels.

        Raises:
            ValueError: the graph cannot be compiled. NotImplementedError: it has tasks, or no input.
        """
        from hpcray.graphs.compiled_dag_node import compile_graph

        if self.is_cgraph_output_node:
            raise ValueError(
                "It is not allowed to call `experimental_compile` on the same DAG object multiple times no matter "
                "whether `teardown` is called or not. Please reuse the existing compiled DAG or create a new one."
            )
        if isinstance(_default_communicator, str) and _default_communicator != "create":
            raise ValueError(
                f"The only allowed string for default_communicator is 'create', got {_default_communicator}"
            )
        self.is_cgraph_output_node = True
        return compile_graph(
            self, _submit_timeout, _buffer_size_bytes, enable_asyncio, _max_inflight_executions, _max_buffered_results
        )

    async def get_object_refs_from_last_execute(self) -> dict[str, Any]:
        """Return the results of the last `execute(_ray_cache_refs=True)` by the nodes' ids."""
        found = self.cache_from_last_execute
        return {key: await value if isinstance(value, asyncio.Task) else value for key, value in found.items()}

    def clear_cache(self) -> None:
        """Forget the results of the last execution."""
        self.cache_from_last_execute = {}

    def _execute_impl(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run this node, whose arguments are results by now. Other libraries have nodes that cannot be run."""
        raise NotImplementedError(f"{type(self).__name__} cannot be executed")

    # ------------------------------------------------------------ walks

    def _get_toplevel_child_nodes(self) -> list[DAGNode]:
        """The nodes that are arguments themselves, each once."""
        values = [*self.get_args(), *self.get_kwargs().values(), *self.get_other_args_to_resolve().values()]
        return _unique(value for value in values if isinstance(value, DAGNode))

    def _get_all_child_nodes(self) -> list[DAGNode]:
        """The nodes in arguments, however deep, each once."""
        return _unique(nested_nodes([self._bound_args, self._bound_kwargs, self._bound_other_args_to_resolve]))

    def _apply_and_replace_all_child_nodes(self, fn: Callable[[Any], Any]) -> DAGNode:
        """A copy of this node with `fn(child)` in the place of each child."""
        args, kwargs, other = replaced([self._bound_args, self._bound_kwargs, self._bound_other_args_to_resolve], fn)
        return self._copy(args, kwargs, self.get_options(), other)

    def apply_recursive(self, fn: Callable[[Any], T]) -> T:
        """Call `fn` once for each node of the graph that ends here, with the results for its arguments in their places.

        Returns:
            The result for this node.
        """
        walk = fn if isinstance(fn, _CachingFn) else _CachingFn(fn)
        if self._stable_uuid in walk.cache:
            return walk.cache[self._stable_uuid]
        return walk(self._apply_and_replace_all_child_nodes(lambda node: node.apply_recursive(walk)))

    def traverse_and_apply(self, fn: Callable[[DAGNode], object]) -> None:
        """Call `fn` for each node that is connected with this one, upstream or downstream."""
        compiled: DAGNode | None = None
        seen = {id(self)}
        queue = [self]
        for node in queue:
            if node._args_contain_nested_dag_node:
                node._raise_nested_dag_node_error()
            if node.is_cgraph_output_node:
                if compiled is not None:
                    raise ValueError(
                        "The DAG was compiled more than once. The following two nodes call `experimental_compile`: "
                        f"(1) {compiled}, (2) {node}"
                    )
                compiled = node
            fn(node)
            for neighbor in (*node._downstream_nodes, *node._upstream_nodes):
                if id(neighbor) not in seen:
                    seen.add(id(neighbor))
                    queue.append(neighbor)

    def _raise_nested_dag_node_error(self) -> None:
        for arg in self._bound_args:
            nodes = [] if isinstance(arg, DAGNode) else _nodes_in(arg)
            if nodes:
                raise ValueError(
                    f"Found {len(nodes)} DAGNodes from the arg {arg} in {self}. Please ensure that the argument is a "
                    "single DAGNode and that a DAGNode is not allowed to be placed inside any type of container."
                )

    def _find_root(self) -> DAGNode:
        """The input of the graph that ends here."""
        node = self
        while node.KIND != "input":
            if not node._upstream_nodes:
                raise ValueError(
                    f"No InputNode found in the DAG: when traversing upwards, no upstream node was found for {node}."
                )
            node = node._upstream_nodes[0]
        return node

    def apply_functional(
        self, source_input_list: Any, predicate_fn: Callable[[Any], bool], apply_fn: Callable[[Any], Any]
    ) -> Any:
        """Return a copy of a value with `apply_fn(node)` in the place of the nodes that `predicate_fn` chooses."""
        return replaced(source_input_list, lambda node: apply_fn(node) if predicate_fn(node) else node)

    # ------------------------------------------------------------ copies

    @abstractmethod
    def _copy_impl(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        """Make a node of the same kind with other arguments."""

    def _copy(self, new_args: Any, new_kwargs: Any, new_options: Any, new_other_args_to_resolve: Any) -> DAGNode:
        made = self._copy_impl(new_args, new_kwargs, new_options, new_other_args_to_resolve)
        made._stable_uuid = self._stable_uuid
        made.type_hint = copy.copy(self.type_hint)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __getattr__(self, attr: str) -> Any:
        if attr == "bind":
            raise AttributeError(f".bind() cannot be used again on {type(self)} ")
        if attr == "remote":
            raise AttributeError(
                f".remote() cannot be used on {type(self)}. To execute the task graph for this node, use .execute()."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attr!r}")


class _CachingFn(Generic[T]):
    """A function of nodes that is called once for a node and its copies.

    Attributes:
        cache: results by node id.
    """

    def __init__(self, fn: Callable[[Any], T]) -> None:
        self.cache: dict[str, T] = {}
        self._fn = fn
        self._input = ""

    def __call__(self, node: DAGNode) -> T:
        if node._stable_uuid not in self.cache:
            self.cache[node._stable_uuid] = self._fn(node)
        if node.KIND == "input":
            assert self._input in ("", node._stable_uuid), "Each DAG should only have one unique InputNode."
            self._input = node._stable_uuid
        return self.cache[node._stable_uuid]


def _unique(nodes: Any) -> list[DAGNode]:
    return list({id(node): node for node in nodes}.values())


_LEAVES = (int, float, complex, str, bytes, bytearray, bool, type(None))


def _nodes_in(value: Any) -> list[DAGNode]:
    """The nodes in a value. Simple values are not pickled to find out that there is none."""
    if isinstance(value, DAGNode):
        return [value]
    if type(value) in _LEAVES:
        return []
    if type(value) in (list, tuple):
        return [node for member in value for node in _nodes_in(member)]
    if type(value) is dict:
        return [node for member in value.values() for node in _nodes_in(member)]
    if type(value).__module__.partition(".")[0] in ("numpy", "torch", "hpcray", "pandas", "pyarrow"):
        return []
    found: list[DAGNode] = nested_nodes(value)
    return found


# ------------------------------------------------------------ vis utils
# Graphs as pictures.

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
