"""Features in the raylet of a node, as the kernel sees them; the entry point of raylets hands them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from hpcray.common.config import Config
from hpcray.core.gcs.gcs import Gcs, RecoveringGcs
from hpcray.core.gcs.placement_group_scheduler import NearSets
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.platform.path_relocation import PathRelocation
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.event_log import NodeEventLog, NodeExtension
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import NodeContext
from hpcray.runtime.raylet.memory_monitor import MemoryMonitor
from hpcray.runtime.raylet.raylet import Raylet, RayletDiagnostics
from hpcray.runtime.raylet.router import Router
from hpcray.transport.base import ControlTransport


class Autoscaling(Protocol):
    """Further nodes that a job requests by itself. One per raylet; it decides only where the head is."""

    def lead(self, head: Gcs, session: str, fresh: bool) -> None:
        """This raylet is the head. fresh: of a job that has no further nodes yet."""

    def close(self, ended: bool) -> None:
        """The raylet ends. ended: and the job with it, not only this node."""

    def on_leave_idle(self, now: float, src: bytes, msg: m.LeaveIdle) -> Iterable[Any]:
        """The head asks this node to leave if it is of no use."""

    def on_node_occupied(self, now: float, src: bytes, msg: m.NodeOccupied) -> Iterable[Any]:
        """A node that was asked to leave is of use."""


OpenJob = Callable[[bool, str, Callable[[bytes, str], None]], None]
"""Opens the job for further nodes: `JoinAcceptor.open_job`."""
MakeAutoscaling = Callable[[Raylet, OpenJob, Callable[[], bool], Callable[[], bool]], Autoscaling]
"""Called with the raylet, and with functions that open the job for further nodes, that return whether this raylet is
the head, and that return whether the job is about to end."""


class NodeParts(Struct, frozen=True):
    """Parts of a raylet that its diagnostics look at.

    Attributes:
        chunk, slots, overflow: of the store, as `ObjectStore` has them.
        template_pid: of the template process.
    """

    context: NodeContext
    loop: EventLoop
    router: Router
    lease_manager: LocalLeaseManager
    store: ObjectStore
    memory_monitor: MemoryMonitor
    head: Gcs | RecoveringGcs | None
    events: NodeEventLog
    template_pid: int
    chunk: int
    slots: int
    overflow: int


class NodeFeatures(Struct, frozen=True):
    """Functions that make the features of a raylet, which they import.

    Attributes:
        autoscaling: further nodes. diagnostics: answers about the raylet; it records the cores if the job wants that.
        labels: those that a node finds out about itself, from its settings, the count of nodes on its host, the ids of
            its GPUs, and whether it joins a running job.
        share_directory: a copy of a directory of rank 0 on every node, before the first worker is forked. Called with
            the directory, the command line of the driver, the transport to other nodes, the session directory, and the
            seconds that it may stand still.
        cancel_jobs: cancels batch jobs: those of a name ("": of none), and those of (batch system, id); called with the
            environment outside of the job, too.
        near_sets: nodes that are near each other in the network, for placement groups.
        extensions: features that learn what happens on this node; None: this job wants none of it.
    """

    autoscaling: MakeAutoscaling
    diagnostics: Callable[[NodeParts], RayletDiagnostics]
    labels: Callable[[Config, int, Sequence[str], bool], dict[str, str]]
    share_directory: Callable[[str, Sequence[str], ControlTransport | None, str, float], PathRelocation]
    cancel_jobs: Callable[[str, Sequence[tuple[str, str]], Mapping[str, str]], None]
    near_sets: NearSets
    extensions: Sequence[Callable[[Raylet], NodeExtension | None]] = ()
