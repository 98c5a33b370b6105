"""A node as far as it is made before any library that starts threads is loaded: session directory, arena, template
process.

What this module imports is inherited by the template process, and by every worker. What only a raylet needs is imported
after that (`node`), while the template imports what only workers need.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

from msgspec import Struct, field

from hpcray.common.config import Config
from hpcray.core.raylet.frame_slots import SLOT_COUNT
from hpcray.platform.accelerators import node_accelerators, node_gpus
from hpcray.platform.arena import TOO_FEW_HUGE_PAGES, Arena, default_arena_size
from hpcray.platform.config_files import configured_environment
from hpcray.platform.console import take_exit_file_path
from hpcray.platform.fork_server import ForkServerClient, WorkerCode, start_fork_server
from hpcray.platform.numa_binding import RankPlan
from hpcray.platform.path_relocation import PathRelocation
from hpcray.platform.process_control import become_subreaper
from hpcray.platform.session_directory import SessionDirectory
from hpcray.platform.sockets import NODE_ADDRESS
from hpcray.platform.spill_files import spill_directory
from hpcray.protocol.frames import SLOT_BYTES
from hpcray.protocol.messages import RunInfo
from hpcray.runtime.node.join_token import JoinToken, read_join_token
from hpcray.runtime.node.options import NodeOptions, bind_node
from hpcray.runtime.node.slurm_job import read_run
from hpcray.transport.startup import Launch

TRANSFER_SLOTS = 4
"""Pieces of objects that an arena has room for beside the objects themselves, for transfers. Frame slots follow."""
_REMOVAL_TIME = 120.0
_JOURNAL = "HPCRAY_JOURNAL_DIR"
_OPENBLAS_THREADS = "OPENBLAS_NUM_THREADS"


class PreparedNode(Struct):
    """The parts of a node that exist before its raylet does. `prepare` makes one.

    Attributes:
        options, config, launch: as given. run: what the batch system says. bound: where its processes may run.
        gpus, accelerators: ids of what this node offers. exit_file: see `write_exit_report`; "" for none.
        token: that of the running job it joins. moved: the directories of which this node uses copies.
    """

    options: NodeOptions
    config: Config
    launch: Launch
    session: SessionDirectory
    arena: Arena
    template: ForkServerClient
    gpus: tuple[str, ...]
    accelerators: dict[str, tuple[str, ...]]
    spill_dir: str
    run: RunInfo
    bound: RankPlan
    exit_file: str = ""
    token: JoinToken | None = None
    moved: PathRelocation = field(default_factory=PathRelocation)

    @classmethod
    def prepare(cls, options: NodeOptions, launch: Launch, load_worker: Callable[[], WorkerCode]) -> PreparedNode:
        """Make the session directory and the arena of this process's node, and start its template process.

        Args:
            options: of this node.
            launch: what the launcher says of this rank.
            load_worker: runs in the template process: imports what every worker needs, and returns what workers run.

        Raises:
            StartupError: the machine lacks something; nothing is left. ValueError: an option is not valid.
        """
        config, exit_file = options.settings(), take_exit_file_path(os.environ)
        token = read_join_token(options.join) if options.join else None
        if token is not None:
            config = config.in_job(token.settings)
        options = options.with_identity(os.environ)
        if options.address:
            os.environ[NODE_ADDRESS] = options.address  # the workers inherit it
        gpus = node_gpus(options.num_gpus, max(1, launch.here))
        accelerators = node_accelerators(options.resources, max(1, launch.here))
        spill_dir = spill_directory(config.spill_dir)
        run = read_run(config, launch)
        if token is None:
            # Nodes that this job starts itself (`init(address="local")` in a task) do not use its journal.
            os.environ.pop(_JOURNAL, None)
            if configured_environment(os.environ).get(_JOURNAL):
                os.environ[_JOURNAL] = ""  # comes before the one of a configuration file
        if launch.rank == 0:
            for text in Config.unknown_variables(os.environ):
                print(f"hpcray: {text}", file=sys.stderr, flush=True)
        options, bound = bind_node(options, config, max(1, launch.here), gpus)
        session = SessionDirectory.create()
        session.driver = options.driver
        try:
            size = default_arena_size(config, max(1, launch.here))
            reserve = TRANSFER_SLOTS * config.chunk + SLOT_COUNT * SLOT_BYTES
            arena = Arena.create(size, reserve, config.huge_pages)
            if config.huge_pages == "reserved" and not arena.reserved:
                print(f"hpcray: node {launch.rank}: {TOO_FEW_HUGE_PAGES}", file=sys.stderr, flush=True)
            gc.disable()  # while this process and the template import: a collection would copy the pages they share
            gc.freeze()
            if launch.size > 1 and config.data_plane != "mpi":
                _import_numpy()
            template = start_fork_server(load_worker, session.path, arena.fd, session.lock_fd)
        except BaseException:
            session.remove()
            raise
        become_subreaper()
        return cls(
            options, config, launch, session, arena, template, gpus, accelerators, spill_dir, run, bound, exit_file,
            token,
        )  # fmt: skip

    @property
    def frame_slots(self) -> list[int]:
        """Where in the arena the slots for long frames are."""
        first = self.arena.size + TRANSFER_SLOTS * self.config.chunk
        return [first + number * SLOT_BYTES for number in range(SLOT_COUNT)]

    @property
    def removal_time(self) -> float:
        """Seconds that removing the copied directories may take at the end."""
        return _REMOVAL_TIME if self.moved.pairs else 0.0

    def abandon(self) -> None:
        """Undo `prepare`."""
        self.template.close()
        self.template.reap()
        self.session.remove()
        self.arena.close()


def _import_numpy() -> None:
    """Import once what UCX's Python module needs in this process, and workers need too. It must start no threads."""
    unset = _OPENBLAS_THREADS not in os.environ
    if unset:
        os.environ[_OPENBLAS_THREADS] = "1"
    try:
        import asyncio  # noqa: F401

        import numpy  # noqa: F401
    except ImportError:
        pass  # whoever needs it reports that
    finally:
        if unset:
            del os.environ[_OPENBLAS_THREADS]
