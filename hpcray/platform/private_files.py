"""Files and directories of this user's in places that other users can reach: everything that keeps state comes here.

Other users may have been there first: they plant files, directories, links and pipes under names that they can know,
and exchange directories that lie in one of theirs. So what is read, run or appended to is judged once it is *open*,
when no one can exchange it any more, and what is in a directory is reached by the directory's descriptor:

- a file is a regular one of this user's, has one name, and no other user can write to it;
- a directory is this user's and not open to the world; with `CLOSED`, no other user can enter it;
- where asked for (`ancestors=True`: sessions, sockets, secrets), every directory above belongs to root, to this user or
  to a container's outside, and is not open to all users without a sticky bit; so no path leads elsewhere later.

Members of a group are trusted with directories that are writable for the group. A directory above that belongs to
another user can be trusted by HPCRAY_SAFE_DIRECTORIES, with all that is below it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from types import TracebackType
from typing import NamedTuple

from hpcray.common.terminal_text import plain
from hpcray.platform.config_files import launch_config

SAFE_DIRECTORIES = "HPCRAY_SAFE_DIRECTORIES"
"""Variable with directories of other users that this user trusts, separated by colons."""
HOME_DIRECTORY = ".hpcray"
"""The directory in the user's home with state that no better place can be found for."""
WORLD, OTHERS, CLOSED = 0o002, 0o022, 0o077
"""Permissions that are too many: writing for all users; for the group too; anything for other users."""
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # O_DIRECTORY: an automounter has to mount it
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # a pipe that somebody planted does not block
_MAX_LINKS = 40


class UntrustedPathError(PermissionError):
    """Another user could have put this here, or could exchange it.

    Attributes:
        path: the file or directory that is not trusted, as `plain` shows it. why: the reason, which follows the path.
    """

    def __init__(self, path: str, why: str, hint: str) -> None:
        self.path, self.why = plain(path), plain(why)  # who owns a directory has chosen its name
        super().__init__(errno.EPERM, f"{self.path} {self.why}; hint: {plain(hint)}", path)

    def __str__(self) -> str:
        return str(self.strerror)


class PrivateDirectory:
    """A directory of this user's, opened: what is in it is reached by its descriptor, whatever becomes of its path.

    Attributes:
        path: by which it was opened. fd: its descriptor.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: str, make: bool = True, excess: int = WORLD, ancestors: bool = False) -> PrivateDirectory:
        """Open a directory of this user's.

        Args:
            path: of the directory.
            make: whether it is made (0700), with those above, where it is missing.
            excess: permissions that it must not have: WORLD, OTHERS or CLOSED.
            ancestors: whether all directories above have to be trusted.

        Raises:
            UntrustedPathError: others could have made it, could write into it, or could exchange it.
            OSError: there is none, or none can be made.
        """
        path = os.path.abspath(path)
        if make and not ancestors:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        step = _walk(path, make, ancestors)
        try:
            fd = os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=step)
        finally:
            os.close(step)
        return cls._judged(path, fd, excess)

    @classmethod
    def _judged(cls, path: str, fd: int, excess: int) -> PrivateDirectory:
        try:
            _need_own(path, os.fstat(fd), excess)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def __enter__(self) -> PrivateDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. Harmless the second time."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def path_of(self, name: str) -> str:
        """The path of an entry, for messages and for other programs."""
        return os.path.join(self.path, name)

    def directory(self, name: str, make: bool = True, excess: int = WORLD) -> PrivateDirectory:
        """Open a directory in this one; made (0700) where it is missing.

        Raises:
            UntrustedPathError: it is a link, or others could have made it or could write into it.
            OSError: there is none, or none can be made.
        """
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | _DIRECTORY, dir_fd=self.fd)
        except OSError as error:
            raise _link_or(error, self.path_of(name)) from None
        return self._judged(self.path_of(name), fd, excess)

    def names(self) -> list[str]:
        """The names of all entries, sorted."""
        return sorted(os.listdir(self.fd))

    def open_file(self, name: str, flags: int = os.O_RDONLY, excess: int = OTHERS) -> int:
        """Open a file of this user's and return its descriptor; made with mode 0600 where `flags` say so.

        Args:
            name: of the file in this directory.
            flags: of `os.open`.
            excess: permissions that it must not have: OTHERS or CLOSED. OTHERS does not count where no
                other user can enter this directory.

        Raises:
            UntrustedPathError: it is a link or no file, has a second name, or others could have made or written it.
            OSError: there is none, or it cannot be opened.
        """
        if excess != CLOSED and not os.fstat(self.fd).st_mode & CLOSED:
            excess = 0
        return _open_file(name, self.fd, self.path_of(name), flags, excess)

    def read(self, name: str, excess: int = OTHERS) -> bytes:
        """The content of a file. Arguments and errors: as for `open_file`."""
        with os.fdopen(self.open_file(name, os.O_RDONLY, excess), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes, durable: bool = False) -> None:
        """Write a file of mode 0600, or replace it: others see nothing, and this user's processes all of it or nothing.

        Args:
            name: of the file in this directory.
            data: its content.
            durable: whether it is on the disk when this returns.
        """
        _replace(name, self.fd, data, durable)

    def append(self, name: str) -> int:
        """The descriptor of a file that is appended to; made where it is missing. Errors: as for `open_file`."""
        return self.open_file(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def rename(self, name: str, to: str) -> None:
        """Give an entry another name in this directory."""
        os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)


class _Parent(NamedTuple):
    """The directory in which a file lies, by a descriptor; and the file's name in it."""

    fd: int
    name: str


def make_private_directory(path: str, excess: int = WORLD, ancestors: bool = False) -> str:
    """Make a directory (0700) where it is missing; return its absolute path. See `PrivateDirectory.open`.

    Where `ancestors` is False another user may exchange it later: what is opened in it is then judged each time.
    """
    with PrivateDirectory.open(path, True, excess, ancestors) as directory:
        return directory.path


def open_private_file(path: str, flags: int = os.O_RDONLY, excess: int = OTHERS, ancestors: bool = False) -> int:
    """Open a file of this user's, and return its descriptor; made with mode 0600 where `flags` say so.

    Args:
        path: of the file.
        flags: of `os.open`.
        excess: permissions that it must not have: OTHERS or CLOSED. OTHERS does not count where no other
            user can enter its directory.
        ancestors: whether all directories above have to be trusted.

    Raises:
        UntrustedPathError: it is a link or no file, has a second name, or others could have made, written or exchanged
            it.
        OSError: there is none, or it cannot be opened.
    """
    parent = _open_parent(path, ancestors)
    try:
        if excess != CLOSED and not (found := os.fstat(parent.fd)).st_mode & CLOSED and found.st_uid == os.geteuid():
            excess = 0
        return _open_file(parent.name, parent.fd, path, flags, excess)
    finally:
        os.close(parent.fd)


def read_private_file(path: str, excess: int = OTHERS, ancestors: bool = False) -> bytes:
    """The content of a file of this user's. Arguments and errors: as for `open_private_file`."""
    with os.fdopen(open_private_file(path, os.O_RDONLY, excess, ancestors), "rb") as file:
        return file.read()


def append_private_file(path: str, ancestors: bool = False) -> int:
    """The descriptor of a file that is appended to; made where it is missing. Errors: as for `open_private_file`."""
    return open_private_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, OTHERS, ancestors)


def write_private_file(
    path: str, data: bytes, durable: bool = False, ancestors: bool = False, mode: int = 0o600
) -> None:
    """Write a file, or replace it: a reader sees all of it or nothing.

    Args:
        path: of the file.
        data: its content.
        durable: whether it is on the disk when this returns.
        ancestors: whether all directories above have to be trusted: for secrets.
        mode: of the file, whatever the umask.

    Raises:
        UntrustedPathError: others could exchange the directory.
        OSError: the file system refuses.
    """
    parent = _open_parent(path, ancestors)
    try:
        _replace(parent.name, parent.fd, data, durable, mode)
    finally:
        os.close(parent.fd)


class StatePlace(NamedTuple):
    """The directory where state is kept.

    Attributes:
        path: of it.
        passed_over: why it is not the one that was wanted; "" if it is.
    """

    path: str
    passed_over: str


def state_place(wanted: str, name: str, own: bool = True) -> StatePlace:
    """The directory where this user keeps state: the wanted one, or `~/.hpcray/<name>` if that is no safe place.

    Args:
        wanted: the directory; it may not exist yet.
        name: of the other one, which all nodes see if they share the home.
        own: whether the directory has to be this user's if it exists; else root's or a sticky one will do.
    """
    wanted = os.path.abspath(wanted)
    problem: OSError | None = exposed_directory(wanted)
    if problem is None and own:
        try:
            PrivateDirectory.open(wanted, False, WORLD).close()
        except UntrustedPathError as error:
            problem = error
        except OSError:
            pass  # there is none yet; or none can be made: its use raises the error
    home = os.path.join(os.path.expanduser("~"), HOME_DIRECTORY, name)
    if problem is None or not os.path.isabs(home) or exposed_directory(home):
        return StatePlace(wanted, "")
    return StatePlace(home, f"{plain(wanted)} is not used: {problem}")


def exposed_directory(path: str) -> UntrustedPathError | None:
    """The reason why this user can keep no secrets below a directory: one above, or it itself, is another user's.

    None where it can, and where there is no such directory: its use raises the error.
    """
    try:
        os.close(_walk(os.path.abspath(path), False))
    except UntrustedPathError as error:
        return error
    except OSError:
        pass
    return None


def is_trusted_owner(uid: int) -> bool:
    """True for root, for this user, and in a container for what is outside of it."""
    return uid in (0, os.geteuid()) or _is_outside(uid)


def _open_parent(path: str, ancestors: bool) -> _Parent:
    directory, name = os.path.split(os.path.abspath(path))
    return _Parent(_walk(directory, False, ancestors), name)


def _open_file(name: str, directory: int, path: str, flags: int, excess: int) -> int:
    try:
        # What is not ours is not emptied: that comes after the look at it.
        fd = os.open(name, (flags & ~os.O_TRUNC) | _FILE, 0o600, dir_fd=directory)
    except OSError as error:
        raise _link_or(error, path) from None
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise UntrustedPathError(path, "is no file", "remove it")
        _need_own(path, state, excess)
        if state.st_nlink > 1:
            raise UntrustedPathError(path, f"is a file with {state.st_nlink} names (links)", "remove it")
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _replace(name: str, directory: int, data: bytes, durable: bool, mode: int = 0o600) -> None:
    temporary = f".{name[:200]}.{os.urandom(6).hex()}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=directory)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            if mode != 0o600:
                os.fchmod(fd, mode)
            if durable:
                file.flush()
                os.fsync(fd)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def _need_own(path: str, state: os.stat_result, excess: int) -> None:
    if state.st_uid != os.geteuid():
        why = f"belongs to {_owner(state.st_uid)}, not to this user (uid {os.geteuid()})"
        raise UntrustedPathError(path, why, "take a directory of yours")
    if state.st_mode & excess:
        mode = f"mode {stat.S_IMODE(state.st_mode):o}"
        why = f"can be written by others ({mode})" if state.st_mode & excess & OTHERS else ""
        closed = "chmod 700" if stat.S_ISDIR(state.st_mode) else "chmod 600"
        repair = {WORLD: "chmod o-w", OTHERS: "chmod go-w"}.get(excess, closed)
        raise UntrustedPathError(path, why or f"is open to other users ({mode})", f"{repair} {path}")


def _link_or(error: OSError, path: str) -> OSError:
    """The error to raise for an error of an `os.open` that does not follow links."""
    if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and os.path.islink(path)):
        return UntrustedPathError(path, "is a symbolic link", "remove it")
    if error.errno in (errno.ENXIO, errno.ENODEV):  # a pipe, a socket
        return UntrustedPathError(path, "is no file", "remove it")
    return OSError(error.errno, error.strerror, path)


def _walk(path: str, make: bool, ancestors: bool = True) -> int:
    """Go to a directory step by step, each from the one before it, and return its descriptor (O_PATH).

    Where `ancestors` is False others may exchange what is on the way. But they do not choose among this user's
    directories: the last name is no link of theirs, nor is one in a directory that all may write to.

    Raises:
        UntrustedPathError: another user could exchange one of the directories on the way, or the last one's content.
    """
    safe: list[os.stat_result] | None = None
    steps = path.split("/")[::-1]
    here, trusted, links = "/", False, 0
    fd = os.open("/", _STEP)
    try:
        state = os.fstat(fd)
        while True:
            if ancestors and not trusted and (why := _exposed(state)):
                if safe is None:
                    safe = _safe_directories()
                trusted = any(os.path.samestat(state, known) for known in safe)
                if not trusted:
                    own = state.st_uid == os.geteuid()
                    trusts = f"{SAFE_DIRECTORIES}={here} trusts it, if you do"
                    raise UntrustedPathError(here, why, f"chmod o-w {here}" if own else trusts)
            while steps and steps[-1] in ("", "."):
                steps.pop()
            if not steps:
                return fd
            name = steps.pop()
            there = os.path.normpath(os.path.join(here, name))
            try:
                following = _enter(name, fd, make)
            except OSError as error:
                target, owner = _read_link(name, fd)
                if not target:
                    raise OSError(error.errno, error.strerror, there) from None
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path) from None
                theirs = state.st_mode & stat.S_IWOTH or not (ancestors or steps)
                if theirs and not trusted and not is_trusted_owner(owner):
                    raise UntrustedPathError(there, f"is a link of {_owner(owner)}", "name a path without it") from None
                steps += target.split("/")[::-1]
                if not target.startswith("/"):
                    continue
                following, there, trusted = os.open("/", _STEP), "/", False
            os.close(fd)
            fd, here = following, there
            state = os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise


def _enter(name: str, directory: int, make: bool) -> int:
    try:
        return os.open(name, _STEP, dir_fd=directory)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process of this user was faster
        os.mkdir(name, 0o700, dir_fd=directory)
    return os.open(name, _STEP, dir_fd=directory)


def _read_link(name: str, directory: int) -> tuple[str, int]:
    """Where a link leads to, and whose it is; "" if it is none."""
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return "", -1
    try:
        return os.readlink("", dir_fd=fd), os.fstat(fd).st_uid
    except OSError:
        return "", -1
    finally:
        os.close(fd)


def _exposed(state: os.stat_result) -> str:
    """The reason why another user could exchange what is in a directory; "" if none can."""
    if not is_trusted_owner(state.st_uid):
        return f"belongs to {_owner(state.st_uid)}, who could exchange what is in it"
    if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
        return "can be written by everybody and has no sticky bit: anybody could exchange what is in it"
    return ""


def _safe_directories() -> list[os.stat_result]:
    try:
        text = launch_config(os.environ).safe_directories
    except ValueError:  # told by whoever needs a valid file
        text = os.environ.get(SAFE_DIRECTORIES, "")
    found = []
    for path in filter(None, text.split(":")):
        with contextlib.suppress(OSError):
            found.append(os.stat(os.path.expanduser(path)))
    return found


def _owner(uid: int) -> str:
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


def _is_outside(uid: int) -> bool:
    """True if the uid stands for all users that this user namespace (of a container) does not map, the host's root
    among them."""
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            overflow = int(file.read())
        with open("/proc/self/uid_map", encoding="ascii") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
    except (OSError, ValueError):
        return False
    return uid == overflow and not any(first <= uid < first + count for first, _, count in ranges)
