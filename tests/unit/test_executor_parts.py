"""Parts of a worker's executor, without the executor: its lease, the CPU that it lends, and its end."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from hpcray.protocol import messages as m
from hpcray.runtime.worker.task_executor import ResourceLoans, WorkerEnd, WorkerLease

RAYLET, HOLDER = b"raylet..", b"holder.."


class Engine:
    """What a worker sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.flushes = 0

    def send(self, dest: bytes, msg: Any) -> None:
        self.sent.append((dest, msg))

    def flush(self) -> None:
        self.flushes += 1


def test_a_cpu_is_lent_once_and_taken_back_by_the_last_thread_that_waited() -> None:
    loans = ResourceLoans(engine := Engine(), RAYLET)  # type: ignore[arg-type]
    assert loans.begin_wait()
    loans.lend()
    assert not loans.begin_wait(), "another thread waits already"
    loans.end_wait()
    assert engine.sent == [(RAYLET, m.Blocked())]
    loans.end_wait()
    assert engine.sent == [(RAYLET, m.Blocked()), (RAYLET, m.Unblocked())] and engine.flushes == 1
    assert loans.begin_wait()


def test_the_variables_of_a_lease_are_set_again_over_those_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCRAY_TEST_LEASE", raising=False)
    lease = WorkerLease()
    assert (lease.holder, lease.resources, lease.env) == (b"", {}, {})
    lease.attach(HOLDER, {"CPU": 20_000})
    lease.take_env({"HPCRAY_TEST_LEASE": "ours"})
    assert os.environ["HPCRAY_TEST_LEASE"] == "ours"
    monkeypatch.setenv("HPCRAY_TEST_LEASE", "the job's")
    lease.apply_env()
    assert os.environ["HPCRAY_TEST_LEASE"] == "ours"
    assert (lease.holder, lease.resources) == (HOLDER, {"CPU": 20_000})


def ended(terminated: bool) -> int:
    """The wait status of a process that such an end ends with code 3."""
    pid = os.fork()
    if not pid:
        try:
            end = WorkerEnd()
            end.terminated = terminated
            end.exit(3)
        finally:
            os._exit(99)
    return os.waitpid(pid, 0)[1]


def test_a_process_ends_with_its_code_or_after_a_sigterm_by_that_signal() -> None:
    assert os.waitstatus_to_exitcode(ended(False)) == 3
    assert os.waitstatus_to_exitcode(ended(True)) == -signal.SIGTERM


def test_a_forked_child_is_not_the_process_of_the_end() -> None:
    end = WorkerEnd()
    assert end.is_here()
    pid = os.fork()
    if not pid:
        os._exit(7 if end.is_here() else 0)
    assert os.waitpid(pid, 0)[1] == 0


def test_one_thread_ends_a_process_and_others_wait() -> None:
    end = WorkerEnd()
    end.begin()
    other = threading.Thread(target=end.begin, daemon=True)
    other.start()
    other.join(0.2)
    assert other.is_alive()
    end._leaving.release()  # for this process goes on
    other.join(10)
    assert not other.is_alive()
