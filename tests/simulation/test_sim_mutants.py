"""Deliberate defects: the simulations are worth something only if they find each of them, in a few seeds.

A defect that is not found means that a fault, or a check, is missing in the simulation; not that it is harmless.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from faultcluster import FaultCluster
from test_ownership import run
from test_sim_nodes import anything, some_delays

from hpcray.common.ids import PROC_BYTES
from hpcray.core.core_worker.object_entry import ObjectEntry
from hpcray.core.core_worker.object_recovery import Lineage, ObjectRecovery
from hpcray.core.core_worker.object_table import ObjectTable
from hpcray.core.core_worker.reference_counter import ReferenceCounter
from hpcray.core.gcs.actor_manager import Actor, ActorManager
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.node_manager import HeadFailureDetector
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.protocol import messages as m

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SEEDS = 40
Patch = pytest.MonkeyPatch


def replace(patch: Patch, owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """`owner.name` becomes what `make` makes of it."""
    patch.setattr(owner, name, make(getattr(owner, name)))


# ------------------------------------------------------------ ownership


def a_decrement_is_skipped(patch: Patch) -> None:
    def make(count: Any) -> Any:
        def skips(self: ReferenceCounter, oid: bytes, entry: ObjectEntry, borrower: bytes, by: int) -> None:
            if by > 0 or len(borrower) > PROC_BYTES:
                count(self, oid, entry, borrower, by)

        return skips

    replace(patch, ReferenceCounter, "_count", make)


def an_increment_is_skipped(patch: Patch) -> None:
    patch.setattr(ReferenceCounter, "add_borrower", lambda self, oid, borrower: None)


def a_reply_does_not_wait_for_what_was_registered(patch: Patch) -> None:
    patch.setattr(ReferenceCounter, "send_after_acks", lambda self, dest, msg: self._send(dest, msg))


def a_pledge_of_a_dead_giver_is_kept(patch: Patch) -> None:
    patch.setattr(ReferenceCounter, "on_borrow_end", lambda self, src, msg: None)


def a_dead_owner_still_has_to_acknowledge(patch: Patch) -> None:
    def make(died: Any) -> Any:
        def forgets(self: ReferenceCounter, proc: bytes) -> None:
            acks = dict(self.unacked)
            died(self, proc)
            self.unacked.update(acks)

        return forgets

    replace(patch, ReferenceCounter, "process_died", make)


def what_is_lost_is_not_made_again(patch: Patch) -> None:
    """It waits for ever."""

    def make(make_again: Any) -> Any:
        def forgets(self: ObjectRecovery, oid: bytes, entry: ObjectEntry, reason: str) -> None:
            remake, self._remake = self._remake, lambda task: None
            make_again(self, oid, entry, reason)
            self._remake = remake

        return forgets

    replace(patch, ObjectRecovery, "_make_again", make)


def a_task_that_must_not_run_twice_does(patch: Patch) -> None:
    patch.setattr(Lineage, "why_not", lambda self, task: "")


def the_copy_of_an_attempt_that_died_is_forgotten(patch: Patch) -> None:
    patch.setattr(ObjectTable, "may_be_left_at", lambda self, oid, node: None)


# ------------------------------------------------------------ nodes


def a_dead_node_keeps_its_leases(patch: Patch) -> None:
    patch.setattr(LocalLeaseManager, "node_died", lambda self, now, node: [])


def who_watches_an_actor_is_not_told_of_its_end(patch: Patch) -> None:
    def make(tell: Any) -> Any:
        def forgets(self: ActorManager, actor: Actor, out: list[Any]) -> None:
            if actor.state != "DEAD":
                tell(self, actor, out)

        return forgets

    replace(patch, ActorManager, "_publish", make)


def nobody_tells_the_scheduler_of_a_death(patch: Patch) -> None:
    def make(died: Any) -> Any:
        def forgets(self: Gcs, now: float, node: int, reason: str) -> Any:
            scheduler, self.scheduler.node_died = self.scheduler.node_died, lambda now, node: []  # type: ignore[method-assign]
            out = died(self, now, node, reason)
            self.scheduler.node_died = scheduler  # type: ignore[method-assign]
            return out

        return forgets

    replace(patch, Gcs, "node_died", make)


def a_node_that_is_cut_off_never_ends(patch: Patch) -> None:
    patch.setattr(HeadFailureDetector, "tick", lambda self, now: ([], ""))


def a_dead_node_that_speaks_again_is_believed(patch: Patch) -> None:
    """The fence is down: nobody looks at who was declared dead."""

    def make(told: Any) -> Any:
        def forgets(self: FaultCluster, node: int, msg: m.NodeDied) -> None:
            told(self, node, msg)
            self._lost[node].discard(msg.node)

        return forgets

    replace(patch, FaultCluster, "told", make)


OWNERSHIP = [
    a_decrement_is_skipped, an_increment_is_skipped, a_reply_does_not_wait_for_what_was_registered,
    a_pledge_of_a_dead_giver_is_kept, a_dead_owner_still_has_to_acknowledge, what_is_lost_is_not_made_again,
    a_task_that_must_not_run_twice_does, the_copy_of_an_attempt_that_died_is_forgotten,
]  # fmt: skip
NODES = [
    a_dead_node_keeps_its_leases, who_watches_an_actor_is_not_told_of_its_end,
    nobody_tells_the_scheduler_of_a_death,
    a_node_that_is_cut_off_never_ends, a_dead_node_that_speaks_again_is_believed,
]  # fmt: skip


def found_after(course: Callable[[int], object]) -> int:
    """The first seed of which a check fails, or something breaks."""
    for seed in range(SEEDS):
        try:
            course(seed)
        except (AssertionError, KeyError, IndexError):
            return seed
    pytest.fail(f"{SEEDS} seeds do not find it")


@pytest.mark.parametrize("defect", OWNERSHIP, ids=lambda defect: defect.__name__)
def test_a_defect_of_owners_is_found(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    defect(monkeypatch)
    print(found_after(lambda seed: run(Random(seed).randrange, 1500, 3, 4, 1 + seed % 3, losses=seed % 2 * 3)))


@pytest.mark.parametrize("defect", NODES, ids=lambda defect: defect.__name__)
def test_a_defect_of_heads_and_raylets_is_found(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    defect(monkeypatch)
    print(found_after(lambda seed: anything(some_delays(seed), seed)))
