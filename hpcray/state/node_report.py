"""`python -m hpcray.state.node_report`: one node's part of `hpcray doctor`, a task of the doctor's own step.

Lines come in on stdin, answers go out on stdout (`hpcray.state.node_lines`): `ping N` is answered with the time,
`report` with what is looked at and then with the findings, and the end of the input ends it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import asdict
from typing import Any

from hpcray.state.doctor import examine
from hpcray.state.node_lines import cut


def node_name() -> str:
    """As the allocation calls this node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def main() -> None:
    """Answer until the input ends. `--require-rdma`: its absence is a failure. `--without-mpi`: srun cannot start MPI
    programs, which the doctor knows, so the step was started for others."""
    require_rdma, with_mpi = "--require-rdma" in sys.argv[1:], "--without-mpi" not in sys.argv[1:]
    _say(hello=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "ping":
            _say(pong=rest, time=time.time())
        elif word == "report":
            found = examine(require_rdma, with_mpi, lambda what: _say(at=what))
            _say(findings=[asdict(finding) for finding in found])


def _say(**what: Any) -> None:
    sys.stdout.write(cut(node_name(), what))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
