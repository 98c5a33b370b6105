"""Choosing the wires of a job, the same on every rank, and saying which and why."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcray.common.config import Config
from hpcray.transport.base import ControlTransport, DataPlane, StartError, TransportError
from hpcray.transport.mpi_control import MpiControl
from hpcray.transport.mpi_data import MpiData
from hpcray.transport.startup import (
    Launch,
    RollCall,
    check_fault_tolerance,
    check_import_order,
    check_protocol,
    check_shared_memory,
    finalize_mpi,
    import_mpi,
    library,
    read_launch,
    require,
    singleton_hint,
    start_mpi,
    unlink_shared_memory,
)
from hpcray.transport.ucx_data import UcxData
from hpcray.transport.ucx_engine import UcxEngine, has_rdma, library_path, load, open_context, resources_of

if TYPE_CHECKING:
    from mpi4py import MPI as mpi

_PLANES = ("auto", "ucx", "mpi")
_LOCAL_ONLY = ("self", "sysv", "posix", "cma", "xpmem", "knem")
_SLINGSHOT = Path("/sys/class/cxi")
_SECRET = 32  # bytes
_chosen: dict[str, Any] = {}


@dataclass(frozen=True)
class MpiWorld:
    """The ranks of one `mpirun` or `srun`: `mpi4py.MPI`, their communicator, and what carries object bytes. engine: of
    the data plane; None where that is MPI."""

    module: Any
    comm: mpi.Intracomm
    engine: UcxEngine | None
    data: DataPlane


def open_transports(config: Config) -> tuple[ControlTransport, DataPlane]:
    """Bring up MPI and the data plane of a job that begins; see `open_mpi_world`."""
    launch = read_launch(os.environ)
    world = open_mpi_world(
        config, os.urandom(_SECRET), launch.here == launch.size and not (config.elastic or config.max_nodes)
    )
    return MpiControl(world.module, world.comm, world.engine), world.data


def open_mpi_world(config: Config, secret: bytes, one_host: bool) -> MpiWorld:
    """Bring up MPI and the data plane. Collective over all ranks; the calling thread makes all later calls.

    A rank that is still alone after `config.start_timeout` names who is missing on stderr and exits with code 78.

    Args:
        secret: the job's; that of rank 0 counts.
        one_host: whether UCX needs no TCP.

    Raises:
        StartError: MPI does not start, would not work, or every rank is alone in its own world.
        TransportError: the data plane that was asked for is not usable on some rank, or RDMA is, and is not there.
        ValueError: `config.data_plane` is none that we know.
    """
    if config.data_plane not in _PLANES:
        raise ValueError(f"data_plane={config.data_plane!r}: it is one of {', '.join(_PLANES)}")
    launch = read_launch(os.environ)
    with RollCall(launch, config.start_timeout) as roll:
        problem = "" if config.data_plane == "mpi" else _try_load(launch)
        _check_before_start(launch)
        roll.step("MPI_Init")
        module = start_mpi(launch.here == launch.size)
        comm = module.COMM_WORLD
        try:  # the first messages of all: where a host cannot be reached, they fail
            unlink_shared_memory(module, comm)
        except module.Exception as error:
            raise StartError(
                f"rank {launch.rank} of this MPI world on {socket.gethostname()} cannot reach the others: {error}; "
                "hint: do their hosts reach each other?"
            ) from None
        if launch.size > 1 and comm.Get_size() == 1:
            finalize_mpi(module)  # alone, it waits for nobody, and it removes Open MPI's session directory
            require(
                f"each of the {launch.size} ranks is alone in an MPI world of its own ({library(module)}); "
                f"hint: {singleton_hint(launch)}",
                launch,
                everywhere=True,
            )
        roll.step("choosing the data plane")
        engine, why, lacks_rdma = _agree(config.data_plane, comm, problem, one_host, secret)
        if config.require_rdma and lacks_rdma:
            if engine is not None:
                engine.close()
            finalize_mpi(module)  # all ranks come here
            require(lacks_rdma, launch, everywhere=True)
        data: DataPlane = UcxData(engine) if engine else MpiData(module, comm.Dup())
    _chosen.clear()
    _chosen.update(data_plane=data.name, why=why, resources=engine.resources() if engine else [])
    return MpiWorld(module, comm, engine, data)


def offers(devices: str) -> bool:
    """Whether UCX, as it is installed here, can use each of these devices (`mlx5_0:1,mlx5_1:1`) for RDMA. It may have
    been built without; then it must not be confined to them. Call it before MPI is loaded."""
    try:
        lib = load()
        found = resources_of(open_context(lib, {}).info)
    except Exception:
        return False
    able = {name.partition("/")[2] for name in found if has_rdma([name])}
    return able.issuperset(devices.split(","))


def describe() -> dict[str, Any]:
    """The wires, for the start-up line and `hpcray doctor`: of the running job, or what a job would find.

    Returns:
        mpi (library and version, or why there is none), mpi_text (all it says about itself), mpi4py, ucx (version or
        why not), libucx (path), transports ("transport/device"), rdma, data_plane ("" outside a job), why.
    """
    facts: dict[str, Any] = {"data_plane": "", "why": "", "ucx": "", "libucx": "", "transports": [], "rdma": False}
    facts["transports"] = _chosen.get("resources", [])
    try:
        if _chosen.get("data_plane") == "mpi":
            raise TransportError("not used")
        lib = load()
        facts["ucx"] = ".".join(str(part) for part in lib.get_ucx_version())
        facts["libucx"] = library_path()
        if not _chosen:
            facts["transports"] = resources_of(open_context(lib, {}).info)
    except Exception as error:
        facts["ucx"] = str(error)
    try:
        facts["mpi"] = library(import_mpi())
        facts["mpi_text"] = import_mpi().Get_library_version()
        facts["mpi4py"] = sys.modules["mpi4py"].__version__
    except TransportError as error:
        facts["mpi"] = str(error)
        facts["mpi4py"] = ""
    facts["rdma"] = has_rdma(facts["transports"])
    facts.update({name: _chosen[name] for name in ("data_plane", "why") if name in _chosen})
    return facts


def _check_before_start(launch: Launch) -> None:
    """Raise StartError for what is known not to work."""
    if launch.size > 1:
        require(check_protocol(launch, import_mpi().Get_library_version(), os.environ), launch, everywhere=True)
        require(check_fault_tolerance(launch, os.environ), launch, everywhere=True)
        require(check_shared_memory(), launch, everywhere=False)


def _try_load(launch: Launch) -> str:
    """Load UCX, before MPI. Returns why it cannot be used, or "". An error where that is because MPI came first."""
    order = check_import_order()
    try:
        load()
    except TransportError as error:
        require(order and f"{error}: {order}", launch, everywhere=True)
        return str(error)
    return ""


def _agree(
    wanted: str, comm: mpi.Intracomm, problem: str, one_host: bool, secret: bytes
) -> tuple[UcxEngine | None, str, str]:
    """UCX on all ranks, or on none: the wires of two nodes must be of one kind.

    Returns:
        The engine, or None; why; and why object bytes would not go over RDMA, or "".
    """
    engine: UcxEngine | None = None
    secret = comm.bcast(secret if comm.Get_rank() == 0 else b"")
    if wanted != "mpi" and not problem:
        try:
            engine = UcxEngine(comm.Get_rank(), secret, one_host)
        except TransportError as error:
            problem = str(error)
    host = socket.gethostname()
    found = comm.allgather((host, problem, engine.resources() if engine else []))
    if wanted == "mpi":
        return None, "asked for", _lacks_rdma(found, "data_plane=mpi was asked for")
    several = len({host for host, _, _ in found}) > 1
    for rank, (host, trouble, resources) in enumerate(found):
        if not trouble and several:
            trouble = _unreachable(resources, wanted)
        if trouble:
            why = f"rank {rank} on {host}: {trouble}"
            if wanted == "ucx":
                raise TransportError(f"data_plane=ucx was asked for, but {why}; hint: HPCRAY_DATA_PLANE=mpi")
            if engine is not None:
                engine.close()
            return None, why, _lacks_rdma(found, why)
    return engine, "asked for" if wanted == "ucx" else "UCX works on every rank", _lacks_rdma(found, "")


def _lacks_rdma(found: list[tuple[str, str, list[str]]], no_ucx: str) -> str:
    """Why the job does not have the RDMA that it requires; "" where every rank has it. The same on all ranks."""
    for rank, (host, _, resources) in enumerate(found):
        if no_ucx or not has_rdma(resources):
            have = ", ".join(sorted(name for name in resources if name.split("/")[0] not in _LOCAL_ONLY)) or "none"
            return (
                f"RDMA is required, but rank {rank} on {host} has none (UCX devices between hosts: {have})"
                f"{f'; object bytes would go over MPI: {no_ucx}' if no_ucx else ''}; hint: `hpcray doctor` shows UCX "
                "and the adapters of every node; without --require-rdma the job runs over what there is"
            )
    return ""


def _unreachable(resources: list[str], wanted: str) -> str:
    """Why UCX would not serve several hosts well, or ""."""
    if all(name.split("/")[0] in _LOCAL_ONLY for name in resources):
        return "UCX has no transport between hosts"
    if wanted == "auto" and _SLINGSHOT.is_dir() and not has_rdma(resources):
        return "on Slingshot UCX has only TCP, MPI has the fabric"
    return ""
