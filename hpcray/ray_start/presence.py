"""The first look of each `init()`, without another import: can there be a cluster of `ray start` at all?

Programs that have nothing to do with `ray start` pay for a look into two directories, inside of an allocation also for
one at this user's processes, and for no more.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Mapping

from hpcray.platform.config_files import configured_environment
from hpcray.platform.session_directory import ADDRESS, has_session_file

NODE_FILE = "ray_start.json"
"""Name of the file that a started node has in its session directory."""
REFUSED_FILE = "ray_start.failed"
"""Name of the file, in a directory of its own beside those of sessions, with the reason of a command that could use no
directory of secrets."""
_DEFAULT = "~/.hpcray/clusters"
JOB_VARIABLES = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "flux": "FLUX_JOB_ID", "lsf": "LSB_JOBID"}
"""Variables that name the batch job around a process, by batch system."""
_IN_STEP = ("SLURM_STEP_ID", "PMI_RANK", "PMIX_RANK")
_LONGEST_LINE = 1 << 16
_COMMAND = re.compile(rb"(?:^|[/\0]|hpcray\.cli\.)ray(?:\.scripts\.scripts)?\0start(?:\0|$)")
_COMMAND_OR_SCRIPT = re.compile(
    _COMMAND.pattern
    + rb"|^(?:[^\0]*/)?(?:srun|mpirun|mpiexec|ssh|pdsh|ibrun|aprun|jsrun)\0.*?\bray(?:\.scripts\.scripts)? start\b",
    re.DOTALL,
)


def start_directory(environ: Mapping[str, str]) -> str:
    """The path of the directory of secrets and calls."""
    path = configured_environment(environ).get("HPCRAY_START_DIR") or _DEFAULT
    if path.startswith("~/") and not environ.get("HOME"):
        with contextlib.suppress(KeyError):
            path = os.path.join(pwd.getpwuid(os.getuid()).pw_dir, path[2:])
    return os.path.abspath(os.path.expanduser(path))


def may_mean_started(address: str | None, environ: Mapping[str, str]) -> bool:
    """Return True if `find_session` has to decide what an address of `init()` means.

    Args:
        address: as the user gave it; None: what the environment says.
    """
    address = address or environ.get("RAY_ADDRESS") or ""
    if address == "local" or os.path.isabs(address):
        return False
    if address not in ("", "auto"):
        return True
    if environ.get(ADDRESS) and not environ.get("RAY_ADDRESS"):
        return False
    try:
        if os.listdir(start_directory(environ)):
            return True
    except FileNotFoundError:
        pass
    except OSError:
        return True
    named = (NODE_FILE, REFUSED_FILE)
    return any(has_session_file(name, environ) for name in named) or is_being_called(environ)


def is_being_called(environ: Mapping[str, str], proc: str = "/proc") -> bool:
    """True if a script of this allocation is about to call `ray start`: a process of this user on this host is the
    command, or the `srun` or `mpirun` that will run it, and the command itself may not have come so far.

    Args:
        environ: of the program. Outside of an allocation a script of another shell says nothing about it.
    """
    job = next((f"{name}={environ[name]}" for name in JOB_VARIABLES.values() if environ.get(name)), "")
    if not job:
        return False
    # The launcher of this program's own step has all of a script in its line: also what is not run, or is over.
    wanted = _COMMAND if any(environ.get(name) for name in _IN_STEP) else _COMMAND_OR_SCRIPT
    me, uid = str(os.getpid()), os.getuid()
    for name in os.listdir(proc):
        if name.isdigit() and name != me:
            with contextlib.suppress(OSError):
                if os.stat(f"{proc}/{name}").st_uid == uid:
                    with open(f"{proc}/{name}/cmdline", "rb", buffering=0) as file:
                        found = wanted.search(file.read(_LONGEST_LINE))
                    if found and _has_variable(f"{proc}/{name}/environ", job):
                        return True
    return False


def _has_variable(path: str, wanted: str) -> bool:
    with open(path, "rb") as file:
        return wanted.encode() in file.read().split(b"\0")
