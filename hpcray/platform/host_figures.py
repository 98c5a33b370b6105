"""Use of the processors, the networks and the GPUs of this host, as the kernel and NVIDIA's driver count it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_PERIOD = 1.0  # seconds between two looks at the GPUs
_SAMPLING = 30.0  # seconds after the last question for which the GPUs are looked at
_WORDS_OF_4_BYTES = 4  # InfiniBand's counters count them


def host_cpu_seconds() -> tuple[float, float]:
    """(seconds that the CPUs of this host were busy, seconds in all) since its start."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/stat", "rb") as file:
        times = [int(word) / _TICK for word in file.readline().split()[1:9]]
        return sum(times) - times[3] - times[4], sum(times)
    return 0.0, 0.0


def process_usage(pids: Iterable[int]) -> dict[int, tuple[float, int]]:
    """(seconds of CPU, resident bytes) of processes of this host; those that have ended are left out."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICK, int(fields[21]) * _PAGE
    return found


def network_bytes() -> tuple[int, int]:
    """(received, sent) bytes of the networks of this host since its start: Ethernet and InfiniBand, not loopback."""
    received = sent = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/net/dev", encoding="ascii") as file:
        for line in file.readlines()[2:]:
            name, _, rest = line.partition(":")
            if name.strip() != "lo":
                numbers = rest.split()
                received, sent = received + int(numbers[0]), sent + int(numbers[8])
    for port in Path("/sys/class/infiniband").glob("*/ports/*/counters"):
        with contextlib.suppress(OSError, ValueError):
            received += _WORDS_OF_4_BYTES * int((port / "port_rcv_data").read_text())
            sent += _WORDS_OF_4_BYTES * int((port / "port_xmit_data").read_text())
    return received, sent


class GpuSampler:
    """The GPUs of this host, read in a thread, as a driver that hangs must not stop a raylet.

    Nothing runs before the first question, nor for long after the last one. Without NVIDIA's library there are none.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._asked = 0.0
        self._thread: threading.Thread | None = None
        self._usable = True

    def rows(self) -> list[dict[str, Any]]:
        """A row per GPU as last seen: "index", "name", "uuid", "busy" (share), "used" and "total" memory in bytes."""
        self._asked = time.monotonic()
        if self._usable and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="hpcray-gpus", daemon=True)
            self._thread.start()
        return self._rows

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no library, or no driver
            self._usable = False
            return
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
            while time.monotonic() - self._asked < _SAMPLING:
                self._rows = [_gpu_row(pynvml, place, handle) for place, handle in enumerate(handles)]
                time.sleep(_SAMPLE_PERIOD)
        except pynvml.NVMLError:
            self._usable = False
        finally:
            self._rows = []
            pynvml.nvmlShutdown()


def _gpu_row(nvml: Any, place: int, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    row = {"index": place, "name": nvml.nvmlDeviceGetName(handle), "uuid": nvml.nvmlDeviceGetUUID(handle)}
    row |= {"busy": 0.0, "used": memory.used, "total": memory.total}
    with contextlib.suppress(nvml.NVMLError):  # a MIG instance has no rate
        row["busy"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return row
