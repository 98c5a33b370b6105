"""Counters, gauges and histograms of a program: `ray.util.metrics`.

`hpcray metrics` shows them, and Prometheus can scrape them (see `hpcray.diagnostics.metrics_endpoint`).
"""

from __future__ import annotations

import atexit
import bisect
import os
import re
import threading
import warnings
from functools import partial
from typing import Any

from hpcray.diagnostics.metrics_endpoint import COUNTER, GAUGE, HISTOGRAM, MetricRow, MetricsEndpoint, write_metrics
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.state.node_metrics import common_labels, own_metrics

__all__ = ["Counter", "Gauge", "Histogram", "Metric"]

_WRITE_PERIOD = 1.0  # seconds between two writes of the file
_TAKEOVER_PERIOD = 5.0  # seconds between two attempts to serve, while nothing is measured
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
Tags = dict[str, str]
_Key = tuple[tuple[str, str], ...]


class _Registry:
    """The metrics that this process has measured."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._metrics: dict[tuple[str, str], MetricRow] = {}
        self._values: dict[tuple[str, str], dict[_Key, Any]] = {}
        self._changed = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: CoreWorker | None = None
        self._endpoint: MetricsEndpoint | None = None

    def values(self, name: str, kind: str, description: str, boundaries: list[float]) -> dict[_Key, Any]:
        """The samples of a metric by tags; metrics of the same name and kind share them."""
        with self.lock:
            key = name, kind
            if key not in self._metrics:
                self._metrics[key] = {"name": name, "kind": kind, "help": description, "boundaries": boundaries}
            return self._values.setdefault(key, {})

    def changed(self) -> None:
        """Schedule a write: a value was measured."""
        if not self._changed.is_set():
            self._changed.set()
            if self._thread is None or not self._thread.is_alive():
                self._start()

    def _start(self) -> None:
        with self.lock:
            if self._thread is None or not self._thread.is_alive():  # dead: this is a forked child
                self._thread = threading.Thread(target=self._run, name="hpcray-metrics", daemon=True)
                self._thread.start()
                atexit.register(self.write)

    def _run(self) -> None:
        while True:
            if self._changed.wait(_TAKEOVER_PERIOD):
                self.write()
            self._pause()

    def _pause(self) -> None:
        """Limit writes to one per second; meanwhile try to take over the endpoint of a process that ended."""
        threading.Event().wait(_WRITE_PERIOD)
        if self._endpoint is not None and current.process is self._process:
            try:
                self._endpoint.try_to_serve()
            except OSError:
                self._endpoint = None  # the session has ended

    def write(self) -> None:
        """Write what was measured so far to the session directory, if there is a session."""
        process = current.process
        if process is None or process.dead is not None:
            return
        with self._writing:
            self._changed.clear()
            with self.lock:
                rows = [
                    {**row, "samples": [[list(map(list, tags)), value] for tags, value in self._values[key].items()]}
                    for key, row in self._metrics.items()
                ]
            try:
                write_metrics(process.place.session_dir, process.me.hex(), os.getpid(), rows)
            except OSError:
                return  # the session has ended, or its disk is full: a metric is no reason to fail
        if process is not self._process:
            self._process, labels = process, common_labels(process)
            place = process.place.session_dir
            self._endpoint = MetricsEndpoint(place, labels, self.write, partial(own_metrics, process))
            self._endpoint.try_to_serve()


_registry = _Registry()


class Metric:
    """Base class of all kinds of metric.

    Args:
        name: letters, digits, "_" and ":"; a metric with another name is discarded, with a warning.
        description: help text.
        tag_keys: names of the tags of every sample.

    Raises:
        ValueError: the name is empty. TypeError: tag_keys is not a tuple of str.
    """

    KIND = ""

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
        if not name:
            raise ValueError("Empty name is not allowed. Please provide a metric name.")
        self._discard_metric = not _NAME.fullmatch(name)
        if self._discard_metric:
            warnings.warn(
                f"Invalid metric name: {name}. Metric will be discarded and data will not be collected or published. "
                "Metric names can only contain letters, numbers, _, and :. Metric names cannot start with numbers.",
                UserWarning,
                stacklevel=3,
            )
        self._name = name
        self._description = description
        self._default_tags: Tags = {}
        self._tag_keys = tag_keys or ()
        if not isinstance(self._tag_keys, tuple):
            raise TypeError(f"tag_keys should be a tuple type, got: {type(self._tag_keys)}")
        for key in self._tag_keys:
            if not isinstance(key, str):
                raise TypeError(f"Tag keys must be str, got {type(key)}.")
        self._values: dict[_Key, Any] = _registry.values(name, self.KIND, description, self._buckets())

    def _buckets(self) -> list[float]:
        return []

    def set_default_tags(self, default_tags: Tags) -> Any:
        """Set tags for samples that are recorded without them. Returns the metric itself.

        Raises:
            ValueError: a tag is not in `tag_keys`. TypeError: a value is not a str.
        """
        for key, value in default_tags.items():
            if key not in self._tag_keys:
                raise ValueError(f"Unrecognized tag key {key}.")
            if not isinstance(value, str):
                raise TypeError(f"Tag values must be str, got {type(value)}.")
        self._default_tags = default_tags
        return self

    @property
    def info(self) -> dict[str, Any]:
        """Name, description, tag_keys, default_tags; of a histogram also boundaries."""
        return {**self._arguments(), "default_tags": self._default_tags}

    def _record(self, value: float, tags: Tags | None) -> None:
        if self._discard_metric:
            return
        for text in (tags or {}).values():
            if not isinstance(text, str):
                raise TypeError(f"Tag values must be str, got {type(text)}.")
        final = {**self._default_tags, **(tags or {})}
        missing = [key for key in self._tag_keys if key not in final]
        if missing:
            raise ValueError(f"Missing value for tag key(s): {','.join(missing)}.")
        with _registry.lock:
            self._add(tuple(sorted(final.items())), value)
        _registry.changed()

    def _add(self, tags: _Key, value: float) -> None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._arguments(), self._default_tags)

    def _arguments(self) -> dict[str, Any]:
        return {"name": self._name, "description": self._description, "tag_keys": self._tag_keys}


class Counter(Metric):
    """A number that only increases."""

    KIND = COUNTER

    def inc(self, value: float = 1.0, tags: Tags | None = None) -> None:
        """Add a positive value.

        Raises:
            TypeError, ValueError: the value is not a number, or not positive; a tag is missing.
        """
        _check_number(value)
        if value <= 0:
            raise ValueError(f"value must be >0, got {value}")
        self._record(value, tags)

    def _add(self, tags: _Key, value: float) -> None:
        self._values[tags] = self._values.get(tags, 0) + value


class Gauge(Metric):
    """A number that goes up and down: of each process, the last value is shown."""

    KIND = GAUGE

    def set(self, value: float | None, tags: Tags | None = None) -> None:
        """Set it; None changes nothing.

        Raises:
            TypeError, ValueError: the value is not a number; a tag is missing.
        """
        if value is None:
            return
        _check_number(value)
        self._record(value, tags)

    def _add(self, tags: _Key, value: float) -> None:
        self._values[tags] = value


class Histogram(Metric):
    """Counts how many values fell into each bucket.

    Args:
        name, description, tag_keys: see `Metric`.
        boundaries: upper bounds of the buckets, positive; one more bucket takes larger values.

    Raises:
        ValueError: there are no boundaries, or one is not positive.
    """

    KIND = HISTOGRAM

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: list[float] | None = None,
        tag_keys: tuple[str, ...] | None = None,
    ) -> None:
        if not boundaries:
            raise ValueError(
                "boundaries argument should be provided when using the Histogram class. "
                'e.g., Histogram("name", boundaries=[1.0, 2.0])'
            )
        for index, boundary in enumerate(boundaries):
            if boundary <= 0:
                raise ValueError(
                    f"Invalid `boundaries` argument at index {index}, {boundaries}. "
                    "Use positive values for the arguments."
                )
        self.boundaries = boundaries
        super().__init__(name, description, tag_keys)

    def observe(self, value: float, tags: Tags | None = None) -> None:
        """Count a value.

        Raises:
            TypeError, ValueError: the value is not a number; a tag is missing.
        """
        _check_number(value)
        self._record(value, tags)

    def _buckets(self) -> list[float]:
        return sorted(self.boundaries)

    def _add(self, tags: _Key, value: float) -> None:
        held = self._values.get(tags)
        if held is None:
            held = self._values[tags] = [0.0] * (len(self.boundaries) + 2)
        held[bisect.bisect_left(self._buckets(), value)] += 1
        held[-1] += value

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "boundaries": self.boundaries}


def _check_number(value: Any) -> None:
    if not isinstance(value, (int, float)):
        raise TypeError(f"value must be int or float, got {type(value)}.")


def _rebuild(kind: type[Metric], arguments: dict[str, Any], default_tags: Tags) -> Metric:
    metric = kind(**arguments)
    metric._default_tags = default_tags
    return metric
