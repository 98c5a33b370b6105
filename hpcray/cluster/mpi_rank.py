"""One rank of a nested MPI job: `python -m hpcray.cluster.mpi_rank SPEC`, started by mpirun or srun."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from hpcray.base.errors import StartupError, make_task_error
from hpcray.cluster.mpi_guard import LOCK
from hpcray.cluster.outcome import Call, read_pickle, write_pickle
from hpcray.host.address import node_ip_address
from hpcray.host.launcher import prepare_mpi
from hpcray.transport.mpi_start import _without_tcp as without_tcp
from hpcray.transport.mpi_start import import_mpi, unlink_shared_memory

CALL = "call.pkl"
_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def spec_of(shares: list[tuple[str, int, int]], by_srun: bool, one_host: bool) -> str:
    """The rank's argument.

    Args:
        shares: for each node its directory, its first rank and its number of ranks.
        by_srun: whether srun starts the ranks.
        one_host: whether all of them are on one host.
    """
    return json.dumps({"shares": shares, "srun": by_srun, "one_host": one_host}, separators=(",", ":"))


def result_path(directory: Path, rank: int) -> Path:
    """Where a rank leaves what it made: ("value", pickle) or ("error", pickle, Unix time)."""
    return directory / f"r{rank}.pkl"


def find_directory(shares: list[list[Any]], environ: Mapping[str, str]) -> Path:
    """The directory of this rank's node. Where several nodes are on this host any of them will do."""
    number = next((int(environ[name]) for name in _NUMBERS if environ.get(name, "").isdecimal()), 0)
    mine = [path for path, first, count in shares if first <= number < first + count]
    for path in [*mine, *(path for path, _, _ in shares)]:
        if os.path.isdir(path):
            return Path(path)
    raise StartupError(f"MPI rank {number} runs on {socket.gethostname()}, which none of the reserved nodes is on")


def main(text: str) -> NoReturn:
    """Be a rank to the end."""
    spec = json.loads(text)
    directory = find_directory(spec["shares"], os.environ)
    threading.Thread(target=_end_with_job, args=(directory,), daemon=True).start()
    prepare_mpi(os.environ, under_srun=spec["srun"])
    os.environ["HPCRAY_ADDRESS"] = str(directory.parent)  # hpcray.init() in a rank joins the job
    module = _start(spec["one_host"])
    comm = module.COMM_WORLD
    rank, size = comm.Get_rank(), sum(count for _, _, count in spec["shares"])
    call: Call = read_pickle(directory / CALL)
    try:
        if comm.Get_size() != size:
            raise StartupError(
                f"this MPI rank sees a world of {comm.Get_size()} ranks and not {size}; hint: mpi4py belongs to "
                "another MPI than the launcher, see `hpcray doctor`"
            )
        function, args, kwargs = call.load()
        blob = cloudpickle.dumps(function(comm, *args, **kwargs))
        pickle.loads(blob)
    except BaseException as error:  # SystemExit too: a rank that leaves alone is an error
        name = f"{call.name} on MPI rank {rank} of {size}"
        told = make_task_error(name, error, os.getpid(), node_ip_address(), dumps=cloudpickle.dumps)
        told.rank = rank  # type: ignore[attr-defined]
        write_pickle(result_path(directory, rank), ("error", cloudpickle.dumps(told), time.time()))
        sys.stdout.flush()
        comm.Abort(1)
    write_pickle(result_path(directory, rank), ("value", blob))
    module.Finalize()
    sys.exit(0)


def _start(one_host: bool) -> Any:
    """Start MPI as a program of the user's would have it; no port where none is needed, no file that a kill leaves."""
    module = import_mpi()
    with without_tcp(one_host):
        module.Init_thread(module.THREAD_MULTIPLE)
    unlink_shared_memory(module, module.COMM_WORLD)
    return module


def _end_with_job(directory: Path) -> None:
    """Die as soon as nobody holds the lock: the worker that reserved this node's CPUs, or its guard, is gone."""
    try:
        with open(directory / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
