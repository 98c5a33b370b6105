"""Values in files: written whole or not at all, read, removed.

Those of a job are in a directory of its own. The name of each begins with the owner of the value.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

DIRECTORY = "FILE_TRANSFER_DIRECTORY"
"""Variable with the directory that all nodes share."""

_DRIVER = "-driver"


class DirectoryMissingError(OSError):
    """The directory of the files is not set, or not there."""


class FileGoneError(OSError):
    """The file of a value is not there any more."""


def shared_directory() -> Path:
    """Return the directory.

    Raises:
        DirectoryMissingError: it is not set, or not there.
    """
    name = os.environ.get(DIRECTORY, "")
    if not name:
        raise DirectoryMissingError(f"no directory for values in files; hint: export {DIRECTORY}=/a/shared/directory")
    if not Path(name).is_dir():
        raise DirectoryMissingError(
            f"{name} is no directory on {os.uname().nodename}; hint: {DIRECTORY} names one that all nodes share"
        )
    return Path(name)


def write(job: str, owner: bytes, content: bytes) -> str:
    """Write a new file for a value of this owner, and return its path.

    Raises:
        DirectoryMissingError: the directory is not set, or not there.
    """
    directory = shared_directory() / job
    directory.mkdir(exist_ok=True)
    path = directory / f"{owner.hex()}-{uuid.uuid4().hex}"
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(content)
        partial.rename(path)  # a reader sees all of it
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return str(path)


def read(path: str) -> bytes:
    """Return the content of a file. It is no mapping: the file may be removed while the value is in use.

    Raises:
        FileGoneError: it is not there; the text says whether its directory is.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        shared = Path(path).parents[1]
        why = "the file is gone" if shared.is_dir() else f"its directory is missing on {os.uname().nodename}"
        raise FileGoneError(f"{path}: {why}") from error


def remove(paths: list[str]) -> None:
    """Remove files, those that are gone already excepted."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_all_of(job: str, owner: bytes) -> None:
    """Remove what a process that has ended owned."""
    with contextlib.suppress(OSError):
        remove([str(path) for path in (shared_directory() / job).glob(f"{owner.hex()}-*")])


def enter(job: str, driver: bytes) -> None:
    """Note that a driver is there; nothing happens where it cannot be noted."""
    with contextlib.suppress(OSError):
        directory = shared_directory() / job
        directory.mkdir(exist_ok=True)
        (directory / f"{driver.hex()}{_DRIVER}").touch()


def leave(job: str, driver: bytes) -> None:
    """A driver leaves: remove what it owned, and all of the job if no other driver is there."""
    remove_all_of(job, driver)
    with contextlib.suppress(OSError):
        directory = shared_directory() / job
        if not list(directory.glob(f"*{_DRIVER}")):
            remove([str(path) for path in directory.iterdir()])
            directory.rmdir()
