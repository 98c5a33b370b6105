"""Processes that run already as the ranks of an MPI job: `PlaceHolder`, `adopt`, `leave`.

A launcher starts a process for each rank, which holds the rank's place: it writes the variables by which the launcher's
server knows the rank to a file that only this user can read, and waits. A process on the same host that takes these
variables is the rank, as soon as it starts MPI.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from hpcray.common.exceptions import StartupError
from hpcray.jobs import read_pickle
from hpcray.mpi.nested_job import RankHolder, RankShare
from hpcray.mpi.processes import HELD, place_file, start_mpi
from hpcray.platform.launcher_environment import set_mpi_variables, strip_launcher_variables
from hpcray.platform.private_files import open_private_file

_POLL = 0.01  # seconds


class PlaceHolder:
    """Holds the places of the ranks of one host, in a process there, whose death ends them. One holder `launch`es."""

    def __init__(self) -> None:
        self._holder = RankHolder()
        self._held: IO[bytes] | None = None
        self._failure = ""

    def prepare(self, token: str) -> str:
        """Make this host ready; the directory of its places. Args: token: names the job."""
        _, directory = self._holder.prepare(token)
        self._held = os.fdopen(open_private_file(os.path.join(directory, HELD), os.O_WRONLY | os.O_CREAT), "wb")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        return directory

    def launch(self, shares: Sequence[RankShare]) -> None:
        """Start the processes that hold the places, and return at once."""
        threading.Thread(target=self._launch, args=(list(shares),), name="hpcray-mpi-launch", daemon=True).start()

    def _launch(self, shares: list[RankShare]) -> None:
        code, tail = self._holder.launch(shares, {}, 1, "place")
        self._failure = f"the launcher ended with code {code}: {tail.strip()}"

    @property
    def failure(self) -> str:
        """The way the launcher ended; "" while it runs."""
        return self._failure

    def close(self) -> None:
        """Let the places go, and remove their directory."""
        if self._held is not None:
            self._held.close()
        self._holder.close()


def adopt(directory: str, rank: int, size: int, timeout: float, holder: PlaceHolder | None = None) -> None:
    """Make this process a rank, and start MPI in it; MPI's COMM_WORLD has these ranks.

    Args:
        directory: of the places of this host.
        rank: which one.
        size: number of ranks.
        timeout: seconds until the place must be there.
        holder: of this host, in this process, if it launches the job.

    Raises:
        StartupError: MPI runs in this process already, the launcher has failed, or it was too slow.
    """
    if "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_initialized():
        raise StartupError("MPI has been started in this worker already; hint: import mpi4py in the training function")
    deadline = time.monotonic() + timeout
    while True:
        try:
            place: dict[str, Any] = read_pickle(place_file(Path(directory), rank))
            break
        except FileNotFoundError:
            if holder is not None and holder.failure:
                raise StartupError(f"MPI rank {rank} of {size}: {holder.failure}") from None
            if time.monotonic() > deadline:
                raise StartupError(f"MPI rank {rank} of {size} was not started within {timeout:g} s") from None
            time.sleep(_POLL)
    os.environ.update(place["environ"])
    set_mpi_variables(os.environ, under_srun=place["srun"])
    try:
        found = start_mpi(place["one_host"], Path(directory)).COMM_WORLD.Get_size()
    finally:
        strip_launcher_variables(os.environ)  # this rank's alone: not for what it starts
    if found != size:
        raise StartupError(
            f"this MPI rank sees a world of {found} ranks and not {size}; hint: mpi4py belongs to another MPI than the "
            "launcher, see `hpcray doctor`"
        )


def leave() -> None:
    """End MPI in this process; all ranks do so together."""
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()
