"""The account of core time: it sums to cores × wall, and says what the cores did."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.jobs import Job, embedded
from hypothesis import example, given
from hypothesis import strategies as st

from hpcray.history.job_history import JobHistory
from hpcray.history.node_history import (
    ACTORS,
    BETWEEN,
    BLOCKED,
    FREE,
    OFF_CPU,
    ON_CPU,
    QUEUED,
    UNKNOWN,
    CoreTimeAccount,
)
from hpcray.history.runs import runs

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["answer", "death", "sample"]),
        st.integers(0, 3),
        st.floats(0.0, 5.0),
        st.floats(0.0, 4.0),
        st.floats(0.0, 6.0),
        st.booleans(),
    ),
    max_size=60,
)


@given(STEPS)
@example([("answer", 0, 1.0, 0.0, 0.0, False), ("sample", 0, 0.0, 1.2e-308, 0.0, False)])
def test_rows_add_up_to_cores_times_wall(steps: list[tuple[str, int, float, float, float, bool]]) -> None:
    account, now, busy = CoreTimeAccount(10.0, 4.0), 10.0, 0.0
    for what, number, seconds, cores, amount, flag in steps:
        now, busy = now + seconds, busy + amount
        if what == "answer":
            account.answered(now, bytes([number]), cores, flag, busy, amount)
        elif what == "death":
            account.process_died(now, bytes([number]))
        else:
            account.sample(now, cores, amount, flag)
        rows = account.rows(now)
        assert all(value >= -1e-9 for value in rows.values())
        assert sum(rows.values()) == pytest.approx(4.0 * (now - 10.0))


def test_known_shares() -> None:
    account = CoreTimeAccount(0.0, 4.0)
    account.answered(0.0, b"a", 1.0, False, 0.0, 0.0)
    account.answered(0.0, b"b", 1.0, True, 0.0, 0.0)
    account.sample(5.0, 2.0, 0.0, True)
    account.sample(10.0, 2.0, 1.0, False)
    account.answered(10.0, b"a", 1.0, False, 8.0, 6.0)  # ran for 8 s, 6 of them on a CPU
    account.answered(10.0, b"b", 1.0, True, 1.0, 5.0)  # a call of 1 s; its other threads are not the task's
    assert account.rows(10.0) == pytest.approx(
        {ON_CPU: 7.0, OFF_CPU: 2.0, BETWEEN: 2.0, ACTORS: 9.0, BLOCKED: 5.0, QUEUED: 10.0, FREE: 5.0, UNKNOWN: 0.0}
    )


PROGRAM = """\
import time
import hpcray as ray

ray.init(num_cpus=4)


@ray.remote
def sleep(seconds):
    time.sleep(seconds)


ray.get([sleep.remote(8) for _ in range(2)])
time.sleep(2)
"""


@pytest.mark.slow
def test_a_job_that_sleeps(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with Job(embedded(tmp_path / "program.py"), {"HPCRAY_HISTORY_DIR": str(tmp_path / "histories")}) as job:
        assert job.wait().code == 0
    (run,) = runs(str(tmp_path / "histories"))
    history = JobHistory(run)
    rows = history.head.account
    whole = 4 * (history.last - history.started)
    assert sum(rows.values()) == pytest.approx(whole, rel=0.05)
    assert rows[OFF_CPU] == pytest.approx(16, abs=0.05 * whole), rows
    assert rows[ON_CPU] < 0.05 * whole
    assert rows[UNKNOWN] < 0.05 * whole
