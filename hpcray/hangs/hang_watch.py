"""The watch of a job that may hang: a thread of its program, which asks other processes what they wait for.

It exists only where the setting `end_hangs` is on. Processes that are asked answer through the extension `hangs`, which
is imported then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from hpcray.common.exceptions import HangError, RayError
from hpcray.common.ids import owner_of
from hpcray.core.core_worker.object_table import PENDING, Waiter
from hpcray.core.core_worker.task import PendingTask
from hpcray.diagnostics.cluster_query import ATTACHED, QUERY_TIMEOUT, ClusterQuery
from hpcray.hangs.hang_detector import CircleDetector, CircleLook
from hpcray.hangs.messages import EndWait, HangMessage, Look, Looked, ProcessLook
from hpcray.hangs.process_look import look_at_process
from hpcray.hangs.wait_for_graph import WAIT, Circle, WaitFacts, find_circle, stuck_nodes, waiting_for
from hpcray.platform.process_tree import ancestors
from hpcray.platform.session_directory import read_session
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import serialize_error
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.extensions import Extension, ExtensionProcess

_MOST_STEPS = 60
"""Steps from a wait to what it waits for in the end, at most."""
_MOST_PROCESSES, _MOST_OBJECTS = 1_000, 5_000
"""Processes and objects that one look takes in, at most."""
_FIRST_JOB = "01000000"
_PART = 500
"""Objects that one question names, at most."""


class HangWatch(Extension):
    """Answers what this process waits for, and ends waits that can never end. In the program it asks others, too."""

    name = "hangs"
    messages = HangMessage

    def __init__(self, process: ExtensionProcess) -> None:
        super().__init__(process)
        self._number = 0
        self._open: dict[int, Waiter] = {}
        self._answers: dict[int, ProcessLook] = {}

    def on_message(self, source: bytes, message: HangMessage) -> None:
        """See `Extension.on_message`."""
        if isinstance(message, Look):
            self.send(source, Looked(message.number, look_at_process(self.process)))
        elif isinstance(message, Looked):
            waiter = self._open.pop(message.number, None)
            if waiter is not None:
                self._answers[message.number] = message.look
                waiter.count = 0
                self.process.engine.notify(waiter)
        else:
            self.end_wait(message)

    def look_at(self, procs: Iterable[bytes], patience: float = QUERY_TIMEOUT) -> dict[bytes, ProcessLook]:
        """Return what processes do, of those that answer in time (lock not held)."""
        process = self.process
        deadline = time.monotonic() + patience
        found: dict[bytes, ProcessLook] = {}
        numbers: dict[bytes, int] = {}
        with process.engine.lock:
            process.check_alive()
            for proc in procs:
                if proc == process.me:
                    found[proc] = look_at_process(process)
                    continue
                self._number += 1
                numbers[proc] = self._number
                self._open[self._number] = Waiter()
                self.send(proc, Look(self._number))
            for number in numbers.values():
                waiter = self._open.get(number)
                if waiter is not None:
                    process.block(waiter, deadline)
            for proc, number in numbers.items():
                self._open.pop(number, None)
                if number in self._answers:
                    found[proc] = self._answers.pop(number)
        return found

    def end_wait(self, message: EndWait) -> None:
        """Give those who wait for an object of this process a `HangError` (lock held)."""
        process, oid = self.process, message.object
        entry = process.table.entries.get(oid)
        if entry is None or entry.state != PENDING:
            return
        blob = serialize_error(HangError(chain=message.chain))
        task = process.table.packed.task_of(oid)
        if not isinstance(task, PendingTask):
            process.table.set_inline(oid, blob)
        else:
            worker = task.worker
            process.submitter.fail(task, blob)
            if message.queued and worker is not None:
                process.engine.send(worker, m.CancelTask(task.id, False, False))
        process.engine.flush()


class HangWatcher:
    """The thread that looks whether the job hangs.

    Args:
        process: the program's.
        seconds: the setting `end_hangs`.
    """

    def __init__(self, process: CoreWorker, seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._watch = HangWatch.of(process)
        self._circles = CircleDetector()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcray-hangs", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def _run(self) -> None:
        period = self._circles.period(0.0)
        while not self._over.wait(period) and self._process.dead is None:
            began = time.thread_time()
            try:
                self._look_for_circles()
            except RayError:
                continue  # the session ends, or the raylet is gone
            except Exception:
                traceback.print_exc()  # a defect of ours must not end the program, nor its watch
            period = self._circles.period(time.thread_time() - began)

    # ------------------------------------------------------------ certain hangs

    def _look_for_circles(self) -> None:
        look = self._look()
        circle = self._circles.looked(time.monotonic(), look)
        if circle is not None:
            self._end_circle(circle)

    def _look(self) -> CircleLook:
        """Look at the program, and at what it waits for; at all others only where that goes round in a circle."""
        process = self._process
        if process.config.elastic or process.config.max_nodes:
            return CircleLook(None)
        facts = WaitFacts()
        own = self._watch.look_at([process.me])[process.me]
        if own.others or not own.waits:
            return CircleLook(None)
        facts.looks[process.me] = own
        query = ClusterQuery(process)
        self._follow(facts, query)
        circle, doubt = self._circle(facts)
        if circle is None:
            return CircleLook(None)
        return self._confirmed(facts, query, circle, doubt)

    def _circle(self, facts: WaitFacts) -> tuple[Circle | None, str]:
        graph = facts.graph()
        stuck = stuck_nodes(graph)
        if not facts.programs_are_stuck(stuck):
            return None, ""
        roots = [key for key in stuck if key[0] == WAIT and key[1] == self._process.me]
        return find_circle(graph, stuck & waiting_for(graph, roots)), ""

    def _follow(self, facts: WaitFacts, query: ClusterQuery) -> None:
        for _ in range(_MOST_STEPS):
            objects, procs = facts.unknown_objects(), facts.unknown_processes()
            if not objects and not procs:
                return
            if len(facts.statuses) > _MOST_OBJECTS or len(facts.looks) > _MOST_PROCESSES:
                return
            for owner, oids in objects.items():
                for start in range(0, len(oids), _PART):
                    part = oids[start : start + _PART]
                    known = query.ask([owner], "explain", part).get(owner)
                    facts.statuses.update(zip(part, known or [None] * len(part), strict=True))
            if procs:
                looks = self._watch.look_at(procs)
                facts.looks.update({proc: looks.get(proc) for proc in procs})

    def _confirmed(self, facts: WaitFacts, query: ClusterQuery, circle: Circle, doubt: str) -> CircleLook:
        """Look at all other processes, too: one that does something may end the circle from outside."""
        people = query.processes()
        others = [one.proc for one in people if one.kind != "raylet" and one.proc not in facts.looks]
        looks = self._watch.look_at(others)
        facts.looks.update({proc: looks.get(proc) for proc in others})
        for one in people:
            look = facts.looks.get(one.proc)
            if one.kind == ATTACHED and one.proc != self._process.me:
                doubt = doubt or f"{one.title} is attached"
            elif one.kind != "raylet" and look is None:
                doubt = doubt or f"{one.title} does not answer"
        doubt = doubt or facts.may_interfere(circle)
        around = sorted({key[1] for key in circle.keys if key[0] == WAIT})
        stamps = tuple((proc, look.submitted) for proc in around if (look := facts.looks.get(proc)) is not None)
        return CircleLook(circle, stamps, doubt)

    def _end_circle(self, circle: Circle) -> None:
        process = self._process
        lines = "\n".join(f"  {line}" for line in circle.chain)
        print(f"hpcray: these wait for each other, and can never end; the first gets a HangError:\n{lines}",
              file=sys.stderr, flush=True)  # fmt: skip
        message = EndWait(circle.object, list(circle.chain), circle.queued)
        owner = owner_of(circle.object)
        with process.engine.lock:
            if owner == process.me:
                self._watch.end_wait(message)
            else:
                self._watch.send(owner, message)
                process.engine.flush()


def watch_for_hangs(process: CoreWorker) -> None:
    """Begin to watch the job whose program this process is.

    Nothing is watched where the job serves programs that come and go: in a cluster that `ray start` has made, a job
    without a program of its own, an interactive Python.
    """
    if _is_the_program(process) and not (sys.flags.interactive or hasattr(sys, "ps1")):
        HangWatcher(process, process.config.end_hangs).start()


def _is_the_program(process: CoreWorker) -> bool:
    job: Any = process.job
    if job is None or not process.is_driver or job.job_id != _FIRST_JOB:
        return False
    if process.kind != ATTACHED:
        return True
    return read_session(process.session_dir).pid in ancestors(os.getpid())
