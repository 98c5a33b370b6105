"""The part of the watch for hangs in each process: it answers what the process waits for, and ends waits that cannot
end. It is imported where a process is asked for the first time."""

from __future__ import annotations

import time
from collections.abc import Iterable

from hpcray.common.exceptions import HangError
from hpcray.core.core_worker.object_table import PENDING, Waiter
from hpcray.core.core_worker.task import PendingTask
from hpcray.diagnostics.cluster_query import QUERY_TIMEOUT
from hpcray.hangs.messages import EndWait, HangMessage, Look, Looked, ProcessLook
from hpcray.hangs.process_look import look_at_process
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import serialize_error
from hpcray.runtime.core_worker.extensions import Extension, ExtensionProcess


class HangWatch(Extension):
    """Answers what this process waits for, and ends waits that can never end. In the program it asks others, too."""

    name = "hangs"
    messages = HangMessage

    def __init__(self, process: ExtensionProcess) -> None:
        super().__init__(process)
        self._number = 0
        self._open: dict[int, Waiter] = {}
        self._answers: dict[int, ProcessLook] = {}

    def on_message(self, source: bytes, message: HangMessage) -> None:
        """See `Extension.on_message`."""
        if isinstance(message, Look):
            self.send(source, Looked(message.number, look_at_process(self.process, message.kernel)))
        elif isinstance(message, Looked):
            waiter = self._open.pop(message.number, None)
            if waiter is not None:
                self._answers[message.number] = message.look
                waiter.count = 0
                self.process.engine.notify(waiter)
        else:
            self.end_wait(message)

    def look_at(
        self, procs: Iterable[bytes], patience: float = QUERY_TIMEOUT, kernel: bool = False
    ) -> dict[bytes, ProcessLook]:
        """Return what processes do, of those that answer in time (lock not held). kernel: see `Look`."""
        process = self.process
        deadline = time.monotonic() + patience
        found: dict[bytes, ProcessLook] = {}
        numbers: dict[bytes, int] = {}
        with process.engine.lock:
            process.check_alive()
            for proc in procs:
                if proc == process.me:
                    found[proc] = look_at_process(process, kernel)
                    continue
                self._number += 1
                numbers[proc] = self._number
                self._open[self._number] = Waiter()
                self.send(proc, Look(self._number, kernel))
            for number in numbers.values():
                waiter = self._open.get(number)
                if waiter is not None:
                    process.block(waiter, deadline)
            for proc, number in numbers.items():
                self._open.pop(number, None)
                if number in self._answers:
                    found[proc] = self._answers.pop(number)
        return found

    def end_wait(self, message: EndWait) -> None:
        """Give those who wait for an object of this process a `HangError` (lock held)."""
        process, oid = self.process, message.object
        entry = process.table.entries.get(oid)
        if entry is None or entry.state != PENDING:
            return
        blob = serialize_error(HangError(chain=message.chain))
        task = process.table.packed.task_of(oid)
        if not isinstance(task, PendingTask):
            process.table.set_inline(oid, blob)
        else:
            worker, submitter = task.worker, process.submitter
            if worker is None:
                (submitter.leases if task.fn is not None else submitter.actors).cancel_queued(task)
            submitter.fail(task, blob)
            if message.queued and worker is not None:
                process.engine.send(worker, m.CancelTask(task.id, False, False))
        process.engine.flush()
