"""What programs ask about the cluster and about themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcray.api.actor import ActorHandle
from hpcray.api.environments import environments_of, shown
from hpcray.api.runtime_context import ContextSource, RunningActor, RunningTask, RuntimeContext
from hpcray.api.session import ensure
from hpcray.base.bundle_names import plain
from hpcray.base.errors import RaySystemError
from hpcray.base.resources import Resources
from hpcray.host.accelerators import assigned_gpus
from hpcray.runtime.process import Process
from hpcray.runtime.refs import async_task, current
from hpcray.wire.messages import JobInfo


class _Source:
    """The `ContextSource` of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def me(self) -> bytes:
        return self._process.me

    @property
    def node_id(self) -> str:
        return self._process.node_id

    @property
    def kind(self) -> str:
        return self._process.kind

    @property
    def job(self) -> JobInfo | None:
        return self._process.job

    @property
    def session_dir(self) -> str:
        return self._process.session_dir

    def head_address(self) -> str:
        return self._process.session_dir

    def running_task(self) -> RunningTask | None:
        worker = current.worker
        running = async_task.get() or self._process.local.task
        if running is None or worker is None:
            return None
        return RunningTask(running.task, *worker.names_of(running), running.task in worker.cancelled)

    def running_actor(self) -> RunningActor | None:
        host = current.worker.actor if current.worker is not None else None
        if host is None:
            return None
        spec = host.spec

        def handle() -> ActorHandle:
            return ActorHandle(
                spec.actor, spec.class_name, spec.methods, spec.max_task_retries, spec.max_pending_calls, None,
                spec.out_of_order,
            )  # fmt: skip

        return RunningActor(spec.actor, spec.name, host.restarts, host.is_async, handle)

    def held_resources(self) -> Resources:
        worker = current.worker
        if worker is None:
            return {}
        return plain(dict(worker.actor.spec.hold.resources)) if worker.actor is not None else dict(worker.holds)

    def placement_group(self) -> tuple[str, bool]:
        return self._process.groups.running_in, self._process.groups.captures

    def worker_env(self) -> Mapping[str, str]:
        env = dict(self._process.job.env) if self._process.job else {}
        return env if current.worker is None else {**env, **current.worker.env}

    def environment(self) -> Mapping[str, Any]:
        return shown(environments_of(self._process).job, self.worker_env())

    def accelerator_ids(self) -> Mapping[str, list[str]]:
        return {"GPU": assigned_gpus()}

    def node_labels(self) -> Mapping[str, str]:
        rows = [row for row in self._process.gcs.nodes() if row["NodeID"] == self._process.node_id]
        return dict(rows[0]["Labels"]) if rows else {}


def _source() -> ContextSource | None:
    return _Source(current.process) if current.process is not None else None


_context = RuntimeContext(_source)


def get_runtime_context() -> RuntimeContext:
    """Where the caller runs: node, job, task, actor."""
    ensure()
    return _context


def nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster: id, address, whether it lives, resources. Ports and sockets there are none.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    return [_as_in_ray(row) for row in _started().gcs.nodes()]


def cluster_resources() -> dict[str, float]:
    """Total of every resource of the living nodes.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    found: dict[str, float] = _started().gcs.call("cluster_resources")
    return found


def available_resources() -> dict[str, float]:
    """What of them is free now, as far as the head has heard.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    found: dict[str, float] = _started().gcs.call("available_resources")
    return found


def _started() -> Process:
    """The process; what asks for the cluster's state does not start one, as in Ray."""
    if current.process is None:
        raise RaySystemError("Ray has not been started yet. hint: call init() before asking for the cluster's state")
    return current.process


_PORTS = ("DashboardAgentListenPort", "MetricsAgentPort", "RuntimeEnvAgentPort")
_ALIVE, _UNEXPECTED = 0, 2


def _as_in_ray(row: dict[str, Any]) -> dict[str, Any]:
    told = row["DeathReason"]
    dead = {"DeathReason": _UNEXPECTED if told else _ALIVE, "DeathReasonMessage": told, "alive": row["Alive"]}
    return {**row, **dict.fromkeys(_PORTS, 0), **dead}
