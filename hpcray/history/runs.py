"""Where histories are: a directory for each job, in it one for each run, in it a file or two of each node.

    <HPCRAY_HISTORY_DIR, or $XDG_STATE_HOME/hpcray, or ~/.local/state/hpcray>/
        <Slurm's job id, 12_3 for a task of an array, else the name of the session>/
            <name of the session: 16 hex digits>/        a requeued job has several of these
                node-0.0.blocks

All directories are of mode 0700 and all files 0600; what another user has put there is not read. Here is, too, which of
several jobs a name means (`jobs_meant`): running, queued, submitted and ended ones are all found by it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct

from hpcray.platform.config_files import configured_environment
from hpcray.platform.private_files import PrivateDirectory

_SETTING = "HPCRAY_HISTORY_DIR"
_JOB = re.compile(r"[0-9]+(_[0-9]+)?|[0-9a-f]{16}")
_RUN = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"node-([0-9]+)\.([0-9]+)\.blocks")
MOST_AGE = 30 * 86_400.0
"""Seconds after the last sign of life for which the history of an ended job is kept."""
MOST_SIZE = 2 << 30
"""Bytes of all histories together beyond which those of ended jobs go, the oldest first."""
_ENDED_AFTER = 3600.0  # seconds without a sign of life after which a run may be removed
_PRUNE_PERIOD = 900.0
"""Seconds between two looks at all histories where there are many: for a thousand they take 40 ms of CPU, and thousands
of requests to a file server, which the jobs of an array would make at once."""
_MANY = 64  # jobs
_PRUNED = "pruned"  # an empty file, written at the last look at many


SHORTEST_PREFIX = 4
"""Characters from which on the beginning of an id or a name is taken for the whole."""
JobT = TypeVar("JobT")


class JobNames(Struct, frozen=True):
    """Ids and names of a job.

    Attributes:
        ids: that only this job has: Slurm's, that of `hpcray submit`, the name of its session.
        names: that others may have, too: of the job, and of its program.
    """

    ids: tuple[str, ...]
    names: tuple[str, ...] = ()


def jobs_meant(wanted: str, jobs: Iterable[JobT], called: Callable[[JobT], JobNames]) -> list[JobT]:
    """Return the jobs that a name means, in their order: those with this id; if there is none, those with this name;
    if there is none, those of which an id or a name begins so.

    Numbers are never completed: 12 is not job 1234.
    """
    known = [(job, called(job)) for job in jobs]
    found = [job for job, one in known if wanted in one.ids] or [job for job, one in known if wanted in one.names]
    if found or len(wanted) < SHORTEST_PREFIX:
        return found
    return [
        job
        for job, one in known
        if any(text.startswith(wanted) and not text.isdecimal() for text in (*one.ids, *one.names))
    ]


def program_names(words: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a program by its command line: that of the file, with its suffix and without; () if none."""
    words = list(words)
    first = next((word for word in words if not word.startswith("-")), "") if words[:1] != ["-c"] else ""
    base = os.path.basename(first)
    return tuple(dict.fromkeys((base, os.path.splitext(base)[0]))) if base else ()


def history_root(environ: Mapping[str, str], configured: str = "") -> str:
    """The directory of all histories of this user.

    Args:
        environ: variables of this process.
        configured: the setting `history_dir` of a job; "": what the environment says.
    """
    chosen = configured or configured_environment(environ).get(_SETTING, "")
    if chosen:
        return os.path.abspath(os.path.expanduser(chosen))
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the specification says that it is ignored then
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "hpcray")


def job_name(environ: Mapping[str, str], session: str) -> str:
    """The name of a job's directory: what its user knows it by."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    name = f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")
    return name if _JOB.fullmatch(name) else session


def boot_id() -> str:
    """The id of this host's boot: pids of another one mean nothing."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def file_name(node: int, number: int) -> str:
    """The name of a file of a node; number: how often it was begun anew."""
    return f"node-{node}.{number}.blocks"


class Run(Struct, frozen=True):
    """One run of a job.

    Attributes:
        job, name: the two directories. path: of the run. files: names by node, in the order in which they were written.
        changed: when something was last written, by the file server's clock. size: of all files, in bytes.
    """

    job: str
    name: str
    path: str
    files: Mapping[int, tuple[str, ...]]
    changed: float
    size: int

    def open(self) -> PrivateDirectory:
        """Open its directory.

        Raises:
            OSError: it is gone, or another user's.
        """
        return PrivateDirectory.open(self.path, make=False)

    def read(self, name: str, tail: int = 0) -> bytes:
        """The content of a file, or its last bytes.

        Raises:
            OSError: it is gone, cannot be read, or another user's.
        """
        with self.open() as directory, os.fdopen(directory.open_file(name), "rb") as file:
            if tail:
                file.seek(max(0, os.fstat(file.fileno()).st_size - tail))
            return file.read()

    def read_head(self, name: str, size: int) -> bytes:
        """The first bytes of a file. Errors: as for `read`."""
        with self.open() as directory, os.fdopen(directory.open_file(name), "rb") as file:
            return file.read(size)

    def remove(self) -> None:
        """Remove its files, and the directory of its job if this was the last run."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.path))


def runs(root: str) -> list[Run]:
    """All runs below a directory, the one last written to first. What is not this user's is left out."""
    found: list[Run] = []
    with contextlib.suppress(OSError), PrivateDirectory.open(root, make=False) as top:
        for job in filter(_JOB.fullmatch, top.names()):
            with contextlib.suppress(OSError), top.directory(job, make=False) as directory:
                for name in filter(_RUN.fullmatch, directory.names()):
                    with contextlib.suppress(OSError), directory.directory(name, make=False) as last:
                        found += _run(job, name, last)
    return sorted(found, key=lambda run: -run.changed)


def _run(job: str, name: str, directory: PrivateDirectory) -> Iterator[Run]:
    files: dict[int, list[tuple[int, str]]] = {}
    changed, size = 0.0, 0
    for entry in directory.names():
        if parts := _FILE.fullmatch(entry):
            state = os.stat(entry, dir_fd=directory.fd, follow_symlinks=False)
            if state.st_uid != os.geteuid():
                continue
            files.setdefault(int(parts[1]), []).append((int(parts[2]), entry))
            changed, size = max(changed, state.st_mtime), size + state.st_size
    if files:
        ordered = {node: tuple(name for _, name in sorted(files[node])) for node in sorted(files)}
        yield Run(job, name, directory.path, ordered, changed, size)


def find_runs(root: str, wanted: str) -> list[Run]:
    """The runs that a name means, the newest first: those of a job, or the one of this name, or in this directory."""
    if os.path.isabs(wanted):
        path = os.path.realpath(wanted)
        return [run for run in runs(os.path.dirname(os.path.dirname(path))) if os.path.realpath(run.path) == path]
    if not _JOB.fullmatch(wanted):
        return []
    return jobs_meant(wanted, runs(root), lambda run: JobNames((run.job, run.name)))


def prune(root: str, now: float | None = None, age: float = MOST_AGE, size: int = MOST_SIZE) -> list[Run]:
    """Remove histories of jobs that ended long ago, and the oldest while all together are too large; return them."""
    now = time.time() if now is None else now
    known = runs(root)
    total = sum(run.size for run in known)
    removed = []
    for run in reversed(known):
        silent = now - run.changed
        if silent > age or (total > size and silent > _ENDED_AFTER):
            run.remove()
            total -= run.size
            removed.append(run)
    return removed


def prune_if_due(root: str, now: float | None = None) -> list[Run]:
    """Remove histories as `prune` does, unless there are many and some job has done so lately; return those removed."""
    now = time.time() if now is None else now
    with PrivateDirectory.open(root) as directory:
        if len(directory.names()) >= _MANY:
            with contextlib.suppress(FileNotFoundError):
                last = os.stat(_PRUNED, dir_fd=directory.fd, follow_symlinks=False).st_mtime
                if abs(now - last) < _PRUNE_PERIOD:
                    return []
            directory.write(_PRUNED, b"")
    return prune(root, now)
