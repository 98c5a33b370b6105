"""The running job in a notebook: what `hpcray.init()` shows where it is the last line of a cell."""

from __future__ import annotations

import html
import importlib
import importlib.util
import threading
import time
from typing import Any, Protocol

from hpcray.core.object_store.allocator import format_size
from hpcray.notebooks import notebook_shell, table
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.state.overview import JobOverview, JobUse
from hpcray.state.reports import format_duration

_PERIOD = 2.0  # seconds
_MOST_ROWS = 20
_SCRIPT = """
export default {
  render({ model, el }) {
    const show = () => { el.innerHTML = model.get("shown"); };
    model.on("change:shown", show);
    show();
  },
};
"""


class SessionContext(Protocol):
    """The result of `hpcray.init()`, as far as a notebook shows it."""

    @property
    def python_version(self) -> str:
        """Version of the interpreter."""

    @property
    def ray_version(self) -> str:
        """Version of Ray whose interface this is."""

    @property
    def dashboard_url(self) -> str:
        """Where the job's dashboard is; "" where there is none."""


def context_bundle(context: SessionContext) -> Any:
    """The representations of the result of `init`: text, a table, and in a notebook with anywidget the live job."""
    bundle = {"text/plain": repr(context), "text/html": context_html(context)}
    process = current.process
    live = notebook_shell() is not None and importlib.util.find_spec("anywidget") is not None
    if process is None or process.dead is not None or not live:
        return bundle
    shown = _live_job(process, bundle["text/html"])._repr_mimebundle_()
    data, more = shown if isinstance(shown, tuple) else (shown or {}, {})
    return {**bundle, **data}, more


def context_html(context: SessionContext) -> str:
    """The session as a table; no other process is asked for it."""
    process = current.process
    rows: dict[str, object] = {"Python": context.python_version, "Ray": context.ray_version}
    if process is not None and not current.postponed:
        rows["nodes"] = process.place.cluster_size
        rows["job"] = process.place.job_id
        rows["namespace"] = process.place.namespace
        rows["session"] = process.place.session_dir
        rows["dashboard"] = context.dashboard_url
    return table("hpcray", rows)


def job_html(use: JobUse) -> str:
    """A sample of the job: its nodes, and its functions, those that took most time first."""
    left = f", {format_duration(use.left)} left" if use.left is not None else ""
    head = f"<b>hpcray</b> {html.escape(use.job_id)}, {time.strftime('%H:%M:%S', time.localtime(use.time))}{left}"
    nodes = []
    for one in use.nodes[:_MOST_ROWS]:
        if one.problem:
            nodes.append([one.index, one.host, one.problem, "", "", ""])
            continue
        used, total = one.resources.get("CPU", (0, 0))
        store = f"{format_size(one.store['used'])} of {format_size(one.store['capacity'])}"
        memory = f"{format_size(one.memory[0])} of {format_size(one.memory[1])}"
        nodes.append([one.index, one.host, f"{used:g} of {total:g}", f"{one.cpu:.0%}", memory, store])
    functions = [
        [one.name, one.running, one.queued, one.ended - one.failed, one.failed, format_duration(one.total)]
        for one in use.functions[:_MOST_ROWS]
    ]
    parts = [head, _table(["node", "host", "CPUs in use", "CPU", "memory", "object store"], nodes)]
    parts += [_rest(len(use.nodes), "nodes")]
    parts += [_table(["function", "running", "queued", "done", "failed", "time"], functions)] if functions else []
    parts += [_rest(len(use.functions), "functions")]
    return f"<div>{''.join(parts)}</div>"


def _rest(count: int, what: str) -> str:
    return f"<div>and {count - _MOST_ROWS} more {what}; hpcray top shows all</div>" if count > _MOST_ROWS else ""


def _table(names: list[str], rows: list[list[Any]]) -> str:
    lines = ["".join(f"<th>{html.escape(name)}</th>" for name in names)]
    lines += ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _live_job(process: CoreWorker, first: str) -> Any:
    """A widget that shows the job until that ends, or the widget is closed."""
    anywidget, traitlets = map(importlib.import_module, ("anywidget", "traitlets"))

    class LiveJobWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        _esm = _SCRIPT
        shown = traitlets.Unicode(first).tag(sync=True)

    widget = LiveJobWidget()
    threading.Thread(target=_follow, args=(widget, process), name="hpcray-widget", daemon=True).start()
    return widget


def _follow(widget: Any, process: CoreWorker) -> None:
    overview = JobOverview(process)
    while process.dead is None and current.process is process and widget.comm is not None:
        try:
            widget.shown = job_html(overview.sample())
        except Exception:  # the session ends in the middle of a question
            if current.process is process and process.dead is None:
                time.sleep(_PERIOD)
                continue
            break
        time.sleep(_PERIOD)
    if widget.comm is not None:
        widget.shown = f"{widget.shown}<div>the session has ended</div>"
