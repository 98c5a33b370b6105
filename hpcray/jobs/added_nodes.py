"""Nodes that are added to a running job, by batch jobs of their own or on this machine, and nodes that are removed."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import time as clock
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hpcray.autoscaler.batch_systems import SLURM, WILL_NOT_START, batch_script
from hpcray.common.config import Config
from hpcray.common.exceptions import SubmitError
from hpcray.jobs.batch_queues import GONE, REGISTRATION_TIME, query_batch, query_reason, query_state, submit_batch
from hpcray.jobs.submission import (
    LOCAL,
    JobRequest,
    Time,
    batch_request,
    check_request,
    choose_executor,
    with_configured_place,
    without_outer_job,
)
from hpcray.platform.allocation import run_command
from hpcray.platform.private_files import CLOSED, append_private_file, read_private_file
from hpcray.platform.process_control import module_line
from hpcray.platform.session_directory import read_session
from hpcray.processes.running_jobs import find_running_job
from hpcray.protocol.messages import RemoveNode
from hpcray.runtime.node.join_token import (
    ADDED_JOBS,
    REQUEST,
    added_job_name,
    ask_head,
    join_token_path,
    node_command,
    query_head,
    request_join_token,
    write_join_token,
)
from hpcray.runtime.node.options import OUTLIVES

_QUERY_TIMEOUT = 10.0
_ANSWER_MARGIN = 10.0
_POLL = 0.1
_LOG_LINES = 10
JOIN_TIME_FACTOR = 3.0
"""Nodes of a batch job that runs have so many times `Config.start_timeout` to join: ranks start, MPI begins, and each
handshake may take one."""
_started_here: list[subprocess.Popen[bytes]] = []
"""Nodes that this process has started: Popen would warn of those that run on."""


def scale(
    nodes: int | None = None,
    *,
    to: int | None = None,
    time: Time | None = None,
    gpus: int | None = None,
    cpus: int | None = None,
    mem: str | int | None = None,
    partition: str | None = None,
    sbatch: Mapping[str, str | bool] | None = None,
    executor: str = "auto",
    wait: bool = False,
    address: str | None = None,
) -> list[str]:
    """Add nodes to the running job, or remove idle ones that have joined it.

    Args:
        nodes: so many more, or with a minus sign so many fewer.
        to: so many in all, instead of `nodes`.
        time: limit of the new nodes, as for `submit`; they leave the job in good order before it.
        gpus, cpus, mem: of each new node.
        partition, sbatch: of the batch job, as for `submit`. The end of the job cancels its batch jobs, those of Slurm
            by their name: not one that gets another `job-name`.
        executor: "slurm", "pbs", "flux", "local" (processes on this machine), or "auto".
        wait: return when the new nodes are in.
        address: the job, as for the commands' `--job`: Slurm's id, the session's name, or a session directory; default:
            the job of this program, else the only one on this host.

    Returns:
        The batch job's id, the process ids with the local executor, or the ids of the nodes that were removed.

    Raises:
        SubmitError: an option is not valid, sbatch refused the job, or, with `wait`, the new nodes ended before all
            of them were in, Slurm's reason says that the batch job will not start, or it runs and nodes have not joined
            within three times `start_timeout`; nodes that are in stay, and so does the batch job.
            ConnectionError: there is no such job on this host. StartupError: no node can join it.
    """
    where = find_running_job(address)
    known = list_nodes(where)
    alive = [row for row in known if row["Alive"]]
    if (nodes is None) == (to is None):
        raise SubmitError("scale() needs one of nodes and to; hint: nodes=4 adds four nodes, to=4 makes them four")
    more = nodes if nodes is not None else (to or 0) - len(alive)
    if more <= 0:
        return remove_nodes(idle_nodes(where)[: -more or 0], address=where) if more else []
    request = check_request(
        added_job_name(read_session(where).session), more, gpus, cpus, mem, time, partition, False, None, sbatch
    )
    kind = choose_executor(executor)
    request = request if kind == LOCAL else with_configured_place(request)
    token = _write_join_token(where, kind != LOCAL)
    if kind == LOCAL:
        started, log = _start_here(request, token), f"{token}.out"
    elif kind == SLURM:
        started = [_submit(request, token)]
        log = _batch_log(token, started[0])
    else:
        log = _batch_log(token, os.urandom(4).hex())  # its name is needed before there is an id
        started = [submit_batch(kind, batch_request(request, log), _node_script(request, token))]
        _note_batch_job(where, kind, started[0])
    if wait and kind == LOCAL:
        _wait_for_nodes(where, len(known) + more, lambda missing: _check_processes(started, log))
    elif wait:
        job = _AwaitedBatchJob(kind, started[0], log, JOIN_TIME_FACTOR * _start_timeout(token))
        _wait_for_nodes(where, len(known) + more, lambda missing: job.check(missing, clock.monotonic()))
    return started


def remove_nodes(nodes: Sequence[int | str], *, seconds: float = 60.0, address: str | None = None) -> list[str]:
    """Have nodes leave the running job: their tasks end, their objects are copied, then they are gone.

    Args:
        nodes: indices (7 or "n7"), or node ids.
        seconds: time for each; what is not done by then is made again elsewhere.
        address: as for `scale`.

    Returns:
        The ids of the nodes.

    Raises:
        ConnectionError: there is no such job on this host. ValueError: there is no such node, or it cannot leave.
    """
    where = find_running_job(address)
    found = [_find_node(node, list_nodes(where)) for node in nodes]
    for row in found:
        reply = ask_head(where, RemoveNode(REQUEST, row["Index"], seconds), seconds + _ANSWER_MARGIN)
        if not reply.ok:
            raise ValueError(reply.value.decode())
    return [row["NodeID"] for row in found]


def idle_nodes(where: str) -> list[str]:
    """Ids of the nodes that joined the running job at `where` and do nothing, the newest first."""
    found = {row["index"] for row in _query(where, "status")["nodes"] if row["joined"] and row["idle"]}
    return [row["NodeID"] for row in reversed(list_nodes(where)) if row["Index"] in found]


def list_nodes(where: str) -> list[dict[str, Any]]:
    """The nodes of the job at `where`, as `hpcray.nodes()` returns them."""
    found: list[dict[str, Any]] = _query(where, "nodes")
    return found


def _query(where: str, method: str) -> Any:
    return query_head(where, method, _QUERY_TIMEOUT)


def _find_node(given: int | str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    text = str(given)
    for row in rows:
        if row["NodeID"] == text or str(row["Index"]) == text.removeprefix("n"):
            return row
    raise ValueError(f"the job has no node {given!r}; hint: `hpcray status` lists them")


def _write_join_token(where: str, other_hosts: bool) -> str:
    """Write the job's join token where the new nodes can read it. With other hosts: where jobs are kept, on a file
    system that all nodes share."""
    session = read_session(where).session
    path = join_token_path(session) if other_hosts else os.path.join(where, f"{session}.join-token")
    token = request_join_token(where, other_hosts, path if other_hosts else "")
    write_join_token(path, token)
    return path


def _start_here(request: JobRequest, token: str) -> list[str]:
    """Start nodes on this machine. What they print is in the head's session directory; it ends with the job."""
    # `hpcray nodes add` ends, and its nodes stay.
    line = ["env", f"{OUTLIVES}=1", *node_command(token, request.cpus_per_node, request.gpus_per_node)]
    with without_outer_job(), os.fdopen(append_private_file(f"{token}.out"), "ab") as log:
        for _ in range(request.nodes):
            child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            _started_here.append(child)
    return [str(child.pid) for child in _started_here[-request.nodes :]]


def _check_processes(pids: Sequence[str], log: str) -> None:
    """Raise SubmitError if one of the nodes that this process has started has ended."""
    for child in _started_here:
        if str(child.pid) in pids and (code := child.poll()) is not None:
            raise _never_joined(f"process {child.pid}", f"ended with code {code}", log)


class _AwaitedBatchJob:
    """The batch job of new nodes, for a caller that waits until they are in.

    Args:
        join_time: seconds from when it runs in which its nodes have to join.
    """

    def __init__(self, kind: str, job_id: str, log: str, join_time: float) -> None:
        self._kind, self._job_id, self._log, self._join_time = kind, job_id, log, join_time
        self._unknown_since = self._runs_since = math.inf

    def check(self, missing: int, now: float) -> None:
        """Look at it. missing: nodes that have not joined. now: monotonic seconds.

        Raises:
            SubmitError: it has failed, was cancelled, or refused later; it will never start as it is; or it runs, and
                its nodes do not join.
        """
        # Both ask at most every two seconds. A batch system may not know a job yet that it has just accepted.
        job_id, slurm = self._job_id, self._kind == SLURM
        state = query_state(job_id) if slurm else query_batch(self._kind, [job_id]).get(job_id, GONE)
        reason = query_reason(job_id) if slurm else ""
        if state == GONE:
            self._unknown_since = min(self._unknown_since, now)
        elif state == "RUNNING":
            self._runs_since = min(self._runs_since, now)
        elif state == "PENDING" and reason in WILL_NOT_START:
            raise SubmitError(
                f"not all new nodes joined: batch job {job_id} is in the queue and will not start: {reason}; hint: "
                f"change it with `scontrol update jobid={job_id} ...`, or cancel it with `scancel {job_id}`"
            )
        ended = state not in ("PENDING", "RUNNING", "UNKNOWN", GONE)
        if ended or (state == GONE and now - self._unknown_since > REGISTRATION_TIME):
            raise _never_joined(f"batch job {job_id}", f"is {state}{f' ({reason})' if reason else ''}", self._log)
        if state == "RUNNING" and now - self._runs_since > self._join_time:
            how = f"has been running for {now - self._runs_since:.0f} s, and {missing} of its nodes have not"
            raise _never_joined(f"batch job {job_id}", how, self._log)


def _wait_for_nodes(where: str, count: int, check: Callable[[int], None]) -> None:
    """Wait until the job has had so many nodes. One that has died since stays in the list: neither its death nor one
    among the others is waited for. check: called with the number of those missing; raises when it is in vain."""
    while (missing := count - len(list_nodes(where))) > 0:
        check(missing)
        clock.sleep(_POLL)


def _start_timeout(token: str) -> float:
    """Seconds in which the job's nodes have to be up."""
    settings = msgspec.json.decode(read_private_file(token, CLOSED)).get("settings", {})
    return float(settings.get("start_timeout", Config().start_timeout))


def _batch_log(token: str, job_id: str) -> str:
    return os.path.join(os.path.dirname(token), f"nodes-{job_id}.out")


def _never_joined(what: str, how: str, log: str) -> SubmitError:
    try:
        with open(log, errors="replace") as file:
            tail = "".join(deque(file, _LOG_LINES)).rstrip()
    except OSError:
        tail = ""
    text = f"its last lines:\n{tail}" if tail else "which is empty or missing"
    return SubmitError(f"not all new nodes joined: {what} {how}; hint: its log is {log}, {text}")


def sbatch_options(request: JobRequest, log: str) -> dict[str, Any]:
    """The options of sbatch for nodes that join."""
    return {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks-per-node": 1,
        "partition": request.partition or None,
        "time": None if request.time is None else math.ceil(request.time / 60),
        "cpus-per-task": request.cpus_per_node,
        "gpus-per-node": request.gpus_per_node,
        "mem": None if request.mem is None else f"{math.ceil(request.mem / (1 << 20))}M",
        "output": log,
        "no-requeue": True,
        "no-kill": True,
        **request.sbatch,
    }


def _note_batch_job(where: str, kind: str, job_id: str) -> None:
    """Have the head cancel this batch job when the job ends. Those of Slurm it finds by their name."""
    query_head(where, "kv_put", _QUERY_TIMEOUT, job_id.encode(), kind.encode(), True, ADDED_JOBS)


def _node_script(request: JobRequest, token: str) -> str:
    """The batch script of nodes that join, for PBS and Flux: one process, or the MPI world of several."""
    several = module_line("hpcray.cli.launch", "--join", token)
    return f"#!/bin/sh\nexec {shlex.join(several if request.nodes > 1 else node_command(token))}\n"


def _submit(request: JobRequest, token: str) -> str:
    log = _batch_log(token, "%j")
    script = batch_script(sbatch_options(request, log), token, node_command(token))
    with without_outer_job():
        found = run_command(["sbatch", "--parsable"], None, text=script)
    if found.returncode:
        raise SubmitError(f"sbatch refused the job: {found.stderr.strip()}")
    return found.stdout.strip().partition(";")[0]
