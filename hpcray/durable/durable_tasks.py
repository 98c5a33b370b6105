"""Tasks whose results outlive the job: what their submitters do, and what their workers do.

The submitter makes the key of a call from the function and the arguments, before anything is sent. Where a result is
kept, a small one becomes an object at once, and a large one is read by a worker, in place of the function's call. Where
the key depends on a value that does not exist yet, such as that of a ref of an actor's call, the worker makes it, when
it has the arguments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
import os
import random
import sys
import threading
import time
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from hpcray.common.figures import FunctionRow
from hpcray.common.ids import PUT_INDEX, owner_of
from hpcray.common.terminal_text import plain_line
from hpcray.core.core_worker.object_entry import INLINE, PENDING
from hpcray.durable import DurableOptions
from hpcray.durable.canonical import (
    SCALARS,
    Canonical,
    ClassMarks,
    NoCanonicalFormError,
    NotYetError,
    buffer_digest,
    digest,
    is_plain,
    plain_form,
    scalar_form,
)
from hpcray.durable.kept_values import (
    KeptValue,
    NotKeptError,
    Token,
    UnprovedValue,
    decode_token,
    encode_token,
    is_current,
    unproved,
    values_digest,
)
from hpcray.durable.result_store import (
    ERROR,
    FUNCTION,
    IN_FILE,
    LARGE,
    REBOUND,
    STREAM_END,
    VALUE,
    Description,
    KeptRecord,
    Meta,
    RecordPlace,
    ResultIo,
    ResultStore,
    encode_description,
    encode_meta,
    make_record,
    split_values,
    state_directory,
    value_record,
)
from hpcray.protocol.messages.objects import is_error
from hpcray.protocol.serialization import deserialize, serialize_error
from hpcray.runtime.core_worker.context import require_context
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.extensions import Extension
from hpcray.runtime.core_worker.object_refs import ObjectRef, new_ref

LATE, LOAD, VERIFY, REPLAY, UNPROVED = 1, 2, 4, 8, 16
"""Flags of a token: the worker makes the key; it reads the result that was found; it computes that again, to compare;
it yields the items that were found; it has something else than the key says, so that nothing is kept."""
_INSTALLING = frozenset({"pip", "uv", "conda", "py_executable", "image_uri", "container"})
"""Fields of a runtime_env with which a worker may have other packages than its submitter."""
_SHOWN = 48
"""Bytes of an argument's canonical form that a record keeps; of a longer one its digest."""
_MOST_KEYS = 1 << 20
_MOST_SUBMITTED = 1 << 18
_JUST_WRITTEN = 0.06
"""Seconds in which the result of a task that has ended is written, unless the file system is slow."""
_RECENT = 5.0
_REFRESH_PERIOD = 1.0
"""Seconds after which a submitter looks at what other jobs have written meanwhile."""
_WORTH_WAITING = 0.01
"""Seconds of run time from which a result is with the file system before its ref is ready, if that is fast enough."""
_WRITE_WAIT = 0.05
_VERSION = b"hpcray durable 1"


class DryRunError(RuntimeError):
    """The value of a task that a dry run has left out."""


class Trouble(msgspec.Struct, tag=0):
    """A worker reports to a submitter why results are not kept, or that one differs.

    about: equal ones are printed once.
    """

    about: str
    text: str


class Submitting(Protocol):
    """A remote function that is not durable: `hpcray.api.remote_function.RemoteFunction`."""

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a task."""


class DurableTasks(Extension):
    """Durable results in one process.

    Attributes:
        found, computed: durable tasks of this process whose results were found, and the others.
        io: the directory.
    """

    name = "durable"
    messages = Trouble

    def __init__(self, process: Any) -> None:
        super().__init__(process)
        config = process.config
        node = process.place.node_id[:24]
        self.found = self.computed = 0
        self._found: dict[str, int] = {}
        self.io: ResultIo = ResultIo(
            state_directory(config.durable_dir), f"{node}-{process.node}", config.durable_timeout, self._complain
        )
        self.lock = threading.Lock()
        self._keys: dict[bytes, bytes] = {}
        self._contents: dict[bytes, bytes] = {}
        self._submitted: dict[bytes, tuple[Sequence[weakref.ref[ObjectRef[Any]]], bytes, float]] = {}
        self._current: dict[tuple[str, str], tuple[Any, bytes]] = {}
        self._told: set[str] = set()
        self._looked = time.monotonic()
        self._random = random.Random()
        self._owner = b""
        if process.place.kind == "worker":
            process.exit_listeners.insert(0, lambda code: self.io.close())

    def on_message(self, source: bytes, message: Trouble) -> None:
        self.tell(message.about, message.text)

    def tell(self, about: str, text: str) -> None:
        """Print a line about kept results, once in this process."""
        if about not in self._told:
            self._told.add(about)
            self.process.engine.call_soon(lambda: print(f"hpcray: {plain_line(text)}", file=sys.stderr, flush=True))

    def report(self, about: str, text: str) -> None:
        """Have the submitter of the task that runs here print a line (lock not held)."""
        task = self.process.local.task
        if task is None or self.process.place.kind != "worker":
            self.tell(about, text)
            return
        if about not in self._told:
            self._told.add(about)
            with self.process.engine.lock:
                self.send(owner_of(task.task), Trouble(about, text))
                self.process.engine.flush()

    def _complain(self, why: str) -> None:
        text = f"durable results are off: {why}. The job goes on without them; hint: HPCRAY_DURABLE_DIR"
        if self.process.place.kind == "worker":
            self.process.engine.call_soon(lambda: self._complain_to_owner(text))
        else:
            self.tell("off", text)

    def _complain_to_owner(self, text: str) -> None:
        owner = self._owner
        with self.process.engine.lock:
            if owner and self.process.dead is None:
                self.send(owner, Trouble("off", text))
                self.process.engine.flush()

    def function_rows(self) -> dict[str, FunctionRow]:
        return {f"{name} (found)": [count, 0, 0, {}] for name, count in self._found.items()}

    def _count_found(self, name: str) -> None:
        self.found += 1
        self._found[name] = self._found.get(name, 0) + 1

    def before_exit(self) -> None:
        self.io.close()

    def disconnected(self) -> None:
        self.io.close()

    def close(self) -> None:
        self.io.close()
        if self.process.config.durable_dry_run and self.found + self.computed:
            print(f"hpcray: durable: would skip {self.found:,} of {self.found + self.computed:,} tasks", flush=True)

    # ------------------------------------------------------------ keys of refs

    def ref_key(self, ref: ObjectRef[Any]) -> bytes:
        """Return the bytes that stand for a ref in a key.

        Raises:
            NotYetError: only its value can, which may not exist yet.
        """
        known = self._keys.get(ref._id)
        if known is not None:
            return b"K" + known
        if ref._id[-3:] == PUT_INDEX:
            return b"P" + self._content_of(ref)
        raise NotYetError

    def content_key(self, ref: ObjectRef[Any]) -> bytes:
        """The same in a worker, which may wait for the value."""
        try:
            return self.ref_key(ref)
        except NotYetError:
            return b"P" + self._content_of(ref)

    def _content_of(self, ref: ObjectRef[Any]) -> bytes:
        content = self._contents.get(ref._id)
        if content is None:
            content = Canonical(self.content_key).digest_of(self.process.reader.get([ref], None)[0])
            _bounded(self._contents)[ref._id] = content
        return content

    def remember(self, made: Any, key: bytes) -> Any:
        """Note the key of what a task returns."""
        if type(made) is ObjectRef:
            _bounded(self._keys)[made._id] = key
        elif isinstance(made, list):
            for index, ref in enumerate(made):
                _bounded(self._keys)[ref._id] = key + index.to_bytes(4, "little")
        return made

    # ------------------------------------------------------------ looking up

    def look(self, key: bytes) -> RecordPlace | None:
        """Return where the result of a key is kept."""
        io = self.io
        if io.off:
            return None
        store = io.store
        if store is None:
            io.call(lambda store: None, 50.0 if self.process.config.durable_timeout >= 1 else 0.0)
            store = io.store
            if store is None:
                return None
            self._looked = time.monotonic()
            if (limit := self.process.config.durable_size) and self.process.place.kind != "worker":
                io.post(lambda store: store.shrink(limit))
        place = store.find(key)
        if place is None:
            if key in self._submitted:
                place = self._just_written(key, store)
            elif time.monotonic() - self._looked > _REFRESH_PERIOD:
                self._looked = time.monotonic()
                io.post(lambda store: store.refresh())
        return place if place is not None and place.kind else None

    def _just_written(self, key: bytes, store: ResultStore) -> RecordPlace | None:
        """Look for the result of a call that this process has made before. If that has just ended, its worker may not
        have written the result yet."""
        _, object_id, since = self._submitted[key]
        entry = self.process.table.entries.get(object_id)
        failed = entry is not None and entry.state == INLINE and is_error(entry.value)
        pending = entry is not None and entry.state == PENDING
        until = time.monotonic() + (_JUST_WRITTEN if not failed and not pending else 0.0)
        while True:
            self.io.call(lambda store: store.refresh())
            place = store.find(key)
            if (place is not None and place.kind) or time.monotonic() >= min(until, since + _RECENT) or self.io.off:
                return place
            time.sleep(0.002)

    def read(self, key: bytes, place: RecordPlace) -> KeptRecord | None:
        """Return a record, if it is whole and what it needs is as it was."""
        record = self.io.call(lambda store: store.read(key, place), place.size / 1e7)
        return self.judged(key, record)

    def judged(self, key: bytes, record: KeptRecord | None) -> KeptRecord | None:
        """The same for a record that was read."""
        store = self.io.store
        if store is not None and store.problems:
            for problem in store.problems:
                self.report(f"broken {problem}", f"a kept result is not used and is computed again: {problem}")
            store.problems.clear()
        if record is None or is_current(record.meta, self._current):
            return record
        self.io.post(lambda store: store.forget(key))
        return None

    def values(self, record: KeptRecord) -> list[memoryview] | None:
        """The blobs of a record."""
        try:
            return split_values(record.data)
        except ValueError:
            return None

    # ------------------------------------------------------------ submitting

    def submit(self, plan: DurableFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Submit a durable task: look for its result, or have it made.

        Raises:
            TypeError: an argument has no canonical form.
        """
        files = plan.files_of(args, kwargs) if plan.reads_files else _NO_FILES
        built_on: list[bytes] = []

        def ref_key(ref: ObjectRef[Any]) -> bytes:
            mark = self.ref_key(ref)
            if mark[:1] == b"K":
                built_on.append(mark[1:33])
            return mark

        try:
            key, shown = plan.key_of(ref_key, args, kwargs, files[1])
        except NotYetError:
            self.computed += 1
            refs = plan.known_refs(self, args, kwargs)
            built_on = [mark[1:33] for _, mark in refs if mark[:1] == b"K"]
            token = Token(b"", LATE, refs=refs, built_on=built_on, files=files)
            return plan.plain.remote(encode_token(token), *args, **kwargs)
        if key in self._submitted and (running := self._in_flight(key)):
            self._count_found(plan.name)
            same = plan.shared().remote(key, *running)
            return self.remember(same, key) if plan.lifetime == math.inf else same
        place = self.look(STREAM_KEY + key[1:] if plan.stream else key)
        flags, where = 0, None
        if place is not None and time.time() - place.time < plan.lifetime:
            store = self.io.store
            assert store is not None
            where = store.name_of(place), place.at, place.size
            if self._random.random() < self.process.config.durable_verify:
                flags = VERIFY
            elif plan.stream:
                flags = REPLAY
            elif place.kind == ERROR:
                flags = LOAD if plan.errors else 0
            elif place.flags & IN_FILE or place.size > self.process.config.inline_limit:
                flags = LOAD
            else:
                refs = self._made_of(plan, key, place)
                if refs is not None:
                    self._count_found(plan.name)
                    return refs
        if flags in (LOAD, REPLAY):
            self._count_found(plan.name)
        else:
            self.computed += 1
        if self.process.config.durable_dry_run:
            return self._left_out(plan)
        plan.describe(self)
        token = Token(key, flags, where if flags else None, shown, (), built_on, files)
        made = plan.plain.remote(encode_token(token), *args, **kwargs)
        if len(self._submitted) > _MOST_SUBMITTED:
            self._submitted.clear()
        if type(made) is ObjectRef:
            self._submitted[key] = (weakref.ref(made),), made._id, time.monotonic()
            if plan.lifetime == math.inf:
                _bounded(self._keys)[made._id] = key
            return made
        if not plan.stream and isinstance(made, list) and made:
            self._submitted[key] = tuple(map(weakref.ref, made)), made[0]._id, time.monotonic()
        return self.remember(made, key) if plan.lifetime == math.inf and not plan.stream else made

    def _in_flight(self, key: bytes) -> list[ObjectRef[Any]]:
        """The refs of a call with the same key that has not ended yet; none where there is no such call any more."""
        refs = [ref for known in self._submitted[key][0] if (ref := known()) is not None]
        entries = self.process.table.entries
        pending = [entry for ref in refs if (entry := entries.get(ref._id)) is not None and entry.state == PENDING]
        return refs if len(pending) == len(self._submitted[key][0]) else []

    def _made_of(self, plan: DurableFunction, key: bytes, place: RecordPlace) -> Any:
        """Make objects of a small result that was found; None if it is of no use."""
        record = self.read(key, place)
        blobs = self.values(record) if record is not None else None
        if record is None or blobs is None or len(blobs) != max(1, plan.num_returns):
            return None
        made: list[ObjectRef[Any]] = []
        if record.header.flags & REBOUND:
            try:
                made = [self.process.put(deserialize(blob)) for blob in blobs]
            except Exception:  # it names what is not here any more
                self.io.post(lambda store: store.forget(key))
                return None
        else:
            for blob in blobs:
                made.append(self._object(bytes(blob)))
        result: Any = made[0] if plan.num_returns == 1 else made if plan.num_returns else None
        return self.remember(result, key) if plan.lifetime == math.inf else result

    def _object(self, blob: bytes) -> ObjectRef[Any]:
        with self.process.engine.lock:
            object_id = self.process.next_task_id() + PUT_INDEX
            self.process.table.put_inline(object_id, blob)
        return new_ref(object_id)

    def _left_out(self, plan: DurableFunction) -> Any:
        error = serialize_error(
            DryRunError(
                f"{plan.name} was not run, nor what needs its value: this is a dry run; "
                f"it would skip {self.found:,} of {self.found + self.computed:,} tasks so far"
            )
        )
        if plan.num_returns <= 1 or plan.stream:
            return self._object(error)
        return [self._object(error) for _ in range(plan.num_returns)]

    # ------------------------------------------------------------ in workers

    def owner_is(self, owner: bytes) -> None:
        """Note who hears of trouble in this worker."""
        self._owner = owner

    def keep(self, function: KeptCallable, token: Token, kind: int, values: Sequence[Any], seconds: float) -> None:
        """Keep what a task has returned, an item that it has yielded, or an error."""
        if self.io.off:
            return
        try:
            kept = [KeptValue(value) for value in values]
        except NotKeptError as error:
            self.report(
                f"result {function.__name__} {error}", f"durable: a result of {function.__name__} is not kept: {error}"
            )
            return
        except Exception as error:  # code of the user's
            self.report(
                f"result {function.__name__} {type(error).__name__}",
                f"durable: a result of {function.__name__} is not kept: {type(error).__name__}: {error}",
            )
            return
        needs = {(*place, mark) for one in kept for place, mark in one.needs.items()}
        versions = {pair for one in kept for pair in one.versions.items()}
        blobs = [one.blob for one in kept]
        size = sum(map(_size, blobs))
        lifetime = function.options.lifetime
        meta = Meta(
            function.__name__,
            function.base,
            token.arguments,
            sorted(needs),
            sorted(versions),
            size,
            time.time() + lifetime if lifetime < math.inf else 0.0,
            seconds,
        )
        flags = REBOUND if any(one.rebound for one in kept) else 0
        if size <= min(self.process.config.inline_limit, LARGE):
            self.io.write(value_record(None, token.key, kind, flags, meta, blobs))
            if seconds >= _WORTH_WAITING:
                self.io.written(_WRITE_WAIT)
        else:
            record = self.io.call(lambda store: value_record(store, token.key, kind, flags, meta, blobs), size / 1e7)
            if record is not None:
                self.io.write(record)

    def load(self, token: Token) -> KeptRecord | None:
        """Return the record that a submitter has found."""
        if token.place is None:
            return None
        name, at, size = token.place
        record = self.io.call(lambda store: store.read_at(token.key, name, at, size), 600.0)
        return self.judged(token.key, record)


_NO_FILES = (b"", b"")
STREAM_KEY = b"\xff"
"""First byte of the key under which the end of a stream is kept."""


def _size(blob: Any) -> int:
    return len(blob) if isinstance(blob, bytes) else int(blob.size)


def _bounded(table: dict[bytes, bytes]) -> dict[bytes, bytes]:
    if len(table) >= _MOST_KEYS:
        for name in list(table)[: _MOST_KEYS // 4]:
            del table[name]
    return table


class Parameters:
    """The parameters of a function, as far as keys are concerned.

    They are those of the callable itself: a decorator may see whether an argument was given by its name.

    Attributes:
        names: of positional ones. ignored: those that are no part of a key.
    """

    def __init__(self, function: Callable[..., Any], ignored: Sequence[str], form: Canonical) -> None:
        self.ignored = frozenset(ignored)
        self.names: Sequence[str] = ()
        self._keyword_only: Sequence[str] = ()
        self._classes = ClassMarks()
        self._only_positional = 0
        self._defaults: dict[str, bytes] = {}
        if type(function) is types.FunctionType:
            code = function.__code__
            count, last = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
            self.names, self._keyword_only = code.co_varnames[:count], code.co_varnames[count:last]
            self._only_positional = code.co_posonlyargcount
            defaults = function.__defaults__ or ()
            given = {
                **dict(zip(self.names[count - len(defaults) :], defaults, strict=True)),
                **(function.__kwdefaults__ or {}),
            }
            self._defaults = {
                name: Canonical().of(value) if type(value) in SCALARS else b"default" for name, value in given.items()
            }
        self._by_keyword = frozenset((*self.names[self._only_positional :], *self._keyword_only))
        self._further = self._ignored_places(function) if ignored else frozenset()
        self._all_by_position = not self.ignored and not self._keyword_only

    def _ignored_places(self, function: Callable[..., Any]) -> frozenset[int]:
        """Places of ignored arguments among those that a decorator hands on.

        Raises:
            ValueError: there is no parameter of such a name.
        """
        try:
            found = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return frozenset()
        unknown = sorted(self.ignored - {p.name for p in found} - set(self.names))
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in found):
            raise ValueError(f"DurableOptions: ignore names {', '.join(unknown)}, which are no parameters")
        return frozenset(
            place
            for place, p in enumerate(found)
            if p.name in self.ignored and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        )

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Name and value of each argument that is part of the key."""
        names, ignored = self.names, self.ignored
        count = len(args)
        given: list[tuple[str, Any]] = []
        for index, name in enumerate(names):
            if name in ignored:
                continue
            if index < count:
                given.append((name, args[index]))
            elif name in kwargs and index >= self._only_positional:
                given.append((name, kwargs[name]))
            else:
                given.append((name, _DEFAULT))
        for index in range(len(names), count):
            if index not in self._further:
                given.append((f"*{index}", args[index]))
        for name in self._keyword_only:
            if name not in ignored:
                given.append((name, kwargs.get(name, _DEFAULT)))
        for name in kwargs:
            if name not in ignored and name not in self._by_keyword:
                given.append((f"**{name}" if name in names else name, kwargs[name]))
        return given

    def contents(
        self, ref_key: Callable[[Any], bytes], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[tuple[str, bytes]], list[bytes]]:
        """Return name and canonical bytes of each argument, and the digests of the functions and classes among them.

        Raises:
            NoCanonicalFormError: an argument has none.
        """
        defaults = self._defaults
        if self._all_by_position and not kwargs and len(args) == len(self.names):
            given = [*zip(self.names, args, strict=True)]
        else:
            given = self._given(args, kwargs)
        many = [value for _, value in given if value is not _DEFAULT and type(value) not in SCALARS]
        form = Canonical(ref_key, self._classes) if many and not is_plain(many) else None
        of_many = form.of if form is not None else plain_form
        found: list[tuple[str, bytes]] = []
        name = ""
        try:
            for name, value in given:
                if value is _DEFAULT:
                    found.append((name, defaults.get(name, b"missing")))
                else:
                    found.append((name, scalar_form(value) if type(value) in SCALARS else of_many(value)))
        except NoCanonicalFormError as error:
            raise error.at(f"the argument {name.lstrip('*')}") from None
        except ValueError:
            raise NoCanonicalFormError("nested too deeply, so it has no canonical form").at(
                f"the argument {name.lstrip('*')}"
            ) from None
        if form is None or not form.nodes:
            return found, []
        return found, [mark for node in form.finished() for mark in (node.label.encode(), node.digest)]


_DEFAULT = object()


def make_key(base: bytes, contents: Sequence[tuple[str, bytes]], marks: Sequence[bytes]) -> bytes:
    """The key of a call. Its first byte is never that of a stream's end.

    Args:
        contents: name of each argument, and its canonical bytes or their digest (`brief`).
        marks: of functions among them.
    """
    parts = [base]
    for name, content in contents:
        parts.append(b"%d %d " % (len(content), len(name)))
        parts.append(name.encode("utf-8", "surrogatepass"))
        parts.append(content)
    parts.extend(marks)
    made = hashlib.blake2b(b"".join(parts), digest_size=32).digest()
    return made if made[0] != STREAM_KEY[0] else b"\xfe" + made[1:]


def brief(contents: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Arguments as keys and records have them: of long ones the digest."""
    return [(name, content if len(content) <= _SHOWN else b"#" + buffer_digest(content)) for name, content in contents]


def function_parts(function: Callable[..., Any], ref_key: Callable[[Any], bytes] | None) -> list[tuple[str, bytes]]:
    """Label and digest of all that a function is made of.

    Raises:
        NoCanonicalFormError: a part has no canonical form.
    """
    form = Canonical(ref_key)
    content = form.of_function(function)
    return [("the function itself", digest(content)), *((node.label, node.digest) for node in form.finished())]


class DurableFunction:
    """A durable remote function in its submitter.

    Args:
        extension: of this process. function: of the user. given: options of the remote function.
        environment: its runtime_env as keys see it. make: makes a remote function, which is not durable, of another
            function; True: one that needs no resources.

    Attributes:
        extension: as given. plain: the remote function that runs in workers.
        stream: it yields. num_returns: -1 where it does. reads_files: it has `inputs`.

    Raises:
        TypeError: a part of the function has no canonical form.
    """

    def __init__(
        self,
        extension: DurableTasks,
        function: Callable[..., Any],
        options: DurableOptions,
        num_returns: int,
        environment: Mapping[str, Any],
        make: Callable[[Any, bool], Submitting],
    ) -> None:
        self.extension = extension
        self.name: str = options.name or getattr(function, "__name__", type(function).__name__)
        self.stream = num_returns < 0
        self.num_returns = num_returns
        self.lifetime, self.errors = options.lifetime, options.errors
        self._described = False
        self._files = InputFiles(function, options.inputs)
        options = dataclasses.replace(options, inputs=self._files.names)
        self.reads_files = bool(options.inputs)
        try:
            self._parts = function_parts(function, extension.content_key)
            self.parameters = Parameters(function, options.ignore, Canonical())
        except NoCanonicalFormError as error:
            raise TypeError(
                f"the durable function {self.name} has no key: {error}; hint: make it inside of the function, or pass "
                "it as an argument that DurableOptions(ignore=...) names"
            ) from None
        try:
            self._environment = Canonical().digest_of(dict(environment))
        except NoCanonicalFormError as error:
            raise TypeError(f"the durable function {self.name} has no key: its runtime_env{error}") from None
        self.installs = bool(_INSTALLING & set(environment))
        self._settings = [
            ("python", f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"),
            ("name", options.name),
            ("version", repr(options.version)),
            ("num_returns", str(self.num_returns)),
            ("ignore", ", ".join(sorted(options.ignore))),
            ("runtime_env", self._environment.hex()[:16]),
        ]
        self.base: bytes = digest(
            _VERSION,
            *(part for label, mark in self._parts for part in (label.encode(), mark)),
            *(part.encode() for pair in self._settings for part in pair),
            self._environment,
        )
        parts = None if self.installs else tuple(self._parts)
        kind: type[KeptCallable] = KeptGenerator if self.stream else KeptFunction
        self.plain: Submitting = make(kind(function, self.base, parts, options, num_returns), False)
        self._make = make
        self._shared: Submitting | None = None

    def shared(self) -> Submitting:
        """The remote function that hands on what another call with the same key returns."""
        if self._shared is None:
            self._shared = self._make(SharedResult(self.name, self.num_returns), True)
        return self._shared

    def files_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """States and content of the files that a call reads, as they are now; nothing where there are none.

        Raises:
            FileNotFoundError: one does not exist.
            TypeError: an argument that should name one does not.
        """
        return self._files.of_call(args, kwargs) if self.reads_files else _NO_FILES

    def key_of(
        self, ref_key: Callable[[Any], bytes], args: Sequence[Any], kwargs: Mapping[str, Any], content: bytes = b""
    ) -> tuple[bytes, list[tuple[str, bytes]]]:
        """The key of a call, and what a record keeps of its arguments. `content` is that of the files that it reads."""
        if self.installs:
            raise NotYetError
        try:
            contents, marks = self.parameters.contents(ref_key, args, kwargs)
        except NoCanonicalFormError as error:
            raise TypeError(
                f"durable: of a call of {self.name} there is no key: {error}; hint: pass a value without it, or name "
                "the parameter in DurableOptions(ignore=[...])"
            ) from None
        if content:
            contents.append(("(files)", content))
        shown = brief(contents)
        return make_key(self.base, shown, marks), shown

    def known_refs(
        self, extension: DurableTasks, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[bytes, bytes]]:
        """Return the key of each ref in the arguments of a call whose own key a worker has to make."""
        found: dict[bytes, bytes] = {}

        def note(ref: ObjectRef[Any]) -> bytes:
            try:
                found[ref._id] = extension.ref_key(ref)
            except NotYetError:
                pass
            return b"?"

        try:
            self.parameters.contents(note, args, kwargs)
        except NoCanonicalFormError as error:
            raise TypeError(
                f"durable: of a call of {self.name} there is no key: {error}; hint: pass a value without it, or name "
                "the parameter in DurableOptions(ignore=[...])"
            ) from None
        return list(found.items())

    def describe(self, extension: DurableTasks) -> None:
        """Keep what all keys of this function are made of, once."""
        if self._described:
            return
        self._described = True
        store = extension.io.store
        if store is not None and store.find(self.base) is None:
            data = encode_description(Description(self._parts, self._settings))
            extension.io.write(
                make_record(self.base, FUNCTION, 0, time.time(), encode_meta(Meta(name=self.name)), data)
            )


class InputFiles:
    """The files that a function reads: those that its options name, and those that arguments name.

    Args:
        function: of the user. inputs: paths, and names of parameters whose arguments are paths.

    Attributes:
        names: the same, which a process in another directory understands too.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[str | os.PathLike[str]]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(function) if inputs else None
        except (TypeError, ValueError):
            self._signature = None
        known = self._signature.parameters if self._signature is not None else {}
        self._paths = [os.path.abspath(path) for path in inputs if path not in known]
        self._arguments = [str(name) for name in inputs if name in known]
        self.names = (*self._paths, *self._arguments)
        self._contents: dict[bytes, bytes] = {}

    def of_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """States and content of the files of one call. Errors: as in `DurableFunction.files_of`."""
        states = list(_states(self._of(args, kwargs)))
        mark = _mark(states)
        content = self._contents.get(mark)
        if content is None:
            content = _content(states)
            # A file that is written at this moment may change once more without another time of change.
            if max((max(times) for *_, times in states), default=0) < (time.time() - _SETTLED) * 1e9:
                _bounded(self._contents)[mark] = content
        return mark, content

    def changed(self, before: tuple[bytes, bytes], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the files of a call are not what they were."""
        try:
            states = list(_states(self._of(args, kwargs)))
            return _mark(states) != before[0] and _content(states) != before[1]
        except OSError:
            return True

    def _of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        if not self._arguments or self._signature is None:
            return self._paths
        bound = self._signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        paths = list(self._paths)
        for name in self._arguments:
            value = bound.arguments.get(name)
            for path in value if isinstance(value, (list, tuple)) else () if value is None else (value,):
                if not isinstance(path, (str, os.PathLike)):
                    raise TypeError(
                        f"DurableOptions: inputs names the parameter {name}, whose argument is "
                        f"a {type(path).__name__} and not the path of a file"
                    )
                paths.append(os.fspath(path))
        return paths


_SETTLED = 2.0
"""Seconds after which a file that has changed has another time of change, on any file system."""


def _states(paths: Sequence[str]) -> Iterator[tuple[str, str, int, tuple[int, int]]]:
    """Each file of the inputs: its name among them, its path, its size, and its times of change."""
    for path in paths:
        if os.path.isdir(path):
            for directory, below, files in os.walk(path):
                below.sort()
                for name in sorted(files):
                    whole = os.path.join(directory, name)
                    yield _state(os.path.relpath(whole, path), whole)
        else:
            yield _state(os.path.basename(path), path)


def _state(name: str, path: str) -> tuple[str, str, int, tuple[int, int]]:
    state = os.stat(path)
    return name, path, state.st_size, (state.st_mtime_ns, state.st_ctime_ns)


def _mark(states: Sequence[tuple[str, str, int, tuple[int, int]]]) -> bytes:
    return hashlib.blake2b(repr(states).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _content(states: Sequence[tuple[str, str, int, tuple[int, int]]]) -> bytes:
    made = hashlib.sha256()
    for name, path, *_ in states:
        with open(path, "rb") as file:
            content = _hashed(file)
        made.update(len(name.encode()).to_bytes(8, "little") + name.encode() + content)
    return made.digest()


def _hashed(file: Any) -> bytes:
    made = hashlib.sha256()
    while block := file.read(1 << 20):
        made.update(block)
    return made.digest()


class KeptCallable(ABC):
    """The callable that workers run in place of a durable function.

    It runs that, or reads the result that was found, and keeps the result.

    Attributes:
        base: digest of all that goes into a key but the arguments. options: of the user.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        base: bytes,
        parts: tuple[tuple[str, bytes], ...] | None,
        options: DurableOptions,
        num_returns: int,
    ) -> None:
        self.function = function
        self.base = base
        self.options = options
        self.parts = parts
        self.num_returns = num_returns
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        self.__module__ = getattr(function, "__module__", "")
        self.__doc__ = getattr(function, "__doc__", "")

    @abstractmethod
    def __call__(self, token_: bytes, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function, or read its result."""

    def _begin(self, text: bytes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[DurableTasks, Token]:
        process: Any = require_context()
        extension = DurableTasks.of(process)
        token = decode_token(text)
        worker = current.worker
        if worker is not None and process.local.task is not None:
            extension.owner_is(owner_of(process.local.task.task))
            call: Any = type(self).__call__
            worker.let_interrupt(call.__code__)
        if not self._is_same(extension):
            token = msgspec.structs.replace(token, flags=token.flags | UNPROVED)
        elif token.flags & LATE:
            token = self._late(extension, token, args, kwargs)
        return extension, token

    def _is_proved(self, extension: DurableTasks, token: Token, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if what the function has computed is what the key says: now, when it has run."""
        if token.flags & UNPROVED or (unproved and not unproved.isdisjoint(token.built_on)):
            return False
        if token.files[0] and self._files().changed(token.files, args, kwargs):
            extension.report(
                f"files {self.__name__}",
                f"durable: a result of {self.__name__} is not kept: a file that it reads has changed since it was "
                "submitted",
            )
            return False
        return True

    def _files(self) -> InputFiles:
        if "_input_files" not in self.__dict__:
            self._input_files = InputFiles(self.function, self.options.inputs)
        return self._input_files

    def _is_same(self, extension: DurableTasks) -> bool:
        """Return True if the function that this process has is the one that the submitter made the key of."""
        known = self.__dict__.get("_same")
        if known is None:
            try:
                own = function_parts(self.function, extension.content_key)
            except Exception as error:
                own = [(f"{type(error).__name__}: {error}", b"")]
            wanted = own if self.parts is None else list(self.parts)
            self._own = own
            known = self._same = own == wanted
            if not known:
                differ = [label for label, mark in {*own} ^ {*wanted}]
                extension.report(
                    f"differs {self.__name__}",
                    f"durable: results of {self.__name__} are not kept: its worker has another "
                    f"{sorted(set(differ))[0] if differ else 'function'} than the program; hint: do not change modules "
                    "and their globals while a job runs",
                )
        return bool(known)

    def _late(self, extension: DurableTasks, token: Token, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Token:
        """Make a key of the values of the arguments."""
        refs = dict(token.refs)

        def ref_key(ref: ObjectRef[Any]) -> bytes:
            return refs.get(ref._id) or extension.content_key(ref)

        try:
            if "_parameters" not in self.__dict__:
                self._parameters = Parameters(self.function, self.options.ignore, Canonical())
            contents, marks = self._parameters.contents(ref_key, args, kwargs)
        except NoCanonicalFormError as error:
            extension.report(f"late {self.__name__}", f"durable: a result of {self.__name__} is not kept: {error}")
            return Token(b"")
        if token.files[1]:
            contents.append(("(files)", token.files[1]))
        contents = brief(contents)
        base = digest(self.base, *(part for label, mark in self._own for part in (label.encode(), mark)))
        key = make_key(base, contents, marks)
        place = extension.look(STREAM_KEY + key[1:] if self.num_returns < 0 else key)
        where, flags = None, 0
        if place is not None and time.time() - place.time < self.options.lifetime:
            store = extension.io.store
            assert store is not None
            where = store.name_of(place), place.at, place.size
            flags = REPLAY if self.num_returns < 0 else LOAD
            if place.kind == ERROR and not self.options.errors:
                where, flags = None, 0
        return Token(key, flags, where, contents, (), token.built_on, token.files)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function, self.base, self.parts, self.options, self.num_returns)


class KeptFunction(KeptCallable):
    """The same for a function that returns."""

    def __call__(self, token_: bytes, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function, or read its result."""
        extension, token = self._begin(token_, args, kwargs)
        record = self._found(extension, token)
        if record is not None and not token.flags & VERIFY:
            values = self._load(extension, record)
            if values is not None:
                return values[0] if self.num_returns == 1 else values
        began = time.perf_counter()
        try:
            value = self.function(*args, **kwargs)
        except Exception as error:
            if self.options.errors and token.key and self._is_proved(extension, token, args, kwargs):
                extension.keep(self, token, ERROR, [_bare(error)], time.perf_counter() - began)
            raise
        if not token.key:
            return value
        values = self._values(value)
        if values is None:
            return value
        if not self._is_proved(extension, token, args, kwargs):
            values = [UnprovedValue(one, token.key) for one in values]
            return values[0] if self.num_returns == 1 else values if self.num_returns else None
        if record is not None:
            _compare(extension, self, token, record, values)
        extension.keep(self, token, VALUE, values, time.perf_counter() - began)
        return values if self.num_returns > 1 else value

    def _values(self, value: Any) -> list[Any] | None:
        """The values that a call has returned, as a list; None where that does not fit, which its reply will say."""
        if self.num_returns <= 1:
            return [value]
        try:
            values = list(value)
        except TypeError:
            return None
        return values if len(values) == self.num_returns else None

    def _found(self, extension: DurableTasks, token: Token) -> KeptRecord | None:
        return extension.load(token) if token.flags & (LOAD | VERIFY) else None

    def _load(self, extension: DurableTasks, record: KeptRecord) -> list[Any] | None:
        blobs = extension.values(record)
        if blobs is None or len(blobs) != max(1, self.num_returns):
            return None
        try:
            values = [deserialize(blob) for blob in blobs]
        except Exception as error:  # it names what is not here any more
            extension.report(
                f"load {self.__name__}",
                f"durable: a kept result of {self.__name__} is computed again: {type(error).__name__}: {error}",
            )
            return None
        if record.header.kind == ERROR:
            raise values[0]
        return values


class SharedResult:
    """The callable that workers run where a call with the same key has been submitted and has not ended."""

    def __init__(self, name: str, num_returns: int) -> None:
        self.__name__ = self.__qualname__ = f"{name} (shared)"
        self._num_returns = num_returns

    def __call__(self, key: bytes, /, *values: Any) -> Any:
        """Return what that call has returned."""
        if key in unproved:
            values = tuple(UnprovedValue(value, key) for value in values)
        return values[0] if self._num_returns == 1 else list(values)


class KeptGenerator(KeptCallable):
    """The same for a generator: each item is kept by itself, and at the end how many there are."""

    def __call__(self, token_: bytes, /, *args: Any, **kwargs: Any) -> Any:
        """Yield what the function yields, or what it has yielded in an earlier run that came to its end."""
        extension, token = self._begin(token_, args, kwargs)
        began = time.perf_counter()
        if token.flags & REPLAY and token.key:
            items = self._kept_items(extension, token)
            if items is not None:
                for item in items:
                    yield item
                return
        count = 0
        for item in self.function(*args, **kwargs):
            if token.key and not token.flags & UNPROVED:
                extension.keep(self, _item(token, count), VALUE, [item], time.perf_counter() - began)
            count += 1
            yield item
            began = time.perf_counter()
        if token.key and self._is_proved(extension, token, args, kwargs):
            end = Token(STREAM_KEY + token.key[1:], arguments=token.arguments)
            extension.keep(self, end, STREAM_END, [count], time.perf_counter() - began)

    def _kept_items(self, extension: DurableTasks, token: Token) -> Iterator[Any] | None:
        """The items that were kept; None unless all of them are there."""
        end = extension.load(Token(STREAM_KEY + token.key[1:], place=token.place))
        blobs = extension.values(end) if end is not None else None
        if not blobs:
            return None
        places = []
        for index in range(deserialize(blobs[0])):
            key = _item(token, index).key
            place = extension.look(key)
            record = extension.read(key, place) if place is not None else None
            parts = extension.values(record) if record is not None else None
            if place is None or not parts:
                return None
            places.append((key, place))
        return _items(extension, places)


def _items(extension: DurableTasks, places: Sequence[tuple[bytes, RecordPlace]]) -> Iterator[Any]:
    for key, place in places:
        record = extension.read(key, place)
        blobs = extension.values(record) if record is not None else None
        if not blobs:
            raise RuntimeError(f"durable: the kept item {key.hex()[:16]} has gone while it was read")
        yield deserialize(blobs[0])


def _item(token: Token, index: int) -> Token:
    key = hashlib.blake2b(token.key + index.to_bytes(8, "little"), digest_size=32).digest()
    return Token(key, arguments=token.arguments)


def _bare(error: BaseException) -> BaseException:
    """An exception without what it holds of the frames in which it was raised."""
    return error.with_traceback(None)


def _compare(
    extension: DurableTasks, function: KeptCallable, token: Token, record: KeptRecord, values: Sequence[Any]
) -> None:
    """Say if a kept result and one that was computed again differ."""
    blobs = extension.values(record)
    try:
        kept = values_digest([deserialize(blob) for blob in blobs or ()])
    except Exception as error:
        kept = f"it does not unpickle: {error}".encode()
    made = values_digest(values)
    if kept != made:
        extension.report(
            f"differs {token.key.hex()}",
            f"durable: {function.__name__}: the result kept under the key {token.key.hex()[:16]} is "
            f"{kept.hex()[:16]}, computed again it is {made.hex()[:16]}; "
            f"hint: hpcray durable why {token.key.hex()[:16]}",
        )
