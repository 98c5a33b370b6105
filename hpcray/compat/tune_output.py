"""Paths that Ray Tune prints, in places that are still there when the program has ended.

Tune gathers the files of a run in the session directory, copies them to the storage path, and prints the former. Ray's
session directories stay in /tmp; those of hpcray go with the job.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


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
