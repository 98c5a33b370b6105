"""The way in which hpcray was installed: what its files and the environment say."""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

MODULE_ROOT = "HPCRAY_ROOT"
"""Set by the modulefile of packaging/lmod: the directory of its installation."""
_EASYBUILD_ROOT = "EBROOTHPCRAY"
_IMAGES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_SPACK_NAME = "py-hpcray"


class Installation(Struct, frozen=True):
    """The installation that a process has imported.

    Attributes:
        way: who installed it and where, "wheel, by pip in a virtual environment".
        problem: why it is not the one that the environment promises, or "".
        hint: the remedy of the problem, or "".
    """

    way: str
    problem: str = ""
    hint: str = ""


def installation(
    environ: Mapping[str, str],
    package: str | os.PathLike[str] = Path(__file__).parents[1],
    prefix: str = sys.prefix,
    base_prefix: str = sys.base_prefix,
    path: Sequence[str] | None = None,
    root: str = "/",
) -> Installation:
    """The installation to which a package belongs.

    Args:
        environ: the environment of the process.
        package: the directory of the package hpcray.
        prefix: of the interpreter.
        base_prefix: of the interpreter from which a virtual environment was made.
        path: where distributions are looked for; None: `sys.path`.
        root: of the file system, for the marks of containers.
    """
    package = Path(package)
    way = (
        _spack(package)
        or _easybuild(package)
        or _module(package, environ)
        or _python(package, Path(prefix), Path(base_prefix), sys.path if path is None else path)
    )
    container = _container(environ, Path(root))
    problem, hint = _passed_over(package, environ)
    return Installation(f"{way}, in {container}" if container else way, problem, hint)


def _spack(package: Path) -> str:
    """Spack's own prefix of the package, or a view with links to it or copies of it."""
    for directory in (*package.resolve().parents, *package.parents):
        for place in (directory / ".spack", directory / ".spack" / _SPACK_NAME):
            node = _first_node(place / "spec.json")
            if node.get("name") == _SPACK_NAME:
                return f"Spack: {_SPACK_NAME}@{node.get('version')}/{str(node.get('hash'))[:7]}"
    return ""


def _first_node(spec: Path) -> dict[str, Any]:
    try:
        node: dict[str, Any] = json.loads(spec.read_bytes())["spec"]["nodes"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return node


def _easybuild(package: Path) -> str:
    """EasyBuild keeps the easyconfig of an installation in its directory `easybuild`."""
    for directory in package.resolve().parents:
        configs = sorted(config.stem for config in (directory / "easybuild").glob("*.eb"))
        if configs:
            return f"EasyBuild: {next((name for name in configs if name.startswith('hpcray-')), configs[0])}"
    return ""


def _module(package: Path, environ: Mapping[str, str]) -> str:
    root = environ.get(MODULE_ROOT, "")
    return f"environment module {_loaded(environ)} at {root}" if root and _inside(package, root) else ""


def _loaded(environ: Mapping[str, str]) -> str:
    names = environ.get("LOADEDMODULES", "").split(":")
    return next((name for name in names if name.lower().startswith("hpcray")), "hpcray")


def _python(package: Path, prefix: Path, base_prefix: Path, path: Sequence[str]) -> str:
    found = list(metadata.distributions(name="hpcray", path=list(path)))
    if any(_edited(distribution) == package.resolve().parent for distribution in found):
        return f"editable, from {package.resolve().parent}"
    conda = (prefix / "conda-meta").is_dir()
    if conda and _inside(package, prefix) and any((prefix / "conda-meta").glob("hpcray-*.json")):
        return "conda package in a conda environment"
    here = [one for one in found if Path(str(one.locate_file(""))).resolve() == package.resolve().parent]
    if not here:
        return f"source directory {package.parent}, without an installation"
    by = (here[0].read_text("INSTALLER") or "an unknown program").strip()
    if conda and _inside(package, prefix):
        place = "a conda environment"
    elif _inside(package, prefix):
        place = "a virtual environment" if prefix != base_prefix else "the system's Python"
    elif _inside(package, site.getuserbase()):
        place = "the user's directory of packages"
    elif _inside(package, base_prefix):
        place = "the system's Python, below a virtual environment"
    else:
        place = f"{package.parent}, by PYTHONPATH"
    return f"wheel, by {by} in {place}"


def _edited(distribution: metadata.Distribution) -> Path | None:
    """The directory of an editable installation."""
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    if not url.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(str(url.get("url", ""))).path)).resolve()


def _container(environ: Mapping[str, str], root: Path) -> str:
    image = next((environ[name] for name in _IMAGES if environ.get(name)), "")
    if image or (root / ".singularity.d").is_dir():
        return f"an Apptainer container{f' of {image}' if image else ''}"
    if "CH_RUNNING" in environ:
        return "a Charliecloud container"
    if (root / ".dockerenv").exists():
        return "a Docker container"
    return "a Podman container" if (root / "run" / ".containerenv").exists() else ""


def _passed_over(package: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """A module is loaded, but another installation comes before the module's."""
    for name in (MODULE_ROOT, _EASYBUILD_ROOT):
        root = environ.get(name, "")
        if root and not _inside(package, root):
            problem = f"the module {_loaded(environ)} is loaded (${name}={root}), but Python imports {package}"
            return problem, f"module unload {_loaded(environ)}, or take the other one out of PATH and PYTHONPATH"
    return "", ""


def _inside(path: Path, directory: str | os.PathLike[str]) -> bool:
    return path.resolve().is_relative_to(Path(directory).resolve()) or path.is_relative_to(directory)
