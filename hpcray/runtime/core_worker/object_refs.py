"""Object refs: the only handle a user has on a remote value. One live ref counts one in the process's object table."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hpcray.common.ids import OBJECT_BYTES, JobID, TaskID, owner_of, task_of
from hpcray.core.core_worker.object_entry import PENDING, ObjectEntry, note_site, site_of
from hpcray.protocol.serialization import note_ref
from hpcray.runtime.core_worker.context import current, require_context
from hpcray.runtime.core_worker.io_engine import released

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

# ------------------------------------------------------------ late release
# Destructors of objects that the garbage collector finds in a reference cycle, but that may still be used.
#
# Python calls `__del__` of all objects of a cycle before it takes any of them apart. The destructor of another object
# may read a ref of ours after that, or save it for later, and `__del__` is not called a second time. So what an object
# of ours releases in `__del__` is released when its memory is freed: such an object then gets a `LateRelease`, which
# the garbage collector does not see, and whose destructor runs with the end of its owner.
#
# Source: PEP 442, Safe object finalization.

collecting: list[bool] = []
"""Not empty while the garbage collector is at work, in whatever thread (`interruptions`)."""

_calls: dict[bytes, Callable[[], object]] = {}
_numbers = itertools.count()


class LateRelease(bytes):
    """Makes a call when it is freed. Its type has no room for references, so the collector never finalizes it."""

    __slots__ = ()

    @classmethod
    def of(cls, call: Callable[[], object]) -> LateRelease:
        """Return an object that makes `call` when it is freed. The call must not refer to the owner."""
        made = cls(next(_numbers).to_bytes(8, "big"))
        _calls[made[:]] = call
        return made

    def __del__(self) -> None:
        call = _calls.pop(self[:], None)
        if call is not None:
            call()


def is_referred(owner: object) -> bool:
    """Return True if anything refers to `owner`, whose `__del__` calls this with its own argument."""
    return getrefcount(owner) > _ALONE


class _Probe:
    count = 0

    def __del__(self) -> None:
        _Probe.count = _count(self)


def _count(owner: object) -> int:
    return getrefcount(owner)


_Probe()
_ALONE = _Probe.count
"""The count of `is_referred` for an object to which nothing refers."""


# ------------------------------------------------------------ object refs

T_co = TypeVar("T_co", covariant=True)

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_API = os.path.join(_OURS, "api", "")
_CALLS = {"actor_handle.py": "(actor call) ", "objects.py": "(put object) ", "remote_function.py": "(task call) "}
"""Before the place where a ref was made, in Ray's words, by the file of ours that was called there."""
_append = released.append
_id_of = attrgetter("_id")
_VALUE_ROOM = 8 << 10
"""Bytes of the largest value that travels with a ref."""
_VALUES_ROOM = 128 << 10
"""Bytes that the n-th ref in one value takes for its own value, n times: all together some hundred KB at most."""
_VALUES_OF_WORKERS = 32
"""Refs in one value of a worker that take theirs along. Many refs are read faster without; up to so many, pickle still
names what all the others have in common with one byte."""


def defer_release(item: Any) -> None:
    """Queue the release of a dead ref (its id) or view (a 1-tuple of it). Safe in destructors."""
    _append(item)
    process = current.process
    if process is not None and process.engine.driver:
        process.engine.wake()


class ObjectRef(Generic[T_co]):
    """A reference to an object that exists, or will, somewhere in the job.

    Equal refs name the same object. A ref can be passed to tasks, put inside values, awaited, and turned into a
    `concurrent.futures.Future`. While a ref exists anywhere in the job, so does its object.
    """

    __slots__ = ("__weakref__", "_id", "_late")

    def __init__(self, object_id: bytes) -> None:
        if len(object_id) != OBJECT_BYTES:
            raise ValueError(f"an object id has {OBJECT_BYTES} bytes, not {len(object_id)}")
        self._id = object_id
        process = current.process
        if process is not None:
            process.ref_arrived(object_id, None)

    def __del__(self) -> None:
        try:  # as `defer_release` does, without a call
            if collecting and is_referred(self):
                self._late = LateRelease.of(partial(defer_release, self._id))
                return
            _append(self._id)
            if current.process.engine.driver:  # type: ignore[union-attr]
                current.process.engine.wake()  # type: ignore[union-attr]
        except (AttributeError, TypeError):  # half made, no session, or the interpreter is going down
            pass

    def binary(self) -> bytes:
        """The object id."""
        return self._id

    def hex(self) -> str:
        """The object id in hex."""
        return self._id.hex()

    def is_nil(self) -> bool:
        """Return True for the nil ref."""
        return self._id == b"\xff" * OBJECT_BYTES

    @classmethod
    def nil(cls) -> ObjectRef[Any]:
        """A ref to nothing."""
        return new_ref(b"\xff" * OBJECT_BYTES)

    @classmethod
    def size(cls) -> int:
        """Bytes of an object id."""
        return OBJECT_BYTES

    def task_id(self) -> TaskID:
        """Id of the task that makes the object."""
        return TaskID(task_of(self._id))

    def job_id(self) -> JobID:
        """Id of the job that it belongs to."""
        job = current.process.place.job if current.process is not None else None
        return JobID(bytes.fromhex(job.job_id) if job is not None else b"")

    @classmethod
    def from_binary(cls, object_id: bytes) -> ObjectRef[Any]:
        """The ref with these bytes."""
        return cls(object_id)

    @classmethod
    def from_hex(cls, object_id: str) -> ObjectRef[Any]:
        """The ref with these bytes, in hex."""
        return cls(bytes.fromhex(object_id))

    @classmethod
    def from_random(cls) -> ObjectRef[Any]:
        """A ref to nothing, unlike all others."""
        return new_ref(os.urandom(OBJECT_BYTES))

    def call_site(self) -> str:
        """Where the ref was first made, if that is recorded (`RAY_record_ref_creation_sites`); else ""."""
        return "" if current.process is None else site_of(current.process.table.entries.get(self._id))

    def tensor_transport(self) -> None:
        """How the tensors in it travel: None, for the maker decides, and the ref does not know."""

    def owner_address(self) -> bytes:
        """Proc id of the owner."""
        return owner_of(self._id)

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        return self._id == other._id if isinstance(other, ObjectRef) else NotImplemented

    def __repr__(self) -> str:
        return f"ObjectRef({self._id.hex()})"

    def _repr_html_(self) -> str:
        process = current.process
        return process.extensions.features.ref_html(self) if process is not None else repr(self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        process = current.process
        noted = note_ref(self)
        if process is None:
            return arrived_ref, (self._id,)
        mortal = process.place.kind == "worker"
        room = 0 if not noted or (mortal and noted > _VALUES_OF_WORKERS) else min(_VALUE_ROOM, _VALUES_ROOM // noted)
        hint = process.table.known_locations(self._id, room, mortal)
        if not noted:
            process.pin_forever(self)
        return (arrived_ref, (self._id,)) if hint is None else (placed_ref, (self._id, *hint))

    def __copy__(self) -> ObjectRef[T_co]:
        return ObjectRef(self._id)

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectRef[T_co]:
        return self

    def future(self) -> concurrent.futures.Future[T_co]:
        """A future that gets the value, or the error."""
        import concurrent.futures

        future: concurrent.futures.Future[T_co] = concurrent.futures.Future()

        def done(value: Any, error: BaseException | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        require_context().reader.when_available(self, done)
        return future

    def as_future(self) -> asyncio.Future[T_co]:
        """An asyncio future of the running loop; where none runs, of the one that this thread will run."""
        import asyncio  # here, as few programs need it, and it takes long

        loop = asyncio.get_event_loop()
        future: asyncio.Future[T_co] = loop.create_future()
        process = require_context()

        def settle() -> None:
            if future.done():
                return
            try:
                future.set_result(process.reader.get([self], None)[0])
            except BaseException as error:
                future.set_exception(error)

        def ready() -> None:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:
                if not loop.is_closed():  # else nobody waits any more
                    raise

        process.reader.when_ready_here(self, ready)
        return future

    def __await__(self) -> Generator[Any, None, T_co]:
        return self.as_future().__await__()

    def _on_completed(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` with the value, or the error, in a thread for callbacks; not after `shutdown()`."""
        process = require_context()

        def completed(value: Any, error: BaseException | None) -> None:
            if current.process is process:
                callback(value if error is None else error)

        process.reader.when_available(self, completed)

    def _on_ready(self, callback: Callable[[BaseException | None], object]) -> Callable[[], None]:
        """Call `callback(None)` once the object exists, at once if it does. Its value is not fetched.

        Returns:
            A function that withdraws the callback.
        """
        return require_context().reader.when_ready(self, callback)

    async def _ready(self) -> ObjectRef[T_co]:
        """Wait until the object exists, without fetching its value. Returns the ref."""
        import asyncio

        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not ready.done():
                ready.set_result(None) if error is None else ready.set_exception(error)

        withdraw = self._on_ready(lambda error: loop.call_soon_threadsafe(settle, error))
        try:
            await ready
        finally:
            withdraw()
        return self


def awaited_object(future: Any, entries: Mapping[bytes, ObjectEntry]) -> bytes:
    """Return the object that a future of `ObjectRef.as_future` waits for; b"" where it is another future.

    Args:
        entries: of the table (engine's lock held).
    """
    if future is None:
        return b""
    for object_id, entry in entries.items():
        for waiter in entry.local_waiters or ():
            if waiter.callback is not None and any(one is future for one in _futures_of(waiter.callback)):
                return object_id
    return b""


def _futures_of(call: Any) -> Iterator[Any]:
    """The futures that a callback of `when_ready_here` settles: they are variables of its functions."""
    todo, seen = [call], set[int]()
    while todo:
        for cell in getattr(todo.pop(), "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                found = cell.cell_contents
                if id(found) not in seen:
                    seen.add(id(found))
                    todo.append(found)
                    yield found


def arrived_ref(object_id: bytes) -> ObjectRef[Any]:
    """A ref that was pickled."""
    ref = new_ref(object_id)
    process = current.process
    if process is not None:
        process.ref_arrived(object_id, None)
    return ref


def placed_ref(
    object_id: bytes, size: int, nodes: tuple[int, ...], value: bytes = b"", mortal: bool = False
) -> ObjectRef[Any]:
    """A ref that was pickled where its object was known to be in these nodes' stores, or together with its value: its
    owner gets no request."""
    ref = new_ref(object_id)
    if current.process is not None:
        current.process.ref_arrived(object_id, (size, nodes, value, mortal) if value else (size, nodes))
    return ref


class LocalRefs(dict[bytes, ObjectRef[Any]]):
    """The refs inside an object of this process, by id: a value that is read is made of these refs, not of copies. So
    none is counted, and none has to be uncounted."""

    def __init__(self, refs: Sequence[ObjectRef[Any]]) -> None:
        super().__init__(zip(map(_id_of, refs), refs, strict=True))

    def __missing__(self, object_id: bytes) -> ObjectRef[Any]:
        return arrived_ref(object_id)

    def load(self, data: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
        """Unpickle a value with these refs in it."""
        return _RefReader(self, data, buffers).load()


class _RefReader(pickle.Unpickler):
    def __init__(self, known: LocalRefs, data: bytes | memoryview, buffers: Iterable[Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == arrived_ref.__name__:
                return self._known.__getitem__
            if name == placed_ref.__name__:
                # No method of this reader: its memo would hold it, and so it the value, until the next gc.
                return partial(_known_or_placed, self._known)
        return super().find_class(module, name)


def _known_or_placed(known: LocalRefs, object_id: bytes, *hint: Any) -> ObjectRef[Any]:
    ref = known.get(object_id)
    if ref is None:
        return placed_ref(object_id, *hint)
    process = current.process
    if process is not None and object_id not in process.table.hints.unread:
        entry = process.table.entries.get(object_id)
        if entry is not None and entry.state == PENDING:
            process.hint_arrived(object_id, hint)
    return ref


def carry_creation_sites() -> None:
    """Pickle each ref with the place where it was made from now on: errors of borrowers name it."""
    plain = ObjectRef.__reduce__
    if plain.__name__ == "__reduce__":
        ObjectRef.__reduce__ = lambda ref: (_sited_ref, (ref.call_site(), *plain(ref)))  # type: ignore[assignment]


def _sited_ref(site: str, make: Callable[..., ObjectRef[Any]], args: tuple[Any, ...]) -> ObjectRef[Any]:
    ref = make(*args)
    if site and current.process is not None:
        note_site(current.process.table.entries.get(ref._id), site)
    return ref


def new_ref(object_id: bytes) -> ObjectRef[Any]:
    """A ref whose count the caller has already taken."""
    ref: ObjectRef[Any] = make_ref(ObjectRef)
    ref._id = object_id
    return ref


def creation_site() -> str:
    """`(task call) file.py:12 in function`: the innermost line of this thread that is not ours, and what it has called,
    where that is known; "" where there is none."""
    frame = sys._getframe(1)
    what = ""
    while (name := frame.f_code.co_filename).startswith(_OURS):
        if frame.f_back is None:
            return ""
        what = _CALLS.get(name.removeprefix(_API), "")
        frame = frame.f_back
    return f"{what}{name}:{frame.f_lineno} in {frame.f_code.co_name}"


make_ref = ObjectRef.__new__
