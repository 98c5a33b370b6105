"""What `hpcray doctor` finds out about this host: MPI, UCX, RDMA, memory and limits, without starting a job."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcray.base.config import Config
from hpcray.host import probe
from hpcray.host.session import session_root

OK = "ok"
WARN = "warn"
FAIL = "fail"
NOTE = "note"

_PROBE_TIMEOUT = 60
_MB = 1 << 20
_GB = 1 << 30
_FEW_FILES = 4096
_FEW_PROCESSES = 4096
_LITTLE_LOCKED = 1 << 30
_INFINIBAND = Path("/sys/class/infiniband")
_PROBE = "import json; from hpcray.transport.select import describe; print(json.dumps(describe()))"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what it belongs to: "MPI", "UCX", ...
        name: what was looked at.
        value: what was found.
        level: OK, NOTE (a fact), WARN (works, but not well) or FAIL (a job on several nodes will not start).
        hint: what to do, or "".
    """

    topic: str
    name: str
    value: str
    level: str = NOTE
    hint: str = ""


def examine(require_rdma: bool = False) -> list[Finding]:
    """All findings, in the order of the report.

    Args:
        require_rdma: its absence is a failure.
    """
    wires = _probe_wires()
    return [
        *_software(),
        *(Finding("software", "variable", text, WARN) for text in Config.unknown_variables(os.environ)),
        *_mpi(wires, _find_launchers()),
        *_ucx(wires, require_rdma),
        *_memory(),
        *_directory(),
        *_limits(resource.getrlimit, bool(_rdma_devices())),
        *_slurm(dict(os.environ)),
    ]


def _probe_wires() -> dict[str, Any]:
    """`transport.select.describe` in a process of its own: libraries that do not fit each other may crash it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading MPI and UCX took more than {_PROBE_TIMEOUT} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"loading MPI and UCX ended with code {done.returncode}: {last}"}
    return found


def _software() -> list[Finding]:
    return [
        Finding("software", "hpcray", package_version("hpcray", "from a source directory")),
        Finding("software", "Python", f"{platform.python_version()} at {sys.executable}"),
        Finding("software", "NumPy", package_version("numpy")),
    ]


def package_version(name: str, otherwise: str = "not installed") -> str:
    """Version of an installed package, or `otherwise`."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return otherwise


def _find_launchers() -> dict[str, str]:
    """Launchers by name: the path, of mpirun that which `hpcray-launch` would use."""
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    found = {"mpirun": beside or shutil.which("mpirun"), "srun": shutil.which("srun")}
    return {name: path for name, path in found.items() if path}


def _mpi(wires: dict[str, Any], launchers: dict[str, str]) -> list[Finding]:
    hint = "load the site's MPI and install mpi4py for it, or pip install 'hpcray[mpi]'; one node needs none"
    if "error" in wires:
        return [Finding("MPI", "library", str(wires["error"]), FAIL, hint)]
    if not wires.get("mpi4py"):
        return [Finding("MPI", "library", str(wires["mpi"]), FAIL, hint)]
    found = [
        Finding("MPI", "library", str(wires["mpi"]), OK),
        Finding("MPI", "mpi4py", str(wires["mpi4py"])),
    ]
    if not launchers:
        found.append(Finding("MPI", "launcher", "neither mpirun nor srun", FAIL, "put the site's mpirun on PATH"))
    if "mpirun" in launchers:
        banner = _first_line([launchers["mpirun"], "--version"])
        fits = _family(banner) == _family(str(wires["mpi"]))
        found.append(
            Finding(
                "MPI",
                "mpirun",
                f"{launchers['mpirun']}: {banner}",
                OK if fits else FAIL,
                "" if fits else "it is of another MPI than mpi4py's library: every rank would be alone",
            )
        )
    if "srun" in launchers:
        found.append(Finding("MPI", "srun", f"{launchers['srun']}: {_first_line([launchers['srun'], '--version'])}"))
    return found


def _family(text: str) -> str:
    lower = text.lower()
    families = {"open mpi": "Open MPI", "open-mpi": "Open MPI", "mpich": "MPICH", "hydra": "MPICH", "intel": "MPICH"}
    return next((family for mark, family in families.items() if mark in lower), text)


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    first = ((done.stdout or done.stderr).strip().splitlines() or ["says nothing"])[0]
    return first if done.returncode == 0 else f"does not work: {first}"


def _ucx(wires: dict[str, Any], require_rdma: bool) -> list[Finding]:
    devices = _rdma_devices()
    adapters = Finding("UCX", "RDMA adapters", ", ".join(devices) or "none")
    missing = FAIL if require_rdma else WARN
    if "error" in wires:
        return [adapters]
    if not wires["libucx"]:
        hint = "pip install 'hpcray[ucx]', or install ucxx for the site's UCX"
        value = f"{wires['ucx']}: object bytes will go over MPI"
        return [Finding("UCX", "library", value, missing, hint), adapters]
    transports = wires["transports"]
    found = [
        Finding("UCX", "library", f"{wires['ucx']} at {wires['libucx']}", OK),
        Finding("UCX", "transports", ", ".join(sorted(set(transports))) or "none"),
        adapters,
    ]
    if wires["rdma"]:
        found.append(Finding("UCX", "RDMA", "used", OK))
    elif devices:
        hint = "this UCX has no verbs: use the site's (RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1)"
        found.append(Finding("UCX", "RDMA", "not used, although there is an adapter", missing, hint))
    else:
        level = FAIL if require_rdma else NOTE
        found.append(Finding("UCX", "RDMA", "not used: there is no adapter; hosts talk over TCP", level))
    return found


def _rdma_devices() -> list[str]:
    """RDMA adapters with the state and rate of their first port."""
    found = []
    for device in sorted(_INFINIBAND.glob("*")):
        port = device / "ports" / "1"
        try:
            state = (port / "state").read_text().split(":")[-1].strip().lower()
            rate = (port / "rate").read_text().strip()
        except OSError:
            state = rate = "unknown"
        found.append(f"{device.name} ({state}, {rate})")
    return found


def _memory() -> list[Finding]:
    usable = probe.usable_memory()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cut = f", cut by a cgroup from {_size(machine)}" if usable < machine else ""
    return [
        Finding("host", "CPUs", f"{probe.usable_cpus()} of {os.cpu_count()} usable"),
        Finding("host", "memory", f"{_size(usable)} usable{cut}; the object stores take 30 % of it by default"),
    ]


def _size(amount: float) -> str:
    return f"{amount / _GB:.1f} GB" if amount >= _GB else f"{amount / _MB:.0f} MB"


def _limits(getrlimit: Callable[[int], tuple[int, int]], rdma: bool) -> list[Finding]:
    """Soft limits that stop large jobs, with what they stop."""
    cases = [
        ("open files", resource.RLIMIT_NOFILE, _FEW_FILES, "ulimit -n 65536: each process holds a socket to its peers"),
        ("processes", resource.RLIMIT_NPROC, _FEW_PROCESSES, "ulimit -u: every worker is a process with threads"),
    ]
    if rdma:
        cases.append(
            ("locked memory", resource.RLIMIT_MEMLOCK, _LITTLE_LOCKED, "ulimit -l unlimited: RDMA locks memory")
        )
    found = []
    for name, number, few, hint in cases:
        soft, _ = getrlimit(number)
        unlimited = soft == resource.RLIM_INFINITY
        shown = "unlimited" if unlimited else _size(soft) if number == resource.RLIMIT_MEMLOCK else str(soft)
        enough = unlimited or soft >= few
        found.append(Finding("limits", name, shown, OK if enough else WARN, "" if enough else hint))
    return found


def _directory() -> list[Finding]:
    root = session_root(os.environ)
    parent = os.path.dirname(root)
    wanted = os.environ.get("HPCRAY_TMPDIR") or os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or parent
    if not os.access(parent, os.W_OK | os.X_OK):
        return [Finding("host", "session directory", root, FAIL, f"{parent} is not writable; set HPCRAY_TMPDIR")]
    if os.path.abspath(wanted) != parent:
        hint = f"{wanted} does not exist or is too long for sockets; set HPCRAY_TMPDIR to a short node-local path"
        return [Finding("host", "session directory", root, WARN, hint)]
    return [Finding("host", "session directory", root, OK)]


def _slurm(environ: dict[str, str]) -> list[Finding]:
    if "SLURM_JOB_ID" not in environ:
        return []
    nodes = environ.get("SLURM_JOB_NUM_NODES", "?")
    return [Finding("Slurm", "allocation", f"job {environ['SLURM_JOB_ID']}, {nodes} nodes")]
