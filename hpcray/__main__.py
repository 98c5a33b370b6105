"""`python -m hpcray [options] script.py args…`: what every rank of `mpirun` or `srun` runs.

Rank 0, or the one that `--driver-rank` names, runs the script as its child once all nodes are up, and exits with its
code; the other ranks serve their nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from hpcray.base.failures import StartupError
from hpcray.compat.finder import STANDIN
from hpcray.host.console import adopt
from hpcray.host.processes import set_process_name
from hpcray.runtime import repeated_lines
from hpcray.runtime.node import AlreadyTold, SaidElsewhere, run_node
from hpcray.runtime.options import NodeOptions
from hpcray.transport.startup import read_launch

_USAGE = "python -m hpcray [option ...] (script.py | -m module | -c code) [arg ...]"


def parse(argv: Sequence[str]) -> NodeOptions:
    """The node's options; exits with code 2 and a message where the command line is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hpcray", usage=_USAGE, description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--num-cpus", type=float, metavar="K", help="CPUs of this node (default: its share of the host)")
    add("--num-gpus", type=float, metavar="K", help="GPUs of this node (default: those it was given)")
    add("--memory", type=float, metavar="BYTES", help="memory that tasks may ask for (default: what there is)")
    add("--object-store-memory", type=int, metavar="BYTES", help="size of the object store (default: 30 %% of memory)")
    add("--resources", type=_resources, default={}, metavar="JSON", help="custom resources, such as '{\"disk\": 2}'")
    add("--require-rdma", action="store_true", help="do not start unless object bytes go over RDMA")
    add("--as-ray", action="store_true", help="the program's `import ray` is hpcray")
    add("--driver-rank", type=int, metavar="N", help="the rank whose node runs the program (default: 0)")
    add("--broadcast-env", default="", metavar="DIR", help="read this directory once per job, use copies on the nodes")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="run a module; what follows belongs to it")
    add("-c", dest="code", nargs=argparse.REMAINDER, help="run code; what follows belongs to it")
    add("script", nargs=argparse.REMAINDER, help="the program and its arguments")
    given = parser.parse_args(argv)
    if given.module is not None:
        driver = ["-m", *given.module]
    elif given.code is not None:
        driver = ["-c", *given.code]
    else:
        driver = given.script[1:] if given.script[:1] == ["--"] else given.script
    if len(driver) < 1 or driver in (["-m"], ["-c"]):
        parser.error("no script given; hint: python -m hpcray script.py")
    if given.as_ray:
        path = [STANDIN, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)  # of the driver, which tells its path to the workers
        os.environ.setdefault(repeated_lines.VARIABLE, "1")  # as Ray does it
        repeated_lines.open_table()
    config: dict[str, Any] = {}
    if given.object_store_memory is not None:
        config["object_store_memory"] = given.object_store_memory
    if given.require_rdma:
        config["require_rdma"] = True
    if given.driver_rank is not None:
        config["driver_rank"] = given.driver_rank
    return NodeOptions(
        config=config,
        num_cpus=given.num_cpus,
        num_gpus=given.num_gpus,
        memory=given.memory,
        resources=given.resources,
        distributed=True,
        broadcast_env=given.broadcast_env,
        driver=driver,
    )


def _resources(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; hint: '{{\"disk\": 2}}'")
    return found


def _runs_program(options: NodeOptions) -> bool:
    """Whether this rank will start the program. Where that cannot be said, rank 0 tells why."""
    launch = read_launch(os.environ)
    try:
        wanted = options.settings().driver_rank
    except ValueError:
        wanted = 0
    return launch.rank == (wanted if wanted < launch.size else 0)


def main() -> NoReturn:
    """Be one node of the job; exit with the driver's code where that ran, with 0 elsewhere."""
    options = parse(sys.argv[1:])
    set_process_name("hpcray-raylet")
    console = adopt(_runs_program(options))
    code = 1
    try:
        code = run_node(options, lambda session_dir: None)
    except SaidElsewhere:
        code = 0  # mpirun ends all ranks at the first other code, before rank 0 has spoken
    except AlreadyTold:
        pass
    except (StartupError, ValueError) as error:
        print(f"hpcray: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if console is None else console.leave(code))


if __name__ == "__main__":
    main()
