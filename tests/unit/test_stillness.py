"""When a job in which nothing goes on is taken for hung: the clock, and each thing that makes the verdict doubtful."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.diagnostics.wait_kinds import (
    ACCEPT,
    CHILD,
    FILE_LOCK,
    HIDDEN,
    LOCK,
    OTHER,
    POLL,
    READ,
    RUNNING,
    SIGNAL,
    TIMED,
    KernelWait,
    ProcessWait,
)
from hpcray.hangs.messages import (
    COROUTINE,
    DEBUGGER,
    LOOP,
    OUTSIDE,
    REPEATS,
    SUBPROCESS,
    CallLook,
    ProcessLook,
    ThreadLook,
    WaitLook,
)
from hpcray.hangs.stillness import JobLook, StillnessClock, progress_between, why_it_may_go_on

PROGRAM, WORKER = b"program!", b"worker!!"
REF = bytes(16)


def thread(kind, *, target="", descriptor=-1, switches=1, what=""):
    return ThreadLook(kind, target, descriptor, switches, what, "p.py:1 in f")


def program(*others, waits=True, handlers=False, timeout=-1.0, submitted=1, repeats=False):
    found = [WaitLook(1, 1, [REF], timeout, b"", "p.py:9", repeats=repeats)] if waits else []
    return ProcessLook(PROGRAM, 10, "driver", True, submitted, found, [], list(others), 1, handles_signals=handlers)


def worker(*others, seconds=100.0, task=b"task"):
    calls = [CallLook(task, "f", seconds, 0)]
    return ProcessLook(WORKER, 11, "worker", False, 0, [], calls, list(others or [thread(LOCK)]), 1)


def process(*threads, name="python3", state="S", connections=(), listens=(), outside=(), ours=False, pid=99):
    return ProcessWait(pid, name, state, list(threads), list(connections), list(listens), list(outside), ours)


def job(*looks, others=(), time=0.0, **fields):
    looks = looks or (program(), worker())
    return JobLook(time, {look.proc: look for look in looks}, {0: list(others)}, {"10.0.0.1"}, **fields)


def verdict(second, first=None):
    return why_it_may_go_on(first or second, second)


def test_a_job_whose_threads_wait_for_each_other_is_hung():
    assert not verdict(job())
    assert not verdict(job(program(timeout=1.0, repeats=True), worker())), "a loop that polls for what hangs"
    assert not verdict(job(program(waits=False), worker(thread(LOCK)))), "the program itself waits for a lock"
    child = process(KernelWait(LOCK))
    assert not verdict(job(program(), worker(thread(CHILD, what=SUBPROCESS)), others=[child]))
    assert not verdict(job(program(), worker(thread(READ, target="pipe:[1]", descriptor=5))))
    assert not verdict(job(program(), worker(thread(COROUTINE)))), "an event of asyncio's"
    assert not verdict(job(program(), worker(thread(POLL, target="pipe:[1] socket:[2]")))), "of the job's own"
    assert not verdict(job(others=[process(KernelWait(READ, "pipe:[1]", 0))])), "a pipe that only the job writes to"


def test_a_connection_within_the_job_is_none_to_the_outside():
    ends = ("10.0.0.1:50", "10.0.0.2:80"), ("10.0.0.2:80", "10.0.0.1:50")
    here, there = (process(connections=[one], pid=pid) for one, pid in zip(ends, (11, 12), strict=True))
    assert not verdict(job(others=[here, there]))
    assert verdict(job(others=[here]))
    raylet = process(connections=[ends[1], ("127.0.0.1:5", "127.0.0.1:6")], ours=True, pid=12)
    assert not verdict(job(others=[here, raylet])), "what hpcray's own processes are connected to is no matter"
    waits = process(connections=[("127.0.0.1:50", "127.0.0.1:80")], pid=11)
    assert not verdict(job(others=[waits, process(listens=["0.0.0.0:80"], pid=10)])), "it was not accepted yet"
    assert verdict(job(others=[waits, process(listens=["0.0.0.0:81"], pid=10)]))
    far = process(connections=[("10.0.0.1:50", "10.9.9.9:80")], pid=11)
    assert verdict(job(others=[far, process(listens=["0.0.0.0:80"], pid=10)])), "another host's"


@pytest.mark.parametrize(
    "second",
    [
        job(program(), worker(thread(TIMED))),
        job(program(thread(READ, descriptor=0, target="pipe:[1]"), waits=False), worker()),
        *(
            job(program(), worker(thread(kind, target="pipe:[1]")), others=[process(outside=["pipe:[1]"], pid=11)])
            for kind in (READ, POLL)
        ),
        job(others=[process(KernelWait(POLL, "pipe:[1] socket:[2]"), outside=["socket:[2]"])]),
        job(program(timeout=1.0), worker()),
        job(program(timeout=30.0, repeats=True), worker()),
        job(program(), worker(thread(READ, descriptor=4, target="/dev/pts/3"))),
        job(program(), worker(thread(READ, descriptor=4, target="/nfs/file"))),
        job(program(), worker(thread(LOCK, what=DEBUGGER))),
        job(program(), worker(thread(COROUTINE, what=OUTSIDE))),
        job(program(), worker(thread(POLL))),
        *(job(program(), worker(thread(kind))) for kind in (SIGNAL, ACCEPT, FILE_LOCK, OTHER, HIDDEN, RUNNING)),
        job(program(timeout=3600.0), worker()),
        job(program(thread(LOCK), waits=False, handlers=True), worker()),
        job(program(), msgspec.structs.replace(worker(thread(LOCK)), handles_signals=True)),
        job(attached=["process 0.9"]),
        job(serves=["store"]),
        job(missing=[3]),
        job(growing=True),
        job(others=[process(KernelWait(TIMED))]),
        job(others=[process(KernelWait(POLL), name="ssh")]),
        job(others=[process(KernelWait(LOCK), name="srun")]),
        job(others=[process(KernelWait(POLL))]),
        job(others=[process(KernelWait(LOCK), state="T")]),
        job(others=[process(KernelWait(LOCK), state="D", pid=11)]),
        job(others=[process(KernelWait(LOCK), connections=[("10.0.0.1:5", "192.168.9.9:80")], pid=11)]),
        job(others=[process(KernelWait(LOCK), listens=["127.0.0.1:80"])]),
        job(others=[process(KernelWait(READ, "/dev/pts/1", 0))]),
    ],
    ids=lambda look: verdict(look)[:60],
)
def test_what_may_end_from_outside_or_by_itself_is_left_alone(second):
    assert verdict(second)


def test_a_sleep_and_a_loop_that_sleeps_are_both_left_alone():
    first, second = (job(program(), worker(thread(TIMED, switches=switches))) for switches in (1, 5))
    assert "sleeps" in verdict(first, first)
    assert "polls" in verdict(second, first)
    first, second = (job(program(), worker(thread(TIMED, switches=number, what=REPEATS))) for number in (1, 5))
    assert not verdict(second, first), "a loop that looks at nothing but the job"
    assert "sleeps" in verdict(first, first), "it did not go round"


def test_what_neither_cpus_nor_bytes_show_is_progress_too():
    first = job()
    assert not progress_between(first, job(), 60.0)
    assert progress_between(first, job(program(), worker(task=b"next")), 60.0), "another task"
    assert progress_between(first, job(program(submitted=2), worker()), 60.0), "a task was submitted"
    assert progress_between(first, job(program(), worker(seconds=20.0)), 60.0), "it began in that time"
    assert progress_between(first, job(program()), 60.0), "a process has ended"
    assert progress_between(first, job(program(), worker(thread(LOCK, switches=2))), 60.0), "a lock was released"
    assert not progress_between(
        job(program(), worker(thread(TIMED))), job(program(), worker(thread(TIMED, switches=9))), 60.0
    ), "a sleep that begins anew"


def test_the_clock_begins_anew_with_progress_and_stands_while_a_process_is_stopped():
    clock = StillnessClock(20.0)
    now = 0.0
    for _ in range(6):
        clock.round(now, False, False)
        now += clock.period
    assert clock.still == pytest.approx(10.0)
    clock.round(now, False, True)
    assert clock.still == pytest.approx(10.0)
    clock.round(now + 1000.0, False, False)
    assert clock.still <= 10.0 + 2 * clock.period, "this process itself was stopped"
    clock.round(now + 1001.0, True, False)
    assert clock.still == 0.0


@given(st.floats(5.0, 7200.0), st.floats(0.9, 1.1))
def test_a_still_job_ends_within_fifteen_seconds_of_the_limit(seconds, late):
    clock = StillnessClock(seconds)
    now = 0.0
    first = None
    while not (clock.is_over and first is not None and now - first >= 6.0):
        now += clock.period * late
        clock.round(now, False, False)
        if first is None and clock.wants_first_look:
            first = now
    assert clock.still >= seconds
    assert now <= max(seconds, 12.0) + 15.0


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=200))
def test_progress_within_the_limit_keeps_any_job_alive(rounds):
    clock = StillnessClock(20.0)
    now = quiet = 0.0
    for progressed, stopped in rounds:
        now += clock.period
        clock.round(now, progressed, stopped)
        quiet = 0.0 if progressed else quiet + clock.period
        assert clock.still <= quiet


def test_each_reason_is_one_of_the_second_look():
    assert {field.name for field in dataclasses.fields(JobLook)} >= {"attached", "serves", "missing", "growing"}
    assert not verdict(job(), job(attached=["gone by now"]))
    assert verdict(job(others=[process(what := KernelWait(TIMED))]), job(others=[process(what)])).endswith("sleeps")


def test_a_loop_of_events_is_judged_by_its_coroutines():
    assert not verdict(job(program(), worker(thread(POLL, what=LOOP))))
