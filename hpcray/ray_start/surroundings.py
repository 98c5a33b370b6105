"""The surroundings of a process: its batch job, the names of its host, the CPUs that the job has there."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from hpcray.platform.allocation import expand_counts, expand_nodes
from hpcray.platform.sockets import own_addresses
from hpcray.ray_start.presence import JOB_VARIABLES

# ------------------------------------------------------------ host addresses
# The names and addresses by which a host is known, and cluster addresses that name one: `H:P`, `http://H:8265`.


_SCHEMES = ("http", "https", "ray")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})")


@dataclass(frozen=True)
class ClusterAddress:
    """An address of a cluster as programs and scripts of Ray write it. It is a name: nothing need listen there.

    Attributes:
        scheme: "http", "https" or "ray"; "" for `H:P`.
        host: name or address of a host. port: None where the address has none.
    """

    scheme: str
    host: str
    port: int | None


def parse_cluster_address(address: str) -> ClusterAddress | None:
    """Return the parts of an address; None where it has another form.

    Args:
        address: `H:P`, `http://H:P`, `https://H:P/path` or `ray://H:P`; H is a name or an IP address, IPv6 in brackets.

    Raises:
        ValueError: the port is none.
    """
    scheme, separator, _ = address.partition("://")
    if not separator:
        if not _HOST_AND_PORT.fullmatch(address):
            return None
        scheme, address = "", f"//{address}"
    elif scheme not in _SCHEMES:
        return None
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"address {address.removeprefix('//')!r}: {error}") from None
    if not parts.hostname:
        raise ValueError(f"address {address!r} names no host; hint: {scheme or 'http'}://HOST:PORT")
    return ClusterAddress(scheme, parts.hostname, port)


def is_this_host(name: str) -> bool:
    """Return True if a name or an IP address is one of this host, on whichever of its interfaces."""
    if is_loopback(name):
        return True
    host = socket.gethostname()
    if name.lower() in (host.lower(), host.partition(".")[0].lower()):
        return True
    return any(map(is_own_address, addresses_of(name)))


def is_loopback(name: str) -> bool:
    """Return True for the names and addresses that mean the host of who uses them."""
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def addresses_of(name: str) -> list[str]:
    """Return the IP addresses that a name has here; an address is its own, and an unknown name has none."""
    try:
        return [str(ipaddress.ip_address(name.partition("%")[0]))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(row[4][0]).partition("%")[0] for row in found))


def is_own_address(address: str) -> bool:
    """Return True if an interface of this host has an IP address.

    A socket can be bound to such addresses alone: so second addresses of an interface, and those of IPv6, count too.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((address, 0))
    except OSError as error:
        # A link-local address needs the name of its interface to be bound; that it lacks one says nothing.
        return error.errno == errno.EINVAL and ipaddress.ip_address(address).is_link_local and _has_link_local(address)
    return True


def _has_link_local(address: str) -> bool:
    wanted = ipaddress.ip_address(address).packed.hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            return any(line.split()[0] == wanted for line in file)
    except OSError:
        return False


# ------------------------------------------------------------ surroundings


_CGROUP = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)
_STEP_DAEMON = re.compile(rb"slurmstepd: \[(\d+)\.(\d*)")
_STEP = re.compile(r"/job_\d+/step_(?!extern\b)[^/\n]+")


def allocation_of(environ: Mapping[str, str], cgroups: str) -> str:
    """The name of the batch job around a process, such as `slurm-17`; "" where none is known.

    Args:
        environ: its environment.
        cgroups: the text of /proc/<pid>/cgroup. Slurm puts shells of ssh there too (pam_slurm_adopt).
    """
    for kind, variable in JOB_VARIABLES.items():
        if text := environ.get(variable, ""):
            return f"{kind}-{text}"
    found = _CGROUP.search(cgroups)
    return f"slurm-{found[1]}" if found else ""


def dies_with_step(cgroups: str) -> bool:
    """True if Slurm ends this process at the end of its step, whatever it detaches from."""
    return bool(_STEP.search(cgroups))


def own_allocation(environ: Mapping[str, str]) -> str:
    """`allocation_of` this process. Some scripts remove all of Slurm's variables before they start Ray: it is
    that of the slurmstepd above them then."""
    return allocation_of(environ, own_cgroups()) or allocation_of_ancestors(os.getpid())


def is_in_step() -> bool:
    """True if this process is in a step of Slurm's, which is neither the batch script nor a shell of ssh."""
    return step_of_ancestors(os.getpid())[1] != ""


def allocation_of_ancestors(pid: int, proc: str = "/proc") -> str:
    """The name of the batch job of a process by the slurmstepd that has started it, or its parents; "" for none."""
    job, _ = step_of_ancestors(pid, proc)
    return f"slurm-{job}" if job else ""


def step_of_ancestors(pid: int, proc: str = "/proc") -> tuple[str, str]:
    """Slurm's ids of the job and of the step of a process, by the slurmstepd that has started it, or its parents; ""
    for what is not known, and for the step of a batch script."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            with open(f"{proc}/{pid}/stat", "rb") as file:
                name, _, fields = file.read().rpartition(b")")
            if name.endswith(b"(slurmstepd"):
                with open(f"{proc}/{pid}/cmdline", "rb") as file:
                    if found := _STEP_DAEMON.match(file.read()):
                        return found[1].decode(), found[2].decode()
            pid = int(fields.split()[1])
    return "", ""


def own_cgroups() -> str:
    """The cgroups of this process; "" where the system does not show them."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def own_names() -> tuple[str, ...]:
    """All names and addresses by which others may call this host."""
    name = socket.gethostname()
    return tuple(dict.fromkeys([name, name.partition(".")[0], *own_addresses()]))  # who asks resolves other names


def resolve(host: str) -> tuple[str, ...]:
    """The addresses that the system knows for a host, without those of the loopback; () for none."""
    return tuple(address for address in addresses_of(host) if not is_loopback(address))


def cpus_of_allocation(environ: Mapping[str, str], host: str, machine: int) -> int | None:
    """CPUs that the Slurm job has on a host; None where the environment does not say.

    Args:
        environ: the environment of a step or of a batch script.
        host: name of the host.
        machine: CPUs that the machine has: a site may give Slurm a higher number.
    """
    try:
        nodes = expand_nodes(environ.get("SLURM_JOB_NODELIST", ""))
        counts = expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    except ValueError:
        return None
    names = [environ.get("SLURMD_NODENAME", ""), host, host.partition(".")[0]]
    index = next((nodes.index(name) for name in names if name in nodes), None)
    if index is None or index >= len(counts):
        return None
    return max(1, min(counts[index], machine))


def offered_cpus(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """The CPUs that this node offers, None for what it finds out by itself; and a line about a step that is bound to
    fewer, "" for none."""
    known = cpus_of_allocation(environ, socket.gethostname(), os.cpu_count() or 1)
    if known is None:
        return None, ""
    bound = len(os.sched_getaffinity(0))
    if bound >= known:
        return known, ""
    return known, (
        f"this node offers the {known} CPUs that the job has on {socket.gethostname()}, and its step is bound to "
        f"{bound}; hint: srun --cpus-per-task={known}, or --cpu-bind=none"
    )


def absent_devices(environ: Mapping[str, str], devices: str = "/sys/class") -> str:
    """The value of UCX_NET_DEVICES where it names devices of which this host has none, "" else. Scripts carry such
    lines from one cluster to another; Ray's nodes never hear of them, and UCX would find no way to any other node.

    Args:
        devices: the directory in which the kernel shows them.
    """
    given = environ.get("UCX_NET_DEVICES", "")
    names = [name.partition(":")[0] for name in given.lstrip("^").split(",")]
    if not given or given.startswith("^") or "all" in names:
        return ""
    known = [os.path.join(devices, kind, name) for kind in ("net", "infiniband") for name in names if name]
    return "" if any(map(os.path.exists, known)) else given
