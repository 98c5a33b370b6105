"""Profiles of a running job: which functions of its processes take time, or hold memory that they have not freed.

Each process samples itself, in a thread that starts on request and ends by itself, and adds its stacks up; the results
are gathered as plain data. What only C code knows cannot be seen: `limits` says so.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from hpcray.common.ids import show_proc
from hpcray.core.object_store.allocator import format_size
from hpcray.diagnostics.cluster_query import QUERY_TIMEOUT, ClusterQuery, ProcessInfo
from hpcray.runtime.core_worker.core_worker import CoreWorker

Frame = tuple[str, int, str]
"""(file, line, function): the line of a function is its first; in a profile of memory functions are not known: ""."""

_NEW_PERIOD = 2.0
"""Seconds between two looks for processes that have started meanwhile."""
_RESULT_TIME = 3.0
"""Seconds that a process may take to add up what it has sampled."""
_MEMORY_TIME = 60.0
"""The same, of what it has allocated."""
_STACKS = 400_000
"""Stacks that are gathered, at most; each process sends its share of the largest."""
_LEAST_STACKS = 50
_KINDS = ("driver", "worker")


@dataclass(frozen=True)
class ProfileRequest:
    """A request for a profile.

    Attributes:
        seconds: for how long. rate: samples per second.
        memory: memory that is allocated and not freed, by the line that has allocated it, instead of time.
        nodes: only processes of these nodes; None: of all. actor: only this one: its id or the beginning of it, its
            name or its class. task: only while this function runs. everything: also hpcray's own threads and frames.
    """

    seconds: float = 10.0
    rate: float = 100.0
    memory: bool = False
    nodes: Collection[int] | None = None
    actor: str = ""
    task: str = ""
    everything: bool = False


@dataclass(frozen=True)
class ProfiledStack:
    """One stack.

    Attributes:
        label: what the thread worked for: the name of a task or call, "(driver)", or "(thread …)" for a thread that
            works for none, of which only CPU time counts. frames: the outermost first. line: that of the innermost one.
        value: seconds, or bytes. cpu: CPU seconds. count: samples, or blocks of memory.
    """

    label: str
    frames: tuple[Frame, ...]
    line: int
    value: float
    cpu: float
    count: int


@dataclass
class ProcessProfile:
    """One process.

    Attributes:
        process: `process 0.3`. kind: "driver", "worker". actor, actor_id: class and id of the actor that it is.
        problem: why there is nothing of it, "" where there is. kernel: then what the kernel says (`describe_process`).
        seconds, samples: for how long, and how often. gap: seconds of the longest time without a sample.
        cpu, native_cpu: CPU seconds of the process; of threads that are not Python's. cost: CPU seconds of sampling.
        idle: seconds in which nothing ran, by what is said of them.
        omitted: seconds or bytes of stacks that were too many.
        memory: "traced", "before" and "after", as `MemoryGrowth.answer` says. stacks: those with most first.
    """

    process: str
    pid: int
    kind: str
    node: int
    host: str
    actor: str = ""
    actor_id: str = ""
    problem: str = ""
    kernel: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    samples: int = 0
    gap: float = 0.0
    cpu: float = 0.0
    native_cpu: float = 0.0
    cost: float = 0.0
    idle: dict[str, float] = field(default_factory=dict)
    omitted: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    stacks: list[ProfiledStack] = field(default_factory=list)

    @property
    def title(self) -> str:
        """`process 0.3 (actor Trainer, pid 123, node 0)`."""
        return (
            f"{self.process} ({f'actor {self.actor}' if self.actor else self.kind}, pid {self.pid}, node {self.node})"
        )


@dataclass
class JobProfile:
    """A profile of a job.

    Attributes:
        began: Unix time. seconds: for how long it was measured. unit: "seconds" or "bytes".
        processes: those that were asked. missing: nodes that did not say which processes they have, and why.
    """

    began: float
    seconds: float
    rate: float
    unit: str
    processes: list[ProcessProfile]
    missing: list[str] = field(default_factory=list)

    @property
    def answered(self) -> list[ProcessProfile]:
        """The processes of which there is something."""
        return [one for one in self.processes if not one.problem]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def idle(self) -> dict[str, float]:
        """Seconds in which nothing ran, of all processes, by what is said of them."""
        found: dict[str, float] = {}
        for one in self.answered:
            for what, seconds in one.idle.items():
                found[what] = found.get(what, 0.0) + seconds
        return found

    def stacks(self) -> list[ProfiledStack]:
        """The stacks of all processes, equal ones added up, those with most first."""
        found: dict[tuple[Any, ...], list[Any]] = {}
        for one in self.answered:
            for stack in one.stacks:
                row = found.setdefault((stack.label, stack.frames, stack.line), [0.0, 0.0, 0])
                row[0], row[1], row[2] = row[0] + stack.value, row[1] + stack.cpu, row[2] + stack.count
        stacks = [ProfiledStack(*key, *row) for key, row in found.items()]
        return sorted(stacks, key=lambda one: (-one.value, -one.cpu))


@dataclass
class FunctionTime:
    """A function in a profile; in one of memory a line.

    Attributes:
        frame: where it is. own, total: seconds or bytes in itself, and with what it has called. cpu: of its own seconds
            those on a CPU. count: samples or blocks of its own. line: its line with most of its own.
    """

    frame: Frame
    own: float = 0.0
    total: float = 0.0
    cpu: float = 0.0
    count: int = 0
    line: int = 0
    lines: dict[int, float] = field(default_factory=dict)


def top_functions(stacks: Iterable[ProfiledStack]) -> list[FunctionTime]:
    """The functions of these stacks, those with most of their own first."""
    found: dict[Frame, FunctionTime] = {}
    for stack in stacks:
        for frame in set(stack.frames):
            found.setdefault(frame, FunctionTime(frame)).total += stack.value
        if stack.frames:
            inner = found[stack.frames[-1]]
            inner.own += stack.value
            inner.cpu += stack.cpu
            inner.count += stack.count
            inner.lines[stack.line] = inner.lines.get(stack.line, 0.0) + stack.value
    for one in found.values():
        one.line = max(one.lines, key=lambda line: one.lines[line]) if one.lines else one.frame[1]
    return sorted(found.values(), key=lambda one: (-one.own, -one.total))


def time_by_label(profile: JobProfile) -> list[tuple[str, float, float, int]]:
    """(task, seconds, CPU seconds, processes) of what ran, those with most seconds first."""
    found: dict[str, list[Any]] = {}
    for one in profile.answered:
        for stack in one.stacks:
            row = found.setdefault(stack.label, [0.0, 0.0, set()])
            row[0], row[1] = row[0] + stack.value, row[1] + stack.cpu
            row[2].add(one.process)
    rows = [(label, seconds, cpu, len(where)) for label, (seconds, cpu, where) in found.items()]
    return sorted(rows, key=lambda row: -row[1])


def limits(profile: JobProfile) -> list[str]:
    """Sentences about what this profile does not show."""
    found: list[str] = []
    answered = profile.answered
    if profile.unit == "bytes":
        growth = sum(one.memory["after"]["anonymous"] - one.memory["before"]["anonymous"] for one in answered)
        traced = sum(one.memory["traced"] for one in answered)
        rest = growth - traced
        found.append(
            f"the processes have grown by {_signed(growth)}, {_signed(traced)} of it by what Python's and NumPy's "
            "allocators know; the rest is of C and C++ code (PyTorch's tensors), of what was allocated before and "
            f"freed since, or not given back to the kernel yet: {_signed(rest)}"
        )
        return found
    native = sum(one.native_cpu for one in answered)
    found.append("C code shows as the line of Python that calls it; hint for its inside: py-spy record --native, perf")
    if native >= 0.05 * max(profile.seconds, 1e-9):
        found.append(
            f"{native:.1f} s of CPU were used by threads that are not Python's (OpenMP, BLAS, I/O of libraries)"
        )
    late = max((one for one in answered if one.samples), key=lambda one: one.gap, default=None)
    if late is not None and late.gap > max(0.2, 10 / profile.rate):
        found.append(
            f"{late.title} could not be sampled for up to {late.gap:.1f} s at a time: C code kept Python's lock, or "
            "the process had no CPU; that time counts for the line that followed"
        )
    if omitted := sum(one.omitted for one in answered):
        found.append(f"{omitted:.1f} s are of stacks that were too many to send; hint: --actor, --node, --task")
    return found


def _signed(size: float) -> str:
    return f"{'-' if size < 0 else ''}{format_size(abs(int(size)))}"


class ProfileError(Exception):
    """There is nothing that could be profiled."""


class JobProfiler:
    """One profile of a job, from its start to its result.

    Args:
        process: it sends the questions, and is not profiled itself.
        request: what is to be measured.
        patience: seconds that a process may take to answer.

    Raises:
        ProfileError: no actor is meant by `request.actor`, or none that lives.
    """

    def __init__(self, process: CoreWorker, request: ProfileRequest, patience: float = QUERY_TIMEOUT) -> None:
        self._process = process
        self._request = request
        self._query = ClusterQuery(process, patience)
        self._results = ClusterQuery(process, patience + (_MEMORY_TIME if request.memory else _RESULT_TIME))
        self._token = os.urandom(8)
        self._people: dict[bytes, ProcessInfo] = {}
        self._asked: dict[bytes, float] = {}
        self._missing: list[str] = []
        self._only = self._workers_of(request.actor) if request.actor else None

    def take(self, wait: Callable[[float], object] = time.sleep) -> JobProfile:
        """Profile the job for `request.seconds`, and return what was found.

        Args:
            wait: sleeps for so many seconds; a KeyboardInterrupt from it ends the profile early.
        """
        began, start = time.time(), time.monotonic()
        end = start + self._request.seconds
        try:
            while (left := end - time.monotonic()) > 0:
                self._begin(left)
                wait(max(0.0, min(_NEW_PERIOD, end - time.monotonic())))
        except KeyboardInterrupt:
            pass  # what there is
        seconds = time.monotonic() - start
        unit = "bytes" if self._request.memory else "seconds"
        return JobProfile(began, seconds, self._request.rate, unit, self._gather(), self._missing)

    def _begin(self, seconds: float) -> None:
        """Have processes begin that have not been asked yet."""
        request = self._request
        nodes = [one for one in self._query.nodes() if request.nodes is None or one.index in request.nodes]
        if unknown := set(request.nodes or ()) - {one.index for one in nodes}:
            raise ProfileError(f"there is no node {min(unknown)}; hint: hpcray list nodes")
        self._missing = [f"node {one.index} ({one.host}): {one.problem}" for one in nodes if one.problem and one.alive]
        new = {
            one.proc: one
            for node in nodes
            for one in node.processes
            if one.proc not in self._people
            and one.kind in _KINDS
            and one.state not in ("starting", "leaving")
            and one.proc != self._process.me
            and (self._only is None or one.proc in self._only)
        }
        self._people |= new
        self._asked |= dict.fromkeys(new, time.monotonic())
        options = {
            "seconds": seconds, "rate": request.rate, "memory": request.memory, "task": request.task,
            "everything": request.everything,
        }  # fmt: skip
        self._query.ask(new, "profile", self._token, options)

    def _gather(self) -> list[ProcessProfile]:
        now = time.monotonic()
        most = max(_LEAST_STACKS, _STACKS // max(1, len(self._people)))
        answers = self._results.ask(self._people, "profiled", self._token, most)
        gone = self._query.gone | self._results.gone
        silent = [one for proc, one in self._people.items() if proc not in answers and proc not in gone]
        kernel = self._query.kernel_state(silent)
        rows = []
        for proc, one in self._people.items():
            answer = answers.get(proc)
            row = ProcessProfile(
                show_proc(proc), one.pid, one.kind, one.node, one.host, one.actor_class, one.actor.hex()
            )
            if answer is not None:
                _fill(row, answer)
                expected = min(self._request.seconds, now - self._asked[proc])
                row.gap = max(row.gap, expected - row.seconds)  # it has heard of the question that late
            elif proc in gone:
                row.problem = "it has ended meanwhile"
            else:
                row.problem, row.kernel = "it does not answer", kernel.get(proc, {})
            rows.append(row)
        return sorted(rows, key=lambda row: (row.node, row.kind != "driver", row.pid))

    def _workers_of(self, actor: str) -> set[bytes]:
        """The processes of the actors that are meant."""
        rows = self._process.gcs.call("actors")
        meant = [
            row
            for row in rows
            if actor in (row["name"], row["class_name"], row["class_name"].rpartition(".")[2])
            or row["actor"].hex().startswith(actor.lower())
        ]
        if not meant:
            raise ProfileError(f"there is no actor {actor!r}; hint: hpcray list actors")
        living = {row["worker"] for row in meant if row["worker"] and row["state"] != "DEAD"}
        if not living:
            raise ProfileError(f"actor {actor!r} does not live: {meant[0]['state']}; hint: hpcray list actors")
        return living


def _fill(row: ProcessProfile, answer: Mapping[str, Any]) -> None:
    row.problem = answer["problem"]
    if row.problem:
        return
    row.seconds, row.omitted = answer["seconds"], answer["omitted"]
    row.stacks = list(_stacks_of(answer["stacks"]))
    if "traced" in answer:
        row.memory = {name: answer[name] for name in ("traced", "before", "after")}
        return
    row.samples, row.gap, row.cpu, row.cost = answer["samples"], answer["gap"], answer["cpu"], answer["cost"]
    row.native_cpu = max(0.0, answer["cpu"] - answer["python"])
    row.idle = answer["idle"]


def _stacks_of(rows: Iterable[Any]) -> Iterator[ProfiledStack]:
    for label, line, value, cpu, count, frames in rows:
        yield ProfiledStack(
            label, tuple((file, at, function) for file, at, function in frames), line, value, cpu, count
        )


def take_profile(process: CoreWorker, request: ProfileRequest) -> JobProfile:
    """Profile a running job.

    Args:
        process: it sends the questions, and is not profiled itself. request: what is to be measured.

    Raises:
        ProfileError: there is no such actor or node.
    """
    return JobProfiler(process, request).take()


# ------------------------------------------------------------ profile files
# Files of profiles: folded text, and speedscope's JSON.


_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"
_MICRO = 1_000_000


def frame_name(frame: Frame) -> str:
    """`step (train.py:12)`; in a profile of memory `train.py:12`."""
    file, line, function = frame
    where = f"{PurePath(file).name}:{line}" if file else ""
    return f"{function} ({where})" if function and where else function or where


def folded(profile: JobProfile) -> str:
    """One line per stack, `label;outer;inner weight`, as flame graph tools read it: microseconds, or bytes."""
    scale = 1 if profile.unit == "bytes" else _MICRO
    lines: dict[str, int] = {}
    for stack in profile.stacks():
        names = [name.replace(";", ":").replace("\n", " ") for name in _names(stack)]
        if (weight := round(stack.value * scale)) > 0:
            text = ";".join(names)
            lines[text] = lines.get(text, 0) + weight
    for one in profile.answered:
        for what, seconds in one.idle.items():
            lines[f"({what})"] = lines.get(f"({what})", 0) + round(seconds * scale)
    return "".join(f"{text} {weight}\n" for text, weight in lines.items())


def speedscope(profile: JobProfile) -> str:
    """A file for https://www.speedscope.app: all processes by time and by CPU time, then each process."""
    frames: dict[tuple[Any, ...], int] = {}

    def index(name: str, file: str = "", line: int = 0) -> int:
        return frames.setdefault((name, file, line), len(frames))

    def one(name: str, stacks: Iterable[ProfiledStack], weigh: Callable[[ProfiledStack], float]) -> dict[str, Any]:
        samples: list[list[int]] = []
        weights: list[float] = []
        for stack in stacks:
            if (weight := weigh(stack)) > 0:
                label = [index(stack.label)] if stack.label else []
                inner = [index(function or frame_name((file, at, "")), file, at) for file, at, function in stack.frames]
                samples.append(label + inner)
                weights.append(round(weight, 6))
        return {
            "type": "sampled", "name": name, "unit": profile.unit, "startValue": 0, "endValue": sum(weights),
            "samples": samples, "weights": weights,
        }  # fmt: skip

    def value(stack: ProfiledStack) -> float:
        return stack.value

    whole = profile.stacks()
    profiles = [one("all processes", whole, value)]
    if profile.unit == "seconds":
        profiles.append(one("all processes, CPU time", whole, lambda stack: stack.cpu))
    profiles += [one(each.title, each.stacks, value) for each in profile.answered if each.stacks]
    shared = [{"name": name} | ({"file": file, "line": line} if file else {}) for name, file, line in frames]
    return json.dumps({
        "$schema": _SPEEDSCOPE, "name": "hpcray profile", "exporter": "hpcray", "activeProfileIndex": 0,
        "shared": {"frames": shared}, "profiles": profiles,
    })  # fmt: skip


def _names(stack: ProfiledStack) -> list[str]:
    return [*([stack.label] if stack.label else []), *map(frame_name, stack.frames)]


FORMATS: Mapping[str, Callable[[JobProfile], str]] = {
    "speedscope": speedscope,
    "folded": folded,
    "json": lambda profile: json.dumps(profile.as_dict(), indent=1),
}
"""The functions that write a profile, by format."""
SUFFIXES = {".json": "speedscope", ".txt": "folded", ".folded": "folded"}
"""The formats of files, by how their names end."""
