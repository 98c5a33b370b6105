"""Random programs: values are put, computed, boxed, kept by actors, passed on and dropped; what is read is right."""

from __future__ import annotations

import gc
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engine import ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "object_store_memory": 192 << 20}
LARGE = 60_000


def make(n: int, large: bool):
    return np.full(LARGE, n) if large else n


def number(value) -> int:
    if isinstance(value, np.ndarray):
        assert value.shape == (LARGE,)
        assert (value == value[0]).all()
        return int(value[0])
    return value


@ray.remote
def create(n, large):
    return make(n, large)


@ray.remote
def add(value, n):
    return value + n


@ray.remote
def box(n, large, *refs):
    return [ray.put(make(n, large)), *[ref for inner in refs for ref in inner]]


@ray.remote
def total(refs):
    return sum(number(value) for value in ray.get(refs))


@ray.remote
def deep(refs, depth):
    return ray.get(deep.remote(refs, depth - 1)) if depth else refs[::-1]


@ray.remote
class Shelf:
    def __init__(self):
        self.kept = {}

    def keep(self, key, refs):
        self.kept[key] = refs

    def hand_out(self, key):
        return self.kept.get(key, [])

    def drop(self, key):
        self.kept.pop(key, None)

    def total(self, key):
        return sum(number(value) for value in ray.get(self.kept.get(key, [])))


class World:
    """Refs with the numbers that their values must hold."""

    def __init__(self, seed: int, shelves: list) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.shelves = shelves
        self.held: list[tuple] = []
        self.shelved: dict[tuple, list[int]] = {}
        self.reads = 0

    def step(self) -> None:
        choices = [self.put, self.create, self.add, self.box, self.total, self.deep, self.keep, self.hand_out]
        choices += [self.shelf_total, self.drop, self.drop, self.read, self.read, self.wait]
        self.random.choice(choices)()

    def some(self, most: int = 4) -> list[tuple]:
        return self.random.sample(self.held, min(len(self.held), self.random.randint(1, most)))

    def new(self) -> tuple[int, bool]:
        return self.random.randint(0, 1_000_000), self.random.random() < 0.4

    def put(self):
        n, large = self.new()
        self.held.append((ray.put(make(n, large)), n))

    def create(self):
        n, large = self.new()
        self.held.append((create.remote(n, large), n))

    def add(self):
        for ref, n in self.some(2):
            self.held.append((add.remote(ref, 7), n + 7))

    def box(self):
        n, large = self.new()
        inside = self.some()
        refs = ray.get(box.remote(n, large, [ref for ref, _ in inside]))
        self.held += zip(refs, [n, *[m for _, m in inside]], strict=True)

    def total(self):
        inside = self.some()
        assert ray.get(total.remote([ref for ref, _ in inside])) == sum(n for _, n in inside)

    def deep(self):
        inside = self.some(2)
        refs = ray.get(deep.remote([ref for ref, _ in inside], self.random.randint(0, 2)))
        self.held += zip(refs, [n for _, n in inside][::-1], strict=True)

    def place(self) -> tuple:
        key = (self.seed, self.random.randint(0, 3))
        return self.random.randrange(len(self.shelves)), key

    def keep(self):
        where, inside = self.place(), self.some()
        self.shelved[where] = [n for _, n in inside]
        ref = self.shelves[where[0]].keep.remote(where[1], [ref for ref, _ in inside])
        if self.random.random() < 0.5:
            ray.get(ref)

    def hand_out(self):
        where = self.place()
        refs = ray.get(self.shelves[where[0]].hand_out.remote(where[1]))
        self.held += zip(refs, self.shelved.get(where, []), strict=True)
        if self.random.random() < 0.5:
            self.shelves[where[0]].drop.remote(where[1])
            self.shelved.pop(where, None)

    def shelf_total(self):
        where = self.place()
        assert ray.get(self.shelves[where[0]].total.remote(where[1])) == sum(self.shelved.get(where, []))

    def drop(self):
        keep = self.random.randint(0, 25)
        self.random.shuffle(self.held)
        del self.held[keep:]
        if self.random.random() < 0.2:
            gc.collect()

    def read(self):
        inside = self.some(6)
        values = ray.get([ref for ref, _ in inside])
        assert [number(value) for value in values] == [n for _, n in inside]
        self.reads += len(inside)

    def wait(self):
        refs = list({ref for ref, _ in self.some(6)})
        if refs:
            ready, rest = ray.wait(refs, num_returns=self.random.randint(1, len(refs)))
            assert set(ready) | set(rest) == set(refs)


def run(seed: int, steps: int, shelves: list) -> int:
    world = World(seed, shelves)
    for _ in range(steps):
        world.step()
    return world.reads


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_one_thread(seed):
    assert run(seed, 300, [Shelf.remote() for _ in range(2)]) > 0


def test_several_threads():
    shelves = [Shelf.remote() for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda seed: run(seed, 150, shelves), range(100, 104)))


def test_in_tasks():
    program = ray.remote(lambda seed, shelves: run(seed, 80, shelves))
    shelves = [Shelf.remote() for _ in range(2)]
    assert all(ray.get([program.remote(seed, shelves) for seed in range(200, 204)]))
