"""The cleanup of the job of a driver that has ended, in a cluster that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from hpcray.common.ids import node_of, raylet_of
from hpcray.common.resources import JOB_FIELD, OUTLIVES_JOB, runtime_env_fields
from hpcray.protocol.messages import ATTACHED, WORKER, ExtensionMessage, JobInfo
from hpcray.runtime.raylet.event_log import NodeExtension

if TYPE_CHECKING:
    from hpcray.runtime.raylet.raylet import Raylet


class JobCleanup(NodeExtension):
    """Ends what runs for a driver that has ended, or was lost, in a cluster that goes on: the workers of its job.

    What these own ends with them: tasks that they have submitted, queued ones too, and actors. Detached actors, and
    workers that work for these, stay.
    """

    name: ClassVar[str] = "job_cleanup"

    def __init__(self, raylet: Raylet) -> None:
        self._raylet = raylet
        self._ended: set[bytes] = set()
        self._lost_nodes: set[int] = set()

    def process_died(self, proc: bytes, kind: str, reason: str) -> None:
        """A process of this node is gone: if it was a driver, all nodes learn of it."""
        raylet = self._raylet
        if kind == ATTACHED and not raylet.processes.stopping:
            for node in {*range(raylet.context.cluster_size)} - raylet.router.lost_nodes.keys():
                raylet.router.send(raylet_of(node), ExtensionMessage(self.name, proc))

    def on_message(self, src: bytes, body: bytes) -> None:
        """The driver `body` is gone."""
        self._ended.add(body)
        self._end_all()

    def node_died(self, node: int, reason: str) -> None:
        """Another node is gone, with its drivers."""
        self._lost_nodes.add(node)
        self._end_all()

    def process_joined(self, proc: bytes, kind: str, pid: int) -> None:
        """A process of this node was welcomed: a worker that was being started when its job ended comes too late."""
        if kind == WORKER and (self._ended or self._lost_nodes):
            self._end_if_over(proc)

    def _end_all(self) -> None:
        for worker in list(self._raylet.lease_manager.pool.workers):
            self._end_if_over(worker)

    def _end_if_over(self, proc: bytes) -> None:
        worker = self._raylet.lease_manager.pool.workers.get(proc)
        if worker is None or not worker.joined:
            return
        fields = runtime_env_fields(worker.env)
        job = msgspec.convert(fields[JOB_FIELD], JobInfo) if JOB_FIELD in fields else self._raylet.lease_manager.job
        driver = job.ends_with if job is not None else b""
        is_over = driver and (driver in self._ended or node_of(driver) in self._lost_nodes)
        if is_over and OUTLIVES_JOB not in fields:
            self._raylet.processes.kill(proc, "the driver of its job has ended")
