"""The extension of values in files.

The file of a value belongs to the owner of the value, not to the process that writes it:

- What a task returns or yields: its object has an id before it is written. The writer names the file to the owner
  (`Written`), on the channel on which the reply follows; the owner removes it when it frees the object. So the writer
  may exit.
- What `put` is given: its id is not known yet. The value holds a ref to a small object of this process, the *marker*,
  which lives as long as the value does; the file goes with it.

A process that ends, in whatever way, leaves the files of its objects behind: workers hear nothing of the end of a job,
and `before_exit` comes while others may still read. So every worker that owns a file tells its driver (`Owning`), once.
When that owner has died, the driver removes its files, and so does each process that wrote or read one. The last driver
that leaves removes those of the whole job.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Union

import msgspec

from file_transfer import value_files
from hpcray.common.exceptions import ObjectLostError
from hpcray.common.ids import owner_of
from hpcray.protocol.serialization import Serialized, deserialize, serialize
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.runtime.core_worker.extensions import Extension, ExtensionProcess
from hpcray.runtime.core_worker.threads import CallThread

_LAST_REMOVALS = 10.0
"""Seconds that a process which leaves the job waits for a file system that hangs."""


class Written(msgspec.Struct, tag=0):
    """To the owner of an object: its value is in this file."""

    id: bytes
    path: str


class Owning(msgspec.Struct, tag=1):
    """To the driver: the sender owns files."""


class FileTransfer(Extension):
    """Files of the values that this process owns, and the owners of others of which it knows."""

    name = "file"
    messages = Union[Written, Owning]

    def __init__(self, process: ExtensionProcess) -> None:
        super().__init__(process)
        self._files: dict[bytes, list[str]] = {}
        """By id of the object; several where its task has run again."""
        self._owners: set[bytes] = set()
        self._has_announced = False
        self._removals = CallThread("file-transfer")  # a file system may be slow: the lock must not wait for it
        self._removals.start()
        if self.process.place.kind != "worker":
            self._removals.put(lambda: value_files.enter(self._job, self.process.me))

    def outgoing_value(self, value: Any, transport: str, object_id: bytes) -> Any:
        """Write the value; what is pickled in its place is the name of the file, and the refs in the value."""
        process = self.process
        blob, refs = serialize(value)
        content = blob.join() if isinstance(blob, Serialized) else blob
        owner = owner_of(object_id) if object_id else process.me
        path = value_files.write(self._job, owner, content)
        if object_id:
            with process.engine.lock:
                if owner == process.me:
                    self._keep(object_id, path)
                else:
                    self._owners.add(owner)
                    self.send(owner, Written(object_id, path))
            return InFile(path, object_id, refs)
        try:
            marker = process.put(None)
        except BaseException:
            value_files.remove([path])
            raise
        with process.engine.lock:
            self._keep(marker.binary(), path)
        return InFile(path, marker.binary(), [*refs, marker])

    def on_message(self, source: bytes, message: Written | Owning) -> None:
        """The value of an object of this process is in a file; or the sender owns some."""
        if isinstance(message, Written):
            self._keep(message.id, message.path)
        else:
            self._owners.add(source)  # and this driver is there, so that it will be the last one, perhaps

    def process_died(self, proc: bytes) -> None:
        """Nothing that it owned can be had any more."""
        if proc in self._owners:
            self._owners.discard(proc)
            self._removals.put(partial(value_files.remove_all_of, self._job, proc))

    def close(self) -> None:
        """What this process owns ends with it (workers are not called)."""
        done = threading.Event()
        self._removals.put(partial(value_files.leave, self._job, self.process.me))
        self._removals.put(done.set)
        done.wait(_LAST_REMOVALS)
        self._removals.close()

    def note_owner(self, owner: bytes) -> None:
        """This process reads a file of a value of another one."""
        if owner != self.process.me:
            self._owners.add(owner)

    def _keep(self, object_id: bytes, path: str) -> None:
        """Remove a file when an object of this process is freed (lock held)."""
        table = self.process.table
        if object_id not in table.entries:
            self._removals.put(partial(value_files.remove, [path]))  # nobody waits for it any more
        elif object_id in self._files:
            self._files[object_id].append(path)
        else:
            self._files[object_id] = [path]
            self.when_gone(object_id, partial(self._gone, object_id))
            self._announce()

    @property
    def _job(self) -> str:
        job_id: str = self.process.place.job.job_id
        return job_id

    def _announce(self) -> None:
        place = self.process.place
        if place.kind == "worker" and not self._has_announced and place.job and place.job.driver:
            self._has_announced = True
            self.send(place.job.driver, Owning())
            self.process.engine.flush()

    def _gone(self, object_id: bytes) -> None:
        self._removals.put(partial(value_files.remove, self._files.pop(object_id, [])))


class InFile:
    """Stands for a value that has been written; what is unpickled is the value.

    Args:
        ident: id of the object that keeps the file: the value's, or the marker's.
        refs: those in the value, whose owners have to know that it holds them; and the marker.
    """

    def __init__(self, path: str, ident: bytes, refs: Sequence[Any]) -> None:
        self._content = path, ident, list(refs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, self._content


def _load(path: str, ident: bytes, refs: Sequence[Any]) -> Any:
    """Return the value of a file, in any process; `refs` keep what is in it until its own are counted."""
    FileTransfer.of(need_process()).note_owner(owner_of(ident))
    try:
        return deserialize(value_files.read(path))
    except value_files.FileGoneError as error:
        raise ObjectLostError(ident.hex(), details=str(error)) from error
