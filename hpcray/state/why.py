"""Why a task does not run, or what became of an actor: found by id, by the beginning of one, or by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from hpcray.common.ids import FIRST_RETURN, OBJECT_BYTES
from hpcray.diagnostics.wait_graph import WaitGraph, WaitReason
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.aggregator import StateAggregator
from hpcray.state.schemas import ActorState, TaskState

_SHORTEST_ID = 6
"""Hex digits from which on a text may be the beginning of an id."""
_MOST_ACTORS = 5
_MOST_NAMES = 5
_CREATION = "ACTOR_CREATION_TASK"
_OVER = ("FINISHED", "FAILED")
_NO_WORKER = "PENDING_NODE_ASSIGNMENT"


class WaitSearch:
    """Explains waits on behalf of one process, for one answer.

    Args:
        process: it sends the questions.
        timeout: seconds that a process may take.
    """

    def __init__(self, process: CoreWorker, timeout: float) -> None:
        self._graph = WaitGraph(process, timeout)
        self._state = StateAggregator(process, timeout)

    def explain(self, wanted: str) -> list[WaitReason]:
        """Explain an object, a task or an actor.

        Args:
            wanted: an id in hex or its beginning, the name of a function or method, or the name or class of an actor.

        Returns:
            Nothing where there is none such.
        """
        if len(wanted) == 2 * OBJECT_BYTES and _is_hex(wanted):
            return self._graph.explain(bytes.fromhex(wanted))
        actors = [row for row in self._state.actors() if _is_meant(wanted, row.actor_id, row.name, row.class_name)]
        found: list[WaitReason] = []
        for actor in sorted(actors, key=_by_importance)[:_MOST_ACTORS]:
            found += self._graph.explain_actor(bytes.fromhex(actor.actor_id))
        if len(actors) > _MOST_ACTORS:
            found.append(WaitReason(0, f"and {len(actors) - _MOST_ACTORS} more actors; hint: hpcray list actors"))
        tasks = [row for row in self._state.tasks() if row.type != _CREATION]
        return found + self._tasks(
            row for row in tasks if _is_meant(wanted, row.task_id, row.name, row.func_or_class_name)
        )

    def explain_all(self) -> list[WaitReason]:
        """Explain what drivers wait for, and the tasks that wait for a worker; where no driver waits, all that do not
        run."""
        found = self._graph.explain_all()
        tasks = [row for row in self._state.tasks() if row.type != _CREATION and row.state not in (*_OVER, "RUNNING")]
        if self._graph.found_waits:
            told = {text for one in found for text in one.text.split()}
            tasks = [row for row in tasks if row.state == _NO_WORKER and row.name not in told]
        return found + self._tasks(tasks)

    def _tasks(self, rows: Iterable[TaskState]) -> list[WaitReason]:
        by_name: dict[str, list[TaskState]] = {}
        for row in rows:
            by_name.setdefault(row.name, []).append(row)
        found: list[WaitReason] = []
        for name, tasks in list(by_name.items())[:_MOST_NAMES]:
            counts = Counter(row.state for row in tasks)
            found.append(WaitReason(0, f"{name}: {', '.join(f'{count} {state}' for state, count in counts.items())}"))
            found += _below(self._one_of_each_state(tasks))
        if len(by_name) > _MOST_NAMES:
            found.append(WaitReason(0, f"and {len(by_name) - _MOST_NAMES} more functions; hint: hpcray list tasks"))
        return found

    def _one_of_each_state(self, tasks: list[TaskState]) -> Iterator[WaitReason]:
        for state in dict.fromkeys(row.state for row in tasks if row.state not in _OVER):
            row = next(row for row in tasks if row.state == state)
            yield WaitReason(0, f"{state}, such as task {row.task_id}:")
            yield from _below(self._graph.explain(bytes.fromhex(row.task_id) + FIRST_RETURN))
        failed = [row for row in tasks if row.state == "FAILED"]
        if failed:
            last = max(failed, key=lambda row: row.end_time_ms or 0)
            why = " ".join((last.error_message or "").split()[-40:])
            yield WaitReason(0, f"FAILED, the last: task {last.task_id}: {last.error_type or ''} {why}".rstrip())


def _below(reasons: Iterable[WaitReason]) -> Iterator[WaitReason]:
    return (WaitReason(one.depth + 1, one.text) for one in reasons)


def _by_importance(row: ActorState) -> tuple[bool, int]:
    """Those that do not live come first, the last dead one before the others."""
    return row.state == "ALIVE", -int((row.death_cause or {}).get("end_time_ms") or 0)


def _is_meant(wanted: str, ident: str, name: str | None, of: str) -> bool:
    if len(wanted) >= _SHORTEST_ID and _is_hex(wanted) and ident.startswith(wanted.lower()):
        return True
    return any(text and (text == wanted or text.rpartition(".")[2] == wanted) for text in (name, of))


def _is_hex(text: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in text)
