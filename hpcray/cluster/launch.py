"""`hpcray-launch`: the mpirun (or srun) line for a program, composed from options, and run."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcray.cluster.options import LaunchOptions, parse_options
from hpcray.cluster.runner import run_launcher
from hpcray.cluster.srun import EPILOG, LaunchError, Slurm, compose_srun, has_mpich, protocol, try_srun
from hpcray.host.allocation import Allocation, read_allocation
from hpcray.host.allocation_nodes import parse_hostfile
from hpcray.host.launcher import open_mpi_wheel

# Local ranks inherit everything. Over ssh only what is named with -x arrives; Open MPI adds its own OMPI_MCA_*.
_FORWARD_PREFIXES = ("HPCRAY_", "UCX_", "RAPIDS_")
_FORWARD_NAMES = frozenset({"PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"})
_LOOPBACK = "localhost"
_UCX_LAYER = (
    *("--mca", "pml", "ucx", "--mca", "osc", "^ucx", "--mca", "opal_common_ucx_tls", "any"),
    *("--mca", "opal_common_ucx_devices", "any", "-x", "UCX_WARN_UNUSED_ENV_VARS=n"),
)


@dataclass(frozen=True)
class Site:
    """What the line depends on besides the options.

    Attributes:
        python: the interpreter that every rank runs.
        mpirun: absolute path of the launcher.
        root: whether we are root.
        environ: our environment.
        names: names and addresses of this host.
        no_input: whether our stdin has nothing to give.
        slurm: the allocation, and how srun starts MPI programs in it.
        hostfile: the hosts of the hostfile, in order; empty without one.
        recovers: whether mpirun is Open MPI's from PyPI, which can be told to let the other ranks live when one dies.
    """

    python: str
    mpirun: str
    root: bool
    environ: Mapping[str, str]
    names: frozenset[str] = frozenset({_LOOPBACK})
    no_input: bool = False
    slurm: Slurm = field(default_factory=lambda: Slurm(Allocation(), {}))
    hostfile: tuple[str, ...] = ()
    recovers: bool = False


def compose(options: LaunchOptions, site: Site) -> list[str]:
    """The complete command line that starts the job. Pure: same options and site, same line.

    Raises:
        LaunchError: `options.srun` outside an allocation, or srun cannot do what is asked.
    """
    if uses_srun(options, site):
        return compose_srun(options, site.slurm, _rank_command(options, site.python))
    line = [site.mpirun]
    if site.root:
        line.append("--allow-run-as-root")
    line += _recovery(options, site)
    if uses_allocation(options, site):
        line += ["-n", str(options.nodes)] if options.nodes else []
        return [
            *line,
            "--map-by",
            "ppr:1:node:OVERSUBSCRIBE",
            "--bind-to",
            "none",
            *_rank_command(options, site.python),
        ]
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
        for name in _forwarded(options, site.environ):
            line += ["-x", name]
    return line + _rank_command(options, site.python)


def driver_rank(options: LaunchOptions, site: Site) -> int:
    """The rank that will start the program."""
    if options.driver_rank is not None:
        return options.driver_rank
    text = site.environ.get("HPCRAY_DRIVER_RANK", "")
    return int(text) if text.isdecimal() else 0  # the ranks tell what is wrong with it


def starts_here(options: LaunchOptions, site: Site) -> bool:
    """Whether the rank that starts the program will run on this host, as far as the options tell."""
    rank = driver_rank(options, site)
    if uses_srun(options, site) or uses_allocation(options, site):
        return site.slurm.allocation.node == rank  # the batch script runs on node 0, salloc's shell not always
    hosts = site.hostfile if options.hostfile else [name.partition(":")[0] for name in options.hosts]
    if options.hostfile and not hosts:
        return False
    return not hosts or hosts[rank % len(hosts)] in site.names  # ranks are dealt to hosts in turn


def uses_allocation(options: LaunchOptions, site: Site) -> bool:
    """Whether the nodes are those of a Slurm job, and not named in the options."""
    named = options.hosts or options.hostfile or options.mpirun
    return not named and site.slurm.allocation.kind == "slurm"


def uses_srun(options: LaunchOptions, site: Site) -> bool:
    """Whether srun starts the ranks: where it was asked for, and in an allocation wherever it can."""
    return options.srun or (uses_allocation(options, site) and not site.slurm.problem)


def _recovery(options: LaunchOptions, site: Site) -> list[str]:
    """What lets the other ranks live when one dies. Between hosts Open MPI's own TCP layer would end them all."""
    if not site.recovers:
        return []
    several = bool(options.hostfile) or len(options.hosts) > 1 or uses_allocation(options, site)
    return ["--enable-recovery", *(_UCX_LAYER if several and "OMPI_MCA_pml" not in site.environ else ())]


def _rank_command(options: LaunchOptions, python: str) -> list[str]:
    command = [python, "-m", "hpcray"]
    if options.cpus_per_node is not None:
        command += ["--num-cpus", f"{options.cpus_per_node:g}"]
    if options.gpus_per_node is not None:
        command += ["--num-gpus", str(options.gpus_per_node)]
    if options.object_store is not None:
        command += ["--object-store-memory", str(options.object_store)]
    if options.require_rdma:
        command.append("--require-rdma")
    if options.as_ray:
        command.append("--as-ray")
    if options.driver_rank is not None:
        command += ["--driver-rank", str(options.driver_rank)]
    if options.broadcast_env:
        command += ["--broadcast-env", options.broadcast_env]
    return [*command, *options.command]


def _forwarded(options: LaunchOptions, environ: Mapping[str, str]) -> list[str]:
    wanted = {name for name in environ if name.startswith(_FORWARD_PREFIXES) or name in _FORWARD_NAMES}
    return sorted(wanted | set(options.export))


def find_mpirun(wanted: str, bin_dir: str) -> str:
    """Absolute path of the mpirun to use. Open MPI starts its own helpers on other hosts by this path.

    The one beside this Python comes first: it is there only when Open MPI was installed into this environment, and
    then mpi4py loads the library that belongs to it. Otherwise the cluster's own, from PATH.

    Args:
        wanted: the user's choice: a path, a name on PATH, or "".
        bin_dir: the directory of this Python's programs.

    Raises:
        LaunchError: there is none.
    """
    if wanted:
        found = shutil.which(wanted)
        if found is None:
            raise LaunchError(f"--mpirun {wanted}: no such program")
        return os.path.abspath(found)
    found = shutil.which("mpirun", path=bin_dir) or shutil.which("mpirun")
    if found is None:
        raise LaunchError(
            f"no mpirun in {bin_dir} or on PATH; hint: load the cluster's MPI module, or pip install 'hpcray[mpi]'"
        )
    return os.path.abspath(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hpcray-launch`. Returns the exit code of the program that was launched."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    try:
        site = _look_around(options)
        line = compose(options, site)
    except LaunchError as error:
        print(f"hpcray-launch: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(shlex.join(line))
        return 0
    by_srun, here = uses_srun(options, site), starts_here(options, site)
    if uses_allocation(options, site) and not by_srun:
        print(
            f"hpcray-launch: srun --mpi={site.slurm.mpi} does not work here: {site.slurm.problem}. Starting with "
            "mpirun instead: the job will not survive the loss of a node",
            file=sys.stderr,
        )
    if not (here or by_srun or site.no_input or os.isatty(0)):
        print(
            "hpcray-launch: the program runs on another host, and the end of this input may never reach it (Open MPI "
            "5); hint: start hpcray-launch on the program's host, or give it </dev/null",
            file=sys.stderr,
        )
    return run_launcher(line, console=here)


def _look_around(options: LaunchOptions) -> Site:
    """What the line depends on. In an allocation, one step that does nothing tells whether srun can start MPI."""
    slurm = Slurm(read_allocation(), os.environ)
    if options.srun or (slurm.allocation.kind == "slurm" and not (options.hosts or options.hostfile or options.mpirun)):
        mpi = protocol(os.environ, has_mpich())
        problem = try_srun(mpi, os.environ) if slurm.allocation.kind else ""
        epilog = EPILOG if os.access(EPILOG, os.X_OK) else ""
        slurm = Slurm(slurm.allocation, os.environ, mpi, problem, epilog)
        needs_mpirun = bool(slurm.problem) and not options.srun
    else:
        needs_mpirun = True
    mpirun = find_mpirun(options.mpirun, os.path.dirname(sys.executable)) if needs_mpirun else ""
    return Site(
        python=sys.executable,
        mpirun=mpirun,
        root=os.geteuid() == 0,
        environ=os.environ,
        names=_own_names(),
        no_input=_stdin_is_empty(),
        slurm=slurm,
        hostfile=_hosts_in(options.hostfile),
        recovers=bool(mpirun) and os.path.dirname(mpirun) == os.path.join(open_mpi_wheel(), "bin"),
    )


def _hosts_in(hostfile: str) -> tuple[str, ...]:
    try:
        with open(hostfile, encoding="utf-8", errors="replace") as file:
            return tuple(host for host, _ in parse_hostfile(file.read()))
    except OSError:
        return ()  # mpirun says what is wrong with it


def _stdin_is_empty() -> bool:
    try:
        return os.path.samestat(os.fstat(0), os.stat(os.devnull))
    except OSError:
        return True


def _own_names() -> frozenset[str]:
    name = socket.gethostname()
    return frozenset({_LOOPBACK, "127.0.0.1", "::1", name, name.partition(".")[0]})


if __name__ == "__main__":
    sys.exit(main())
