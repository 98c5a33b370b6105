"""Client mode, `hpcray submit --driver here`: the program runs on this machine, which gives the job no CPUs; its nodes
come from batch jobs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence

from hpcray.jobs.submission import JobRequest
from hpcray.platform.python_lines import module_line

_TYPE = "worker"


def client_mode_command(words: Sequence[str], request: JobRequest, kind: str) -> tuple[list[str], dict[str, str]]:
    """The command line of a program with nodes elsewhere, and its environment.

    Args:
        words: the program, as `python` takes it.
        request: the nodes; their batch jobs are cancelled when the program has ended.
        kind: the executor, "slurm" or "local".
    """
    given = {"CPU": request.cpus_per_node, "GPU": request.gpus_per_node}
    options: dict[str, str | int | bool | None] = {
        "partition": request.partition or None,
        "time": None if request.time is None else math.ceil(request.time / 60),
        "mem": None if request.mem is None else f"{math.ceil(request.mem / (1 << 20))}M",
        **request.sbatch,
    }
    node_type = {
        "resources": {name: amount for name, amount in given.items() if amount},
        "node_config": {name: value for name, value in options.items() if value is not None},
    }
    count = str(request.nodes + 1)
    line = module_line("hpcray", "--num-cpus", "0", "--num-gpus", "0", "--min-nodes", count)
    line += ["--max-nodes", count, "--node-types", json.dumps({_TYPE: node_type}), *words]
    return line, {**os.environ, **request.env, "HPCRAY_NODE_PROVIDER": kind}
