"""The cluster that an address of Ray's job API means: there is no HTTP server, and jobs go over its Unix sockets."""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import urlsplit

from hpcray.common.exceptions import StartupError
from hpcray.platform.running_jobs import NoRunningJobError, find_running_job
from hpcray.platform.session_directory import read_session
from hpcray.platform.sockets import node_ip_address
from hpcray.runtime.core_worker.core_worker import current

ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_ELSEWHERE = "or run this on one of the nodes: srun --jobid=JOB --overlap -n 1 ..."


def replaced_by_variables(address: str | None) -> str | None:
    """Return what RAY_API_SERVER_ADDRESS or RAY_ADDRESS says, which replace an address, else the address."""
    return next((os.environ[name] for name in ADDRESS_VARIABLES if os.environ.get(name)), address)


def get_address_for_submission_client(address: str | None) -> str:
    """Return the session directory of a node of the cluster that an address names.

    Args:
        address: None or "auto" (the cluster of this program, else the one that `find_running_job` finds), a session
            directory, or the URL that Ray's dashboard would have on this machine, which means the same as "auto".
            The variables RAY_API_SERVER_ADDRESS and RAY_ADDRESS replace it, as in Ray.

    Raises:
        ConnectionError: there is no such cluster, or this program has joined another one.
        ValueError: the address is not valid.
    """
    address = replaced_by_variables(address) or "auto"
    own = current.process.session_dir if current.process is not None and current.process.dead is None else ""
    if os.path.isabs(address):
        return _of_path(address, own)
    if address == "auto":
        return own or _only_one(address)
    scheme, separator, _ = address.partition("://")
    if scheme == "ray":
        raise ConnectionError(
            f"{address}: there is no Ray Client; hint: the address is None, 'auto', or a session directory"
        )
    url = urlsplit(address if separator else f"http://{address}")
    if url.scheme not in ("http", "https"):
        raise ValueError(f"address {address!r} is not valid; hint: None, 'auto', or the path of a session directory")
    if url.hostname and not _is_here(url.hostname):
        raise ConnectionError(
            f"{address}: hpcray has no HTTP server, and a cluster is reached on its own nodes; hint: run this on "
            f"{url.hostname} (srun --jobid=JOB --overlap -n 1 ...), with the address 'auto'"
        )
    return own or _only_one(address)


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


def _is_here(host: str) -> bool:
    name = socket.gethostname()
    if host in ("localhost", name, name.partition(".")[0], node_ip_address()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
