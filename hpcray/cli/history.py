"""Commands about a job that has ended: `hpcray report`, `hpcray jobs rm`, and what `why`, `summary`, `list` and
`timeline` print of one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict, astuple

from hpcray.cli import json_option, print_json, print_record, write_named
from hpcray.cli.job_option import job_option, submitted_job
from hpcray.common.ids import PUT_INDEX, TASK_BYTES, owner_of
from hpcray.common.terminal_text import plain, plain_line
from hpcray.core.object_store.allocator import format_size
from hpcray.diagnostics.figures_gathering import quantile
from hpcray.history.job_history import GONE, UNSEEN, JobHistory, Sighting, TaskRow, clock
from hpcray.history.outcome import COMPLETED, RUNNING, Outcome, ask_slurm, explain, outcome
from hpcray.history.records import FunctionCoreTime
from hpcray.history.runs import JobNames, Run, find_runs, history_root, jobs_meant, program_names, runs
from hpcray.jobs.batch_queues import active_jobs
from hpcray.jobs.submitted_job import JobRecord
from hpcray.platform.session_directory import read_session
from hpcray.processes.running_jobs import running_jobs
from hpcray.ray_start.surroundings import parse_cluster_address
from hpcray.state.reports import format_duration, print_table, print_text

Row = dict[str, Any]
_OBJECT = re.compile("[0-9a-f]{32}")
_SHOWN = 50  # tasks of one function in its story


def ended_job(wanted: str) -> JobHistory | None:
    """The history of the job that `--job` names, where it does not run; None: a running job is meant.

    Prints on standard error as of when it is.
    """
    if (run := _ended_run(wanted)) is None:
        return None
    history = JobHistory(run)
    click.echo(plain_line(_heading(history)), err=True)
    return history


def _ended_run(wanted: str) -> Run | None:
    if wanted == "auto" or parse_cluster_address(wanted) is not None:
        return None
    name = wanted.removeprefix("slurm://")
    if not (found := runs_meant(name)):
        return None
    newest = found[0]
    live = {job.node.session for job in running_jobs()}
    if newest.name in live and wanted != newest.path:
        return None
    in_slurm = {job.job_id for job in active_jobs() if job.state == "RUNNING"} if newest.job.isdecimal() else set()
    if newest.job in in_slurm and wanted in (newest.job, newest.name):
        return None
    if len({run.name for run in found}) > 1:
        others = ", ".join(run.name for run in found[1:])
        what = f"job {newest.job} ran {len(found)} times" if name == newest.job else f"{name} ran {len(found)} times"
        click.echo(plain_line(f"hpcray: {what}; this is the last one, {newest.name}; earlier ones: --job {others}"),
                   err=True)  # fmt: skip
    return newest


def _runs_called(name: str) -> list[Run]:
    """The runs of the jobs that ended and that a name means which is no id: of a submitted job or a program, or the
    beginning of one; [] where a job that runs or is queued has it."""
    if os.path.isabs(name) or jobs_meant(name, running_jobs(), lambda job: job.called):
        return []
    if jobs_meant(name, active_jobs(), lambda job: JobNames((job.job_id,), (job.name,))):
        return []
    root, submitted = history_root(os.environ), submitted_job(name)
    if submitted is not None and (found := find_runs(root, submitted.job_id)):
        return found  # of Slurm: the history has its id
    known = [(run, JobHistory(run, whole=False)) for run in runs(root)]
    if submitted is not None:
        own = submitted.folder.name
        return [run for run, history in known if os.path.basename(history.submitted) == own]
    return [run for run, _ in jobs_meant(name, known, _names_of)]


def _names_of(one: tuple[Run, JobHistory]) -> JobNames:
    """The names of a run, with those of the submitted job that it is of, wherever that is kept."""
    run, history = one
    ids, names = (run.job, run.name), program_names(history.program.split())
    record = JobRecord.read(Path(history.submitted)) if history.submitted else None
    if record is not None:
        return JobNames((*ids, record.job_id, os.path.basename(history.submitted)), (record.name, *names))
    return JobNames(ids, names)


def runs_meant(name: str) -> list[Run]:
    """The runs, ended or not, that an id or a name of a job means, the newest first."""
    return find_runs(history_root(os.environ), name) or _runs_called(name)


def _heading(history: JobHistory) -> str:
    run, result = history.run, outcome(history)
    name = run.name if run.job == run.name else f"{run.job} (run {run.name})"
    if result.state == COMPLETED:
        return f"hpcray: job {name} has ended; as of {clock(history.last)}"
    before = max(0.0, history.run.changed - history.last)
    return f"hpcray: job {name}; as of {clock(history.last)}, {before:.0f} s before the last sign of life"


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(plain_line(line))


def _complain(history: JobHistory) -> None:
    for text in history.complaints():
        click.echo(plain_line(f"not complete: {text}"), err=True)


# ---------------------------------------------------------------- why, summary


def print_why(history: JobHistory, what: str | None, as_json: bool) -> None:
    """Why the job has ended; or what is known of an object, a task or an actor."""
    result = outcome(history, ask_slurm(history))
    lines = explain(history, result) if what is None else _story(history, what)
    if not lines:
        raise click.ClickException(
            f"the history has no task, actor, function or object {what!r}; "
            f"hint: hpcray list tasks --job {history.run.job}"
        )
    if as_json:
        print_json([{"depth": depth, "text": text} for depth, text in lines])
    else:
        name = f"job {history.run.job}, {_size_of(history)}, started {clock(history.started)}"
        _print_lines([name, *("  " * depth + text for depth, text in lines)])


def _size_of(history: JobHistory) -> str:
    count = history.node_count
    return f"{count} node{'s' * (count != 1)}, {format_duration(max(0.0, history.last - history.started))}"


def _story(history: JobHistory, what: str) -> list[tuple[int, str]]:
    """The known facts about the tasks, actors and functions that a word means."""
    word = what.lower()
    if _OBJECT.fullmatch(word):
        return _object_story(history, bytes.fromhex(word))
    lines: list[tuple[int, str]] = []
    for actor, row in history.actors.items():
        if actor.hex().startswith(word) or what in (row.get("class_name"), row.get("name")):
            place = f", node {row['node']}, pid {row['pid']}" if row.get("pid") else ""
            lines.append((0, f"actor {row.get('class_name', '')} {actor.hex()}: {row.get('state', '')}{place}"))
            if row.get("reason"):
                lines.append((1, f"died: {row['reason']}"))
            if row.get("restarts"):
                lines.append((1, f"restarted {row['restarts']} times"))
    errors = {error.task: error for error in history.errors}
    ended = [one for one in history.tasks if what == one.name or one.id.hex().startswith(word)]
    for one in ended[-_SHOWN:]:
        how = f"{'failed' if one.failed else 'finished'} at {clock(one.end)} after {_seconds(one.end - one.start)}"
        lines.append((0, f"{one.name} {one.id.hex()}: {how} on node {one.node}, pid {one.pid}"))
        if (waited := _waited(history, one)) is not None:
            lines.append((1, waited))
        if one.id in errors:
            lines.append((1, f"{errors[one.id].kind}: {errors[one.id].text}"))
    for process, task, name, since in history.running():
        if what == name or task.hex().startswith(word):
            where = f"on node {process.node}, pid {process.pid}"
            text = f"{name} {task.hex()}: ran since {clock(since)} {where} when it was heard of last"
            lines.append((0, f"{text} ({clock(history.last)})"))
    if len(ended) > _SHOWN:
        lines.append((0, f"the last {_SHOWN} of {len(ended)} tasks are shown"))
    return lines


def _object_story(history: JobHistory, ident: bytes) -> list[tuple[int, str]]:
    """The known facts about one object: who made it, when, and what became of its owner."""
    task, owner = ident[:TASK_BYTES], history.processes.get(owner_of(ident))
    if owner is None:
        return []
    who = f"{owner.kind or 'a process'}, pid {owner.pid} of node {owner.node}"
    between = history.submission(task)
    when = f", between {clock(between[0])} and {clock(between[1])}" if between is not None else ""
    lines: list[tuple[int, str]] = []
    if ident[TASK_BYTES:] == PUT_INDEX:
        lines.append((0, f"object {ident.hex()}: put by {who}{when}"))
    else:
        number = int.from_bytes(ident[TASK_BYTES:], "big")
        lines.append((0, f"object {ident.hex()}: value {number} of a task that was submitted by {who}{when}"))
        made = [(depth + 1, text) for depth, text in _story(history, task.hex())]
        noted = "was not noted: only some of the tasks were" if history.seen > len(history.tasks) else "was not seen"
        lines += made or [(1, f"the end of the task {noted}; it was not seen to run either")]
    if owner.gone:
        wrong = owner in history.deaths()
        how = f"died at {clock(owner.gone)}: {owner.reason}" if wrong else f"ended at {clock(owner.gone)}"
        lines.append((1, f"its owner {how}; the object went with it at the latest"))
    else:
        lines.append((1, "its owner was not seen to end"))
    return lines + [(1, text) for text in _sightings(history, ident)]


def object_events(session_dir: str, what: str) -> list[str]:
    """The looks at the stores of a running job that have shown something of an object, where its history is visible
    here; nothing of other words than the id of an object."""
    if _OBJECT.fullmatch(what.lower()):
        for run in find_runs(history_root(os.environ), read_session(session_dir).session):
            history, ident = JobHistory(run), bytes.fromhex(what)
            return [*_sightings(history, ident)] if ident in history.objects else []
    return []


_WHERE = {
    "memory": "in memory", "both": "in memory and on disk", "spilled": "on disk", "overflow": "on disk, past the store",
    "creating": "being written", "pulling": "on its way here", "restoring": "being read back from disk",
    "waiting": "waits for room", "reserving": "waits for room on disk", GONE: "not there any more",
    UNSEEN: "not among the largest objects any more: what became of it is not known",
}  # fmt: skip


def _sightings(history: JobHistory, ident: bytes) -> Iterator[str]:
    """The looks at the stores that have shown something new of an object."""
    if not (seen := sorted(history.objects.get(ident, ()))):
        yield "it was never among the largest objects of a node when its store was looked at: no copy of it is known"
        return
    last: dict[int, Sighting] = {}
    for one in seen:
        copy = ", a copy" if one.copy else ""
        size = f" ({format_size(one.size)}{copy})" if one.size and one.node not in last else ""
        yield f"{clock(one.at)} node {one.node}: {_WHERE.get(one.state, one.state)}{size}"
        last[one.node] = one
    for number, one in last.items():
        node = history.nodes[number]
        if node.lost and one.state not in (GONE, UNSEEN):
            yield f"{clock(node.lost_at)} lost with node {number}, if it was there still"
    longest = format_duration(max(one.at - one.since for one in seen))
    yield f"the stores were looked at, at most {longest} apart: what lay between is not known"


def _waited(history: JobHistory, task: TaskRow) -> str | None:
    """For how long a task was not running after its submission, where that was seen; None where it was not."""
    between, owner = history.submission(task.id), history.processes.get(owner_of(task.id))
    if between is None or owner is None:
        return None
    first, last = between
    when = f"submitted between {clock(first)} and {clock(last)} by pid {owner.pid} of node {owner.node}"
    if owner.node != task.node:  # of another clock
        return when
    return f"{when}; waited for {_seconds(max(0.0, task.start - last))} to {_seconds(max(0.0, task.start - first))}"


def print_summary(history: JobHistory, kind: str, as_json: bool) -> None:
    """Count tasks or actors by name and state."""
    if kind == "objects":
        raise click.ClickException("objects are counted while a job runs; its history has how full the stores were: "
                                   f"hpcray memory --job {history.run.job}")  # fmt: skip
    if kind == "actors":
        found: dict[str, dict[str, Any]] = {}
        for row in history.actors.values():
            name = row.get("class_name", "")
            states = found.setdefault(name, {"class_name": name, "state_counts": {}})["state_counts"]
            states[row["state"]] = states.get(row["state"], 0) + 1
        totals: Row = {"total_actors": len(history.actors), "summary_by": "class"}
    else:
        found, calls, plain_tasks = {}, 0, 0
        latency = history.latency()
        for name, states in history.task_summary().items():
            call = history.is_call(name)
            type_ = "ACTOR_TASK" if call else "NORMAL_TASK"
            found[name] = {"func_or_class_name": name, "type": type_, "state_counts": states}
            if name in latency:
                found[name]["latency"] = {**latency[name]._asdict(), "whole": latency[name].whole}
            calls, plain_tasks = calls + call * sum(states.values()), plain_tasks + (not call) * sum(states.values())
        totals = {
            "total_tasks": plain_tasks, "total_actor_tasks": calls, "total_actor_scheduled": len(history.actors),
            "summary_by": "func_name",
        }  # fmt: skip
    if as_json:
        print_json({"summary": found, **totals})
    else:
        _print_functions(history, found) if kind == "tasks" else _print_counts(found)
        print_text(", ".join(f"{name}: {value}" for name, value in totals.items()))
    _complain(history)


def _print_counts(found: dict[str, dict[str, Any]]) -> None:
    rows = [
        [name, ", ".join(f"{state}: {count}" for state, count in row["state_counts"].items())]
        for name, row in found.items()
    ]
    print_table(["name", "counts"], rows)


def _print_functions(history: JobHistory, found: dict[str, dict[str, Any]]) -> None:
    functions, latency, rows = history.functions(), history.latency(), []
    for name, row in sorted(found.items(), key=lambda item: -functions.get(item[0], [0, 0, 0, {}])[2]):
        known = functions.get(name, [0, 0, 0, {}])
        us, buckets = known[2:]
        counts = ", ".join(f"{state}: {count}" for state, count in row["state_counts"].items())
        times = [f"{us / 1e6:.3g} s", _seconds(quantile(known, 0.5)), _seconds(quantile(known, 0.99))]
        waited = sum(latency[name][:3]) if name in latency else 0.0
        before = _seconds(waited) if waited >= 5e-4 else ""
        rows.append([name, counts, *(times if buckets else ["", "", ""]), before])
    print_table(["name", "counts", "time in all", "median", "99 %", "waited, mean"], rows)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


# ---------------------------------------------------------------- list, timeline


def _rows_of(history: JobHistory, kind: str) -> list[Row]:
    if kind == "actors":
        return [
            {"actor_id": ident.hex(), **{name: _shown(value) for name, value in row.items() if name != "worker"}}
            for ident, row in history.actors.items()
        ]
    if kind == "nodes":
        return [
            {
                "node": number,
                "host": node.began.host if node.began else "",
                "state": "DEAD" if node.lost else "ENDED" if node.ended else "SILENT",
                "last_seen": clock(node.last) if node.last else "",
                "reason": node.lost,
                "CPU": node.began.total.get("CPU", 0.0) if node.began else None,
                "GPU": node.began.total.get("GPU", 0.0) if node.began else None,
            }
            for number, node in sorted(history.nodes.items())
        ]
    if kind == "placement-groups":
        return [{"placement_group_id": ident.hex(), **row} for ident, row in history.groups.items()]
    if kind == "workers":
        return [
            {
                "pid": one.pid, "node": one.node, "kind": one.kind, "worker_id": one.proc.hex(),
                "actor_id": one.actor.hex(), "exit_type": one.exit, "exit_detail": one.reason,
                "ended": clock(one.gone) if one.gone else "",
            }
            for one in history.processes.values()
        ]  # fmt: skip
    if kind == "cluster-events":
        return [
            {"time": clock(line.at), "node": number, "severity": line.severity, "message": line.text}
            for number, line in history.lines
        ]
    if kind == "tasks":
        errors = {error.task: error for error in history.errors}
        rows = [
            {
                "task_id": task.hex(), "name": name, "state": "RUNNING", "start": since, "duration": None,
                "node": process.node, "pid": process.pid, "error_type": "", "error_message": "",
            }
            for process, task, name, since in history.running()
        ]  # fmt: skip
        for row in reversed(history.tasks):
            error = errors.get(row.id) if row.failed else None
            rows.append({
                "task_id": row.id.hex(), "name": row.name, "state": "FAILED" if row.failed else "FINISHED",
                "start": row.start, "duration": row.end - row.start, "node": row.node, "pid": row.pid,
                "error_type": error.kind if error else "", "error_message": error.text if error else "",
            })  # fmt: skip
        return rows
    raise click.ClickException(f"the history of an ended job has no {kind}; hint: hpcray why --job {history.run.job}")


def _shown(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def print_list(history: JobHistory, kind: str, filters: Sequence[str], limit: int, as_json: bool) -> None:
    """List what the history has of one kind."""
    rows = _rows_of(history, kind)
    for text in filters:
        test = "!=" if "!=" in text else "="
        column, found, value = (part.strip() for part in text.partition(test))
        if not found or (rows and column not in rows[0]):
            known = ", ".join(rows[0]) if rows else "none"
            raise click.ClickException(f"{text!r} is no filter; hint: COLUMN=VALUE or COLUMN!=VALUE, of {known}")
        rows = [row for row in rows if (str(row[column]) == value) == (test == "=")]
    shown = rows[:limit]
    if as_json:
        print_json(shown)
    else:
        columns = list(shown[0]) if shown else []
        print_table(columns, [[_cell(name, row[name]) for name in columns] for row in shown])
        more = f" of {len(rows)}" if len(rows) > len(shown) else ""
        click.echo(f"{len(shown)}{more} {kind}")
        if kind == "tasks" and history.seen > len(history.tasks):
            noted = f"{len(history.tasks)} of the {history.seen} tasks that ended were noted"
            click.echo(f"{noted}: those that failed, the slowest ones, and some of the others", err=True)
    _complain(history)


def _cell(name: str, value: Any) -> Any:
    if name == "start" and value:
        return clock(value)
    if name == "duration":
        return "" if value is None else _seconds(value)
    if isinstance(value, str):
        return value.splitlines()[0] if value else ""
    return "" if value is None else value


def print_timeline(history: JobHistory, file: str | None, as_json: bool = False) -> None:
    """Write the tasks that were noted, as `write_timeline`."""
    rows = [
        {"ph": "X", "cat": "task", "name": row.name, "pid": f"node {row.node}", "tid": row.pid, "ts": row.start * 1e6,
         "dur": (row.end - row.start) * 1e6, "args": {"task_id": row.id.hex(), "failed": row.failed}}
        for row in history.tasks
    ]  # fmt: skip
    rows += [
        {"ph": "X", "cat": "task", "name": name, "pid": f"node {process.node}", "tid": process.pid, "ts": since * 1e6,
         "dur": (history.last - since) * 1e6, "args": {"task_id": task.hex(), "running": True}}
        for process, task, name, since in history.running()
    ]  # fmt: skip
    write_timeline(rows, file, as_json)
    _complain(history)


def write_timeline(events: list[Row], file: str | None, as_json: bool) -> None:
    """Write events in Chrome's trace format to a file, or to standard output, or to both."""
    if file is not None:
        write_named(file, json.dumps(events))
    if as_json:
        print_json(events)
    else:
        click.echo(f"{file}; hint: open it at https://ui.perfetto.dev or chrome://tracing")


# ---------------------------------------------------------------- status, top, memory, stack, logs


def print_status(history: JobHistory, as_json: bool) -> None:
    """How the job has ended, its nodes, and what its functions have run."""
    result = outcome(history, ask_slurm(history))
    if as_json:
        function_times = history.function_times()
        functions = {
            name: {"ended": row[0], "failed": row[1], "seconds": row[2] / 1e6, "median": quantile(row, 0.5)}
            | {"core_time": asdict(function_times.get(name, FunctionCoreTime()))}
            for name, row in history.functions().items()
        }
        known = {"job": history.run.job, "run": history.run.name, "state": result.state, "cause": result.cause}
        account, beside = history.core_time()
        times = {"started": history.started, "last": history.last, "core_time": account, "cpu_time_beside": beside}
        print_json({**known, **times, "nodes": _rows_of(history, "nodes"), "functions": functions})
        return
    print_text(f"job {history.run.job}: {result.state}: {result.cause}")
    nodes = _rows_of(history, "nodes")
    print_table(list(nodes[0]), [[_cell(name, row[name]) for name in row] for row in nodes])
    summary = {name: {"state_counts": states} for name, states in history.task_summary().items()}
    _print_functions(history, summary)
    print_core_time(*history.core_time())
    _print_function_times(history.function_times())
    _complain(history)


def print_core_time(account: Mapping[str, float], beside: Mapping[str, float]) -> None:
    """Print an account of core time, and the CPU time beside it, by what the cores did."""
    if whole := sum(account.values()):
        rows = [[f"{100 * seconds / whole:.0f} %", f"{seconds:.3g} s", name] for name, seconds in account.items()
                if seconds > 0]  # fmt: skip
        print_table(["share", "core time", "cores were"], rows)
        print_table(["CPU time beside it", "of"], [[f"{seconds:.3g} s", name] for name, seconds in beside.items()])


def _print_function_times(functions: Mapping[str, FunctionCoreTime]) -> None:
    rows = [[name, *(f"{seconds:.3g} s" for seconds in astuple(one))] for name, one in functions.items()]
    if rows:
        print_table(["core time of", "on a CPU", "off the CPU", "for objects", "blocked", "CPU time beside it"], rows)


def print_memory(history: JobHistory, as_json: bool) -> None:
    """The most memory that each node was seen to use, and how full its store was at most and in the end."""
    rows: list[Row] = []
    for number, node in sorted(history.nodes.items()):
        if not node.figures:
            continue
        most = max(node.figures, key=lambda item: item[1]["memory"]["used"])
        stores = [row["store"] for _, row in node.figures]
        rows.append({
            "node": number, "host": node.began.host if node.began else "", "most_memory": most[1]["memory"]["used"],
            "at": clock(most[0]), "limit": most[1]["memory"]["limit"], "store_most": max(s["used"] for s in stores),
            "store_last": stores[-1]["used"], "store_size": stores[-1]["capacity"],
            "on_disk_most": max(s["on_disk"] for s in stores),
        })  # fmt: skip
    if as_json:
        print_json(rows)
    else:
        sizes = ("most_memory", "limit", "store_most", "store_last", "store_size", "on_disk_most")
        cells = [[format_size(row[name]) if name in sizes else row[name] for name in row] for row in rows]
        print_table(list(rows[0]) if rows else ["node"], cells)
    _complain(history)


def print_running(history: JobHistory, as_json: bool) -> None:
    """The tasks that ran when the processes were heard of last; a history has no stacks."""
    rows = [row for row in _rows_of(history, "tasks") if row["state"] == "RUNNING"]
    if as_json:
        print_json(rows)
        return
    click.echo("a history has no stacks; when the processes were heard of last, these tasks ran:")
    names = ("task_id", "name", "start", "node", "pid")
    print_table(names, [[_cell(name, row[name]) for name in names] for row in rows])


def print_logs(history: JobHistory, pattern: str, as_json: bool = False) -> None:
    """The log files that stay, one after the other, as far as they are visible here."""
    if not (folders := history.files()):
        raise click.ClickException(
            f"job {history.run.job} kept no log files of its workers: they went with the job; hint: HPCRAY_LOG_DIR"
        )
    wanted = re.compile(pattern)
    for folder in folders:
        if not (files := sorted(Path(folder).glob("*.out")) + sorted(Path(folder).glob("*.err"))):
            click.echo(plain_line(f"{folder}: no log files are visible here"), err=True)
        for path in files:
            lines = [line for line in path.read_text(errors="replace").splitlines() if wanted.search(line)]
            if as_json:
                for line in lines:
                    print_log_record(line, path.suffix == ".err", file=str(path))
            elif lines:
                click.echo(click.style(plain_line(f"{path}:"), fg="cyan"))
                click.echo(plain("\n".join(lines), lines=True))


def print_log_record(text: str, error: bool, **fields: Any) -> None:
    """Print a line of a log as `hpcray logs --json` does: the same fields wherever it comes from."""
    row = {"text": text, "stream": "err" if error else "out", "who": None, "pid": None, "node": None, "file": None}
    print_record(**{**row, **fields})


# ---------------------------------------------------------------- commands of their own


@click.command()
@job_option
@click.option("--against", metavar="JOB", help="Compare with this job, by function.")
@click.option("--redact", is_flag=True, help="Replace the names of users, hosts and paths.")
@json_option("an object: the file, the job, its run and state")
@click.argument("file", type=click.Path(writable=True))
def report(address: str, against: str | None, redact: bool, as_json: bool, file: str) -> None:
    """Write a report on a job to FILE, one HTML page without anything outside of it: how it ended, what ran when, where
    the memory went, errors, and what to ask for next time. In a directory, FILE is named after the job.

    Of a job that has ended or still runs, as its history has it. hpcray-launch --report DIR writes it at the job's end.
    """
    from hpcray.dashboard.report import report_page

    if (run := _ended_run(address) or _live_run(address)) is None:
        raise click.ClickException(f"there is no history of a job {address!r}; hint: hpcray jobs")
    history = JobHistory(run)
    other = None
    if against is not None:
        if not (found := runs_meant(against)):
            raise click.ClickException(f"--against: there is no history of a job {against!r}; hint: hpcray jobs")
        other = JobHistory(found[0])
    result: Outcome = outcome(history, ask_slurm(history))
    path = Path(file)
    if file.endswith("/") or path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        path /= f"{run.job}-{run.name}.html" if run.job != run.name else f"{run.job}.html"
    write_named(path, report_page(history, result, other, redact))
    if as_json:
        print_json({"file": str(path), "job": run.job, "run": run.name, "state": result.state})
    else:
        click.echo(plain(f"{path}: job {run.job}, {result.state}"))
    if result.state == RUNNING:
        click.echo("the job still runs: this is its history so far", err=True)


def _live_run(wanted: str) -> Run | None:
    """The run of a job that still runs here."""
    for job in running_jobs():
        if wanted in ("auto", job.job_id, job.node.session, job.path):
            return next(iter(find_runs(history_root(os.environ), job.node.session)), None)
    found = find_runs(history_root(os.environ), wanted)
    return found[0] if found else None


@click.command(name="rm")
@json_option("a list of what was removed: job, run, path")
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
def remove_history(job_ids: tuple[str, ...], as_json: bool) -> None:
    """Remove the histories of jobs that have ended, all runs of each.

    Exit code: 1 where there is none, or the job still runs; the others are removed.
    """
    live = {job.node.session for job in running_jobs()}
    wrong = []
    removed: list[Run] = []
    for job_id in job_ids:
        found = runs_meant(job_id)
        ended = [
            run for run in found if run.name not in live and outcome(JobHistory(run, whole=False)).state != RUNNING
        ]
        for run in ended:
            run.remove()
            removed.append(run)
            if not as_json:
                click.echo(plain(f"{run.job}: removed {run.path}"))
        if not found:
            wrong.append(f"there is no history of a job {job_id!r}")
        elif len(ended) < len(found):
            wrong.append(f"job {job_id} still runs")
    if as_json:
        print_json([{"job": run.job, "run": run.name, "path": run.path} for run in removed])
    if wrong:
        raise click.ClickException("\n".join(wrong))
