"""`hpcray-launch`: the mpirun (or srun) line for a program, composed from options, and run."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcray.cluster.options import LaunchOptions, parse_options
from hpcray.cluster.runner import run_launcher

# Local ranks inherit everything. Over ssh only what is named with -x arrives; Open MPI adds its own OMPI_MCA_*.
_FORWARD_PREFIXES = ("HPCRAY_", "UCX_", "RAPIDS_")
_FORWARD_NAMES = frozenset({"PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"})
_LOOPBACK = "localhost"

# One rank per node, and the surviving ranks go on when a node is lost: the only set of options found that does it.
# Without --cpu-bind=none Slurm may bind the rank, and all that it forks, to a single core.
_SRUN = (
    *("srun", "--mpi=pmix", "--ntasks-per-node=1", "--cpu-bind=none"),
    *("--no-kill", "--kill-on-bad-exit=0", "-W", "0"),
)


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


class LaunchError(Exception):
    """The line cannot be composed; the message says why and what to do."""


@dataclass(frozen=True)
class Site:
    """What the line depends on besides the options.

    Attributes:
        python: the interpreter that every rank runs.
        mpirun: absolute path of the launcher.
        root: whether we are root.
        environ: our environment.
        names: names and addresses of this host.
        wheel: the environment that Open MPI was installed into from PyPI, or "".
        no_input: whether our stdin has nothing to give.
    """

    python: str
    mpirun: str
    root: bool
    environ: Mapping[str, str]
    names: frozenset[str] = frozenset({_LOOPBACK})
    wheel: str = ""
    no_input: bool = False


def compose(options: LaunchOptions, site: Site) -> list[str]:
    """The complete command line that starts the job. Pure: same options and site, same line.

    Raises:
        LaunchError: `options.srun` outside an allocation.
    """
    if options.srun:
        return _compose_srun(options, site)
    line = [site.mpirun]
    if site.root:
        line.append("--allow-run-as-root")
    if options.hostfile:
        line += ["--hostfile", options.hostfile]
    else:
        line += ["--host", ",".join(options.hosts) or _LOOPBACK]
    if options.nodes is None and options.hostfile:
        line += ["--map-by", "ppr:1:node"]  # without -n mpirun would start a rank for each slot of the file
    else:
        line += ["-n", str(options.nodes or max(1, len(options.hosts))), "--map-by", "node:OVERSUBSCRIBE"]
    line += ["--bind-to", "none"]
    if site.no_input and not starts_here(options, site):
        line += ["--stdin", "none"]  # what mpirun itself forwards never ends (Open MPI 5)
    if options.hosts or options.hostfile:
        for name in _forwarded(options, site.environ):
            line += ["-x", name]
    return line + _rank_command(options, site.python)


def starts_here(options: LaunchOptions, site: Site) -> bool:
    """Whether rank 0 will run on this host, as far as the options tell."""
    if options.srun or options.hostfile:
        return False
    return not options.hosts or options.hosts[0].partition(":")[0] in site.names


def _compose_srun(options: LaunchOptions, site: Site) -> list[str]:
    if not site.environ.get("SLURM_JOB_ID"):
        raise LaunchError(
            "--srun needs a Slurm allocation, and there is none; hint: salloc -N 4, or use slurm/cpu.sbatch"
        )
    nodes = ["-N", str(options.nodes)] if options.nodes else []
    wanted = {"OPAL_PREFIX": site.wheel, **_WHEEL_UNDER_SRUN} if site.wheel else {}
    added = [f"{name}={value}" for name, value in wanted.items() if name not in site.environ]
    return [*(["env", *added] if added else []), *_SRUN, *nodes, *_rank_command(options, site.python)]


def _rank_command(options: LaunchOptions, python: str) -> list[str]:
    command = [python, "-m", "hpcray"]
    if options.cpus_per_node is not None:
        command += ["--num-cpus", f"{options.cpus_per_node:g}"]
    if options.object_store is not None:
        command += ["--object-store-memory", str(options.object_store)]
    return [*command, *options.command]


def _forwarded(options: LaunchOptions, environ: Mapping[str, str]) -> list[str]:
    wanted = {name for name in environ if name.startswith(_FORWARD_PREFIXES) or name in _FORWARD_NAMES}
    return sorted(wanted | set(options.export))


def find_wheel(python: str) -> str:
    """The environment of this Python if Open MPI is installed in it, else ""."""
    bin_dir = os.path.dirname(python)
    return os.path.dirname(bin_dir) if os.path.exists(os.path.join(bin_dir, "mpirun")) else ""


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
        site = Site(
            python=sys.executable,
            mpirun="" if options.srun else find_mpirun(options.mpirun, os.path.dirname(sys.executable)),
            root=os.geteuid() == 0,
            environ=os.environ,
            names=_own_names(),
            wheel=find_wheel(sys.executable),
            no_input=_stdin_is_empty(),
        )
        line = compose(options, site)
    except LaunchError as error:
        print(f"hpcray-launch: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(shlex.join(line))
        return 0
    here = starts_here(options, site)
    if not (here or options.srun or site.no_input or os.isatty(0)):
        print(
            "hpcray-launch: rank 0 is on another host, and the end of this input may never reach it (Open MPI 5); "
            "hint: start hpcray-launch on the first host, or give it </dev/null",
            file=sys.stderr,
        )
    return run_launcher(line, console=here)


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
