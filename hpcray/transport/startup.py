"""Coming up: who was started with us, who has come, and an end to the wait for those who do not.

`MPI_Init` blocks, inside MPI, until every rank has called it. So every rank shows itself to the others of its host
before it calls `MPI_Init`, by the name of a socket; when the time is up, a thread that needs no MPI reads who has come,
names who has not, and ends the process. (A socket in the abstract namespace is no file: it goes with its process.)

Set-ups that cannot work, or only until something dies, are found before `MPI_Init`: what MPI itself says to them is a
line from its inside (`unsupported PMI version`), a rank that believes to be alone, or nothing until the first node is
lost. MPI starts without holding the interpreter lock, and without files that a killed job would leave behind.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from hpcray.common.rank_variables import FLUX, OPEN_MPI, read_other_rank, read_rank
from hpcray.transport.base import StartError

if TYPE_CHECKING:
    from mpi4py import MPI as mpi

EXIT_START_FAILED = 78
_GRACE = 1.0  # seconds that a process which gives up stays visible
_SHARED_MEMORY = "/dev/shm"
_LITTLE_SHARED_MEMORY = 4 << 20  # bytes that MPI and UCX need
_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
_YES = frozenset({"1", "t", "true", "y", "yes", "enabled", "on"})
_OPEN_MPI = re.compile(r"Open MPI v(\d+)")
_OF_MPICH = re.compile(r"(MPICH|MVAPICH\d*) Version ?: ?(.+)")
_SIBLINGS = "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_OPEN_MPI_SEGMENTS = ("/sm_segment.", "/vader_segment.")
_MOST_PMIX_USERS = 8  # in one process
_PMIX_TIME = 2.0  # seconds
_BTL = "OMPI_MCA_btl"
_USER_FILE = "~/.openmpi/mca-params.conf"


class Launch(Struct, frozen=True):
    """What the launcher says about this process.

    Attributes:
        kind: "mpirun" (Open MPI's), "srun", "flux" or "pmi" (every other); "" without a launcher.
        rank: own rank.
        size: number of ranks that were started.
        job: a name that the ranks of one job step share and no other job has.
        here: ranks started on this host, 0 if unknown.
        hosts: all hosts as the launcher writes them, "" if unknown.
    """

    kind: str = ""
    rank: int = 0
    size: int = 1
    job: str = ""
    here: int = 0
    hosts: str = ""


def read_launch(environ: Mapping[str, str]) -> Launch:
    """What the environment says. A process in a batch script, outside srun and mpirun, has no launcher."""
    found = read_rank(OPEN_MPI, environ) or read_rank(FLUX, environ)
    if (
        found is None
        and "SLURM_STEP_ID" in environ
        and "SLURM_PROCID" in environ
        and environ.get("SLURM_STEP_NUM_TASKS")
    ):
        here = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        uniform = "," not in environ.get("SLURM_STEP_TASKS_PER_NODE", ",")
        return Launch(
            "srun",
            int(environ["SLURM_PROCID"]),
            int(environ["SLURM_STEP_NUM_TASKS"]),
            f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}",
            int(here.group()) if here and uniform else 0,
            environ.get("SLURM_STEP_NODELIST", ""),
        )
    found = found or read_other_rank(environ)
    if found is not None:
        # Hydra gives no name: the ranks of one job on this host are children of one proxy.
        return Launch(found.kind, found.rank, found.size, found.job or f"pid-{os.getppid()}", found.here)
    return Launch()


def singleton_hint(launch: Launch) -> str:
    """What to tell a user whose ranks came up each in an MPI world of its own."""
    if launch.kind == "srun":
        return (
            "the MPI library and srun speak different start-up protocols: use `srun --mpi=pmix` with Open MPI, "
            "`srun --mpi=pmi2` with MPICH (`srun --mpi=list` shows what this Slurm has)"
        )
    return "mpirun belongs to another MPI than mpi4py: use the mpirun of the MPI that `hpcray doctor` shows"


class RollCall:
    """How the ranks of one host see each other before MPI does. A context manager: it holds while ranks come up.

    Args:
        launch: what the launcher says.
        timeout: seconds until the process is ended with exit code 78.
    """

    def __init__(self, launch: Launch, timeout: float) -> None:
        self._launch = launch
        self._timeout = timeout
        from hashlib import sha256  # loads OpenSSL, which a node without a launcher does not need

        key = sha256(launch.job.encode()).hexdigest()[:16]
        self._name = f"hpcray-{os.getuid()}-{key}-"
        self._up = threading.Event()
        self._step = "start"
        self._socket: socket.socket | None = None

    def step(self, what: str) -> None:
        """Note what is being waited for, for the report."""
        self._step = what

    def __enter__(self) -> RollCall:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(f"\0{self._name}{self._launch.rank}")
        except OSError:
            pass  # the launcher gave no name that only this job has; the report will miss us, nothing else
        threading.Thread(target=self._watch, name="hpcray-start", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._up.set()
        if self._socket is not None:
            self._socket.close()

    def came(self) -> list[int]:
        """Ranks of this job that are on this host now, and still starting."""
        sockets = Path("/proc/net/unix").read_text(errors="replace")
        return sorted({int(rank) for rank in re.findall(rf"@{self._name}(\d+)$", sockets, re.MULTILINE)})

    def _watch(self) -> None:
        if self._up.wait(self._timeout):
            return
        sys.stderr.write(self.report(self.came()) + "\n")
        sys.stderr.flush()
        # The first to give up must not look absent to the others of this host.
        time.sleep(_GRACE)
        os._exit(EXIT_START_FAILED)

    def report(self, came: list[int]) -> str:
        """The message of a failed start.

        Args:
            came: ranks seen on this host.
        """
        launch = self._launch
        host = socket.gethostname()
        lines = [
            f"hpcray: rank {launch.rank} of {launch.size} on {host}: the cluster was not up after "
            f"{self._timeout:g} s, waiting in {self._step}.",
            f"  on this host came: {_ranks(came)}" + (f" of {launch.here} started here" if launch.here else ""),
        ]
        absent = [rank for rank in range(launch.size) if rank not in came]
        if launch.here and launch.here == launch.size:
            lines.append(f"  missing on {host}: {_ranks(absent)}" if absent else "  all ranks came: one hangs in MPI")
        elif launch.here and len(came) >= launch.here:
            lines.append(f"  this host is complete; missing on another host (of {launch.hosts or 'the job'}), some of:")
            lines.append(f"  {_ranks(absent)}")
        else:
            lines.append(f"  not seen on {host}: {_ranks(absent)}; hosts of the job: {launch.hosts or 'unknown'}")
        lines.append("  hint: see what those ranks printed; HPCRAY_START_TIMEOUT sets the time in seconds")
        return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    """`ranks 0-2, 5`: runs shortened."""
    if not ranks:
        return "no rank"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(names)


def pmi_offered(environ: Mapping[str, str]) -> str:
    """The start-up protocol that srun offers its tasks: "pmix", "pmi2" or "none"."""
    if "PMIX_RANK" in environ or "PMIX_NAMESPACE" in environ:
        return "pmix"
    return "pmi2" if "PMI_FD" in environ or "PMI_RANK" in environ else "none"


def check_protocol(launch: Launch, library: str, environ: Mapping[str, str]) -> str:
    """What is wrong between srun's start-up protocol and the MPI library; "" where they fit, or nobody can know.

    Args:
        launch: what the launcher says.
        library: all that the library says about itself.
        environ: the environment of a rank.
    """
    if launch.kind != "srun" or launch.size == 1:
        return ""
    offered = pmi_offered(environ)
    name = library_name(library)
    open_mpi = _OPEN_MPI.match(name)
    mpich = name.startswith(("MPICH ", "MVAPICH"))
    if open_mpi and offered != "pmix" and (int(open_mpi[1]) >= 5 or offered == "none"):
        speaks, flag = "PMIx", "--mpi=pmix"
    elif mpich and (offered == "none" or (offered == "pmix" and "pmix" not in library.lower())):
        speaks, flag = "PMI-2", "--mpi=pmi2"
    else:
        return ""
    given = {"pmix": "PMIx", "pmi2": "PMI-2", "none": "no start-up protocol"}[offered]
    return (
        f"{name} speaks {speaks}, but srun gave its {launch.size} tasks {given}: each of them would be alone; "
        f"hint: srun {flag} (srun --mpi=list shows what this Slurm has)"
    )


def check_fault_tolerance(launch: Launch, environ: Mapping[str, str]) -> str:
    """Why Open MPI's own fault tolerance (ULFM) must not be on under srun; "" where it is not."""
    if launch.kind != "srun" or environ.get(_FAULT_TOLERANCE, "").strip().lower() not in _YES:
        return ""
    return (
        f"{_FAULT_TOLERANCE}={environ[_FAULT_TOLERANCE]} under srun: Slurm's PMIx plugin then ends the whole step when "
        f"a rank is lost, which hpcray survives without it; hint: unset {_FAULT_TOLERANCE} (--with-ft is for mpirun)"
    )


def check_shared_memory(path: str = _SHARED_MEMORY) -> str:
    """Why MPI and UCX would die of a bus error in /dev/shm; "" where there is room."""
    try:
        state = os.statvfs(path)
    except OSError as error:
        return f"{path} cannot be used ({error.strerror}): MPI and UCX need it; hint: mount it in the container"
    free = state.f_bavail * state.f_frsize
    if free >= _LITTLE_SHARED_MEMORY:
        return ""
    return (
        f"{path} on {socket.gethostname()} has {free >> 10} KiB free of {state.f_blocks * state.f_frsize >> 10} KiB, "
        f"MPI and UCX need {_LITTLE_SHARED_MEMORY >> 10} KiB; hint: remove what dead jobs left there, or start the "
        "container with --shm-size=1g"
    )


def check_import_order() -> str:
    """Why UCX cannot be loaded any more; "" where it can."""
    if "mpi4py.MPI" not in sys.modules or "ucxx" in sys.modules:
        return ""
    return (
        "mpi4py was imported before hpcray could load UCX, and the UCX inside Open MPI does not fit ucxx; hint: a "
        "sitecustomize module or a .pth file imports it: let that import ucxx first"
    )


def several_tasks(launch: Launch) -> str:
    """The remark on several tasks of one step on a host; "" with one."""
    if launch.kind != "srun" or launch.here <= 1:
        return ""
    return (
        f"{launch.here} tasks of this step run on {socket.gethostname()}, each as a node of its own with a part of the "
        "CPUs; Slurm ends the step when one of them dies; hint: srun --ntasks-per-node=1, and --cpus-per-task for the "
        "cores"
    )


def few_cores(launch: Launch, meant: int | None, mask: Collection[int], threads: int) -> str:
    """What to know where Slurm has bound the only task of a host to a part of the CPUs that were meant for it; "" else.

    `srun --exclusive` gives a task one core, and since Slurm 22.05 srun does not take `--cpus-per-task` from the job.

    Args:
        launch: what the launcher says.
        meant: CPUs that were asked for the task, or else those of the job on this host; None if unknown.
        mask: the CPUs that this process may use.
        threads: CPUs of a core; `--hint=nomultithread` leaves out all but the first, and that is no mistake.
    """
    meant = min(meant or 0, os.cpu_count() or 1)  # a site may tell Slurm more CPUs than there are
    if launch.kind != "srun" or launch.here != 1 or len(mask) * threads >= meant:
        return ""
    return (
        f"the one task on {socket.gethostname()} may use {len(mask)} of the {meant} CPUs that the job has for it; "
        f"hint: srun --cpus-per-task={meant} (srun does not take it from the job), or hpcray-launch"
    )


def threads_of_a_core() -> int:
    """CPUs that one core of this machine counts as; 1 where the system does not tell."""
    try:
        with open(_SIBLINGS, encoding="ascii") as file:
            text = file.read()
    except OSError:
        return 1
    return sum(int(last or first) - int(first) + 1 for first, last in _RANGE.findall(text)) or 1


def require(problem: str, launch: Launch, everywhere: bool) -> None:
    """Raise StartError where there is a problem; do nothing where `problem` is "".

    Args:
        everywhere: every rank has the same problem, so rank 0 alone reports it. False: this rank, or some, have it.
    """
    if problem and not everywhere:
        raise StartError(problem, others_wait=True)
    if problem:
        raise StartError(problem, reported_by="rank0" if launch.rank != 0 else "self")


def import_mpi() -> Any:
    """Import `mpi4py.MPI` without starting MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        with without_planted_settings():
            from mpi4py import MPI
    except Exception as error:
        raise StartError(
            f"no MPI: {type(error).__name__}: {error}; hint: pip install 'hpcray[all]', or load the site's MPI module "
            "and install mpi4py for it"
        ) from None
    return MPI


def start_mpi(one_host: bool = False) -> Any:
    """Start MPI for one thread, errors returned. Blocks until every rank has come.

    Args:
        one_host: whether all ranks are on this host. The Open MPI of this environment then opens no port that other
            hosts could reach; a site's Open MPI is configured by its site.

    Returns:
        `mpi4py.MPI`.

    Raises:
        StartError: it fails, or somebody else has started it.
    """
    module = import_mpi()
    if module.Is_initialized():
        raise StartError("MPI is already running in this process; hint: let hpcray start it")
    # Not `module.Init_thread`: it holds the interpreter lock while MPI waits for the other ranks, and the thread that
    # ends a vain wait could not run. A ctypes call does not hold it.
    provided = ctypes.c_int()
    try:
        start = ctypes.CDLL(module.__file__).MPI_Init_thread
    except AttributeError:
        with without_planted_settings():
            module.Init_thread(module.THREAD_FUNNELED)
    else:
        with without_network(one_host), without_planted_settings():
            code = start(None, None, module.THREAD_FUNNELED, ctypes.byref(provided))
        if code != module.SUCCESS:
            raise StartError(f"MPI_Init failed with code {code} on {socket.gethostname()}")
    module.COMM_WORLD.Set_errhandler(module.ERRORS_RETURN)
    module.COMM_SELF.Set_errhandler(module.ERRORS_RETURN)
    return module


@contextmanager
def without_network(wanted: bool) -> Iterator[None]:
    """Inside, Open MPI looks for no network. OFI's search for one takes a second."""
    own = any(path.startswith(sys.prefix) for path in _mapped("/libmpi.so"))
    if not wanted or not own or _BTL in os.environ or os.path.exists(os.path.expanduser(_USER_FILE)):
        yield
        return
    os.environ[_BTL] = "^tcp,ofi"
    try:
        yield
    finally:
        del os.environ[_BTL]


@contextmanager
def without_planted_settings() -> Iterator[None]:
    """Inside, the working directory is the root directory, if other users can write to what it was.

    UCX, also where MPI loads it, takes settings from a file there, and these name libraries that it loads.
    """
    if _is_own_directory():
        yield
        return
    here = os.open(".", os.O_PATH | os.O_CLOEXEC)
    os.chdir("/")
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def _is_own_directory() -> bool:
    """True if no other user could have put UCX's settings into the working directory. A group that may write to it is
    trusted; a file that the group could have written is not."""
    for path, excess in ((".", 0o002), ("ucx.conf", 0o022)):
        with suppress(OSError):  # there is none, or UCX cannot read it either
            state = os.stat(path)
            if state.st_uid not in (0, os.geteuid()) or state.st_mode & excess:
                return False
    return True


def library(module: Any) -> str:
    """Name and version of the MPI library."""
    return library_name(module.Get_library_version())


def library_name(text: str) -> str:
    """Name and version, as "MPICH 4.0.2", from all that an MPI library says about itself."""
    first = " ".join(text.split("\n")[0].strip("\0").split(", package")[0].split())
    return _OF_MPICH.sub(r"\1 \2", first)


def finalize_mpi(module: Any) -> None:
    """Call MPI_Finalize. Not `module.Finalize`: it holds the interpreter lock while MPI waits for the other ranks, and
    no thread that limits this time could run."""
    try:
        finalize = ctypes.CDLL(module.__file__).MPI_Finalize
    except AttributeError:
        module.Finalize()
    else:
        finalize()


def leave_pmix() -> None:
    """Report to the PMIx server of srun that this process ends on purpose, without the other ranks.

    To a server a client that is merely gone is lost. Slurm's then kills the whole step, if its slurmstepd has not ended
    a second later, as on a node under load or with a task epilog. MPI cannot be used any more after this call.
    """
    path = next(iter(sorted(_mapped("/libpmix."))), "")
    if not path or read_launch(os.environ).kind != "srun":
        return

    def leave() -> None:
        library = ctypes.CDLL(path)
        for _ in range(_MOST_PMIX_USERS):  # MPI is one; the last one that leaves is the process
            if not library.PMIx_Initialized():
                break
            library.PMIx_Finalize(None, 0)

    leaving = threading.Thread(target=leave, name="hpcray-leave-pmix", daemon=True)
    leaving.start()
    leaving.join(_PMIX_TIME)


def unlink_shared_memory(module: Any, comm: mpi.Intracomm) -> None:
    """Remove the names of Open MPI's shared-memory files while everyone still has them mapped.

    Open MPI removes them at the end, or its mpirun does; when both are killed they stay for ever. A process maps the
    file of a peer when it first sends to it, so every pair on this host exchanges one message before. Collective.
    """
    local = comm.Split_type(module.COMM_TYPE_SHARED)
    peers = [rank for rank in range(local.Get_size()) if rank != local.Get_rank()]
    nothing = bytearray(1)
    requests = [local.Irecv((bytearray(1), module.BYTE), rank) for rank in peers]
    requests += [local.Isend((nothing, module.BYTE), rank) for rank in peers]
    module.Request.Waitall(requests)
    local.Barrier()
    local.Free()
    for path in {path for name in _OPEN_MPI_SEGMENTS for path in _mapped(name)}:
        try:
            os.unlink(path)
        except OSError:
            pass


def _mapped(part: str) -> set[str]:
    """Files that this process has mapped and whose path holds `part`."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return {line.split(maxsplit=5)[-1].strip() for line in maps if part in line}
