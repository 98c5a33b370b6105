"""`hpcray doctor` on one host (versions, MPI, UCX, network, CPUs, memory, GPUs, directories, limits), and the merge of
several hosts' findings."""

from __future__ import annotations

import glob
import json
import math
import os
import platform
import re
import resource
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from hpcray.common.config import Config
from hpcray.platform import resource_limits
from hpcray.platform.accelerators import SHARE, gpu_visibility_variable, visible_gpus
from hpcray.platform.allocation import read_allocation, run_command
from hpcray.platform.config_files import (
    SYSTEM_FILE,
    ConfigFileError,
    config_files,
    configured_environment,
    launch_config,
    node_config,
)
from hpcray.platform.launcher_environment import open_mpi_wheel_prefix
from hpcray.platform.mpi_directory import find_library
from hpcray.platform.numa_binding import UCX_NET_DEVICES, WorkerPlan, numa_nodes, numa_nodes_of, plan_rank
from hpcray.platform.process_control import code_line
from hpcray.platform.session_directory import session_root
from hpcray.platform.spill_files import TmpDirectory, file_system_type, inspect_tmp_directory, tmp_directories
from hpcray.transport.startup import (
    check_fault_tolerance,
    check_protocol,
    check_shared_memory,
    few_cores,
    pmi_offered,
    read_launch,
    several_tasks,
    threads_of_a_core,
)

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "fail"
_PROBE_TIMEOUT = 40  # seconds for loading MPI and UCX
_INFINIBAND = Path("/sys/class/infiniband")
_NETWORK = Path("/sys/class/net")
_PROBE = "import json; from hpcray.transport.selection import describe; print(json.dumps(describe()))"
_UCT = re.compile(r"libuct_(\w+)[.-]")
_HYDRA_VERSION = re.compile(r"\s*Version: *(\S+)")
_PROTOCOLS = {"pmix": "PMIx", "pmi2": "PMI-2", "none": "none"}
_MIB = 1 << 20
_GIB = 1 << 30
# Below these amounts a limit or a directory is a warning; the last three in bytes.
_FEW_FILES = _FEW_PROCESSES = 4096
_LITTLE_LOCKED = _LITTLE_TMP = 1 << 30
_LITTLE_SHARED_MEMORY = 64 << 20


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report.

    Attributes:
        topic: the section of the report: "MPI", "UCX", ...
        name: the thing examined.
        value: the result.
        level: OK (green), NOTE (a fact), WARN (yellow: works, but not well) or FAIL (red: a job on several nodes will
            not start).
        hint: the remedy, or "".
    """

    topic: str
    name: str
    value: str
    level: str = NOTE
    hint: str = ""


@dataclass(frozen=True)
class DoctorRow:
    """A finding, and the nodes that share it.

    Attributes:
        finding: the common finding.
        nodes: names of these nodes; empty: the finding concerns the whole job, or the only machine.
    """

    finding: DoctorFinding
    nodes: tuple[str, ...] = ()


def merge(reports: Mapping[str, Sequence[DoctorFinding]]) -> list[DoctorRow]:
    """Merge findings by name of node: equal findings once, in the order of the first node's report."""
    order: dict[tuple[str, str], int] = {}
    topics: dict[str, int] = {}
    found: dict[DoctorFinding, list[str]] = {}
    for node, findings in reports.items():
        for finding in findings:
            topics.setdefault(finding.topic, len(topics))
            order.setdefault((finding.topic, finding.name), len(order))
            found.setdefault(finding, []).append(node)
    rows = [DoctorRow(finding, tuple(nodes)) for finding, nodes in found.items()]
    return sorted(rows, key=lambda row: (topics[row.finding.topic], order[row.finding.topic, row.finding.name]))


_software = partial(DoctorFinding, "software")
_host = partial(DoctorFinding, "host")
_limits = partial(DoctorFinding, "limits")
_mpi = partial(DoctorFinding, "MPI")
_ucx = partial(DoctorFinding, "UCX")


def probe_wires() -> dict[str, Any]:
    """`transport.selection.describe` in a process of its own: libraries that do not fit each other may crash it."""
    try:
        line = code_line(_PROBE)
        done = run_command(line, _PROBE_TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"error": f"loading MPI and UCX took more than {_PROBE_TIMEOUT} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"loading MPI and UCX ended with code {done.returncode}: {last}"}
    return found


def find_launchers() -> dict[str, str]:
    """Paths of the launchers, by name; of mpirun the one that `hpcray-launch` would use."""
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    found = {"mpirun": beside or shutil.which("mpirun"), "srun": shutil.which("srun")}
    return {name: path for name, path in found.items() if path}


def examine_mpi(wires: Mapping[str, Any], launchers: Mapping[str, str]) -> list[DoctorFinding]:
    """The library, mpi4py, and whether the launchers belong to it (`probe_wires`, `find_launchers`)."""
    hint = "load the site's MPI and install mpi4py for it, or pip install 'hpcray[mpi]'; one node needs none"
    if "error" in wires:
        return [_mpi("library", str(wires["error"]), FAIL, hint)]
    if not wires.get("mpi4py"):
        return [_mpi("library", str(wires["mpi"]), FAIL, hint)]
    found = [_mpi("library", str(wires["mpi"]), OK), _mpi("mpi4py", str(wires["mpi4py"]))]
    if not launchers:
        found.append(_mpi("launcher", "neither mpirun nor srun", FAIL, "put the site's mpirun on PATH"))
    if "mpirun" in launchers:
        banner = _banner(launchers["mpirun"])
        fits = _family(banner) == _family(str(wires["mpi"]))
        hint = "" if fits else "it is of another MPI than mpi4py's library: every rank would be alone"
        found.append(_mpi("mpirun", f"{launchers['mpirun']}: {banner}", OK if fits else FAIL, hint))
        found.append(_ports(launchers["mpirun"]))
    if "srun" in launchers:
        found.append(_mpi("srun", f"{launchers['srun']}: {_first_line([launchers['srun'], '--version'])}"))
    return found


def _ports(mpirun: str) -> DoctorFinding:
    """The ports of the mpirun that starts a job, and who can reach them."""
    if find_library(mpirun):
        return _mpi("mpirun's ports", "none on one host; on several, open to the other users of these hosts")
    hint = "srun, or nodes of your own: other users of a host run programs as you through them (docs/security.md)"
    return _mpi("mpirun's ports", "open to the other users of its hosts", WARN, hint)


def examine_start(wires: Mapping[str, Any], environ: Mapping[str, str]) -> list[DoctorFinding]:
    """In a task of srun: whether its start-up protocol and the library fit, and other obstacles to a start."""
    launch = read_launch(environ)
    if launch.kind != "srun":
        return []
    offered = f"srun gives {_PROTOCOLS[pmi_offered(environ)]}"
    problem = check_protocol(launch, str(wires.get("mpi_text", "")), environ)
    found = [_judged("start-up", problem, offered, FAIL)]
    open_mpi = _family(str(wires.get("mpi", ""))) == "Open MPI"
    if open_mpi and "OMPI_MCA_pml" not in environ and not open_mpi_wheel_prefix():
        # hpcray sets it for the wheel, whose UCX it knows; a site's Open MPI may have been built without.
        hint = "OMPI_MCA_pml=ucx, if this Open MPI has it: only that layer lets the other ranks live when one dies"
        found.append(_mpi("loss of a rank", "as Open MPI's own choice of a layer has it", NOTE, hint))
    cores = few_cores(launch, read_allocation(environ).cpus_meant, os.sched_getaffinity(0), threads_of_a_core())
    for text, level in ((check_fault_tolerance(launch, environ), FAIL), (several_tasks(launch), WARN), (cores, WARN)):
        if text:
            found.append(_judged("start-up", text, "", level))
    return found


def _judged(name: str, problem: str, fine: str, level: str) -> DoctorFinding:
    what, _, hint = problem.partition("; hint: ")
    return _mpi(name, what, level, hint) if problem else _mpi(name, fine, OK)


def examine_ucx(wires: Mapping[str, Any], require_rdma: bool) -> list[DoctorFinding]:
    """UCX's build, its transports and devices, the network's devices, and whether object bytes go over RDMA.

    Args:
        wires: as `probe_wires` returns it.
        require_rdma: its absence is a failure.
    """
    devices = rdma_devices()
    adapters = [
        _ucx("RDMA adapters", ", ".join(devices) or "none"),
        _ucx("network devices", ", ".join(network_devices()) or "none"),
    ]
    missing = FAIL if require_rdma else WARN
    if "error" in wires:
        return adapters
    if not wires["libucx"]:
        hint = "pip install 'hpcray[ucx]', or install ucxx for the site's UCX"
        value = f"{wires['ucx']}: object bytes will go over MPI"
        return [_ucx("library", value, missing, hint), *adapters]
    transports = wires["transports"]
    found = [
        _ucx("library", f"{wires['ucx']} at {wires['libucx']}", OK),
        _ucx("build", ", ".join(_modules(str(wires["libucx"]))) or "transports inside the library"),
        _ucx("transports", ", ".join(sorted(set(transports))) or "none"),
        *adapters,
    ]
    if wires["rdma"]:
        found.append(_ucx("RDMA", "used", OK))
    elif devices:
        hint = "this UCX has no verbs: use the site's (RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1)"
        found.append(_ucx("RDMA", "not used, although there is an adapter", missing, hint))
    else:
        level = FAIL if require_rdma else NOTE
        hint = "without --require-rdma a job runs over TCP" if require_rdma else ""
        found.append(_ucx("RDMA", "not used: there is no adapter; hosts talk over TCP", level, hint))
    return found


def rdma_devices() -> list[str]:
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


def network_devices() -> list[str]:
    """Network interfaces that are up, with their speed where it is known."""
    found = []
    for device in sorted(_NETWORK.glob("*")):
        try:
            if device.name == "lo" or (device / "operstate").read_text().strip() not in ("up", "unknown"):
                continue
            speed = int((device / "speed").read_text())
        except (OSError, ValueError):
            speed = 0
        found.append(f"{device.name} ({speed / 1000:g} Gb/s)" if speed > 0 else device.name)
    return found


def nearest_adapters(nodes: set[int]) -> list[str]:
    """RDMA adapters, else network cards, that hang on one of these NUMA nodes; all where that is not known."""
    for directory in (_INFINIBAND, _NETWORK):
        cards = {path.parent.name: _numa_of(path) for path in sorted(directory.glob("*/device"))}
        near = [name for name, node in cards.items() if node in nodes or node < 0]
        if near:
            return near
    return []


def _numa_of(device: Path) -> int:
    try:
        return int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _modules(library: str) -> list[str]:
    """The transports that this UCX was built with, by the names of its modules."""
    files = glob.glob(os.path.join(os.path.dirname(library), "ucx", "libuct_*"))
    return sorted({match[1] for path in files if (match := _UCT.match(os.path.basename(path)))})


def _family(text: str) -> str:
    lower = text.lower()
    families = {"open mpi": "Open MPI", "open-mpi": "Open MPI"}
    families |= dict.fromkeys(("mpich", "mvapich", "hydra", "intel"), "MPICH")
    return next((family for mark, family in families.items() if mark in lower), text)


def _banner(launcher: str) -> str:
    """Name and version of an mpirun. That of MPICH and MVAPICH, Hydra, begins with a heading."""
    lines = _output_lines([launcher, "--version"])
    version = next((match[1] for line in lines if (match := _HYDRA_VERSION.match(line))), "")
    return f"Hydra {version}" if "hydra" in lines[0].lower() and version else lines[0]


def _first_line(command: list[str]) -> str:
    return _output_lines(command)[0]


def _output_lines(command: list[str]) -> list[str]:
    """Lines that a program prints, or one with the reason why it prints none."""
    try:
        done = run_command(command, 20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"does not run: {error}"]
    lines = (done.stdout or done.stderr).strip().splitlines() or ["says nothing"]
    return lines if done.returncode == 0 else [f"does not work: {lines[0]}"]


def examine_software(environ: Mapping[str, str]) -> list[DoctorFinding]:
    """Versions of hpcray, Python and NumPy, the way of installation, and the environment."""
    installed = installation(environ)
    return [
        _software("hpcray", package_version("hpcray", "from a source directory")),
        _software("installation", installed.way),
        *([_software("module", installed.problem, WARN, installed.hint)] if installed.problem else []),
        _software("Python", f"{platform.python_version()} at {sys.executable}"),
        _software("NumPy", package_version("numpy")),
        _software("environment", f"{sys.prefix} on {file_system_type(sys.prefix) or 'an unknown file system'}"),
    ]


def examine_configuration(environ: Mapping[str, str]) -> DoctorFinding:
    """The configuration files of this process, or what is wrong with them."""
    try:
        found = [path for path, _ in config_files(environ) if os.path.exists(path)]
        configured_environment(environ)
    except ConfigFileError as error:
        text, _, hint = str(error).partition("; hint: ")
        return _software("configuration", text, FAIL, hint)
    return _software("configuration", ", ".join(found) or f"no file, such as {SYSTEM_FILE}")


def package_version(name: str, otherwise: str = "not installed") -> str:
    """Version of an installed package, or `otherwise`."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return otherwise


def examine_cpus(environ: Mapping[str, str]) -> list[DoctorFinding]:
    """CPUs that this process may use, and the limits on them."""
    given = read_allocation(environ)
    machine, mask, quota = os.cpu_count() or 1, sorted(os.sched_getaffinity(0)), resource_limits.cgroup_cpus()
    limits = [f"affinity {len(mask)}"]
    limits += [f"cgroup {quota:g}"] if quota < math.inf else []
    limits += [f"Slurm {given.cpus_here}"] if given.cpus_here else []
    usable = resource_limits.usable_cpus()
    few = given.in_step and usable == 1 < machine
    hint = "one core for a whole node: ask with srun --cpus-per-task, or start with hpcray-launch" if few else ""
    return [_host("CPUs", f"{usable} of {machine} usable ({', '.join(limits)})", WARN if few else OK, hint)]


def examine_binding(environ: Mapping[str, str]) -> list[DoctorFinding]:
    """The cores of this process, and with several NUMA nodes the binding of workers and adapters that hpcray adds to
    the launcher's."""
    mask, nodes = frozenset(os.sched_getaffinity(0)), numa_nodes()
    mine = numa_nodes_of(mask, nodes)
    place = f"cores {runs(sorted(mask))}"
    place += f", NUMA node{'s' * (len(mine) > 1)} {runs(sorted(mine))}" if mine else ""
    cards = nearest_adapters(mine)
    place += f", network {', '.join(cards)}" if cards else ""
    found = [_host("binding", place)]
    requested = _settings(environ).bind
    plan = plan_rank(visible_gpus(environ), -1, 1, 0, environ, requested)
    if len(nodes) > 1:
        value = _worker_places(plan.workers) if requested else "the cores of their rank (HPCRAY_BIND=0)"
        found.append(_host("workers", value))
    devices = launch_config(environ).network_devices
    if UCX_NET_DEVICES not in environ and devices:
        found.append(_host("RDMA ports", f"{devices} (the setting network_devices)"))
    elif UCX_NET_DEVICES in environ:
        found.append(_host("RDMA ports", f"{environ[UCX_NET_DEVICES]} ({UCX_NET_DEVICES} of the site or the user)"))
    elif plan.adapters:
        found.append(_host("RDMA ports", f"{plan.adapters} ({UCX_NET_DEVICES}, if UCX has them)"))
    return found


def _worker_places(plan: WorkerPlan) -> str:
    gpus: dict[str, list[str]] = {}
    for ident, cores in plan.near.items():
        gpus.setdefault(runs(sorted(cores)), []).append(ident)
    places = [f"with GPU {', '.join(ids)}: cores {cores}" for cores, ids in gpus.items()]
    return "; ".join([*places, "others: the cores of their rank" if places else "the cores of their rank"])


def _settings(environ: Mapping[str, str]) -> Config:
    try:
        return node_config(environ)
    except ValueError:
        return Config()  # a job reports the error


def runs(numbers: Sequence[int]) -> str:
    """`0-3,8` for 0 1 2 3 8."""
    found: list[list[int]] = []
    for number in numbers:
        if not found or number != found[-1][1] + 1:
            found.append([number, number])
        found[-1][1] = number
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def examine_memory(environ: Mapping[str, str]) -> list[DoctorFinding]:
    """Memory that the node's processes may use together, its limits, /dev/shm, and the sharing of stores on a host."""
    usable, machine = resource_limits.usable_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup, given = resource_limits.cgroup_memory(), read_allocation(environ).memory_here
    limits = [f"machine {size(machine)}"]
    limits += [f"cgroup {size(cgroup)}"] if cgroup is not None and cgroup < machine else []
    limits += [f"Slurm {size(given)}"] if given else []
    value = f"{size(usable)} usable ({', '.join(limits)}); the object stores take 30 % of it by default"
    found = [_host("memory", value), examine_shared_memory()]
    if not _settings(environ).same_host:
        text = "nodes of this host do not read in each other's stores: objects go over the wires (HPCRAY_SAME_HOST=0)"
        found.append(_host("neighbors", text, NOTE))
    return found


def examine_shared_memory(path: str = "/dev/shm") -> DoctorFinding:
    """/dev/shm, which holds MPI's and UCX's segments, but not the object store."""
    problem = check_shared_memory(path)
    if problem:
        what, _, hint = problem.partition("; hint: ")
        return _host(path, what, FAIL, hint)
    state = os.statvfs(path)
    total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    little = free < _LITTLE_SHARED_MEMORY
    hint = "tight for several ranks on this host: remove what dead jobs left there, or --shm-size=1g for a container"
    return _host(path, f"{size(free)} free of {size(total)}", WARN if little else OK, hint if little else "")


def size(amount: float) -> str:
    """Bytes in MiB or GiB."""
    return f"{amount / _GIB:.1f} GiB" if amount >= _GIB else f"{amount / _MIB:.0f} MiB"


def examine_gpus(environ: Mapping[str, str]) -> list[DoctorFinding]:
    """Ids of the GPUs that a node here would offer."""
    ids = visible_gpus(environ)
    if ids:
        shared = environ.get(SHARE) == "1"
        ranks = "each of several ranks here offers all of them" if shared else "several ranks here divide them"
        return [_host("GPUs", f"{len(ids)}: {', '.join(ids)} ({gpu_visibility_variable(environ)}); {ranks}", OK)]
    hidden = "SLURM_JOB_ID" in environ and bool(visible_gpus({}))
    hint = "the machine has GPUs, this job was given none: ask with --gpus-per-node" if hidden else ""
    return [_host("GPUs", "none", NOTE, hint)]


def examine_directories(environ: Mapping[str, str]) -> list[DoctorFinding]:
    """The place of the session directory, and the directories for temporary files with their file systems."""
    root = session_root(environ)
    parent = os.path.dirname(root)
    environ = configured_environment(environ)
    requested = environ.get("HPCRAY_TMPDIR") or environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or parent
    home = inspect_tmp_directory(parent)
    level, hint = OK, ""
    if not home.writable:
        level, hint = FAIL, f"{parent} is not writable; set HPCRAY_TMPDIR"
    elif os.path.abspath(requested) != parent:
        level = WARN
        hint = f"{requested} does not exist or is too long for sockets; set HPCRAY_TMPDIR to a short node-local path"
    elif not home.node_local:
        level = WARN
        hint = f"{parent} is on {home.kind}, which all nodes share and which is slow: set HPCRAY_TMPDIR to a local disk"
    found = [_host("session directory", f"{root} on {home.kind or 'an unknown file system'}", level, hint)]
    return found + [_temporary(entry) for entry in tmp_directories(environ)]


def _temporary(entry: TmpDirectory) -> DoctorFinding:
    where = "shared" if not entry.node_local else "memory" if entry.in_memory else "node-local"
    value = f"{entry.path}: {entry.kind or 'unknown'} ({where}), {_free(entry.free)} free"
    name = entry.variable or "tmp"
    if not entry.writable:
        return _host(name, value, WARN, f"not writable: set {entry.variable or 'TMPDIR'} to another directory")
    if entry.free < _LITTLE_TMP:
        return _host(name, value, WARN, "nearly full: spilled objects and logs go there")
    return _host(name, value)


def _free(amount: int) -> str:
    """Free space with two digits, so that nodes whose disks differ a little share a row."""
    if amount < _GIB:
        return size(amount)
    digits = max(0, len(str(amount // _GIB)) - 2)
    return f"{amount // _GIB // 10**digits * 10**digits} GiB"


def examine_limits(getrlimit: Callable[[int], tuple[int, int]], rdma: bool) -> list[DoctorFinding]:
    """Soft limits that stop large jobs; RDMA needs locked memory."""
    cases = [
        ("open files", resource.RLIMIT_NOFILE, _FEW_FILES, "ulimit -n 65536: each process holds a socket to its peers"),
        ("processes", resource.RLIMIT_NPROC, _FEW_PROCESSES, "ulimit -u: every worker is a process with threads"),
        ("locked memory", resource.RLIMIT_MEMLOCK, _LITTLE_LOCKED if rdma else 0, "ulimit -l unlimited for RDMA"),
    ]
    found = []
    for name, number, few, hint in cases:
        soft, _ = getrlimit(number)
        unlimited = soft == resource.RLIM_INFINITY
        shown = "unlimited" if unlimited else size(soft) if number == resource.RLIMIT_MEMLOCK else str(soft)
        enough = unlimited or soft >= few
        found.append(_limits(name, shown, OK if enough else WARN, "" if enough else hint))
    return found


def examine(
    require_rdma: bool = False, start: bool = True, on_step: Callable[[str], None] = lambda step: None
) -> list[DoctorFinding]:
    """All findings on this machine, in the order of the report.

    Args:
        require_rdma: its absence is a failure.
        start: in a task of srun, whether to examine srun's start-up protocol.
        on_step: called before each step with its description. The programs that a step runs get 40 s at most together;
            a hanging file system may block a step for ever.
    """
    environ = dict(os.environ)
    on_step("reading the versions")
    found = examine_software(environ)
    configuration = examine_configuration(environ)
    found.append(configuration)
    if configuration.level == FAIL:
        return found  # what follows depends on it
    found += [_software("variable", text, WARN) for text in Config.unknown_variables(environ)]
    on_step("loading MPI and UCX")
    wires = probe_wires()
    on_step("asking mpirun and srun")
    found += examine_mpi(wires, find_launchers())
    found += examine_start(wires, environ) if start else []
    on_step("looking at the network")
    found += examine_ucx(wires, require_rdma)
    on_step("looking at CPUs, memory, GPUs and directories")
    found += examine_cpus(environ) + examine_binding(environ) + examine_memory(environ) + examine_gpus(environ)
    return found + examine_directories(environ) + examine_limits(resource.getrlimit, bool(rdma_devices()))


# ------------------------------------------------------------ installation
# The way in which hpcray was installed: what its files and the environment say.

MODULE_ROOT = "HPCRAY_ROOT"
"""Set by the modulefile of packaging/lmod: the directory of its installation."""
_EASYBUILD_ROOT = "EBROOTHPCRAY"
_IMAGES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
_SPACK_NAME = "py-hpcray"


class Installation(Struct, frozen=True):
    """The installation that a process has imported.

    Attributes:
        way: who installed it and where, "wheel, by pip in a virtual environment".
        problem: why it is not the one that the environment promises, or "".
        hint: the remedy of the problem, or "".
    """

    way: str
    problem: str = ""
    hint: str = ""


def installation(
    environ: Mapping[str, str],
    package: str | os.PathLike[str] = Path(__file__).parents[1],
    prefix: str = sys.prefix,
    base_prefix: str = sys.base_prefix,
    path: Sequence[str] | None = None,
    root: str = "/",
) -> Installation:
    """The installation to which a package belongs.

    Args:
        environ: the environment of the process.
        package: the directory of the package hpcray.
        prefix: of the interpreter.
        base_prefix: of the interpreter from which a virtual environment was made.
        path: where distributions are looked for; None: `sys.path`.
        root: of the file system, for the marks of containers.
    """
    package = Path(package)
    way = (
        _spack(package)
        or _easybuild(package)
        or _module(package, environ)
        or _python(package, Path(prefix), Path(base_prefix), sys.path if path is None else path)
    )
    container = _container(environ, Path(root))
    problem, hint = _passed_over(package, environ)
    return Installation(f"{way}, in {container}" if container else way, problem, hint)


def _spack(package: Path) -> str:
    """Spack's own prefix of the package, or a view with links to it or copies of it."""
    for directory in (*package.resolve().parents, *package.parents):
        for place in (directory / ".spack", directory / ".spack" / _SPACK_NAME):
            node = _first_node(place / "spec.json")
            if node.get("name") == _SPACK_NAME:
                return f"Spack: {_SPACK_NAME}@{node.get('version')}/{str(node.get('hash'))[:7]}"
    return ""


def _first_node(spec: Path) -> dict[str, Any]:
    try:
        node: dict[str, Any] = json.loads(spec.read_bytes())["spec"]["nodes"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return node


def _easybuild(package: Path) -> str:
    """EasyBuild keeps the easyconfig of an installation in its directory `easybuild`."""
    for directory in package.resolve().parents:
        configs = sorted(config.stem for config in (directory / "easybuild").glob("*.eb"))
        if configs:
            return f"EasyBuild: {next((name for name in configs if name.startswith('hpcray-')), configs[0])}"
    return ""


def _module(package: Path, environ: Mapping[str, str]) -> str:
    root = environ.get(MODULE_ROOT, "")
    return f"environment module {_loaded(environ)} at {root}" if root and _inside(package, root) else ""


def _loaded(environ: Mapping[str, str]) -> str:
    names = environ.get("LOADEDMODULES", "").split(":")
    return next((name for name in names if name.lower().startswith("hpcray")), "hpcray")


def _python(package: Path, prefix: Path, base_prefix: Path, path: Sequence[str]) -> str:
    found = list(metadata.distributions(name="hpcray", path=list(path)))
    if any(_edited(distribution) == package.resolve().parent for distribution in found):
        return f"editable, from {package.resolve().parent}"
    conda = (prefix / "conda-meta").is_dir()
    if conda and _inside(package, prefix) and any((prefix / "conda-meta").glob("hpcray-*.json")):
        return "conda package in a conda environment"
    here = [one for one in found if Path(str(one.locate_file(""))).resolve() == package.resolve().parent]
    if not here:
        return f"source directory {package.parent}, without an installation"
    by = (here[0].read_text("INSTALLER") or "an unknown program").strip()
    if conda and _inside(package, prefix):
        place = "a conda environment"
    elif _inside(package, prefix):
        place = "a virtual environment" if prefix != base_prefix else "the system's Python"
    elif _inside(package, site.getuserbase()):
        place = "the user's directory of packages"
    elif _inside(package, base_prefix):
        place = "the system's Python, below a virtual environment"
    else:
        place = f"{package.parent}, by PYTHONPATH"
    return f"wheel, by {by} in {place}"


def _edited(distribution: metadata.Distribution) -> Path | None:
    """The directory of an editable installation."""
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    if not url.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(str(url.get("url", ""))).path)).resolve()


def _container(environ: Mapping[str, str], root: Path) -> str:
    image = next((environ[name] for name in _IMAGES if environ.get(name)), "")
    if image or (root / ".singularity.d").is_dir():
        return f"an Apptainer container{f' of {image}' if image else ''}"
    if "CH_RUNNING" in environ:
        return "a Charliecloud container"
    if (root / ".dockerenv").exists():
        return "a Docker container"
    return "a Podman container" if (root / "run" / ".containerenv").exists() else ""


def _passed_over(package: Path, environ: Mapping[str, str]) -> tuple[str, str]:
    """A module is loaded, but another installation comes before the module's."""
    for name in (MODULE_ROOT, _EASYBUILD_ROOT):
        root = environ.get(name, "")
        if root and not _inside(package, root):
            problem = f"the module {_loaded(environ)} is loaded (${name}={root}), but Python imports {package}"
            return problem, f"module unload {_loaded(environ)}, or take the other one out of PATH and PYTHONPATH"
    return "", ""


def _inside(path: Path, directory: str | os.PathLike[str]) -> bool:
    return path.resolve().is_relative_to(Path(directory).resolve()) or path.is_relative_to(directory)
