"""Starting MPI: without holding the interpreter lock, and without files that a killed job would leave behind."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpcray.transport.base import StartError

if TYPE_CHECKING:
    from mpi4py import MPI as mpi

_SHARED_MEMORY = "/dev/shm/"
_OPEN_MPI_SEGMENT = _SHARED_MEMORY + "sm_segment."
_BTL = "OMPI_MCA_btl"
_USER_FILE = "~/.openmpi/mca-params.conf"


def import_mpi() -> Any:
    """Import `mpi4py.MPI` without starting MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
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
        module.Init_thread(module.THREAD_FUNNELED)
    else:
        with _without_tcp(one_host):
            code = start(None, None, module.THREAD_FUNNELED, ctypes.byref(provided))
        if code != module.SUCCESS:
            raise StartError(f"MPI_Init failed with code {code} on {socket.gethostname()}")
    module.COMM_WORLD.Set_errhandler(module.ERRORS_RETURN)
    module.COMM_SELF.Set_errhandler(module.ERRORS_RETURN)
    return module


@contextmanager
def _without_tcp(wanted: bool) -> Iterator[None]:
    own = any(path.startswith(sys.prefix) for path in _mapped("/libmpi.so"))
    if not wanted or not own or _BTL in os.environ or os.path.exists(os.path.expanduser(_USER_FILE)):
        yield
        return
    os.environ[_BTL] = "^tcp"
    try:
        yield
    finally:
        del os.environ[_BTL]


def library(module: Any) -> str:
    """Name and version of the MPI library."""
    first: str = module.Get_library_version().split("\n")[0].strip("\0 ")
    return first.split(", package")[0]


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
    for path in _mapped(_OPEN_MPI_SEGMENT):
        if path.startswith(_OPEN_MPI_SEGMENT):
            try:
                os.unlink(path)
            except OSError:
                pass


def _mapped(part: str) -> set[str]:
    """Files that this process has mapped and whose path holds `part`."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return {line.split(maxsplit=5)[-1].strip() for line in maps if part in line}
