"""From the `runtime_env` of a job, task or actor to what workers are forked for: packages are made here, once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec

from hpcray.host.runtime_env import DEFAULT_TIMEOUT, VARIABLE, RuntimeEnv, checked
from hpcray.host.runtime_env_pack import digest_of, files_of, pack, signature
from hpcray.runtime.process import Process
from hpcray.runtime.refs import ObjectRef, current
from hpcray.wire.messages import Shape

_URI = "gcs://_ray_pkg_{}.zip"
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_INSTALLERS = ("pip", "uv")

Fields = dict[str, Any]
"""A runtime_env without its variables, as JSON can have it: packages by hash and object id."""


class Environments:
    """The environments that this process has given its tasks and actors.

    Attributes:
        job: what all of them have unless they say otherwise; of a worker, what it has itself.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._packed: dict[tuple[str, ...], dict[str, str]] = {}
        self._objects: dict[str, ObjectRef[Any]] = {}
        self.job: Fields = {}

    def fields(self, env: Mapping[str, Any] | None) -> Fields:
        """What a runtime_env asks for beside variables; its packages are objects then.

        Raises:
            TypeError, ValueError: something in it is not valid. PackageError: a directory is too large.
        """
        found: Fields = {}
        for field, value in checked(env).items():
            if field in (*_INSTALLERS, "py_executable"):
                found[field] = value
            elif field == "config":
                if value["setup_timeout_seconds"] != DEFAULT_TIMEOUT:
                    found[field] = {"setup_timeout_seconds": value["setup_timeout_seconds"]}
            elif field == "working_dir":
                found[field] = self._package(value, (env or {}).get("excludes") or [], inside=False)
            elif field == "py_modules":
                excludes = (env or {}).get("excludes") or []
                found[field] = [self._package(_path_of(item), excludes, inside=True) for item in value]
            elif field == "worker_process_setup_hook":
                found[field] = self._hook(value)
        return found

    def merged(self, env: Mapping[str, Any] | None) -> Fields:
        """Ray's rule: a child has what its parent has, but for the fields that it gives itself."""
        own = self.fields(env)
        parent: Fields = {
            field: value
            for field, value in self.job.items()
            if not (field in _INSTALLERS and any(tool in own for tool in _INSTALLERS))
        }
        return {**parent, **own}

    def _package(self, source: str, excludes: list[str], inside: bool) -> dict[str, str]:
        """Store what is at a path.

        Args:
            inside: the directory itself goes in, not only what is in it: that is how it can be imported.
        """
        known = [entry for entry in _entries(self.job) if _URI.format(entry["hash"]) == source]
        if known:
            return known[0]
        source = os.path.abspath(os.path.expanduser(source.removeprefix("file://")))
        if os.path.isdir(source):
            names = files_of(source, excludes)
            key = (source, signature(source, names), str(inside))
            if key not in self._packed:
                self._packed[key] = self._stored(pack(source, names, os.path.basename(source) if inside else ""))
        else:
            key = (source, signature(os.path.dirname(source), [os.path.basename(source)]), "")
            if key not in self._packed:
                self._packed[key] = self._stored(_file(source))
        return self._packed[key]

    def _stored(self, package: bytes) -> dict[str, str]:
        digest = digest_of(package)
        ref = self._objects.get(digest)
        if ref is None:
            ref = self._objects[digest] = self._process.put(package)
        return {"hash": digest, "object": ref.hex()}

    def _hook(self, hook: Any) -> dict[str, str]:
        if isinstance(hook, str):
            return {"name": hook}
        name = f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
        key = f"hook {id(hook)}"
        if key not in self._objects:
            self._objects[key] = self._process.put(hook)
            self._packed[key,] = {"keep": hook}  # so that no other function gets its id
        return {"name": name, "object": self._objects[key].hex()}


def with_submitted(env: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Mapping[str, Any] | None:
    """A driver's runtime_env on top of the one that its job was submitted with.

    Raises:
        ValueError: what the submitter said is no JSON.
    """
    said = environ.get(_SUBMITTED)
    below = json.loads(said).get("runtime_env") if said else None
    if not below or (env is not None and not isinstance(env, Mapping)):
        return env
    variables = {**(below.get("env_vars") or {}), **((env or {}).get("env_vars") or {})}
    return {**below, **(env or {}), **({"env_vars": variables} if variables else {})}


def environments_of(process: Process) -> Environments:
    """Those of this process; they end with it."""
    found: Environments | None = vars(process).get("_environments")
    if found is None:
        found = Environments(process)
        if current.worker is not None:
            found.job = dict(current.worker.environment.fields)
        vars(process)["_environments"] = found
    return found


def dressed(process: Process, env: Mapping[str, Any] | None, shape: Shape) -> Shape:
    """The shape of a task or actor with this runtime_env: workers are forked for what it asks beside variables."""
    if not env and not environments_of(process).job:
        return shape
    fields = environments_of(process).merged(env)
    if not fields:
        return shape
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return msgspec.structs.replace(shape, env=tuple(sorted({**dict(shape.env), VARIABLE: text}.items())))


def shown(fields: Fields, variables: Mapping[str, str]) -> RuntimeEnv:
    """What a program is told of its environment: packages by their names."""
    found = dict(fields)
    found.pop("logging_config", None)
    if "working_dir" in found:
        found["working_dir"] = _URI.format(found["working_dir"]["hash"])
    if "py_modules" in found:
        found["py_modules"] = [_URI.format(entry["hash"]) for entry in found["py_modules"]]
    if "worker_process_setup_hook" in found:
        found["worker_process_setup_hook"] = found["worker_process_setup_hook"]["name"]
    if variables:
        found["env_vars"] = dict(variables)
    return RuntimeEnv(_validate=False, **found)


def _entries(fields: Fields) -> list[dict[str, str]]:
    return [*([fields["working_dir"]] if "working_dir" in fields else []), *fields.get("py_modules", ())]


def _path_of(module: str | ModuleType) -> str:
    """Where an imported module, or a path, is."""
    if isinstance(module, str):
        return module
    paths = list(getattr(module, "__path__", None) or ())
    path = paths[0] if paths else getattr(module, "__file__", None)
    if not path:
        raise ValueError(f"py_modules: {module.__name__} has no file; hint: give the path of a directory")
    return str(path)


def _file(path: str) -> bytes:
    """A zip or wheel as it is; a module of one file as a zip."""
    if path.endswith(".py"):
        return pack(os.path.dirname(path), [os.path.basename(path)])
    with open(path, "rb") as file:
        return file.read()
