"""Graphs of tasks and actor calls: executed, and compiled to loops over channels."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from engine import IS_HPCRAY, NAME, PATIENCE, eventually, exceptions, hpcray_only, ray, run_script

if IS_HPCRAY:
    from hpcray.dag import DAGContext, InputNode, MultiOutputNode
else:
    from ray.dag import DAGContext, InputNode, MultiOutputNode

pytestmark = [pytest.mark.usefixtures("session"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
INIT = {"num_cpus": 4}


def mapped(pid):
    """How many memories of channels a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("hpcray-channels")


@ray.remote
def plus(a, b, *more):
    return a + b + sum(more)


@ray.remote(num_cpus=0)
class Adder:
    def __init__(self, amount=0):
        self.amount = amount
        self.calls = 0

    def add(self, x):
        self.calls += 1
        return x + self.amount

    def sum(self, *values, scale=1):
        return scale * sum(values)

    def echo(self, x):
        return x

    @ray.method(num_returns=2)
    def both(self, x):
        return x, -x

    def fail(self, x):
        if x % 2:
            raise ValueError(f"odd {x}")
        return x

    def lock(self, x):
        return threading.Lock()

    def sleep(self, x):
        time.sleep(x)
        return x

    def exit(self, x):
        os._exit(7)

    def first(self, x):
        return float(x[0])

    def called(self):
        return self.calls

    def mapped(self):
        gc.collect()
        return mapped(os.getpid())

    def descriptors(self):
        return len(os.listdir("/proc/self/fd"))


@ray.remote(num_cpus=0)
class Async:
    async def add(self, x):
        await asyncio.sleep(0)
        return x + 1


@pytest.fixture
def compiled():
    """Compiles graphs, which are torn down at the end of the test."""
    made = []

    def compile(dag, **options):
        made.append(dag.experimental_compile(**options))
        return made[-1]

    yield compile
    for graph in made:
        graph.teardown()


# ------------------------------------------------------------ executed


def test_tasks_actors_and_input_form_a_graph():
    with InputNode() as inp:
        actor = Adder.bind(10)
        first = actor.add.bind(inp[0])
        dag = plus.bind(first, inp.more, plus.bind(first, 1))
    assert ray.get(dag.execute(1, more=100)) == 11 + 100 + 12
    assert ray.get(dag.execute(2, more=200)) == 12 + 200 + 13


def test_calls_of_one_actor_are_made_once_and_in_order():
    actor = Adder.bind(1)
    for _ in range(3):
        actor.add.bind(0)
    last = actor.add.bind(plus.bind(1, 1))
    node = plus.bind(last, last)
    assert ray.get(node.execute()) == 6
    assert ray.get(actor.called.bind().execute()) == 4


def test_several_results_and_existing_actors():
    actor = Adder.remote(5)
    with InputNode() as inp:
        low, high = actor.both.bind(inp)
        dag = MultiOutputNode([low, high, plus.options(name="x").bind(low, high)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ray.get(dag.execute(3)) == [3, -3, 0]
    for args, kwargs, match in (((1, 2, 3), {}, "too many positional"), ((), {}, "missing a required argument: 'x'")):
        with pytest.raises(TypeError, match=match):
            actor.add.bind(*args, **kwargs)


# ------------------------------------------------------------ compiled


def test_a_chain_of_actors_and_an_actor_that_comes_twice(compiled):
    a, b = Adder.remote(1), Adder.remote(10)
    with InputNode() as inp:
        dag = a.add.bind(b.add.bind(a.add.bind(inp)))
    graph = compiled(dag)
    for i in range(50):
        assert ray.get(graph.execute(i)) == i + 12
    assert ray.get(a.called.remote()) == 100, "the actor can be reached meanwhile"


def test_fan_out_fan_in_constants_and_keywords(compiled):
    actors = [Adder.remote(i) for i in range(3)]
    with InputNode() as inp:
        parts = [actor.add.bind(inp[0]) for actor in actors]
        dag = MultiOutputNode([actors[0].sum.bind(*parts, 1000, scale=2), parts[1], actors[2].echo.bind(inp.key)])
    graph = compiled(dag)
    for i in range(20):
        assert ray.get(graph.execute(i, key=str(i))) == [2 * (3 * i + 3 + 1000), i + 1, str(i)]
    with pytest.raises(ValueError, match="must be called with 1 positional args, got 2"):
        graph.execute(1, 2, key=3)
    with pytest.raises(ValueError, match="must be called with kwarg `key`"):
        graph.execute(1)
    assert ray.get(graph.execute(1, key=2)[2]) == 2, "other calls were not counted"


def test_methods_with_several_values(compiled):
    a, b = Adder.remote(), Adder.remote(1)
    with InputNode() as inp:
        low, high = a.both.bind(inp)
        dag = MultiOutputNode([b.add.bind(low), high])
    graph = compiled(dag)
    assert [ray.get(graph.execute(i)) for i in range(5)] == [[i + 1, -i] for i in range(5)]


def test_errors_of_methods_are_raised_and_the_graph_goes_on(compiled):
    a, b = Adder.remote(), Adder.remote(1)
    with InputNode() as inp:
        dag = MultiOutputNode([b.add.bind(a.fail.bind(inp)), b.echo.bind(inp)])
    graph = compiled(dag)
    for i in range(6):
        failing, other = graph.execute(i)
        if i % 2:
            for output in failing, other:  # all outputs are the error
                with pytest.raises(ValueError, match=f"odd {i}") as caught:
                    ray.get(output)
                assert isinstance(caught.value, exceptions.RayTaskError)
        else:
            assert ray.get([failing, other]) == [i + 1, i]
    assert ray.get(b.called.remote()) == 3, "it is not called with an error"


def test_values_that_do_not_pickle(compiled):
    a = Adder.remote()
    with InputNode() as inp:
        graph = compiled(a.lock.bind(inp))
    with pytest.raises(TypeError):
        graph.execute(threading.Lock())
    for i in range(3):
        with pytest.raises((TypeError, exceptions.RayTaskError)):
            ray.get(graph.execute(i))


def test_results_can_be_had_in_any_order_and_once(compiled):
    a, b = Adder.remote(1), Adder.remote(2)
    with InputNode() as inp:
        graph = compiled(MultiOutputNode([a.add.bind(inp), b.add.bind(inp)]))
    refs = [graph.execute(i) for i in range(4)]
    assert ray.get(refs[3]) == [4, 5]
    assert ray.get(refs[1][1]) == 3 and ray.get(refs[1][0]) == 2
    with pytest.raises(ValueError, match="can only be called once"):
        ray.get(refs[1][0])
    with pytest.raises(ValueError, match="must be a list of"):
        ray.get([refs[2][0], ray.put(1)])
    for refuse in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="CompiledDAGRef cannot be"):
            refuse(refs[2][0])
    for pass_on in (ray.put, lambda ref: a.echo.remote([ref])):
        with pytest.raises(TypeError, match="Serialization of CompiledDAGRef is not supported|non-serializable"):
            pass_on(refs[2][0])
    with pytest.raises(TypeError, match="wait"):
        ray.wait([refs[2][0]])
    del refs
    assert ray.get(graph.execute(5)) == [6, 7]


def test_results_that_nobody_wants_do_not_block(compiled):
    a = Adder.remote(1)
    with InputNode() as inp:
        graph = compiled(MultiOutputNode([a.add.bind(inp), a.echo.bind(inp)]), _max_inflight_executions=2)
    for i in range(100):
        graph.execute(i)
    kept = graph.execute(7)[1]
    gc.collect()
    assert ray.get(kept) == 7
    assert ray.get(a.called.remote()) == 101


def test_too_many_executions_are_refused(compiled):
    a = Adder.remote(1)
    with InputNode() as inp:
        graph = compiled(a.add.bind(inp), _max_inflight_executions=2, _max_buffered_results=1)
    refs = [graph.execute(0), graph.execute(1)]
    with pytest.raises(exceptions.RayCgraphCapacityExceeded, match="more than 2 in-flight executions"):
        graph.execute(2)
    with pytest.raises(exceptions.RayCgraphCapacityExceeded, match="more than 1 buffered results"):
        ray.get(refs[1])
    assert ray.get(refs[0]) == 1
    graph.execute(2)
    if IS_HPCRAY:
        assert ray.get(refs[1]) == 2


def test_a_get_that_takes_too_long_raises(compiled):
    a = Adder.remote()
    with InputNode() as inp:
        graph = compiled(a.sleep.bind(inp))
    ref = graph.execute(1.5)
    for timeout in (0, 0.2):
        later = graph.execute(0.0)
        began = time.monotonic()
        with pytest.raises(exceptions.RayChannelTimeoutError, match="RAY_CGRAPH_get_timeout"):
            ray.get(later, timeout=timeout)
        if IS_HPCRAY:
            with pytest.raises(exceptions.RayChannelTimeoutError):
                ray.get(later, timeout=0)
        assert time.monotonic() - began < 1
    assert ray.get(ref, timeout=-1) == 1.5


def test_a_get_with_a_timeout_of_minus_one_waits_longer_than_the_default(compiled, monkeypatch):
    monkeypatch.setattr(DAGContext.get_current(), "get_timeout", 0.2)
    a = Adder.remote()
    with InputNode() as inp:
        graph = compiled(a.sleep.bind(inp))
    assert ray.get(graph.execute(1.0), timeout=-1) == 1.0
    assert ray.get([graph.execute(1.0)], timeout=-1) == [1.0]


def test_large_arrays_are_not_copied_and_stay(compiled):
    a, b = Adder.remote(), Adder.remote()
    with InputNode() as inp:
        graph = compiled(MultiOutputNode([a.first.bind(inp), b.echo.bind(inp)]), _buffer_size_bytes=100)
    kept = []
    for i in range(4):
        value = np.full(12_500_000 if i < 2 else 1000 * i, i, dtype=float)
        first, same = ray.get(graph.execute(value))
        assert first == i and np.array_equal(value, same)
        kept.append(same)
    assert [float(array[-1]) for array in kept] == [0, 1, 2, 3], "what is read is not overwritten"
    assert not kept[0].flags.writeable
    assert ray.get(graph.execute(list(range(100_000))))[1][-1] == 99_999, "large without arrays"
    before = ray.get(b.descriptors.remote())
    for i in range(150):
        ray.get(graph.execute(np.zeros(1000 * i + 10_000)))
    # A reader keeps as many blocks mapped as executions may be under way: ten, and its writer a few.
    assert ray.get(b.descriptors.remote()) < before + 50


@hpcray_only
def test_executions_by_the_ten_thousand(compiled):
    a, b = Adder.remote(1), Adder.remote(1)
    with InputNode() as inp:
        graph = compiled(b.add.bind(a.add.bind(inp)))
    pending = []
    for i in range(10_000):
        pending.append(graph.execute(i))
        if len(pending) == 8:
            assert ray.get(pending) == list(range(i - 5, i + 3))
            pending.clear()


def test_asyncio(compiled):
    a, b = Adder.remote(1), Adder.remote()
    with InputNode() as inp:
        graph = compiled(MultiOutputNode([a.add.bind(inp), b.fail.bind(inp)]), enable_asyncio=True)
    with pytest.raises(ValueError, match="Use execute_async"):
        graph.execute(1)

    async def one(i):
        refs = good, maybe = await graph.execute_async(i)
        if i % 2:
            for ref in refs:
                with pytest.raises(ValueError, match=f"odd {i}"):
                    await ref
        else:
            assert (await good, await maybe) == (i + 1, i)
        with pytest.raises(ValueError, match="once"):
            await good

    async def main():
        for i in range(0, 40, 8):
            await asyncio.gather(*(one(i + j) for j in range(8)))
        await graph.execute_async(1)

    asyncio.run(main())


@hpcray_only
def test_methods_of_async_actors(compiled):
    a = Async.remote()
    with InputNode() as inp:
        graph = compiled(a.add.bind(a.add.bind(inp)))
    assert ray.get(graph.execute(1)) == 3
    assert ray.get(a.add.remote(1)) == 2


# ------------------------------------------------------------ ends


def test_actors_can_be_used_again_after_a_teardown(compiled):
    a, b = Adder.remote(1), Adder.remote(2)
    for amount in range(3):
        with InputNode() as inp:
            graph = compiled(b.add.bind(a.add.bind(inp)))
        unread = graph.execute(amount)
        assert ray.get(graph.execute(amount)) == amount + 3
        pending = graph.execute(1)
        graph.teardown()
        with pytest.raises(exceptions.RayChannelError):
            ray.get(pending)
        with pytest.raises(exceptions.RayChannelError):
            graph.execute(1)
        del unread
        assert graph.is_teardown
    assert ray.get(a.add.remote(1)) == 2


def test_a_graph_that_nobody_refers_to_ends():
    a = Adder.remote(1)
    for i in range(3):
        with InputNode() as inp:
            graph = a.add.bind(inp).experimental_compile()
        assert ray.get(graph.execute(i)) == i + 1
        del graph, inp
        gc.collect()


@hpcray_only
def test_graphs_that_have_ended_leave_no_memory():
    def graphs(count):
        for i in range(count):
            with InputNode() as inp:
                graph = a.echo.bind(b.echo.bind(inp)).experimental_compile()
            assert ray.get(graph.execute(np.full(100_000, i)))[0] == i
            if i % 2:
                graph.teardown()
            del graph, inp
        gc.collect()
        return [mapped(os.getpid()), *ray.get([a.mapped.remote(), b.mapped.remote()])]

    a, b = Adder.remote(), Adder.remote()
    graphs(4)
    before = graphs(2)
    eventually(lambda: max(after - first for after, first in zip(graphs(6), before, strict=True)) <= 4)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_the_death_of_an_actor_ends_the_graph_and_spares_the_others(compiled, how):
    a, b = Adder.remote(1), Adder.remote(1)
    with InputNode() as inp:
        graph = compiled(b.add.bind(a.exit.bind(inp) if how == "exit" else a.sleep.bind(inp)))
    refs = [graph.execute(3), graph.execute(3)]
    if how == "kill":
        ray.kill(a)
    began = time.monotonic()
    for ref in refs:
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(ref)
    with pytest.raises(exceptions.RayChannelError, match="Channel closed") as caught:
        graph.execute(1)
    if IS_HPCRAY:
        assert isinstance(caught.value.__cause__, exceptions.ActorDiedError), "the text says which actor, and why"
    assert time.monotonic() - began < PATIENCE / 2
    graph.teardown()
    with InputNode() as inp:
        graph = compiled(b.add.bind(inp))
    assert ray.get(graph.execute(1)) == 2


def test_teardown_can_kill_the_actors(compiled):
    a = Adder.remote(1)
    with InputNode() as inp:
        graph = compiled(a.add.bind(inp))
    assert ray.get(graph.execute(1)) == 2
    graph.teardown(kill_actors=True)
    with pytest.raises(exceptions.RayActorError):
        ray.get(a.add.remote(1))


@hpcray_only
def test_a_teardown_gives_up_on_a_method_that_does_not_end(compiled, monkeypatch, caplog):
    monkeypatch.setattr(DAGContext.get_current(), "teardown_timeout", 0.2)
    a = Adder.remote(1)
    with InputNode() as inp:
        graph = compiled(a.sleep.bind(inp))
    graph.execute(3)
    time.sleep(0.3)
    began = time.monotonic()
    graph.teardown()
    assert time.monotonic() - began < 2


def test_compiling_a_graph_of_a_dead_actor_raises():
    a = Adder.remote(1)
    ray.kill(a)
    with InputNode() as inp:
        dag = a.add.bind(inp)
    with pytest.raises(exceptions.RayActorError):
        dag.experimental_compile()


@hpcray_only
def test_the_end_of_a_driver_ends_the_loops_of_actors_that_outlive_it(tmp_path: Path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import os, signal, sys\nimport engine_under_test as ray\nfrom hpcray.dag import InputNode\n"
        "ray.init(sys.argv[1], namespace='graphs')\n"
        "actor = ray.get_actor('outlives', 'graphs')\n"
        "with InputNode() as inp:\n    graph = actor.add.bind(inp).experimental_compile()\n"
        "assert ray.get(graph.execute(1)) == 2\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    Adder.options(name="outlives", namespace="graphs", lifetime="detached").remote(1)
    actor = ray.get_actor("outlives", "graphs")
    ray.get(actor.called.remote())
    from hpcray.runtime.core_worker.core_worker import current

    done = run_script(script, current.process.place.session_dir)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with InputNode() as inp:
        graph = actor.add.bind(inp).experimental_compile()
    assert ray.get(graph.execute(2), timeout=PATIENCE) == 3, "its loop has given way"
    graph.teardown()
    ray.kill(actor)


@hpcray_only
def test_ctrl_c_interrupts_a_get_and_leaves_nothing(tmp_path: Path):
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import os, signal, threading, time\nimport engine_under_test as ray\nfrom hpcray.dag import InputNode\n"
        "@ray.remote\nclass Slow:\n    def f(self, x):\n        time.sleep(x)\n        return x\n"
        "ray.init(num_cpus=1)\na = Slow.remote()\n"
        "with InputNode() as inp:\n    graph = a.f.bind(inp).experimental_compile()\n"
        "ref, later = graph.execute(2), graph.execute(0)\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "began = time.monotonic()\n"
        "try:\n    ray.get(ref)\nexcept KeyboardInterrupt:\n    print('interrupted', time.monotonic() - began < 1.5)\n"
        "print(ray.get(later))\n"
    )
    shared = set(os.listdir("/dev/shm"))
    done = run_script(script)
    assert done.stdout.split() == ["interrupted", "True", "0"], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    eventually(lambda: not {name for name in set(os.listdir("/dev/shm")) - shared if "chan" in name})


def test_drawings(compiled, capsys):
    a = Adder.remote()
    with InputNode() as inp:
        low, high = a.both.bind(inp)
        graph = compiled(MultiOutputNode([low, high]))
    text = graph.visualize(format="ascii", view=True)
    assert capsys.readouterr().out == text + "\n"
    assert "0:InputNode" in text and "ClassMethodOutputNode[1]" in text and "Method: both" in text
    with pytest.raises(ValueError, match="not compatible"):
        graph.visualize(format="ascii", channel_details=True)
    assert NAME in ("ray", "hpcray") and graph.get_id() in str(graph)


@ray.remote
class Several:
    @ray.method(num_returns=2)
    def give(self, values):
        return values

    @ray.method(num_returns=2)
    async def soon(self, values):
        return values


@pytest.mark.parametrize("method", ["give", "soon"])
@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1, 2, 3), "Expected 2 outputs, but got 3 outputs"),
        ((1,), "Expected 2 outputs, but got 1 outputs"),
        ("ab", "Expected a tuple of 2 outputs, but got <class 'str'>"),
        ({0: "a", 1: "b"}, "Expected a tuple of 2 outputs, but got <class 'dict'>"),
        (7, "Expected a tuple of 2 outputs, but got <class 'int'>"),
        (None, "Expected a tuple of 2 outputs, but got <class 'NoneType'>"),
    ],
)
def test_a_wrong_number_of_returns_is_an_error_of_each_of_them(method, values, text):
    if not IS_HPCRAY:
        pytest.skip("on Ray the graph ends with it, and its result is the end")
    actor = Several.remote()
    with InputNode() as inp:
        graph = MultiOutputNode(getattr(actor, method).bind(inp)).experimental_compile()
    try:
        for ref in graph.execute(values):
            with pytest.raises(ValueError, match=text) as raised:
                ray.get(ref)
            assert isinstance(raised.value, exceptions.RayTaskError)
        assert ray.get(graph.execute(("a", "b"))) == ["a", "b"]
    finally:
        graph.teardown()
