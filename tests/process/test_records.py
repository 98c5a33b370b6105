"""`hpcray dump` and `hpcray replay`: the cores of a job decide the same when they get the same inputs again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from engine import PATIENCE, hpcray_only, ray

from hpcray.cli import observe
from hpcray.diagnostics import record_replay
from hpcray.diagnostics.cluster_query import ClusterQuery
from hpcray.diagnostics.record_replay import Input, Recorder, replay
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.state import recordings

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2, "object_store_memory": 16 << 20, "record": True}


@ray.remote
def echo(value):
    return value


@ray.remote(max_retries=0)
def die():
    os._exit(1)


@ray.remote(num_cpus=0)
class Actor:
    def echo(self, value):
        return value


@pytest.fixture(scope="module")
def work(session):
    """Leases, actors, deaths, a placement group, objects that are spilled and come back."""
    actors = [Actor.options(name=f"a{i}").remote() for i in range(4)]
    blocks = [ray.put(np.full(1 << 17, i)) for i in range(24)]  # 24 MB
    assert [int(ray.get(echo.remote(block))[0]) for block in blocks] == list(range(24))
    ray.get([actor.echo.remote(i) for i, actor in enumerate(actors)])
    for _ in range(2):
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(die.remote())
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    assert group.wait(PATIENCE)
    ray.util.remove_placement_group(group)
    ray.kill(actors[0])
    ray.get([echo.remote(i) for i in range(100)])
    open_refs = [echo.remote(i) for i in range(60)] + [actors[1].echo.remote(i) for i in range(60)]
    while open_refs:
        _, open_refs = ray.wait(open_refs, num_returns=1)
    ray.wait([echo.remote(i) for i in range(20)], num_returns=20, timeout=0.001)
    return actors  # without a handle they would end while they are read


def test_a_replay_of_every_core_makes_the_same_decisions(work, tmp_path: Path):
    found, missing = recordings.fetch(ClusterQuery(need_process(), PATIENCE))
    assert not missing and {record.core for record in found} == {"raylet", "head", "store", "owner"}
    owners = [record for record in found if record.core == "owner"]
    assert len(owners) >= 3, "the driver, and the workers that live"
    recordings.write(tmp_path / "record", found)
    read = recordings.read(tmp_path / "record")
    for done, record in zip(map(replay, read), read, strict=True):
        assert done.steps == len(record.inputs) > (0 if record.core == "owner" else 20)
        assert not done.differences, "\n".join(recordings.show([done]))


def test_a_replay_finds_another_decision(work):
    found, _ = recordings.fetch(ClusterQuery(need_process(), PATIENCE))
    (record,) = [one for one in found if one.core == "raylet"]
    place = next(place for place, given in enumerate(record.inputs) if given.method == "process_died")
    del record.inputs[place]
    (first, *_) = replay(record).differences
    assert first.step >= place and first.then != first.now


def test_dump_writes_a_file_that_replay_reads(work, tmp_path: Path):
    run, file = CliRunner().invoke, str(tmp_path / "r")
    cores = int(re.findall(r"(\d+) cores", run(observe.dump, [file]).output)[0])
    shown = run(observe.replay, [file])
    assert shown.exit_code == 0 and shown.output.count("the same decisions") == cores > 3, shown.output
    assert "node 0 owner process 0." in shown.output
    (tmp_path / "other").write_bytes(b"nothing of ours")
    shown = run(observe.replay, [str(tmp_path / "other")])
    assert shown.exit_code == 1 and "is no record of hpcray" in shown.output


def test_a_full_record_names_the_missing_inputs(monkeypatch: pytest.MonkeyPatch):
    class Core:
        def tick(self, now: float) -> list[object]:
            return []

    monkeypatch.setattr(record_replay, "MOST_INPUTS", 2)
    recorder = Recorder("head", 0, {"config": {}})
    core = Core()
    recorder.wrap(core, "tick")
    for now in range(5):
        core.tick(float(now))
    assert len(recorder.record.inputs) == 2 and recorder.record.forgotten == 3
    assert isinstance(recorder.record.inputs[0], Input)
    assert "last 3 inputs are not in the record" in replay(recorder.record).error
