"""A private directory in memory for the files of MPI, PMIx and UCX.

Open MPI opens its shared-memory files by names that can be guessed and looks neither for a file that is there already
nor at its owner: in a directory that others may write, another user could have made them. So they lie in
`/dev/shm/hpcray-<uid>-<16 hex>`, mode 0700, whose name is random. The process that has made it holds a lock on it; a
directory whose lock is free was left by a process that was killed, and the next one removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Mapping, MutableMapping

_OF_OPEN_MPI = tuple(
    f"OMPI_MCA_{component}_backing_directory" for component in ("btl_sm", "btl_vader", "osc_sm", "osc_rdma")
)
"""Settings with the directory of segments for messages (of Open MPI 5 and 4) and of windows."""
_OF_MPIRUN = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""Settings with the directory above that of its session, of Open MPI 5 and 4."""
LAUNCHER_DIRECTORY = "PMIX_SERVER_TMPDIR"
"""Variable with the directory of the launcher, of Open MPI's and of ours."""
_UP = "up"
_MEMORY = "/dev/shm"
_RANDOM = 8  # bytes


class MpiDirectory:
    """The directory, and the lock by which it is known to be in use.

    Attributes:
        path: of the directory.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def create(cls, parent: str = "") -> MpiDirectory:
        """Make one, and remove those that dead processes have left.

        Args:
            parent: where; "": in `/dev/shm`, or in the directory for temporary files where that cannot be written.

        Raises:
            OSError: it cannot be made.
        """
        if not parent:
            parent = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else _temporary()
        remove_abandoned(parent)
        while True:
            path = os.path.join(parent, f"{_prefix()}{os.urandom(_RANDOM).hex()}")
            os.mkdir(path, 0o700)  # fails where the name exists, be it a link
            if (fd := _lock(path)) is not None:
                return cls(path, fd)

    @property
    def is_marked_up(self) -> bool:
        """True if rank 0 has said that all ranks are up."""
        return os.path.lexists(os.path.join(self.path, _UP))

    def remove(self) -> None:
        """Remove the directory with all that is in it, and release the lock. May be called twice."""
        if self._fd >= 0:
            _remove_tree(self.path)
            os.close(self._fd)
            self._fd = -1


def mark_up(environ: Mapping[str, str]) -> None:
    """Report to `hpcray.launch.local_ranks`, if that has started this rank, that all ranks are up."""
    path = environ.get(LAUNCHER_DIRECTORY, "")
    if is_mpi_directory(path):
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(path, _UP), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def memory_settings(path: str, environ: Mapping[str, str], installation: str = "") -> dict[str, str]:
    """The variables that have Open MPI make its shared-memory files in a directory; without those that are set.

    Args:
        path: the directory.
        environ: the environment of the ranks.
        installation: of Open MPI, whose site may have set them in its file; "": that of the mpirun on PATH.
    """
    installation = installation or _installation(environ)
    places = [os.path.join(environ.get("HOME", ""), ".openmpi/mca-params.conf")]
    places += [os.path.join(installation, "etc/openmpi-mca-params.conf")] if installation else []
    given = {f"OMPI_MCA_{name}" for place in places for name in set_in(place)} | environ.keys()
    return {name: path for name in _OF_OPEN_MPI if name not in given}


@contextlib.contextmanager
def private_memory(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Context manager in which Open MPI makes its shared-memory files in a private directory. At the end, when all
    peers have mapped them, they are removed with it. The place that a site, a user or the launcher has chosen stays.
    What else it makes is in the launcher's directory.

    Args:
        environ: this process's environment.
    """
    directory = MpiDirectory.create() if memory_settings("", environ) else None
    changes = memory_settings(directory.path, environ) if directory is not None else {}
    if is_mpi_directory(launcher := environ.get(LAUNCHER_DIRECTORY, "")):
        changes["TMPDIR"] = launcher  # where Open MPI makes a session directory if the launcher is gone
        # UCX unlinks its segments at once; but a process that is killed before it has would leave one in /dev/shm.
        changes["UCX_POSIX_DIR"] = environ.get("UCX_POSIX_DIR", launcher)
    before = {name: environ.pop(name) for name in changes if name in environ}
    environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del environ[name]
        environ.update(before)
        if directory is not None:
            directory.remove()


def _temporary() -> str:
    """The directory for temporary files, or the system's where another user could exchange what is in that one."""
    from hpcray.platform.private_files import exposed_directory  # the launcher loads little

    named = os.environ.get("TMPDIR") or "/tmp"
    return "/tmp" if exposed_directory(named) else named


def _installation(environ: Mapping[str, str]) -> str:
    """That of the mpirun on PATH; "" without one."""
    for place in environ.get("PATH", "").split(os.pathsep):
        if os.access(path := os.path.join(place, "mpirun"), os.X_OK):
            return os.path.dirname(os.path.dirname(os.path.realpath(path)))
    return ""


def mpirun_settings(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that have Open MPI's mpirun, and its daemons, make their session directories in a directory."""
    return {} if any(name in environ for name in _OF_MPIRUN) else dict.fromkeys(_OF_MPIRUN, path)


def set_in(path: str) -> Iterator[str]:
    """Return the names of the parameters that one of Open MPI's files sets."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, equals, _ = line.partition("#")[0].partition("=")
            if equals:
                yield name.strip()


def remove_abandoned(parent: str = _MEMORY) -> None:
    """Remove the directories of this user whose process is dead."""
    for path in _own(parent):
        remove_if_abandoned(path)


def remove_if_abandoned(path: str) -> None:
    """Remove one such directory if it is this user's and its process is dead."""
    if (fd := _lock(path)) is not None:
        _remove_tree(path)
        os.close(fd)


def is_mpi_directory(path: str) -> bool:
    """True if the path is one that `MpiDirectory` makes for this user."""
    name = os.path.basename(path)
    return os.path.isabs(path) and len(name) == len(_prefix()) + 2 * _RANDOM and name.startswith(_prefix())


def _remove_tree(path: str) -> None:
    import shutil  # a job that leaves nothing behind starts without it

    shutil.rmtree(path, ignore_errors=True)


def _prefix() -> str:
    return f"hpcray-{os.getuid()}-"


def _own(parent: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if is_mpi_directory(entry.path):
                yield entry.path


def _lock(path: str) -> int | None:
    """A descriptor that holds the lock of a private directory of this user; None where that is held, or is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state = os.fstat(fd)
        # Another process may have taken it for abandoned, between its making and its lock.
        same = os.path.samestat(state, os.stat(path, follow_symlinks=False))
        if same and state.st_uid == os.getuid() and not stat.S_IMODE(state.st_mode) & 0o077:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


# ------------------------------------------------------------ pmix library
# The PMIx library that belongs to an Open MPI, and whether hpcray knows how to be a server with it.


TESTED = (5,)
"""Major versions that are known to work."""
NAME = b"OpenPMIx "
"""The name of the library, before its version."""
_LIBRARY = "libpmix.so.2"
_PLACES = ("lib/openmpi", "lib", "lib64")


def find_library(mpirun: str) -> str:
    """The PMIx library that belongs to an Open MPI; "" if there is none of a version that is known to work.

    Args:
        mpirun: path of its mpirun.
    """
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(mpirun)))
    paths = (os.path.join(prefix, place, _LIBRARY) for place in _PLACES)
    return next((path for path in paths if _version_of(path) in TESTED), "")


def installation_of(library: str) -> str:
    """The installation that a library of `find_library` belongs to."""
    return next(
        (library.removesuffix(f"/{place}/{_LIBRARY}") for place in _PLACES if f"/{place}/{_LIBRARY}" in library), ""
    )


def _version_of(path: str) -> int | None:
    """The major version of a PMIx library, without loading it."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = content.find(NAME)
            text = content[start + len(NAME) : start + len(NAME) + 3].partition(b".")[0]
            return int(text) if start >= 0 and text.isdigit() else None
    except (OSError, ValueError):
        return None
