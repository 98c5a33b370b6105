"""`python -m hpcray [options] script.py args…`: what every rank of `mpirun` or `srun` runs.

Rank 0, or the rank that `--driver-rank` names, runs the script as its child once all nodes are up, and exits with the
script's code; the other ranks serve their nodes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from hpcray.common.config import RAY_LIBRARIES
from hpcray.common.exceptions import StartupError
from hpcray.common.ray_version import STANDIN, is_replaced
from hpcray.platform.console import adopt_console
from hpcray.platform.process_tree import set_process_name
from hpcray.platform.resource_limits import open_standard_descriptors
from hpcray.processes.raylet_main import run_node
from hpcray.runtime.node.options import HelpRequested, NodeOptions
from hpcray.transport.startup import read_launch

_USAGE = "usage: python -m hpcray [option ...] (script.py | -m module | -c code) [arg ...]"


def parse(argv: Sequence[str]) -> NodeOptions:
    """The node's options; exits with code 2 and a message where the command line is wrong, with 0 after `--help`."""
    try:
        return NodeOptions.from_argv(argv)
    except HelpRequested:
        print(f"{_USAGE}\n\n{__doc__}\noptions:\n{NodeOptions.help_text()}")
        sys.exit(0)
    except ValueError as error:
        print(f"{_USAGE}\npython -m hpcray: error: {error}", file=sys.stderr)
        sys.exit(2)


def _provide_ray_module(libraries: str) -> None:
    """Make `import ray` find hpcray in the driver, which passes its path on to the workers.

    Args:
        libraries: a directory that holds Ray's own libraries, "" for what the environment says.
    """
    from hpcray.runtime.core_worker.worker_output import DEDUP_VARIABLE  # no other node needs it to start

    if libraries:
        os.environ[RAY_LIBRARIES] = os.path.abspath(libraries)
    path = [STANDIN, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ.setdefault(DEDUP_VARIABLE, "1")  # Ray's default


def _runs_program(options: NodeOptions) -> bool:
    """True if this rank will start the program. Where the setting is wrong, rank 0 reports the error."""
    if options.join or options.no_program:
        return False
    launch = read_launch(os.environ)
    try:
        driver_rank = options.settings().driver_rank
    except ValueError:
        driver_rank = 0
    return launch.rank == (driver_rank if driver_rank < launch.size else 0)


def main() -> NoReturn:
    """Be one node of the job; exit with the driver's code where that ran, with 0 elsewhere."""
    open_standard_descriptors()
    options = parse(sys.argv[1:])
    if options.as_ray or options.ray_libraries:
        _provide_ray_module(options.ray_libraries)
    set_process_name("hpcray-raylet")
    runs_program = _runs_program(options)
    if runs_program and options.driver and not options.as_ray and (warning := is_replaced(options.driver[0])):
        print(f"hpcray: {warning}", file=sys.stderr, flush=True)
    console = adopt_console(runs_program)
    code = 1
    try:
        report = console.leave if console is not None else lambda code: code
        code = run_node(options, lambda session_dir: None, report_code=report)
    except StartupError as error:
        if error.reported_by == "rank0":
            code = 0  # mpirun ends all ranks at the first other code, before rank 0 has reported the error
        elif error.reported_by == "self":
            print(f"hpcray: {error}", file=sys.stderr)
    except ValueError as error:
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
