"""Files and Pythons of runtime environments: packages made of directories, and another Python for a node's workers: a
virtual environment that pip or uv fills, or a Python that the user names."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from hpcray.common.keyed_hash import blake2b
from hpcray.platform.private_files import (
    CLOSED,
    is_trusted_owner,
    make_private_directory,
    open_private_file,
    read_private_file,
    write_private_file,
)
from hpcray.platform.process_control import code_line, module_line
from hpcray.platform.process_tree import kill_descendants

PACKAGE_SIZE_LIMIT = 512 << 20
DEFAULT_EXCLUDES = (".git", ".venv", "venv", "__pycache__")
IGNORE_FILES = (".gitignore", ".rayignore")
RUNTIME_ENV_DIRECTORY = "runtime_env"
"""In the session directory: packages and Pythons of environments."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_IGNORE_VARIABLE = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"
_EXCLUDES_VARIABLE = "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES"
UNPACKED_SIZE_LIMIT = 8 << 30
"""Bytes that an archive of the user's may have when it is unpacked."""
_HIGHEST_RATIO, _ANY_RATIO = 100, 64 << 20
"""How many times larger than packed it may be then, if it has more than so many bytes."""
_LONGEST_NAME = 255  # bytes
_ENCRYPTED = 1  # flag of an entry of a zip
_PERMISSIONS = 0o777
_SHOWN_LINES = 20  # of output, in an error
_KILL_INTERVAL = 0.01  # seconds between two passes over the descendants
_PROBE = (
    "import sys; sys.path[0:1] = []; import json, os; print('\\n' + json.dumps({'executable': sys.executable, "
    "'version': sys.version_info[:2], 'env': dict(os.environ), 'parent': os.getppid(), 'given': sys.argv[1:]}))"
)
_ARGUMENT = "two words"
"""Given to a probe: a script that passes on `$@` without quotes makes two of it."""
_OF_THE_SHELL = ("_", "OLDPWD", "PWD", "SHLVL")
_RUNNERS = ("conda", "hatch", "mamba", "micromamba", "pdm", "pixi", "poetry", "uv")
"""Commands that run another command in an environment: without one, Python is meant."""
_DONE = "hpcray-done"


class PackageError(ValueError):
    """A package cannot be made of this source, or not unpacked; the message gives the reason."""


def package_files(root: str, excludes: Sequence[str] = ()) -> list[str]:
    """The files of a directory that go into its package: relative paths, sorted.

    Left out: what `excludes` and the directory's .gitignore and .rayignore files name (in Git's syntax, relative to
    where they are), .git, virtual environments called .venv or venv, __pycache__, and what is neither file nor
    directory. A link stands for what it leads to, as in Ray, but for one that leads to a directory around it. An empty
    directory is in the list with a slash at its end.
    """
    given = os.environ.get(_EXCLUDES_VARIABLE)
    always = DEFAULT_EXCLUDES if given is None else [name.strip() for name in given.split(",") if name.strip()]
    return sorted(_walk(root, "", [("", _spec([*always, *excludes]))]))


def _walk(root: str, below: str, specs: list[tuple[str, object]]) -> Iterator[str]:
    here = os.path.join(root, below)
    found = [] if os.environ.get(_IGNORE_VARIABLE) == "1" else [os.path.join(here, name) for name in IGNORE_FILES]
    lines: list[str] = []
    for path in filter(os.path.isfile, found):  # a pipe would never end
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            lines += file.read().splitlines()
    if lines:
        specs = [*specs, (below, _spec(lines))]
    with os.scandir(here) as entries:
        found_here = sorted(entries, key=lambda entry: entry.name)
        if not found_here and below:
            yield below + "/"
        for entry in found_here:
            name = os.path.join(below, entry.name)
            try:
                directory = entry.is_dir()
            except OSError:
                continue  # a link that leads to itself
            shown = name.replace(os.sep, "/") + ("/" if directory else "")
            if any(spec.match_file(shown[len(base) :].lstrip("/")) for base, spec in specs):  # type: ignore[attr-defined]
                continue
            if directory:
                if not entry.is_symlink() or not _leads_around(os.path.join(root, name)):
                    yield from _walk(root, name, specs)
            elif not directory and entry.is_file():
                yield name


def _leads_around(link: str) -> bool:
    """Return True if a link leads to a directory that it is in itself: who follows it finds no end."""
    target = os.path.realpath(link)
    here = os.path.realpath(os.path.dirname(link))
    return os.path.commonpath([target, here]) == target


def _spec(lines: Sequence[str]) -> object:
    import pathspec  # 20 ms, and few jobs pack anything

    return pathspec.GitIgnoreSpec.from_lines(lines)


def files_signature(root: str, names: Sequence[str]) -> str:
    """A digest of names, sizes and times; it changes when a file of the directory does."""
    digest = blake2b(digest_size=16)
    for name in names:
        state = os.stat(os.path.join(root, name))
        if name.endswith("/"):
            digest.update(f"{name}\n".encode())
            continue
        digest.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\0{stat.S_IMODE(state.st_mode)}\n".encode())
    return digest.hexdigest()


def pack_package(root: str, names: Sequence[str], top: str = "") -> bytes:
    """A zip of files of a directory: equal files make equal bytes, whatever their times are.

    Args:
        names: relative to `root`, directories with a slash at their end; links become what they lead to.
        top: a directory that everything is put into.

    Raises:
        PackageError: the package would be larger than half a GiB, or a file cannot be read.
    """
    import zipfile  # not before: every `import hpcray` would pay for it

    if (total := sum(os.path.getsize(os.path.join(root, name)) for name in names)) > PACKAGE_SIZE_LIMIT:
        largest = sorted(names, key=lambda name: -os.path.getsize(os.path.join(root, name)))[:3]
        raise PackageError(
            f"Package size ({total / 2**20:.2f}MiB) of {root} exceeds the maximum size of "
            f"{PACKAGE_SIZE_LIMIT / 2**20:.2f}MiB. "
            f"The largest files are {largest}. You can exclude large files using the 'excludes' option to the "
            "runtime_env; hint: what is on a file system that all nodes share need not be packed at all"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package:
        for name in names:
            path = os.path.join(root, name)
            info = zipfile.ZipInfo(os.path.join(top, name).replace(os.sep, "/"), _EPOCH)
            if name.endswith("/"):
                info.external_attr = (stat.S_IMODE(os.stat(path).st_mode) & _PERMISSIONS | stat.S_IFDIR) << 16
                package.writestr(info, b"")
                continue
            info.external_attr = (stat.S_IMODE(os.stat(path).st_mode) & _PERMISSIONS | stat.S_IFREG) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            try:
                with open(path, "rb") as file:
                    package.writestr(info, file.read())
            except OSError as error:
                hint = "leave it out with the 'excludes' option to the runtime_env"
                raise PackageError(f"{path} cannot be packed: {error.strerror}; hint: {hint}") from None
    return buffer.getvalue()


def zip_of_tar(path: str) -> bytes:
    """A zip of the files in a tar archive, whatever its compression.

    Raises:
        PackageError: the archive cannot be read.
    """
    import tarfile
    import zipfile

    class Header(tarfile.TarInfo):
        """The header of a file, or of a name or comment: tarfile takes those into memory, whatever their size is."""

        taken = 0

        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
            found = super().frombuf(buf, encoding, errors)
            Header.taken += found.size
            _need_size(path, Header.taken, os.path.getsize(path))
            return found

    buffer = io.BytesIO()
    try:
        with (
            tarfile.open(path, tarinfo=Header) as archive,
            zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package,
        ):
            members = sorted(archive.getmembers(), key=lambda member: member.name)
            _need_size(path, sum(member.size for member in members), os.path.getsize(path))
            for member in members:
                file = archive.extractfile(member) if member.isfile() or member.issym() or member.islnk() else None
                if file is not None:
                    if not member.name:
                        raise PackageError(f"{path} has a file without a name")
                    info = zipfile.ZipInfo(os.path.normpath(member.name), _EPOCH)
                    info.external_attr = (stat.S_IMODE(member.mode) | stat.S_IFREG) << 16
                    info.compress_type = zipfile.ZIP_DEFLATED
                    package.writestr(info, file.read())
    except RecursionError:
        raise PackageError(f"{path} has links that lead to each other") from None
    except (tarfile.TarError, OSError, KeyError, EOFError, zlib.error) as error:
        raise PackageError(f"{path} is no archive that can be read: {error}") from error
    return buffer.getvalue()


def check_package(package: bytes, name: str) -> None:
    """Look through a package for what could not be unpacked, or would do harm.

    Raises:
        PackageError: it is no zip, is encrypted or packed in an unknown way, is much larger when it is unpacked, or has
            a name that leads out of it, is none or is taken twice, or a file that runs with its owner's rights.
    """
    import zipfile

    known = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    try:
        with zipfile.ZipFile(io.BytesIO(package)) as opened:
            items = opened.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise PackageError(f"the package {name} is no zip: {error}") from None
    _need_size(f"the package {name}", sum(item.file_size for item in items), len(package))
    files: set[str] = set()
    directories: set[str] = set()
    for item in items:
        entry = f"the package {name} has the name {item.filename!r}, which"
        parts = [part for part in item.filename.split("/") if part not in ("", ".")]
        if item.filename.startswith("/") or ".." in parts:
            raise PackageError(f"{entry} leads out of it")
        if not parts and not item.filename.endswith("/"):
            raise PackageError(f"{entry} is no name of a file")
        if any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
            raise PackageError(f"{entry} is longer than the {_LONGEST_NAME} bytes that a name can have")
        if item.flag_bits & _ENCRYPTED:
            raise PackageError(f"{entry} is encrypted; hint: pack it without a password")
        if item.compress_type not in known:
            raise PackageError(f"{entry} is packed by method {item.compress_type}; hint: deflate is understood")
        if not item.is_dir() and (item.external_attr >> 16) & (stat.S_ISUID | stat.S_ISGID):
            raise PackageError(f"{entry} would run with the rights of its owner (setuid, setgid); hint: chmod ug-s")
        whole = "/".join(parts)
        (directories if item.filename.endswith("/") else files).add(whole)
        directories.update("/".join(parts[:end]) for end in range(1, len(parts)))
    if both := sorted(files & directories):
        raise PackageError(f"the package {name} has {both[0]!r} as a file and as a directory")


def _need_size(what: str, unpacked: int, packed: int) -> None:
    if unpacked > UNPACKED_SIZE_LIMIT or (unpacked > _ANY_RATIO and unpacked > _HIGHEST_RATIO * packed):
        raise PackageError(
            f"{what} would have {unpacked / 2**20:.0f} MiB when it is unpacked, and has {packed / 2**20:.2f} MiB now; "
            f"at most {UNPACKED_SIZE_LIMIT >> 30} GiB are unpacked, and {_HIGHEST_RATIO} times the size"
        )


def package_digest(package: bytes) -> str:
    """The digest that names a package."""
    return blake2b(package, digest_size=16).hexdigest()


def unpack_package(session_dir: str, name: str, fetch: Callable[[], bytes]) -> str:
    """Unpack a package on this node, if no other process has. Returns its directory.

    Args:
        name: of the package; equal for equal packages.
        fetch: returns the package; called if this node has not unpacked it yet.

    Raises:
        PackageError: as from `check_package`. Nothing is left behind.
    """
    import zipfile

    with locked_path(session_dir, name) as path:
        if os.path.isdir(path):
            return path
        fresh = path + ".new"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            package = fetch()
            check_package(package, name)
            with zipfile.ZipFile(io.BytesIO(package)) as opened:
                for item in opened.infolist():
                    where = opened.extract(item, fresh)
                    if (mode := item.external_attr >> 16) and not item.is_dir():
                        os.chmod(where, (stat.S_IMODE(mode) & _PERMISSIONS) | stat.S_IRUSR)
            os.makedirs(fresh, exist_ok=True)
            os.rename(fresh, path)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
            raise PackageError(f"the package {name} is no zip that can be unpacked: {error}") from None
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return path


def unpacked_package(session_dir: str, name: str) -> str | None:
    """The directory of a package that is on this node already."""
    path = os.path.join(session_dir, RUNTIME_ENV_DIRECTORY, name)
    return path if os.path.isdir(path) else None


@contextlib.contextmanager
def locked_path(session_dir: str, name: str) -> Iterator[str]:
    """Context manager that locks an entry of this node's directory of environments, and gives its path, which may not
    exist."""
    directory = os.path.join(session_dir, RUNTIME_ENV_DIRECTORY)
    make_private_directory(directory, CLOSED)
    fd = open_private_file(os.path.join(directory, name + ".lock"), os.O_RDWR | os.O_CREAT, CLOSED)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield os.path.join(directory, name)
    finally:
        os.close(fd)


class PythonSetupError(Exception):
    """The setup of a Python failed; the message gives the step and its output."""


class PythonOfWorkers(Struct):
    """The Python that workers of an environment run with.

    Attributes:
        executable: its path; "" for that of the job.
        command: what starts it; arguments may follow.
        variables: environment variables that it has and the job does not.
    """

    executable: str = ""
    command: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


def set_up_python(
    session_dir: str,
    env: Mapping[str, Any],
    timeout: float | None,
    trial: Sequence[str] = ("-c", ""),
    directory: str = "",
) -> PythonOfWorkers:
    """The Python that workers of an environment run with.

    Virtual environments are made once per node, in the session directory, and are removed with that.

    Args:
        env: its fields `pip`, `uv` and `py_executable` are looked at.
        timeout: limit in seconds for all steps; None: none.
        trial: arguments with which the Python must succeed, or it cannot run a worker.
        directory: where `py_executable` runs; "" for the current directory.

    Raises:
        PythonSetupError: a command failed, or the Python is of another version than ours.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    found = PythonOfWorkers()
    if env.get("py_executable"):
        found = _probed(session_dir, str(env["py_executable"]), deadline, trial, directory)
    for tool in ("pip", "uv"):
        if env.get(tool):
            python = _installed(session_dir, tool, env[tool], found.executable or sys.executable, deadline, trial)
            found = PythonOfWorkers(python, [python], {**found.variables, **_activated(python)})
    return found


def try_variables(
    session_dir: str, command: Sequence[str], variables: Mapping[str, str], timeout: float | None, trial: Sequence[str]
) -> None:
    """Make sure, once per node, that a Python starts with these variables: with a wrong PYTHONHOME it does not.

    Args:
        command: starts the Python. trial: arguments with which it must succeed.
        timeout: limit in seconds; None: none.

    Raises:
        PythonSetupError: it does not.
    """
    with locked_path(session_dir, "variables-" + _digest(json.dumps([*command, sorted(variables.items())]))) as path:
        if not os.path.exists(path):
            deadline = None if timeout is None else time.monotonic() + timeout
            given = ", ".join(f"{name}={text}" for name, text in sorted(variables.items()))
            cannot = f"with {given} of env_vars, workers cannot start"
            _run([*command, *trial], cannot, deadline, variables=variables, shown=shlex.join(command))
            write_private_file(path, b"")


def _activated(python: str) -> dict[str, str]:
    root = os.path.dirname(os.path.dirname(python))
    return {"VIRTUAL_ENV": root, "PATH": os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])}


def _probed(
    session_dir: str, command: str, deadline: float | None, trial: Sequence[str], directory: str
) -> PythonOfWorkers:
    """The Python of a shell command such as "python3", "env A=1 python3 -O" or "uv run --with x python".

    The command runs once per node to see what it starts. Where that is the shell's own process, whose number the raylet
    knows, and passes arguments on as they are, each worker runs the command; else the Python is started directly, with
    the variables that it was seen with.
    """
    words = shlex.split(command)
    python = " python" if words[0] in _RUNNERS and "python" not in os.path.basename(words[-1]) else ""
    shell = ["bash", "-c", f'exec {command}{python} "$@"', "bash"]
    with locked_path(session_dir, "python-" + _digest(f"{directory}\0{command}")) as path:
        if not os.path.exists(path):
            probe = path + ".py"  # a file, as words of code would not arrive through `$@`
            write_private_file(probe, _PROBE.encode())
            output = _run([*shell, probe, _ARGUMENT], "py_executable", deadline, directory, shown=command)
            found = _understood(command, output)
            found["env"] = {
                name: value
                for name, value in found["env"].items()
                if os.environ.get(name) != value and name not in _OF_THE_SHELL
            }
            quoted = found.pop("given", None) == [_ARGUMENT]
            found["own"] = found.pop("parent", 0) == os.getpid() and quoted
            cannot = f"py_executable {command!r} cannot run hpcray's workers"
            _run([found["executable"], *trial], cannot, deadline, variables=found["env"])
            write_private_file(path, json.dumps(found).encode())
        found = json.loads(read_private_file(path))
    return PythonOfWorkers(found["executable"], shell if found["own"] else [found["executable"]], found["env"])


def _understood(command: str, output: str) -> dict[str, Any]:
    """The description that a Python printed, if that Python can be used."""
    try:
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        version = tuple(found["version"])
    except (ValueError, LookupError, TypeError):
        raise PythonSetupError(f"py_executable {command!r} is no Python; its output was\n{_last(output)}") from None
    if version != sys.version_info[:2]:
        ours = "{}.{}".format(*sys.version_info[:2])
        raise PythonSetupError(
            f"py_executable {command!r} is Python {version[0]}.{version[1]}, but the job runs with {ours}: they would "
            f"not understand what they send each other; hint: use a Python {ours}"
        )
    return found


def _installed(
    session_dir: str, tool: str, wanted: Mapping[str, Any], base: str, deadline: float | None, trial: Sequence[str]
) -> str:
    """The Python of a virtual environment with these packages, on top of what `base` has."""
    name = f"{tool}-" + _digest(json.dumps([base, dict(wanted)], sort_keys=True))
    with locked_path(session_dir, name) as path:
        python = os.path.join(path, "bin", "python")
        if os.path.exists(os.path.join(path, _DONE)):
            return python
        shutil.rmtree(path, ignore_errors=True)
        try:
            _make(path, base, deadline)
            _install(path, python, tool, wanted, base, deadline)
            _run([python, *trial], f"hpcray's workers cannot run with what {tool} installed", deadline)
            write_private_file(os.path.join(path, _DONE), b"")
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
        _run(module_line("venv", "--system-site-packages", "--without-pip", path, python=base), "venv", deadline)
        output = _run(code_line("import json; print(json.dumps(sys.path))", python=base), "venv", deadline)
        seen = json.loads(output.strip().splitlines()[-1])
    packages = [entry for entry in seen if entry.rstrip("/").endswith(("site-packages", "dist-packages"))]
    version = "python{}.{}".format(*sys.version_info[:2])
    base_packages = os.path.join(path, "lib", version, "site-packages", "hpcray_base.pth")
    write_private_file(base_packages, ("\n".join(dict.fromkeys(packages)) + "\n").encode())


def _install(path: str, python: str, tool: str, wanted: Mapping[str, Any], base: str, deadline: float | None) -> None:
    pip = module_line("pip", "--python", python, "--disable-pip-version-check", python=base)
    if wanted.get("pip_version"):
        _run([*pip, "install", f"pip{wanted['pip_version']}"], "pip", deadline)
        pip = module_line("pip", "--disable-pip-version-check", python=python)
    requirements = os.path.join(path, "requirements.txt")
    write_private_file(requirements, ("\n".join(wanted["packages"]) + "\n").encode())
    if tool == "pip":
        _run([*pip, "install", *(wanted.get("pip_install_options") or ()), "-r", requirements], "pip", deadline)
        if wanted.get("pip_check"):
            _run([*pip, "check"], "pip", deadline)
        return
    if (uv := shutil.which("uv")) is None or wanted.get("uv_version"):
        _run([*pip, "install", f"uv{wanted.get('uv_version') or ''}"], "pip", deadline)
        uv = os.path.join(path, "bin", "uv")
    options, chosen = wanted.get("uv_pip_install_options") or (), _uv_settings(os.environ)
    _run([uv, "pip", "install", "--python", python, *options, "-r", requirements], "uv", deadline, variables=chosen)
    if wanted.get("uv_check"):
        _run([uv, "pip", "check", "--python", python], "uv", deadline)


def _uv_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that have uv take no settings from where other users could have put them.

    It takes those of the nearest `uv.toml` or `pyproject.toml`, from the working directory upwards, and they name where
    packages come from. Where it would look into a directory that others write to, it takes the user's or the site's.
    """
    if environ.get("UV_CONFIG_FILE") or environ.get("UV_NO_CONFIG"):
        return {}
    here = os.getcwd()
    while True:
        state = os.stat(here)
        if state.st_mode & stat.S_IWOTH or not is_trusted_owner(state.st_uid):
            break
        if here == os.path.dirname(here) or os.path.isfile(os.path.join(here, "uv.toml")):
            return {}
        here = os.path.dirname(here)
    mine = os.path.join(environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "uv", "uv.toml")
    found = next((path for path in (mine, "/etc/uv/uv.toml") if os.path.isfile(path)), "")
    return {"UV_CONFIG_FILE": found} if found else {"UV_NO_CONFIG": "1"}


def _run(
    command: Sequence[str],
    what: str,
    deadline: float | None,
    directory: str = "",
    variables: Mapping[str, str] | None = None,
    shown: str = "",
) -> str:
    """Run one command, which errors show as `shown` if that is given. Returns its output.

    Raises:
        PythonSetupError: the command failed, could not be started, or took too long; with the last lines of its output.
    """
    left = None if deadline is None else max(1.0, deadline - time.monotonic())
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
            cwd=directory or None, env={**os.environ, **(variables or {})},
        )  # fmt: skip
    except OSError as error:
        raise PythonSetupError(f"{what}: cannot run {command[0]}: {error}") from None
    try:
        output, _ = child.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        while kill_descendants(child.pid):  # pip works in a process of its own, which would go on
            time.sleep(_KILL_INTERVAL)
        child.kill()
        output, _ = child.communicate()
        raise PythonSetupError(
            f"{what}: {shown or shlex.join(command)} took longer than the environment's setup_timeout_seconds allows\n"
            f"{_last(output)}"
        ) from None
    if child.returncode:
        raise PythonSetupError(
            f"{what}: {shown or shlex.join(command)} ended with code {child.returncode}\n{_last(output)}"
        )
    return output


def _last(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_SHOWN_LINES:])


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
