"""Notebooks: the kernel that this process is, and which of its cells has started which task.

IPython is never imported for the question whether there is a kernel.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hpcray.common.ids import PROC_BYTES
from hpcray.core.core_worker.object_entry import INLINE, PENDING, STORED
from hpcray.core.core_worker.output_lines import LogBatch
from hpcray.core.object_store.allocator import format_size
from hpcray.protocol.messages.objects import is_error
from hpcray.runtime.core_worker import interruptions
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.worker_output import print_to_stdstream, print_worker_logs

_EVENT = "pre_run_cell"


def notebook_shell() -> Any:
    """Return IPython's shell where this process is a notebook's kernel; else None."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = find() if find is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def show_in_cells(process: CoreWorker) -> Callable[[LogBatch], None] | None:
    """Return what prints output of workers in the cells that have started their tasks; None outside of a notebook."""
    shell = notebook_shell()
    return NotebookCells(process, shell).show if shell is not None else None


class NotebookCells:
    """The cells that have run since this process has joined its job.

    Args:
        process: this process.
        shell: IPython's.
    """

    def __init__(self, process: CoreWorker, shell: Any) -> None:
        self._process, self._shell = process, shell
        self._first_tasks: list[int] = []
        self._headers: list[Any] = []
        self._begin(None)
        shell.events.register(_EVENT, self._begin)

    def _begin(self, info: object) -> None:
        """A cell begins to run. The kernel has reset the handler of Ctrl-C, and a thread's idea of the cell is old."""
        process = self._process
        if process.engine.closed:
            self._shell.events.unregister(_EVENT, self._begin)
            return
        self._first_tasks.append(process.task_counter + 1)
        self._headers.append(_header(self._shell.kernel))
        if current.process is process:
            interruptions.defer_sigint(process.engine)

    def show(self, batch: LogBatch) -> None:
        """Print lines of a worker. A task of another task is the last cell's."""
        name = "stderr" if batch["is_err"] else "stdout"
        if not type(getattr(sys, name)).__module__.startswith("ipykernel"):
            print_to_stdstream(batch)  # the program has put something of its own in its place
            return
        text = io.StringIO()
        print_worker_logs(batch, text, colored=True)
        if text.getvalue():
            kernel = self._shell.kernel
            kernel.session.send(
                kernel.iopub_socket,
                "stream",
                {"name": name, "text": text.getvalue()},
                parent=self._cell_of(batch.get("task_id", "")),
                ident=f"stream.{name}".encode(),
            )

    def _cell_of(self, task: str) -> Any:
        """The header of the message that has run the cell."""
        ident = b""
        with contextlib.suppress(ValueError):
            ident = bytes.fromhex(task)
        if not ident.startswith(self._process.me):
            return self._headers[-1]
        number = int.from_bytes(ident[PROC_BYTES:], "big")
        return self._headers[max(0, bisect.bisect_right(self._first_tasks, number) - 1)]


def _header(kernel: Any) -> Any:
    """The message that runs the present cell."""
    find = getattr(kernel, "get_parent", None)
    return find("shell") if find is not None else kernel._parent_header


# ------------------------------------------------------------ notebook reprs
# HTML for notebooks: what this process knows of a ref, an actor or a function. Nothing is fetched, and no other process
# is asked.


_LONGEST_DOC = 500  # characters


def table(title: str, rows: Mapping[str, object]) -> str:
    """A table of two columns, without the rows that say nothing."""
    import html  # every driver imports this module, and few are notebooks

    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
        if value not in ("", None)
    )
    return f"<div><b>{html.escape(title)}</b><table>{cells}</table></div>"


def ref_html(ref: Any) -> str:
    """An ObjectRef: whether its object is ready, where it is and what makes it."""
    process = current.process
    entry = process.table.entries.get(ref._id) if process is not None else None
    rows: dict[str, object] = {"id": ref.hex()}
    if entry is None:
        rows["state"] = "not of this session"
        return table("ObjectRef", rows)
    task, nodes = entry.task, entry.nodes
    rows["made by"] = getattr(task, "name", "")
    if entry.state == PENDING:
        rows["state"] = "not ready"
    elif entry.state == INLINE:
        rows["state"] = "an error; get() raises it" if is_error(entry.value) else "ready"
        rows["size"] = format_size(len(entry.value))
    elif entry.state == STORED:
        rows["state"] = "ready"
        rows["size"] = format_size(entry.size) if entry.size else ""
        rows["on"] = ", ".join(f"node {node}" for node in nodes or ())
    else:
        rows["state"] = "freed"
    return table("ObjectRef", rows)


def actor_html(handle: Any) -> str:
    """An actor's handle: its state as this process has last heard, and its methods."""
    process: Any = current.process
    client = process.submitter.actors._clients.get(handle._actor) if process is not None else None
    rows: dict[str, object] = {"id": handle._actor.hex()}
    if client is not None:
        rows["state"] = client.state
        rows["reason"] = client.reason
        rows["calls under way"] = len(client.inflight) + len(client.queue) + len(client.late)
    rows["methods"] = ", ".join(name for name in handle._methods if not name.startswith("__"))
    return table(f"Actor {handle._class_name}", rows)


def remote_html(kind: str, wrapped: Any, options: Mapping[str, Any]) -> str:
    """A remote function or an actor class: its signature, options and docstring."""
    try:
        signature = str(inspect.signature(wrapped))
    except (TypeError, ValueError):
        signature = ""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    doc = (inspect.getdoc(wrapped) or "")[:_LONGEST_DOC]
    name = getattr(wrapped, "__qualname__", type(wrapped).__name__)
    return table(f"{kind} {name}{signature}", {"options": given, "about": doc})
