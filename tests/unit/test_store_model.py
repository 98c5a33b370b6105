"""Several node stores together, driven in any order, against the model in `store_model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from store_model import UNIT, Cluster

STEPS: tuple[Callable[[Cluster, int], None], ...] = (
    *[Cluster.create] * 2,
    *[Cluster.seal] * 4,
    *[Cluster.open] * 8,
    *[Cluster.release] * 7,
    *[Cluster.free] * 3,
    *[Cluster.deliver] * 14,
    *[Cluster.move] * 4,
    *[Cluster.report] * 5,
    Cluster.wait,
)
READERS = (
    Cluster.create,
    *[Cluster.seal] * 2,
    *[Cluster.open] * 12,
    *[Cluster.release] * 3,
    Cluster.free,
    *[Cluster.deliver] * 20,
    *[Cluster.move] * 8,
    *[Cluster.report] * 8,
    *[Cluster.wait] * 2,
)
DISK = (*[Cluster.disk] * 4, *[Cluster.unpin] * 2, *[Cluster.read_file] * 2)
AHEAD = (*[Cluster.prefetch] * 3, *[Cluster.toggle_replica_pin] * 3, Cluster.raise_priority)
BROKEN = (Cluster.break_disk, Cluster.break_file)
LENDING = (  # more is opened than fits, so that what is on disk finds no room
    *[Cluster.create] * 4,
    *[Cluster.seal] * 4,
    *[Cluster.open] * 12,
    *[Cluster.release] * 8,
    *[Cluster.deliver] * 18,
    *[Cluster.move] * 3,
    *[Cluster.report] * 4,
    *[Cluster.disk] * 4,
    Cluster.toggle_replica_pin,
    Cluster.wait,
    Cluster.free,
    Cluster.read_file,
    *BROKEN,
)
NEIGHBORS = (*[Cluster.visit] * 8, *[Cluster.pin_read_replica] * 3, Cluster.end_ghost)
LINKS = (*[Cluster.break_link] * 3, *[Cluster.move] * 2, Cluster.wait)
TROUBLE = (Cluster.abort, Cluster.break_transfer, Cluster.break_transfer, Cluster.kill, Cluster.crash)


def run(
    steps: tuple[Callable[[Cluster, int], None], ...],
    script: list[tuple[int, int]],
    threshold: float = 0.0,
    cluster: Cluster | None = None,
) -> Cluster:
    cluster = cluster or Cluster(threshold)
    for which, pick in script:
        steps[which % len(steps)](cluster, pick)
    cluster.finish()
    return cluster


def random_script(seed: int, length: int) -> list[tuple[int, int]]:
    """A long script: hypothesis by itself hardly draws any."""
    random = Random(seed)
    return [(random.randrange(10_000), random.randrange(10_000)) for _ in range(length)]


SCRIPT = st.one_of(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=100),
    st.builds(random_script, st.integers(0, 1 << 30), st.integers(0, 1000)),
)


@settings(max_examples=examples(200))
@given(SCRIPT)
def test_without_trouble_nothing_is_lost_and_nothing_leaks(script: list[tuple[int, int]]) -> None:
    run(STEPS, script)


@settings(max_examples=examples(300))
@given(SCRIPT)
def test_with_deaths_and_broken_transfers_every_request_ends_and_nothing_leaks(script: list[tuple[int, int]]) -> None:
    run(STEPS + TROUBLE, script)


@settings(max_examples=examples(200))
@given(SCRIPT, st.sampled_from([0.0, 0.8]), st.integers(2, 4))
def test_with_broken_data_links_between_living_nodes_nothing_is_lost(
    script: list[tuple[int, int]], threshold: float, nodes: int
) -> None:
    run(STEPS + LINKS + DISK + AHEAD, script, cluster=Cluster(threshold, nodes))


@settings(max_examples=examples(200))
@given(SCRIPT, st.sampled_from([0.0, 0.8]), st.integers(2, 4))
def test_with_broken_data_links_and_deaths_only_what_died_with_its_node_is_lost(
    script: list[tuple[int, int]], threshold: float, nodes: int
) -> None:
    run(STEPS + LINKS + DISK + AHEAD + (Cluster.kill, Cluster.crash), script, cluster=Cluster(threshold, nodes))


@settings(max_examples=examples(100))
@given(SCRIPT)
def test_many_readers_of_few_objects_over_broken_data_links_all_get_them(script: list[tuple[int, int]]) -> None:
    run(READERS + LINKS, script, cluster=Cluster(nodes=7, chunk=UNIT))


@settings(max_examples=examples(200))
@given(SCRIPT, st.sampled_from([0.3, 0.8, 1.0]))
def test_spilled_objects_come_back_as_they_were(script: list[tuple[int, int]], threshold: float) -> None:
    run(STEPS + DISK, script, threshold)


@settings(max_examples=examples(200))
@given(SCRIPT, st.sampled_from([0.0, 0.3, 0.8, 1.0]))
def test_prefetched_and_pinned_replicas_are_there_and_go_in_time(
    script: list[tuple[int, int]], threshold: float
) -> None:
    run(STEPS + DISK + AHEAD, script, threshold)


@settings(max_examples=examples(300))
@given(SCRIPT, st.sampled_from([0.3, 0.8, 1.0]))
def test_with_a_failing_disk_and_deaths_too_nothing_leaks(script: list[tuple[int, int]], threshold: float) -> None:
    run(STEPS + DISK + AHEAD + TROUBLE + BROKEN, script, threshold)


@settings(max_examples=examples(300))
@given(SCRIPT, st.sampled_from([0.3, 0.8, 1.0]))
def test_with_a_disk_that_does_not_answer_every_request_ends_and_nothing_leaks(
    script: list[tuple[int, int]], threshold: float
) -> None:
    steps = STEPS + DISK + AHEAD + TROUBLE + (Cluster.break_disk, *[Cluster.stall] * 3)
    run(steps, script, threshold)


@settings(max_examples=examples(300))
@given(SCRIPT, st.sampled_from([0.3, 0.8, 1.0]), st.sampled_from([(), TROUBLE]), st.integers(1, 4))
def test_objects_lent_from_disk_are_read_or_pulled_from_elsewhere_or_lost_for_a_reason(
    script: list[tuple[int, int]], threshold: float, trouble: tuple[Callable[[Cluster, int], None], ...], nodes: int
) -> None:
    run(LENDING + trouble, script, cluster=Cluster(threshold, nodes))


@settings(max_examples=examples(150))
@given(SCRIPT)
def test_many_readers_of_few_objects_with_deaths_all_get_them_or_an_error(script: list[tuple[int, int]]) -> None:
    run(READERS + TROUBLE, script, cluster=Cluster(nodes=7, chunk=UNIT))


@settings(max_examples=examples(200))
@given(SCRIPT, st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.integers(2, 4))
def test_neighbors_read_what_they_opened_and_owners_the_replicas_that_they_pin(
    script: list[tuple[int, int]], threshold: float, nodes: int
) -> None:
    run(STEPS + DISK + AHEAD + NEIGHBORS, script, cluster=Cluster(threshold, nodes))


@settings(max_examples=examples(300))
@given(SCRIPT, st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.integers(2, 4))
def test_neighbors_that_die_and_those_of_dead_nodes_leave_nothing_and_lose_nothing_that_they_read(
    script: list[tuple[int, int]], threshold: float, nodes: int
) -> None:
    stalls = (Cluster.break_disk, Cluster.stall) if nodes == 3 else BROKEN
    run(STEPS + DISK + AHEAD + TROUBLE + stalls + NEIGHBORS, script, cluster=Cluster(threshold, nodes))


@settings(max_examples=examples(200))
@given(SCRIPT, st.sampled_from([0.3, 0.8, 1.0]), st.sampled_from([(), TROUBLE]), st.integers(2, 3))
def test_neighbors_that_find_no_room_have_objects_on_disk_pulled_and_are_lent_nothing(
    script: list[tuple[int, int]], threshold: float, trouble: tuple[Callable[[Cluster, int], None], ...], nodes: int
) -> None:
    run(LENDING + NEIGHBORS + trouble, script, cluster=Cluster(threshold, nodes))


@settings(max_examples=examples(100))
@given(SCRIPT)
def test_neighbors_among_many_readers_with_deaths_leave_nothing(script: list[tuple[int, int]]) -> None:
    run(READERS + NEIGHBORS + TROUBLE, script, cluster=Cluster(nodes=5, chunk=UNIT))


def test_the_model_with_many_readers_relays_objects_that_are_still_arriving() -> None:
    """As below."""
    relayed = sent_on = 0
    for seed in range(40):
        cluster = run(READERS + TROUBLE, random_script(seed, 1500), cluster=Cluster(nodes=7, chunk=UNIT))
        relayed += cluster.relayed
        sent_on += sum(store.snapshot()["sent_on"] for store in cluster.stores.values())
    assert relayed >= 100 and sent_on >= 100, (relayed, sent_on)


def test_the_model_breaks_data_links_between_the_only_holder_and_its_readers() -> None:
    """As below."""
    breaks = pulled = 0
    for seed in range(40):
        cluster = run(STEPS + LINKS, random_script(seed, 1500), cluster=Cluster(nodes=2))
        breaks += cluster.link_breaks.total()
        pulled += sum(store.snapshot()["pulled"] for store in cluster.stores.values())
    assert breaks >= 100 and pulled >= 100, (breaks, pulled)


def test_the_store_model_reaches_every_state_that_it_checks() -> None:
    """The test above is worth something only where copies are made, evicted, sent, refused and freed in numbers."""
    reached: Counter[str] = Counter()
    for seed in range(60):
        for store in run(STEPS + TROUBLE, random_script(seed, 1500)).stores.values():
            numbers = store.snapshot()
            reached.update(
                {name: numbers[name] for name in ("created", "pulled", "evicted", "freed", "sent", "sent_on")}
            )
    assert len(reached) == 6 and min(reached.values()) >= 20, reached


def test_another_node_is_not_refused_where_room_is_fragmented() -> None:
    """There were bytes enough, but no place for the object in one piece; it could be sent straight from disk."""
    run(STEPS + DISK + AHEAD, random_script(35424, 384), 0.3)


@pytest.mark.slow
def test_the_model_with_a_disk_reaches_what_it_is_to_check() -> None:
    """As above: objects are written, read back and lost by the disk in numbers."""
    reached: Counter[str] = Counter()
    for seed in range(200):
        for store in run(STEPS + DISK + AHEAD + TROUBLE + BROKEN, random_script(seed, 1500), 0.8).stores.values():
            numbers = store.snapshot()
            names = ("spilled_bytes", "restored", "spill_failures", "evicted", "from_disk", "lent")
            reached.update({name: numbers[name] for name in names})
    assert len(reached) == 6 and min(reached.values()) >= 10, reached


@pytest.mark.slow
def test_the_model_of_neighbors_reaches_what_it_is_to_check() -> None:
    """As above: guests read, find nothing, let go when asked to, find no room, keep what they read, outlive nodes."""
    reached: Counter[str] = Counter()
    for seed in range(100):
        script = random_script(seed, 1500)
        reached.update(run(STEPS + DISK + AHEAD + TROUBLE + BROKEN + NEIGHBORS, script, 0.8).visits)
        reached.update(run(LENDING + NEIGHBORS, script, cluster=Cluster(0.8, 2)).visits)
        reached.update(run(STEPS + DISK + TROUBLE + NEIGHBORS, script, cluster=Cluster(0.8, 2)).visits)
    assert len(reached) == 8 and min(reached.values()) >= 10, reached


def test_the_model_of_file_loans_reaches_them() -> None:
    """As above."""
    reached: Counter[str] = Counter()
    for seed in range(40):
        cluster = run(LENDING, random_script(seed, 1500), cluster=Cluster(0.8, 2))
        lent = sum(store.snapshot()["lent"] for store in cluster.stores.values())
        reached.update(lent=lent, broken=cluster.broken)
    assert reached["lent"] >= 100 and reached["broken"] >= 30, reached


@settings(max_examples=examples(150))
@given(SCRIPT, st.sampled_from(((), BROKEN, TROUBLE, (*TROUBLE, *BROKEN, Cluster.stall))), st.sampled_from((2, 3)))
def test_objects_past_the_store_are_read_as_they_were_and_nothing_leaks(
    script: list[tuple[int, int]], trouble: tuple[Callable[[Cluster, int], None], ...], nodes: int
) -> None:
    run(LENDING + NEIGHBORS + trouble, script, cluster=Cluster(0.8, nodes, overflow=1 << 40))


def test_the_model_reaches_objects_past_the_store() -> None:
    clusters = [
        run(LENDING + NEIGHBORS, random_script(seed, 1500), cluster=Cluster(0.8, 2, overflow=1 << 40))
        for seed in range(5)
    ]
    assert sum(cluster.overflowed for cluster in clusters) > 20
