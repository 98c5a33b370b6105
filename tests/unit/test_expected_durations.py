"""Tasks that take long go to nodes that stay: learned from the tasks of their function that have run."""

from __future__ import annotations

import pytest

from hpcray.common.ids import make_proc
from hpcray.common.labels import TIME_LEFT, lasting
from hpcray.core.core_worker.lease_manager import DURATION_MARGIN, LeaseManager
from hpcray.core.core_worker.task import FunctionDescriptor, PendingTask
from hpcray.protocol import messages as m

ME = make_proc(1, 5)
PLAIN = m.Shape((("CPU", 10_000),))


class Leases(LeaseManager):
    """A lease manager that keeps what it asks for."""

    def __init__(self) -> None:
        self.asked: list[m.RequestLeases] = []
        super().__init__(ME, lambda dest, msg: self.asked.append(msg), lambda task, proc: None, 1.0)  # type: ignore[arg-type]
        self.count = 0

    def strategies(self, mean_us: float, shape: m.Shape = PLAIN) -> list[str]:
        """The strategies of the leases that a task of a function with this mean run time asks for."""
        self.count += 1
        function = FunctionDescriptor(b"f%15d" % self.count, "f", b"")
        function.us = mean_us
        self.asked.clear()
        task = PendingTask(ME + self.count.to_bytes(5, "big"), function, "", b"", 1, None, None, 0)
        self.submit(task, self.scheduling_class(shape))
        return [msg.shape.strategy for msg in self.asked]


@pytest.fixture
def leases() -> Leases:
    found = Leases()
    found.expect_durations()
    found.expect_durations()
    return found


def test_a_function_that_has_run_for_long_asks_for_nodes_that_stay(leases: Leases) -> None:
    assert leases.strategies(100e6) == [lasting("", 100 * DURATION_MARGIN)]
    assert leases.strategies(3600e6, m.Shape(PLAIN.resources, "SPREAD")) == [lasting("SPREAD", 3600 * DURATION_MARGIN)]


def test_what_is_short_or_not_known_goes_anywhere(leases: Leases) -> None:
    assert leases.strategies(1e6) == [""]
    assert not any(TIME_LEFT in one for one in [*leases.strategies(-1.0), *leases.strategies(29e6)])


def test_what_the_user_says_counts(leases: Leases) -> None:
    given = lasting("", 7.0)
    assert leases.strategies(100e6, m.Shape(PLAIN.resources, given)) == [given]


def test_a_job_whose_nodes_stay_asks_as_ever() -> None:
    assert Leases().strategies(100e6) == [""]


def test_long_tasks_go_to_nodes_that_stay_after_a_class_was_closed_too(leases: Leases) -> None:
    """What closes a class, such as the removal of a placement group, leaves the placement by durations."""
    leases.admit_through(lambda scheduling_class: None)
    assert leases.strategies(100e6) == [lasting("", 100 * DURATION_MARGIN)]
