"""Loops that sleep, or wait with a timeout, again and again: which can end only if something in the job moves."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import os
import queue
import random
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest

from hpcray.hangs import process_look
from hpcray.hangs.process_look import polls_for_the_job

NAP, LONG, LOOKS = 0.02, 0.6, 5


class Over(BaseException):
    """Ends a loop of a test."""


class Flag:
    ready = False

    def __init__(self):
        self.event = threading.Event()
        self.left = [1, 2]

    @property
    def computed(self):
        return os.path.exists("/nowhere")

    def __bool__(self):
        return os.path.exists("/nowhere")

    def __contains__(self, one):
        return os.path.exists("/nowhere")

    def is_ready(self):
        return self.event.is_set()

    def exists(self):
        return os.path.exists("/nowhere")


FLAG, DONE, EMPTY, PLACE = Flag(), False, [], "/nowhere"
FUTURE, EVENT, QUEUE = futures.Future(), threading.Event(), queue.Queue()
ENDED = futures.Future()
ENDED.set_result(1)
CHILD: subprocess.Popen


def rest():
    time.sleep(NAP)


def handle(value):
    with open(PLACE, "w") as file:
        file.write(value)


# ------------------------------------------------------------ loops that only another part of the job can end


def looks_at_an_event():
    while not EVENT.is_set():
        time.sleep(NAP)


def waits_for_an_event():
    while not EVENT.wait(timeout=NAP):
        pass


def looks_at_a_variable():
    while not DONE:
        rest()


def looks_at_an_attribute():
    while not FLAG.ready:
        time.sleep(NAP)


def looks_through_a_method():
    while True:
        if FLAG.is_ready():
            break
        time.sleep(NAP)


def is_there(event):
    found = [event.is_set()]
    first = found[0]
    return first is True and len(found) > 0


def looks_through_a_function():
    while not is_there(EVENT):
        time.sleep(NAP)


def looks_at_a_future():
    while True:
        time.sleep(NAP)
        if FUTURE.done():
            return FUTURE.result()


def takes_from_a_queue():
    while True:
        try:
            value = QUEUE.get(timeout=NAP)
        except queue.Empty:
            continue
        handle(value)


def tries_a_result():
    while True:
        try:
            return FUTURE.result(timeout=NAP)
        except futures.TimeoutError:
            print("not yet")


def handles_what_comes():
    pending, done = [1, 2, 3], 0
    while done < 3:
        ready = list(EMPTY)
        for one in ready:
            handle(one)
        done += len(ready)
        if not ready:
            time.sleep(NAP)
            continue
        pending.pop()


def counts_its_rounds_for_show():
    rounds = 0
    while not EVENT.is_set():
        rounds += 1
        time.sleep(NAP)


def looks_at_threads():
    threads = [threading.current_thread()]
    while any(one.is_alive() for one in threads):
        time.sleep(NAP)


def looks_at_a_child():
    while CHILD.poll() is None:
        time.sleep(NAP)


def counts_for_ever():
    for _ in itertools.count():
        if QUEUE.empty():
            time.sleep(NAP)


# ------------------------------------------------------------ loops that may end otherwise


def looks_at_a_file():
    while not os.path.exists(PLACE):
        time.sleep(NAP)


def looks_at_a_file_through_a_method():
    while not FLAG.exists():
        time.sleep(NAP)


def looks_at_a_property():
    while not FLAG.computed:
        time.sleep(NAP)


def looks_with_an_operator():
    while not FLAG:
        time.sleep(NAP)


def looks_for_a_member():
    while 3 not in FLAG:
        time.sleep(NAP)


def judges(future):
    value = future.result()
    return value > 3


def looks_at_what_a_future_holds():
    while not judges(ENDED):
        time.sleep(NAP)


def looks_at_a_file_too():
    while not EVENT.wait(NAP):
        if os.path.exists(PLACE):
            return


def looks_at_a_file_when_nothing_came():
    while True:
        try:
            QUEUE.get(timeout=NAP)
        except queue.Empty:
            if os.path.exists(PLACE):
                return


def looks_at_a_clock():
    end = time.monotonic() + 3600
    while time.monotonic() < end:
        EVENT.wait(NAP)


def counts():
    rounds = 0
    while not EVENT.is_set() and rounds < 1000:
        rounds += 1
        time.sleep(NAP)


def counts_in_a_branch():
    rounds = 0
    while True:
        time.sleep(NAP)
        rounds = rounds + 1
        if rounds > 1000:
            break


def counts_down():
    for _ in range(1000):
        if EVENT.wait(NAP):
            break


def takes_away():
    left = list(range(1000))
    while left:
        time.sleep(NAP)
        left.pop()


def takes_the_next():
    rounds = iter(range(1000))
    while next(rounds, None) is not None:
        time.sleep(NAP)


def gives_up():
    while True:
        try:
            return QUEUE.get(timeout=LONG)
        except ValueError:
            continue


def draws():
    while random.random() < 2:
        time.sleep(NAP)


def asks_a_shell():
    while subprocess.run(["true"]).returncode == 0:
        time.sleep(NAP)


def sleeps_long():
    while not EVENT.is_set():
        time.sleep(LONG)


def sleeps():
    time.sleep(LONG)


def works_on_a_list():
    for _ in [1, 2, 3]:
        rest()
        time.sleep(LONG)


def reads_memory():
    view = memoryview(bytearray(8))
    while view[0] == 0:
        time.sleep(NAP)


ENDLESS = [
    looks_at_an_event, waits_for_an_event, looks_at_a_variable, looks_at_an_attribute, looks_through_a_method,
    looks_through_a_function, looks_at_a_future, takes_from_a_queue, tries_a_result, handles_what_comes,
    counts_its_rounds_for_show,
    looks_at_threads, looks_at_a_child, counts_for_ever,
]  # fmt: skip
OTHERS = [
    looks_at_a_file, looks_at_a_file_through_a_method, looks_at_a_property, looks_with_an_operator,
    looks_for_a_member, looks_at_what_a_future_holds, looks_at_a_file_too,
    looks_at_a_file_when_nothing_came, looks_at_a_clock, counts, counts_in_a_branch, counts_down, takes_away,
    takes_the_next, gives_up, draws, asks_a_shell, sleeps_long, sleeps, works_on_a_list, reads_memory,
]  # fmt: skip


def verdict(function, monkeypatch):
    """What is said of a function that a thread is in: that of most looks, as some find it between two sleeps."""
    global CHILD
    monkeypatch.setattr(process_look, "_LONGEST_SLEEP", LONG / 2)
    CHILD = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = threading.Event()

    def body():
        began.set()
        with contextlib.suppress(Over, queue.Empty):
            function()

    thread = threading.Thread(target=body)
    thread.start()
    found = collections.Counter()
    began.wait()
    for _ in range(LOOKS):
        time.sleep(1.3 * NAP)
        frames, frame = [], sys._current_frames()[thread.ident]
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        found[polls_for_the_job(frames)] += 1
    while thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Over))
        thread.join(NAP)
    CHILD.communicate(b"\n")
    return found.most_common(1)[0][0]


@pytest.mark.parametrize("function", ENDLESS, ids=lambda one: one.__name__)
def test_a_loop_that_looks_at_the_job_alone_ends_only_if_the_job_moves(function, monkeypatch):
    assert verdict(function, monkeypatch)


@pytest.mark.parametrize("function", OTHERS, ids=lambda one: one.__name__)
def test_a_loop_that_looks_elsewhere_or_counts_may_end_by_itself(function, monkeypatch):
    assert not verdict(function, monkeypatch)
