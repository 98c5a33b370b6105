"""GPUs one by one: who gets which, what a fraction shares, and that nothing is ever held twice or lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raylet_kit import CPU1, FAR, UNIT, Node, spec

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, make_proc
from hpcray.common.resources import ASSIGNED_GPUS, REPORT_AFTER, to_units
from hpcray.core.raylet.lease_queue import RESERVE_AFTER
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.core.raylet.local_resources import (
    DeviceAllocator,
    LocalResources,
    assigned_devices,
    strip_devices,
    with_devices,
)
from hpcray.protocol import messages as m

HALF, QUARTER = UNIT // 2, UNIT // 4


def gpu(units: int, cpu: int = 0, strategy: str = "") -> m.Shape:
    resources = {"CPU": cpu, "GPU": units}
    return m.Shape(tuple((name, value) for name, value in resources.items() if value), strategy)


GPU1 = gpu(UNIT)


def seen_by(node: Node, worker: bytes) -> str:
    """What a worker was told of its GPUs when it was forked."""
    (fork,) = (fork for fork in node.forked if make_proc(0, fork.number) == worker)
    return dict(fork.env).get(ASSIGNED_GPUS, "")


class TestDeviceAllocator:
    def test_a_fraction_is_taken_from_the_gpu_where_it_fits_most_tightly(self) -> None:
        gpus = DeviceAllocator("abc")
        assert gpus.allocate(HALF, False) == (0,)
        assert gpus.allocate(3 * QUARTER, False) == (1,)
        assert gpus.allocate(QUARTER, False) == (1,), "a quarter is left there, a half on the first"
        assert gpus.allocate(QUARTER, False) == (0,)
        assert gpus.free_by_id() == {"a": QUARTER, "b": 0, "c": UNIT}

    def test_requests_for_whole_gpus_get_whole_ones(self) -> None:
        gpus = DeviceAllocator("abcd")
        gpus.allocate(QUARTER, False)
        assert gpus.allocate(2 * UNIT, False) == (1, 2)
        assert not gpus.fits(2 * UNIT) and gpus.fits(UNIT)
        assert gpus.allocate(UNIT, False) == (3,)
        assert not gpus.fits(UNIT) and gpus.fits(3 * QUARTER)

    def test_a_request_that_does_not_fit_holds_nothing(self) -> None:
        gpus = DeviceAllocator("ab")
        gpus.allocate(HALF, False)
        with pytest.raises(ValueError, match="do not fit"):
            gpus.allocate(2 * UNIT, False)
        assert gpus.free_by_id() == {"a": HALF, "b": UNIT}

    def test_a_fraction_above_one_gpu_is_infeasible(self) -> None:
        gpus = DeviceAllocator("abc")
        assert not gpus.is_feasible(UNIT + HALF) and not gpus.fits(UNIT + HALF)
        assert gpus.is_feasible(3 * UNIT) and not gpus.is_feasible(4 * UNIT)

    def test_reserved_units_are_left_free_on_the_emptiest_gpus(self) -> None:
        gpus = DeviceAllocator("ab")
        gpus.allocate(HALF, False)
        gpus.allocate(3 * QUARTER, False)
        assert gpus.fits(QUARTER, reserved=UNIT), "on the second, which is fuller"
        assert not gpus.fits(HALF, reserved=UNIT), "the first has room, but is to become free"
        assert not gpus.fits(QUARTER, reserved=2 * UNIT)

    def test_only_what_actors_do_not_hold_is_reachable(self) -> None:
        gpus = DeviceAllocator("ab")
        gpus.allocate(QUARTER, True)
        chosen = gpus.allocate(UNIT, False)
        assert gpus.is_reachable(UNIT) and not gpus.is_reachable(2 * UNIT)
        gpus.release(chosen, UNIT, False)
        gpus.release((0,), QUARTER, True)
        assert gpus.is_reachable(2 * UNIT)

    def test_there_must_be_as_many_device_ids_as_gpus(self) -> None:
        with pytest.raises(ValueError, match="has 2 GPUs"):
            LocalResources(0, to_units({"GPU": 2}), ["GPU-a"])

    def test_assigned_gpus_are_added_to_an_environment_and_stripped_again(self) -> None:
        env = with_devices((("A", "1"),), {"TPU": ["0", "2"], "GPU": ["GPU-a", "MIG-b"], "NPU": ["0"]})
        assert assigned_devices(env) == {"GPU-a", "MIG-b", "TPU=0", "TPU=2", "NPU=0"}
        assert strip_devices(env) == (("A", "1"),)
        assert assigned_devices((("A", "1"),)) == frozenset() and strip_devices((("A", "1"),)) == (("A", "1"),)


class TestGrants:
    def test_a_worker_learns_its_devices_when_it_is_forked(self) -> None:
        node = Node(4)
        node.core = LocalLeaseManager(0, to_units({"CPU": 4, "GPU": 2}), 1, Config(prestart=0), ("GPU-x", "GPU-y"))
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, GPU1, 2))
        assert sorted(seen_by(node, lease.worker) for lease in node.take(m.LeaseGranted)) == ["GPU-x", "GPU-y"]
        node.handle(driver, m.RequestLeases(1, CPU1, 1))
        (lease,) = node.take(m.LeaseGranted)
        assert seen_by(node, lease.worker) == ""

    def test_a_worker_is_used_again_for_the_same_devices_only(self) -> None:
        node = Node(4, gpus=2)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, GPU1, 1))
        (first,) = node.take(m.LeaseGranted)
        node.handle(driver, m.ReturnLease(first.lease))
        node.handle(driver, m.RequestLeases(0, GPU1, 3))
        second, third = node.take(m.LeaseGranted)
        assert second.worker == first.worker and third.worker != first.worker
        assert (seen_by(node, second.worker), seen_by(node, third.worker)) == ("0", "1")

    def test_enough_units_in_sum_do_not_serve_a_request_that_fits_on_no_gpu(self) -> None:
        node = Node(4, size=1, gpus=2)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, gpu(3 * QUARTER), 2))
        a, b = node.take(m.LeaseGranted)
        assert node.core.available()["GPU"] == HALF
        node.handle(driver, m.RequestLeases(1, gpu(HALF), 1))
        assert node.take(m.LeaseGranted) == []
        node.handle(driver, m.ReturnLease(a.lease))
        (late,) = node.take(m.LeaseGranted)
        assert seen_by(node, late.worker) == seen_by(node, a.worker) != seen_by(node, b.worker)

    def test_a_request_of_the_gcs_that_fits_on_no_gpu_is_refused(self) -> None:
        node = Node(4, gpus=2)
        node.handle(HEAD, m.GrantLeases(FAR, 0, gpu(HALF), 1))
        node.handle(HEAD, m.GrantLeases(FAR, 1, gpu(3 * QUARTER), 1))
        assert len(node.take(m.LeaseGranted)) == 2
        node.handle(HEAD, m.GrantLeases(FAR, 2, GPU1, 1))
        assert [refused.count for refused in node.take(m.GrantLeasesRefused)] == [1]

    def test_a_request_for_one_and_a_half_gpus_is_left_to_the_gcs(self) -> None:
        node = Node(4, size=1, gpus=2)
        node.handle(node.driver(), m.RequestLeases(0, gpu(UNIT + HALF), 1))
        assert node.take(m.LeaseGranted) == [] and len(node.take(m.UnmetLeaseRequest, HEAD)) == 1

    def test_a_blocked_worker_keeps_its_device(self) -> None:
        node = Node(1, gpus=1)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, gpu(UNIT, cpu=UNIT), 1))
        (lease,) = node.take(m.LeaseGranted)
        node.handle(lease.worker, m.Blocked())
        node.handle(driver, m.RequestLeases(1, gpu(QUARTER), 1))
        assert node.take(m.LeaseGranted) == [] and node.core.available() == {"CPU": UNIT, "GPU": 0}

    def test_a_worker_that_stays_for_its_objects_alone_holds_nothing(self) -> None:
        """Who refers to them may start the next task before letting go of them."""
        node = Node(1, gpus=1)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, gpu(UNIT, cpu=UNIT), 2))
        (lease,) = node.take(m.LeaseGranted)
        node.handle(lease.worker, m.Blocked(retired=True))
        node.handle(lease.worker, m.Blocked(retired=True))
        (second,) = node.take(m.LeaseGranted)
        assert second.worker != lease.worker and node.killed == []
        node.handle(driver, m.ReturnLease(lease.lease))
        node.do(node.core.process_died(0.0, lease.worker, "exit code 0"))
        assert node.take(m.LeaseRevoked) == [] and node.core.available() == {"CPU": 0, "GPU": 0}
        node.do(node.core.process_died(0.0, second.worker, "exit code 0"))
        assert node.core.available() == {"CPU": UNIT, "GPU": UNIT}

    def test_an_actor_holds_its_device_until_its_worker_is_dead(self) -> None:
        node = Node(4, gpus=1)
        node.handle(HEAD, m.StartActor(spec(1, GPU1, GPU1), 0))
        (worker,) = (make_proc(0, fork.number) for fork in node.forked)
        node.handle(HEAD, m.KillActor(spec(1).actor, True, "enough"))
        node.handle(HEAD, m.StartActor(spec(2, GPU1, gpu(UNIT, strategy="node:0")), 0))
        assert node.killed == [worker] and len(node.forked) == 1, "the second queues"
        node.do(node.core.process_died(0.0, worker, "killed by signal 9"))
        assert [dict(fork.env)[ASSIGNED_GPUS] for fork in node.forked] == ["0", "0"]

    def test_quarters_do_not_starve_a_whole_request(self) -> None:
        node = Node(8, size=1, gpus=2)
        small, large = node.driver(), node.driver()
        node.handle(small, m.RequestLeases(0, gpu(QUARTER), 1000))
        running = node.take(m.LeaseGranted)
        assert len(running) == 8
        node.handle(large, m.RequestLeases(0, GPU1, 1))
        for _ in range(200):
            node.handle(small, m.ReturnLease(running.pop(0).lease))
            node.tick(node.now + 0.25)
            if node.core.snapshot()["pending"][-1]["holder"] != large:
                return
            running += node.take(m.LeaseGranted, small)
        pytest.fail("the whole request was never served")

    def test_the_emptiest_device_is_kept_for_a_whole_request_that_waits(self) -> None:
        node = Node(8, size=1, gpus=6)
        small, large = node.driver(), node.driver()
        node.handle(small, m.RequestLeases(0, gpu(QUARTER), 24))
        running = node.take(m.LeaseGranted)
        for name, count in (("0", 1), ("1", 1), ("2", 1), ("3", 1), ("4", 1), ("5", 3)):
            for lease in [lease for lease in running if seen_by(node, lease.worker) == name][:count]:
                node.handle(small, m.ReturnLease(lease.lease))
        node.handle(large, m.RequestLeases(0, GPU1, 1))
        node.handle(small, m.RequestLeases(0, gpu(QUARTER), 25))
        assert node.take(m.LeaseGranted, small), "it overtakes the large one, for which room is kept from now on"
        node.tick(RESERVE_AFTER + 0.1)
        node.handle(small, m.RequestLeases(1, gpu(HALF), 1))
        assert node.take(m.LeaseGranted) == [], "only on the sixth there is room, which is to become free"
        node.handle(small, m.RequestLeases(0, gpu(QUARTER), 26))
        (fits,) = node.take(m.LeaseGranted)
        assert seen_by(node, fits.worker) != "5"
        (last,) = [lease for lease in running if seen_by(node, lease.worker) == "5"][3:]
        node.handle(small, m.ReturnLease(last.lease))
        (whole,) = node.take(m.LeaseGranted, large)
        assert seen_by(node, whole.worker) == "5"

    def test_nothing_is_reserved_for_a_request_that_actors_make_impossible(self) -> None:
        node = Node(8, size=1, gpus=4)
        hold = gpu(3 * QUARTER)
        for number in range(4):
            node.handle(HEAD, m.StartActor(spec(number, hold, hold), 0))
        small, large = node.driver(), node.driver()
        node.handle(large, m.RequestLeases(0, GPU1, 1))
        node.tick(RESERVE_AFTER + 0.1)
        node.handle(small, m.RequestLeases(0, gpu(QUARTER), 1))
        assert len(node.take(m.LeaseGranted, small)) == 1, "in sum there is a whole GPU, but never one"


class TestIdleGpuWorkers:
    def test_an_idle_worker_exits_when_another_gets_its_gpu(self) -> None:
        node = Node(4, size=1, gpus=2)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, GPU1, 1))
        (one,) = node.take(m.LeaseGranted)
        node.handle(driver, m.ReturnLease(one.lease))
        assert node.take(m.Exit, one.worker) == []
        node.handle(driver, m.RequestLeases(1, gpu(2 * UNIT), 1))
        (both,) = node.take(m.LeaseGranted)
        assert seen_by(node, both.worker) == "0,1"
        assert len(node.take(m.Exit, one.worker)) == 1, "its memory on the device is wanted"

    def test_idle_workers_that_share_a_gpu_by_fractions_may_stay(self) -> None:
        node = Node(4, size=1, gpus=1)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, gpu(QUARTER), 2))
        a, b = node.take(m.LeaseGranted)
        node.handle(driver, m.ReturnLease(a.lease))
        node.handle(driver, m.ReturnLease(b.lease))
        node.handle(driver, m.RequestLeases(0, gpu(QUARTER), 3))
        assert len(node.take(m.LeaseGranted)) == 1 and node.take(m.Exit) == []
        node.handle(driver, m.RequestLeases(1, gpu(3 * QUARTER), 1))
        assert len(node.take(m.LeaseGranted)) == 1

    def test_idle_workers_exit_when_a_request_gets_their_whole_gpu(self) -> None:
        node = Node(4, size=1, gpus=1)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, gpu(QUARTER), 2))
        for lease in node.take(m.LeaseGranted):
            node.handle(driver, m.ReturnLease(lease.lease))
        node.handle(driver, m.RequestLeases(1, GPU1, 1))
        (whole,) = node.take(m.LeaseGranted)
        assert len(node.forked) == 2, "one of the two is used again"
        assert len(node.take(m.Exit)) == 1 and whole.worker in node.core.pool.workers

    def test_idle_gpu_workers_exit_after_their_time_though_cpus_are_free(self) -> None:
        node = Node(8, size=2, gpus=1)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, GPU1, 1))
        node.handle(driver, m.RequestLeases(1, CPU1, 1))
        gpu_lease, cpu_lease = node.take(m.LeaseGranted)
        node.handle(driver, m.ReturnLease(gpu_lease.lease))
        node.handle(driver, m.ReturnLease(cpu_lease.lease))
        node.tick(0.9)
        assert node.take(m.Exit) == []
        node.tick(1.1)
        assert len(node.take(m.Exit, gpu_lease.worker)) == 1 and node.take(m.Exit) == []

    def test_failed_forks_are_reported_for_the_requested_environment(self) -> None:
        node = Node(1, size=1, forks=False, gpus=1)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, GPU1, 1))
        for _ in range(3):
            node.do(node.core.fork_failed(node.now, node.forked[-1].number, "no memory"))
            node.tick(node.now + 1.1)
        (warning,) = node.take(m.Infeasible, driver)
        assert "cannot start workers: no memory" in warning.reason and node.core.available()["GPU"] in (0, UNIT)


class TestReportsOfWaitingRequests:
    def test_the_holder_of_a_request_that_waits_for_ten_seconds_gets_a_report_of_what_is_free(self) -> None:
        node = Node(4, size=1, gpus=2)
        first, second = node.driver(), node.driver()
        node.handle(first, m.RequestLeases(0, gpu(3 * QUARTER), 2))
        node.handle(second, m.RequestLeases(7, GPU1, 1))
        node.tick(REPORT_AFTER - 1)
        assert node.take(m.Infeasible) == []
        node.tick(REPORT_AFTER + 1)
        (report,) = node.take(m.Infeasible, second)
        assert report.scheduling_class == 7 and report.waits
        assert "{GPU: 1}" in report.reason and "{GPU: 0.5} of {GPU: 2}, of its" in report.reason
        assert "of its GPUs {0: 0.25, 1: 0.25}" in report.reason and "hint: " in report.reason
        node.tick(REPORT_AFTER + 2)
        assert node.take(m.Infeasible) == []

    def test_a_holder_that_is_served_now_and_then_gets_no_report(self) -> None:
        node = Node(1, size=1)
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, CPU1, 100))
        for second in range(40):
            node.tick(float(second))
            if second % 5 == 0:
                (lease,) = node.take(m.LeaseGranted)
                node.handle(driver, m.ReturnLease(lease.lease))
        assert node.take(m.Infeasible) == []

    def test_in_a_larger_cluster_the_raylet_leaves_reports_to_the_gcs(self) -> None:
        node = Node(1)
        node.handle(HEAD, m.GrantLeases(FAR, 0, CPU1, 1))
        driver = node.driver()
        node.handle(driver, m.RequestLeases(0, CPU1, 1))
        node.tick(20.0)
        assert node.take(m.Infeasible) == []


OPERATION = st.one_of(
    st.tuples(st.just("demand"), st.integers(0, 1), st.integers(0, 4)),
    st.tuples(st.sampled_from(["return", "bad", "die", "block", "unblock", "kill actor"]), st.integers(0, 30)),
    st.tuples(st.just("actor"), st.integers(0, 4)),
    st.tuples(st.sampled_from(["join", "fail", "reap", "tick", "driver dies"])),
)
SIZES = [QUARTER, HALF, 3 * QUARTER, UNIT, 2 * UNIT]


class Watched:
    """Drives one raylet and keeps its own books, from nothing but what the raylet says and what is done to it."""

    def __init__(self, gpus: int) -> None:
        self.node = Node(3, size=1, forks=False, gpus=gpus)
        self.gpus = gpus
        self.drivers = [self.node.driver(), self.node.driver()]
        self.totals: dict[tuple[bytes, int], int] = {}
        self.joining = 0
        self.leases: dict[bytes, tuple[bytes, bytes]] = {}
        self.running: dict[bytes, int] = {}
        self.actors = 0
        self.alive: list[bytes] = []

    def run(self, what: str, *args: int) -> None:
        getattr(self, "_" + what.replace(" ", "_"))(*args)
        self.look()

    def look(self) -> None:
        node = self.node
        for sent in node.sent:
            if isinstance(sent.msg, m.LeaseGranted):
                assert sent.msg.worker not in self.running, "a worker serves one at a time"
                self.leases[sent.msg.lease] = (sent.dest, sent.msg.worker)
                self.running[sent.msg.worker] = SIZES[sent.msg.scheduling_class]
            elif isinstance(sent.msg, m.BecomeActor):
                assert sent.dest not in self.running
                self.running[sent.dest] = dict(sent.msg.spec.hold.resources)["GPU"]
        node.sent.clear()
        used = dict.fromkeys(map(str, range(self.gpus)), 0)
        for worker, units in self.running.items():
            ids = seen_by(node, worker).split(",")
            assert len(ids) == max(1, units // UNIT) == len(set(ids))
            for name in ids:
                used[name] += min(units, UNIT)
        left = node.core.snapshot()["gpus"]
        for name, units in used.items():
            assert units <= UNIT, "over-committed"
            assert round(left[name] * UNIT) <= UNIT - units, "more is called free than there is"
        assert sum(round(share * UNIT) for share in left.values()) == node.core.available()["GPU"]

    def _worker(self, number: int) -> bytes | None:
        return self.alive[number % len(self.alive)] if self.alive else None

    def _lease(self, number: int) -> bytes | None:
        return sorted(self.leases)[number % len(self.leases)] if self.leases else None

    def _demand(self, driver: int, klass: int) -> None:
        if driver >= len(self.drivers):
            return
        holder = self.drivers[driver]
        self.totals[holder, klass] = self.totals.get((holder, klass), 0) + 1
        self.node.handle(holder, m.RequestLeases(klass, gpu(SIZES[klass]), self.totals[holder, klass]))

    def _return(self, number: int, bad: bool = False) -> None:
        lease = self._lease(number)
        if lease is not None:
            holder, worker = self.leases.pop(lease)
            if not bad:
                del self.running[worker]
            self.node.handle(holder, m.ReturnLease(lease, bad))

    def _bad(self, number: int) -> None:
        self._return(number, bad=True)

    def _die(self, number: int) -> None:
        worker = self._worker(number)
        if worker is not None:
            self._dead(worker)

    def _dead(self, worker: bytes) -> None:
        self.alive.remove(worker)
        self.running.pop(worker, None)
        self.leases = {lease: who for lease, who in self.leases.items() if who[1] != worker}
        self.node.do(self.node.core.process_died(self.node.now, worker, "killed by signal 9"))

    def _block(self, number: int) -> None:
        if (worker := self._worker(number)) is not None:
            self.node.handle(worker, m.Blocked())

    def _unblock(self, number: int) -> None:
        if (worker := self._worker(number)) is not None:
            self.node.handle(worker, m.Unblocked())

    def _actor(self, size: int) -> None:
        self.actors += 1
        hold = gpu(SIZES[size], strategy="node:0")
        self.node.handle(HEAD, m.StartActor(spec(self.actors, hold, hold), 0))

    def _kill_actor(self, number: int) -> None:
        self.node.handle(HEAD, m.KillActor(spec(number % (self.actors + 1)).actor, True, "enough"))

    def _join(self) -> None:
        if self.joining < len(self.node.forked):
            proc = make_proc(0, self.node.forked[self.joining].number)
            self.joining += 1
            self.alive.append(proc)
            self.node.do(self.node.core.process_joined(self.node.now, proc, "worker", 1))

    def _fail(self) -> None:
        if self.joining < len(self.node.forked):
            number = self.node.forked[self.joining].number
            self.joining += 1
            self.node.do(self.node.core.fork_failed(self.node.now, number, "no memory"))

    def _reap(self) -> None:
        for worker in self.node.killed:
            if worker in self.alive:
                self._dead(worker)
        self.node.killed.clear()

    def _tick(self) -> None:
        self.node.tick(self.node.now + 1.0)

    def _driver_dies(self) -> None:
        if len(self.drivers) > 1:
            driver = self.drivers.pop()
            self.leases = {lease: who for lease, who in self.leases.items() if who[0] != driver}
            self.node.do(self.node.core.process_died(self.node.now, driver, "exit code 1"))

    def end(self) -> None:
        """Everybody dies; everything must be free again."""
        while self.drivers:
            self.node.do(self.node.core.process_died(self.node.now, self.drivers.pop(), "exit code 0"))
        for number in range(self.actors + 1):
            self.node.handle(HEAD, m.KillActor(spec(number).actor, True, "the end"))
        self.leases.clear()
        while self.joining < len(self.node.forked):
            self._join()
        for worker in list(self.alive):
            self._dead(worker)
        assert self.node.core.available() == to_units({"CPU": 3, "GPU": self.gpus})
        assert set(self.node.core.snapshot()["gpus"].values()) == {1.0}
        assert self.node.core.resources.pool.is_reachable({"GPU": self.gpus * UNIT})


@settings(max_examples=200)
@given(st.integers(1, 3), st.lists(OPERATION, max_size=60))
def test_no_gpu_is_ever_held_twice_or_lost(gpus: int, operations: list[tuple[str, int]]) -> None:
    watched = Watched(gpus)
    for operation in operations:
        watched.run(*operation)
    watched.end()
