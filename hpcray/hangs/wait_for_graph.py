"""Waits that can never end, found in a graph of who waits for what. Pure: facts in, circles out.

A *node* of the graph is a thing that may end: a wait of a thread, an object, a task or call that runs. It ends when
`needs` of the nodes in `of` have ended: a `get` needs all of its objects, `wait(num_returns=1)` one of them, a call in
the queue of an actor one of the calls that occupy the actor. A node that needs nothing may end by itself: whatever is
not known, a process that computes, a wait with a timeout. A node is *stuck* if it cannot end even if everything that
may end does. So one wrong guess that a thing may end leaves a hang alone, and never ends a job that would have gone on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcray.common.ids import owner_of, show_proc
from hpcray.hangs.messages import QUEUE, CallLook, ProcessLook, WaitLook

Key = tuple[str, bytes, int]
"""Kind of a node, and which: the id of an object, a task or a process, and there the number of a thread."""
WAIT, OBJECT, CALL, SLEEP = "wait", "object", "call", "sleep"
_SLEEP: Key = (SLEEP, b"", 0)
"""The sleep of a whole job: it would end if any process did anything."""
_FOREVER = float("inf")
_QUEUED = "queued"


@dataclass
class GraphNode:
    """One thing that may end.

    Attributes:
        needs: how many of `of` have to end first; 0: it may end by itself.
        of: what it depends on, each once.
        text: who or what it is, for people.
        since: seconds for which it has gone on: the youngest wait has closed its circle.
        queued: of an object, whether the call that makes it waits in the queue of its actor.
    """

    needs: int = 0
    of: tuple[Key, ...] = ()
    text: str = ""
    since: float = _FOREVER
    queued: bool = False

    def __post_init__(self) -> None:
        self.of = tuple(dict.fromkeys(self.of))
        self.needs = min(self.needs, len(self.of))


Graph = Mapping[Key, GraphNode]


@dataclass(frozen=True)
class Circle:
    """A circle of waits.

    Attributes:
        chain: a line for each wait, from the one that has closed the circle on.
        object: what that wait is for: its error ends the circle.
        keys: the nodes, in the order of the circle.
        queued: whether the call that is to make the object has not begun: it must never run.
    """

    chain: tuple[str, ...]
    object: bytes
    keys: tuple[Key, ...]
    queued: bool

    def same_as(self, other: Circle) -> bool:
        """Return True if the circle goes through the same waits, objects and calls."""
        return set(self.keys) == set(other.keys)


def stuck_nodes(graph: Graph) -> set[Key]:
    """Return the nodes that cannot end. What is not in the graph may end."""
    dependents: dict[Key, list[Key]] = {}
    left: dict[Key, int] = {}
    for key, node in graph.items():
        known = [other for other in node.of if other in graph]
        for other in known:
            dependents.setdefault(other, []).append(key)
        left[key] = node.needs - (len(node.of) - len(known))
    todo = [key for key, missing in left.items() if missing <= 0]
    free = set(todo)
    while todo:
        for key in dependents.get(todo.pop(), ()):
            left[key] -= 1
            if left[key] <= 0 and key not in free:
                free.add(key)
                todo.append(key)
    return set(graph) - free


def find_circle(graph: Graph, stuck: Collection[Key]) -> Circle | None:
    """Return a circle among stuck nodes; None if there is none.

    Each stuck node depends on a stuck one, so a path that follows them comes back to itself.
    """
    for path in _circles(graph, stuck):
        waits = [place for place, key in enumerate(path) if key[0] == WAIT]
        if waits:
            first = min(waits, key=lambda place: graph[path[place]].since)
            keys = path[first:] + path[:first]
            wanted = keys[1 % len(keys)]
            return Circle(tuple(_chain(graph, keys)), wanted[1], tuple(keys), graph[wanted].queued)
    return None


def find_dead_end(graph: Graph, stuck: Collection[Key], start: Key) -> Circle | None:
    """Return the waits that lead from one to the other side of a queue, where nothing comes any more."""
    path: list[Key] = []
    key: Key | None = start
    while key is not None and key not in path and key != _SLEEP:
        path.append(key)
        key = next((other for other in graph[key].of if other in stuck), None)
    waits = [place for place, one in enumerate(path) if one[0] == WAIT]
    if key != _SLEEP or not waits or waits[-1] + 1 >= len(path):
        return None
    last = waits[-1]
    chain = (*_chain(graph, path[last:]), *_chain(graph, path[:last]))
    return Circle((f"{chain[0]}, where it waits for the other side, and no process does anything", *chain[1:]),
                  path[last + 1][1], tuple(path), False)  # fmt: skip


def _chain(graph: Graph, keys: list[Key]) -> Iterator[str]:
    line = ""
    for key in keys:
        text = graph[key].text
        if key[0] == WAIT:
            if line:
                yield line
            line = text
        elif text:
            line = f"{line} for {text}" if " for " not in line else f"{line}, which waits for {text}"
    if line:
        yield line


def _circles(graph: Graph, stuck: Collection[Key]) -> Iterator[list[Key]]:
    seen: set[Key] = set()
    for start in sorted(stuck):
        path: list[Key] = []
        at: dict[Key, int] = {}
        key: Key | None = start
        while key is not None and key not in seen:
            seen.add(key)
            at[key] = len(path)
            path.append(key)
            following = next((other for other in graph[key].of if other in stuck), None)
            if following is not None and following in at:
                yield path[at[following] :]
            key = following


def waiting_for(graph: Graph, keys: Iterable[Key]) -> set[Key]:
    """Return these nodes and all that they depend on, over any number of steps."""
    found: set[Key] = set()
    todo = [key for key in keys if key in graph]
    while todo:
        key = todo.pop()
        if key not in found:
            found.add(key)
            todo += [other for other in graph[key].of if other in graph]
    return found


@dataclass
class ResourceHolders:
    """Resources of one node, in the units of users.

    Attributes:
        leases: (worker, what it holds) of each lease. A CPU that a waiting worker has lent is among those available.
    """

    total: Mapping[str, float]
    available: Mapping[str, float]
    leases: Sequence[tuple[bytes, Mapping[str, float]]]


class WaitFacts:
    """The waits of a job as far as they are known at one moment, and the graph that follows from it.

    Attributes:
        looks: by process. statuses: of objects, as their owners know them (`ObjectStatus` as a dict); None: the owner
            does not know the object, or does not answer. nodes: what each node has of resources, None before it was
            looked at. sleeps: whether all processes of the job were looked at, and none does anything but wait.
    """

    def __init__(self) -> None:
        self.looks: dict[bytes, ProcessLook | None] = {}
        self.statuses: dict[bytes, dict[str, Any] | None] = {}
        self.nodes: list[ResourceHolders] | None = None
        self.sleeps = False

    def unknown_objects(self) -> dict[bytes, list[bytes]]:
        """Return the objects that are waited for and whose state is not known yet, by owner."""
        found: dict[bytes, list[bytes]] = {}
        for oid in dict.fromkeys(self._objects()):
            if oid not in self.statuses:
                found.setdefault(owner_of(oid), []).append(oid)
        return found

    def unknown_processes(self) -> list[bytes]:
        """Return the processes that run what is waited for, and that were not looked at yet."""
        workers = [known["worker"] for known in self.statuses.values() if known is not None and known["worker"]]
        for known in self.statuses.values():
            if known is not None and known["state"] == _QUEUED:
                workers += self._holders(known["resources"])
        return [proc for proc in dict.fromkeys(workers) if proc not in self.looks]

    def wants_nodes(self) -> bool:
        """Return True if a task waits for resources, and those of the nodes are not known yet."""
        return self.nodes is None and any(
            known is not None and known["state"] == _QUEUED for known in self.statuses.values()
        )

    def _holders(self, wanted: dict[str, float]) -> list[bytes]:
        """Return the workers that hold what a task waits for, on nodes that could serve it; [] if it may be served, or
        never can be."""
        found: list[bytes] = []
        for node in self.nodes or ():
            if any(node.total.get(name, 0.0) < amount for name, amount in wanted.items()):
                continue
            lacking = {name for name, amount in wanted.items() if node.available.get(name, 0.0) < amount}
            if not lacking:
                return []
            found += [worker for worker, held in node.leases if lacking & held.keys()]
        return found

    def _objects(self) -> Iterator[bytes]:
        for look in self.looks.values():
            for wait in look.waits if look is not None else ():
                yield from wait.objects
        for known in self.statuses.values():
            if known is not None:
                yield from known["open"]

    def graph(self) -> dict[Key, GraphNode]:
        """Return the graph of what is known."""
        found: dict[Key, GraphNode] = {}
        for look in self.looks.values():
            if look is not None:
                calls = {call.task: call for call in look.calls}
                for wait in look.waits:
                    found[WAIT, look.proc, wait.thread] = _wait_node(look, wait, calls.get(wait.call))
                for call in look.calls:
                    of = self._needed_by(look, call)
                    found[CALL, call.task, 0] = GraphNode(len(of), of)
        for oid, known in self.statuses.items():
            if known is not None:
                found[OBJECT, oid, 0] = self._object_node(known)
        if self.sleeps:
            found[_SLEEP] = GraphNode(1, (_SLEEP,))
        return found

    def _needed_by(self, look: ProcessLook, call: CallLook) -> tuple[Key, ...]:
        if any(thread.what != QUEUE for thread in look.others):
            return ()
        if call.thread:
            return ((WAIT, look.proc, call.thread),)
        return (_SLEEP,) if any(thread.place == call.place for thread in look.others) else ()

    def waits_for_a_queue(self) -> bool:
        """Return True if a call that is waited for waits for the other side of a queue of hpcray's."""
        return any(thread.what == QUEUE for look in self.looks.values() if look is not None for thread in look.others)

    def nobody_acts(self) -> bool:
        """Return True if all processes that were looked at are idle, or in waits without timeouts."""
        return all(
            look is not None
            and not look.handles_signals
            and all(thread.what == QUEUE for thread in look.others)
            and all(wait.timeout < 0 for wait in look.waits)
            for look in self.looks.values()
        )

    def _object_node(self, known: dict[str, Any]) -> GraphNode:
        if known["open"]:
            of = tuple((OBJECT, oid, 0) for oid in known["open"])
            return GraphNode(len(of), of, f"{known['what']}, whose arguments are not ready")
        if known["state"] == _QUEUED:
            return self._queued_node(known)
        look = self.looks.get(known["worker"]) if known["worker"] else None
        if look is None or known["state"] != "sent":
            return GraphNode(text=known["what"])
        own = next((call for call in look.calls if call.task == known["task"]), None)
        if own is not None:
            return GraphNode(1, ((CALL, own.task, 0),), f"{known['what']}, which runs in {name_of(look)}")
        if not look.slots or len(look.calls) < look.slots:
            return GraphNode(text=known["what"])  # it is on its way, or just begins
        behind = ", ".join(dict.fromkeys(call.name for call in look.calls[:3]))
        text = f"{known['what']}, which waits in {name_of(look)} for the end of {behind}"
        return GraphNode(1, tuple((CALL, call.task, 0) for call in look.calls), text, queued=True)

    def _queued_node(self, known: dict[str, Any]) -> GraphNode:
        """A task that waits for resources: one of the calls that hold them has to end."""
        holders = [self.looks.get(worker) for worker in self._holders(known["resources"])]
        calls: list[Key] = []
        names: list[str] = []
        for look in holders:
            if look is None or len(look.calls) != 1 or look.actor:
                return GraphNode(text=known["what"])  # it may let them go at any time, or for other reasons
            calls.append((CALL, look.calls[0].task, 0))
            names.append(f"{look.calls[0].name} in {name_of(look)}")
        wanted = ", ".join(f"{name}: {amount:g}" for name, amount in known["resources"].items())
        text = f"{known['what']}, which waits for {wanted}, held by {', '.join(names[:3])}"
        return GraphNode(min(1, len(calls)), tuple(calls), text, queued=True)

    def programs_are_stuck(self, stuck: Collection[Key]) -> bool:
        """Return True if no program of the job does anything but wait for what cannot end."""
        programs = [look for look in self.looks.values() if look is not None and look.driver]
        return bool(programs) and all(
            not look.others and look.waits and all((WAIT, look.proc, wait.thread) in stuck for wait in look.waits)
            for look in programs
        )

    def may_interfere(self, circle: Circle) -> str:
        """Return which process may end the circle from outside: it does something, and knows an actor of the circle.

        It might kill that actor. "": there is none.
        """
        around = {key[1] for key in circle.keys if key[0] == WAIT}
        actors = {look.actor for look in self.looks.values() if look is not None and look.proc in around and look.actor}
        for look in self.looks.values():
            if look is None or all(thread.what == QUEUE for thread in look.others):
                continue
            if look.driver or actors & set(look.holds):
                return name_of(look)
        return ""


def _wait_node(look: ProcessLook, wait: WaitLook, call: CallLook | None) -> GraphNode:
    who = f"{name_of(look)} waits" if call is None else f"{call.name} in {name_of(look)} waits"
    text = f"{who} at {wait.place}" if wait.place else who
    if wait.timeout >= 0 or not wait.listed:
        return GraphNode(text=text)
    of = tuple((OBJECT, oid, 0) for oid in wait.objects)
    return GraphNode(wait.wanted, of, text, call.seconds if call is not None else _FOREVER)


def name_of(look: ProcessLook) -> str:
    """Return a process by the name that people know: `actor A (process 0.3, pid 123)`."""
    what = f"actor {look.actor_class}" if look.actor_class else "the program" if look.driver else look.kind
    return f"{what} ({show_proc(look.proc)}, pid {look.pid})"
