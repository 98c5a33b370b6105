"""Fields, types and values of a `runtime_env`. This module reads, packs and installs nothing."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from types import ModuleType
from typing import Any, get_args, get_type_hints

from hpcray.common.exceptions import did_you_mean
from hpcray.common.resources import RUNTIME_ENV

logger = logging.getLogger("hpcray")

RUNTIME_ENV_VARIABLE = RUNTIME_ENV
SETUP_HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Variable of a worker: a function that is called before its first task, as "module.function"."""
PYTHON_FIELDS = ("pip", "uv", "py_executable")
"""Fields that need another Python than the job's."""
STARTED_WITH = "started_with"
"""Field of a worker's environment: those of `env_vars` that are read when a process starts or loads a library."""
_READ_AT_START = frozenset({
    "GLIBC_TUNABLES", "HOSTALIASES", "LANG", "LANGUAGE", "LOCALDOMAIN", "LOCPATH", "NLSPATH", "RES_OPTIONS", "TZ",
    "TZDIR",
})  # fmt: skip
_READ_AT_START_PREFIXES = (
    "BLIS_", "GOMP_", "GOTO_", "KMP_", "LC_", "LD_", "MALLOC_", "MKL_", "NPY_", "NUMBA_", "NUMPY_", "OMP_", "OPENBLAS_",
    "PYTHON", "VECLIB_",
)  # fmt: skip
_READ_AT_START_SUFFIXES = ("_NUM_THREADS", "_MAX_THREADS")
"""Variables that Python, the C library, and the numerical libraries that the fork server loads read once, unseen."""
_OF_THE_START = ("GLIBC_TUNABLES", "LD_", "MALLOC_", "PYTHON")
"""Begin the names of variables with which a process may fail to start."""
_LONGEST_VARIABLE = 128 << 10
"""Characters, of a name or of a value. Source: Linux, MAX_ARG_STRLEN of include/uapi/linux/binfmts.h."""
DEFAULT_SETUP_TIMEOUT = 600
SUPPORTED_FIELDS = frozenset({
    "config", "env_vars", "excludes", "pip", "py_executable", "py_modules", "uv", "worker_process_setup_hook",
    "working_dir",
})  # fmt: skip
"""Fields that have an effect."""
UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "conda": "activate the environment before the job starts, or name its Python in py_executable",
    "container": "start the whole job in the container (hpcray-launch inside of apptainer)",
    "image_uri": "start the whole job in the container (hpcray-launch inside of apptainer)",
    "docker": "start the whole job in the container (hpcray-launch inside of apptainer)",
    "java_jars": "there are no Java workers",
    "mpi": "hpcray.mpi runs MPI programs inside tasks",
    "nsight": "profile one worker by hand: nsys attaches to its pid",
    "_rocprof_sys": "profile one worker by hand",
    "_nsight": "profile one worker by hand: nsys attaches to its pid",
    "rocprof_sys": "profile one worker by hand",
}
"""Fields of Ray's that hpcray does not support, with the alternative."""
REMOTE_SCHEMES = ("http", "https", "s3", "gs", "hdfs", "azure", "abfss")
IN_PLACE = "local://"
"""Begins the URI of a directory that all nodes have."""
ARCHIVES = (".zip", ".whl", ".tar.gz", ".tgz", ".tar.xz")
PLUGINS_VARIABLE = "RAY_RUNTIME_ENV_PLUGINS"
_DEVELOPER_VARIABLE = "RAY_RUNTIME_ENV_LOCAL_DEV_MODE"
_SILENT = frozenset({"_ray_release", "_ray_commit", "_inject_current_ray"})
_PIP_FIELDS = ("packages", "pip_check", "pip_install_options", "pip_version")
_UV_FIELDS = ("packages", "uv_check", "uv_pip_install_options", "uv_version")


class RuntimeEnvConfig(dict[str, Any]):
    """Options for the setup of an environment.

    Args:
        setup_timeout_seconds: limit for the setup; -1: none.
        eager_install: accepted; environments are always set up when their first worker starts.
        log_files: accepted, without effect.

    Raises:
        TypeError, ValueError: a value is of the wrong type, or not allowed.
    """

    known_fields = frozenset({"setup_timeout_seconds", "eager_install", "log_files"})

    def __init__(
        self,
        setup_timeout_seconds: int = DEFAULT_SETUP_TIMEOUT,
        eager_install: bool = True,
        log_files: list[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(setup_timeout_seconds, int):
            raise TypeError(f"setup_timeout_seconds must be of type int, got: {type(setup_timeout_seconds)}")
        if setup_timeout_seconds <= 0 and setup_timeout_seconds != -1:
            raise ValueError(
                f"setup_timeout_seconds must be greater than zero or equals to -1, got: {setup_timeout_seconds}"
            )
        if not isinstance(eager_install, bool):
            raise TypeError(f"eager_install must be a boolean. got {type(eager_install)}")
        if log_files is not None and not (isinstance(log_files, list) and all(isinstance(f, str) for f in log_files)):
            raise TypeError(f"log_files must be a list of strings or None, got {log_files!r}")
        self["setup_timeout_seconds"] = setup_timeout_seconds
        self["eager_install"] = eager_install
        self["log_files"] = log_files or []

    @staticmethod
    def parse_and_validate_runtime_env_config(config: Any) -> RuntimeEnvConfig:
        """The config of a dict; unknown entries are dropped with a warning."""
        if isinstance(config, RuntimeEnvConfig):
            return config
        if not isinstance(config, dict):
            raise TypeError(f"runtime_env['config'] must be of type dict or RuntimeEnvConfig, got: {type(config)}")
        if unknown := set(config) - RuntimeEnvConfig.known_fields:
            logger.warning("The following unknown entries in the runtime_env_config will be ignored: %s.", unknown)
        return RuntimeEnvConfig(**{key: value for key, value in config.items() if key not in unknown})

    @classmethod
    def default_config(cls) -> RuntimeEnvConfig:
        """The config without any option set."""
        return cls()

    def to_dict(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(deepcopy(self))


def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have no effect, or not everywhere, in a process that runs already."""
    return {
        name: text
        for name, text in variables.items()
        if name in _READ_AT_START or name.startswith(_READ_AT_START_PREFIXES) or name.endswith(_READ_AT_START_SUFFIXES)
    }


def may_prevent_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a Python may fail to start."""
    return {name: text for name, text in variables.items() if name.startswith(_OF_THE_START)}


class RuntimeEnv(dict[str, Any]):
    """The environment of a job, task or actor. A plain dict with the same fields does as well.

    Args:
        kwargs: the fields below, `excludes`, and Ray's other fields, which are refused when the environment is used.

    Fields:
        py_modules: directories, files, zips or wheels that can be imported in the workers.
        working_dir: a directory or zip; a copy of it is the workers' current directory, and can be imported from.
        pip, uv: packages to install into a virtual environment of their own: a list, the path of a requirements file,
            or a dict with `packages`.
        py_executable: the Python that the workers run with.
        env_vars: environment variables.
        worker_process_setup_hook: called in each worker before its first task; a function, or "module.function".
        config: see `RuntimeEnvConfig`.

    Attributes:
        inherits: False: the task or actor gets nothing of the environment of its parent.

    Raises:
        TypeError, ValueError: a field is of the wrong type, or its value is not allowed.
    """

    known_fields = frozenset({*SUPPORTED_FIELDS, *UNSUPPORTED_FIELDS, *_SILENT})
    extensions_fields = _SILENT
    inherits = True

    def __init__(self, *, _validate: bool = True, **kwargs: Any) -> None:
        super().__init__()
        given = {field: value for field, value in kwargs.items() if value is not None}
        if not _validate:
            self.update(given)
            return
        _check_combination(given)
        if (unknown := set(given) - self.known_fields) and not os.environ.get(PLUGINS_VARIABLE):
            logger.warning(
                "The following unknown entries in the runtime_env dictionary will be ignored: %s.%s",
                sorted(unknown),
                did_you_mean(sorted(unknown), SUPPORTED_FIELDS),
            )
        for field, value in given.items():
            self[field] = value
        if self.get("pip") or self.get("conda"):
            self.setdefault("_ray_commit", "hpcray")
        if _DEVELOPER_VARIABLE in os.environ:
            self.setdefault("_inject_current_ray", True)

    def __setitem__(self, field: str, value: Any) -> None:
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if (check := _CHECKS.get(field)) is not None and value is not None:
            value = check(value)
            if value is None:
                return
        super().__setitem__(field, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (dict(self),)

    def get(self, name: str, default: Any = None, data_class: type | None = None) -> Any:
        """Return one field; as an instance of a dataclass where that is given.

        Raises:
            TypeError: the field does not have the fields of the dataclass.
        """
        value = super().get(name, default)
        return value if data_class is None or name not in self else _built(data_class, value)

    def set(self, name: str, value: Any) -> None:
        """Set one field."""
        self[name] = value

    def to_dict(self) -> dict[str, Any]:
        """A plain dict."""
        plain = dict(deepcopy(dict(self)))
        if isinstance(plain.get("config"), RuntimeEnvConfig):
            plain["config"] = plain["config"].to_dict()
        return plain

    def serialize(self) -> str:
        """The environment as JSON; equal for equal environments."""
        return json.dumps(type(self)(_validate=True, **self), sort_keys=True)

    @classmethod
    def deserialize(cls, serialized_runtime_env: str) -> RuntimeEnv:
        """The inverse of `serialize`."""
        return cls(_validate=False, **json.loads(serialized_runtime_env))

    def env_vars(self) -> dict[str, str]:
        """Environment variables."""
        return dict(self.get("env_vars") or {})

    def has_working_dir(self) -> bool:
        """True if the environment has a working directory."""
        return self.get("working_dir") is not None

    def working_dir(self) -> str:
        """The working directory, or ""."""
        return str(self.get("working_dir", ""))

    def working_dir_uri(self) -> str | None:
        """The working directory, or None."""
        return self.get("working_dir")  # type: ignore[no-any-return]

    def py_modules(self) -> list[str]:
        """The modules that workers can import."""
        return list(self.get("py_modules") or ())

    def py_modules_uris(self) -> list[str]:
        """Same as `py_modules`."""
        return self.py_modules()

    def py_executable(self) -> str | None:
        """The workers' Python."""
        return self.get("py_executable")  # type: ignore[no-any-return]

    def has_pip(self) -> bool:
        """True if pip installs packages."""
        return bool(self.get("pip"))

    def has_uv(self) -> bool:
        """True if uv installs packages."""
        return bool(self.get("uv"))

    def has_conda(self) -> bool:
        """True if the environment names Conda."""
        return bool(self.get("conda"))

    def conda_env_name(self) -> str | None:
        """The name of a Conda environment; None for none, or for one that is described."""
        found = self.get("conda")
        return found if isinstance(found, str) and found else None

    def conda_config(self) -> str | None:
        """The description of a Conda environment as JSON."""
        found = self.get("conda")
        return json.dumps(found, sort_keys=True) if isinstance(found, dict) and found else None

    def java_jars(self) -> list[str]:
        """Java archives, for which there are no workers."""
        return list(self.get("java_jars") or ())

    def nsight(self) -> Any:
        """Options of Nsight."""
        return self.get("_nsight")

    def rocprof_sys(self) -> Any:
        """Options of rocprof-sys."""
        return self.get("_rocprof_sys")

    def image_uri(self) -> str | None:
        """The image of a container."""
        return self.get("image_uri")  # type: ignore[no-any-return]

    def has_py_container(self) -> bool:
        """True if the environment names a container."""
        return bool(self.get("container"))

    def py_container_image(self) -> str | None:
        """The image of the container."""
        return self["container"].get("image", "") if self.has_py_container() else None

    def py_container_worker_path(self) -> str | None:
        """The path of the workers' program in the container."""
        return self["container"].get("worker_path", "") if self.has_py_container() else None

    def py_container_run_options(self) -> list[str] | None:
        """Options with which the container is to run."""
        return self["container"].get("run_options", []) if self.has_py_container() else None

    def pip_config(self) -> dict[str, Any]:
        """Packages and options for pip."""
        return dict(self.get("pip") or {})

    def uv_config(self) -> dict[str, Any]:
        """Packages and options for uv."""
        return dict(self.get("uv") or {})

    def get_extension(self, key: str) -> str | None:
        """One of Ray's own fields.

        Raises:
            ValueError: the field is not one of these.
        """
        if key not in self.extensions_fields:
            raise ValueError(f"Extension key must be one of {set(self.extensions_fields)}, got: {key}")
        return self.get(key)  # type: ignore[no-any-return]

    def plugins(self) -> list[tuple[str, Any]]:
        """Unknown fields."""
        return [(field, value) for field, value in self.items() if field not in self.known_fields]


def _check_combination(given: Mapping[str, Any]) -> None:
    """Raise ValueError for fields that exclude each other."""
    if sum(bool(given.get(field)) for field in ("pip", "uv", "conda")) > 1:
        raise ValueError(
            "The 'pip' field, 'uv' field, and 'conda' field of runtime_env cannot be specified at the same time.\n"
            f"specified pip field: {given.get('pip')}\nspecified conda field: {given.get('conda')}\n"
            f"specified uv field: {given.get('uv')}\nTo use pip with conda, name the packages in the conda field."
        )
    for field in ("container", "image_uri"):
        others = set(given) - {field, "config", "env_vars"}
        if given.get(field) and others:
            raise ValueError(
                f"The '{field}' field currently cannot be used together with other fields of runtime_env. "
                f"Specified fields: {others}"
            )


def _built(kind: Any, value: Any) -> Any:
    """Make of JSON types an instance of a dataclass, or what its annotations say."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _built(hints.get(name), item) for name, item in value.items()})
    inner = get_args(kind)
    if isinstance(value, list) and inner:
        return [_built(inner[0], item) for item in value]
    if isinstance(value, dict) and len(inner) == 2:
        return {key: _built(inner[1], item) for key, item in value.items()}
    return value


def _unpickle(fields: dict[str, Any]) -> RuntimeEnv:
    return RuntimeEnv(_validate=False, **fields)


def validated_field(field: str, value: Any) -> Any:
    """The value of one field, in the form that a `RuntimeEnv` holds; None for an empty one.

    Raises:
        TypeError, ValueError: it is of the wrong type, or not allowed.
    """
    return _CHECKS[field](value)


def load_function(path: str) -> Any:
    """Import what "module.name" names.

    Raises:
        ValueError: there is no dot. ImportError, AttributeError: there is no such module or name.
    """
    module, dot, name = path.rpartition(".")
    if not dot:
        raise ValueError(f"class_path: {path!r} must be a path with a module, as in package.module.name")
    return getattr(importlib.import_module(module), name)


def validated_runtime_env(env: Mapping[str, Any] | None) -> RuntimeEnv:
    """A user's runtime_env after all checks; fields without a value are left out.

    Raises:
        TypeError, ValueError: a field is of the wrong type, or its value is not allowed.
    """
    if env is None:
        return RuntimeEnv()
    if isinstance(env, RuntimeEnv):
        return env
    if not isinstance(env, Mapping):
        raise TypeError(f"runtime_env must be dict or RuntimeEnv, but got: {type(env)}")
    return RuntimeEnv(**{field: value for field, value in env.items() if value})


def unsupported_field_error(env: Mapping[str, Any] | None) -> str:
    """The reason why work with this runtime_env is refused; "" if it is not."""
    for field, value in (env or {}).items():
        if value and field in UNSUPPORTED_FIELDS:
            return f"runtime_env[{field!r}] is not supported; hint: {UNSUPPORTED_FIELDS[field]}"
        for source in value if field == "py_modules" else [value] if field == "working_dir" else ():
            if isinstance(source, str) and source.partition("://")[0] in REMOTE_SCHEMES:
                return (
                    f"runtime_env[{field!r}]: {source}: packages are not fetched from there; hint: give a directory or "
                    "an archive that the driver can read, it is sent to every node that needs it"
                )
    return ""


def _check_env_vars(value: Any) -> dict[str, str] | None:
    if not value and hasattr(value, "__len__"):
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"runtime_env['env_vars'] must be of type Dict[str, str], got {type(value)}")
    for name, text in value.items():
        for item, kind in ((name, "key"), (text, "value")):
            if not isinstance(item, str):
                raise TypeError(
                    f"runtime_env['env_vars'] must be of type Dict[str, str], "
                    f"but the {kind} {item} is of type {type(item)}, in {name!r}: {text!r}"
                )
            if problem := _variable_problem(item, kind):
                raise ValueError(f"runtime_env['env_vars']: the {kind} {item[:100]!r} {problem}")
    return dict(value) or None


def _variable_problem(text: str, kind: str) -> str:
    """Say why no process can have a variable with this name ("key") or value; "" if one can."""
    if kind == "key" and not text:
        return "is empty, and a variable has a name"
    if kind == "key" and "=" in text:
        return "has a '=', which ends a name; hint: {'NAME': 'value'}"
    if "\0" in text:
        return "has a NUL, which ends the text of a variable"
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        return f"cannot be encoded: {error}"
    if len(text) >= _LONGEST_VARIABLE:
        return f"has {len(text)} characters; Linux lets a variable have fewer than {_LONGEST_VARIABLE}"
    return ""


def _check_working_dir(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise TypeError(f"`working_dir` must be a string, got {type(value)}.")
    check_package_source(value)
    return value


def check_package_source(path: str) -> None:
    """Raise ValueError if `path` cannot be made a package."""
    scheme = path.partition("://")[0] if "://" in path else ""
    if scheme in ("gcs", *REMOTE_SCHEMES) and not path.partition("?")[0].endswith(ARCHIVES):
        raise ValueError(f"Only {', '.join(ARCHIVES)} files supported for remote URIs, got {path}.")
    if scheme in ("gcs", *REMOTE_SCHEMES):
        return
    if scheme == "local":
        if not os.path.isabs(path.removeprefix(IN_PLACE)):
            raise ValueError(f"{path} is not a valid URI: local:// is followed by an absolute path.")
        return
    if scheme not in ("", "file"):
        raise ValueError(f"{path} is not a valid URI: the protocol {scheme!r} is unknown.")
    local = path.removeprefix("file://")
    if not os.path.exists(os.path.expanduser(local)):
        raise ValueError(f"{local} is not a valid path.")
    if not os.path.isdir(os.path.expanduser(local)) and not local.endswith((*ARCHIVES, ".py")):
        raise ValueError(
            f"{local} is not a valid path: only directories, .py files and {', '.join(ARCHIVES)} are supported."
        )


def _check_py_modules(value: Any) -> list[Any] | None:
    if not isinstance(value, list):
        raise TypeError(f"`py_modules` must be a list of strings, got {type(value)}.")
    modules = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in value]
    for item in modules:
        if isinstance(item, str):
            check_package_source(item)
        elif not isinstance(item, ModuleType):
            raise TypeError(f"`py_modules` must be a list of file paths, URIs, or imported modules, got {type(item)}.")
    return modules or None


def _check_excludes(value: Any) -> list[str] | None:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"runtime_env['excludes'] must be of type List[str], got {type(value)}")
    return value or None


def _check_hook(value: Any) -> Any:
    if not isinstance(value, str) and not callable(value):
        raise TypeError(f"worker_process_setup_hook must be a function or a str, got {type(value)}.")
    return value


def _check_executable(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"`py_executable` must be a string, got {value!r} of {type(value)}.")
    return value


def _installer(name: str, known: tuple[str, ...]) -> Callable[[Any], dict[str, Any] | None]:
    """The check of `pip` or `uv`: converts any of their forms to a dict with `packages`."""

    def check(value: Any) -> dict[str, Any] | None:
        given_as_dict = isinstance(value, dict)
        if isinstance(value, (str, list)):
            value = {"packages": value}
        elif not isinstance(value, dict):
            raise TypeError(f"runtime_env['{name}'] must be of type str or List[str] or dict, got {type(value)}")
        if set(value) - set(known):
            raise ValueError(
                f"runtime_env['{name}'] can only have these fields: {', '.join(known)}, but got: {list(value)}"
            )
        if "packages" not in value:
            raise ValueError(f"runtime_env['{name}'] must include field 'packages', but got {value}")
        found = dict(value)
        found["packages"] = _packages(name, value["packages"])
        for field in known[1:]:
            kind: Any = bool if field.endswith("_check") else list if field.endswith("_options") else str
            where = f"runtime_env['{name}']['{field}'] must be of type"
            if field in found and found[field] is not None and not isinstance(found[field], kind):
                raise TypeError(f"{where} {kind.__name__}, got {type(found[field])}")
            if kind is list:
                _check_strings(where, found.get(field) or [])
        found.setdefault(known[1], False)  # pip_check, uv_check
        if name == "uv" and given_as_dict:
            found.setdefault("uv_pip_install_options", ["--no-cache"])
        return found if found["packages"] else None

    return check


def _packages(name: str, given: Any) -> list[str]:
    if isinstance(given, str):
        if not os.path.isfile(given):
            raise ValueError(f"{given} is not a valid file")
        with open(given, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
        return [line for line in lines if line and not line.startswith("#")]
    if not isinstance(given, list):
        raise ValueError(f"runtime_env['{name}']['packages'] must be of type str or list, got: {type(given)}")
    _check_strings(f"runtime_env['{name}'] must be of type str or List[str]: its packages are", given)
    return list(dict.fromkeys(given))


def _check_strings(where: str, items: list[Any]) -> None:
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise TypeError(f"{where} list[str], got {type(item)} for {index}-th item.")


def _check_conda(value: Any) -> str | dict[str, Any]:
    """Read the file of a description; workers cannot have a Conda environment of their own all the same."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise TypeError(f"runtime_env['conda'] must be of type str or dict, got {type(value)}.")
    if value.endswith((".yaml", ".yml")):
        if not os.path.isfile(value):
            raise ValueError(f"Can't find conda YAML file {value}.")
        try:
            import yaml

            with open(value, encoding="utf-8") as file:
                found: dict[str, Any] = yaml.safe_load(file)
        except Exception as error:
            raise ValueError(f"Failed to read conda file {value}: {error}.") from error
        return found
    if os.path.isabs(value) and not os.path.isdir(value):
        raise ValueError(f"Can't find conda env directory {value}.")
    return value


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "conda": _check_conda,
    "config": RuntimeEnvConfig.parse_and_validate_runtime_env_config,
    "env_vars": _check_env_vars,
    "excludes": _check_excludes,
    "pip": _installer("pip", _PIP_FIELDS),
    "py_executable": _check_executable,
    "py_modules": _check_py_modules,
    "uv": _installer("uv", _UV_FIELDS),
    "worker_process_setup_hook": _check_hook,
    "working_dir": _check_working_dir,
}
