"""Workers of a driver that has ended, or was lost with its node, end; others stay."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hpcray.common.ids import make_proc, number_of
from hpcray.common.resources import JOB_FIELD, OUTLIVES_JOB, RUNTIME_ENV
from hpcray.processes.job_cleanup import JobCleanup
from hpcray.protocol.messages import ATTACHED, WORKER, ExtensionMessage, JobInfo

HERE, THERE = make_proc(0, 5), make_proc(2, 5)


class Raylet:
    """What `JobCleanup` uses of a raylet of node 0, with workers of the first job and of attached drivers."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.sent: list[tuple[bytes, Any]] = []
        self.workers: dict[bytes, Any] = {}
        self.lease_manager = SimpleNamespace(pool=SimpleNamespace(workers=self.workers), job=info(b""))
        self.processes = SimpleNamespace(stopping=False, kill=lambda proc, reason: self.killed.append(number_of(proc)))
        self.router = SimpleNamespace(lost_nodes={1: ""}, send=lambda to, message: self.sent.append((to, message)))
        self.context = SimpleNamespace(cluster_size=3)

    def add(self, number: int, driver: bytes | None, **fields: bool) -> bytes:
        proc = make_proc(0, number)
        given: dict[str, Any] = dict(fields)
        if driver is not None:
            given[JOB_FIELD] = msgspec.to_builtins(info(driver))
        self.workers[proc] = SimpleNamespace(joined=1.0, env=((RUNTIME_ENV, json.dumps(given)),) if given else ())
        return proc


def info(driver: bytes) -> JobInfo:
    return JobInfo("01000000", "", (), "", ends_with=driver)


@pytest.fixture
def raylet() -> Raylet:
    made = Raylet()
    made.add(10, None)
    made.add(11, HERE)
    made.add(12, THERE)
    made.add(13, THERE, **{OUTLIVES_JOB: True})
    return made


def test_a_driver_that_has_ended_takes_its_workers_with_it_on_all_nodes(raylet: Raylet) -> None:
    jobs = JobCleanup(raylet)  # type: ignore[arg-type]
    jobs.process_died(HERE, ATTACHED, "")
    jobs.process_died(make_proc(0, 11), WORKER, "")
    assert raylet.sent and all(message == ExtensionMessage("job_cleanup", HERE) for _, message in raylet.sent)
    assert len(raylet.sent) == 2, "node 1 is lost"
    jobs.on_message(b"", HERE)
    assert raylet.killed == [11]
    late = raylet.add(14, HERE)
    jobs.process_joined(late, WORKER, 1)
    jobs.process_joined(raylet.add(15, THERE), WORKER, 1)
    assert raylet.killed == [11, 14]


def test_a_node_that_is_lost_has_lost_its_drivers(raylet: Raylet) -> None:
    jobs = JobCleanup(raylet)  # type: ignore[arg-type]
    jobs.node_died(1, "")
    assert raylet.killed == []
    jobs.node_died(2, "")
    assert raylet.killed == [12]
    jobs.process_joined(raylet.add(14, THERE), WORKER, 1)
    assert raylet.killed == [12, 14]
