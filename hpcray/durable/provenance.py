"""Where code comes from: Python, an installed package of some version, or the user."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
import types

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
    return place == "own" or (place == "package" and not provenance((module or "").partition(".")[0]))


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
    return _distributions(top) if place == "package" else ""


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
            return f"{top} {found.version}"
    except importlib.metadata.PackageNotFoundError:
        pass
    names = _all_distributions().get(top, ())
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names)))


@functools.cache
def _all_distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())
