"""Which cluster a name means: `H:P` and its like, the clusters that are known, and where the question comes from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

from hpcray.ray_start.surroundings import is_loopback, parse_cluster_address

DEFAULT_PORT, CLIENT_PORT, DASHBOARD_PORT = 6379, 10001, 8265


class StartedCluster(Struct, frozen=True, kw_only=True):
    """A cluster as its head describes it. No field is a secret.

    Attributes:
        ident: a name that no other cluster has.
        session: the name of the job's session.
        allocation: the batch job that the head was started in, as `allocation_of` names it; "": in none.
        host: the head's host name.
        names: all names and addresses of that host.
        address: the head's address, as `ray start` prints it.
        port: the number in `H:P`; nothing listens there but perhaps a bell.
        client_port, dashboard_port: the numbers in `ray://H:P` and `http://H:P`.
        started: Unix time.
        bell: whether a bell was opened at `port`.
    """

    ident: str
    session: str
    allocation: str
    host: str
    names: tuple[str, ...]
    address: str
    port: int = DEFAULT_PORT
    client_port: int = CLIENT_PORT
    dashboard_port: int = DASHBOARD_PORT
    started: float = 0.0
    bell: bool = False

    @property
    def name(self) -> str:
        """`H:P`."""
        return join_host_port(self.address, self.port)

    def line(self) -> str:
        """One line for a list to choose from."""
        where = f"allocation {self.allocation}" if self.allocation else "outside of any allocation"
        return f"{self.name} on {self.host}, {where}, session {self.session}"


class ClusterName(Struct, frozen=True):
    """The name in an address: `H:P`, or a URL of Ray's services, which name the cluster just as well."""

    text: str
    scheme: str
    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """True if it means the host of the process that asks."""
        return is_loopback(self.host)


class Asker(Struct, frozen=True):
    """The process that asks for a cluster, and its host.

    Attributes:
        allocation: the batch job around; "" where none is known.
        names: all names and addresses of this host.
        resolved: the addresses that the system knows for the host of the name that is asked for.
    """

    allocation: str
    names: frozenset[str]
    resolved: frozenset[str] = frozenset()


class SeveralClustersError(ConnectionError):
    """A name means more than one cluster."""

    def __init__(self, what: str, found: Iterable[StartedCluster]) -> None:
        lines = "\n".join(f"  {cluster.line()}" for cluster in found)
        super().__init__(
            f"{what} means more than one cluster:\n{lines}\nhint: another --port for one of them, or the session "
            "directory of one of its nodes as the address"
        )


def join_host_port(host: str, port: int) -> str:
    """`H:P`, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_cluster_name(text: str) -> ClusterName | None:
    """The name in an address; None where it has another form, such as a path or `auto`.

    Raises:
        ValueError: it has no valid port, or no host.
    """
    found = parse_cluster_address(text)
    if found is None:
        return None
    default = {"ray": CLIENT_PORT, "": DEFAULT_PORT}.get(found.scheme, DASHBOARD_PORT)
    return ClusterName(text, found.scheme, found.host.lower(), default if found.port is None else found.port)


def clusters_named(name: ClusterName, known: Iterable[StartedCluster], asker: Asker) -> list[StartedCluster]:
    """The clusters that a name means, the newest first: those of the asker's allocation, where there are some, else
    all. Port numbers of URLs decide only where there is a choice: services that do not listen have no port to miss.

    Args:
        known: all that the asking process knows.
    """
    short = set() if name.host.replace(".", "").isdigit() else {name.host.partition(".")[0]}
    wanted = asker.names if name.is_local else {name.host, *short, *asker.resolved}
    at_host = [cluster for cluster in known if wanted & {text.lower() for text in cluster.names}]
    exact = [cluster for cluster in at_host if name.port == _port(cluster, name.scheme)]
    found = exact if exact or not name.scheme else at_host
    return nearest(found, asker.allocation)


def _port(cluster: StartedCluster, scheme: str) -> int:
    if scheme == "ray":
        return cluster.client_port
    return cluster.dashboard_port if scheme else cluster.port


def nearest(found: Iterable[StartedCluster], allocation: str) -> list[StartedCluster]:
    """Those of the allocation, where there are some, else all; the newest first."""
    ordered = sorted(found, key=lambda cluster: -cluster.started)
    own = [cluster for cluster in ordered if allocation and cluster.allocation == allocation]
    return own or ordered


def only(what: str, found: Sequence[StartedCluster]) -> StartedCluster | None:
    """The one cluster among those found; None where there is none. One that has several nodes counts once.

    Raises:
        SeveralClustersError: there are more.
    """
    by_ident = {cluster.ident: cluster for cluster in found}
    if len(by_ident) > 1:
        raise SeveralClustersError(what, by_ident.values())
    return next(iter(by_ident.values()), None)


class StartedNode(Struct, frozen=True, kw_only=True):
    """A node of such a cluster on this host.

    Attributes:
        cluster: the cluster.
        session_dir: its session directory.
        allocation: the batch job that it was started in; that of its cluster, where it could not know.
        keeper: pid of the process that holds it. started: when that began, in clock ticks since boot.
        head: whether it is the head.
    """

    cluster: StartedCluster
    session_dir: str
    allocation: str
    keeper: int
    started: int
    head: bool


def nodes_to_stop(nodes: Sequence[StartedNode], allocation: str) -> tuple[list[StartedNode], list[str]]:
    """The nodes of this host that `ray stop` ends, and where it cannot know which are meant, the allocations.

    Args:
        allocation: the batch job around the shell; "" where none is known.
    """
    if allocation:
        return [node for node in nodes if node.allocation == allocation], []
    groups = {node.allocation for node in nodes}
    if "" in groups:
        return [node for node in nodes if not node.allocation], []
    if len(groups) > 1:
        return [], sorted(groups)
    return list(nodes), []


def session_clusters(nodes: Iterable[StartedNode], allocation: str) -> list[StartedCluster]:
    """The clusters that `init()` without an address may mean: those that `ray start` made in the allocation. Where an
    allocation is not known at one of both ends, as in a shell of ssh, all of this user on this host.

    Args:
        nodes: those of this host.
    """
    all_nodes = list(nodes)
    own = [node for node in all_nodes if allocation and allocation in (node.allocation, node.cluster.allocation)]
    outside = [node for node in all_nodes if not allocation or not node.allocation]
    return [node.cluster for node in own or outside]


def describes(host: str, names: Collection[str]) -> bool:
    """True if a host is one of these names."""
    return host.lower() in {text.lower() for text in names}
