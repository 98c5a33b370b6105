"""A file of spilled objects that cannot be read any more: results are made again, a put is lost, the job goes on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import Marks, eventually, exceptions, hpcray_only, ray

from hpcray.platform.session_directory import live_sessions
from hpcray.runtime.core_worker.core_worker import current

pytestmark = [pytest.mark.usefixtures("session"), pytest.mark.timeout(180), hpcray_only]
INIT = {"num_cpus": 2, "object_store_memory": 48 << 20}
MB4 = (4 << 20) // 8


def destroy_spill_files() -> int:
    """Cut every file without a name that our raylet has open to nothing; how many there were."""
    assert current.process is not None
    (raylet,) = (info.pid for info in live_sessions() if info.path == current.process.place.session_dir)
    count = 0
    for fd in Path(f"/proc/{raylet}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(fd)
            if name.endswith("(deleted)") and "memfd" not in name and os.stat(fd).st_size:
                os.truncate(fd, 0)
                count += 1
    return count


@ray.remote
def make(marks: Marks, number: int) -> Any:
    marks.add()
    return np.full(MB4, number)


def in_store() -> dict[str, str]:
    """The objects of our node's store, by id, and where each is."""
    assert current.process is not None
    (row,) = current.process.diagnostics.list_stores(100, 30.0)
    return {obj["id"]: obj["state"] for obj in row["list"]}


def keep_six(refs: list[Any]) -> dict[int, Any]:
    """Drop all refs but six, by number, of objects on disk, and wait until no file is written to any more."""
    states = in_store()
    kept = {number: ref for number, ref in enumerate(refs) if states[ref.hex()] == "spilled"}
    kept = dict(list(kept.items())[:6])
    refs.clear()
    eventually(lambda: sorted(in_store()) == sorted(ref.hex() for ref in kept.values()))
    return kept


def test_results_are_made_again(marks: Marks):
    refs = [make.remote(marks, number) for number in range(30)]  # 120 MB
    ray.wait(refs, num_returns=30, fetch_local=False)
    kept = keep_six(refs)
    assert len(kept) == 6 and destroy_spill_files()
    assert {number: int(ray.get(ref)[-1]) for number, ref in kept.items()} == {number: number for number in kept}
    assert 30 < len(marks.lines()) <= 36


def fill_with_views() -> list[Any]:
    """Arrays that leave no room to bring anything back from disk."""
    return [ray.get(ray.put(np.zeros(MB4))) for _ in range(INIT["object_store_memory"] // (4 << 20) - 1)]


def lent() -> int:
    """How often our node's store had an object read past it."""
    assert current.process is not None
    (row,) = current.process.diagnostics.list_stores(0, 30.0)
    return int(row["lent"])


def test_results_that_are_read_past_the_store_are_made_again(marks: Marks):
    refs = [make.remote(marks, number) for number in range(30)]
    ray.wait(refs, num_returns=30, fetch_local=False)
    kept = keep_six(refs)
    assert len(kept) == 6
    held = fill_with_views()
    ray.wait(list(kept.values()), num_returns=6, timeout=100)  # now they are lent
    assert lent() >= 6 and destroy_spill_files()
    del held
    assert {number: int(ray.get(ref)[-1]) for number, ref in kept.items()} == {number: number for number in kept}
    assert 30 < len(marks.lines()) <= 36


def test_puts_that_are_read_past_the_store_are_lost_with_the_reason():
    kept = keep_six([ray.put(np.full(MB4, number)) for number in range(30)])
    held = fill_with_views()
    ray.wait(list(kept.values()), num_returns=6, timeout=100)
    assert lent() >= 6 and destroy_spill_files()
    for ref in kept.values():
        with pytest.raises(exceptions.ObjectLostError, match=r"replicas=2.*the file ended .* early \(past the store\)"):
            ray.get(ref)
    del held


def test_puts_are_not(marks: Marks):
    kept = keep_six([ray.put(np.full(MB4, number)) for number in range(30)])
    assert len(kept) == 6 and destroy_spill_files()
    for ref in kept.values():
        with pytest.raises(exceptions.ObjectLostError, match="replicas=2"):
            ray.get(ref)
    assert ray.get([make.remote(marks, number) for number in range(3)])[2][0] == 2
