"""Nodes of graphs and plans of compiled graphs, without any process."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import pytest

from hpcray.dag import DAGNode, InputNode, MultiOutputNode
from hpcray.graphs.channels import Party, wire
from hpcray.graphs.dag_node import _DAGNodeNameGenerator, _instances, _PyObjScanner, replaced
from hpcray.graphs.graph_plan import DRIVER, ValueOf, make_plan
from hpcray.graphs.nodes import ClassMethodNode, ClassNode, FunctionNode, bind_method
from hpcray.graphs.visualization import draw_ascii


class Method:
    def __init__(self, count: int) -> None:
        self._num_returns = count


class Handle:
    """Stands for an actor handle."""

    _actor_id = b"\1\2\3\4"

    def __getattr__(self, name: str) -> Method:
        if name.startswith("__"):
            raise AttributeError(name)
        return Method(2 if name == "two" else 1)

    def bind(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return bind_method(self, name, args, kwargs, {})


class Remote:
    """Stands for a remote function or actor class: calls at once."""

    def __init__(self, function: Any) -> None:
        self.remote = function


def task(function: Any, *args: Any, **kwargs: Any) -> FunctionNode:
    return FunctionNode(function, args, kwargs, {}, remote=Remote(function))


# ------------------------------------------------------------ nodes


def test_each_node_runs_once_with_the_results_of_its_arguments() -> None:
    calls: list[str] = []

    def add(name: str, *values: Any, more: Any = 0) -> Any:
        calls.append(name)
        return sum(v if isinstance(v, int) else sum(v) for v in values) + more

    # Nodes are copied by pickle: what counts calls must stay the same object.
    pickle_by_name(add)
    shared = task(add, "shared", 1)
    end = task(add, "end", shared, [shared, 10], more=task(add, "more", shared))
    with pytest.warns(DeprecationWarning):
        assert end.execute(_ray_cache_refs=True) == 1 + 11 + 1
    assert sorted(calls) == ["end", "more", "shared"]
    assert end.cache_from_last_execute[shared.get_stable_uuid()] == 1


def pickle_by_name(function: Any) -> None:
    globals()[function.__name__] = function
    function.__qualname__, function.__module__ = function.__name__, __name__


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_input_is_an_argument_or_its_parts() -> None:
    with InputNode() as inp:
        whole = task(echo, inp)
        parts = task(echo, inp[0], inp.x, inp["y"])
    assert whole.execute(5) == (5,)
    assert parts.execute(1, x=2, y=3) == (1, 2, 3)
    with InputNode() as inp:
        item = task(echo, inp["k"], inp[1])
        attribute = task(echo, inp.real)
    with pytest.raises(KeyError):
        item.execute({"k": 1})
    assert item.execute({"k": 1, 1: 2}) == (1, 2)
    assert attribute.execute(7) == (7,)
    with pytest.raises(AssertionError, match="singleton"):
        task(echo, InputNode()).execute(1)


def echo(*values: Any) -> Any:
    return values


def test_what_nodes_refuse() -> None:
    node = task(echo, 1)
    with pytest.raises(AttributeError, match=r"bind\(\) cannot be used again"):
        node.bind(1)
    with pytest.raises(AttributeError, match=r"use .execute\(\)"):
        node.remote(1)
    with InputNode() as inp, pytest.raises(ValueError, match="cannot be used as args"):
        ClassNode(Handle, (inp,), {}, {})
    with pytest.raises(ValueError, match="should not take any args"):
        InputNode(1)
    with pytest.raises(ValueError, match="Invalid device 'tpu'"):
        node.with_tensor_transport(device="tpu")
    with pytest.raises(TypeError):
        DAGNode([], {}, {}, {})  # type: ignore[abstract]


def test_nodes_pickle_and_show_their_arguments() -> None:
    with InputNode() as inp:
        node = task(echo, inp, 3, {"k": task(echo, "inner")})
    copy = pickle.loads(cloudpickle.dumps(node))
    assert copy.get_stable_uuid() == node.get_stable_uuid()
    assert "InputNode" in str(node) and "inner" in str(node) and str(copy) == str(node)


def test_calls_of_an_actor_of_the_graph_follow_each_other() -> None:
    node = ClassNode(list, ([1],), {}, {}, remote=Remote(list))
    first, second = node.append.bind(2), node.pop.bind()
    assert second._prev_class_method_call is first and first._parent_class_node is node
    with pytest.raises(AttributeError, match="nonsense"):
        node.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match=r"Use .bind\(\) instead"):
        node.append.remote(1)


def test_names_of_nodes_are_unique() -> None:
    with _DAGNodeNameGenerator() as names:
        assert [names.get_node_name(task(echo, i)) for i in range(3)] == ["echo", "echo_1", "echo_2"]
        assert names.get_node_name(InputNode()) == "INPUT_NODE"
        with pytest.raises(ValueError, match="DAGNode"):
            names.get_node_name(3)


def test_a_scanner_finds_and_replaces_and_is_forgotten() -> None:
    scanner = _PyObjScanner(source_type=complex)
    value = {"a": [1j, (2j, "x")], "b": 1j}
    assert scanner.find_nodes(value) == [1j, 2j], "an object is found once"
    assert scanner.replace_nodes({1j: "one", 2j: "two"}) == {"a": ["one", ("two", "x")], "b": "one"}
    scanner.clear()
    assert not _instances
    with InputNode() as inp:
        assert replaced([inp, {"k": (inp,)}], lambda node: "there") == ["there", {"k": ("there",)}]
    assert not _instances


# ------------------------------------------------------------ plans


def test_a_plan_says_who_makes_and_reads_each_value() -> None:
    a, b = Handle(), Handle()
    with InputNode() as inp:
        x = a.bind("f", inp)
        y = a.bind("f", x, 7, key=8)
        first, second = b.bind("two", y)
        end = MultiOutputNode([first, a.bind("f", second), x])
    plan = make_plan(end)
    number = {id(node): n for n, node in enumerate(plan.nodes)}
    one, two = plan.actors.index(a), plan.actors.index(b)
    assert [t.method for t in plan.tasks[one]] == ["f", "f", "f"], "in the order of bind"
    assert plan.tasks[one][1].args == (ValueOf(number[id(x)]), 7) and plan.tasks[one][1].kwargs == {"key": 8}
    assert sorted(index for _, index in plan.tasks[two][0].outputs) == [0, 1]
    assert plan.readers[number[id(inp)]] == [one]
    assert plan.readers[number[id(x)]] == [DRIVER], "its own actor has it already"
    assert plan.readers[number[id(first)]] == [DRIVER] and plan.readers[number[id(second)]] == [one]
    assert (plan.positional, plan.keywords, plan.returns_list) == (1, (), True)
    assert "ClassMethodOutputNode[1]" in draw_ascii(plan) and "---> : Represents Shared" in draw_ascii(plan)


def test_values_go_through_memory_on_a_node_and_by_messages_between_nodes() -> None:
    actors = [Handle() for _ in range(3)]
    with InputNode() as inp:
        end = MultiOutputNode([actor.bind("f", inp) for actor in actors])
    plan = make_plan(end)
    parties = {DRIVER: Party(b"d", 0, 10), 0: Party(b"0", 0, 11), 1: Party(b"1", 1, 12), 2: Party(b"2", 0, 13)}
    wiring = wire(plan, parties, 4, 100)
    (value, _), *_ = plan.inputs
    assert [tuple(shape) for shape in wiring.shapes[0]] == [(2, 4, 100), (1, 4, 100), (1, 4, 100)]
    assert wiring.ends[DRIVER].far == {value: [b"1"]} and wiring.ends[1].sources == {value: None}
    assert wiring.ends[0].sources[value] == (0, 0, 10) and wiring.ends[2].sources[value] == (0, 1, 10)
    assert list(wiring.ends[1].far.values()) == [[b"d"]] and not wiring.ends[1].near


def refused(kind: str) -> Any:
    a = Handle()
    with InputNode() as inp:
        return {
            "function": lambda: task(echo, inp),
            "class": lambda: ClassNode(list, (), {}, {}).append.bind(inp),
            "keyword": lambda: a.bind("f", 1, inp) if False else a.bind("f", inp, key=inp),
            "nested": lambda: a.bind("f", [inp]),
            "mixed": lambda: a.bind("f", inp, inp[0]),
            "no input": lambda: a.bind("f", 1),
            "no node": lambda: MultiOutputNode([a.bind("f", inp), a.bind("f", 1)]),
            "gpu": lambda: a.bind("f", inp).with_tensor_transport("nccl"),
            "leaf": lambda: [a.bind("f", inp), a.bind("g", inp)][1],
            "unused": lambda: [inp.x, a.bind("f", inp.y)][1],
        }[kind]()


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("function", NotImplementedError, "only support actor method nodes"),
        ("class", ValueError, "already created with Actor.remote"),
        ("keyword", ValueError, "does not support binding to other DAG nodes as kwargs"),
        ("nested", ValueError, "placed inside any type of container"),
        ("mixed", ValueError, "use InputNode\\(\\) directly"),
        ("no input", ValueError, "No InputNode found"),
        ("no node", ValueError, "at least one other DAGNode as an input"),
        ("gpu", ValueError, "returns a tensor with type hint.*no GPU channels"),
        ("leaf", ValueError, "leaf nodes.*1 leaf nodes.*'f'"),
        ("unused", ValueError, "x is unused"),
    ],
)
def test_graphs_that_cannot_be_compiled_are_refused(kind: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_plan(refused(kind))


def test_a_graph_has_one_end_that_is_compiled() -> None:
    a = Handle()
    with InputNode() as inp:
        first = a.bind("f", inp)
        second = a.bind("f", inp)
    first.is_cgraph_output_node = second.is_cgraph_output_node = True
    with pytest.raises(ValueError, match="compiled more than once"):
        make_plan(first)
    with pytest.raises(ValueError, match="multiple times"):
        first.experimental_compile()
    assert isinstance(first, ClassMethodNode)
