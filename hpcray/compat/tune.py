"""Ray Tune in a drain, the announced end of its job: the search saves its state, and is known to be unfinished. And the
paths that it prints: places that are still there when the program has ended.

Tune gathers the files of a run in the session directory, copies them to the storage path, and prints the former. Ray's
session directories stay in /tmp; those of hpcray go with the job.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hpcray.api.drain import on_drain
from hpcray.common.exceptions import JobDrainingError
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.drain_client import callbacks

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


def trial(module: ModuleType) -> None:
    """Amend `ray.tune.experiment.trial`: the error file of a trial is in the storage path where that is a directory."""
    cls = module.Trial
    staged = cls.error_file

    def error_file(self: Any) -> str | None:
        found: str | None = staged.fget(self)
        if found is None or not _is_directory(self.storage):
            return found
        os.makedirs(self.path, exist_ok=True)
        return os.path.join(str(self.path), str(self.run_metadata.error_filename))

    cls.error_file = property(error_file, doc=staged.__doc__)


def _is_directory(storage: Any) -> bool:
    return getattr(storage.storage_filesystem, "type_name", "") == "local"


def output(module: ModuleType) -> None:
    """Amend `ray.tune.experimental.output`: TensorBoard is shown the storage path."""
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and "experiment_started" in vars(cls):
            cls.experiment_started = _with_storage_path(vars(cls)["experiment_started"])  # type: ignore[attr-defined]


def _with_storage_path(started: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(started)
    def experiment_started(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("tensorboard_path"):
            kwargs["tensorboard_path"] = kwargs.get("experiment_path", kwargs["tensorboard_path"])
        started(self, *args, **kwargs)

    return experiment_started
