"""The work of a compiled graph: checked and put in order, without any actor or channel.

Each node of a graph has a number. A *value* has the number of the node that it comes from: of the input or a part of
it, of a call, or of one of several values that a call returns. A *party* is an actor of the graph, by its number, or
the process that compiled the graph (`DRIVER`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

DRIVER = -1
_INPUTS = ("input", "attribute")
_MIXED_INPUTS = "All tasks must either use InputNode() directly, or they must index to specific args or kwargs."


@dataclass(frozen=True)
class ValueOf:
    """An argument that is the value of a node, in the place of the value."""

    node: int


@dataclass
class PlannedTask:
    """A call that each execution makes.

    Attributes:
        args: constants, and `ValueOf`.
        outputs: the values that the call makes, each with its index where the call returns several, else None.
        serial: its place in the order of `bind`.
        function: what is called, if that is no method: a collective operation.
        returns: how many values the call returns in a tuple; 0: one, which is what it returns.
    """

    node: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[tuple[int, int | None]]
    serial: int
    function: Callable[..., Any] | None = None
    returns: int = 0

    def values(self) -> list[int]:
        """Return the values that the call takes, each once."""
        return list(dict.fromkeys(arg.node for arg in self.args if isinstance(arg, ValueOf)))


@dataclass
class GraphPlan:
    """A whole graph.

    Attributes:
        nodes: by number. actors: handles, by number.
        tasks: by actor, in the order of `bind`.
        inputs: values that `execute` is given, with their keys; None: its one argument.
        outputs: values that are the results. returns_list: whether a `MultiOutputNode` ends the graph.
        positional, keywords: what `execute` must be given.
        makers: the party that makes a value. readers: the other parties that read it.
    """

    nodes: list[Any]
    actors: list[Any] = field(default_factory=list)
    tasks: list[list[PlannedTask]] = field(default_factory=list)
    inputs: list[tuple[int, int | str | None]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    returns_list: bool = False
    positional: int = 0
    keywords: tuple[str, ...] = ()
    makers: dict[int, int] = field(default_factory=dict)
    readers: dict[int, list[int]] = field(default_factory=dict)

    def edges(self) -> list[tuple[int, int]]:
        """Return the pairs of nodes of which the second takes the value of the first."""
        numbers = {id(node): number for number, node in enumerate(self.nodes)}
        found = []
        for number, node in enumerate(self.nodes):
            if node.KIND == "attribute":
                found.append((numbers[id(node._dag_input_node)], number))
            found += [(numbers[id(arg)], number) for arg in node._bound_args if id(arg) in numbers]
        return list(dict.fromkeys(found))


def make_plan(output: Any) -> GraphPlan:
    """Plan the graph that ends at a node.

    Raises:
        ValueError: the graph cannot be compiled. NotImplementedError: it has tasks, or no input.
    """
    nodes: list[Any] = []
    output._find_root().traverse_and_apply(nodes.append)
    return _Planner(nodes, output).plan


class _Planner:
    def __init__(self, nodes: list[Any], output: Any) -> None:
        self.plan = GraphPlan(nodes)
        self._numbers = {id(node): number for number, node in enumerate(nodes)}
        self._output = output
        assert sum(node.KIND == "input" for node in nodes) == 1, "More than one InputNode found"
        if output._downstream_nodes:
            raise ValueError(f"The output of a compiled graph has nodes that use it; compile these. Output:\n{output}")
        for node in nodes:
            self._check(node)
        self._plan_input()
        self._check_uses()
        self._plan_calls()
        self._plan_output()
        for tasks in self.plan.tasks:
            tasks.sort(key=lambda task: task.serial)

    def _check(self, node: Any) -> None:
        if node.KIND == "function":
            raise NotImplementedError("Compiled DAGs currently only support actor method nodes")
        if node.KIND not in (*_INPUTS, "method", "output"):
            if node.KIND == "class":
                raise ValueError(_NO_NEW_ACTORS)
            raise ValueError(f"Found unsupported node of type {type(node)}")
        if node.KIND == "method" and node._get_actor_handle() is None:
            raise ValueError(_NO_NEW_ACTORS)
        transport, device = node.type_hint
        if transport not in ("auto", "shm") or device not in ("default", "cpu"):
            maker = node._get_actor_handle() if node.KIND == "method" else "of the driver"
            raise ValueError(
                f"Actor {maker} returns a tensor with type hint TorchTensor(transport={transport!r}, "
                f"device={device!r}), but there are no GPU channels; hint: transport 'shm' and device 'cpu', and move "
                "tensors in the methods"
            )
        if any(self._is_node(value) for value in node._bound_kwargs.values()):
            raise ValueError("Compiled DAG currently does not support binding to other DAG nodes as kwargs")

    def _is_node(self, value: Any) -> bool:
        return id(value) in self._numbers

    def _number(self, node: Any) -> int:
        return self._numbers[id(node)]

    # ------------------------------------------------------------ the input

    def _plan_input(self) -> None:
        plan = self.plan
        used = {id(arg): arg for node in plan.nodes for arg in node._bound_args if self._is_node(arg)}
        whole = [node for node in used.values() if node.KIND == "input"]
        parts = [node for node in used.values() if node.KIND == "attribute"]
        if whole and parts:
            raise ValueError(_MIXED_INPUTS)
        self._check_unused_parts(parts)
        keys = [node._key for node in parts]
        plan.inputs = [(self._number(node), None) for node in whole]
        plan.inputs += [(self._number(node), node._key) for node in parts]
        plan.positional = 1 if whole else max((key for key in keys if isinstance(key, int)), default=-1) + 1
        plan.keywords = tuple(key for key in keys if isinstance(key, str))
        for number, _ in plan.inputs:
            plan.makers[number] = DRIVER

    def _check_unused_parts(self, used: Iterable[Any]) -> None:
        source = next(node for node in self.plan.nodes if node.KIND == "input")
        keys = list(source.input_attribute_nodes)
        missing = [key for key in keys if key not in {node._key for node in used}]
        if missing:
            raise ValueError(
                "Compiled Graph expects input to be accessed using all of attributes "
                f"{', '.join(map(str, keys))}, but {', '.join(map(str, missing))} "
                f"{'is' if len(missing) == 1 else 'are'} unused. Ensure all input attributes are used and contribute "
                "to the computation of the Compiled Graph output."
            )

    # ------------------------------------------------------------ calls

    def _check_uses(self) -> None:
        calls = [node for node in self.plan.nodes if node.KIND == "method"]
        leaves = [node for node in calls if not node._downstream_nodes and node is not self._output]
        if leaves:
            raise ValueError(
                "Compiled DAG doesn't support leaf nodes, i.e., nodes that don't have downstream nodes and are not "
                f"output nodes. There are {len(leaves)} leaf nodes in the DAG. Please add the outputs of "
                f"{[node.get_method_name() for node in leaves]} to the the MultiOutputNode."
            )
        for node in calls:
            if not any(self._is_node(arg) for arg in node._bound_args):
                raise ValueError(
                    "Compiled DAGs require each task to take a ray.dag.InputNode or at least one other DAGNode as an "
                    f"input. Invalid task node:\n{node}\nPlease bind the task to proper DAG nodes."
                )

    def _plan_calls(self) -> None:
        plan = self.plan
        numbers: dict[Any, int] = {}
        for node in plan.nodes:
            if node.KIND == "method" and node.is_class_method_call:
                handle = node._get_actor_handle()
                actor = numbers.setdefault(handle, len(numbers))
                if actor == len(plan.actors):
                    plan.actors.append(handle)
                    plan.tasks.append([])
                plan.tasks[actor].append(self._planned(node))
        for actor, tasks in enumerate(plan.tasks):
            for task in tasks:
                plan.makers.update((value, actor) for value, _ in task.outputs)
        for actor, tasks in enumerate(plan.tasks):
            for task in tasks:
                for value in task.values():
                    self._add_reader(value, actor)

    def _planned(self, node: Any) -> PlannedTask:
        number = self._number(node)
        outputs: list[tuple[int, int | None]] = [
            (self._number(user), user.output_idx)
            for user in node._downstream_nodes
            if user.KIND == "method" and user.is_class_method_output
        ]
        args = tuple(ValueOf(self._number(arg)) if self._is_node(arg) else arg for arg in node._bound_args)
        return PlannedTask(
            number, node._method_name, args, dict(node._bound_kwargs), outputs or [(number, None)], node._serial,
            node.operation, node.num_returns if outputs else 0,
        )  # fmt: skip

    def _add_reader(self, value: int, party: int) -> None:
        readers = self.plan.readers.setdefault(value, [])
        if party != self.plan.makers[value] and party not in readers:
            readers.append(party)

    # ------------------------------------------------------------ the output

    def _plan_output(self) -> None:
        plan, output = self.plan, self._output
        plan.returns_list = output.KIND == "output"
        for node in output._bound_args if plan.returns_list else [output]:
            if not self._is_node(node):
                raise ValueError(f"the output of a compiled graph is no node: {node!r}")
            plan.outputs.append(self._number(node))
            self._add_reader(self._number(node), DRIVER)


_NO_NEW_ACTORS = "Compiled DAGs can only bind methods to an actor that is already created with Actor.remote()"
