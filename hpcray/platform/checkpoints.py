"""Checkpoints on a shared file system: directories that are complete, or absent.

    <root>/<name>/000001/     a complete checkpoint: renamed to this when every byte of it is on the disk
    <root>/<name>/.new-…      a checkpoint that is being written, or whose writer died

The newest two are kept: the older one remains if the newest is damaged.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from urllib.parse import quote

from hpcray.platform.private_files import CLOSED, WORLD, PrivateDirectory, UntrustedPathError, make_private_directory

CHECKPOINTS_KEPT = 2
_COMPLETE = re.compile(r"\d{6,}")
_PARTIAL = re.compile(r"\.new-(\d{6,})-.*")
_MAX_RENAMES = 100


def directory_name(name: str, namespace: str = "") -> str:
    """Directory of the checkpoints of `name`: the name, with characters escaped that file names cannot have."""
    text = quote(name, safe=" +=,@()[]{}")
    if text.startswith("."):
        text = "%2E" + text[1:]
    return f"{quote(namespace, safe='')}:{text}" if namespace else text


def latest(root: str, directory: str) -> str | None:
    """Path of the newest complete checkpoint; None where there is none.

    One that another user could have written, or could exchange, is passed over with a line on standard error: a
    checkpoint may be a pickle.

    Args:
        root: the job's checkpoint directory; "" for none.
        directory: `directory_name` of the owner.
    """
    if not root:
        return None
    try:
        with PrivateDirectory.open(os.path.join(root, directory), False, ancestors=True) as home:
            for number in reversed(_numbers(home.path)):
                name = f"{number:06d}"
                try:
                    with home.directory(name, False) as found:
                        _need_own_tree(found)
                    return home.path_of(name)
                except UntrustedPathError as error:
                    _pass_over(home.path_of(name), error)
    except UntrustedPathError as error:
        _pass_over(os.path.join(root, directory), error)
    except OSError:
        pass  # there is none
    return None


def _pass_over(path: str, error: UntrustedPathError) -> None:
    print(f"hpcray: the checkpoint {path!r} is not used: {error}", file=sys.stderr, flush=True)


def _need_own_tree(directory: PrivateDirectory) -> None:
    """Look at all that is in a directory which others can enter: what they could have written must not be there."""
    if not os.fstat(directory.fd).st_mode & CLOSED:
        return
    for name in directory.names():
        state = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        if stat.S_ISDIR(state.st_mode):
            with directory.directory(name, False) as inner:
                _need_own_tree(inner)
        elif stat.S_ISREG(state.st_mode):
            os.close(directory.open_file(name, os.O_RDONLY, WORLD))
        elif state.st_uid != os.geteuid():
            raise UntrustedPathError(directory.path_of(name), f"belongs to uid {state.st_uid}", "remove it")


@contextlib.contextmanager
def writing(root: str, directory: str) -> Iterator[str]:
    """Context manager with an empty directory to write to. If the block succeeds, the directory becomes the newest
    checkpoint; else it is removed.

    Raises:
        OSError: the file system refuses, or another user could exchange the checkpoint. Older ones stay complete.
    """
    home = make_private_directory(os.path.join(root, directory), ancestors=True)
    number = (_numbers(home) or [0])[-1] + 1
    partial = os.path.join(home, f".new-{number:06d}-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    make_private_directory(partial)
    try:
        yield partial
        _sync(partial)
        _name(partial, home, number)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _prune(home)


def _name(partial: str, home: str, number: int) -> None:
    """Rename the directory to the first free number: another process may have written the same name meanwhile."""
    for taken in range(_MAX_RENAMES):
        try:
            os.rename(partial, os.path.join(home, f"{number + taken:06d}"))
        except OSError:
            if taken == _MAX_RENAMES - 1 or not os.path.isdir(os.path.join(home, f"{number + taken:06d}")):
                raise
        else:
            _sync_entry(home)
            return


def _sync(top: str) -> None:
    for directory, _, files in os.walk(top):
        for file in files:
            path = os.path.join(directory, file)
            if not os.path.islink(path):
                _sync_entry(path)
        _sync_entry(directory)


def _sync_entry(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _numbers(home: str) -> list[int]:
    try:
        names = os.listdir(home)
    except OSError:
        return []
    return sorted(int(name) for name in names if _COMPLETE.fullmatch(name))


def _prune(home: str) -> None:
    """Remove old checkpoints, and partial ones of writers that died."""
    numbers = _numbers(home)
    for number in numbers[:-CHECKPOINTS_KEPT]:
        shutil.rmtree(os.path.join(home, f"{number:06d}"), ignore_errors=True)
    for name in os.listdir(home):
        partial = _PARTIAL.fullmatch(name)
        if partial is not None and int(partial[1]) < numbers[-1]:
            shutil.rmtree(os.path.join(home, name), ignore_errors=True)
