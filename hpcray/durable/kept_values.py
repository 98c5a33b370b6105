"""Values as they are kept: pickles that another job can read, and what they need there.

What travels between the processes of a job cannot be kept as it is: classes of the program itself go by value with
names that only this job knows, and refs mean nothing in another. Here classes and functions go by name, and the record
says which of them, and of what packages, have to be the same where the value is read; a ref goes as its value.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from hpcray.durable.canonical import Canonical, NoCanonicalFormError, is_own_module, provenance
from hpcray.durable.result_store import Meta
from hpcray.protocol.out_of_band import Pickler, end_storages, pickling
from hpcray.protocol.serialization import (
    PLAIN_END,
    SCALARS,
    SerializationError,
    Serialized,
    deserialize,
    serialize,
)
from hpcray.runtime.core_worker.context import require_context
from hpcray.runtime.core_worker.object_refs import ObjectRef

_LONGEST_TEXT = 1 << 16
MAX_REF_BYTES = 64 << 20
"""Bytes of the values of all refs in one result; a result with more is not kept."""


class NotKeptError(Exception):
    """A result cannot be kept; the text says why."""


class KeptValue:
    """One value, pickled to be kept.

    Attributes:
        blob: as in an object store, unless `rebound`. rebound: it names classes of the program, or holds refs: it is
            unpickled where it is found, and put again.
        needs, versions: see `Meta`.
    """

    def __init__(self, value: Any) -> None:
        """Pickle a value.

        Raises:
            NotKeptError: it holds an actor handle, or what no other job can read.
        """
        self.rebound = False
        self.needs: dict[tuple[str, str], bytes] = {}
        self.versions: dict[str, str] = {}
        self.ref_bytes = 0
        self.blob: bytes | Serialized
        kind = type(value)
        if kind in SCALARS or (kind in (str, bytes) and len(value) < _LONGEST_TEXT):
            self.blob = serialize(value)[0]
            return
        file = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        refs: list[Any] = []
        outer, pickling.refs = pickling.refs, refs
        try:
            _KeptPickler(self, file, protocol=5, buffer_callback=buffers.append).dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise NotKeptError(f"it does not pickle by name: {error}") from None
        finally:
            pickling.refs = outer
            if buffers:
                end_storages(refs, buffers)
        if buffers:
            self.blob = Serialized(file.getvalue(), [_flat(buffer) for buffer in buffers])
        else:
            self.blob = file.getvalue() + PLAIN_END

    def note(self, target: Any) -> Any:
        """A class or function is part of the value. Returns what it is pickled as; NotImplemented: as ever."""
        module, name = getattr(target, "__module__", None) or "builtins", target.__qualname__
        version = provenance(module)
        if version:
            if not version.startswith("python "):
                self.versions[module.partition(".")[0]] = version
            elif module == "builtins" or found_by_name(module, name) is target:
                return NotImplemented
            return NotImplemented
        if "<locals>" in name or "<lambda>" in name:
            raise NotKeptError(f"it holds {module}.{name}, which no other job can find by its name")
        self.needs[module, name] = _digest_of(target)
        if module == "__main__" or found_by_name(module, name) is not target:
            self.rebound = True
            return program_name, (module, name)
        return NotImplemented


class _KeptPickler(Pickler):
    def __init__(self, kept: KeptValue, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept = kept

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, type) or kind in (types.FunctionType, types.BuiltinFunctionType):
            made = self._kept.note(value) if getattr(value, "__qualname__", None) else NotImplemented
            if made is not NotImplemented:
                return made
        elif kind is ObjectRef:
            return self._value_of(value)
        elif kind.__module__ == "hpcray.api.actor_handle":
            raise NotKeptError("it holds an actor handle, and an actor ends with its job")
        return super().reducer_override(value)

    def _value_of(self, ref: Any) -> Any:
        kept = self._kept
        try:
            inner = KeptValue(require_context().reader.get([ref], None)[0])
        except NotKeptError:
            raise
        except Exception as error:
            raise NotKeptError(f"it holds a ref whose value cannot be had: {type(error).__name__}") from None
        size = inner.blob.size if isinstance(inner.blob, Serialized) else len(inner.blob)
        kept.ref_bytes += size + inner.ref_bytes
        if kept.ref_bytes > MAX_REF_BYTES:
            raise NotKeptError(f"it holds refs to more than {MAX_REF_BYTES >> 20} MiB")
        kept.rebound = True
        kept.needs.update(inner.needs)
        kept.versions.update(inner.versions)
        return put_again, (inner.blob.join() if isinstance(inner.blob, Serialized) else inner.blob,)


def put_again(blob: bytes) -> Any:
    """A ref to a value that was kept inside of another one."""
    return require_context().put(deserialize(blob))


def program_name(module: str, name: str) -> Any:
    """A class or function of the program, as it is named now."""
    found = found_by_name(module, name)
    if found is None:
        raise pickle.UnpicklingError(f"there is no {module}.{name} here")
    return found


def found_by_name(module: str, name: str) -> Any:
    """The object that a module has under a qualified name; None for nothing. The module is imported for it."""
    loaded = sys.modules.get(module)
    if loaded is None:
        try:
            loaded = importlib.import_module(module)
        except Exception:  # it may have moved
            return None
    try:
        return attrgetter(name)(loaded)
    except AttributeError:
        return None


def is_current(meta: Meta, known: dict[tuple[str, str], tuple[Any, bytes]]) -> bool:
    """Return True if the classes, functions and packages that a kept value needs are here what they were.

    Args:
        known: what this process has looked at before, by module and name: the class or function, and its digest.
    """
    for module, version in meta.versions:
        if module not in sys.modules:
            try:
                importlib.import_module(module)
            except Exception:  # it is not installed any more
                return False
        if provenance(module) != version:
            return False
    for module, name, wanted in meta.needs:
        found = found_by_name(module, name)
        before, mark = known.get((module, name), (None, b""))
        if before is not found or not mark:
            try:
                mark = _digest_of(found) if found is not None else b"none"
            except NotKeptError:
                mark = b"none"
            known[module, name] = found, mark
        if mark != wanted:
            return False
    return True


def values_digest(values: Sequence[Any]) -> bytes:
    """A digest of the canonical form of values, which shows if two runs had the same result."""
    try:
        return Canonical(lambda ref: Canonical().digest_of(require_context().reader.get([ref], None)[0])).digest_of(
            list(values)
        )
    except NoCanonicalFormError as error:
        return f"no canonical form: {error}".encode()


def _digest_of(target: Any) -> bytes:
    try:
        return Canonical().digest_of(target)
    except NoCanonicalFormError as error:
        raise NotKeptError(f"it holds {target.__module__}.{target.__qualname__}, in which {error}") from None


def _flat(buffer: pickle.PickleBuffer) -> memoryview:
    try:
        return buffer.raw()
    except BufferError:  # not contiguous
        return memoryview(bytes(memoryview(buffer)))


unproved: set[bytes] = set()
"""Keys of calls whose values this process has seen, and that were computed of something else than their keys say: by
other code than the program has, or of files that have changed meanwhile. What is made of such a value is not kept."""


class UnprovedValue:
    """The value of such a call on its way: who unpickles it has the value, and knows of it."""

    def __init__(self, value: Any, key: bytes) -> None:
        self._value, self._key = value, key

    def __reduce__(self) -> tuple[Any, ...]:
        return note_unproved, (self._value, self._key)


def note_unproved(value: Any, key: bytes) -> Any:
    """Return a value, and note that it is not proved to be that of a key."""
    unproved.add(key)
    return value


class Token(msgspec.Struct, array_like=True, frozen=True):
    """The first argument of a durable task, from its submitter to its worker.

    Attributes:
        key: of the result; b"" where the worker has to find it, from the values of its arguments.
        flags: see `durable_tasks`. place: (pack, offset, size) of the record that was found.
        arguments: see `Meta`. refs: what stands for refs inside of arguments, by object id.
        built_on: keys of durable tasks whose refs are among the arguments.
        files: states and content of the files that the function reads, when the key was made.
    """

    key: bytes
    flags: int = 0
    place: tuple[str, int, int] | None = None
    arguments: Sequence[tuple[str, bytes]] = ()
    refs: Sequence[tuple[bytes, bytes]] = ()
    built_on: Sequence[bytes] = ()
    files: tuple[bytes, bytes] = (b"", b"")


encode_token: Callable[[Token], bytes] = msgspec.msgpack.Encoder().encode
decode_token: Callable[[bytes], Token] = msgspec.msgpack.Decoder(Token).decode
__all__ = [
    "KeptValue", "NotKeptError", "SerializationError", "Token", "UnprovedValue", "decode_token", "encode_token",
    "is_current", "is_own_module", "unproved", "values_digest",
]  # fmt: skip
