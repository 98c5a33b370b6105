"""Import of Ray's modules: a finder for `sys.meta_path`, and the facade modules that it makes.

A facade is a module object of its own, so that attributes that programs set on `ray.…` or read from it (`__version__`,
`__path__`) do not touch hpcray's modules; the objects in it are hpcray's own. `hpcray.compat.table` lists the sources
of each facade.
"""

from __future__ import annotations

import dis
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, MutableSequence, Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import Distribution
from types import FrameType, ModuleType
from typing import Any

from hpcray.api.driver_job import LIBRARY, preload
from hpcray.common.config import RAY_LIBRARIES
from hpcray.common.ray_version import RAY_VERSION, STANDIN, claimed_version
from hpcray.compat import table
from hpcray.compat.names.log import generate_logging_config
from hpcray.runtime.core_worker.worker_output import DEDUP_VARIABLE

# ------------------------------------------------------------ amendments
# Modules of a lent library that are changed after their import, where Ray's behaviour must not be had here.


AMENDMENTS = {
    "ray._common.tls_utils": "hpcray.compat.serve:tls_utils",
    "ray.serve._private.client": "hpcray.compat.serve:client",
    "ray.serve._private.default_impl": "hpcray.compat.serve:default_impl",
    "ray.serve._private.grpc_util": "hpcray.compat.serve:grpc_util",
    "ray.serve._private.http_util": "hpcray.compat.serve:http_util",
    "ray.serve.config": "hpcray.compat.serve:config",
    "ray.serve.scripts": "hpcray.compat.serve:scripts",
    "ray.serve.schema": "hpcray.compat.serve:schema",
    "ray.train.torch.config": "hpcray.compat.train_network:torch_config",
    "ray.train.v2._internal.execution.worker_group.worker_group": "hpcray.compat.train_network:worker_group",
    "ray.tune.experiment.trial": "hpcray.compat.tune:trial",
    "ray.tune.experimental.output": "hpcray.compat.tune:output",
    "ray.tune.tune": "hpcray.compat.tune:tune",
}
"""By module of Ray: a function that gets the module, once it has been executed."""


class AmendingLoader(SourceFileLoader):
    """Executes a module of a lent library, then amends it."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module and call its function of `AMENDMENTS`."""
        super().exec_module(module)
        source, _, function = AMENDMENTS[module.__name__].partition(":")
        getattr(importlib.import_module(source), function)(module)


def amended_spec(fullname: str, path: object) -> ModuleSpec | None:
    """Return the spec of a lent module that is in `AMENDMENTS`; None for any other, which Python finds itself."""
    if fullname not in AMENDMENTS:
        return None
    spec = PathFinder.find_spec(fullname, path)  # type: ignore[arg-type]
    if spec is not None and spec.origin:
        spec.loader = AmendingLoader(fullname, spec.origin)
    return spec


class ProgramLoader(InspectLoader):
    """The program that `python -m` runs of a facade, which is a package: a function of it is called."""

    def __init__(self, module: str) -> None:
        self._module = module

    def get_source(self, fullname: str) -> str:
        """Return the text of the program."""
        return f"from {self._module} import {table.PROGRAMS[self._module]} as main\nmain()\n"


# ------------------------------------------------------------ finder


LENT = RAY_LIBRARIES
"""Variable: a directory with a package `ray`, as pip unpacks a real wheel, that lends its libraries (`lend`)."""

DEFAULT_LIBRARIES = os.path.join(sys.prefix, "share", "hpcray", f"ray-{RAY_VERSION}")
"""Where `python -m hpcray.compat libraries install` puts them, and `install` looks where the variable is not set."""

_NOTHING = object()
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]


class Facade(ModuleType):
    """A module of Ray. A name is looked up in hpcray's modules at its first use."""

    __path__: MutableSequence[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            if name == "__all__" and connect(self) and name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = self._find(name)
        if name not in self.__dict__.get("_changing", ()):
            self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets every submodule as an attribute of its parent. Where Ray has a function or class of the
        # same name there (`ray.util.placement_group`), the function or class stays.
        if type(value) is Facade and value.__name__ == f"{self.__name__}.{name}":
            own = self._own(name)
            if own is not _NOTHING and not isinstance(own, ModuleType):
                return
        super().__setattr__(name, value)
        if setter := table.SETTERS.get(f"{self.__name__}.{name}"):
            source, _, function = setter.partition(":")
            getattr(importlib.import_module(source), function)(value)

    def __dir__(self) -> list[str]:
        connect(self)
        if self.__name__ in table.PUBLIC:
            more = {name for name in self.__dict__ if name.startswith("__") or name in table.submodules(self.__name__)}
            return sorted(more | {*self.__dict__["__all__"], *table.submodules(self.__name__)})
        found = {name for name in self.__dict__ if not name.startswith("_") or name.startswith("__")}
        for source in self.__dict__["_sources"]:
            found.update(name for name in dir(source) if not name.startswith("__"))
        return sorted(found | set(table.submodules(self.__name__)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _module, (self.__name__,)

    def _own(self, name: str) -> Any:
        connect(self)
        for source in self.__dict__.get("_sources", ()):
            value = getattr(source, name, _NOTHING)
            # Modules of hpcray are visible only where `__all__` lists them: `ray.core` is another module in Ray.
            if value is not _NOTHING and (not isinstance(value, ModuleType) or name in getattr(source, "__all__", ())):
                return value
        return _NOTHING

    def _find(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if FINDER.lends(full):
            try:
                return importlib.import_module(full)
            except ModuleNotFoundError as error:
                if error.name != full:
                    raise
        if FINDER.lent and full in table.LENT_NAMES:
            return getattr(importlib.import_module(table.LENT_NAMES[full]), name)
        value = self._own(name)
        if value is not _NOTHING and not isinstance(value, ModuleType):
            return value
        if full in table.MODULES:
            try:
                return importlib.import_module(full)
            except ModuleNotFoundError as error:
                raise AttributeError(str(error)) from error
        if value is not _NOTHING:
            return value
        raise AttributeError(table.why_missing(full))


class Finder:
    """Finder and loader of Ray's modules, for `sys.meta_path`.

    Attributes:
        lent: the package directory of a real wheel that lends Ray's libraries; "" for none.
    """

    lent = ""
    _begun = ""

    def lends(self, fullname: str) -> bool:
        """True for a module that Python's path finder loads from a real wheel, by way of its package's `__path__`."""
        if not self.lent or not fullname.startswith("ray."):
            return False
        if fullname.split(".", 2)[1] in table.LIBRARIES:
            return True
        name = "" if fullname in table.MODULES else fullname
        while name and name not in table.HELPERS:
            name = name.rpartition(".")[0]
        return bool(name)

    def _begins(self, library: str) -> bool:
        """True unless the library is imported by another one, which is being imported."""
        outer = sys.modules.get(self._begun)
        if getattr(getattr(outer, "__spec__", None), "_initializing", False):
            return False
        self._begun = library
        return True

    def directories(self, fullname: str) -> list[str]:
        """Return where Python's path finder looks for the submodules of a facade that a real wheel lends."""
        if not self.lent:
            return []
        path = os.path.join(self.lent, *fullname.split(".")[1:])
        return [path] if os.path.isdir(path) else []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of Ray; None for other modules.

        Raises:
            ImportError: hpcray does not have the module: ModuleNotFoundError, but for `from ... import name`.
                `importlib.util.find_spec` gets None instead.
        """
        if fullname != "ray" and not fullname.startswith("ray."):
            return None
        if self.lends(fullname):
            if LIBRARY.fullmatch(fullname) and self._begins(fullname):
                preload(fullname)
            return amended_spec(fullname, path)
        if fullname.endswith(".__main__") and (module := fullname.removesuffix(".__main__")) in table.PROGRAMS:
            return importlib.machinery.ModuleSpec(fullname, ProgramLoader(module))
        if fullname not in table.MODULES:
            if _called_by_find_spec():
                return None
            # `from ray import x` drops a ModuleNotFoundError of that name, and would give no reason.
            error = ImportError if _called_by_from_import() else ModuleNotFoundError
            raise error(table.why_missing(fullname), name=fullname)
        spec = importlib.machinery.ModuleSpec(fullname, FINDER, is_package=True)
        if fullname == "ray":
            spec.submodule_search_locations = [os.path.join(STANDIN, "ray")]
            spec.origin = os.path.join(STANDIN, "ray", "__init__.py")
        return spec

    def find_distributions(self, context: Any) -> Iterable[Distribution]:
        """Return the distribution "ray" where its version is set; otherwise Python finds it in a directory."""
        if claimed_version() == RAY_VERSION or context.name not in (None, "ray"):
            return []
        from hpcray.compat.distribution import ClaimedDistribution  # few programs ask

        return [ClaimedDistribution()]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Make an empty facade."""
        module = Facade(spec.name)
        self.describe(module, spec)
        return module

    def describe(self, module: ModuleType, spec: importlib.machinery.ModuleSpec) -> None:
        """Set what Python's import system wants to know of a module."""
        module.__spec__ = spec
        module.__loader__ = self  # type: ignore[assignment]
        module.__package__ = spec.name
        module.__path__ = [*(spec.submodule_search_locations or ()), *self.directories(spec.name)]

    def exec_module(self, module: ModuleType) -> None:
        """Connect a facade with its sources.

        Raises:
            ImportError: a package that a source needs is not installed.
        """
        module.__dict__["_sources"] = None
        if module.__name__ not in table.PRESENT:
            connect(module)
        if module.__name__ == "ray":
            module.__file__ = os.path.join(STANDIN, "ray", "__init__.py")
            # Programs list the functions of `ray`, and Ray's is among them; a module's own comes before its class's.
            find: Any = Facade.__getattr__
            module.__dict__["__getattr__"] = lambda name: find(module, name)


def connect(module: ModuleType) -> bool:
    """Import the sources of a facade, unless that has been done. Returns True if it has been now.

    Raises:
        ImportError: a package that a source needs is not installed.
    """
    if module.__dict__.get("_sources", ()) is not None:
        return False
    sources = [load_source(source) for source in table.MODULES.get(module.__name__, ())]
    first = sources[0] if sources else None
    changing: set[str] = set()
    for source in sources:
        changing.update(getattr(source, "CHANGING", ()))
    module.__dict__.update(
        {**table.ATTRIBUTES.get(module.__name__, {}), **module.__dict__},
        _sources=tuple(sources),
        _changing=frozenset(changing),
        __doc__=getattr(first, "__doc__", None) or f"{module.__name__}, by hpcray.",
    )
    own = [name for source in sources for name in getattr(source, "__all__", ())]
    public = table.PUBLIC.get(module.__name__, own)
    if public:
        module.__dict__["__all__"] = list(dict.fromkeys(public))
    return True


FINDER: Any = Finder()


def install(replacing: ModuleType | None = None) -> ModuleType:
    """Make hpcray serve `import ray` and its submodules, in this process and in the workers of the job.

    Call it before `init()`, which sends the import path to the workers. A line that several workers print is then shown
    once, as in Ray, unless RAY_DEDUP_LOGS is 0.

    Args:
        replacing: a module `ray` in `sys.modules` that may become the facade.

    Returns:
        The module `ray`.

    Raises:
        ImportError: the real Ray is imported already (nothing is changed), or HPCRAY_RAY_LIBRARIES does not name an
            unpacked wheel.
    """
    present = sys.modules.get("ray")
    if present is not None and present is not replacing and not isinstance(present, Facade):
        raise ImportError(
            f"the real ray ({getattr(present, '__file__', None)}) is imported already in this process; "
            "hint: import hpcray.compat.ray first",
            name="ray",
        )
    if STANDIN not in sys.path:
        sys.path.insert(0, STANDIN)
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    libraries = os.environ.get(LENT, DEFAULT_LIBRARIES if os.path.isdir(DEFAULT_LIBRARIES) else "")
    if libraries and not FINDER.lent:
        lend(libraries)
    os.environ.setdefault(DEDUP_VARIABLE, "1")
    if not isinstance(present, Facade):
        spec = FINDER.find_spec("ray")
        assert isinstance(spec, importlib.machinery.ModuleSpec)
        if present is None:
            present = sys.modules["ray"] = FINDER.create_module(spec)
        else:
            # The same object: `importlib.util.LazyLoader`, which Prefect and others use, accepts no other one.
            present.__class__ = Facade
            present.__dict__.clear()
            present.__dict__["__name__"] = "ray"
            FINDER.describe(present, spec)
        FINDER.exec_module(present)
        for name in table.PRESENT:
            importlib.import_module(name)
    generate_logging_config()
    return present


def installed() -> bool:
    """Return True if `import ray` imports hpcray in this process."""
    return FINDER in sys.meta_path


def lend(directory: str) -> None:
    """Make Tune, Train, Data, Serve and RLlib of a real wheel importable, on hpcray's Core.

    Only these libraries and pure Python helpers of theirs (`table.HELPERS`) come from the wheel: `ray` itself,
    `ray._raylet` and the rest of Core stay hpcray's. Where a library imports an internal name of Ray that hpcray does
    not have, the ModuleNotFoundError or ImportError names it. Call it before `init()`: workers learn the directory from
    the variable HPCRAY_RAY_LIBRARIES, which the function sets.

    Args:
        directory: contains a directory `ray`, as `python -m hpcray.compat libraries install DIRECTORY` makes it.

    Raises:
        ImportError: the directory has no package `ray`, or one of another version. Nothing is changed.
    """
    version = wheel_version(directory)
    if version != RAY_VERSION:
        what = f"holds Ray {version}, and hpcray has the names of {RAY_VERSION}" if version else "holds no Ray"
        hint = "python -m hpcray.compat libraries install DIRECTORY"
        raise ImportError(f"HPCRAY_RAY_LIBRARIES: {directory!r} {what}; hint: {hint}", name="ray")
    FINDER.lent = os.path.join(os.path.abspath(directory), "ray")
    os.environ[LENT] = os.path.abspath(directory)
    for name, module in list(sys.modules.items()):
        if isinstance(module, Facade):
            module.__path__ += [path for path in FINDER.directories(name) if path not in module.__path__]


def wheel_version(directory: str) -> str:
    """Return the version of the unpacked wheel of Ray in a directory; "" for none."""
    try:
        with open(os.path.join(directory, "ray", "_version.py"), encoding="utf-8") as file:
            found = re.search(r"^version = ['\"]([^'\"]+)", file.read(), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1) if found else "of an unknown version"


def _module(name: str) -> ModuleType:
    """Unpickle a facade, in a process that may not have imported `ray` yet."""
    install()
    return importlib.import_module(name)


def load_source(source: str) -> ModuleType:
    """Import a source of the table: a module, or some names of one as a module object that has only these.

    Raises:
        ImportError: a package that the module needs is not installed. AttributeError: the module lacks a name.
    """
    name, _, selection = source.partition(":")
    module = importlib.import_module(name)
    if not selection:
        return module
    names = selection.split()
    selected = ModuleType(source)
    selected.__dict__.update({each: getattr(module, each) for each in names})
    selected.__dict__["__all__"] = [each for each in names if not each.startswith("_")]
    return selected


def _called_by_find_spec() -> bool:
    """True if `importlib.util.find_spec` called the finder; that function gets None for a missing module."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code.co_name == "find_spec" and frame.f_globals.get("__name__") == "importlib.util":
            return True
        frame = frame.f_back
    return False


def _called_by_from_import() -> bool:
    """True if Python looks for a module because the package in `from package import name` lacks the name.

    Not where a program calls `__import__("package", fromlist=["name"])`: Python ignores names that are not there then.
    """
    frame: FrameType | None = sys._getframe(2)
    names = False
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        names = names or frame.f_code.co_name == "_handle_fromlist"
        frame = frame.f_back
    return names and frame is not None and frame.f_code.co_code[frame.f_lasti] == _IMPORT_NAME
