"""The door between a core worker and features: rooms above the kernel, which the kernel does not know.

A feature is an `Extension`. It learns what happens in its process, and it has messages of its own, which travel inside
an `ExtensionMessage`. Entry points (`hpcray.processes`) stand above kernel and features; each gives its core worker one
`FeatureTable`, from the name of an extension to the function that imports it. So a process that never uses a feature
does not import it, and a process that has never used it can be sent its messages all the same.

Programs name extensions of their own with the setting `extensions` (docs/how-to/extensions.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, cast

import msgspec

from hpcray.common.figures import FunctionRow
from hpcray.core.core_worker.object_table import ObjectTable
from hpcray.platform.arena import Arena
from hpcray.protocol.messages import ExtensionMessage, ObjectGet
from hpcray.protocol.serialization import deserialize
from hpcray.runtime.core_worker.io_engine import IoEngine

E = TypeVar("E", bound="Extension")
_encode = msgspec.msgpack.Encoder().encode


class ExtensionProcess(Protocol):
    """The part of `CoreWorker` that the door itself uses; extensions are given the whole of it."""

    @property
    def engine(self) -> IoEngine:
        """Sockets of this process, and the lock that guards its tables."""

    @property
    def extensions(self) -> Extensions:
        """Features in this process."""


class Extension:
    """A feature inside one core worker. The methods are events; those that a feature does not need do nothing.

    They are called with the engine's lock held, except where they say otherwise, and must not wait then.

    Attributes:
        name: what its messages and transports are addressed to; it is the same in all processes of a job.
        messages: its messages, a tagged `msgspec.Struct` or a union of such; None: it has none.
        waits_at_exit: whether its `before_exit` does something for which an idle worker has to stay.
    """

    name: ClassVar[str]
    waits_at_exit: ClassVar[bool] = True
    messages: ClassVar[Any] = None

    def __init__(self, process: ExtensionProcess) -> None:
        """process: the `CoreWorker` that this is a part of."""
        self.process: Any = process
        self.__decode = msgspec.msgpack.Decoder(self.messages if self.messages is not None else Any).decode

    @classmethod
    def of(cls: type[E], process: ExtensionProcess) -> E:
        """Return this extension of a process; makes it at the first call. The lock need not be held."""
        return cast(E, process.extensions.get(cls.name))

    def send(self, destination: bytes, message: msgspec.Struct) -> None:
        """Queue a message for this extension in another process; the engine's next flush sends it.

        Args:
            destination: proc id of that process.
            message: one of `messages`.
        """
        self.process.engine.send(destination, ExtensionMessage(self.name, _encode(message)))

    def send_all(self, destinations: Iterable[bytes], message: msgspec.Struct) -> None:
        """Queue a message for several processes; it is encoded once. Args: as those of `send`."""
        wrapped = ExtensionMessage(self.name, _encode(message))
        for destination in destinations:
            self.process.engine.send(destination, wrapped)

    def when_gone(self, object_id: bytes, call: Callable[[], object]) -> None:
        """Make a call, once, when nothing needs the value of an object of this process any more: no ref, and no task
        that may have to run again. It is made at once where the object is gone already.

        Args:
            object_id: of an object that this process owns.
            call: made with the engine's lock held.
        """
        if object_id in self.process.table.entries:
            self.process.table.when_freed(object_id, partial(_gone_or_remembered, self.process.table, object_id, call))
        else:
            call()

    def receive(self, source: bytes, body: bytes) -> None:
        """Decode a message, and handle it.

        Args:
            source: proc id of the process that sent it. body: as `send` has encoded it.
        """
        self.on_message(source, self.__decode(body))

    def on_message(self, source: bytes, message: Any) -> None:
        """Handle one of `messages`."""

    def on_object_get(self, source: bytes, message: ObjectGet) -> bool:
        """Another process asks for the value of an object of this one.

        Returns:
            True: the answer waits for this extension, which calls `CoreWorker.answer_object_get` itself.
        """
        return False

    def outgoing_value(self, value: Any, transport: str, object_id: bytes) -> Any:
        """Return what is pickled in place of a value that is to travel by a transport of this extension (lock not
        held). What is unpickled elsewhere is the value that readers get.

        Args:
            value: what a task returns or yields, or what `put` was given.
            transport: name of the transport.
            object_id: of the object that the value becomes; b"" for `put`.

        Raises:
            Exception: any; it becomes the error of the task, or of `put`.
        """
        return value

    def targeted_value(self, target: Any, blob: bytes | memoryview) -> tuple[Any, BaseException | None]:
        """Return the value of an object whose entry has a target of this extension (`EntryExtra.target`), and the error
        that `get` raises in its place (lock not held)."""
        return deserialize(blob), None

    def movable_objects(self) -> Collection[bytes]:
        """Return ids of objects of this process that `before_exit` would bring to safety."""
        return ()

    @property
    def keeps_resources(self) -> bool:
        """True if this process still needs the resources of its lease when its last task has ended."""
        return False

    def device_totals(self) -> Mapping[str, tuple[int, int]]:
        """Return how much this process keeps outside of the object store: (objects, bytes) by device."""
        return {}

    def function_rows(self) -> Mapping[str, FunctionRow]:
        """Return what this process did in place of running tasks, by the name under which `hpcray progress` and `top`
        show it."""
        return {}

    def before_exit(self) -> None:
        """This worker is about to exit in order; it may wait here (lock not held)."""

    def arena_closed(self, arena: Arena) -> None:
        """The shared memory of a node is not read any more."""

    def process_died(self, proc: bytes) -> None:
        """Another process has died."""

    def disconnected(self) -> None:
        """Nothing can be sent or received any more: this process leaves its job, or its raylet has gone."""

    def close(self) -> None:
        """This process has left its job; the arenas are still mapped (lock not held)."""


def _gone_or_remembered(table: ObjectTable, object_id: bytes, call: Callable[[], object]) -> None:
    """An object has no refs any more; lineage may keep its value for tasks that run again."""
    if object_id in table.entries and object_id in table.lineage.remembered:
        table.when_freed(object_id, partial(_gone_or_remembered, table, object_id, call))
    else:
        call()


Loader = Callable[[], type[Extension]]
"""Imports an extension and returns its class."""


def _nothing(error: BaseException) -> None:
    """A process without a debugger does not wait for one."""


class FeatureTable(msgspec.Struct, frozen=True):
    """Features that the entry point of a process hands to its core worker, as functions that import them.

    Attributes:
        extensions: by name.
        default_transport: the extension of transports that are not named after an extension; "": there is none.
        transport_memory: called with a process and an array of bytes; a context with an array of the same bytes from
            and to which a device copies faster, or with that array itself.
        device_view: called with a process, an arena, offset and size of an object in it, and a function to be called
            when the view is gone; a view from which a device copies at full speed, None where there is none.
        device_view_size: objects smaller than this are not asked for, in bytes.
        post_mortem: called with the exception of a failed task where Ray's variable asks for it: waits for a debugger.
        record_table: makes the table of objects where the setting `record` is on, and its recorder; the arguments are
            those of `ObjectTable`.
        ref_html: called with a ref; the ref as HTML, for a notebook.
    """

    extensions: Mapping[str, Loader] = msgspec.field(default_factory=dict)
    default_transport: str = ""
    transport_memory: Callable[[Any, Any], AbstractContextManager[Any]] | None = None
    device_view: Callable[[Any, Arena, int, int, Callable[[], object]], memoryview | None] | None = None
    device_view_size: int = 1 << 20
    post_mortem: Callable[[BaseException], object] = _nothing
    record_table: Callable[..., tuple[ObjectTable, Any]] | None = None
    ref_html: Callable[[Any], str] = repr


NO_FEATURES = FeatureTable()


class Extensions:
    """The extensions of one core worker.

    Args:
        process: whose they are.
        table: of the entry point.
        named: the setting `extensions`.

    Attributes:
        features: what the entry point has given.
        loaded: those that are in use, in the order of their first use.
    """

    def __init__(self, process: ExtensionProcess, table: FeatureTable, named: str) -> None:
        self._process = process
        self.features = table
        self._loaders = {**table.extensions, **read_extensions(named)}
        self._by_name: dict[str, Extension] = {}
        self.loaded: Sequence[Extension] = ()

    def get(self, name: str) -> Extension:
        """Return an extension; the first call imports and makes it. The lock need not be held.

        Raises:
            LookupError: there is none of this name.
        """
        found = self._by_name.get(name)
        if found is not None:
            return found
        if name not in self._loaders:
            raise LookupError(
                f"no extension is named {name!r}; known are {', '.join(sorted(self._loaders)) or 'none'}. "
                f"hint: HPCRAY_EXTENSIONS={name}=module:Class on all nodes"
            )
        kind = self._loaders[name]()
        with self._process.engine.lock:
            found = self._by_name.get(name)
            if found is None:
                found = self._by_name[name] = kind(self._process)
                self.loaded = (*self.loaded, found)  # a new tuple: others may be iterating over the old one
            return found

    def find(self, name: str) -> Extension | None:
        """Return an extension if it is in use."""
        return self._by_name.get(name)

    def of_transport(self, transport: str) -> Extension:
        """Return the extension to which a transport belongs (lock not held)."""
        return self.get(transport if transport in self._loaders else self.features.default_transport)

    def on_message(self, source: bytes, message: ExtensionMessage) -> None:
        """Hand a message to its extension (lock held)."""
        self.get(message.extension).receive(source, message.body)

    def process_died(self, proc: bytes) -> None:
        """Pass on that a process has died (lock held)."""
        for extension in self.loaded:
            extension.process_died(proc)

    def disconnected(self) -> None:
        """Pass on that nothing can be sent any more (lock held)."""
        for extension in self.loaded:
            extension.disconnected()


def read_extensions(named: str) -> dict[str, Loader]:
    """Return the extensions that the setting `extensions` names.

    Args:
        named: `name=module:Class`, several separated by commas.

    Raises:
        ValueError: it is not of this form.
    """
    found: dict[str, Loader] = {}
    for text in filter(None, (part.strip() for part in named.split(","))):
        name, _, place = text.partition("=")
        module, _, kind = place.partition(":")
        if not (name.isidentifier() and module and kind.isidentifier()):
            raise ValueError(f"extensions: {text!r} is not of the form name=module:Class")
        found[name] = _loader(name, module, kind)
    return found


def _loader(name: str, module: str, kind: str) -> Loader:
    def load() -> type[Extension]:
        found = getattr(importlib.import_module(module), kind)
        if not (isinstance(found, type) and issubclass(found, Extension) and found.name == name):
            raise TypeError(f"extensions: {module}:{kind} is no Extension whose name is {name!r}")
        return found

    return load
