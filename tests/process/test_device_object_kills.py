"""Random programs of device objects in which makers, readers and raylets are killed: nothing wrong is read, nothing
hangs, nothing is left behind. HPCRAY_DEVICE_OBJECT_SEEDS=0-199 runs these seeds."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import hpcray_only
from helpers.jobs import ROOT, Ended, Job, on_two_nodes
from helpers.leaks import LeakCheck, leak_checked

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytest.importorskip("torch")
pytestmark = [hpcray_only, pytest.mark.slow, pytest.mark.timeout(7200)]
PROGRAM = Path(__file__).with_name("device_object_program.py")
_FIRST, _LAST = map(int, os.environ.get("HPCRAY_DEVICE_OBJECT_SEEDS", "0-5").split("-"))
SEEDS = range(_FIRST, _LAST + 1)
SHARE_OF_NODES = 10
"""One program of so many runs on two nodes."""


@pytest.fixture
def leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[LeakCheck]:
    with leak_checked(monkeypatch.setenv) as found:
        yield found


def environ(leaks: LeakCheck, room: int = 0) -> dict[str, str]:
    return {"HPCRAY_PRELOAD": "torch", "HPCRAY_DEVICE_OBJECT_MEMORY": str(room), **leaks.environ}


def reads_of(ended: Ended) -> list[int]:
    assert ended.code == 0, (ended.out[-4000:], ended.err[-8000:])
    return [int(count) for count in re.findall(r"(\d+) values read", ended.out)]


def on_devices(leaks: LeakCheck, directory: Path, room: int = 0) -> dict[str, str]:
    """The environment of programs with made-up devices, through whose memory, and through the host, tensors pass."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"HPCRAY_PRELOAD": "torch,helpers.made_up_devices", "MADE_UP_DEVICES": str(directory), "PYTHONPATH": paths}
    return environ(leaks, room) | more


def check_devices(directory: Path, way: str = "") -> None:
    misuse = directory / "misuse"
    assert not misuse.exists(), misuse.read_text()
    counted = (directory / ("messages" if way else "transfers")).stat().st_size
    print(f"{counted} messages of UCX, at both ends" if way else f"{counted} copies of pieces")
    assert counted > 10


DIRECTLY = {"HPCRAY_DEVICE_TRANSPORTS": "tcp"}
"""Each process counts as one on a host of its own."""


@pytest.mark.parametrize("way", ["", "directly"])
@pytest.mark.parametrize("room", [0, 500_000], ids=["", "little room"])
def test_programs_with_devices_on_one_node(leaks: LeakCheck, tmp_path: Path, room: int, way: str) -> None:
    seeds = [seed for seed in SEEDS if seed % SHARE_OF_NODES]
    if not seeds:
        pytest.skip("no seed of a program on one node")
    environ = on_devices(leaks, tmp_path, room) | (DIRECTLY if way else {})
    with Job([sys.executable, str(PROGRAM), *map(str, seeds)], environ) as job:
        ended = job.wait(600.0 + 100.0 * len(seeds))
    print(ended.out, ended.err[-20_000:], sep="\n")
    reads = reads_of(ended)
    assert len(reads) == len(seeds) and sum(reads) > 3 * len(seeds), reads
    check_devices(tmp_path, way)


@pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI")
@pytest.mark.parametrize("way", ["", "directly"])
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if not seed % SHARE_OF_NODES])
def test_programs_with_devices_on_two_nodes(leaks: LeakCheck, tmp_path: Path, seed: int, way: str) -> None:
    # Pieces pass through the object plane.
    environ = {"HPCRAY_SAME_HOST": "0", **on_devices(leaks, tmp_path), **(DIRECTLY if way else {})}
    with Job(on_two_nodes(PROGRAM, "--nodes", str(seed)), environ) as job:
        ended = job.wait(600.0)
    print(ended.out, ended.err[-20_000:], sep="\n")
    (reads,) = reads_of(ended)
    assert reads > 0
    check_devices(tmp_path, way)


@pytest.mark.parametrize("room", [0, 2000], ids=["", "little room"])
def test_programs_on_one_node(leaks: LeakCheck, room: int) -> None:
    seeds = [seed for seed in SEEDS if seed % SHARE_OF_NODES]
    if not seeds:
        pytest.skip("no seed of a program on one node")
    with Job([sys.executable, str(PROGRAM), *map(str, seeds)], environ(leaks, room)) as job:
        ended = job.wait(600.0 + 100.0 * len(seeds))
    print(ended.out, ended.err[-20_000:], sep="\n")
    reads = reads_of(ended)
    print(f"{len(seeds)} programs: {sum(reads)} values read", *re.findall(r"the raylet was killed", ended.out))
    assert len(reads) == len(seeds) and sum(reads) > 8 * len(seeds), reads


@pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI")
@pytest.mark.parametrize("seed", [seed for seed in SEEDS if not seed % SHARE_OF_NODES])
def test_programs_on_two_nodes(leaks: LeakCheck, seed: int) -> None:
    with Job(on_two_nodes(PROGRAM, "--nodes", str(seed)), environ(leaks)) as job:
        ended = job.wait(600.0)
    print(ended.out, ended.err[-20_000:], sep="\n")
    (reads,) = reads_of(ended)
    assert reads > 0
