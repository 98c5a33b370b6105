"""The watch of a job for hangs: a thread of its program, which asks other processes what they do and wait for.

It exists only where the setting `end_hangs` is on. While the job makes progress, it costs one question a round, to a
node that has worked the last time; all nodes are asked only while none of them works.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from hpcray.common.config import Config
from hpcray.common.exceptions import RayError
from hpcray.common.ids import node_of, owner_of, raylet_of
from hpcray.common.job_names import logs_directory
from hpcray.common.terminal_text import plain_line
from hpcray.diagnostics.cluster_query import ATTACHED, ClusterQuery, stacks
from hpcray.diagnostics.wait_graph import WaitGraph, show_lines
from hpcray.diagnostics.wait_kinds import Activity, ProcessWait
from hpcray.hangs.hang_watch import HangWatch
from hpcray.hangs.messages import EndWait, ProcessLook
from hpcray.hangs.stillness import (
    LEAST_BURST,
    LEAST_CPU,
    LOOKS_APART,
    CircleDetector,
    CircleLook,
    JobLook,
    StillnessClock,
    progress_between,
    why_it_may_go_on,
)
from hpcray.hangs.wait_for_graph import (
    WAIT,
    Circle,
    ResourceHolders,
    WaitFacts,
    find_circle,
    find_dead_end,
    name_of,
    stuck_nodes,
    waiting_for,
)
from hpcray.platform.private_files import make_private_directory, open_private_file
from hpcray.platform.process_tree import ancestors
from hpcray.platform.session_directory import read_session
from hpcray.platform.stacks import after_fork, interesting_frames, is_users, thread_stacks
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker

_MOST_STEPS = 60
"""Steps from a wait to what it waits for in the end, at most."""
_MOST_PROCESSES, _MOST_OBJECTS = 1_000, 5_000
"""Processes and objects that one look takes in, at most."""
_MOST_NODES = 200
"""Nodes whose resources one look takes in, at most."""
_MOST_LOOKED_AT = 16
"""Nodes up to which all processes are looked at again and again while a program waits for a queue."""
_FIRST_JOB = "01000000"
_PART = 500
"""Objects that one question names, at most."""
_SERVES = "ServeController"
_FILE = "hang.txt"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_MOST_EXPLAINED = 3
"""Objects of one wait that are explained."""
_MOST_LINES = 60
"""Lines of a report that go to standard error."""
_FLUSH_TIME = 2.0


class HangWatcher:
    """The thread that looks whether the job hangs.

    Args:
        process: the program's.
        config: of the job.
    """

    def __init__(self, process: CoreWorker, config: Config) -> None:
        self._process = process
        watch = HangWatch.of(process)
        self._circles = CircleWatch(process, watch)
        self._stillness = StillnessWatch(process, watch, config.end_hangs, config.hang_exit_code)
        self._thread = threading.Thread(target=self._run, name="hpcray-hangs", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def _run(self) -> None:
        now = time.monotonic()
        due = [now + self._circles.period, now]
        watches = (self._circles, self._stillness)
        while self._process.dead is None:
            at = min(range(len(due)), key=due.__getitem__)
            time.sleep(max(0.0, due[at] - time.monotonic()))
            try:
                watches[at].round()
            except RayError:
                pass  # the session ends, or the raylet is gone
            except Exception:
                traceback.print_exc()  # a defect of ours must not end the program, nor its watch
            due[at] = time.monotonic() + watches[at].period


class CircleWatch:
    """Looks for waits that can never end, and ends them.

    Args:
        process: the program's. watch: its extension.

    Attributes:
        period: seconds until the next look.
    """

    def __init__(self, process: CoreWorker, watch: HangWatch) -> None:
        self._process = process
        self._watch = watch
        self._circles = CircleDetector()
        self.period = self._circles.period(0.0)

    def round(self) -> None:
        """Look once."""
        began = time.thread_time()
        circle = self._circles.looked(time.monotonic(), self._look())
        self.period = self._circles.period(time.thread_time() - began)
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
        circle = self._circle(facts)
        doubt = ""
        if circle is None and facts.waits_for_a_queue() and self._is_small():
            doubt = self._look_at_all(facts, query)
            facts.sleeps = not doubt and facts.nobody_acts()
            circle = self._circle(facts) if facts.sleeps else None
        if circle is None:
            return CircleLook(None)
        return self._confirmed(facts, query, circle)

    def _is_small(self) -> bool:
        return len([row for row in self._process.gcs.nodes() if row["Alive"]]) <= _MOST_LOOKED_AT

    def _circle(self, facts: WaitFacts) -> Circle | None:
        graph = facts.graph()
        stuck = stuck_nodes(graph)
        if not facts.programs_are_stuck(stuck):
            return None
        roots = [key for key in stuck if key[0] == WAIT and key[1] == self._process.me]
        if facts.sleeps:
            return next(filter(None, (find_dead_end(graph, stuck, key) for key in sorted(roots))), None)
        return find_circle(graph, stuck & waiting_for(graph, roots))

    def _follow(self, facts: WaitFacts, query: ClusterQuery) -> None:
        for _ in range(_MOST_STEPS):
            objects, procs = facts.unknown_objects(), facts.unknown_processes()
            if not objects and facts.wants_nodes():
                facts.nodes = self._resources(query)
                procs = facts.unknown_processes()
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

    def _resources(self, query: ClusterQuery) -> list[ResourceHolders]:
        """Return the resources of all nodes; [] where one does not answer."""
        alive = [raylet_of(row["Index"]) for row in self._process.gcs.nodes() if row["Alive"]]
        cores = query.ask(alive, "core")
        if len(cores) < len(alive) or len(alive) > _MOST_NODES:
            return []
        return [
            ResourceHolders(
                core["total"], core["available"], [(lease["worker"], lease["resources"]) for lease in core["leases"]]
            )
            for core in cores.values()
        ]

    def _confirmed(self, facts: WaitFacts, query: ClusterQuery, circle: Circle) -> CircleLook:
        """Look at all other processes, too: one that does something may end the circle from outside."""
        doubt = self._look_at_all(facts, query) or facts.may_interfere(circle)
        if facts.sleeps:  # programs to come may find a queue by its name
            kept = (row for row in self._process.gcs.call("actors") if row["name"] or row["detached"])
            doubt = doubt or next((f"actor {row['name'] or row['class_name']} has a name" for row in kept), "")
        around = sorted({key[1] for key in circle.keys if key[0] == WAIT})
        stamps = tuple((proc, look.submitted) for proc in around if (look := facts.looks.get(proc)) is not None)
        return CircleLook(circle, stamps, doubt)

    def _look_at_all(self, facts: WaitFacts, query: ClusterQuery) -> str:
        """Look at the processes that were not looked at yet. Returns why it is doubtful what they do; "": it is not."""
        doubt = ""
        people = query.processes()
        others = [one.proc for one in people if one.kind != "raylet" and one.proc not in facts.looks]
        looks = self._watch.look_at(others)
        facts.looks.update({proc: looks.get(proc) for proc in others})
        for one in people:
            look = facts.looks.get(one.proc)
            if one.kind != "raylet" and look is None:
                doubt = doubt or f"{one.title} does not answer"
            elif one.kind == ATTACHED and one.proc != self._process.me and look is not None and look.driver:
                doubt = doubt or f"{one.title} is attached"
        return doubt

    def _end_circle(self, circle: Circle) -> None:
        process = self._process
        lines = "\n".join(f"  {plain_line(line)}" for line in circle.chain)
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


class StillnessWatch:
    """Looks whether anything goes on in the job, and ends the job where nothing can.

    Args:
        process: the program's. watch: its extension. seconds, code: the settings `end_hangs` and `hang_exit_code`.

    Attributes:
        period: seconds until the next look.
    """

    def __init__(self, process: CoreWorker, watch: HangWatch, seconds: float, code: int) -> None:
        self._process = process
        self._watch = watch
        self._seconds, self._code = seconds, code
        self._clock = StillnessClock(seconds)
        self._nodes: list[int] = []
        self._liveliest = process.node
        self._known: dict[int, tuple[float, dict[str, Any]]] = {}
        self._first: JobLook | None = None
        self._program: Any = None
        self._asleep: list[int] = []
        self.period = self._clock.period

    def round(self) -> None:
        """Look once; does not return if the job is ended."""
        clock, query = self._clock, ClusterQuery(self._process)
        self._see_program()
        progressed, stopped = self._progress(query)
        clock.round(time.monotonic(), progressed, stopped)
        if progressed:
            self._first = None
        elif self._first is None:
            if clock.wants_first_look:
                self._first = self._look(query)
        elif clock.is_over and time.monotonic() - self._first.time >= LOOKS_APART:
            self._judge(query, self._first)

    def _judge(self, query: ClusterQuery, first: JobLook) -> None:
        second = self._look(query)
        if progress_between(first, second, self._clock.still) or why_it_may_go_on(first, second):
            self._first = None
            self._clock.begin_anew()
        else:
            self._end(query, second)

    # ------------------------------------------------------------ progress

    def _see_program(self) -> None:
        """Find out whether the program is still in the waits of the last round: what is written then are hpcray's own
        warnings and reports, and no progress."""
        me = self._process.me
        look = self._watch.look_at([me])[me]
        waits = None
        if look.waits and not look.others:
            waits = (look.submitted, [(wait.thread, wait.objects) for wait in look.waits])
        self._asleep = [look.pid] if waits is not None and waits == self._program else []
        self._program = waits

    def _progress(self, query: ClusterQuery) -> tuple[bool, bool]:
        """Return whether anything has gone on since the last round, and whether the clock stands."""
        if self._compare(query, [self._liveliest])[0]:
            return True, False
        self._nodes = [row["Index"] for row in self._process.gcs.nodes() if row["Alive"]]
        return self._compare(query, [node for node in self._nodes if node != self._liveliest])

    def _compare(self, query: ClusterQuery, nodes: list[int]) -> tuple[bool, bool]:
        answers = query.ask([raylet_of(node) for node in nodes], "activity", self._asleep)
        now, progressed, stopped = time.monotonic(), False, len(answers) < len(nodes)
        for raylet, answer in answers.items():
            node = node_of(raylet)
            before = self._known.get(node)
            self._known[node] = now, answer
            if before is None or _has_worked(now - before[0], before[1], answer):
                progressed, self._liveliest = True, node
            stopped = stopped or bool(answer["stopped"])
        return progressed, stopped

    # ------------------------------------------------------------ looks

    def _look(self, query: ClusterQuery) -> JobLook:
        """Look at all processes. What they read for it is no progress: their figures are taken anew."""
        process = self._process
        people = query.processes()
        here = {one.proc for one in people if one.kind != "raylet"} | {process.me}
        answers = self._watch.look_at(here, kernel=True)
        attached = {one.proc for one in people if one.kind == ATTACHED and one.proc != process.me}
        observers = {proc for proc in attached if (look := answers.get(proc)) is not None and not look.driver}
        looks: dict[bytes, ProcessLook | None] = {proc: answers.get(proc) for proc in here - observers}
        rows = process.gcs.nodes()
        alive = [row for row in rows if row["Alive"]]
        waits = query.ask([raylet_of(row["Index"]) for row in alive], "waits")
        watched = {answers[proc].pid for proc in observers}
        others = {
            node_of(raylet): [
                one for one in msgspec.convert(found, list[ProcessWait]) if one.pid not in watched
            ]
            for raylet, found in waits.items()
        }  # fmt: skip
        own = looks.get(process.me)
        found = JobLook(
            time.monotonic(),
            looks,
            others,
            {row["NodeManagerAddress"] for row in alive},
            [row["Index"] for row in alive if raylet_of(row["Index"]) not in waits],
            [one.title for one in people if one.proc in attached - observers],
            self._used_from_outside(
                own is not None and not own.waits,
                {one.actor for one in looks.values() if one is not None and one.others},
            ),
            len(alive) < process.config.max_nodes,
        )
        self._compare(query, [row["Index"] for row in alive])
        return found

    def _used_from_outside(self, program_is_idle: bool, waiting: Collection[bytes]) -> list[str]:
        """Return the names of actors that serve, and of those that are kept for others, who may end their waits.

        Args:
            program_is_idle: whether the program waits for nothing of the job: then it may keep all of them for others.
            waiting: the actors in which a thread or coroutine waits for what is not an object.
        """
        rows = [row for row in self._process.gcs.call("actors") if row["state"] != "DEAD"]
        return [
            row["name"] or row["class_name"]
            for row in rows
            if row["class_name"].startswith(_SERVES)
            or (row.get("detached") and (program_is_idle or row["actor"] in waiting))
        ]

    # ------------------------------------------------------------ the end

    def _end(self, query: ClusterQuery, look: JobLook) -> None:
        process, code = self._process, self._code
        head = (
            f"hpcray: nothing has gone on in this job for {self._clock.still:.0f} s, and all that it waits for is in "
            f"the job itself: it is taken for hung, and ends with exit code {code} (--end-hangs {self._seconds:g}, "
            "docs/how-to/hangs.md)"
        )
        reason = [head, *(f"  {plain_line(line)}" for line in self._reason(look))]
        everything = _stack_lines(query)
        stays = bool(process.config.log_dir)
        place = logs_directory(process.place.session_dir)
        path = os.path.join(os.path.realpath(place), _FILE)  # where it stays, if it does
        text = "\n".join([*reason[:_MOST_LINES], *_keep_stacks(path, reason, everything, stays), ""])
        with process.engine.lock:
            process.engine.send(raylet_of(process.node), m.EndReason("hang", "\n".join(reason)))
            process.engine.flush()
        speaker = threading.Thread(target=_say, args=(text,), name="hpcray-hangs-last", daemon=True)
        speaker.start()
        speaker.join(_FLUSH_TIME)  # another thread may hold the lock of the stream for ever
        if process.place.kind != ATTACHED:
            with process.engine.lock:
                process.engine.send(raylet_of(process.node), m.Exit(code))
                process.engine.flush()
        os._exit(code)

    def _reason(self, look: JobLook) -> list[str]:
        """Return what the job waits for: objects, from the program on, then what else threads wait for."""
        lines: list[str] = []
        graph = WaitGraph(self._process)
        for one in sorted(filter(None, look.looks.values()), key=lambda one: not one.driver):
            for wait in one.waits:
                lines.append(f"{name_of(one)} waits at {wait.place} for:")
                for oid in wait.objects[:_MOST_EXPLAINED]:
                    lines += [f"  {line}" for line in show_lines(graph.explain(oid))]
                if len(wait.objects) > _MOST_EXPLAINED:
                    lines.append(f"  and {len(wait.objects) - _MOST_EXPLAINED} more objects")
            for thread in one.others:
                what = f"{thread.kind} ({thread.target})" if thread.target else thread.kind
                lines.append(f"{name_of(one)} is at {thread.place}, in a wait of kind {what}")
        known = {one.pid for one in look.looks.values() if one is not None}
        for processes in look.others.values():
            for other in processes:
                if other.pid not in known and not other.ours:
                    kinds = ", ".join(dict.fromkeys(thread.kind for thread in other.threads))
                    lines.append(f"process {other.pid} ({other.name}) is in waits of kind {kinds}")
        return lines


def _keep_stacks(path: str, reason: Sequence[str], everything: Sequence[str], stays: bool) -> list[str]:
    """Write all stacks to a file; return what is printed of them: where they are, or all, if the file does not stay or
    cannot be written.

    Args:
        path: of the file. reason: what comes before them there. everything: the stacks, by line.
        stays: whether the file outlives the job.
    """
    try:
        make_private_directory(os.path.dirname(path))
        with os.fdopen(open_private_file(path, _NEW_FILE), "w", encoding="utf-8", errors="replace") as file:
            file.write("\n".join([*reason, "", *everything, ""]))
    except OSError as error:
        return [*everything, f"  the stacks cannot be written to {path}: {error}"]
    return [f"  all stacks: {path}"] if stays else list(everything)


def _say(text: str) -> None:
    sys.stdout.flush()
    os.write(2, text.encode("utf-8", "replace"))


def _has_worked(seconds: float, before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return True if the processes of a node have worked between two looks."""
    old, new = msgspec.convert(before, Activity), msgspec.convert(now, Activity)
    busy = now["gpu"] >= LEAST_CPU or now["transfers"]
    return bool(busy or new.moved != old.moved or new.cpu - old.cpu > max(LEAST_BURST, LEAST_CPU * seconds))


def _stack_lines(query: ClusterQuery) -> list[str]:
    lines: list[str] = []
    own = {"process": "the program", "kind": "program", "pid": os.getpid(), "actor": "", "problem": ""}
    own |= {"threads": thread_stacks(), "coroutines": []}
    for node in [{"processes": [own]}, *stacks(query)]:
        for one in node["processes"]:
            if one["kind"] == "raylet":
                continue
            what = f"actor {one['actor']}" if one["actor"] else one["kind"]
            lines.append(f"  {one['process']} ({what}, pid {one['pid']}) {one['problem']}".rstrip())
            for row in (*one["threads"], *one["coroutines"]):
                frames = list(interesting_frames(after_fork(row["frames"])))
                if any(map(is_users, frames)):
                    lines.append(f"    {row['name']}:")
                    lines += [f"      {file}:{line} in {function}" for file, line, function in frames[-12:]]
    return list(map(plain_line, lines))


def watch_for_hangs(process: CoreWorker) -> None:
    """Begin to watch the job whose program this process is.

    Nothing is watched where the job serves programs that come and go: in a cluster that `ray start` has made, a job
    without a program of its own, an interactive Python.
    """
    if _is_the_program(process) and not (sys.flags.interactive or hasattr(sys, "ps1")):
        HangWatcher(process, process.config).start()


def _is_the_program(process: CoreWorker) -> bool:
    job: Any = process.place.job
    if job is None or not process.place.is_driver or job.job_id != _FIRST_JOB:
        return False
    if process.place.kind != ATTACHED:
        return True
    return read_session(process.place.session_dir).pid in ancestors(os.getpid())
