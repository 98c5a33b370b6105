"""A worker's runtime_env: another Python, packages in its import path, a working directory, a hook. Set up once.

A worker serves one environment for life. Another Python replaces the forked worker before it has joined the node
(`exec` keeps its pid, by which the raylet knows it), or the same one does, for variables such as LD_PRELOAD; the rest
is done between joining and the first task. A worker whose environment cannot be set up lives all the same, and answers
every task with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from time import perf_counter
from typing import Any

import msgspec

from hpcray.common.exceptions import ActorDiedError, RayError, RuntimeEnvSetupError
from hpcray.common.resources import JOB_FIELD
from hpcray.platform import fork_server
from hpcray.platform.accelerators import device_visibility_state, restore_device_visibility
from hpcray.platform.private_files import CLOSED, make_private_directory, read_private_file, write_private_file
from hpcray.platform.sockets import node_ip_address
from hpcray.protocol.messages import JobInfo
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.runtime.worker.context import WorkerContext
from hpcray.runtime.worker.log_output import log_as
from hpcray.runtime_env.runtime_env import (
    DEFAULT_SETUP_TIMEOUT,
    PLUGINS_VARIABLE,
    PYTHON_FIELDS,
    RUNTIME_ENV_VARIABLE,
    SETUP_HOOK_VARIABLE,
    STARTED_WITH,
    RuntimeEnv,
    load_function,
    may_prevent_start,
    read_at_start,
)
from hpcray.runtime_env.runtime_env_plugin import RuntimeEnvContext, RuntimeEnvPluginManager, changed_command
from hpcray.runtime_env.runtime_env_setup import (
    RUNTIME_ENV_DIRECTORY,
    PackageError,
    PythonSetupError,
    set_up_python,
    try_variables,
    unpack_package,
    unpacked_package,
)

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What the other Python lacks (hpcray itself, for one) it finds where this one does, after all that it has itself.
_PATHS = (
    "import sys; sys.path[0:1] = []; import json; "
    "sys.path += [p for p in json.loads(sys.argv[1]) if p not in sys.path]; "
)
_COMMAND = _PATHS + "from {entry} import other_python_main; other_python_main(*sys.argv[2:5])"
_TRIAL = _PATHS + "import {entry}"
_SYSTEM = ("site-packages", "dist-packages", "lib-dynload")


class _EnvFunctionError(Exception):
    """The hook cannot be loaded, or raised; the message gives its traceback."""


_REFERENCE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_of_template = {os.fsdecode(name): os.fsdecode(text) for name, text in os.environb.items()}
"""Variables of the process that this one is forked from: it has imported this module."""
_expanded: dict[tuple[str, str], str] = {}


def expanded(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Variables of a runtime_env with `${NAME}` in their values replaced by what this process has, "" for nothing.

    Each is looked at once: given again, when `PATH` has become `${PATH}:/more`, it is as before. A name that stands for
    one of the variables themselves means what the node has.
    """
    found = {}
    given = list(variables)
    for name, value in given:
        if "$" in value:
            if (name, value) not in _expanded:
                _expanded[name, value] = _replace_references(value, given)
            value = _expanded[name, value]
        found[name] = value
    return found


def _replace_references(text: str, given: Collection[tuple[str, str]]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        current = os.environ.get(name)
        if current is not None and (name, current) in given:  # this worker was forked with it, as it is written
            current = _of_template.get(name)
        return (found[0] if found[2] else "") if current is None else current

    return _REFERENCE.sub(value, text)


class WorkerRuntimeEnv:
    """The fields of a runtime_env, beside its variables, set up in this worker.

    Args:
        text: the fields as JSON; "" for none.

    Attributes:
        job: the job of the driver that this worker works for; None for the first driver's.
        problem: why it cannot be had; "" if it can, as far as is known.
        hook_failed: the problem is that of the setup hook.
        since: when it began to be set up (`perf_counter`); 0 before and after that.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.fields: dict[str, Any] = json.loads(text) if text else {}
        self.job = msgspec.convert(self.fields[JOB_FIELD], JobInfo) if JOB_FIELD in self.fields else None
        self.problem = ""
        self.hook_failed = False
        self.since = 0.0
        self._front: list[str] = []
        self._directory = ""
        self._paths_of_python: list[str] = []

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> WorkerRuntimeEnv:
        """The environment that this worker was forked for. Child processes must not see the variable."""
        return cls(environ.pop(RUNTIME_ENV_VARIABLE, ""))

    @classmethod
    def handed_over(cls, kept: str) -> WorkerRuntimeEnv:
        """The environment of the process whose place this Python has taken, with its devices; `kept` is removed."""
        text, devices = json.loads(read_private_file(kept, CLOSED))
        os.unlink(kept)
        environment = cls(text)
        environment.in_own_python()
        restore_device_visibility(devices)
        return environment

    @property
    def timeout(self) -> float | None:
        """Seconds that the setup may take; None: any time."""
        seconds = (self.fields.get("config") or {}).get("setup_timeout_seconds", DEFAULT_SETUP_TIMEOUT)
        return None if seconds == -1 else float(seconds)

    def variables(self, given: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return variables as they are set in this process: `${NAME}` in them is replaced (`expanded`)."""
        return expanded((name, value) for name, value in given if name != RUNTIME_ENV_VARIABLE)

    # ------------------------------------------------------------ another Python

    @property
    def alike(self) -> bool:
        """True if all workers of the environment start from the same process, also on a node that lacks its packages
        still."""
        return not self._plugged and not (self.fields.get("py_executable") and self.fields.get("working_dir"))

    @property
    def _plugged(self) -> bool:
        """True if plugins set up a part of the environment."""
        return PLUGINS_VARIABLE in os.environ and any(
            field not in RuntimeEnv.known_fields and field != STARTED_WITH for field in self.fields
        )

    def become_python(self, session_dir: str, number: int, entry: str) -> None:
        """Go on as the Python that the environment asks for, if it does: this call does not come back then.

        Args:
            session_dir: the session directory of this node.
            number: this worker's number on its node.
            entry: the module whose `other_python_main` is the worker's life in that Python.
        """
        plugged = self._plugged
        variables = expanded(self.fields.get(STARTED_WITH, {}).items())
        fresh = self._came_too_late(variables)
        if not plugged and not fresh and not any(self.fields.get(field) for field in PYTHON_FIELDS):
            return
        try:
            paths = json.dumps([_ROOT, *(path for path in sys.path if path.rstrip("/").endswith(_SYSTEM[:2]))])
            directory = self._unpacked_directory(session_dir)
            if directory is None:
                return  # `set_up` looks again, when the package is here
            trial = ["-c", _TRIAL.format(entry=entry), paths]
            found = set_up_python(session_dir, self.fields, self.timeout, trial, directory)
            os.environ.update(found.variables)
            if plugged:
                found.command = self._changed_by_plugins(session_dir, found.command)
            if fresh and not found.command:
                found.command = [sys.executable]
            if not found.command:
                return
            if doubtful := may_prevent_start(variables):
                try_variables(session_dir, found.command, doubtful, self.timeout, trial)
            os.environ.update(variables)
            # Not in the arguments, which all users of the node can read: the variables of the job are in it.
            place = make_private_directory(os.path.join(session_dir, RUNTIME_ENV_DIRECTORY))
            kept = os.path.join(place, f"start-{os.urandom(8).hex()}")
            write_private_file(kept, json.dumps([self.text, device_visibility_state()]).encode())
            if directory:
                os.chdir(directory)
            command = [*found.command, "-c", _COMMAND.format(entry=entry), paths, session_dir, str(number), kept]
            os.execvp(command[0], command)
        except PythonSetupError as error:
            self.problem = str(error)
        except Exception as error:  # whatever it is: the tasks of this worker raise it
            self.problem = f"{type(error).__name__}: {error}"

    def _came_too_late(self, variables: Mapping[str, str]) -> bool:
        """Return True if a library that this process has from its fork server, or the interpreter, has read one of the
        variables when it was another."""
        if any(_of_template.get(name) != text for name, text in read_at_start(variables).items()):
            return True
        noted = fork_server.of_imports
        if self.job is not None:  # a later driver: what is preloaded was loaded with the first one's variables
            return noted.differ_at_all({**_of_template, **expanded(self.job.env), **variables})
        return noted.differ(variables)

    def _changed_by_plugins(self, session_dir: str, command: list[str]) -> list[str]:
        """Let plugins change this worker; return the command that is to take its place, none if it may go on."""
        before = shlex.join(command or [sys.executable])
        context = RuntimeEnvContext(py_executable=before)
        RuntimeEnvPluginManager().set_up(session_dir, self.fields, context, self.timeout)
        os.environ.update(context.env_vars)
        return changed_command(context, before) or command

    def _unpacked_directory(self, session_dir: str) -> str | None:
        """Return the directory that a command may be relative to, "" for none; None if it is not on this node yet."""
        package = self.fields.get("working_dir") if self.fields.get("py_executable") else None
        if not package:
            return ""
        return package["local"] if "local" in package else unpacked_package(session_dir, package["hash"])

    def _take_variables_of_python(self, session_dir: str) -> None:
        """Make of this process what a command in the working directory would have started, if it can be had so.

        Raises:
            PythonSetupError: the command starts another Python.
        """
        found = set_up_python(session_dir, self.fields, self.timeout, directory=self._directory)
        if not os.path.samefile(found.executable, sys.executable):
            raise PythonSetupError(
                f"py_executable {self.fields['py_executable']!r} in a working_dir starts another Python "
                f"({found.executable}), on a node to which the working_dir had to be copied first; hint: name a Python "
                "that this node has"
            )
        os.environ.update(found.variables)

    def in_own_python(self) -> None:
        """This is the Python of the environment: its import path goes before that of the job's Python."""
        self._paths_of_python = [path for path in sys.path if _of_a_python(path)]

    # ------------------------------------------------------------ packages, directory, hook

    def set_up(self, worker: WorkerContext) -> None:
        """Set up all but the Python, before the first task."""
        if not self.fields and SETUP_HOOK_VARIABLE not in os.environ:
            return
        self.since = perf_counter()
        if "logging_config" in self.fields:
            log_as(self.fields["logging_config"])
        try:
            if not self.problem:
                late = self._unpacked_directory(worker.process.place.session_dir) is None
                self._fetch_packages(worker)
                if late:
                    self._take_variables_of_python(worker.process.place.session_dir)
                self.enter()
                self._run_hook(worker)
        except _EnvFunctionError as error:
            self.problem, self.hook_failed = str(error), True
        except PythonSetupError as error:
            self.problem = str(error)
        except (RayError, PackageError, OSError) as error:
            self.problem = f"{type(error).__name__}: {error}"
        self.since = 0.0

    def enter(self) -> None:
        """Put the environment's directories first. Again when the job's have been put there."""
        if self._paths_of_python:
            own = [path for path in sys.path if not _of_a_python(path)]
            others = [path for path in sys.path if _of_a_python(path) and path not in self._paths_of_python]
            sys.path[:] = [*own, *self._paths_of_python, *others]
        if self._front:
            sys.path[:] = [*self._front, *(path for path in sys.path if path not in self._front)]
            importlib.invalidate_caches()
        if self._directory:
            os.chdir(self._directory)

    def _fetch_packages(self, worker: WorkerContext) -> None:
        modules = [self._fetched(worker, entry) for entry in self.fields.get("py_modules") or ()]
        if self.fields.get("working_dir"):
            self._directory = self._fetched(worker, self.fields["working_dir"])
            modules.insert(0, self._directory)
        self._front = modules
        if modules:
            os.environ["PYTHONPATH"] = os.pathsep.join([*modules, *filter(None, [os.environ.get("PYTHONPATH")])])

    def _fetched(self, worker: WorkerContext, entry: Mapping[str, str]) -> str:
        if "local" in entry:
            if not os.path.isdir(entry["local"]):
                raise PackageError(f"local://{entry['local']}: this directory must already exist on every node")
            return entry["local"]
        return unpack_package(
            worker.process.place.session_dir, entry["hash"], lambda: bytes(self._value(worker, entry["object"]))
        )

    def _value(self, worker: WorkerContext, object_id: str) -> Any:
        ref: ObjectRef[Any] = ObjectRef(bytes.fromhex(object_id))
        return worker.process.reader.get([ref], self.timeout)[0]

    def _run_hook(self, worker: WorkerContext) -> None:
        hook = self.fields.get("worker_process_setup_hook") or {"name": os.environ.get(SETUP_HOOK_VARIABLE, "")}
        name = hook["name"]
        if "object" not in hook:
            if name:
                where = (
                    f", {name} from ``ray.init(runtime_env={{'worker_process_setup_hook': {name}}})``. Please make "
                    "sure the given module exists and is available from ray workers. For more details, see the error "
                    "trace below."
                )
                with _explained(f"Failed to execute the setup hook method{where}"):
                    load_function(name)()
            return
        with _explained("Failed to deserialize the setup hook method."):
            function = self._value(worker, hook["object"])
        with _explained(f"Failed to execute the setup hook method. Function name:{name}"):
            function()

    def error(self, actor_id: str) -> RayError:
        """Return what tasks raise, or the calls of an actor, because of the problem."""
        if self.hook_failed and actor_id:
            return ActorDiedError(f"its worker could not be set up. {self.problem}", actor_id=actor_id)
        return RuntimeEnvSetupError(f"[Node {node_ip_address()}] {self.problem}")


@contextlib.contextmanager
def _explained(text: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        raise _EnvFunctionError(f"{text}\n{traceback.format_exc()}") from None


def _of_a_python(path: str) -> bool:
    """Return True if a directory of the import path belongs to some Python's installation."""
    end = os.path.basename(path.rstrip("/"))
    return end in _SYSTEM or (end.startswith("python3") and os.path.basename(os.path.dirname(path)).startswith("lib"))
