"""Fields of a runtime_env that a site adds: classes that the variable RAY_RUNTIME_ENV_PLUGINS names, as JSON.

A plugin sees the runtime_env of a worker before that joins its node, and changes its variables and the command that it
is started with.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from hpcray.common.keyed_hash import blake2b
from hpcray.platform.private_files import write_private_file
from hpcray.runtime_env.runtime_env import PLUGINS_VARIABLE, RuntimeEnv, load_function
from hpcray.runtime_env.runtime_env_setup import PythonSetupError, locked_path

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 10, 100
_logger = logging.getLogger("hpcray")


class RuntimeEnvContext:
    """The part of a worker that plugins may change.

    Args:
        command_prefix: words of shell before the command, for example `["cd", "/tmp", "&&"]`.
        env_vars: environment variables.
        py_executable: shell command of the Python; by default that of the job.
        override_worker_entrypoint, java_jars: without effect.
    """

    def __init__(
        self,
        command_prefix: list[str] | None = None,
        env_vars: dict[str, str] | None = None,
        py_executable: str | None = None,
        override_worker_entrypoint: str | None = None,
        java_jars: list[str] | None = None,
    ) -> None:
        self.command_prefix = command_prefix or []
        self.env_vars = env_vars or {}
        self.py_executable = py_executable or sys.executable
        self.override_worker_entrypoint = override_worker_entrypoint
        self.java_jars = java_jars or []

    def serialize(self) -> str:
        """Return the context as JSON."""
        return json.dumps(self.__dict__)

    @staticmethod
    def deserialize(json_string: str) -> RuntimeEnvContext:
        """Return the inverse of `serialize`."""
        return RuntimeEnvContext(**json.loads(json_string))


class RuntimeEnvPlugin:
    """Base class of plugins. The plugin is asked for a runtime_env that has a field of its `name`."""

    name: str | None = None
    priority: int = DEFAULT_PRIORITY

    @staticmethod
    def validate(runtime_env_dict: dict[str, Any]) -> None:
        """Check the field.

        Raises:
            ValueError: it is not allowed; the tasks of the environment raise it.
        """

    def get_uris(self, runtime_env: RuntimeEnv) -> list[str]:
        """Return names of what `create` makes; each is made once per node."""
        return []

    async def create(
        self, uri: str | None, runtime_env: RuntimeEnv, context: RuntimeEnvContext, logger: logging.Logger
    ) -> float:
        """Make what the environment needs on this node; return its size in bytes."""
        return 0

    def modify_context(
        self, uris: list[str], runtime_env: RuntimeEnv, context: RuntimeEnvContext, logger: logging.Logger
    ) -> None:
        """Change the variables and the command of a worker."""

    def delete_uri(self, uri: str, logger: logging.Logger) -> float:
        """Delete what `create` made. Nothing is deleted before the end of the session."""
        return 0


class RuntimeEnvPluginManager:
    """The plugins that the variable RAY_RUNTIME_ENV_PLUGINS names: `[{"class": "module.Class", "priority": 5}]`.

    Raises:
        RuntimeError: the variable's value, a class or a priority is not valid.
    """

    def __init__(self) -> None:
        self.plugins: dict[str, tuple[int, RuntimeEnvPlugin]] = {}
        for entry in json.loads(os.environ.get(PLUGINS_VARIABLE) or "[]"):
            if not isinstance(entry, dict) or "class" not in entry:
                raise RuntimeError(
                    f"Invalid runtime env plugin config {entry}, it should be a object which contains the class field."
                )
            kind = load_function(entry["class"])
            self._add(kind, entry.get("priority", getattr(kind, "priority", None)))

    def _add(self, kind: Any, priority: Any) -> None:
        if not (isinstance(kind, type) and issubclass(kind, RuntimeEnvPlugin)):
            raise RuntimeError(
                f"Invalid runtime env plugin class {kind}. The plugin class must inherit "
                "ray._private.runtime_env.plugin.RuntimeEnvPlugin."
            )
        if not kind.name:
            raise RuntimeError(f"No valid name in runtime env plugin {kind}.")
        if kind.name in self.plugins:
            raise RuntimeError(f"The name of runtime env plugin {kind} conflicts with {self.plugins[kind.name][1]}.")
        if not isinstance(priority, int) or not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise RuntimeError(
                f"Invalid runtime env priority {priority}, it should be an integer between {MIN_PRIORITY} and "
                f"{MAX_PRIORITY}."
            )
        self.plugins[kind.name] = priority, kind()

    def set_up(
        self, session_dir: str, fields: Mapping[str, Any], context: RuntimeEnvContext, timeout: float | None
    ) -> None:
        """Let the plugins of an environment make what they need, and change the context, by increasing priority.

        Raises:
            PythonSetupError: it took longer than `timeout` seconds. What a plugin raises.
        """
        import asyncio

        env = RuntimeEnv(_validate=False, **fields)
        for _, plugin in sorted(self.plugins.values(), key=lambda each: each[0]):
            if plugin.name is None or env.get(plugin.name) is None:
                continue
            plugin.validate(env)
            uris = plugin.get_uris(env)
            targets: list[str | None] = [*uris]
            for uri in targets or [None]:
                try:
                    asyncio.run(asyncio.wait_for(_create(session_dir, plugin, uri, env, context), timeout))
                except asyncio.TimeoutError:
                    raise PythonSetupError(
                        f"Failed to install runtime_env within the timeout of {timeout} seconds (plugin "
                        f"{plugin.name}). Consider increasing the timeout in the runtime_env config: "
                        '{"config": {"setup_timeout_seconds": 1800}}'
                    ) from None
            plugin.modify_context(uris, env, context, _logger)


async def _create(
    session_dir: str, plugin: RuntimeEnvPlugin, uri: str | None, env: RuntimeEnv, context: RuntimeEnvContext
) -> None:
    if uri is None:
        await plugin.create(None, env, context, logger=_logger)
        return
    name = blake2b(f"{plugin.name}\0{uri}".encode(), digest_size=16).hexdigest()
    with locked_path(session_dir, f"plugin-{name}") as done:
        if not os.path.exists(done):
            await plugin.create(uri, env, context, logger=_logger)
            write_private_file(done, b"")


def changed_command(context: RuntimeEnvContext, before: str) -> list[str]:
    """The words that start a worker, arguments may follow; none where plugins have not changed the command."""
    if not context.command_prefix and context.py_executable == before:
        return []
    # Words of shell, as they are: a plugin quotes its own.
    return ["bash", "-c", " ".join([*context.command_prefix, "exec", context.py_executable, '"$@"']), "bash"]
