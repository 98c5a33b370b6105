"""Notebooks: the kernel that this process is, and which of its cells has started which task.

IPython is never imported for the question whether there is a kernel.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

from hpcray.common.ids import PROC_BYTES
from hpcray.core.core_worker.output_lines import LogBatch
from hpcray.runtime.core_worker import driver_signals
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
            driver_signals.defer_sigint(process.engine)

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
