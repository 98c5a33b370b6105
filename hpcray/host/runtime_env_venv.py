"""Another Python for a node's workers: a virtual environment that pip or uv fills, or one that the user names."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpcray.host.processes import kill_descendants
from hpcray.host.runtime_env_pack import locked

_LAST_LINES = 20
_AGAIN = 0.01
_PROBE = (
    "import json, os, sys; print('\\n' + json.dumps({'executable': sys.executable, 'version': sys.version_info[:2], "
    "'env': {k: os.environ[k] for k in ('PATH', 'VIRTUAL_ENV') if k in os.environ}}))"
)
_DONE = "hpcray-done"


class SetupError(Exception):
    """An environment could not be set up; the message says at which step, and what was said there."""


def python_for(
    session_dir: str, env: Mapping[str, Any], timeout: float | None, trial: Sequence[str] = ("-c", "")
) -> tuple[str, dict[str, str]]:
    """The Python that workers of an environment run with, and variables that go with it. ("", {}): ours.

    What is made for it is made once per node, in the session directory, and goes with that.

    Args:
        env: its fields `pip`, `uv` and `py_executable` are looked at.
        timeout: seconds that all of it may take; None: any time.
        trial: arguments with which the Python must succeed, or it cannot run a worker.

    Raises:
        SetupError: a command failed, or the Python is of another version than ours.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    python = ""
    found: dict[str, str] = {}
    if env.get("py_executable"):
        python, found = _probed(session_dir, str(env["py_executable"]), deadline, trial)
    for tool in ("pip", "uv"):
        if env.get(tool):
            python = _installed(session_dir, tool, env[tool], python or sys.executable, deadline, trial)
            found = {**found, **_activated(python)}
    return python, found


def _activated(python: str) -> dict[str, str]:
    root = os.path.dirname(os.path.dirname(python))
    return {"VIRTUAL_ENV": root, "PATH": os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])}


def _probed(session_dir: str, command: str, deadline: float | None, trial: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What a command such as "python3" or "uv run --with x python" leads to. Asked once per node."""
    with locked(session_dir, "python-" + _digest(command)) as path:
        if not os.path.exists(path):
            words = shlex.split(command)
            if "python" not in os.path.basename(words[-1]):
                words.append("python")
            said = _run([*words, "-c", _PROBE], "py_executable", deadline)
            found = _understood(command, said)
            _run([found["executable"], *trial], f"py_executable {command!r} cannot run hpcray's workers", deadline)
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(found, file)
            os.rename(path + ".new", path)
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    return found["executable"], found["env"]


def _understood(command: str, said: str) -> dict[str, Any]:
    """What a Python said of itself, if it can be used."""
    try:
        found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
        version = tuple(found["version"])
    except (ValueError, LookupError, TypeError):
        raise SetupError(f"py_executable {command!r} is no Python: it said\n{_last(said)}") from None
    if version != sys.version_info[:2]:
        ours = "{}.{}".format(*sys.version_info[:2])
        raise SetupError(
            f"py_executable {command!r} is Python {version[0]}.{version[1]}, but the job runs with {ours}: they would "
            f"not understand what they send each other; hint: use a Python {ours}"
        )
    return found


def _installed(
    session_dir: str, tool: str, wanted: Mapping[str, Any], base: str, deadline: float | None, trial: Sequence[str]
) -> str:
    """The Python of a virtual environment with these packages, on top of what `base` has."""
    name = f"{tool}-" + _digest(json.dumps([base, dict(wanted)], sort_keys=True))
    with locked(session_dir, name) as path:
        python = os.path.join(path, "bin", "python")
        if os.path.exists(os.path.join(path, _DONE)):
            return python
        shutil.rmtree(path, ignore_errors=True)
        try:
            _make(path, base, deadline)
            _install(path, python, tool, wanted, base, deadline)
            _run([python, *trial], f"hpcray's workers cannot run with what {tool} installed", deadline)
            with open(os.path.join(path, _DONE), "w", encoding="utf-8"):
                pass
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    return python


def _make(path: str, base: str, deadline: float | None) -> None:
    """An empty virtual environment that sees what `base` sees; what is installed into it comes first."""
    if base == sys.executable:
        import venv

        venv.EnvBuilder(system_site_packages=True, symlinks=True).create(path)
        seen = sys.path
    else:
        _run([base, "-m", "venv", "--system-site-packages", "--without-pip", path], "venv", deadline)
        said = _run([base, "-c", "import json, sys; print(json.dumps(sys.path))"], "venv", deadline)
        seen = json.loads(said.strip().splitlines()[-1])
    packages = [entry for entry in seen if entry.rstrip("/").endswith(("site-packages", "dist-packages"))]
    version = "python{}.{}".format(*sys.version_info[:2])
    with open(os.path.join(path, "lib", version, "site-packages", "hpcray_base.pth"), "w", encoding="utf-8") as file:
        file.write("\n".join(dict.fromkeys(packages)) + "\n")


def _install(path: str, python: str, tool: str, wanted: Mapping[str, Any], base: str, deadline: float | None) -> None:
    pip = [base, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    if wanted.get("pip_version"):
        _run([*pip, "install", f"pip{wanted['pip_version']}"], "pip", deadline)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
    requirements = os.path.join(path, "requirements.txt")
    with open(requirements, "w", encoding="utf-8") as file:
        file.write("\n".join(wanted["packages"]) + "\n")
    if tool == "pip":
        _run([*pip, "install", *(wanted.get("pip_install_options") or ()), "-r", requirements], "pip", deadline)
        if wanted.get("pip_check"):
            _run([*pip, "check"], "pip", deadline)
        return
    uv = shutil.which("uv")
    if uv is None or wanted.get("uv_version"):
        _run([*pip, "install", f"uv{wanted.get('uv_version') or ''}"], "pip", deadline)
        uv = os.path.join(path, "bin", "uv")
    options = wanted.get("uv_pip_install_options") or ()
    _run([uv, "pip", "install", "--python", python, *options, "-r", requirements], "uv", deadline)
    if wanted.get("uv_check"):
        _run([uv, "pip", "check", "--python", python], "uv", deadline)


def _run(command: Sequence[str], what: str, deadline: float | None) -> str:
    """Run one command; what it printed.

    Raises:
        SetupError: it failed, cannot be started, or took too long; with its last lines.
    """
    left = None if deadline is None else max(1.0, deadline - time.monotonic())
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise SetupError(f"{what}: cannot run {command[0]}: {error}") from None
    try:
        said, _ = child.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        while kill_descendants(child.pid):  # pip works in a process of its own, which would go on
            time.sleep(_AGAIN)
        child.kill()
        said, _ = child.communicate()
        raise SetupError(
            f"{what}: {shlex.join(command)} took longer than the environment's setup_timeout_seconds allows\n"
            f"{_last(said)}"
        ) from None
    if child.returncode:
        raise SetupError(f"{what}: {shlex.join(command)} ended with code {child.returncode}\n{_last(said)}")
    return said


def _last(said: str) -> str:
    return "\n".join(said.strip().splitlines()[-_LAST_LINES:])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
