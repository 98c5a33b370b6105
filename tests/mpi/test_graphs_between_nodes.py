"""Compiled graphs whose actors are on several nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.jobs import MPIRUN, Job

PROGRAM = """
import time
import numpy as np
import hpcray as ray
from hpcray.dag import InputNode, MultiOutputNode

ray.init()
ids = sorted((n["Index"], n["NodeID"]) for n in ray.nodes())
where = [ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ident, soft=False) for _, ident in ids]

@ray.remote(num_cpus=0)
class Stage:
    def __init__(self, amount):
        self.amount = amount
    def add(self, x):
        return x + self.amount
    def echo(self, x):
        return x
    def fail(self, x):
        if x >= 25:
            raise KeyError(x)
        return x
    def sleep(self, x):
        time.sleep(x)

here, there, beside = (Stage.options(scheduling_strategy=where[n]).remote(a) for n, a in ((0, 1), (1, 10), (1, 100)))

# All ways: driver to both nodes, node to node and back, within the other node, errors.
with InputNode() as inp:
    x = there.add.bind(here.add.bind(inp))
    y = beside.add.bind(x)
    graph = MultiOutputNode([x, y, here.add.bind(y), there.fail.bind(inp)]).experimental_compile()
for i in range(50):
    refs = graph.execute(i)
    if i < 25:
        assert ray.get(refs) == [i + 11, i + 111, i + 112, i]
        continue
    try:
        ray.get(refs[i % 4])  # all outputs are the error
    except KeyError as error:
        assert error.cause.args == (i,)
    else:
        raise AssertionError("no error")
for i in range(50):
    graph.execute(i)
graph.teardown()

# Large values, which stay, and refs in values.
with InputNode() as inp:
    graph = here.echo.bind(there.echo.bind(inp)).experimental_compile()
kept = [ray.get(graph.execute(np.full(1_000_000, i, float))) for i in range(25)]
assert all((array == i).all() for i, array in enumerate(kept))
refs = [ray.get(graph.execute([ray.put(i)])) for i in range(25)]
assert ray.get([ref for (ref,) in refs]) == list(range(25))
graph.teardown()

# A death on the other node, while values are under way.
with InputNode() as inp:
    graph = here.echo.bind(there.sleep.bind(inp)).experimental_compile()
waiting = graph.execute(60)
ray.kill(there)
began = time.monotonic()
try:
    ray.get(waiting, timeout=50)
except ray.exceptions.ActorDiedError:
    assert time.monotonic() - began < 30
else:
    raise AssertionError("no error")
with InputNode() as inp:
    graph = beside.add.bind(here.add.bind(inp)).experimental_compile()
assert ray.get(graph.execute(1)) == 102
print("done")
"""


@pytest.mark.usefixtures("both_ways")
def test_values_errors_and_deaths_cross_nodes(tmp_path: Path) -> None:
    script = tmp_path / "graphs.py"
    script.write_text(PROGRAM)
    with Job([*MPIRUN, "-n", "2", sys.executable, "-m", "hpcray", str(script)]) as job:
        ended = job.wait(110)
    assert (ended.code, ended.out.split()) == (0, ["done"]), ended.err[-3000:]


LARGE_ERRORS = """
import asyncio
import hpcray as ray
from hpcray.dag import InputNode, MultiOutputNode

ray.init()
ids = sorted((n["Index"], n["NodeID"]) for n in ray.nodes())
where = [ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(ident, soft=False) for _, ident in ids]

@ray.remote(num_cpus=0)
class Stage:
    def echo(self, x):
        return x
    def fail(self, size):
        if size < 0:
            raise ValueError("x" * -size)
        return size
    @ray.method(num_returns=2)
    def two(self, size):
        return self.fail(size), b"y"
    async def soon(self, size):
        return self.fail(size)

here, there = (Stage.options(scheduling_strategy=where[n]).remote() for n in (0, 1))
SIZES = 10, 100_000, 300_000, 5_000_000

def is_error(ref, size):
    try:
        value = ray.get(ref)
    except ValueError as error:
        assert isinstance(error, ray.exceptions.RayTaskError) and len(str(error.cause)) == size, size
    else:
        raise AssertionError(f"an error of {size} bytes is the value {type(value)}")

def check(graph):
    for size in SIZES:
        refs = graph.execute(-size)
        for ref in refs if isinstance(refs, list) else [refs]:
            is_error(ref, size)
        refs = graph.execute(size)
        assert size in (ray.get(refs) if isinstance(refs, list) else [ray.get(refs)])
    graph.teardown()

with InputNode() as inp:  # to the driver
    check(there.fail.bind(inp).experimental_compile())
with InputNode() as inp:  # from node to node, and back
    check(here.echo.bind(there.echo.bind(here.fail.bind(inp))).experimental_compile())
with InputNode() as inp:  # several outputs, of which others are not errors of their own
    check(MultiOutputNode([here.echo.bind(there.fail.bind(inp)), there.echo.bind(inp)]).experimental_compile())
with InputNode() as inp:  # several returns
    check(MultiOutputNode([here.echo.bind(x) for x in there.two.bind(inp)]).experimental_compile())

async def awaited():
    with InputNode() as inp:
        graph = here.echo.bind(there.soon.bind(inp)).experimental_compile(enable_asyncio=True)
    for size in SIZES:
        future = await graph.execute_async(-size)
        try:
            await future
        except ValueError as error:
            assert len(str(error.cause)) == size
        else:
            raise AssertionError("a value")
    graph.teardown()

asyncio.run(awaited())

# Without a graph: an argument, a value of a generator, a ref inside of a value.
@ray.remote(num_cpus=0)
def fail(size):
    raise ValueError("x" * size)
@ray.remote(num_cpus=0)
def stream(size):
    yield 1
    raise ValueError("x" * size)
@ray.remote(num_cpus=0)
def inside(refs):
    return ray.get(refs[0])
for size in SIZES:
    ref = fail.options(scheduling_strategy=where[1]).remote(size)
    is_error(ref, size)
    is_error(inside.options(scheduling_strategy=where[1]).remote([ref]), size)
    values = stream.options(num_returns="streaming", scheduling_strategy=where[1]).remote(size)
    assert ray.get(next(values)) == 1
    is_error(next(values), size)
print("done")
"""


@pytest.mark.usefixtures("both_ways")
def test_large_errors_cross_nodes_as_errors(tmp_path: Path) -> None:
    script = tmp_path / "errors.py"
    script.write_text(LARGE_ERRORS)
    with Job([*MPIRUN, "-n", "2", sys.executable, "-m", "hpcray", str(script)]) as job:
        ended = job.wait(110)
    assert (ended.code, ended.out.split()) == (0, ["done"]), ended.err[-3000:]
