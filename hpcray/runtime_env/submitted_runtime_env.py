"""Conversion of a `runtime_env` to the environment of worker processes. Each package is built and stored once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec

from hpcray.common.exceptions import RuntimeEnvSetupError
from hpcray.common.job_names import job_config
from hpcray.common.resources import JOB_FIELD, OUTLIVES_JOB
from hpcray.protocol.messages import Shape
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.extensions import Extension, ExtensionProcess
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.runtime_env.runtime_env import (
    DEFAULT_SETUP_TIMEOUT,
    IN_PLACE,
    PLUGINS_VARIABLE,
    RUNTIME_ENV_VARIABLE,
    STARTED_WITH,
    RuntimeEnv,
    load_function,
    read_at_start,
    validated_runtime_env,
)
from hpcray.runtime_env.runtime_env_setup import (
    PackageError,
    check_package,
    files_signature,
    pack_package,
    package_digest,
    package_files,
    unpack_package,
    zip_of_tar,
)

_URI = "gcs://_ray_pkg_{}.zip"
_OVERRIDE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"
_MODIFIER = "RAY_RUNTIME_ENV_HOOK"
_INSTALLERS = ("pip", "uv")
ACTOR_LIFETIME = "default_actor_lifetime"
_OF_THE_JOB = ("logging_config", ACTOR_LIFETIME, JOB_FIELD, OUTLIVES_JOB, STARTED_WITH)
"""Fields that are no part of Ray's runtime environments, but of the job; they travel with them."""

Fields = dict[str, Any]
"""A runtime_env without its variables, as JSON types: packages by hash and object id."""


class RuntimeEnvs(Extension):
    """The runtime environments of the tasks and actors that this process submits, and their packages.

    Attributes:
        job: fields of the job; in a worker, the fields of its own environment. Children inherit them.
    """

    name = "runtime_env"
    waits_at_exit = False

    def __init__(self, process: ExtensionProcess) -> None:
        super().__init__(process)
        self._packed: dict[tuple[str, ...], dict[str, str]] = {}
        self._objects: dict[str, ObjectRef[Any]] = {}
        self._here: set[str] = set()
        self.job: Fields = dict(current.worker.environment.fields) if current.worker is not None else {}

    def fields(self, env: Mapping[str, Any] | None) -> Fields:
        """Convert a runtime_env to fields, and store its packages as objects.

        Of its variables there are those with which a process has to be started.

        Raises:
            TypeError, ValueError: a field is not valid. PackageError: a directory is too large.
        """
        found: Fields = {}
        for field, value in validated_runtime_env(env).items():
            if field in (*_INSTALLERS, "py_executable"):
                found[field] = value
            elif field == "env_vars":
                if at_start := value if self._preloads else read_at_start(value):
                    found[STARTED_WITH] = at_start
            elif field == "config":
                if value["setup_timeout_seconds"] != DEFAULT_SETUP_TIMEOUT:
                    found[field] = {"setup_timeout_seconds": value["setup_timeout_seconds"]}
            elif field == "working_dir":
                found[field] = self._package(value, (env or {}).get("excludes") or [], inside=False)
            elif field == "py_modules":
                excludes = (env or {}).get("excludes") or []
                found[field] = [self._package(path_of_module(item), excludes, inside=True) for item in value]
            elif field == "worker_process_setup_hook":
                found[field] = self._hook(value)
            elif field not in RuntimeEnv.known_fields and PLUGINS_VARIABLE in os.environ:
                found[field] = value
        return found

    @property
    def _preloads(self) -> bool:
        """Return True if fork servers import modules ahead of workers: these may have read any variable."""
        job = self.process.place.job
        return bool(self.process.config.preload or (job is not None and job.preload))

    def merged(self, env: Mapping[str, Any] | None) -> Fields:
        """Merge the fields of a task or actor over those of its parent."""
        own = self.fields(env)
        if isinstance(env, RuntimeEnv) and not env.inherits:
            return {**{field: self.job[field] for field in (JOB_FIELD, OUTLIVES_JOB) if field in self.job}, **own}
        parent: Fields = {
            field: value
            for field, value in self.job.items()
            if not (field in _INSTALLERS and any(tool in own for tool in _INSTALLERS))
        }
        if STARTED_WITH in parent and STARTED_WITH in own:
            own[STARTED_WITH] = {**parent[STARTED_WITH], **own[STARTED_WITH]}
        return {**parent, **own}

    def _package(self, source: str, excludes: list[str], inside: bool) -> dict[str, str]:
        """Store the file or directory at a path as a package.

        Args:
            source: a path, or the URI of a package of the job.
            excludes: patterns of files to leave out.
            inside: pack the directory itself, not only its contents, so that it can be imported.
        """
        if source.startswith(IN_PLACE):
            return {"local": source.removeprefix(IN_PLACE)}
        known = [entry for entry in _entries(self.job) if _uri_of(entry) == source]
        if known:
            return known[0]
        source = local_path(source)
        if os.path.isdir(source):
            names = package_files(source, excludes)
            key = (source, files_signature(source, names), str(inside))
            if key not in self._packed:
                self._packed[key] = self._stored(pack_package(source, names, _top(source, inside)))
        else:
            key = (source, files_signature(os.path.dirname(source), [os.path.basename(source)]), "")
            if key not in self._packed:
                self._packed[key] = self._stored(_file(source))
        return self._packed[key]

    def _stored(self, package: bytes) -> dict[str, str]:
        digest = package_digest(package)
        ref = self._objects.get(digest)
        if ref is None:
            ref = self._objects[digest] = self.process.put(package)
        return {"hash": digest, "object": ref.hex()}

    def _hook(self, hook: Any) -> dict[str, str]:
        if isinstance(hook, str):
            return {"name": hook}
        name = getattr(hook, "__name__", type(hook).__name__)
        key = f"hook {id(hook)}"
        if key not in self._objects:
            try:
                self._objects[key] = self.process.put(hook)
            except Exception as error:
                raise RuntimeEnvSetupError(f"Failed to export the setup function.\n{error}") from error
            self._packed[key,] = {"keep": hook}  # keeps `id(hook)` from being reused
        return {"name": name, "object": self._objects[key].hex()}

    def unpack_here(self, package: Mapping[str, str]) -> None:
        """Unpack a package on this node. A worker cannot fetch one before it is the Python that lies in it."""
        if "hash" in package and package["hash"] not in self._here:
            self._here.add(package["hash"])
            ref: ObjectRef[Any] = ObjectRef(bytes.fromhex(package["object"]))
            fetch = lambda: bytes(self.process.reader.get([ref], None)[0])  # noqa: E731
            unpack_package(self.process.place.session_dir, package["hash"], fetch)


def modify_runtime_env(env: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Pass the runtime_env of a driver through the function that the variable RAY_RUNTIME_ENV_HOOK names."""
    name = environ.get(_MODIFIER)
    return load_function(name)(env) if name else env


def merge_submitted_runtime_env(env: Mapping[str, Any] | None, environ: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Merge the runtime_env of a driver over the one that its job was submitted with.

    Raises:
        ValueError: the variable RAY_JOB_CONFIG_JSON_ENV_VAR is no JSON, or both name a field or a variable, unless
            RAY_OVERRIDE_JOB_RUNTIME_ENV is 1.
    """
    below = job_config(environ).get("runtime_env")
    if not below or (env is not None and not isinstance(env, Mapping)):
        return env
    names = [{*each, *(f"env_vars[{name}]" for name in each.get("env_vars") or ())} for each in (below, env or {})]
    if (names[0] & names[1]) - {"env_vars"} and environ.get(_OVERRIDE) != "1":
        raise ValueError(
            f"Failed to merge the Job's runtime env {below} with a ray.init's runtime env {env} because of a conflict. "
            "Specifying the same runtime_env fields or the same environment variable keys is not allowed. Use "
            f"{_OVERRIDE}=1 to instruct Ray to combine Job and Driver's runtime environment in the event of a conflict."
        )
    variables = {**(below.get("env_vars") or {}), **((env or {}).get("env_vars") or {})}
    return {**below, **(env or {}), **({"env_vars": variables} if variables else {})}


def with_runtime_env(process: CoreWorker, env: Mapping[str, Any] | None, shape: Shape, detached: bool = False) -> Shape:
    """Add a runtime_env to the shape of a task or actor, as a variable that the worker's fork server reads."""
    outlives = detached and process.place.job is not None and bool(process.place.job.ends_with)
    runtime_envs = RuntimeEnvs.of(process)
    if not env and not outlives and not runtime_envs.job:
        return shape
    fields = runtime_envs.merged(env)
    if outlives:
        fields[OUTLIVES_JOB] = True
    if not fields:
        return shape
    if "py_executable" in fields and "working_dir" in fields:
        runtime_envs.unpack_here(fields["working_dir"])
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return msgspec.structs.replace(shape, env=tuple(sorted({**dict(shape.env), RUNTIME_ENV_VARIABLE: text}.items())))


def environment_of(process: CoreWorker, env: Mapping[str, Any] | None) -> RuntimeEnv:
    """Return the runtime_env of a task of this process as programs see it: packages by their content."""
    job = process.place.job
    variables = {**dict(job.env if job is not None else ()), **((env or {}).get("env_vars") or {})}
    return public_runtime_env(RuntimeEnvs.of(process).merged(env), variables)


def public_runtime_env(fields: Fields, variables: Mapping[str, str]) -> RuntimeEnv:
    """Convert fields to the RuntimeEnv that programs see, with packages as URIs."""
    found = dict(fields)
    for field in _OF_THE_JOB:
        found.pop(field, None)
    if "working_dir" in found:
        found["working_dir"] = _uri_of(found["working_dir"])
    if "py_modules" in found:
        found["py_modules"] = [_uri_of(entry) for entry in found["py_modules"]]
    if "worker_process_setup_hook" in found:
        found["worker_process_setup_hook"] = found["worker_process_setup_hook"]["name"]
    if variables:
        found["env_vars"] = dict(variables)
    return RuntimeEnv(_validate=False, **found)


def local_path(source: str) -> str:
    """Return the absolute path of a source of a package."""
    return os.path.abspath(os.path.expanduser(source.removeprefix("file://")))


def package_of(source: str, excludes: list[str], inside: bool) -> bytes:
    """Return the file or directory at a path as a package. Arguments as for `RuntimeEnvs`."""
    source = local_path(source)
    if os.path.isdir(source):
        return pack_package(source, package_files(source, excludes), _top(source, inside))
    return _file(source)


def package_uri(digest: str) -> str:
    """Return the URI of a package, as programs see it."""
    return _URI.format(digest)


def _top(source: str, inside: bool) -> str:
    return os.path.basename(source) if inside else ""


def _uri_of(package: Mapping[str, str]) -> str:
    return IN_PLACE + package["local"] if "local" in package else package_uri(package["hash"])


def _entries(fields: Fields) -> list[dict[str, str]]:
    return [*([fields["working_dir"]] if "working_dir" in fields else []), *fields.get("py_modules", ())]


def path_of_module(module: str | ModuleType) -> str:
    """Return the path of an entry of `py_modules`. Raises ValueError for a module without a file."""
    if isinstance(module, str):
        return module
    paths = list(getattr(module, "__path__", None) or ())
    path = paths[0] if paths else getattr(module, "__file__", None)
    if not path:
        raise ValueError(f"py_modules: {module.__name__} has no file; hint: give the path of a directory")
    return str(path)


def _file(path: str) -> bytes:
    """Read a zip or wheel; a module of one file, or another archive, is packed as a zip.

    Raises:
        RuntimeEnvSetupError: no worker could unpack the archive.
    """
    if path.endswith(".py"):
        return pack_package(os.path.dirname(path), [os.path.basename(path)])
    try:
        if path.endswith((".zip", ".whl")):
            with open(path, "rb") as file:
                package = file.read()
        else:
            package = zip_of_tar(path)
        check_package(package, path)
    except PackageError as error:
        raise RuntimeEnvSetupError(str(error)) from None
    return package
