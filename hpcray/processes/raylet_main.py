"""A raylet process from its first step: `run_node`, and `main` of the raylet of a user's process."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.common.terminal_text import plain_line
from hpcray.platform.fork_server import WorkerCode
from hpcray.platform.launcher_environment import strip_launcher_variables
from hpcray.platform.process_control import module_line, set_process_name
from hpcray.platform.sockets import close_listeners
from hpcray.runtime.node.options import NodeOptions
from hpcray.runtime.node.prepared_node import PreparedNode
from hpcray.runtime.node.raylet_signals import ended_by_sigterm, leaving_at_sigterm, outlive_user_signals
from hpcray.runtime.node.slurm_job import RayletReady, reported_by_launcher
from hpcray.transport.startup import Launch, pmi_offered, read_launch

if TYPE_CHECKING:
    from hpcray.history.node_history import NodeHistory
    from hpcray.platform.path_relocation import PathRelocation
    from hpcray.runtime.raylet.raylet import Raylet
    from hpcray.transport.base import ControlTransport

_REPORT_TIMEOUT = 20.0  # seconds; Slurm's KillWait is 30 by default


def run_node(
    options: NodeOptions,
    ready: Callable[[str], None],
    life: int = -1,
    report_code: Callable[[int], int] = lambda code: code,
) -> int:
    """Run the raylet of one node until the job is over. The caller then ends this process with `os._exit`: where other
    nodes died, exit handlers of MPI would wait for them.

    Args:
        options: of this node. With a `driver` in it, one rank runs that program as a child (`Config.driver_rank`).
        ready: called with the session directory when a driver may connect.
        life: a descriptor that is closed at its other end when whoever started this process is gone; -1 for none.
        report_code: called with the program's exit code where the program ran, before MPI is closed, which may take
            longer than this process may. Returns the code for this process to exit with.

    Returns:
        The exit code of this process: the job's where the program ran, 0 elsewhere; 1 when this node had to give up.

    Raises:
        StartupError: this node did not come up; nothing of it is left. Its `reported_by` says who writes the message.
        ValueError: an option is not valid.
    """
    outlive_user_signals()
    histories: list[tuple[str, str]] = []
    launch = _read_launch(options)
    if options.distributed and not options.join:
        _check_driver_rank(options.settings(), launch)
    try:
        with leaving_at_sigterm():
            node = PreparedNode.prepare(options, launch, load_worker)
    except StartupError as error:
        raise reported_by_launcher(error, launch) from None
    try:
        with ended_by_sigterm(node.session.remove):
            # Not before: workers would inherit the modules.
            from hpcray.autoscaler.node_autoscaling import NodeAutoscaling
            from hpcray.diagnostics.raylet_introspection import RayletIntrospection
            from hpcray.processes.job_cleanup import JobCleanup
            from hpcray.runtime.node.node import open_node, serve
            from hpcray.runtime.node.node_features import NodeFeatures

            gc.freeze()
            gc.enable()
            node.template.load()  # not before: importing at the same time would slow down both on few cores
            features = NodeFeatures(
                autoscaling=NodeAutoscaling,
                diagnostics=RayletIntrospection,
                labels=_find_labels,
                share_directory=partial(_share_directory, node),
                cancel_jobs=_cancel_jobs,
                near_sets=_near_sets,
                extensions=[JobCleanup, partial(_node_history, histories)],
            )
            opened = open_node(node, features)
    except BaseException:
        node.abandon()
        raise
    try:
        return serve(node, opened, ready, life, features, report_code)
    finally:
        for root, run in histories:
            _write_report(node.config.report, root, run)


def _node_history(histories: list[tuple[str, str]], raylet: Raylet) -> NodeHistory | None:
    config = raylet.context.config
    if not config.history:
        if config.report and raylet.head is not None:
            raylet.events.report("WARNING", "no report on this job is written: HPCRAY_HISTORY=0 turns its history off")
        return None
    from hpcray.history.node_history import NodeHistory

    return NodeHistory(raylet, lambda root, run: histories.append((root, run)))


def _write_report(directory: str, root: str, run: str) -> None:
    """Write the report on a job that has ended, in a process of its own, which has neither MPI nor UCX."""
    if not directory:
        return
    environ = {**os.environ, "HPCRAY_HISTORY_DIR": root}
    strip_launcher_variables(environ)
    command = module_line("hpcray.cli", "report", "--job", run, os.path.join(directory, ""))
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=_REPORT_TIMEOUT
        )
        said = done.stderr if done.returncode else done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    print(f"hpcray: report: {plain_line(said.strip())}", file=sys.stderr, flush=True)


def _find_labels(config: Config, ranks_here: int, gpus: Sequence[str], joins: bool) -> dict[str, str]:
    environ = os.environ
    # Who joins by ssh has nothing of Slurm in the environment, and asks.
    known = "SLURM_JOB_ID" in environ or joins
    known = known and environ.get("SLURM_TOPOLOGY_ADDR_PATTERN") != "node"
    if not (known or gpus or ranks_here > 1 or config.topology or config.rack_pattern):
        return {}  # without an import
    from hpcray.topology.node_labels import node_labels

    return node_labels(
        environ, file=config.topology, rack_pattern=config.rack_pattern, ranks_here=ranks_here, gpus=gpus, joins=joins
    )


def _cancel_jobs(name: str, jobs: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> None:
    from hpcray.autoscaler.batch_systems import cancel_jobs

    cancel_jobs(name, jobs, environ)


def _near_sets(*group: Any) -> list[list[int]]:
    from hpcray.topology.node_order import near_domains

    return near_domains(*group)


def _share_directory(
    node: PreparedNode,
    path: str,
    command: Sequence[str],
    control: ControlTransport | None,
    session_dir: str,
    timeout: float,
) -> PathRelocation:
    from hpcray.common.labels import parse_labels, place_of
    from hpcray.runtime_env.env_broadcast import share

    found = _find_labels(node.config, max(1, node.launch.here), node.gpus, node.token is not None)
    place = place_of({**found, **parse_labels(node.config.labels)})
    return share(path, command, control, session_dir, timeout, place)


def _read_launch(options: NodeOptions) -> Launch:
    """Read the launcher's variables. Tasks of a step without MPI that join a job are a world each."""
    launch = read_launch(os.environ) if options.distributed else Launch()
    if options.join and pmi_offered(os.environ) == "none":
        return msgspec.structs.replace(launch, rank=0, size=1)
    return launch


def _check_driver_rank(config: Config, launch: Launch) -> None:
    """Check that there is such a rank. All ranks find the same, and rank 0 reports it."""
    if config.driver_rank >= launch.size:
        if launch.rank:
            raise StartupError("rank 0 reports the reason", reported_by="rank0")
        raise StartupError(
            f"the program is to run on rank {config.driver_rank} (--driver-rank, HPCRAY_DRIVER_RANK), and there are "
            f"{launch.size} rank{'s' * (launch.size > 1)}; hint: ranks are counted from 0"
        )


def main() -> NoReturn:
    """Run the raylet as a child of the user's process, which `bootstrap.NodeChild` starts.

    The last arguments are the options as JSON, and the descriptors of the ready pipe and of the life pipe.
    """
    given, *descriptors = sys.argv[-3:]
    options = msgspec.json.decode(given, type=NodeOptions)
    ready_fd, life = map(int, descriptors)
    os.set_inheritable(ready_fd, False)
    os.set_inheritable(life, False)
    set_process_name("hpcray-raylet")
    reported = False

    def report(ready: RayletReady) -> None:
        nonlocal reported
        if not reported:
            reported = True
            with contextlib.suppress(OSError):  # the parent has ended; the life pipe shows that too
                os.write(ready_fd, msgspec.json.encode(ready))
            os.close(ready_fd)

    code = 1
    try:
        code = run_node(options, lambda session_dir: report(RayletReady(session_dir=session_dir)), life)
    except StartupError as error:
        report(RayletReady(error=str(error), reported_by_rank0=error.reported_by == "rank0"))
    except ValueError as error:
        report(RayletReady(error=str(error)))
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:
        report(RayletReady(error=traceback.format_exc()))
        traceback.print_exc()
    finally:
        report(RayletReady(error="the node ended before it was up; its error output tells why"))
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        close_listeners()
        os._exit(code)


def load_worker() -> WorkerCode:
    """Import what every worker needs; runs in the template process."""
    import numpy  # noqa: F401

    import hpcray

    if not hasattr(hpcray, "init"):  # our raylet does without it, see `bootstrap`
        hpcray.__spec__.loader.exec_module(hpcray)  # type: ignore[union-attr]
    import hpcray.history.process_history  # each worker is asked what it has run
    from hpcray.platform.numa_binding import limit_loaded_libraries_to_one_thread
    from hpcray.processes.environment_server import be_server, needs_server
    from hpcray.processes.worker_main import worker_main

    limit_loaded_libraries_to_one_thread()

    return WorkerCode(worker_main, needs_server, be_server)
