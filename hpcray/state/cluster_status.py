"""The state of a cluster in the words of Ray's `ray status`, which scripts take apart with grep and awk."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.common.ids import raylet_of
from hpcray.protocol.messages import Introspect
from hpcray.runtime.node.join_token import REQUEST, ask_job, query_head

if TYPE_CHECKING:
    from hpcray.runtime.core_worker.core_worker import CoreWorker

Amounts = Mapping[str, float]
Bundle = tuple[tuple[str, float], ...]
"""The resources of a task, an actor or a bundle, sorted by name."""

_TIMEOUT = 30.0
"""Seconds that a command waits for the head."""
_PATIENCE = 0.5
"""Seconds that a raylet may take to say what waits in its queue. Counts are lower bounds in Ray too."""
_MEMORY = ("memory", "object_store_memory")
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_ACCELERATOR_TYPE = "accelerator_type:"
_BROUGHT_TO_LIFE = ("PENDING", "RESTARTING")
_MOST_FAILURES = 20
_REQUESTED = "REQUESTED"
"""State of a node that the autoscaler has asked the batch system for."""


@dataclass(frozen=True)
class NodeUsage:
    """A living node.

    Attributes:
        node_type: name of its type; "" for a node of no type, as all have that no autoscaler has started.
        idle: whether nothing runs on it. total, available: of each resource; what placement groups hold is not free.
        held, free: what bundles of placement groups hold here, and what is free in them.
    """

    node_id: str
    node_type: str = ""
    idle: bool = False
    total: Amounts = field(default_factory=dict)
    available: Amounts = field(default_factory=dict)
    held: Amounts = field(default_factory=dict)
    free: Amounts = field(default_factory=dict)

    @property
    def type_name(self) -> str:
        """The name of its type, as Ray makes one for nodes that have none."""
        return self.node_type or f"node_{self.node_id}"


class EndedNode(NamedTuple):
    """A node that is no longer there."""

    host: str
    address: str
    reason: str


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster.

    Attributes:
        when: Unix time. took: seconds in which the head has answered. ended: nodes that have, the last one last.
        tasks: resources and number of waiting tasks and actors, and how many of them are in placement groups.
        groups: bundles and strategy of the placement groups that wait.
        autoscaler: what the head says of it; None where there is none.
    """

    when: float
    took: float
    nodes: list[NodeUsage]
    tasks: dict[Bundle, tuple[int, int]] = field(default_factory=dict)
    groups: list[tuple[tuple[Bundle, ...], str]] = field(default_factory=list)
    autoscaler: Mapping[str, Any] | None = None
    ended: list[EndedNode] = field(default_factory=list)


class ClusterAsker(Protocol):
    """The way to a cluster."""

    def call(self, method: str) -> Any:
        """The head's answer to a query.

        Raises:
            ConnectionError: the cluster does not answer.
        """

    def cores(self, raylets: Iterable[bytes]) -> dict[bytes, Any]:
        """The queues and the bundles of those raylets that say in time what they have."""


class JobAsker:
    """A command, which asks through a node without joining the job: it needs next to nothing of a program's modules.

    Args:
        session_dir: of a node on this host.
    """

    def __init__(self, session_dir: str) -> None:
        self._session_dir = session_dir

    def call(self, method: str) -> Any:
        """See `ClusterAsker`."""
        try:
            return query_head(self._session_dir, method, _TIMEOUT)
        except StartupError as error:
            raise ConnectionError(str(error)) from None

    def cores(self, raylets: Iterable[bytes]) -> dict[bytes, Any]:
        """See `ClusterAsker`."""
        asked = list(raylets)
        packed = msgspec.msgpack.encode([])
        questions = [(raylet, Introspect(REQUEST + i, "core", packed)) for i, raylet in enumerate(asked)]
        try:
            replies = ask_job(self._session_dir, questions, _PATIENCE) if questions else {}
        except StartupError as error:
            raise ConnectionError(str(error)) from None
        return {
            raylet: msgspec.msgpack.decode(replies[REQUEST + i].value)
            for i, raylet in enumerate(asked)
            if REQUEST + i in replies and replies[REQUEST + i].ok
        }


class ProcessAsker:
    """A process of the job.

    Args:
        process: it.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process

    def call(self, method: str) -> Any:
        """See `ClusterAsker`."""
        return self._process.gcs.call(method)

    def cores(self, raylets: Iterable[bytes]) -> dict[bytes, Any]:
        """See `ClusterAsker`."""
        from hpcray.diagnostics.cluster_query import ClusterQuery  # a command needs none of it

        return ClusterQuery(self._process, _PATIENCE).ask(raylets, "core")


def cluster_status(asker: ClusterAsker) -> ClusterStatus:
    """Return the state of a cluster.

    Raises:
        ConnectionError: the cluster does not answer.
    """
    began = time.monotonic()
    status = asker.call("status")
    took = time.monotonic() - began
    rows = asker.call("nodes")
    ids = {row["Index"]: row["NodeID"] for row in rows}
    here = [row for row in status["nodes"] if row["index"] in ids]
    raylets = {raylet_of(row["index"]): row["index"] for row in here}
    cores = {raylets[raylet]: core for raylet, core in asker.cores(raylets).items()}
    nothing: dict[str, Any] = {"held": {}, "free": {}}
    nodes = [
        NodeUsage(
            ids[row["index"]], row["type"], row["idle"], row["total"], row["available"],
            **cores.get(row["index"], {}).get("bundles", nothing),
        )
        for row in here
    ]  # fmt: skip
    waiting = any(status["actors"].get(state) for state in _BROUGHT_TO_LIFE)
    actors = asker.call("actors") if waiting else []
    groups = [
        (tuple(map(_bundle, group["bundles"])), group["strategy"])
        for group in asker.call("placement_groups")
        if group["state"] in ("PENDING", "RESCHEDULING")
    ]
    tasks = waiting_tasks(status["unmet"], [row for core in cores.values() for row in core["pending"]], actors)
    ended = [
        EndedNode(row["NodeManagerHostname"], row["NodeManagerAddress"], row["DeathReason"])
        for row in rows
        if not row["Alive"]
    ]
    return ClusterStatus(time.time(), took, nodes, tasks, groups, status["autoscaler"], ended)


def waiting_tasks(
    unmet: Iterable[Mapping[str, Any]], queued: Iterable[Mapping[str, Any]], actors: Iterable[Mapping[str, Any]]
) -> dict[Bundle, tuple[int, int]]:
    """Count the tasks and actors that wait, by what they need.

    Args:
        unmet: leases that the head should find a node for. queued: those in the queues of raylets, which hold most of
            the former too, so that the larger of both counts. actors: rows of the head's table.

    Returns:
        By resources: how many, and how many of them in placement groups.
    """
    found: dict[Bundle, tuple[int, int]] = {}

    def count(resources: Amounts, number: int, in_group: bool) -> None:
        known, inside = found.get(_bundle(resources), (0, 0))
        found[_bundle(resources)] = known + number, inside + number * in_group

    for row in queued:
        if row["missing"] and not row["actor"]:
            count(row["resources"], row["missing"], bool(row["group"]))
    elsewhere: Counter[Bundle] = Counter()
    for row in unmet:
        elsewhere[_bundle(row["resources"])] += row["count"]
    for bundle, number in elsewhere.items():
        here, inside = found.get(bundle, (0, 0))
        found[bundle] = max(here, number), inside
    for row in actors:
        if row["state"] in _BROUGHT_TO_LIFE:
            # An actor that names no resources needs a CPU for its start.
            count(row["resources"] or {"CPU": 1.0}, 1, bool(row["group"]))
    found.pop((), None)
    return found


def show_status(status: ClusterStatus, verbose: bool = False) -> str:
    """Return the text of `ray status`.

    Args:
        status: of the cluster. verbose: with times, reasons, and the resources of each node.
    """
    header = f"{'=' * 8} Autoscaler status: {datetime.fromtimestamp(status.when)} {'=' * 8}"
    ruler = "-" * len(header)
    lines = [header]
    if verbose:
        lines += [f"GCS request time: {status.took:3f}s", ""]
    scaling = status.autoscaler
    active = [node for node in status.nodes if scaling is None or not node.idle]
    lines += ["Node status", ruler, "Active:", *_or(_by_type(active), "no active nodes")]
    if scaling is not None:
        idle = [node for node in status.nodes if node.idle]
        lines += ["Idle:", *_or(_by_type(idle), "no idle nodes")]
    lines += ["Pending:", *_or(_pending(scaling), "no pending nodes")]
    failures = [*_failures(scaling, status.when, verbose), *_ends(status.ended)]
    lines += ["Recent failures:", *_or(failures, "no failures")]
    lines += ["", "Resources", ruler, "Total Usage:"]
    lines += [f" {line}" for line in _usage(status.nodes, verbose)]
    lines += ["", "From request_resources:", *_or(_requested(scaling), "none")]
    lines += ["Pending Demands:", *_or(_demands(status), "no resource demands")]
    if verbose:
        for node in status.nodes:
            lines += ["", f"Node: {node.node_id} ({node.type_name})", " Usage:"]
            lines += [f"  {line}" for line in _usage([node], verbose)]
    return "\n".join(lines)


def usage_of(nodes: Iterable[NodeUsage]) -> dict[str, tuple[float, float, float, float]]:
    """Return of each resource: used, total, and used and total in placement groups."""
    found: dict[str, tuple[float, float, float, float]] = {}
    for node in nodes:
        for name, total in node.total.items():
            held = node.held.get(name, 0.0)
            inside = held - node.free.get(name, 0.0)
            # What the node lacks is given to bundles as a whole; used is what runs in them.
            used = total - node.available.get(name, 0.0) - held + inside
            before = found.get(name, (0.0, 0.0, 0.0, 0.0))
            added = (used, total, inside, held)
            found[name] = (before[0] + added[0], before[1] + added[1], before[2] + added[2], before[3] + added[3])
    return found


def _usage(nodes: Iterable[NodeUsage], verbose: bool) -> list[str]:
    lines = []
    for name, amounts in sorted(usage_of(nodes).items()):
        if "node:" in name or (name.startswith(_ACCELERATOR_TYPE) and not verbose):
            continue
        shown = [_memory(one) if name in _MEMORY else str(_rounded(one)) for one in amounts]
        line = f"{shown[0]}/{shown[1]} {name}"
        if amounts[3]:
            line += f" ({shown[2]} used of {shown[3]} reserved in placement groups)"
        lines.append(line)
    return lines


def _by_type(nodes: Iterable[NodeUsage]) -> list[str]:
    return [f" {count} {name}" for name, count in Counter(node.type_name for node in nodes).items()]


def _pending(scaling: Mapping[str, Any] | None) -> list[str]:
    rows = scaling["pending"] if scaling is not None else []
    launches = Counter(row["type"] for row in rows if row["state"] == _REQUESTED)
    lines = [f" {name}, {count} launching" for name, count in launches.items()]
    later = [row for row in rows if row["state"] != _REQUESTED]
    return lines + [f" {row['instance']}: {row['type']}, {row['state'].lower()}" for row in later]


def _failures(scaling: Mapping[str, Any] | None, now: float, verbose: bool) -> list[str]:
    lines = []
    rows = scaling["failures"] if scaling is not None else []
    for row in sorted(rows, key=lambda row: row["age"])[:_MOST_FAILURES]:
        when = datetime.fromtimestamp(now - row["age"]).strftime("%H:%M:%S")
        line = f" {row['type']}: LaunchFailed (latest_attempt: {when})"
        lines.append(line + (f" - {row['reason']}" if verbose else ""))
    return lines


def _ends(ended: Iterable[EndedNode]) -> list[str]:
    """Without the names of nodes: scripts count the lines with `node_` in them."""
    last = list(ended)[-_MOST_FAILURES:]
    return [f" {node.host}: NodeTerminated (ip: {node.address}) - {node.reason}" for node in last]


def _requested(scaling: Mapping[str, Any] | None) -> list[str]:
    rows = scaling["requested"] if scaling is not None else []
    return [f" {_as_requested(amounts)}: {count} from request_resources()" for amounts, count in rows]


def _demands(status: ClusterStatus) -> list[str]:
    lines = []
    for bundle, (count, inside) in status.tasks.items():
        line = f" {dict(bundle)}: {count}+ pending tasks/actors"
        lines.append(line + (f" ({inside}+ using placement groups)" if inside else ""))
    for (bundles, strategy), count in Counter(status.groups).items():
        shapes = ", ".join(f"{dict(bundle)} * {number}" for bundle, number in Counter(bundles).items())
        lines.append(f" {shapes} ({strategy}): {count}+ pending placement groups")
    return lines


def _or(lines: list[str], nothing: str) -> list[str]:
    return lines or [f" ({nothing})"]


def _bundle(amounts: Amounts) -> Bundle:
    return tuple(sorted((name, float(amount)) for name, amount in amounts.items()))


def _as_requested(amounts: Amounts) -> dict[str, float]:
    """Whole numbers as such, as programs ask for them."""
    return {name: int(amount) if float(amount).is_integer() else amount for name, amount in amounts.items()}


def _rounded(amount: float) -> float:
    """Without the noise of sums of fractions; resources have four digits."""
    return round(amount, 4) + 0.0


def _memory(size: float) -> str:
    for unit, whole in _UNITS:
        if size >= whole:
            return f"{size / whole:.2f}{unit}"
    return f"{int(size)}B"
