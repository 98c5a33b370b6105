"""Ray Train on MPI: the workers of a run as the ranks of an MPI job.

trainer = DataParallelTrainer(loop, backend_config=MPIConfig(), scaling_config=ScalingConfig(num_workers=4))
"""

from __future__ import annotations

import itertools
import logging
import os
from typing import Any

from hpcray.api.objects import get
from hpcray.common.exceptions import GetTimeoutError, RayError
from hpcray.mpi.nested_job import PlaceHolder, RankShare, adopt, leave, own_host

__all__ = ["MPIConfig"]

_LEAVE_TIMEOUT = 10.0  # seconds
_logger = logging.getLogger(__name__)
_here: PlaceHolder | None = None
"""Holder of the places of this host, in the first worker of each host."""


class MPIConfig:
    """A backend of Ray Train: each worker is a rank of an MPI job, `mpi4py.MPI.COMM_WORLD`, by its world rank.

    Args:
        torch_config: a further backend that is set up in the same workers, such as `TorchConfig(backend="gloo")`.
        start_timeout_s: how long the launcher may take to start the ranks' places.
    """

    def __init__(self, torch_config: Any = None, start_timeout_s: float = 120.0) -> None:
        self.torch_config = torch_config
        self.start_timeout_s = start_timeout_s

    @property
    def backend_cls(self) -> type[MPIBackend]:
        """The class that carries it out."""
        return MPIBackend

    @property
    def train_func_context(self) -> Any:
        """The context manager around the training function."""
        from contextlib import nullcontext

        return nullcontext if self.torch_config is None else self.torch_config.train_func_context

    @property
    def framework(self) -> Any:
        """The framework of `torch_config`."""
        return None if self.torch_config is None else self.torch_config.framework

    def to_dict(self) -> dict[str, Any]:
        """The configuration, for Ray Train's records."""
        further = None if self.torch_config is None else self.torch_config.to_dict()
        return {"torch_config": further, "start_timeout_s": self.start_timeout_s}


class MPIBackend:
    """Starts and ends the MPI job of a group of workers; as `ray.train.backend.Backend`."""

    has_replica_groups = False
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: MPIConfig) -> None:
        """Make the workers ranks: the launcher's processes hold their places on the workers' hosts.

        Raises:
            StartupError: the launcher failed, or was too slow.
        """
        hosts: list[str] = worker_group.execute(_own_host)
        token = f"train-{os.urandom(4).hex()}"
        holders = {host: hosts.index(host) for host in hosts}
        preparing = [worker_group.execute_single_async(rank, _prepare, token) for rank in holders.values()]
        directories = dict(zip(holders, get(preparing), strict=True))
        shares, first = [], 0
        for host, run in itertools.groupby(hosts):
            count = len(list(run))
            shares.append(RankShare(host, directories[host], first, count))
            first += count
        worker_group.execute_single(0, _launch, shares)
        size, timeout = len(hosts), backend_config.start_timeout_s
        get(
            [
                worker_group.execute_single_async(rank, _adopt, directories[host], rank, size, timeout)
                for rank, host in enumerate(hosts)
            ]
        )
        if (further := backend_config.torch_config) is not None:
            further.backend_cls().on_start(worker_group, further)

    def on_training_start(self, worker_group: Any, backend_config: MPIConfig) -> None:
        """Have the further backend do what it does then."""
        if (further := backend_config.torch_config) is not None:
            further.backend_cls().on_training_start(worker_group, further)

    def on_shutdown(self, worker_group: Any, backend_config: MPIConfig) -> None:
        """End MPI in the workers, as far as they live and are not inside of it; then the launcher."""
        if (further := backend_config.torch_config) is not None:
            further.backend_cls().on_shutdown(worker_group, further)
        try:
            get(worker_group.execute_async(leave), timeout=_LEAVE_TIMEOUT)
            get(worker_group.execute_async(_close), timeout=_LEAVE_TIMEOUT)
        except (GetTimeoutError, RayError) as error:
            # The workers are ended next, and all else with them.
            _logger.warning("the MPI job of this group has not ended in order: %s", type(error).__name__)


def _own_host() -> str:
    return own_host(os.environ)


def _prepare(token: str) -> str:
    global _here
    _here = PlaceHolder()
    return _here.prepare(token)


def _launch(shares: list[RankShare]) -> None:
    assert _here is not None
    _here.launch(shares)


def _adopt(directory: str, rank: int, size: int, timeout: float) -> None:
    adopt(directory, rank, size, timeout, _here)


def _close() -> None:
    if _here is not None:
        _here.close()
