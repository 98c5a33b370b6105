"""What `hpcray stack` prints."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from typing import Any

from hpcray.runtime.diagnosis import show_kernel
from hpcray.runtime.stacks import TEMPLATE, is_users, part_of_hpcray

_MOST_IDS = 3


def show_stacks(rows: Iterable[dict[str, Any]], everything: bool) -> Iterator[str]:
    """The lines for people.

    Args:
        rows: as `diagnosis.stacks` gives them.
        everything: threads of hpcray's own and raylets too.
    """
    hidden = 0
    for node in rows:
        yield f"node {node['node']} ({node['host']}){': ' + node['problem'] if node['problem'] else ''}"
        for row in node["processes"]:
            yield from _process(row, everything)
            hidden += 0 if everything else sum(1 for thread in row["threads"] if not _shown(row, thread))
    if hidden:
        yield f"{hidden} threads of hpcray's own are not shown; hint: --all"


def _process(row: dict[str, Any], everything: bool) -> Iterator[str]:
    what = f"actor {row['actor']}" if row["actor"] else row["kind"]
    state = f", {row['state']}" if row["state"] else ""
    yield f"  {row['process']} ({what}, pid {row['pid']}{state})"
    if row["problem"]:
        yield f"    {row['problem']}; the kernel says: {show_kernel(row['kernel'])}"
        yield from (f"    {line}" for line in row["kernel"].get("stacks", "").splitlines())
        return
    calls = {call["thread"]: call for call in row["calls"] if call["thread"]}
    if row["waiting"]:
        more = f" and {len(row['waiting']) - _MOST_IDS} more" if len(row["waiting"]) > _MOST_IDS else ""
        yield f"    waits in get for {', '.join(row['waiting'][:_MOST_IDS])}{more}; hint: hpcray why REF"
    for thread in row["threads"]:
        if everything or _shown(row, thread):
            call = calls.get(thread["ident"])
            runs = f" runs {call['name']} for {call['seconds']:.1f} s" if call else ""
            yield f"    thread {thread['name']!r}{runs}"
            yield from _frames(thread["frames"], everything)
    running = {call["task"]: call for call in row["calls"] if not call["thread"]}
    for coroutine in row["coroutines"]:
        call = running.get(coroutine["task"])
        since = f" for {call['seconds']:.1f} s" if call else ""
        yield f"    coroutine {call['name'] if call else coroutine['name']!r}{since}"
        yield from _frames(coroutine["frames"], everything)


def _shown(row: dict[str, Any], thread: dict[str, Any]) -> bool:
    """Whether a thread is of interest: it runs a task, or has anything of the user's on its stack."""
    if row["kind"] == "raylet":
        return False
    if any(call["thread"] == thread["ident"] for call in row["calls"]):
        return True
    return not thread["name"].startswith("hpcray-") and any(map(is_users, _after_fork(thread["frames"])))


def _after_fork(frames: list[list[Any]]) -> list[list[Any]]:
    """A worker's stack begins with those of the processes that it was forked from."""
    last = max((place for place, frame in enumerate(frames) if part_of_hpcray(frame[0]) == TEMPLATE), default=-1)
    return frames[last + 1 :]


def _frames(frames: list[list[Any]], everything: bool) -> Iterator[str]:
    for file, line, function in frames if everything else _interesting(_after_fork(frames)):
        text = linecache.getline(file, line).strip()
        yield f"      {file}:{line} in {function}{': ' + text if text else ''}"


def _interesting(frames: list[list[Any]]) -> Iterator[list[Any]]:
    """From the user's first frame on; of ours only those that the user's call."""
    first = next((place for place, frame in enumerate(frames) if is_users(frame)), 0)
    before_ours = True
    for frame in frames[first:]:
        ours = bool(part_of_hpcray(frame[0]))
        if not ours or before_ours:
            yield frame
        before_ours = not ours
