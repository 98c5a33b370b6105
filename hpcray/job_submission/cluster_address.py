"""The cluster that an address of Ray's means: there is no HTTP server, and all goes over its Unix sockets."""

from __future__ import annotations

import os

from hpcray.api.objects import get
from hpcray.api.options import TaskOptions
from hpcray.api.remote_function import RemoteFunction
from hpcray.api.scheduling_strategies import NodeAffinitySchedulingStrategy
from hpcray.common.exceptions import RayError, StartupError
from hpcray.platform.session_directory import read_session
from hpcray.processes.running_jobs import (
    NoRunningJobError,
    SeveralRunningJobsError,
    find_running_job,
    running_jobs,
)
from hpcray.ray_start.clusters import SeveralClustersError
from hpcray.ray_start.lookup import is_started, session_here
from hpcray.ray_start.surroundings import ClusterAddress, addresses_of, is_this_host, parse_cluster_address
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.state import attached

ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_ELSEWHERE = "or run this on one of the nodes: srun --jobid=JOB --overlap -n 1 ..."
_HEAD_TIMEOUT = 20.0
"""Seconds in which the head's host has to say whether an address is its own."""


def replaced_by_variables(address: str | None) -> str | None:
    """Return what RAY_API_SERVER_ADDRESS or RAY_ADDRESS says, which replace an address, else the address."""
    return next((os.environ[name] for name in ADDRESS_VARIABLES if os.environ.get(name)), address)


def get_address_for_submission_client(address: str | None) -> str:
    """Return the session directory of a node of the cluster that an address names.

    Args:
        address: None or "auto" (the cluster of this program, else the one that `find_running_job` finds), a session
            directory, or the address of a host of the cluster in one of the forms that `find_cluster` takes. The
            variables RAY_API_SERVER_ADDRESS and RAY_ADDRESS replace it, as in Ray.

    Raises:
        ConnectionError: there is no such cluster, or this program has joined another one.
        ValueError: the address is not valid.
    """
    address = replaced_by_variables(address) or "auto"
    own = current.process.place.session_dir if current.process is not None and current.process.dead is None else ""
    if os.path.isabs(address):
        return _of_path(address, own)
    if address == "auto":
        return own or _only_one(address)
    separator = "://" in address
    parts = parse_cluster_address(address if separator else f"http://{address}")
    if parts is None:
        raise ValueError(
            f"address {address!r} is not valid; hint: None, 'auto', H:P, http://H:P, or the path of a session directory"
        )
    if own:
        if not _is_on(own, parts.host):
            raise ConnectionError(
                f"{address}: hpcray has no HTTP server, and this is no host of the cluster that this program has "
                f"joined ({own}); hint: submit from a program that has not called init()"
            )
        return own
    return find_cluster(address, parts)


def find_cluster(address: str, parts: ClusterAddress) -> str:
    """Return the session directory of a node here of the cluster that an address names.

    The address is a name. H is any name or address of a host of the cluster, and first of all of its head, on whichever
    interface; a loopback address means this host. Where several clusters have nodes here the variables HPCRAY_SESSION
    and HPCRAY_ADDRESS choose, as for "auto".

    Args:
        address: for errors: `H:P`, `http://H:P` or `ray://H:P`. parts: its parts.

    Raises:
        NoRunningJobError: there is none. SeveralRunningJobsError: more than one could be meant.
    """
    try:
        if (started := session_here(address)) is not None:
            return started
    except SeveralClustersError as error:
        raise NoRunningJobError(str(error)) from None
    if is_this_host(parts.host):
        try:
            found_here = find_running_job()
            if parts.scheme or not is_started(found_here):
                return found_here
            raise NoRunningJobError(f"the cluster that has a node here ({found_here}) has another name")
        except NoRunningJobError as error:
            raise NoRunningJobError(f"Failed to connect to Ray at address: {address}. {error}; {_ELSEWHERE}") from None
    found = [path for path in _candidates() if _is_on(path, parts.host)]
    if not found:
        raise NoRunningJobError(
            f"Failed to connect to Ray at address: {address}. No cluster that has a node on this host has one on "
            f"{parts.host}; hint: a cluster is reached from its own nodes, by any name of their hosts; run this on "
            f"{parts.host} (srun --jobid=JOB --overlap -n 1 ...)"
        )
    if len(found) > 1:
        raise SeveralRunningJobsError([job for job in running_jobs() if job.path in found])
    return found[0]


def _candidates() -> list[str]:
    """Nodes here of the clusters that could be meant: the one that "auto" means, else one of each."""
    try:
        return [find_running_job()]
    except SeveralRunningJobsError as error:
        return [job.path for job in error.jobs]
    except NoRunningJobError:
        return []


def _is_on(session_dir: str, host: str) -> bool:
    """Return True if a cluster has a node on the host of this name or address."""
    if is_this_host(host):
        return True
    try:
        with attached(session_dir) as process:
            return _has_host(process, host)
    except (ConnectionError, StartupError, RayError):
        return False  # it has just ended


def _has_host(process: CoreWorker, host: str) -> bool:
    nodes = [row for row in process.gcs.nodes() if row["Alive"]]
    known = {name for row in nodes for name in (row["NodeManagerAddress"], row["NodeManagerHostname"].lower())}
    known |= {name.partition(".")[0] for name in known if not name[:1].isdigit()}
    if not known.isdisjoint({host.lower(), *addresses_of(host)}):
        return True
    # A node says one of its addresses; whether this is another one, of another network, only its host knows.
    head = next((row["NodeID"] for row in nodes if row["Index"] == process.place.head), None)
    if head is None:
        return False
    ask: RemoteFunction[..., bool] = RemoteFunction(is_this_host, TaskOptions({}))
    strategy = NodeAffinitySchedulingStrategy(head, soft=False)
    ref = ask.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(host)
    return bool(get(ref, timeout=_HEAD_TIMEOUT))


def _of_path(path: str, own: str) -> str:
    try:
        info = read_session(path)
        if own and read_session(own).session != info.session:
            raise ConnectionError(
                f"{path} is of another cluster than the one that this program has joined ({own}); hint: submit from a "
                "program that has not called init()"
            )
    except StartupError as error:
        raise ConnectionError(str(error)) from None
    return own or info.path


def _only_one(address: str) -> str:
    """The cluster that HPCRAY_ADDRESS names, else the one of this shell's allocation, else the only one."""
    try:
        return find_running_job()
    except NoRunningJobError as error:
        raise ConnectionError(f"Failed to connect to Ray at address: {address}. {error}; {_ELSEWHERE}") from None
