"""Ray Train's connections between workers: on the loopback interface, where the job is on one host."""

from __future__ import annotations

import functools
import importlib
import os
import socket
import threading
from types import ModuleType
from typing import Any

from hpcray.api.drain import on_drain
from hpcray.api.runtime_context import nodes
from hpcray.common.exceptions import JobDrainingError
from hpcray.platform.sockets import interface_of, node_ip_address
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.drain_client import callbacks

_GLOO = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_stores: list[Any] = []
"""PyTorch's stores that this process serves, to its end."""


def torch_config(module: ModuleType) -> None:
    """Amend `ray.train.torch.config`: where gloo and PyTorch's store listen.

    By itself gloo takes the interface that the host's name leads to, which no other node may reach; here it uses that
    of the node's address, or loopback. A variable GLOO_SOCKET_IFNAME is left as it is. PyTorch's store by itself takes
    all interfaces, and a port that was free a moment before.
    """
    setup: Any = module._setup_torch_process_group

    @functools.wraps(setup)
    def setup_process_group(*args: Any, **options: Any) -> Any:
        if _GLOO not in os.environ and (interface := "lo" if _on_one_host() else interface_of(node_ip_address())):
            os.environ[_GLOO] = interface
        return setup(*args, **options)

    module._setup_torch_process_group = setup_process_group  # type: ignore[attr-defined]
    module.get_address_and_port = open_store  # type: ignore[attr-defined]


def open_store() -> tuple[str, int]:
    """Start PyTorch's store in this process, the worker of rank 0, and return its address and port.

    `init_process_group` finds it: one process has one multi-tenant store at a port. So no other process can take the
    port between its choice and its use.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    host = _LOOPBACK if _on_one_host() else node_ip_address()
    with socket.create_server((host, 0), backlog=socket.SOMAXCONN) as listener:
        port: int = listener.getsockname()[1]
        # Only PyTorch's older server takes a socket that listens already.
        store = distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.fileno(),
            use_libuv=False,
        )  # fmt: skip
        listener.detach()
    _stores.append(store)
    return host, port


def _on_one_host() -> bool:
    return len({node["NodeManagerHostname"] for node in nodes() if node["Alive"]}) == 1


# ------------------------------------------------------------ tune drain
# Ray Tune in a drain, the announced end of its job: the search saves its state, and is known to be unfinished.


_HANDLED_BY_TUNE = "SIGUSR1"
_SAVING_SHARE = 0.5
"""Share of the time left that a search gets to end, before actors are saved."""
_running = threading.local()


class _Search:
    """A run of Tune.

    Attributes:
        left: number of trials that had not ended when the run did.
        over: set when the state of the run is saved.
    """

    def __init__(self) -> None:
        self._drained = False
        self._interrupted: threading.Event | None = None
        self.left = 0
        self.over = threading.Event()

    def interrupted_by(self, event: threading.Event) -> threading.Event:
        """Take the event that ends the run."""
        self._interrupted = event
        if self._drained:
            event.set()
        return event

    def end(self, seconds: float) -> None:
        """The job drains: end the run, and wait until its state is saved."""
        self._drained = True
        if self._interrupted is not None:
            self._interrupted.set()
        self.over.wait(_SAVING_SHARE * seconds)


def tune(module: ModuleType) -> None:
    """Amend `ray.tune.tune`: a run that the drain of its job ends raises JobDrainingError, with its state saved.

    By itself Tune would count trials that cannot start any more as errors, and the program would end with code 0. Where
    SIGUSR1 began the drain the run returns, as on Ray: Tune knows that signal, and so does the program.
    """
    set_up, run = module._setup_signal_catching, module.run

    class TuneController(module.TuneController):  # type: ignore[misc, name-defined]
        def _process_trial_failure(self, trial: Any, exception: Exception) -> None:
            if not _drain_reason():  # else it is left as one that runs, and goes on in the next run
                super()._process_trial_failure(trial, exception)

        def cleanup(self) -> None:
            search: _Search | None = getattr(_running, "search", None)
            if search is not None:  # after this all trials count as ended
                search.left = sum(trial.status not in ("TERMINATED", "ERROR") for trial in self.get_trials())
            super().cleanup()

    def set_up_signals() -> threading.Event:
        event: threading.Event = set_up()
        search: _Search | None = getattr(_running, "search", None)
        return event if search is None else search.interrupted_by(event)

    @functools.wraps(run)
    def run_until_drained(*args: Any, **options: Any) -> Any:
        search = _running.search = _Search()
        on_drain(search.end)
        try:
            analysis = run(*args, **options)
        finally:
            search.over.set()
            _running.search = None
            callbacks.remove(search.end)
        reason = _drain_reason()
        if reason and search.left and not reason.startswith(_HANDLED_BY_TUNE):
            raise JobDrainingError(
                f"{search.left} of {len(analysis.trials)} trials have not ended: the job drains ({reason}), and the "
                f"search is saved; hint: Tuner.restore({analysis.experiment_path!r}, ...) in the next run"
            )
        return analysis

    module._setup_signal_catching = set_up_signals  # type: ignore[attr-defined]
    module.TuneController = TuneController  # type: ignore[attr-defined]
    module.run = run_until_drained  # type: ignore[attr-defined]


def _drain_reason() -> str:
    """The reason for which the job drains; "" while it does not."""
    process = current.process
    return process.drain_client.reason if process is not None else ""
