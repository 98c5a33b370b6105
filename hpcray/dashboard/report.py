"""The report on a job: one HTML page that needs nothing outside of itself, made from its history.

It looks like the dashboard, whose style sheet it has, and needs no script: colours follow the reader's system, and it
prints. Everything that comes from a job is escaped. It has no values of arguments or variables, as the history has
none, and of the program's command line only the name of the script.
"""

from __future__ import annotations

import getpass
import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from msgspec.structs import astuple

from hpcray.common.figures import FunctionRow
from hpcray.core.object_store.allocator import format_size
from hpcray.dashboard.task_timeline import timeline_of
from hpcray.diagnostics.figures_gathering import quantile
from hpcray.history.job_history import JobHistory, NodePart, clock, program_name
from hpcray.history.outcome import COMPLETED, RUNNING, Outcome, explain
from hpcray.state.reports import format_duration

_MOST_FUNCTIONS, _MOST_NODES, _MOST_ACTORS, _MOST_ERRORS, _MOST_LINES, _MOST_WORKERS = 200, 200, 100, 50, 200, 64
_MOST_PIECES = 12_000
"""Rectangles of the timeline: with them the page stays below 5 MB."""
_WIDTH, _GUTTER, _ROW, _POINTS = 1000, 150, 14, 160
_ERROR_TEXT = 4000
_COLOURS = (
    "#4c8bd6",
    "#e08a3c",
    "#4fae7a",
    "#b06fc9",
    "#c9a227",
    "#d65f76",
    "#3fa7b5",
    "#8a8f98",
    "#7c9a3d",
    "#a6694a",
)
_PATH = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+[\w.+@-]*")
_STYLE = """
body { max-width: 1200px; margin: 0 auto; padding: 18px; }
h1 { font-size: 22px; } h2 { margin-top: 22px; }
.badge { display: inline-block; padding: 1px 9px; border-radius: 10px; color: #fff; background: var(--bad); }
.badge { font-size: 14px; vertical-align: 3px; }
.badge.good { background: var(--good); color: #fff; } .badge.warn { background: var(--warn); color: #fff; }
.cause { font-size: 16px; margin: 6px 0 12px; overflow-wrap: anywhere; }
.why { margin: 0; padding-left: 0; list-style: none; overflow-wrap: anywhere; }
.why li { margin: 2px 0; white-space: pre-wrap; }
.advice li { margin: 4px 0; } .cards { margin-top: 12px; }
.cards { grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); }
svg { display: block; width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
td { white-space: normal; overflow-wrap: anywhere; } td.right, th.right { white-space: nowrap; }
details > summary { cursor: pointer; color: var(--accent); }
footer { margin-top: 28px; color: var(--dim); font-size: 12px; }
@media print {
  :root, :root:not([data-theme="light"]) {
    color-scheme: light; --back: #fff; --card: #fff; --text: #000; --dim: #444; --line: #bbb; --bar: #7db3ee;
    --accent: #0b63c5; --good: #1a7f4b; --warn: #9a5b00; --bad: #c02636;
  }
  body { padding: 0; max-width: none; } .card, .table, pre { break-inside: avoid; } pre { max-height: none; }
}
"""


def report_page(history: JobHistory, result: Outcome, against: JobHistory | None = None, redact: bool = False) -> str:
    """The page.

    Args:
        history: of the job.
        result: how it ended.
        against: another run to compare with, by function.
        redact: whether names of users, hosts and paths are replaced.
    """
    return _Report(history, result, against, _redactor(history) if redact else lambda text: text).page()


def _redactor(history: JobHistory) -> Callable[[str], str]:
    """A function that replaces in a text the names of the user, of hosts and of paths."""
    hosts = {node.began.host for node in history.nodes.values() if node.began}
    hosts |= {row["host"] for row in history.known_nodes if row.get("host")}
    names = {host: f"host-{number}" for number, host in enumerate(sorted(hosts, key=len, reverse=True))}
    names |= {host.partition(".")[0]: name for host, name in names.items()}
    try:
        names[getpass.getuser()] = "user"
    except (KeyError, OSError):
        pass
    names.pop("", None)
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names) or r"(?!)")
    address = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")

    def redacted(text: str) -> str:
        text = _PATH.sub(lambda found: f"/…/{os.path.basename(found[0].rstrip('/'))}", text)
        return address.sub("0.0.0.0", pattern.sub(lambda found: names[found[0]], text))

    return redacted


@dataclass(frozen=True)
class _Use:
    """Totals of a job. core_seconds: of CPU time, of its processes; wall × cores is `offered`."""

    cores: float
    wall: float
    core_seconds: float
    memory: list[tuple[float, float, int]]
    store: float
    spilled: float

    @property
    def offered(self) -> float:
        return self.cores * self.wall


class _Report:
    def __init__(
        self, history: JobHistory, result: Outcome, against: JobHistory | None, text: Callable[[str], str]
    ) -> None:
        self._history, self._result, self._against, self._text = history, result, against, text
        self._functions = sorted(history.functions().items(), key=lambda item: -item[1][2])
        self._colours = {name: _COLOURS[place % len(_COLOURS)] for place, (name, _) in enumerate(self._functions)}
        self._use = _use(history)

    def _e(self, value: object) -> str:
        return escape(self._text(str(value)))

    def page(self) -> str:
        """All of it."""
        style = (files("hpcray.dashboard") / "static" / "style.css").read_text(encoding="utf-8") + _STYLE
        job = self._history.run.job
        parts = [
            self._head(), self._why(), self._cards(), self._advice(), self._next_time(), self._core_time(),
            self._timeline(), self._use_over_time(), self._function_table(), self._latency_table(), self._comparison(),
            self._errors(), self._nodes(), self._actors(), self._events(), self._missing(),
        ]  # fmt: skip
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<title>Job {self._e(job)}: {self._e(self._result.state)}</title><style>{style}</style></head>\n<body>"
            + "\n".join(filter(None, parts))
            + f"<footer>hpcray report, written {time.strftime('%Y-%m-%d %H:%M:%S')}. Times are of this reader's time "
            "zone, by the clocks of the nodes.</footer></body></html>\n"
        )

    # ------------------------------------------------------------ what happened

    def _head(self) -> str:
        history, result = self._history, self._result
        program = program_name(history.program)
        kind = {COMPLETED: "good", RUNNING: "good", "LAST_SEEN": "warn"}.get(result.state, "bad")
        facts = [
            f"job {history.run.job}" + (f", run {history.run.name}" if history.run.job != history.run.name else ""),
            time.strftime("started %Y-%m-%d %H:%M:%S", time.localtime(history.started)),
            f"ran for {format_duration(self._use.wall)}",
            f"{history.node_count} node{'s' * (history.node_count != 1)}, {self._use.cores:g} cores",
        ]
        return (
            f'<header style="background:none;padding:0"><h1>{self._e(program or "hpcray job")} '
            f'<span class="badge {kind}">{self._e(result.state)}</span></h1></header>'
            f'<p class="note">{self._e(" · ".join(facts))}</p><p class="cause">{self._e(result.cause)}</p>'
        )

    def _why(self) -> str:
        lines = explain(self._history, self._result)[1:]
        if not lines:
            return ""
        rows = "".join(f'<li style="padding-left:{1.4 * depth}em">{self._e(text)}</li>' for depth, text in lines)
        return f'<h2>Why it ended</h2><div class="card"><ul class="why">{rows}</ul></div>'

    def _cards(self) -> str:
        use, functions = self._use, self._functions
        ended, failed = sum(row[0] for _, row in functions), sum(row[1] for _, row in functions)
        peak = max(use.memory, default=(0.0, 0.0, 0))
        running = sum(1 for _ in self._history.running())
        cards = [
            (
                "Tasks and calls",
                f"{ended:,}",
                f"{failed:,} failed" + (f", {running} ran at the end" if running else ""),
            ),
            ("CPU time", _duration(use.core_seconds), _share(use.core_seconds, use.offered) + " of cores × time"),
            ("Most memory of a node", format_size(int(peak[0])), f"of {format_size(int(peak[1]))}, node {peak[2]}"),
            ("Object stores", format_size(int(use.store)), f"{format_size(int(use.spilled))} on disk, at most"),
        ]
        return (
            '<div class="cards">'
            + "".join(
                f'<div class="card"><h2>{self._e(title)}</h2><div class="value">{self._e(value)}</div>'
                f'<div class="small">{self._e(small)}</div></div>'
                for title, value, small in cards
            )
            + "</div>"
        )

    def _advice(self) -> str:
        texts = advice(self._history, self._use.core_seconds, self._use.offered)
        if not texts:
            return ""
        return (
            '<h2>What stands out</h2><div class="card"><ul class="advice">'
            + "".join(f"<li>{self._e(text)}</li>" for text in texts)
            + "</ul></div>"
        )

    def _next_time(self) -> str:
        use = self._use
        rows: list[Sequence[object]] = []
        if use.offered:
            share = use.core_seconds / use.offered
            rows.append(("cores", f"{use.cores:g}", f"{use.cores * share:.2g} on average", f"{100 * share:.0f} %"))
        if use.memory:
            used, limit, _ = max(use.memory)
            rows.append(("memory of a node", format_size(int(limit)), format_size(int(used)), _share(used, limit)))
        end = next((node.began.end for node in self._history.nodes.values() if node.began and node.began.end), 0.0)
        if end:
            limit = end - self._history.started
            rows.append(("time", _duration(limit), _duration(use.wall), _share(use.wall, limit)))
        gpus = sum(node.began.total.get("GPU", 0.0) for node in self._history.nodes.values() if node.began)
        if gpus:
            rows.append(("GPUs", f"{gpus:g}", f"{_gpus_used(self._history):.2g} at most reserved", ""))
        return self._section("Requested and used", ("", "had", "used", "share"), rows, right=3)

    def _core_time(self) -> str:
        total, beside = self._history.core_time()
        whole = sum(total.values())
        if not whole:
            return ""
        rows = [(name, _duration(seconds), _share(seconds, whole)) for name, seconds in total.items() if seconds > 0]
        bars, at = [], 0.0
        for place, (name, seconds) in enumerate(total.items()):
            width = _WIDTH * seconds / whole
            bars.append(
                f'<rect x="{at:.1f}" y="0" width="{width:.1f}" height="22" fill="{_COLOURS[place % len(_COLOURS)]}">'
                f"<title>{self._e(name)}: {_share(seconds, whole)}</title></rect>"
            )
            at += width
        drawn = f'<svg viewBox="0 0 {_WIDTH} 22" role="img" aria-label="core time">{"".join(bars)}</svg>'
        bar = f'<div class="card">{drawn}</div>'
        more = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in beside.items() if seconds >= 0.01)
        if more:
            more = f"CPU time beside it, which is in none of these rows: {more}."
        columns = ("cores were", "core time", "share")
        names = ("function", "on a CPU", "off the CPU", "for objects", "blocked", "CPU time beside it")
        functions = [(name, *map(_duration, astuple(one))) for name, one in self._history.function_times().items()][
            :_MOST_FUNCTIONS
        ]
        table = self._section("Core time by function", names, functions, 5)
        return bar.join(self._section("Where the core time went", columns, rows, 2, more).split("\n", 1)) + table

    # ------------------------------------------------------------ over time

    def _timeline(self) -> str:
        history = self._history
        kept, processes = timeline_of(history, _MOST_WORKERS)
        count = min(processes, _MOST_WORKERS)
        if not count:
            return ""
        width = max(100, min(_WIDTH - _GUTTER, _MOST_PIECES // count))
        view = kept.view(
            [*history.nodes], history.started, max(history.last, history.started + 0.01), width, 0, _MOST_WORKERS
        )
        note = f"{processes} processes, the first {count} are shown. " if processes > count else ""
        if history.seen > len(history.tasks):
            note += (
                f"{len(history.tasks):,} of {history.seen:,} tasks are shown: gaps may be tasks that were not noted. "
            )
        return (
            f'<h2>Tasks over time</h2><div class="card">{self._lanes(view)}{self._legend(view["names"])}'
            f'<p class="note">{self._e(note)}A red edge: failures.</p></div>'
        )

    def _lanes(self, view: dict[str, Any]) -> str:
        span = view["end"] - view["start"]
        scale = (_WIDTH - _GUTTER) / span
        out, y = [], 4
        for worker in view["workers"]:
            title = f"node {worker['node']}, {worker['title'].rpartition('.')[2] or 'pid ' + str(worker['pid'])}"
            out.append(f'<text x="0" y="{y + 10}">{self._e(title[:26])}</text>')
            for lane in worker["lanes"][:4] or [[]]:
                out += [self._piece(piece, view["names"], scale, y) for piece in lane]
                y += _ROW
        axis = [
            f'<text x="{_GUTTER + share * (_WIDTH - _GUTTER):.0f}" y="{y + 14}" text-anchor="{anchor}">'
            f"{self._e(clock(view['start'] + share * span, view['start']))}</text>"
            for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
        ]
        return (
            f'<svg viewBox="0 0 {_WIDTH} {y + 20}" role="img" aria-label="tasks of each process over time">'
            f"{''.join(out)}{''.join(axis)}</svg>"
        )

    def _piece(self, piece: Sequence[Any], names: Sequence[str], scale: float, y: int) -> str:
        start, end, number, count, share, failed = piece
        name = names[number]
        edge = ' stroke="#d22" stroke-width="1.5"' if failed else ""
        what = f"{name}: {end - start:.3g} s" if count == 1 else f"{count} tasks, most time: {name}"
        return (
            f'<rect x="{_GUTTER + start * scale:.1f}" y="{y}" width="{max(0.7, (end - start) * scale):.1f}" '
            f'height="{_ROW - 3}" fill="{self._colours.get(name, _COLOURS[0])}" fill-opacity="{max(0.25, share):.2f}"'
            f"{edge}><title>{self._e(what)}{f', {failed} failed' if failed else ''}</title></rect>"
        )

    def _legend(self, names: Sequence[str]) -> str:
        shown = [name for name, _ in self._functions if name in set(names)][: len(_COLOURS)]
        return (
            '<div class="legend">'
            + "".join(
                f'<span><svg style="display:inline;width:10px" viewBox="0 0 10 10"><rect width="10" height="10" '
                f'fill="{self._colours[name]}"/></svg>{self._e(name)}</span>'
                for name in shown
            )
            + "</div>"
        )

    def _use_over_time(self) -> str:
        history = self._history
        start, end = history.started, max(history.last, history.started + 1e-3)
        nodes = [node for node in history.nodes.values() if len(node.figures) > 1]
        if not nodes:
            return ""
        grid = [start + (end - start) * place / (_POINTS - 1) for place in range(_POINTS)]
        cores = _summed(grid, [_rates(node) for node in nodes])
        memory = _summed(grid, [[(at, row["memory"]["used"]) for at, row in node.figures] for node in nodes])
        store = _summed(grid, [[(at, row["store"]["used"]) for at, row in node.figures] for node in nodes])
        disk = _summed(grid, [[(at, row["store"]["on_disk"]) for at, row in node.figures] for node in nodes])
        plots = [
            ("Cores busy with this job", cores, self._use.cores, lambda value: f"{value:.3g}"),
            ("Memory, all nodes", memory, 0.0, lambda value: format_size(int(value))),
            ("Object stores", store, 0.0, lambda value: format_size(int(value))),
            ("Spilled to disk", disk, 0.0, lambda value: format_size(int(value))),
        ]
        shown = [self._plot(title, values, most, show) for title, values, most, show in plots if any(values)]
        return f'<h2>Use over time</h2><div class="cards">{"".join(shown)}</div>' if shown else ""

    def _plot(self, title: str, values: Sequence[float], most: float, show: Callable[[float], str]) -> str:
        top = max(max(values), most) or 1.0
        points = " ".join(f"{400 * i / (len(values) - 1):.1f},{90 - 84 * v / top:.1f}" for i, v in enumerate(values))
        y = f"{90 - 84 * most / top:.1f}"
        line = f'<line x1="0" x2="400" y1="{y}" y2="{y}" stroke="var(--dim)" stroke-dasharray="4 3"/>'
        return (
            f'<div class="card"><h2>{self._e(title)}</h2><svg viewBox="0 0 400 92" role="img" '
            f'aria-label="{self._e(title)} over time">{line if most else ""}<polyline points="0,90 {points} 400,90" '
            f'fill="var(--bar)" fill-opacity="0.35" stroke="var(--accent)" stroke-width="1.4"/></svg>'
            f'<div class="small">at most {self._e(show(max(values)))}'
            + (f", there were {self._e(show(most))}" if most else "")
            + "</div></div>"
        )

    # ------------------------------------------------------------ tables

    def _section(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: int = 0, more: str = ""
    ) -> str:
        """A table below a heading, "" without rows. right: columns at the end that hold numbers."""
        rows = list(rows)
        if not rows:
            return ""
        first = len(columns) - right

        def cells(kind: str, row: Sequence[object]) -> str:
            return "".join(
                f"<{kind}{' class=right' if place >= first else ''}>{self._e('' if value is None else value)}</{kind}>"
                for place, value in enumerate(row)
            )

        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
        note = f'<p class="note">{self._e(more)}</p>' if more else ""
        head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
        table = f'<div class="table"><table>{head}<tbody>{body}</tbody></table></div>'
        return f"<h2>{self._e(title)}</h2>\n{table}{note}"

    def _function_table(self) -> str:
        whole = sum(row[2] for _, row in self._functions) or 1
        rows = [
            (
                name, f"{row[0]:,}", f"{row[1]:,}" if row[1] else "", _duration(row[2] / 1e6),
                f"{100 * row[2] / whole:.0f} %",
                *_times(row),
            )
            for name, row in self._functions[:_MOST_FUNCTIONS]
        ]  # fmt: skip
        known = {name for name, _ in self._functions}
        only = {name for _, _, name, _ in self._history.running()} - known
        rows += [(name, "0", "", "ran at the end", "", "", "", "") for name in sorted(only)[:_MOST_FUNCTIONS]]
        columns = ("function", "ended", "failed", "time in all", "share", "mean", "median", "99 %")
        return self._section("Functions", columns, rows, 7, "Medians are right to about a tenth.")

    def _latency_table(self) -> str:
        found = sorted(self._history.latency().items(), key=lambda item: -sum(item[1][:3]))
        rows = [(name, *(_duration(seconds) if seconds >= 5e-4 else "" for seconds in (one.whole, *one)))
                for name, one in found[:_MOST_FUNCTIONS] if sum(one[:3]) >= 5e-4]  # fmt: skip
        columns = ("function", "in all", "for arguments", "queued", "sent", "running")
        more = ("Means of a function's tasks, from submission to value: until the arguments were there, until it was "
                "sent to a worker, on the way and in the worker's queue, running. Told by how many were seen in each "
                "state, once a second.")  # fmt: skip
        return self._section("How long tasks took, and where they waited", columns, rows, 5, more if rows else "")

    def _comparison(self) -> str:
        if self._against is None:
            return ""
        before, now = self._against.functions(), dict(self._functions)
        rows = []
        for name in sorted({*before, *now}, key=lambda one: -max(before.get(one, _NONE)[2], now.get(one, _NONE)[2])):
            old, new = before.get(name, _NONE), now.get(name, _NONE)
            change = f"{100 * (new[2] / old[2] - 1):+.0f} %" if old[2] and new[2] else "new" if new[0] else "gone"
            rows.append((name, f"{old[0]:,}", f"{new[0]:,}", _duration(old[2] / 1e6), _duration(new[2] / 1e6), change,
                         _duration(quantile(old, 0.5)), _duration(quantile(new, 0.5))))  # fmt: skip
        title = f"Against job {self._against.run.job}"
        columns = ("function", "ended then", "now", "time then", "now", "change", "median then", "now")
        return self._section(title, columns, rows[:_MOST_FUNCTIONS], 7)

    def _errors(self) -> str:
        found = self._history.errors_by_text()
        if not found:
            return ""
        cards = [
            f'<div class="card"><b>{self._e(kind)}</b>: {self._e(text)}<div class="small">{count} noted, first at '
            f"{self._e(clock(first.at))} on node {first.node}, pid {first.pid}</div><details><summary>the first one"
            f"</summary><pre>{self._e(first.text[:_ERROR_TEXT])}</pre></details></div>"
            for kind, text, count, first in found[:_MOST_ERRORS]
        ]
        more = f'<p class="note">{len(found) - _MOST_ERRORS} more kinds</p>' if len(found) > _MOST_ERRORS else ""
        return f"<h2>Errors of tasks</h2>{''.join(cards)}{more}"

    def _nodes(self) -> str:
        rows = []
        for number, node in sorted(self._history.nodes.items())[:_MOST_NODES]:
            memory = max(((row["memory"]["used"], row["memory"]["limit"]) for _, row in node.figures), default=(0, 0))
            store = max((row["store"]["used"] for _, row in node.figures), default=0)
            disk = max((row["store"]["on_disk"] for _, row in node.figures), default=0)
            sent = node.figures[-1][1]["wire"]["sent"][1] if node.figures else 0
            state = f"dead: {node.lost}" if node.lost else "ended" if node.ended else "no word about an end"
            cores = node.began.total.get("CPU", 0.0) if node.began else 0.0
            rows.append((
                number, node.began.host if node.began else "", f"{cores:g}", _duration(_cpu_seconds(node)),
                f"{format_size(int(memory[0]))} of {format_size(int(memory[1]))}", format_size(int(store)),
                format_size(int(disk)), format_size(int(sent)), clock(node.last) if node.last else "", state,
            ))  # fmt: skip
        count = len(self._history.nodes)
        more = f"{count - _MOST_NODES} more nodes" if count > _MOST_NODES else ""
        columns = ("node", "host", "cores", "CPU time", "most memory", "store", "on disk", "sent", "last seen", "end")
        return self._section("Nodes", columns, rows, 0, more)

    def _actors(self) -> str:
        rows = [
            (row.get("class_name", ""), row.get("name", ""), row.get("state", ""), row.get("node", ""),
             row.get("pid", "") or "", row.get("restarts", "") or "", (row.get("reason") or "")[:500])
            for row in self._history.actors.values()
        ]  # fmt: skip
        rows.sort(key=lambda row: (row[2] != "DEAD" or not row[6], row[0]))
        more = f"{len(rows) - _MOST_ACTORS} more actors" if len(rows) > _MOST_ACTORS else ""
        columns = ("class", "name", "state", "node", "pid", "restarts", "died of")
        return self._section("Actors", columns, rows[:_MOST_ACTORS], 0, more)

    def _events(self) -> str:
        rows = [
            (clock(line.at), number, line.severity, line.text[:1000])
            for number, line in self._history.lines[-_MOST_LINES:]
        ]
        return self._section("What the nodes have said", ("time", "node", "", "line"), rows)

    def _missing(self) -> str:
        texts = self._history.complaints()
        return (
            "<h2>What is missing</h2>" + "".join(f'<p class="note warn">{self._e(t)}</p>' for t in texts)
            if texts
            else ""
        )


_NONE: FunctionRow = [0, 0, 0, {}]


def _cpu_seconds(node: NodePart) -> float:
    """CPU time of a node's processes, those that ended before included as far as it was seen."""
    total, before = 0.0, 0.0
    for _, row in node.figures:
        used = row["cpu"]["job"]
        total += used - before if used >= before else 0.0  # less: a process has ended
        before = used
    return total


def _rates(node: NodePart) -> list[tuple[float, float]]:
    found = []
    for (earlier, one), (at, other) in zip(node.figures, node.figures[1:], strict=False):
        found.append((at, max(0.0, other["cpu"]["job"] - one["cpu"]["job"]) / max(1e-3, at - earlier)))
    return found


def _summed(grid: Sequence[float], series: Iterable[Sequence[tuple[float, float]]]) -> list[float]:
    """The sum of step functions at the points of a grid; before its first point one counts as 0."""
    total = [0.0] * len(grid)
    for points in series:
        times = [at for at, _ in points]
        for place, at in enumerate(grid):
            known = bisect_right(times, at)
            total[place] += points[known - 1][1] if known else 0.0
    return total


def _use(history: JobHistory) -> _Use:
    nodes = list(history.nodes.values())
    memory = [
        max((row["memory"]["used"], row["memory"]["limit"], node.number) for _, row in node.figures)
        for node in nodes
        if node.figures
    ]
    return _Use(
        sum(node.began.total.get("CPU", 0.0) for node in nodes if node.began),
        max(0.0, history.last - history.started),
        sum(map(_cpu_seconds, nodes)),
        memory,
        sum(max((row["store"]["used"] for _, row in node.figures), default=0) for node in nodes),
        sum(max((row["store"]["on_disk"] for _, row in node.figures), default=0) for node in nodes),
    )


def _gpus_used(history: JobHistory) -> float:
    return sum(
        max((row["resources"].get("GPU", [0.0])[0] for _, row in node.figures), default=0.0)
        for node in history.nodes.values()
    )


def advice(history: JobHistory, used: float, offered: float) -> list[str]:
    """Remarks on the figures of a job, as sentences; each says the figure that it rests on."""
    found = []
    functions = history.functions()
    ended, failed = sum(row[0] for row in functions.values()), sum(row[1] for row in functions.values())
    if failed:
        name = max(functions, key=lambda one: functions[one][1])
        found.append(f"{failed:,} of {ended:,} tasks failed, most of them of {name} ({functions[name][1]:,}).")
    if offered and history.last - history.started >= 5 and used < 0.5 * offered:
        idle = f"{100 * (1 - used / offered):.0f} % of the core time was not used"
        found.append(f"{idle}: fewer cores, or more tasks at a time, would do.")
    if tail := _tail(history):
        found.append(tail)
    short = [name for name, row in functions.items() if row[0] >= 10_000 and row[2] / row[0] < 200]
    if short:
        found.append(f"Tasks of {short[0]} take less than 0.2 ms each: sending one costs as much; several at once in a "
                     "task would be faster.")  # fmt: skip
    spilled = sum(
        max((row["store"]["on_disk"] for _, row in node.figures), default=0) for node in history.nodes.values()
    )
    if spilled:
        found.append(f"{format_size(int(spilled))} of objects did not fit into the object stores and went to disk.")
    for node in history.nodes.values():
        used_memory, limit = max(
            ((row["memory"]["used"], row["memory"]["limit"]) for _, row in node.figures), default=(0, 0)
        )
        if limit and used_memory > 0.9 * limit:
            found.append(
                f"Node {node.number} used {_share(used_memory, limit)} of its memory ({format_size(int(limit))})."
            )
            break
    deaths = history.deaths()
    if deaths:
        found.append(
            f"{len(deaths)} processes died, the first: {deaths[0].reason.splitlines()[0] if deaths[0].reason else ''}"
        )
    return found


def _tail(history: JobHistory) -> str:
    """A sentence on the end of a job in which few tasks ran; "" where there is none worth saying."""
    cores = sum(node.began.total.get("CPU", 0.0) for node in history.nodes.values() if node.began)
    rows = sorted(history.tasks, key=lambda row: row.end)
    wall = history.last - history.started
    if cores < 2 or len(rows) < 2 * cores or history.seen > len(history.tasks) or wall <= 0:
        return ""
    end = rows[-1].end
    place = len(rows) - max(1, int(cores / 2))
    begins = rows[place - 1].end  # from here on less than half of the cores had a task
    last = rows[place:]
    seconds = end - begins
    if seconds < 0.1 * wall or seconds < 1:
        return ""
    names = ", ".join(sorted({row.name for row in last})[:3])
    when = f"In the last {_duration(seconds)} of its tasks ({_share(seconds, wall)} of the time)"
    few = f"no more than {len(last)} of {cores:g} cores had one ({names})"
    return f"{when} {few}: start the longest ones first, or cut them smaller."


def _duration(seconds: float) -> str:
    if seconds <= 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else format_duration(seconds)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _times(row: FunctionRow) -> tuple[str, str, str]:
    """Mean, median and 99 % of the runs that have a time: what died with its process has none."""
    runs = sum(row[3].values())
    if not runs:
        return "", "", ""
    return _duration(row[2] / 1e6 / runs), _duration(quantile(row, 0.5)), _duration(quantile(row, 0.99))
