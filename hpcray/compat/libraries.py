"""`python -m hpcray.compat libraries install [DIR] | path`: Ray's own libraries, taken from Ray's wheel.

`install` has pip download the wheel of the one version of Ray whose names hpcray has, and unpacks what can be lent of
it into DIR: Python files, and the data beside them. Without DIR they are put into this Python environment, where
`import ray` finds them if HPCRAY_RAY_LIBRARIES does not name another directory. No distribution `ray` is installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from hpcray.common.ray_version import RAY_VERSION
from hpcray.compat.finder import DEFAULT_LIBRARIES, LENT, wheel_version
from hpcray.platform.allocation import run_command
from hpcray.platform.process_control import module_line

_REQUIREMENT = f"ray=={RAY_VERSION}"
_NOT_LENT = (".so", ".jar", ".pxd", ".dll", ".pyd", ".exe")
_DIRECTORIES_NOT_LENT = (
    "ray/core/src/",
    "ray/cpp/",
    "ray/dashboard/client/",
    "ray/jars/",
    "ray/thirdparty_files/",
)
_TESTED = "Tune, RLlib, Data, Train and Serve"


class InstallError(Exception):
    """The libraries cannot be installed; the message has the reason and the remedy. Nothing is changed."""


def install(directory: str = "") -> Path:
    """Download Ray's wheel and unpack its libraries.

    The directory appears when it is complete, and not before: several processes may do this at once.

    Args:
        directory: where to; "" for this Python environment.

    Returns:
        The directory, for HPCRAY_RAY_LIBRARIES.

    Raises:
        InstallError: the directory holds something else or cannot be written, or pip could not download the wheel.
    """
    target = Path(directory or DEFAULT_LIBRARIES).absolute()
    if _is_installed(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InstallError(f"{target} exists, and does not hold the libraries of Ray {RAY_VERSION}; hint: another DIR")
    made: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
            made = Path(temporary, "unpacked")
            _unpack(_download(Path(temporary, "download")), made)
            with contextlib.suppress(OSError):  # a rename replaces an empty directory only
                os.rename(made, target)
    except OSError as error:
        hint = "python -m hpcray.compat libraries install DIR, with a directory of yours"
        raise InstallError(f"cannot write to {target.parent}: {error}; hint: {hint}") from error
    if not _is_installed(target):
        raise InstallError(f"{target} holds something else now")
    return target


def _is_installed(target: Path) -> bool:
    return wheel_version(str(target)) == RAY_VERSION


def _download(directory: Path) -> Path:
    """Have pip download the wheel. Returns the file."""
    command = module_line("pip", "--disable-pip-version-check", "download", "--no-deps")
    command += ["--only-binary=:all:", "--quiet", "--dest", str(directory), _REQUIREMENT]
    done = run_command(command, None)
    wheels = list(directory.glob("ray-*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = (done.stderr or done.stdout).strip().splitlines()
    raise InstallError(
        f"pip could not download {_REQUIREMENT}: {lines[-1] if lines else f'code {done.returncode}'}; hint: on a host "
        f"that reaches PyPI, run the same command with a DIR that this host sees, or `pip download {_REQUIREMENT} "
        "--no-deps` there and `unzip` the wheel here"
    )


def _unpack(wheel: Path, directory: Path) -> None:
    directory.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if _is_lent(name)]
        archive.extractall(directory, names)


def _is_lent(name: str) -> bool:
    return (
        name.startswith("ray/")
        and not name.startswith(_DIRECTORIES_NOT_LENT)
        and not name.endswith(_NOT_LENT)
        and os.path.basename(name) not in ("raylet", "gcs_server")
    ) or ".dist-info/licenses/" in name


def main(words: list[str]) -> int:
    """Run a command of the module docstring. Returns the exit code."""
    if words == ["path"]:
        found = os.environ.get(LENT) or (DEFAULT_LIBRARIES if _is_installed(Path(DEFAULT_LIBRARIES)) else "")
        print(found)
        return 0 if found else 1
    if words[:1] != ["install"] or len(words) > 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        target = install(*words[1:])
    except InstallError as error:
        print(f"hpcray: {error}", file=sys.stderr)
        return 1
    print(f"hpcray: Ray {RAY_VERSION}'s libraries are in {target}; tested with hpcray: {_TESTED}")
    if target != Path(DEFAULT_LIBRARIES):
        print(f"hpcray: use them with hpcray-launch --ray-libraries {target}, or export {LENT}={target}")
    print("hpcray: the packages that each needs: pip install 'hpcray[tune]', [rllib], [data], [train], [serve]")
    return 0
