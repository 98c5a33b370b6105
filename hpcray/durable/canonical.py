"""The canonical form of values and of code: bytes that are equal in each process that has an equal value.

Pickles differ from process to process though the value is the same: sets have another order, strings are shared or not,
classes of a program have random names, code carries the name of its file and its lines. Here each value becomes
tagged bytes that depend on nothing but what a function can see of it.

Functions, classes and global values of the program are *nodes*: each has a label and a digest of its own, in which the
nodes that it names stand as labels. So a key can be explained, and circles of functions that call each other end.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import copyreg
import datetime
import dis
import enum
import functools
import gc
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import marshal
import operator
import os
import pathlib
import pickle
import re
import site
import struct
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle

SCALARS = frozenset({int, float, bool, type(None), str, bytes})
"""Types whose values have canonical bytes without a look into them."""
_ALL_INT, _ALL_TEXT = {int}, {str}
_LARGE = 1 << 16
"""Bytes; larger buffers are hashed by themselves, with the hash that is fastest for them."""
_DROPPED = frozenset(
    {
        "__dict__", "__weakref__", "__module__",
        "__firstlineno__", "__static_attributes__", "__slotnames__", "__annotations_cache__", "_abc_impl",
        "__pydantic_parent_namespace__", "__pydantic_validator__", "__pydantic_serializer__",
        "__pydantic_core_schema__", "__class_getitem_cache__",
    }
)  # fmt: skip
"""Attributes of a class that follow from the rest, or say where it was written."""
_OF_ENUM = frozenset(
    {"_member_map_", "_value2member_map_", "_member_names_", "_unhashable_values_", "_hashable_values_"}
)
_OF_MODULE = frozenset(
    {
        "__name__", "__doc__", "__package__", "__loader__", "__spec__", "__file__", "__cached__", "__path__",
        "__builtins__", "__warningregistry__",
    }
)  # fmt: skip
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
_OF_MEMBER = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_"})
_LIBRARIES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CLOSURE_LOADS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_OF_CLOSURE = "*"
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NOTHING = object()


_NEW_OBJECT = vars(copyreg)["__newobj__"]


class NoCanonicalFormError(TypeError):
    """A value has no canonical form, so no key can be made of it.

    Attributes:
        path: where it is, from the argument or global on. what: it, in words.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path = what, ""

    def at(self, step: str) -> NoCanonicalFormError:
        """The same error, seen from one level further out."""
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        return f"{self.path or 'the value'} is {self.what}"


class NotYetError(Exception):
    """A canonical form depends on a value that does not exist yet."""


class Node(NamedTuple):
    """One part of what a key was made of: a function, a class, a global value."""

    label: str
    digest: bytes


def digest(*parts: bytes) -> bytes:
    """A hash of 32 bytes over parts, each with its length."""
    made = hashlib.blake2b(digest_size=32)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


def buffer_digest(content: Any) -> bytes:
    """A hash of 32 bytes over a contiguous buffer. SHA-256 is twice as fast as the others where the CPU knows it."""
    return hashlib.sha256(content).digest()


def is_plain(values: Sequence[Any]) -> bool:
    """Return True if values consist of lists, tuples, dicts and scalars alone, and no list or dict is in two places.

    It goes through them a level at a time, which is fast: most arguments are of this kind.
    """
    level: Collection[Any] = values
    kinds = {*map(type, values)}
    seen: set[int] = set()
    if len(values) == 1 and kinds <= _SEQUENCES:  # most calls have one argument of this kind
        level = values[0]
        kinds = {*map(type, level)}
        seen.add(id(level))
    count, total = len(seen), 0
    while not kinds <= SCALARS:
        if not kinds <= _PLAIN:
            return False
        if not kinds <= _CONTAINERS:
            level = [item for item in level if type(item) in _CONTAINERS]
        shared = [item for item in level if type(item) is not tuple] if tuple in kinds else level
        seen.update(map(id, shared))
        count += len(shared)
        total += len(level)
        if len(seen) != count or total > _MOST_PLAIN:
            return False
        level = gc.get_referents(*level)
        kinds = {*map(type, level)}
    return True


_SEQUENCES = frozenset({list, tuple})
_CONTAINERS = _SEQUENCES | {dict}
_PLAIN = SCALARS | _CONTAINERS
_MOST_PLAIN = 1 << 20


def scalar_form(value: Any) -> bytes:
    """The canonical bytes of a value of one of `SCALARS`."""
    kind = type(value)
    if kind is float:
        return b"f" + struct.pack("<d", value)
    if kind is str:
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return _sized(b"b", value)
    if kind is not int:
        return _sized(b"i", repr(value).encode())
    return _sized(b"i", b"%d" % value if -(1 << 63) <= value < (1 << 63) else b"%x" % value)


def _sized(tag: bytes, content: Any) -> bytes:
    size = len(content)
    if size > _LARGE:
        return tag + b"\xff\xff\xff" + size.to_bytes(8, "little") + buffer_digest(content)
    return b"".join((tag, size.to_bytes(3, "little"), content))


def plain_form(value: Any) -> bytes:
    """The canonical bytes of a value for which `is_plain` holds.

    Raises:
        ValueError: it is nested too deeply.
    """
    content = marshal.dumps(value, 2)  # version 2 knows nothing of references, nor of which texts are interned
    return b"%" + content if len(content) <= _LARGE else b"^" + buffer_digest(content)


class Canonical:
    """Makes canonical bytes of values that belong together: what two of them share is seen as shared.

    Args:
        ref_key: called with an ObjectRef in a value; bytes that stand for its content. None: refs are refused.
        classes: what stands for classes of the program, so that they need not be described here.

    Attributes:
        nodes: functions, classes and global values that were met, in the order of their first mention.
    """

    def __init__(self, ref_key: Callable[[Any], bytes] | None = None, classes: ClassMarks | None = None) -> None:
        self._ref_key = ref_key
        self._classes = classes
        self._watched: Watch | None = None
        self._parts: list[bytes] = []
        self._memo: dict[int, bytes] = {}
        self._alive: list[Any] = []
        self._labels: dict[str, int] = {}
        self._here = b""
        self._count = 0
        self._by_name = False
        self._undocumented: frozenset[int] = frozenset()
        self.nodes: list[Node | None] = []

    def of(self, value: Any) -> bytes:
        """The canonical bytes of a value.

        Raises:
            NoCanonicalFormError: it, or a part of it, has none.
        """
        outer, self._parts = self._parts, []
        try:
            self._add(value)
            return b"".join(self._parts)
        except (NoCanonicalFormError, NotYetError):
            raise
        except RecursionError:
            raise NoCanonicalFormError("nested too deeply, so it has no canonical form") from None
        except Exception as error:  # code of the user's
            raise NoCanonicalFormError(
                f"a {_class_name(type(value))}, which has no canonical form ({type(error).__name__}: {error})"
            ) from None
        finally:
            self._parts = outer

    def of_function(self, function: Any) -> bytes:
        """The same for a function that runs as a task: its docstring counts only if its own code reads it."""
        self._undocumented = _undocumented(function)
        return self.of(function)

    def finished(self) -> list[Node]:
        """All nodes, complete, in an order that no set of values has a part in."""
        return sorted(node for node in self.nodes if node is not None)

    def digest_of(self, value: Any) -> bytes:
        """A hash over the canonical bytes of a value, and over all nodes."""
        content = self.of(value)
        return digest(content, *(part for node in self.finished() for part in (node.label.encode(), node.digest)))

    # ------------------------------------------------------------ values

    def _add(self, value: Any) -> None:
        kind = type(value)
        if kind in SCALARS:
            self._parts.append(scalar_form(value))
            return
        if kind is tuple:
            self._items(b"t", value)
            return
        known = self._memo.get(id(value))
        if known is not None:
            self._parts.append(known)
            return
        adder = _ADDERS.get(kind)
        if adder is not None:
            adder(self, value)
        else:
            self._other(kind, value)

    def _sized(self, tag: bytes, content: Any) -> None:
        self._parts.append(_sized(tag, content))

    def _remember(self, value: Any, steady: bool = False) -> None:
        """Number a value that can change: the same one, met again, is not another one that is equal.

        Args:
            steady: whether what it holds is watched where that is met.
        """
        if not steady:
            self._watched = None
        self._memo[id(value)] = b"R" + self._here + self._count.to_bytes(4, "little")
        self._count += 1
        self._alive.append(value)

    def _items(self, tag: bytes, values: Any) -> None:
        if len(values) > 1 and {*map(type, values)} <= SCALARS:
            self._parts.append(_sized(b"=" + tag, marshal.dumps(values, 2)))  # exact, and made in C
            return
        self._parts.append(tag + len(values).to_bytes(6, "little"))
        for index, value in enumerate(values):
            try:
                self._add(value)
            except NoCanonicalFormError as error:
                raise error.at(f"[{index}]") from None

    def _list(self, value: list[Any]) -> None:
        self._remember(value)
        self._items(b"l", value)

    def _dict(self, value: dict[Any, Any]) -> None:
        self._remember(value)
        if {*map(type, value), *map(type, value.values())} <= SCALARS:
            self._parts.append(_sized(b"=d", marshal.dumps(value, 2)))
            return
        self._pairs(b"d", value.items(), len(value))

    def _pairs(self, tag: bytes, pairs: Iterable[tuple[Any, Any]], count: int) -> None:
        self._parts.append(tag + count.to_bytes(6, "little"))
        for key, item in pairs:
            try:
                self._add(key)
                self._add(item)
            except NoCanonicalFormError as error:
                raise error.at(f"[{_short(key)}]") from None

    def _set(self, value: set[Any] | frozenset[Any]) -> None:
        if type(value) is set:
            self._remember(value)
        kinds = {*map(type, value)}
        if kinds in (_ALL_TEXT, _ALL_INT):
            self._items(b"S" if type(value) is set else b"Z", sorted(value))
            return
        made = []
        for item in sorted(value, key=_rank) if not kinds <= SCALARS else value:
            try:
                made.append((self._alone(item), item))
            except NoCanonicalFormError as error:
                raise error.at(f"{{{_short(item)}}}") from None
        made.sort(key=lambda pair: pair[0])
        self._parts.append((b"S" if type(value) is set else b"Z") + len(made).to_bytes(6, "little"))
        for content, item in made:
            self._parts.append(len(content).to_bytes(8, "little") + content)
            if type(item) not in SCALARS and id(item) not in self._memo:
                self._remember(item)

    def _alone(self, item: Any) -> bytes:
        """The bytes of one element of a set, which do not depend on the elements before it."""
        count, here = self._count, self._here
        memo, self._memo = self._memo, dict(self._memo)
        self._here, self._count = here + b"e", 0
        try:
            return self.of(item)
        finally:
            for name, mention in self._memo.items():  # functions and classes are described once, wherever it is
                if mention[:1] == b"N":
                    memo.setdefault(name, mention)
            self._memo, self._here, self._count = memo, here, count

    def _bytearray(self, value: bytearray) -> None:
        self._remember(value)
        self._sized(b"y", value)

    def _complex(self, value: complex) -> None:
        self._parts.append(b"c" + struct.pack("<dd", value.real, value.imag))

    def _constant(self, value: Any) -> None:
        self._sized(b"k", repr(value).encode())

    def _slice(self, value: slice) -> None:
        self._items(b":", (value.start, value.stop, value.step))

    def _range(self, value: range) -> None:
        self._items(b"r", (value.start, value.stop, value.step))

    def _view(self, value: Any) -> None:
        """A memoryview, or a buffer of a pickle."""
        view = memoryview(value)
        self._parts.append(b"v" + f"{view.format} {view.shape}".encode())
        self._sized(b"v", view if view.c_contiguous and view.format == "B" and view.ndim == 1 else view.tobytes())

    def _proxy(self, value: Mapping[Any, Any]) -> None:
        self._remember(value)
        self._pairs(b"p", value.items(), len(value))

    def _module(self, value: types.ModuleType) -> None:
        if is_own_module(value):
            self._own_module(value)
        else:
            self._named(b"M", value.__name__, "")

    def _named(self, tag: bytes, module: str, name: str) -> None:
        """Something that an installed package has, or Python: its name says what it is, its version which."""
        self._sized(tag, f"{module}\0{name}\0{self._version(module)}".encode())

    def _version(self, module: str) -> str:
        version = provenance(module)
        label = f"package {module.partition('.')[0]}"
        if label not in self._labels and not version.startswith("python"):
            self._labels[label] = 1
            self.nodes.append(Node(label, version.encode()))
        return version

    # ------------------------------------------------------------ other objects

    def _other(self, kind: type, value: Any) -> None:
        if isinstance(value, type):
            self._class(value)
            return
        if isinstance(value, enum.Enum):
            self._remember(value, steady=True)
            self._parts.append(b"E")
            self._class(kind)
            self._add(value._name_)  # `name` is slow
            self._add(value._value_)
            return
        if self._classes is not None and self._classes.is_simple(kind) and self._simple_object(kind, value):
            return
        if (special := _special(kind, value)) is not None:
            special(self, value)
            return
        if isinstance(value, types.ModuleType):
            self._module(value)
            return
        for base, adder in _DESCRIPTORS.items():
            if isinstance(value, base):
                self._add(kind)
                adder(self, value)
                self._step("", _raw_state(value))
                return
        self._object(kind, value)

    def _simple_object(self, kind: type, value: Any) -> bool:
        """An object that is its class and its attributes. Returns False where its class is no longer simple."""
        mention = self._memo.get(id(kind)) or self._mention_of_class(kind)
        if kind in copyreg.dispatch_table or not self._classes.is_simple(kind):  # type: ignore[union-attr]
            return False
        self._remember(value)
        self._parts.append(b"o" + mention)
        self._attributes(value.__dict__)
        return True

    def _mention_of_class(self, kind: type) -> bytes:
        classes = self._classes
        assert classes is not None
        mention = self._memo[id(kind)] = b"c" + (classes.known(kind) or classes.mark(kind))
        return mention

    def _object(self, kind: type, value: Any) -> None:
        """An object that is described as its pickle is."""
        self._remember(value)
        try:
            reduced = _reduce(kind, value)
        except NoCanonicalFormError:
            raise
        except Exception as error:
            raise NoCanonicalFormError(f"a {_class_name(kind)}, which has no canonical form ({error})") from None
        if isinstance(reduced, str):
            self._global_object(kind, value, reduced)
            return
        self._parts.append(b"O")
        if isinstance(value, (set, frozenset)) and len(reduced) > 1 and [*map(type, reduced[1])] == [list]:
            reduced = (reduced[0], (frozenset(reduced[1][0]),), *reduced[2:])
        self._reduced(kind, reduced)
        if self._by_name and _pickles_itself(kind):
            self._hidden(value)

    def _global_object(self, kind: type, value: Any, name: str) -> None:
        """An object that pickles as its name: its state counts where it is the program's."""
        module = getattr(value, "__module__", None) or pickle.whichmodule(value, name)  # type: ignore[attr-defined]
        self._parts.append(b"G")
        self._sized(b"g", kind.__name__.encode())
        if not is_own_module(module):
            self._named(b"g", module, name)
            return
        self._sized(b"g", name.encode())
        if kind.__module__ in ("typing", "typing_extensions"):
            for attribute in ("__bound__", "__constraints__", "__covariant__", "__contravariant__", "__supertype__"):
                self._step(f".{attribute}", getattr(value, attribute, None))
            return
        loaded = sys.modules.get(module)
        if loaded is None or getattr(loaded, name, None) is not value:
            raise NoCanonicalFormError(f"a {_class_name(kind)}, which is not to be found as {module}.{name}")
        self._library(module)
        self._add(kind)
        self._hidden(value)

    def _hidden(self, value: Any) -> None:
        """The state of an object as the code that finds it by its name sees it, whatever its pickle holds."""
        self._parts.append(b"h")
        for name, item in _raw_state(value):
            self._add(name)
            try:
                self._parts.append(self.of(item))
            except NoCanonicalFormError:
                self._sized(b"h", type(item).__name__.encode())

    def _reduced(self, kind: type, reduced: tuple[Any, ...]) -> None:
        function, arguments, *rest = reduced
        state: Any
        items: Any
        pairs: Any
        setter: Any
        state, items, pairs, setter, *_ = (*rest, None, None, None, None)
        self._alive.append(reduced)
        if function is _NEW_OBJECT:  # that of nearly all classes
            self._parts.append(b"_" + len(arguments).to_bytes(6, "little"))
            for argument in arguments:
                self._step("", argument)
        else:
            self._step("", function)
            self._step("" if getattr(function, "__name__", "") == "__newobj_ex__" else "()", arguments)
        if isinstance(state, tuple) and [*map(type, state)] in ([dict, dict], [type(None), dict]):
            state = {**(state[0] or {}), **state[1]}  # that of slots, which a class that travelled by value may lack
        if isinstance(state, dict):
            self._parts.append(b"{D")
            self._attributes(state)
        else:
            self._parts.append(b"{S")
            self._step(".state", state)
        if items is pairs is setter is None:
            self._parts.append(b".")
            return
        self._parts.append(b"I")
        for index, item in enumerate(items or ()):
            self._step(f"[{index}]", item)
        self._parts.append(b"P")
        for key, item in pairs or ():
            self._add(key)
            self._step(f"[{_short(key)}]", item)
        self._parts.append(b".")
        if setter is not None:
            self._step(".setter", setter)

    def _attributes(self, state: dict[Any, Any]) -> None:
        """Names, and then values: most are scalars, which are written at once."""
        values = (*state.values(),)
        if (names := _form_of_names(*state)) is not None:
            self._parts.append(names)
        else:
            self._items(b"t", (*state,))
        if {*map(type, values)} <= SCALARS:
            self._items(b"t", values)
            return
        self._parts.append(b"a")
        for name, value in zip(state, values, strict=True):
            try:
                self._add(value)
            except NoCanonicalFormError as error:
                raise error.at(f".{name}") from None

    def _step(self, step: str, value: Any) -> None:
        try:
            self._add(value)
        except NoCanonicalFormError as error:
            raise error.at(step) from None

    # ------------------------------------------------------------ arrays and tensors

    def _array(self, value: Any) -> None:
        self._remember(value)
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        kind = value.dtype
        self._parts.append(b"A" + (b"F" if fortran else b"C") + f"{value.shape}".encode())
        if kind.names is None and kind.kind in "biufcSUmMV" and kind.metadata is None and kind.subdtype is None:
            self._sized(b"T", kind.str.encode())
        else:
            self._step(".dtype", kind)
        if kind.hasobject:
            self._items(b"o", value.ravel("F" if fortran else "C").tolist())
            return
        if value.nbytes <= _LARGE:
            self._sized(b"B", value.tobytes("F" if fortran else "C"))
            return
        flat = value.ravel("F" if fortran else "C")  # no copy where it is contiguous
        self._sized(b"B", memoryview(flat.view("u1")))

    def _tensor(self, value: Any) -> None:
        self._remember(value)
        torch = sys.modules["torch"]
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise NoCanonicalFormError(f"a tensor of layout {value.layout}, which has no canonical form")
        device = value.device.type
        steps = "" if value.is_contiguous() else str(value.stride())
        self._add(type(value))
        self._sized(b"X", f"{value.dtype} {tuple(value.shape)} {steps} {value.requires_grad} {device}".encode())
        content = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        self._sized(b"B", memoryview(content.view(torch.uint8).numpy()) if content.numel() else b"")
        if extra := getattr(value, "__dict__", None):
            self._step(".__dict__", extra)

    # ------------------------------------------------------------ nodes

    def _node(self, label: str, value: Any, fill: Callable[[], None]) -> None:
        """Mention a node, and describe it if it is new."""
        number = self._labels[label] = self._labels.get(label, 0) + 1
        name = label if number == 1 else f"{label} #{number}"
        mention = b"N" + digest(name.encode())[:12]
        self._memo[id(value)] = mention
        self._alive.append(value)
        self._parts.append(mention)
        slot = len(self.nodes)
        self.nodes.append(None)
        parts, here, count, by_name = self._parts, self._here, self._count, self._by_name
        self._parts, self._here, self._count = [], mention, 0
        try:
            fill()
            self.nodes[slot] = Node(name, digest(b"".join(self._parts)))
        except NoCanonicalFormError as error:
            raise error.at(f"{label}: " if label.startswith(("global", "closure", "default")) else "") from None
        finally:
            self._parts, self._here, self._count, self._by_name = parts, here, count, by_name

    def _value_node(self, label: str, value: Any) -> None:
        """A value by name. Functions and classes are nodes themselves."""
        if isinstance(value, (type, types.FunctionType, types.ModuleType)) or id(value) in self._memo:
            self._step(f"{label}: ", value)
            return
        self._node(label, _Mention(), lambda: self._add(value))

    def _function(self, value: types.FunctionType) -> None:
        own = is_own_file(value.__code__.co_filename, _module_of(value))
        plain = not value.__closure__ and not value.__dict__ and not value.__defaults__ and not value.__kwdefaults__
        if not own and plain and "<locals>" not in value.__qualname__:
            self._named(b"m", value.__module__ or "", value.__qualname__)
            return
        registry = getattr(value, "registry", None)
        if registry is not None and isinstance(registry, types.MappingProxyType) and not own:
            self._node(f"function {value.__qualname__}", value, lambda: self._dispatch(registry))
            return
        self._node(f"function {value.__qualname__}", value, lambda: self._whole_function(value, own))

    def _dispatch(self, registry: Mapping[Any, Any]) -> None:
        """Add the function of each class that `functools.singledispatch` chooses from."""
        for kind, function in registry.items():
            self._add(kind)
            self._add(function)

    def _whole_function(self, value: types.FunctionType, own: bool) -> None:
        code = value.__code__
        self._by_name = _is_found_by_name(value)
        if self._watched is not None:
            self._watched.function(value)
        if own:
            self._code(code)
            if id(value) not in self._undocumented:
                self._add(value.__doc__)
        else:
            self._named(b"m", value.__globals__.get("__name__", ""), value.__qualname__)
            self._sized(b"C", code.co_code)
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            self._add(name)
            try:
                content = cell.cell_contents
            except ValueError:
                self._parts.append(b"empty")
                continue
            watched = self._watched
            self._value_node(f"closure {value.__name__}.{name}", content)
            if not own and name == "repr_running":  # of dataclasses: those of which a text is being made
                self._watched = watched
        names = code.co_varnames[: code.co_argcount]
        defaults = value.__defaults__ or ()
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            self._value_node(f"default {value.__name__}({name})", default)
        for name, default in sorted((value.__kwdefaults__ or {}).items()):
            self._value_node(f"default {value.__name__}({name})", default)
        self._parts.append(b"a")
        for name, item in value.__dict__.items():
            self._add(name)
            self._step(f"{value.__name__}.{name}", item)
        watched = self._watched
        for name, item in value.__annotations__.items() if own else ():
            self._add(name)
            try:
                self._parts.append(self.of(item))
            except NoCanonicalFormError:
                self._sized(b"h", type(item).__name__.encode())
        self._watched = watched
        if own:
            self._reads(value)

    def _watch_name(self, scope: dict[str, Any], name: str) -> None:
        if self._watched is not None:
            self._watched.name(scope, name)

    def _reads(self, value: types.FunctionType) -> None:
        """The global names that a function reads, with their values now."""
        cells = {}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                cells[name] = cell.cell_contents
            except ValueError:
                continue
        scope, built_in = value.__globals__, vars(builtins)
        self._parts.append(b"u")
        for chain in sorted(set(_chains(value.__code__))):
            if chain[0] == "import":
                self._imported(chain[1], int(chain[2]), chain[3:], scope)
                continue
            name = chain[0]
            if name.startswith(_OF_CLOSURE):
                name = name[1:]
                found = cells.get(name)
                if not isinstance(found, types.ModuleType):
                    continue  # it is described as a closure
            elif name in scope:
                found = scope[name]
                self._watch_name(scope, name)
            else:
                self._watch_name(scope, name)
                self._watch_name(built_in, name)
                if name not in built_in or not _is_of_the_program(built_in[name]):
                    self._add(f"builtin {name}" if name in built_in else f"missing {name}")
                    continue
                found = built_in[name]
            self._chain(name, found, chain[1:])

    def _chain(self, name: str, found: Any, rest: tuple[str, ...]) -> None:
        """A global, and the attributes of modules that code reaches from it."""
        self._add(name)
        by_name = self._by_name
        try:
            for attribute in rest:
                if not isinstance(found, types.ModuleType):
                    break
                following = self._attribute(found, attribute)
                if not is_own_module(found) and not _is_of_the_program(following):
                    if isinstance(following, type) and _patches(following):
                        self._step(f"global {name}.{attribute}: ", following)
                    break
                if following is _NOTHING:
                    self._add(f"missing {attribute}")
                    return
                self._by_name = found.__name__ not in _by_value()
                name, found = f"{name}.{attribute}", following
                self._add(name)
            self._value_node(f"global {name}", found)
        finally:
            self._by_name = by_name

    def _attribute(self, module: types.ModuleType, name: str) -> Any:
        """An attribute of a module, which may make it when it is asked for."""
        found = vars(module).get(name, _NOTHING)
        self._watch_name(vars(module), name)
        plain = type(module) is types.ModuleType
        if (found is not _NOTHING and plain) or not is_own_module(module):
            return found
        if not plain:
            self._add(type(module))
        elif (made_by := vars(module).get("__getattr__")) is not None:
            self._value_node("global __getattr__", made_by)
        else:
            return found
        try:
            return getattr(module, name, _NOTHING)
        except Exception as error:  # code of the user's
            self._add(f"fails {type(error).__name__}")
            return _NOTHING

    def _imported(self, module: str, level: int, names: tuple[str, ...], scope: Mapping[str, Any]) -> None:
        """An import inside of a function: of an installed package, or of a module of the program's."""
        if level:
            package = scope.get("__package__") or scope.get("__name__", "").rpartition(".")[0]
            try:
                module = importlib.util.resolve_name("." * level + module, package)
            except (ImportError, ValueError):
                self._add(f"missing {module}")
                return
        self._add(f"import {module}")
        loaded: Any = sys.modules.get(module)
        if loaded is None:
            try:
                if importlib.util.find_spec(module) is None:
                    self._add("missing")
                    return
                loaded = importlib.import_module(module)
            except Exception as error:  # the program's own code runs
                self._add(f"fails {type(error).__name__}")
                return
        if not isinstance(loaded, types.ModuleType):  # one that has put an object in its place
            self._value_node(f"global {module}", loaded)
            return
        if not is_own_module(loaded):
            self._named(b"M", module, "")
            return
        if names == (_WHOLE,) or not names:
            if not names and "." in module:  # `import a.b` binds `a`
                self._step("", sys.modules[module.partition(".")[0]])
            self._own_module(loaded)
            return
        for name in names:
            found = self._attribute(loaded, name)
            if found is _NOTHING:
                found = self._submodule(f"{module}.{name}")
            self._chain(f"{module.rpartition('.')[2]}.{name}", found, ())

    def _submodule(self, module: str) -> types.ModuleType | None:
        with contextlib.suppress(Exception):  # the program's own code runs
            if importlib.util.find_spec(module) is not None:
                return importlib.import_module(module)
        return None

    def _own_module(self, module: types.ModuleType) -> None:
        """A module of the program's that is used as a value: everything in it counts."""
        known = self._memo.get(id(module))
        if known is not None:
            self._parts.append(known)
            return
        self._watched = None
        self._node(f"module {module.__name__.rpartition('.')[2]}", module, lambda: self._module_content(module))

    def _module_content(self, module: types.ModuleType) -> None:
        if type(module) is not types.ModuleType:
            self._add(type(module))
        for name, found in sorted(vars(module).items()):
            if name in _OF_MODULE:
                continue
            if isinstance(found, types.ModuleType):
                self._add(name)
                if is_own_module(found):
                    self._own_module(found)
                else:
                    self._named(b"M", found.__name__, "")
                continue
            self._add(name)
            self._value_node(f"global {module.__name__.rpartition('.')[2]}.{name}", found)

    def _class(self, value: type) -> None:
        known = self._memo.get(id(value))
        if known is not None:
            self._parts.append(known)
            return
        if self._classes is not None and self._classes.knows(value):
            self._parts.append(self._mention_of_class(value))
            return
        module = value.__module__ if isinstance(value.__module__, str) else "builtins"
        if not is_own_module(module):
            self._named(b"K", module, value.__qualname__)
            for name, item in _patches(value) if self._here else ():
                self._add(name)
                self._add(item)
            return
        if self._classes is not None:
            self._parts.append(self._mention_of_class(value))
            return
        if self._watched is not None:
            self._watched.class_(value)
        # cloudpickle gives a class inside of a function its short name only
        name = value.__name__ if "<locals>" in value.__qualname__ else value.__qualname__
        self._node(f"class {name}", value, lambda: self._whole_class(value, name))

    def _whole_class(self, value: type, qualified: str) -> None:
        self._add(qualified)
        self._library(value.__module__)
        self._add(type(value))
        self._items(b"t", value.__bases__)
        if issubclass(value, enum.Enum):
            members = set(value.__members__)
            by_name = _is_found_by_name(value)
            for name, member in value.__members__.items():
                self._add(name)
                self._step(f".{name}", member._value_)
                for attribute, item in vars(member).items() if by_name else ():
                    if attribute not in _OF_MEMBER:
                        self._add(attribute)
                        self._step(f".{name}.{attribute}", item)
        else:
            members = set()
        if _is_found_by_name(value):  # else a worker has them sorted
            self._items(b"t", [name for name, item in vars(value).items() if name[:2] != "__" and not callable(item)])
        if type(value) is not type:
            self._stored(value, (type, object))
        if "_abc_impl" in vars(value):
            registered = (found() for found in _abc_dump(value)[0])
            for kind in sorted((kind for kind in registered if kind is not None), key=_rank):
                self._add(kind)
        for name, item in sorted(vars(value).items()):
            if name in _DROPPED or name in members or (name in _OF_ENUM and issubclass(value, enum.Enum)):
                continue
            if type(item) is types.MemberDescriptorType or (name == "__hash__" and _is_hash_of_attrs(item)):
                continue  # it follows from `__slots__`, or from the fields
            self._add(name)
            watched = self._watched
            self._step(f"{qualified}.{name}: ", _Attribute(item) if name == "__slots__" else item)
            if name[:2] == "__" or name in _OF_ENUM:  # what made the class has written it, and nobody does later
                self._watched = watched

    def _stored(self, value: Any, known: Sequence[type] = ()) -> None:
        """Add the attributes that a class, or an object of a class, has that is written in C."""
        for base in type(value).__mro__:
            for name, item in sorted(vars(base).items()) if base not in known else ():
                if type(item) not in _STORED or name in _DROPPED:
                    continue
                self._add(name)
                found = getattr(value, name, None)
                try:
                    self._parts.append(self.of(found))
                except NoCanonicalFormError:
                    self._add(type(found))
                    if not known:
                        raise
                    self._stored(found)

    def _code(self, code: types.CodeType) -> None:
        """Add the instructions of a function, without the place where it was written and without its docstring."""
        steps, used = _instructions(code)
        self._items(
            b"t",
            (
                code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_HAS_DOCSTRING,
                steps, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars,
                getattr(code, "co_exceptiontable", b""),
            ),
        )  # fmt: skip
        self._parts.append(len(used).to_bytes(4, "little"))
        for index in used:
            constant = code.co_consts[index]
            if isinstance(constant, types.CodeType):
                self._add(constant.co_name)
                self._code(constant)
                self._add(_docstring(constant))
            else:
                self._add(constant)

    # ------------------------------------------------------------ kinds of callables and descriptors

    def _pair(self, tag: bytes, *values: Any) -> None:
        self._parts.append(tag)
        for value in values:
            self._add(value)

    def _wrapped(self, value: Any) -> None:
        self._remember(value, steady=True)
        self._pair(b"w", type(value).__name__, value.__func__)

    def _property(self, value: property) -> None:
        self._remember(value, steady=True)
        self._pair(b"q", value.fget, value.fset, value.fdel)

    def _cached_property(self, value: Any) -> None:
        self._remember(value, steady=True)
        self._pair(b"Q", value.func, value.attrname)

    def _method(self, value: types.MethodType) -> None:
        self._pair(b"n", value.__self__, value.__func__)

    def _builtin(self, value: types.BuiltinFunctionType) -> None:
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            module = value.__module__ or getattr(owner, "__name__", "builtins")
            loaded = sys.modules.get(module)
            if loaded is not None and is_own_module(loaded):
                self._own_library(loaded, value.__name__)
            else:
                self._named(b"m", module, value.__qualname__)
        else:
            self._pair(b"n", owner, value.__name__)

    def _own_library(self, module: types.ModuleType, name: str) -> None:
        """A function of an extension module that the program has built itself."""
        self._library(module.__name__)
        self._add(name)

    def _library(self, module: str) -> None:
        """Where a module of the program's is compiled, its file stands for all that it defines."""
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None and file.endswith(_LIBRARIES):
            with open(file, "rb") as opened:
                self._parts.append(b"L" + buffer_digest(opened.read()))

    def _descriptor(self, value: Any) -> None:
        owner = value.__objclass__
        self._add(type(value).__name__)
        self._add(value.__name__)
        if not is_own_module(owner.__module__):
            self._add(owner)

    def _cached(self, value: Any) -> None:
        self._remember(value, steady=True)
        self._pair(b"C", value.__wrapped__, value.cache_parameters())

    def _ref(self, value: Any) -> None:
        if self._ref_key is None:
            raise NoCanonicalFormError("an ObjectRef, which has no canonical form here")
        self._parts.append(b"@" + self._ref_key(value))

    def _remote_function(self, value: Any) -> None:
        self._remember(value)
        self._pair(b"F", value._function, dict(value._options.given))

    def _refused(self, value: Any) -> None:
        raise NoCanonicalFormError(f"a {_class_name(type(value))}, which has no canonical form")

    def _type_variable(self, value: Any) -> None:
        self._remember(value)
        form = [getattr(value, f"__{name}__", None) for name in ("name", "bound", "covariant", "contravariant")]
        self._pair(b"V", type(value).__name__, *form, getattr(value, "__constraints__", None))

    def _struct(self, value: struct.Struct) -> None:
        self._pair(b"<", value.format)

    def _environ(self, value: Any) -> None:
        """The environment is not covered."""
        self._named(b"m", "os", "environ")

    def _pattern(self, value: re.Pattern[Any]) -> None:
        self._pair(b"/", value.pattern, value.flags)

    def _date(self, value: Any) -> None:
        self._sized(b"D", f"{type(value).__name__} {value!r}".encode())

    def _time(self, value: datetime.datetime | datetime.time) -> None:
        if value.tzinfo is None:
            self._date(value)
        else:
            self._object(type(value), value)


@functools.lru_cache(1 << 12, typed=True)
def _form_of_names(*names: Any) -> bytes | None:
    """The canonical bytes of the names of attributes; None where one is no text."""
    return _sized(b"=n", marshal.dumps(names, 2)) if {*map(type, names)} <= _ALL_TEXT else None


class _Mention:
    """Stands for a value that has a node of its own for a name, though it may be met again without it."""


class _Attribute:
    """`__slots__` of a class: names in any kind of container."""

    def __init__(self, names: Any) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)


Adder = Callable[[Canonical, Any], None]

_ADDERS: dict[type, Adder] = {
    list: Canonical._list,
    dict: Canonical._dict,
    set: Canonical._set,
    frozenset: Canonical._set,
    bytearray: Canonical._bytearray,
    complex: Canonical._complex,
    type(...): Canonical._constant,
    type(NotImplemented): Canonical._constant,
    slice: Canonical._slice,
    range: Canonical._range,
    memoryview: Canonical._view,
    pickle.PickleBuffer: Canonical._view,
    types.MappingProxyType: Canonical._proxy,
    types.ModuleType: Canonical._module,
    types.FunctionType: Canonical._function,
    types.CodeType: Canonical._code,
    types.MethodType: Canonical._method,
    types.BuiltinFunctionType: Canonical._builtin,
    types.WrapperDescriptorType: Canonical._descriptor,
    types.MethodDescriptorType: Canonical._descriptor,
    types.ClassMethodDescriptorType: Canonical._descriptor,
    types.MemberDescriptorType: Canonical._descriptor,
    types.GetSetDescriptorType: Canonical._descriptor,
    staticmethod: Canonical._wrapped,
    classmethod: Canonical._wrapped,
    property: Canonical._property,
    functools.cached_property: Canonical._cached_property,
    functools._lru_cache_wrapper: Canonical._cached,
    re.Pattern: Canonical._pattern,
    struct.Struct: Canonical._struct,
    type(os.environ): Canonical._environ,
    typing.TypeVar: Canonical._type_variable,
    typing.ParamSpec: Canonical._type_variable,
    datetime.date: Canonical._date,
    datetime.timedelta: Canonical._date,
    datetime.datetime: Canonical._time,
    datetime.time: Canonical._time,
    _Attribute: lambda made, value: made._items(b"t", value.names),
    types.GeneratorType: Canonical._refused,
    types.CoroutineType: Canonical._refused,
    types.FrameType: Canonical._refused,
    types.TracebackType: Canonical._refused,
}


_DESCRIPTORS: dict[type, Adder] = {
    property: Canonical._property,
    staticmethod: Canonical._wrapped,
    classmethod: Canonical._wrapped,
    functools.cached_property: Canonical._cached_property,
}
"""For their subclasses."""


class Watch:
    """Sees whether everything that a description was made of is still the same objects.

    A look takes a few microseconds, as nearly all of it happens in C.
    """

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._attributes: list[str] = []
        self._tables: list[Mapping[Any, Any]] = []
        self._empty: list[Mapping[Any, Any]] = []
        self._scopes: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._registered: object = None
        self._before: list[Any] = []

    def function(self, function: types.FunctionType) -> None:
        """Its code, defaults, docstring, attributes and closure count."""
        self._add(function, _OF_FUNCTION)
        for table in (vars(function), function.__kwdefaults__ or {}):
            (self._tables if table else self._empty).append(table)
        for cell in function.__closure__ or ():
            self._add(cell, ("cell_contents",))

    def class_(self, kind: type) -> None:
        """Its attributes, bases and name count, and those that an abstract class has registered."""
        self._add(kind, _OF_CLASS)
        self._tables.append(vars(kind))
        if "_abc_impl" in vars(kind):
            self._registered = abc.get_cache_token()

    def name(self, scope: dict[str, Any], name: str) -> None:
        """The object that a namespace has under a name counts."""
        self._scopes.append(scope)
        self._names.append(name)

    def _add(self, owner: Any, attributes: Sequence[str]) -> None:
        self._owners.extend([owner] * len(attributes))
        self._attributes.extend(attributes)

    def settle(self) -> None:
        """Take everything as it is now for what was described."""
        self._before = self._now()

    def holds(self) -> bool:
        """Return True if everything is what it was."""
        if any(self._empty) or (self._registered is not None and self._registered != abc.get_cache_token()):
            return False
        try:
            now = self._now()
        except ValueError:  # a cell that has been emptied
            return False
        return len(now) == len(self._before) and all(map(operator.is_, now, self._before))

    def _now(self) -> list[Any]:
        return [
            *map(getattr, self._owners, self._attributes),
            *itertools.chain.from_iterable(self._tables),
            *itertools.chain.from_iterable(map(_VALUES, self._tables)),
            *map(dict.get, self._scopes, self._names, itertools.repeat(_NOTHING)),
        ]


_OF_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__dict__", "__doc__")
_OF_CLASS = ("__class__", "__bases__", "__name__", "__qualname__")
_VALUES = operator.methodcaller("values")


class ClassMarks:
    """Digests of classes that are met again and again. A class is described anew when anything in it, or that it
    names, is another object than it was; and each time, where it holds what can change unseen, such as a list.
    """

    def __init__(self) -> None:
        self._known: dict[type, tuple[bytes, Watch]] = {}
        self._simple: set[type] = set()

    def is_simple(self, kind: type) -> bool:
        """Return True for a class whose objects consist of their attributes, as it was when it was last described."""
        if kind in self._simple:
            return True
        if not all(base is object or _is_simple(base) for base in kind.__mro__):
            return False
        if len(self._simple) >= _MOST_CLASSES:
            self._simple.clear()
        self._simple.add(kind)
        return True

    def knows(self, kind: type) -> bool:
        """Return True if a class has been described before."""
        return kind in self._known

    def known(self, kind: type) -> bytes | None:
        """The digest of a class that has been described before and is still the same; else None."""
        known = self._known.get(kind)
        return known[0] if known is not None and known[1].holds() else None

    def mark(self, kind: type) -> bytes:
        """The digest of a class of the program's.

        Raises:
            NoCanonicalFormError: a part of it has no canonical form.
        """
        form = Canonical()
        watch = form._watched = Watch()
        mark = form.digest_of(kind)
        self._known.pop(kind, None)
        self._simple.discard(kind)
        if len(self._known) >= _MOST_CLASSES:
            self._known.clear()
        if form._watched is watch and _is_whole(watch):
            self._known[kind] = mark, watch
        return mark


def _is_simple(kind: type) -> bool:
    """Return True for a class of the program's that leaves it to Python what its objects consist of."""
    content = vars(kind)
    return (
        isinstance(kind.__module__, str)
        and is_own_module(kind.__module__)
        and not any(name in content for name in _SPECIAL)
        and type(content.get("__dict__")) in (types.GetSetDescriptorType, type(None))
    )


_SPECIAL = (*_PICKLING, "__slots__", "__class__", "__getattribute__")


def _is_whole(watch: Watch) -> bool:
    try:
        watch.settle()
    except ValueError:  # an empty cell
        return False
    return True


_MOST_CLASSES = 1000


def register(kind: type, adder: Adder) -> None:
    """Say how values of exactly one class are written."""
    _ADDERS[kind] = adder


_OURS: dict[str, Adder] = {
    "ObjectRef": Canonical._ref,
    "RemoteFunction": Canonical._remote_function,
    "ActorHandle": Canonical._refused,
    "ActorMethod": Canonical._refused,
    "ObjectRefGenerator": Canonical._refused,
    "PlacementGroup": Canonical._refused,
}
"""Classes of hpcray by name: those above this room cannot be imported here."""


def _special(kind: type, value: Any) -> Adder | None:
    """How a value is written whose class is known by name only, so that its package need not be imported."""
    module = kind.__module__.partition(".")[0]
    if module == "numpy" and kind is getattr(sys.modules.get("numpy"), "ndarray", None):
        register(kind, Canonical._array)
        return Canonical._array
    if module == "hpcray" and (adder := _OURS.get(kind.__name__)) is not None:
        register(kind, adder)
        return adder
    if module == "_ctypes" and kind.__name__ == "CField":
        return Canonical._constant
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return Canonical._tensor
    return None


def _reduce(kind: type, value: Any) -> Any:
    if (reducer := copyreg.dispatch_table.get(kind)) is not None:
        return reducer(value)
    return value.__reduce_ex__(4)


def _class_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # code of the user
        text = type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."


def _rank(item: Any) -> tuple[str, str, str]:
    """An order of values that is the same in each process, as far as their names say what they are."""
    kind = type(item)
    named = item if isinstance(item, (type, types.FunctionType)) else kind
    text = item.name if isinstance(item, enum.Enum) else item if kind is str else ""
    return getattr(named, "__module__", "") or "", getattr(named, "__qualname__", ""), str(text)


def _pickles_itself(kind: type) -> bool:
    """Return True if a class of the program's says itself what its pickle holds."""
    return any(
        name in vars(base)
        for base in kind.__mro__[:-1]
        if is_own_module(base.__module__)
        for name in (*_PICKLING, "items", "__iter__")
    )


def _patches(kind: type) -> list[tuple[str, Any]]:
    """Functions of the program's that it has put into a class of a package."""
    return [
        (name, item)
        for name, item in vars(kind).items()
        if isinstance(item, types.FunctionType) and _is_of_the_program(item)
    ]


def _raw_state(value: Any) -> list[tuple[str, Any]]:
    """Attributes of an object, and its content where it is a container."""
    found = [*getattr(value, "__dict__", {}).items()]
    for base in type(value).__mro__:
        for name, item in vars(base).items():
            if isinstance(item, types.MemberDescriptorType) and is_own_module(base.__module__):
                with contextlib.suppress(AttributeError):
                    found.append((name, item.__get__(value)))
    if isinstance(value, dict):
        found.append(("*", [*dict.items(value)]))
    elif isinstance(value, list):
        found.append(("*", [*list.__iter__(value)]))
    elif isinstance(value, set):
        found.append(("*", {*set.__iter__(value)}))
    return found


def _by_value() -> set[str]:
    """The modules whose functions and classes travel to workers by value."""
    return {"__main__", *cloudpickle.list_registry_pickle_by_value()}


def _is_found_by_name(value: types.FunctionType | type) -> bool:
    """Return True if a worker imports a function or class, and has the globals of its module there."""
    module = sys.modules.get(value.__module__ or "")
    if not isinstance(module, types.ModuleType) or module.__name__ in _by_value():
        return False
    if isinstance(value, types.FunctionType) and vars(module) is not value.__globals__:
        return False
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value or getattr(found, "__func__", None) is value


def _module_of(function: types.FunctionType) -> str | None:
    """The module in which a function was made; that of generated code may know by its class only."""
    name = function.__globals__.get("__name__") or function.__module__
    return name if isinstance(name, str) else None


def _is_of_the_program(value: Any) -> bool:
    """Return True for a function, a class or an object of a class that the user has written."""
    if isinstance(value, types.FunctionType):
        module = _module_of(value)
        return module is not None and is_own_file(value.__code__.co_filename, module)
    kind = value if isinstance(value, type) else type(value)
    return not issubclass(kind, types.ModuleType) and is_own_module(kind.__module__)


def _is_hash_of_attrs(item: Any) -> bool:
    """Return True for a method that follows from the attributes of a class, with a number of its process in it."""
    return isinstance(item, types.FunctionType) and item.__code__.co_filename.startswith("<attrs generated")


def _undocumented(function: Any) -> frozenset[int]:
    """The functions that a durable function consists of, by id, if none of them reads a docstring; else none."""
    chain = []
    while isinstance(function, types.FunctionType):
        own = is_own_file(function.__code__.co_filename, _module_of(function))
        if not own or "__doc__" in function.__code__.co_names:
            return frozenset()
        chain.append(id(function))
        function = vars(function).get("__wrapped__")
    return frozenset(chain)


def _docstring(code: types.CodeType) -> str | None:
    """The docstring of a function; any other text that comes first will do as well."""
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None


_HAS_DOCSTRING = 0x4000000
_WITH_CONSTANT = frozenset(dis.hasconst)


def _instructions(code: types.CodeType) -> tuple[bytes, list[int]]:
    """The instructions of code, with constants numbered as they are used, and the index of each of those.

    A constant that is not used, such as a docstring, leaves no trace.
    """
    raw, steps = code.co_code, bytearray()
    used: dict[int, int] = {}
    high = 0
    for at in range(0, len(raw), 2):
        operation, argument = raw[at], raw[at + 1] | high
        if operation == dis.EXTENDED_ARG:
            high = argument << 8
            continue
        high = 0
        if operation in _WITH_CONSTANT:
            argument = used.setdefault(argument, len(used))
        steps.append(operation)
        steps += (argument & 0xFFFFFFFF).to_bytes(4, "little")
    return bytes(steps), list(used)


_IGNORED = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "NOP", "RESUME", "NOT_TAKEN"})
_WHOLE = "*"
_abc_dump: Callable[[type], Any] = vars(importlib.import_module("_abc"))["_get_dump"]
"""Returns the tables of an abstract class; the first is a set of weak references to the registered classes."""
_STORED = frozenset({types.MemberDescriptorType, types.GetSetDescriptorType})
"""Kinds of attributes with which metaclasses that are written in C describe a class."""


def _chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield each name that code reads: a global with the attributes that follow it; for an import "import", the module,
    its level and the names, where "*" is the whole module."""
    chain: list[str] = []
    constants: list[Any] = [None, None]
    steps = [step for step in dis.get_instructions(code) if step.opname not in _IGNORED]
    for index, step in enumerate(steps):
        name = step.opname
        if chain and name in _ATTRIBUTES:
            chain.append(str(step.argval))
            continue
        if chain:
            yield tuple(chain)
            chain = []
        if name in _LOADS:
            chain = [str(step.argval)]
        elif name in _CLOSURE_LOADS:
            chain = [_OF_CLOSURE + str(step.argval)]
        elif name == "IMPORT_NAME":
            level, names = constants
            bound = index + 1 < len(steps) and steps[index + 1].opname == "IMPORT_FROM"  # import a.b as c
            names = names if isinstance(names, tuple) else (_WHOLE,) if bound else ()
            yield ("import", str(step.argval), str(level if isinstance(level, int) else 0), *map(str, names))
        elif step.opcode in _WITH_CONSTANT or name == "LOAD_SMALL_INT":
            constants = [constants[-1], step.argval]
    if chain:
        yield tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _chains(constant)


# ------------------------------------------------------------ provenance
# Where code comes from: Python, an installed package of some version, or the user.

_HPCRAY = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep


@functools.cache
def _roots() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The directories of installed packages, and those of Python itself."""
    paths = sysconfig.get_paths()
    packages = {paths["purelib"], paths["platlib"], site.getusersitepackages(), *site.getsitepackages()}
    python = {paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)}
    packages.update(path for path in sys.path if path.endswith(("/site-packages", "/dist-packages")))
    return _directories(packages), _directories(python)


def _directories(paths: set[str]) -> tuple[str, ...]:
    return tuple(sorted({os.path.join(form, "") for path in paths for form in (path, os.path.realpath(path))}))


@functools.lru_cache(1 << 14)
def _place(file: str) -> str:
    """Return "package", "python" or "own" for a file."""
    packages, python = _roots()
    forms = (file, os.path.realpath(file))
    if any(form.startswith(packages) for form in forms):
        return "package"
    if any(form.startswith(python) for form in forms) or file.startswith("<frozen "):
        return "python"
    return "hpcray" if forms[1].startswith(_HPCRAY) else "own"


def is_own_file(file: str, module: str | None = None) -> bool:
    """Return True if a file with code is the user's, not one of Python, of hpcray or of an installed package.

    Args:
        file: as a code object names it; `<string>` and the like are code that was made by a program.
        module: in which that program runs.
    """
    if file.startswith("<") and not file.startswith("<frozen "):
        loaded = sys.modules.get(module or "")
        return loaded is None or is_own_module(loaded)
    return _is_own(file, module)


@functools.lru_cache(1 << 14)
def _is_own(file: str, module: str | None) -> bool:
    place = _place(file)
    if place == "own":
        return not (module and _beside(file, module))
    return place == "package" and not provenance((module or "").partition(".")[0])


def is_own_module(module: types.ModuleType | str | None) -> bool:
    """Return True if a module is the user's. One that cannot be found is."""
    name = module.__name__ if isinstance(module, types.ModuleType) else module
    return name is None or not provenance(name)


def provenance(name: str) -> str:
    """Return the distributions to which a module belongs, with their versions, or Python's; "" if it is the user's."""
    loaded = sys.modules.get(name)
    file = getattr(loaded, "__file__", None) if loaded is not None else None
    if loaded is None and name not in sys.stdlib_module_names:
        loaded = sys.modules.get(name.partition(".")[0])
        file = getattr(loaded, "__file__", None) if loaded is not None else None
    return _provenance(name, file)


@functools.lru_cache(1 << 12)
def _provenance(name: str, file: str | None) -> str:
    top = name.partition(".")[0]
    version = f"python {sys.version_info.major}.{sys.version_info.minor}"
    if top == "__main__" or not top:
        return ""
    if file is None:
        return version if top in sys.stdlib_module_names or top in sys.builtin_module_names else ""
    place = _place(file)
    if place == "python":
        return version
    if place == "hpcray":
        return f"hpcray {_own_version()}"
    return _distributions(top) if place == "package" else _beside(file, name)


def _beside(file: str, module: str) -> str:
    """The distribution whose record, in the same directory, names a file of a module, and its version; "" for none.

    `pip install --target` leaves such directories. What is installed for editing has no record there.
    """
    root = file
    for _ in range(module.count(".") + 1 + os.path.basename(file).startswith("__init__.")):
        root = os.path.dirname(root)
    return _recorded(root).get(os.path.relpath(file, root), "") if root else ""


@functools.cache
def _recorded(root: str) -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name.endswith(".dist-info"):
                one = importlib.metadata.PathDistribution(pathlib.Path(root, name))
                version = f"{one.metadata['Name']} {_whole_version(one)}"
                found.update((str(path), version) for path in one.files or () if path.hash is not None)
    return found


@functools.cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("hpcray")
    except importlib.metadata.PackageNotFoundError:
        return "from a directory"


@functools.cache
def _distributions(top: str) -> str:
    """The distributions that have a top-level module, with their versions; "" for none."""
    try:  # nearly all are named as their module is; the list of all takes half a second
        found = importlib.metadata.distribution(top)
        if any(str(path).startswith((f"{top}/", f"{top}.")) for path in (found.files or ())[:2000]):
            return f"{top} {_whole_version(found)}"
    except importlib.metadata.PackageNotFoundError:
        pass
    names = _all_distributions().get(top, ())
    return ", ".join(f"{name} {_whole_version(importlib.metadata.distribution(name))}" for name in sorted(set(names)))


def _whole_version(found: importlib.metadata.Distribution) -> str:
    """The version of a distribution. One that was installed from a directory or a repository often has the same again
    after an edit: there the files count too."""
    if found.read_text("direct_url.json") is None:
        return str(found.version)
    made = hashlib.sha256()
    for path in sorted(found.files or (), key=str):
        if path.hash is not None and ".dist-info/" not in str(path):
            made.update(f"{path}\0{path.hash.value}\0".encode())
    return f"{found.version}+{made.hexdigest()[:16]}"


@functools.cache
def _all_distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())
