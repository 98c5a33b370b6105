"""Who answers when a module `ray…` is imported: facades, whose names are those of hpcray's modules.

A facade is a module of its own, so that what clients write into `ray.…` or read from it (`__version__`, `__path__`)
does not touch hpcray's modules; the names in it are the very objects of hpcray. Which module of Ray is made of which of
ours says `hpcray.compat.table`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import MutableSequence, Sequence
from types import FrameType, ModuleType
from typing import Any

from hpcray.compat import table

RAY_VERSION = table.RAY_VERSION
LENT = "HPCRAY_RAY_LIBRARIES"
"""Variable: a directory with a package `ray`, as pip unpacks a real wheel, that lends its libraries (`lend`)."""
STANDIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standin")
"""A directory for `sys.path`: a package `ray` and the metadata of a distribution "ray"."""

_NOTHING = object()


class Facade(ModuleType):
    """A module of Ray. Names are looked up in hpcray's modules when they are first asked for."""

    __path__: MutableSequence[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = self._find(name)
        if name not in self.__dict__.get("_changing", ()):
            self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system puts every submodule into its parent; where Ray has a function or class of that name there
        # (`ray.util.placement_group`), that stays.
        if type(value) is Facade and value.__name__ == f"{self.__name__}.{name}":
            own = self._own(name)
            if own is not _NOTHING and not isinstance(own, ModuleType):
                return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        found = {name for name in self.__dict__ if not name.startswith("_") or name.startswith("__")}
        for source in self.__dict__["_sources"]:
            found.update(name for name in dir(source) if not name.startswith("__"))
        return sorted(found | set(table.submodules(self.__name__)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _module, (self.__name__,)

    def _own(self, name: str) -> Any:
        for source in self.__dict__.get("_sources", ()):
            value = getattr(source, name, _NOTHING)
            # Modules of ours are seen only where they are public: `ray.core` would be something else.
            if value is not _NOTHING and (not isinstance(value, ModuleType) or name in getattr(source, "__all__", ())):
                return value
        return _NOTHING

    def _find(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if FINDER.lends(full):
            return importlib.import_module(full)
        value = self._own(name)
        if value is not _NOTHING and not isinstance(value, ModuleType):
            return value
        if table.sources_of(full) is not None:
            try:
                return importlib.import_module(full)
            except ModuleNotFoundError as error:
                raise AttributeError(str(error)) from error
        if value is not _NOTHING:
            return value
        raise AttributeError(table.why_missing(full))


class Finder:
    """For `sys.meta_path`: finds and makes the modules of Ray.

    Attributes:
        lent: the directory that lends Ray's own libraries; "" for none.
    """

    lent = ""

    def lends(self, fullname: str) -> bool:
        """Whether this is a module of a real wheel, which Python's own path finder finds in `ray.__path__`."""
        parts = fullname.split(".", 2)
        return bool(self.lent) and parts[0] == "ray" and len(parts) > 1 and parts[1] in table.LIBRARIES

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of Ray; None for other modules.

        Raises:
            ModuleNotFoundError: hpcray does not have it; but None for `importlib.util.find_spec`, which only asks.
        """
        if fullname != "ray" and not fullname.startswith("ray."):
            return None
        if self.lends(fullname):
            return None
        names = table.sources_of(fullname)
        if names is None or (names and not any(map(_exists, names))):
            if _only_asked():
                return None
            raise ModuleNotFoundError(table.why_missing(fullname), name=fullname)
        spec = importlib.machinery.ModuleSpec(fullname, FINDER, is_package=True)
        if fullname == "ray":
            # The pure-Python libraries of a real wheel are lent from here: Python's own path finder is asked for them.
            spec.submodule_search_locations = [os.path.join(STANDIN, "ray"), *filter(None, [self.lent])]
            spec.origin = os.path.join(STANDIN, "ray", "__init__.py")
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty facade."""
        module = Facade(spec.name)
        module.__spec__ = spec
        module.__loader__ = self  # type: ignore[assignment]
        module.__package__ = spec.name
        module.__path__ = list(spec.submodule_search_locations or ())
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Connect a facade with what it is made of.

        Raises:
            ModuleNotFoundError: this hpcray has none of it. ImportError: what it needs is not installed.
        """
        names = table.sources_of(module.__name__) or ()
        sources = [found for name in names if (found := _import_if_there(name)) is not None]
        if names and not sources:
            raise ModuleNotFoundError(table.why_missing(module.__name__), name=module.__name__)
        first = sources[0] if sources else None
        changing: set[str] = set()
        for source in sources:
            changing.update(getattr(source, "CHANGING", ()))
        module.__dict__.update(
            table.ATTRIBUTES.get(module.__name__, {}),
            _sources=tuple(sources),
            _changing=frozenset(changing),
            __doc__=getattr(first, "__doc__", None) or f"{module.__name__}, by hpcray.",
        )
        public = [name for source in sources for name in getattr(source, "__all__", ())]
        if public:
            module.__dict__["__all__"] = list(dict.fromkeys(public))
        if module.__name__ == "ray":
            module.__file__ = os.path.join(STANDIN, "ray", "__init__.py")


FINDER: Any = Finder()


def lend(directory: str) -> None:
    """Let a real wheel's Tune, Train, Data, Serve and RLlib be imported, on hpcray's Core.

    Only their files are found there: `ray` itself, `ray._raylet` and all else that is Core stay hpcray's. A name of
    Ray's internals that a library imports and hpcray does not have is a ModuleNotFoundError or ImportError that names
    it. Workers know of it by the variable HPCRAY_RAY_LIBRARIES, which this sets for what is started from here.

    Args:
        directory: holds a directory `ray`, as `pip install --no-deps --target DIRECTORY ray==2.60.0` makes it.

    Raises:
        ImportError: there is none, or of another version. Nothing is changed.
    """
    package = os.path.join(os.path.abspath(directory), "ray")
    try:
        with open(os.path.join(package, "_version.py"), encoding="utf-8") as file:
            found = re.search(r"^version = ['\"]([^'\"]+)", file.read(), re.MULTILINE)
    except OSError as error:
        text = f"{directory!r} does not hold the package ray of a real wheel ({error})"
        raise ImportError(text, name="ray") from error
    version = found.group(1) if found else "of an unknown version"
    if version != RAY_VERSION:
        raise ImportError(
            f"the package ray in {directory!r} is {version}, and hpcray has the names of {RAY_VERSION}; hint: "
            f"pip install --no-deps --target DIRECTORY ray=={RAY_VERSION}",
            name="ray",
        )
    FINDER.lent = package
    os.environ[LENT] = os.path.abspath(directory)
    ray = sys.modules.get("ray")
    if isinstance(ray, Facade) and package not in ray.__path__:
        ray.__path__.append(package)


def _module(name: str) -> ModuleType:
    """A facade that travelled; the process it arrives in may not have imported `ray` yet."""
    from hpcray.compat import install

    install()
    return importlib.import_module(name)


def _exists(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor is what it would be in
        return False


def _import_if_there(name: str) -> ModuleType | None:
    """A module; None when there is no such module, but not when something that it needs is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def _only_asked() -> bool:
    """Whether the import system was asked by `importlib.util.find_spec`, which is answered with None."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code.co_name == "find_spec" and frame.f_globals.get("__name__") == "importlib.util":
            return True
        frame = frame.f_back
    return False
