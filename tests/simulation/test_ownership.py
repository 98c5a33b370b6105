"""Reference counting under any order of events: nothing is freed while it can be reached, nothing stays behind.

The world draws every step from a script: which message arrives next, what a program does, who dies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from ownership_oracle import checked_states
from ownership_world import World

REST = 500
SIM = settings(max_examples=examples(100), print_blob=True)


@pytest.fixture(autouse=True, scope="module")
def states() -> Iterator[None]:
    with checked_states():
        yield


def run(
    pick: Callable[[int], int], steps: int, deaths: int = 0, processes: int = 4, nodes: int = 2, **more: int
) -> World:
    world = World(pick, processes, nodes, deaths, **more)
    for done in range(1, steps + 1):
        world.step()
        if done % REST == 0:
            world.settle()
            world.oracle.at_rest()
    world.end()
    return world


def picker(script: list[int], seed: int) -> Callable[[int], int]:
    """Draw from the script, then from a generator: what comes to rest must not depend on the script's length."""
    random = Random(seed)
    numbers = iter(script)
    return lambda n: next(numbers, random.randrange(1 << 20)) % n


def random_script(seed: int, length: int) -> list[int]:
    """A long script: hypothesis by itself hardly draws any."""
    random = Random(seed)
    return [random.randrange(1 << 20) for _ in range(length)]


SCRIPT = st.one_of(
    st.lists(st.integers(0, 10_000), max_size=200),
    st.builds(random_script, st.integers(0, 1 << 30), st.integers(0, 1500)),
)


@SIM
@given(SCRIPT, st.integers(0, 100), st.integers(2, 5), st.integers(1, 3))
def test_nothing_is_freed_early_and_nothing_leaks(script: list[int], seed: int, processes: int, nodes: int) -> None:
    run(picker(script, seed), 20 + len(script) // 3, 0, processes, nodes)


@SIM
@given(SCRIPT, st.integers(0, 100), st.integers(3, 6), st.integers(1, 3))
def test_nothing_is_freed_early_and_nothing_leaks_when_processes_die(
    script: list[int], seed: int, processes: int, nodes: int
) -> None:
    run(picker(script, seed), 20 + len(script) // 3, 4, processes, nodes)


@settings(SIM, max_examples=examples(60))
@given(SCRIPT, st.integers(0, 100), st.integers(3, 6), st.integers(2, 5), st.integers(2, 5), st.integers(0, 3))
def test_nothing_is_freed_early_and_nothing_leaks_when_nodes_are_neighbors(
    script: list[int], seed: int, processes: int, nodes: int, host: int, losses: int
) -> None:
    """And what is read in a neighbor's store stays there, whatever becomes of the connection, or of the node."""
    run(
        picker(script, seed), 20 + len(script) // 3, seed % 3, processes, nodes, losses=losses, host=host,
        cuts=seed % 5,
    )  # fmt: skip


@settings(SIM, max_examples=examples(40))
@given(SCRIPT, st.integers(0, 100), st.integers(3, 6), st.integers(1, 4), st.sampled_from([2000, 1 << 30]))
def test_nothing_is_freed_early_and_nothing_leaks_when_nodes_die_and_copies_vanish(
    script: list[int], seed: int, processes: int, nodes: int, lineage: int
) -> None:
    """And what lineage allows is made again, no task that must not run twice does, and every get ends."""
    run(picker(script, seed), 20 + len(script) // 3, seed % 3, processes, nodes, losses=3, lineage=lineage)


@pytest.mark.parametrize("seed", range(150))
def test_a_giver_that_dies_between_its_pledge_and_its_reply(seed: int) -> None:
    """Whether the reply came or not, in whatever order its death is heard of: right for the taker, and no leak."""
    random = Random(seed)
    world = World(random.randrange, 3, 1)
    owner, giver, taker = world.living
    owner.put(owner.state, [], bool(seed % 2))
    owner.submit(owner.state, giver.id, owner.state.vars[:1], [])
    world.settle()
    giver.state.vars.append(giver.frames[1].vars[0])
    giver.finish(giver.frames[1], [], False, False)
    owner.state.vars.clear()
    world.settle()
    taker.submit(taker.state, giver.id, [], [])
    world.settle()
    giver.finish(giver.frames[1], giver.state.vars[:1], False, False)
    giver.state.vars.clear()
    giver.turn()
    for _ in range(random.randrange(5)):
        world.deliver()
        world.oracle.after_step()
    world.kill(giver)
    world.settle()
    world.oracle.at_rest()
    if taker.table.entries[taker.state.vars[0].id].contained:
        taker.get(taker.state, taker.state.vars[0])
        taker.get(taker.state, taker.state.vars[1])
        world.settle()
        assert taker.reads == 2
    world.end()


@pytest.mark.parametrize("deaths", [0, 3])
@pytest.mark.parametrize("seed", range(10))
def test_long_histories_keep_all_invariants(seed: int, deaths: int) -> None:
    run(Random(seed).randrange, 2500, deaths, 4 + seed % 3, 1 + seed % 3)


@pytest.mark.parametrize("seed", range(12))
def test_long_histories_of_losses_keep_all_invariants(seed: int) -> None:
    lineage = 3000 if seed % 4 == 3 else 1 << 30
    run(Random(seed).randrange, 1000, seed % 3, 3 + seed % 4, 1 + seed % 4, losses=3, lineage=lineage)


@pytest.mark.parametrize("seed", range(40))
def test_long_histories_of_neighbors_keep_all_invariants(seed: int) -> None:
    nodes = 2 + seed % 4
    run(
        Random(seed).randrange, 800, seed % 3, 3 + seed % 4, nodes, losses=seed % 5, host=2 + 3 * (seed % 2),
        cuts=(0, 4, 8)[seed % 3],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_long_histories_of_nodes_that_leave_keep_all_invariants(seed: int) -> None:
    """What a borrower keeps is not lost to anybody, and goes with the last ref."""
    run(Random(seed).randrange, 1000, seed % 3, 4 + seed % 3, 2 + seed % 3, losses=seed % 4 // 3, departures=8)


def test_the_departures_reach_what_they_are_to_check() -> None:
    seen: Counter[str] = Counter()
    for seed in range(24):
        world = run(Random(seed).randrange, 1200, 0, 6, 3, departures=8)
        seen.update(world.sent)
        seen.update(handed_over=world.handed_over, departures=len(world.kept_at), in_time=world.in_time)
        seen.update(read=world.read_kept, excused=len(world.oracle.excused), objects=len(world.values))
    assert seen["departures"] >= 40 and seen["in_time"] >= 40, seen
    assert seen["KeepCopies"] >= 20 and seen["handed_over"] >= 20 and seen["read"] >= 20, seen
    assert seen["excused"] < seen["objects"] / 3, "departures hide what the test should see"


def test_the_neighbors_reach_what_they_are_to_check() -> None:
    seen: Counter[str] = Counter()
    for seed in range(120):
        world = run(Random(seed).randrange, 900, 2, 5, 4, losses=3, host=4, cuts=5)
        seen.update(world.near)
        seen.update(remade=world.remade, dead=len(world.dead), excused=len(world.oracle.excused))
        seen.update(objects=len(world.values))
    for what in ("Open", "Release", "read", "met", "unmet", "cut", "remade"):
        assert seen[what] >= 20, (what, seen)
    assert seen["read of the dead"] and seen["file read"] and seen["file failed"], seen
    assert seen["excused"] < seen["objects"] / 3, "deaths hide what the test should see"


def test_the_losses_reach_what_they_are_to_check() -> None:
    seen: Counter[str] = Counter()
    for seed in range(48):
        world = run(Random(seed).randrange, 1000, 0, 4, 3, losses=3, lineage=(900, 1 << 30)[seed % 2])
        seen.update(world.sent)
        seen.update(world.verdicts)
        seen.update(remade=world.remade, dead=len(world.dead), excused=len(world.oracle.excused))
        seen.update(objects=len(world.values), evicted=world.evicted, kept_here=world.kept_here)
    assert seen["evicted"] >= 20 and seen["kept_here"] >= 5, seen
    assert seen["remade"] >= 150 and seen["ObjectLost"] >= 90 and seen["dead"] >= 60, seen
    for why in ("PUT", "RETRIES_DISABLED", "MAX_ATTEMPTS_EXCEEDED", "DEPENDENCY_FAILED", "LINEAGE_EVICTED"):
        assert seen[why], (why, seen)
    assert seen["excused"] < seen["objects"] / 4, "deaths hide what the test should see"


def test_the_histories_reach_what_they_are_to_check() -> None:
    """The tests above are worth something only where refs travel every way, in numbers."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        world = run(Random(seed).randrange, 1500, 5, 6)
        seen.update(world.sent)
        seen.update(frees=world.oracle.frees, reads=sum(p.reads for p in world.processes.values()))
        seen.update(deaths=len(world.dead), excused=len(world.oracle.excused), objects=len(world.values))
    wanted = "BorrowAdd BorrowAck BorrowDrop BorrowTake ObjectGet ObjectReady Open Opened Release Free AddLocation"
    for name in (*wanted.split(), "PushTask", "TaskReply", "CancelTask", "frees", "reads", "deaths"):
        assert seen[name] >= 20, (name, seen)
    assert seen["SettleBorrows"] and seen["BorrowsSettled"], "no giver died between its pledge and its reply"
    assert seen["excused"] < seen["objects"] / 2, "most objects are excused: deaths hide what the test should see"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lineage", [3000, 1 << 30])
def test_a_million_steps_of_losses(lineage: int) -> None:
    steps = 0
    for seed in range(1000, 1250):
        steps += run(
            Random(seed).randrange, 2000, seed % 4, 3 + seed % 6, 1 + seed % 5, losses=4, lineage=lineage
        ).steps
    assert steps >= 500_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_steps_of_neighbors() -> None:
    steps = 0
    for seed in range(2000, 2400):
        steps += run(
            Random(seed).randrange, 2500, seed % 4, 3 + seed % 4, 2 + seed % 4, losses=seed % 5,
            host=2 + 3 * (seed % 2), cuts=seed % 9, lineage=(3000, 1 << 30)[seed % 2],
        ).steps  # fmt: skip
    assert steps >= 1_000_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_steps_of_departures() -> None:
    steps = 0
    for seed in range(3000, 3500):
        steps += run(
            Random(seed).randrange, 2000, seed % 4, 3 + seed % 4, 2 + seed % 4, losses=seed % 3, departures=12,
        ).steps  # fmt: skip
    assert steps >= 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [0, 2, 5])
def test_more_than_a_hundred_thousand_steps(deaths: int) -> None:
    steps = 0
    for seed in range(100, 110):
        steps += run(Random(seed).randrange, 4000, deaths, 3 + seed % 6, 1 + seed % 4).steps
    assert steps >= 40_000
