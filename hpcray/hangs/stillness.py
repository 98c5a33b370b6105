"""When a job is taken for hung: the verdict on a job in which nothing goes on, and the rounds of the watch.

Pure: looks and figures in, reasons out.

The clock of a job runs while no process of it makes progress, stands while one is stopped, and begins anew with any
progress. When it has reached the limit, two looks at all processes decide: each thread must be in a wait that nothing
outside of the job can end. One that may be ended from outside, or ends by itself, begins the clock anew: a job that
hangs is better than one that was ended by mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hpcray.diagnostics.wait_kinds import CHILD, LOCK, MESSAGE, POLL, READ, TIMED, KernelWait, ProcessWait
from hpcray.hangs.messages import COROUTINE, DEBUGGER, LOOP, OUTSIDE, REPEATS, SUBPROCESS, ProcessLook, ThreadLook
from hpcray.hangs.wait_for_graph import Circle, name_of

LEAST_CPU = 0.01
"""Share of a core from which on processes of a node count as working."""
LEAST_BURST = 0.03
"""Seconds of CPU in one round that count in any case: the kernel counts in ticks, and the watch takes some, too."""
LOOKS_APART = 6.0
"""Seconds between the two looks."""
_LONGEST_POLL = 5.0
"""Seconds; a wait of hpcray's with a longer timeout ends by itself, as far as two looks show."""
_BETWEEN_LOOKS = 2.0
"""Rounds that one round may take, until it is plain that this process itself was stopped."""
_LOOPBACK = ("127.", "::1")
_ELSEWHERE = ("ssh", "srun", "sbatch", "salloc", "mpirun", "mpiexec", "prterun", "rsync", "scp", "sftp", "kubectl")
"""Programs for which another machine works."""


class StillnessClock:
    """Counts for how long nothing has gone on.

    Args:
        seconds: the limit.

    Attributes:
        still: seconds so far. period: between two rounds.
    """

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._last: float | None = None
        self.period = min(LOOKS_APART, max(0.5, seconds / 10))
        self.still = 0.0

    def round(self, now: float, progressed: bool, stopped: bool) -> None:
        """Take a round in.

        Args:
            progressed: whether anything has gone on since the last one.
            stopped: whether a process is stopped, or a node does not answer: then the clock stands.
        """
        passed = 0.0 if self._last is None else min(now - self._last, _BETWEEN_LOOKS * self.period)
        self._last = now
        if progressed:
            self.still = 0.0
        elif not stopped:
            self.still += passed

    def begin_anew(self) -> None:
        """Something may go on by itself."""
        self.still = 0.0

    @property
    def wants_first_look(self) -> bool:
        """True shortly before the limit: two looks are compared."""
        return self.still >= max(self._limit / 2, self._limit - LOOKS_APART - self.period)

    @property
    def is_over(self) -> bool:
        """True at the limit."""
        return self.still >= self._limit


@dataclass
class JobLook:
    """All processes of a job at one moment.

    Attributes:
        time: when, in seconds. looks: of hpcray's processes; None: it did not answer. others: of other processes, by
        node, hpcray's own among them. addresses: IP addresses of the job's nodes. missing: nodes that did not answer.
        attached: programs beside the job's own. serves: names of actors that serve, and of detached ones. growing:
        whether further nodes may come.
    """

    time: float
    looks: Mapping[bytes, ProcessLook | None]
    others: Mapping[int, list[ProcessWait]]
    addresses: Collection[str] = ()
    missing: Collection[int] = ()
    attached: Collection[str] = ()
    serves: Collection[str] = ()
    growing: bool = False


def progress_between(first: JobLook, second: JobLook, still: float) -> bool:
    """Return True if something has gone on that neither CPUs nor bytes show: a call has begun or ended, a lock was
    released, a message came.

    Args:
        still: seconds for which the clock has run at the second look.
    """
    if first.looks.keys() != second.looks.keys():
        return True
    for proc, new in second.looks.items():
        old = first.looks[proc]
        if old is None or new is None:
            continue
        if old.submitted != new.submitted or {call.task for call in old.calls} != {call.task for call in new.calls}:
            return True
        if any(call.seconds < still - LOOKS_APART for call in new.calls):
            return True
        if _released(old.others, new.others):
            return True
    return False


def _released(old: list[ThreadLook], new: list[ThreadLook]) -> bool:
    """Return True if a thread waits anew for what is no time: it was woken meanwhile."""
    before = {(one.kind, one.place, one.target, one.switches) for one in old}
    return any(
        one.kind in (LOCK, READ, CHILD) and (one.kind, one.place, one.target, one.switches) not in before for one in new
    )


def why_it_may_go_on(first: JobLook, second: JobLook) -> str:
    """Return why the job may go on by itself, or from outside; "": it cannot, as far as can be seen."""
    return next(_reasons(first, second), "")


def _reasons(first: JobLook, second: JobLook) -> Iterator[str]:
    if second.growing:
        yield "further nodes may join"
    yield from (f"{title} is attached" for title in second.attached)
    yield from (f"{name} waits to be used" for name in second.serves)
    yield from (f"node {node} does not answer" for node in second.missing)
    outside = {(one.pid, target) for processes in second.others.values() for one in processes for target in one.outside}
    for proc, look in second.looks.items():
        old = first.looks.get(proc)
        if look is None:
            continue  # C code that holds the GIL: what the kernel shows of it is in `others`
        for wait in look.waits:
            if wait.timeout > _LONGEST_POLL or (wait.timeout >= 0 and not wait.repeats):
                yield f"{name_of(look)} waits at {wait.place} for at most {wait.timeout:g} s"
        for thread in look.others:
            same = old is not None and thread in old.others
            leaves = any((look.pid, target) in outside for target in thread.target.split())
            if reason := _thread_reason(look, thread, same, leaves):
                yield f"{name_of(look)}, at {thread.place}, {reason}"
        if look.others and not look.waits and look.handles_signals:
            yield f"{name_of(look)} has handlers of signals, and may wait for one"
    seen = {look.pid for look in second.looks.values() if look is not None}
    inside = {
        (other, own) for processes in second.others.values() for one in processes for own, other in one.connections
    }
    listened = {address for processes in second.others.values() for one in processes for address in one.listens}
    for node, processes in second.others.items():
        before = {
            (one.pid, place): thread for one in first.others.get(node, ()) for place, thread in enumerate(one.threads)
        }
        for one in processes:
            if one.ours:
                continue
            yield from _process_reasons(one, before, one.pid in seen)
            leads_out = [
                other
                for own, other in one.connections
                if (own, other) not in inside and not _is_ones_own(other, listened, second.addresses)
            ]
            if leads_out:
                yield f"process {one.pid} ({one.name}) has a connection to {', '.join(leads_out[:3])}"


def _is_ones_own(address: str, listened: Collection[str], hosts: Collection[str]) -> bool:
    """Return True for an address on the job's nodes at which one of its processes waits for connections."""
    host, _, port = address.rpartition(":")
    anywhere = (f"0.0.0.0:{port}", f":::{port}")
    return address in listened or (
        (host in hosts or host.startswith(_LOOPBACK)) and any(one in listened for one in anywhere)
    )


def _thread_reason(look: ProcessLook, thread: ThreadLook, same: bool, leaves: bool) -> str:
    if thread.what == DEBUGGER:
        return "is at a breakpoint"
    if thread.kind == COROUTINE:
        return "waits for what is not hpcray's" if thread.what == OUTSIDE else ""
    if thread.kind == TIMED:
        if same:
            return "sleeps, which ends by itself"
        return "" if thread.what == REPEATS else "polls for what cannot be seen"
    if leaves:
        return "waits for what is not the job's"
    if thread.what == SUBPROCESS and thread.kind in (CHILD, POLL, READ):
        return ""  # the child is looked at by itself
    if thread.kind == POLL:
        return "" if thread.what == LOOP or thread.target else "waits for events of descriptors"
    if thread.kind == READ:
        if look.driver and thread.descriptor == 0:
            return "reads its input"
        return _read_reason(thread.target)
    return "" if thread.kind in (LOCK, CHILD, MESSAGE) else f"is in a wait of kind {thread.kind}"


def _read_reason(target: str) -> str:
    if target.startswith(("pipe:", "socket:")):
        return ""  # whether the other end is in the job was looked at
    return f"reads or writes {target or 'a file'}"


def _process_reasons(one: ProcessWait, before: Mapping[tuple[int, int], KernelWait], is_ours: bool) -> Iterator[str]:
    title = f"process {one.pid} ({one.name})"
    if one.state in "Tt":
        yield f"{title} is stopped"
    if one.state == "D":
        yield f"{title} is in an uninterruptible wait"
    if one.name in _ELSEWHERE:
        yield f"{title} has another machine work for it"
    if is_ours:
        return
    if one.listens:
        yield f"{title} listens for connections"
    for place, thread in enumerate(one.threads):
        if thread.kind == TIMED:
            what = "sleeps" if before.get((one.pid, place)) == thread else "polls for what cannot be seen"
            yield f"{title} {what}"
        elif any(target in one.outside for target in thread.target.split()):
            yield f"{title} waits for what is not the job's"
        elif thread.kind == READ and (reason := _read_reason(thread.target)):
            yield f"{title} {reason}"
        elif thread.kind not in (LOCK, CHILD, READ) and not (thread.kind == POLL and thread.target):
            yield f"{title} is in a wait of kind {thread.kind}"


# ------------------------------------------------------------ hang detector
# When a job is taken for hung: the states of the watch, without a clock, a thread or a message.
#
# Certain hangs: a circle of waits that two looks have found, at least `SECOND_LOOK` seconds apart, without a change
# in between. Likely hangs: nothing in the job has gone on for `seconds`, and nothing in it may go on by itself. The
# time in which a process is stopped does not count.

SECOND_LOOK = 5.0
"""Seconds between the two looks that make a circle certain."""
SHORTEST_PERIOD = 4.0
_LONGEST_PERIOD = 60.0
_SHARE = 0.001
"""Share of a core that looks may cost."""


@dataclass(frozen=True)
class CircleLook:
    """The result of one look for certain hangs.

    Attributes:
        circle: None: there is none. stamps: of the processes of the circle, what changes when they do anything.
        doubt: why it may end all the same; "": it cannot.
    """

    circle: Circle | None
    stamps: tuple[tuple[bytes, int], ...] = ()
    doubt: str = ""


class CircleDetector:
    """Decides when a circle is certain."""

    def __init__(self) -> None:
        self._first: CircleLook | None = None
        self._since = 0.0

    def looked(self, now: float, look: CircleLook) -> Circle | None:
        """Take a look in. Returns the circle that is to be ended, if it is certain now."""
        if look.circle is None or look.doubt:
            self._first = None
            return None
        first = self._first
        known = first is not None and first.circle is not None and look.circle.same_as(first.circle)
        if first is None or not known or look.stamps != first.stamps:
            self._first, self._since = look, now
            return None
        if now - self._since < SECOND_LOOK:
            return None
        self._first = None
        return look.circle

    def period(self, cost: float) -> float:
        """Return after how many seconds to look again. cost: CPU seconds of the last look."""
        if self._first is not None:
            return SECOND_LOOK
        return min(_LONGEST_PERIOD, max(SHORTEST_PERIOD, cost / _SHARE))
