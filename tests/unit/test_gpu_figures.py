"""The figures of GPUs: NVIDIA's library as `GpuSampler` calls it, here one that is made up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hpcray.diagnostics import node_figures
from hpcray.diagnostics.node_figures import GpuSampler


class NVMLError(Exception):
    """As the library's."""


class FakeNvml(ModuleType):
    """Two GPUs, of which the second is a MIG instance: it has no rate of use.

    Attributes:
        lost: the driver answers no more. inits, ends: calls of `nvmlInit` and `nvmlShutdown`.
    """

    NVMLError = NVMLError

    def __init__(self, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.driver, self.lost, self.busy = driver, False, 50
        self.inits = self.ends = 0

    def nvmlInit(self) -> None:
        self.inits += 1
        if not self.driver:
            raise NVMLError("driver not loaded")

    def nvmlShutdown(self) -> None:
        self.ends += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if self.lost:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(used=(handle + 1) * 10**9, total=10**11, free=0)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=self.busy, memory=0)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_figures, "_SAMPLE_PERIOD", 0.01)


def test_each_gpu_is_a_row_and_changes_are_seen(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = GpuSampler()
    first, second = until(sampler.rows)
    assert first == {
        "index": 0, "name": "NVIDIA H200", "uuid": "GPU-0", "busy": 0.5, "used": 10**9, "total": 10**11,
    }  # fmt: skip
    assert (second["used"], second["busy"]) == (2 * 10**9, 0.0)
    nvml.busy = 100
    until(lambda: sampler.rows()[0]["busy"] == 1.0)
    assert nvml.inits == 1


def test_nothing_runs_when_nobody_asks_and_the_next_question_begins_anew(
    monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(node_figures, "_SAMPLING", 0.05)
    sampler = GpuSampler()
    sampler.rows()
    until(lambda: nvml.ends == 1)
    assert not sampler._rows
    sampler.rows()
    until(lambda: nvml.ends == 2)


def test_without_a_driver_or_when_it_is_lost_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    missing = FakeNvml(driver=False)
    monkeypatch.setitem(sys.modules, "pynvml", missing)
    sampler = GpuSampler()
    sampler.rows()
    until(lambda: sampler._thread is not None and not sampler._thread.is_alive())
    assert sampler.rows() == [] and missing.inits == 1, "it is not asked again"
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = GpuSampler()
    until(sampler.rows)
    nvml.lost = True
    until(lambda: nvml.ends == 1 and not sampler.rows())
