"""The tasks of workers over time, as far as they have been asked, and views of them that fit a screen."""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcray.history.job_history import JobHistory

_MOST_SPANS, _MOST_IN_ALL, _FEWEST_SPANS = 20_000, 1_000_000, 500
"""Ended tasks that are kept: of a worker, of all together, and of a worker however many there are."""
_MOST_WORKERS = 1024
"""Beyond so many workers those that have ended are forgotten."""
_ALIKE = 0.4
"""Pieces next to each other are shown as one where their shares of busy time differ by no more than this."""


@dataclass
class WorkerSpans:
    """The tasks of one worker. Times are Unix times in seconds.

    Attributes:
        seen: when the last task ended that is known, by the worker's own clock. ended: (start, end, name, failed) by
            their ends. running: what runs now. forgotten: tasks have ended that are not known.
    """

    node: int
    pid: int
    title: str = ""
    seen: float = 0.0
    ended: list[tuple[float, float, str, bool]] = field(default_factory=list)
    running: list[tuple[float, float, str, bool]] = field(default_factory=list)
    forgotten: bool = False


@dataclass
class _Piece:
    """A stretch of a row of the screen: one task, or many that are too short to be seen alone."""

    start: float
    end: float
    count: int
    busy: float
    failed: int
    names: dict[str, float]

    @property
    def name(self) -> str:
        return max(self.names, key=lambda name: self.names[name])


class TaskTimeline:
    """Keeps what workers have said, and cuts views out of it."""

    def __init__(self) -> None:
        self._workers: dict[bytes, WorkerSpans] = {}

    def seen(self, proc: bytes) -> float:
        """The time from which on a worker is to be asked, by its own clock; 0.0: all that it remembers."""
        known = self._workers.get(proc)
        return known.seen if known is not None else 0.0

    def add(self, proc: bytes, node: int, title: str, answer: Mapping[str, Any]) -> None:
        """Take in an answer to "events" since `seen`."""
        known = self._workers.setdefault(proc, WorkerSpans(node, answer["pid"]))
        known.title = title
        offset, rows = answer["offset"], answer["ended"]
        known.forgotten = known.forgotten or (not known.seen and answer["full"])
        for _, name, end, us, failed in rows:
            known.ended.append((end + offset - us / 1e6, end + offset, sys.intern(name), bool(failed)))
            known.seen = max(known.seen, end)
        most = min(_MOST_SPANS, max(_FEWEST_SPANS, _MOST_IN_ALL // len(self._workers)))
        if len(known.ended) > most:
            del known.ended[: len(known.ended) - most]
            known.forgotten = True
        now = answer["now"] + offset
        known.running = [(now - call["seconds"], now, call["name"], False) for call in answer["running"]]

    def retain(self, node: int, living: Collection[bytes]) -> None:
        """Forget what the workers of a node run that are not among these."""
        for proc, known in list(self._workers.items()):
            if known.node == node and proc not in living:
                known.running = []
                if len(self._workers) > _MOST_WORKERS:
                    del self._workers[proc]

    def view(
        self, nodes: Sequence[int], start: float, end: float, width: int, offset: int, rows: int
    ) -> dict[str, Any]:
        """The tasks between two times, in pieces of at least a pixel.

        Args:
            nodes: whose workers.
            start, end: Unix times in seconds; both 0: all that is known.
            width: pixels.
            offset, rows: which workers, in the order of nodes and pids.

        Returns:
            "start", "end", "total" of workers, "names" of functions, and "workers": of each "node", "pid", "title",
            "forgotten" and "lanes". A lane has the tasks that did not run at once, each a list of start and end in
            seconds after "start", number of the name, tasks, share of the time that they took, and how many failed.
        """
        wanted = set(nodes)
        chosen = sorted(
            (one for one in self._workers.values() if one.node in wanted), key=lambda one: (one.node, one.pid)
        )
        if not end:
            start, end = _extent(chosen)
        names: dict[str, int] = {}
        pixel = (end - start) / width
        shown = [
            {
                "node": one.node,
                "pid": one.pid,
                "title": one.title,
                "forgotten": one.forgotten,
                "lanes": [
                    [_packed(piece, start, names) for piece in lane]
                    for lane in _lanes(_between(one, start, end), pixel, start)
                ],
            }
            for one in chosen[offset : offset + rows]
        ]
        return {"start": start, "end": end, "total": len(chosen), "names": list(names), "workers": shown}


def timeline_of(history: JobHistory, most: int) -> tuple[TaskTimeline, int]:
    """The timeline of a job that has ended, of so many of its processes, the first by node and pid; and how many of
    them have tasks that were noted."""
    titles = {row.get("pid"): row.get("class_name", "") for row in history.actors.values()}
    ended: dict[tuple[int, int], list[Any]] = {}
    for row in history.tasks:
        ended.setdefault((row.node, row.pid), []).append(
            (row.id, row.name, row.end, round(1e6 * (row.end - row.start)), row.failed)
        )
    running: dict[tuple[int, int], list[Any]] = {}
    for process, _, name, since in history.running():
        call = {"name": name, "seconds": max(0.0, history.last - since)}
        running.setdefault((process.node, process.pid), []).append(call)
    known, kept = sorted({*ended, *running}), TaskTimeline()
    for node, pid in known[:most]:
        answer = {
            "pid": pid, "offset": 0.0, "now": history.last, "full": False, "ended": ended.get((node, pid), ()),
            "running": running.get((node, pid), ()),
        }  # fmt: skip
        kept.add(b"%d %d" % (node, pid), node, titles.get(pid, ""), answer)
    return kept, len(known)


def _extent(workers: Sequence[WorkerSpans]) -> tuple[float, float]:
    """The time from the first start to the last end."""
    now = time.time()
    first = min((span[0] for one in workers for span in (*one.ended[:1], *one.running)), default=now - 1)
    last = max((span[1] for one in workers for span in (*one.ended[-1:], *one.running)), default=now)
    return first, max(last, first + 1e-3)


def _between(one: WorkerSpans, start: float, end: float) -> list[tuple[float, float, str, bool]]:
    """The tasks that run between two times, by their starts."""
    place = bisect_left(one.ended, start, key=lambda span: span[1])
    found = [span for span in one.ended[place:] if span[0] < end]
    found += [span for span in one.running if span[0] < end and span[1] > start]
    found.sort()
    return found


def _lanes(spans: Sequence[tuple[float, float, str, bool]], pixel: float, origin: float) -> list[list[_Piece]]:
    lanes: list[list[tuple[float, float, str, bool]]] = []
    for span in spans:
        lane = next((lane for lane in lanes if lane[-1][1] <= span[0] + 1e-6), None)
        if lane is None:
            lane = []
            lanes.append(lane)
        lane.append(span)
    return [list(_merged(_pieces(lane, pixel, origin), pixel)) for lane in lanes]


def _pieces(spans: Sequence[tuple[float, float, str, bool]], pixel: float, origin: float) -> Iterator[_Piece]:
    """The tasks of a lane: long ones alone, short ones by the pixel in which they begin, alike pixels as one."""
    last: _Piece | None = None
    for start, end, name, failed in spans:
        if end - start >= pixel:
            piece = _Piece(start, end, 1, end - start, int(failed), {name: end - start})
        else:
            edge = origin + int((start - origin) / pixel) * pixel
            if last is not None and (last.start, last.end) == (edge, edge + pixel):
                last.count += 1
                last.busy += end - start
                last.failed += failed
                last.names[name] = last.names.get(name, 0.0) + end - start
                continue
            piece = _Piece(edge, edge + pixel, 1, end - start, int(failed), {name: end - start})
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _merged(pieces: Iterator[_Piece], pixel: float) -> Iterator[_Piece]:
    """The pieces of a lane, with those of many short tasks that follow each other and look alike as one."""
    last: _Piece | None = None
    for piece in pieces:
        if last is not None and _alike(last, piece, pixel):
            last.end = piece.end
            last.count += piece.count
            last.busy += piece.busy
            for name, seconds in piece.names.items():
                last.names[name] = last.names.get(name, 0.0) + seconds
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _alike(one: _Piece, other: _Piece, pixel: float) -> bool:
    if one.failed or other.failed or other.start - one.end > pixel / 2 or other.busy > pixel:
        return False
    if one.count == 1 and one.busy >= pixel:
        return False
    share, following = one.busy / (one.end - one.start), other.busy / (other.end - other.start)
    return one.name == other.name and abs(share - following) <= _ALIKE


def _packed(piece: _Piece, origin: float, names: dict[str, int]) -> list[Any]:
    number = names.setdefault(piece.name, len(names))
    share = min(1.0, piece.busy / max(piece.end - piece.start, 1e-9))
    return [
        round(piece.start - origin, 6),
        round(piece.end - origin, 6),
        number,
        piece.count,
        round(share, 3),
        piece.failed,
    ]
