"""The command and the batch script of a node that joins a running job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from hpcray.common.resources import Resources, to_amounts
from hpcray.platform.python_lines import module_line
from hpcray.runtime.node.options import INSTANCE

NODE_TYPE = "RAY_NODE_TYPE_NAME"
"""Variable of a node: the name of its type, which becomes a label."""
ADDED_JOBS = "_added_jobs"
"""Namespace of the ids of such batch jobs, where names do not do, in the key-value store: the batch system of each."""
_OWN_ID = 'export {}="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}}}"'
_SINGLE = '[ -n "${0}" ] || export {0}="$SLURM_JOB_ID"'
_BY_SLURM = ("CPU", "GPU", "memory", "object_store_memory")


def added_job_name(session: str) -> str:
    """Name of the batch jobs of nodes that were added by hand; by it the job cancels them. The autoscaler's differ."""
    return f"hpcray-added-{session}"


def node_command(
    token: str, cpus: float | None = None, gpus: float | None = None, resources: Mapping[str, float] | None = None,
    settings: Mapping[str, str] | None = None,
) -> list[str]:  # fmt: skip
    """The command line of one node that joins.

    Args:
        token: path of the job's join token.
        cpus, gpus, resources: of the node; None: what it has.
        settings: further options, by their names without the dashes.
    """
    line = module_line("hpcray", "--join", token)
    line += [] if cpus is None else ["--num-cpus", f"{cpus:.15g}"]
    line += [] if gpus is None else ["--num-gpus", f"{gpus:.15g}"]
    line += ["--resources", json.dumps(dict(resources))] if resources else []
    return line + [word for name, value in (settings or {}).items() if value for word in (f"--{name}", value)]


def custom_resources(resources: Resources) -> dict[str, float]:
    """The amounts that a node cannot find out by itself."""
    return {name: amount for name, amount in to_amounts(resources).items() if name not in _BY_SLURM}


def batch_script(
    options: Mapping[str, str | int | bool | None], token: str, command: list[str], node_type: str = ""
) -> str:
    """The batch script of nodes that join as one world; where that is a single node, its step needs no MPI.

    Args:
        options: of sbatch by their long names; None and False: left out.
        token: path of the job's join token.
        command: of a single node.
        node_type: where the autoscaler starts the nodes.
    """
    lines = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={value}"
        for name, value in options.items()
        if value is not None and value is not False
    ]
    if node_type:
        lines += [_OWN_ID.format(INSTANCE), _SINGLE.format(INSTANCE), f"export {NODE_TYPE}={shlex.quote(node_type)}"]
    step = ["srun", "--mpi=none", "--no-kill", "--kill-on-bad-exit=0", "-W", "0", "--ntasks-per-node=1"]
    cpus = options.get("cpus-per-task")
    step += [] if cpus is None else [f"--cpus-per-task={cpus}"]
    step += command
    if options.get("nodes") != 1:
        step = module_line("hpcray.cli.launch", "--join", token)
    return "\n".join(["#!/bin/sh", *lines, "exec " + shlex.join(step), ""])
