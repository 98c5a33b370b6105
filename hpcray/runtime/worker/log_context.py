"""The context of log lines: the job, process, node, task and actor that they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcray.platform.log_format import configure_loggers
from hpcray.runtime.core_worker.context import async_task
from hpcray.runtime.core_worker.core_worker import current


def log_context() -> dict[str, Any]:
    """Return the job, process and node, and the task and actor where there is one, of this line; {} outside a job."""
    process = None if current.postponed else current.process
    if process is None:
        return {}
    known: dict[str, Any] = {
        "job_id": process.job.job_id if process.job is not None else "",
        "worker_id": process.me.hex(),
        "node_id": process.node_id,
    }
    worker = current.worker
    if worker is None:
        return known
    if worker.actor is not None:
        known["actor_id"] = worker.actor.spec.actor.hex()
    running = async_task.get() or process.local.task
    if running is not None:
        known["task_id"] = running.task.hex()
        known["task_name"], known["task_func_name"] = worker.names_of(running)
    if worker.actor is not None:
        known["actor_name"] = worker.actor.spec.name
    return known


def log_as(config: Mapping[str, Any]) -> None:
    """Apply the fields of a `LoggingConfig` to this process."""
    configure_loggers(config["encoding"], config["log_level"], config["additional_log_standard_attrs"], log_context)
