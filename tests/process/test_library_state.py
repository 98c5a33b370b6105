"""The state of the process and the cluster that Ray's libraries read by private names."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
from engine import PATIENCE, eventually
from losing import lose

import hpcray as ray
from hpcray.compat.names.ids import NodeID
from hpcray.compat.names.internal_api import (
    get_local_ongoing_lineage_reconstruction_tasks,
    get_memory_info_reply,
    get_state_from_address,
)
from hpcray.compat.names.state import ALIVE, GcsClient, state
from hpcray.compat.names.worker import _GlobalNode, _mode, _post_init_hooks, global_worker
from hpcray.runtime.core_worker.core_worker import need_process

pytestmark = pytest.mark.usefixtures("session")
STORE = 48 << 20
INIT = {"num_cpus": 2, "object_store_memory": STORE, "labels": {"region": "us"}}


def test_what_the_stores_have_spilled_and_restored() -> None:
    before = get_memory_info_reply(get_state_from_address()).store_stats
    assert before.object_store_bytes_avail >= STORE
    refs = [ray.put(np.full(1 << 19, number)) for number in range(24)]  # 96 MiB
    assert [int(ray.get(ref)[0]) for ref in refs] == list(range(24))
    after = get_memory_info_reply().store_stats
    assert after.spilled_bytes_total - before.spilled_bytes_total >= STORE and after.spill_time_total_s > 0
    assert after.restored_bytes_total > before.restored_bytes_total and after.restore_time_total_s > 0
    assert after.spilled_objects_total >= 12 and after.num_local_objects >= 24
    assert 0 < after.object_store_bytes_used <= after.object_store_bytes_avail


class TestReconstruction:
    def test_tasks_that_run_again_bear_their_labels(self, tmp_path: Any) -> None:
        gate, opened = tmp_path / "gate", tmp_path / "opened"
        gate.write_text("")

        @ray.remote
        def make() -> Any:
            while not gate.exists():
                threading.Event().wait(0.01)
            return np.zeros(1 << 18)

        @ray.remote
        class Maker:
            def make(self) -> Iterator[Any]:
                while not gate.exists():
                    threading.Event().wait(0.01)
                yield np.zeros(1 << 18)

        task = make.options(_labels={"operator": "map_3"}).remote()
        maker = Maker.options(max_restarts=1, max_task_retries=1).remote()
        values = list(maker.make.options(_labels={"actor": "a"}).remote())
        ray.wait([task, *values], num_returns=2)
        assert get_local_ongoing_lineage_reconstruction_tasks() == []
        gate.rename(opened)
        lose(task, *values)
        again = [ray.remote(lambda box: len(ray.get(box[0]))).remote([ref]) for ref in (task, *values)]

        def labels() -> list[tuple[dict[str, str], int]]:
            return sorted(
                ((found.labels, count) for found, count in get_local_ongoing_lineage_reconstruction_tasks()),
                key=str,
            )

        assert eventually(lambda: len(labels()) == 2)
        assert labels() == [({"actor": "a"}, 1), ({"operator": "map_3"}, 1)]
        opened.rename(gate)
        assert ray.get(again, timeout=PATIENCE) == [1 << 18] * 2
        assert get_local_ongoing_lineage_reconstruction_tasks() == []


class TestGcsClient:
    def test_nodes_and_their_resources(self) -> None:
        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        ((ident, info),) = client.get_all_node_info(timeout=3).items()
        assert ident.hex() == ray.get_runtime_context().get_node_id() and info.node_id == ident.binary()
        assert info.state == ALIVE and info.is_head_node and info.labels["region"] == "us"
        assert info.resources_total["CPU"] == 2.0 and info.node_name and info.instance_id == ""
        (usage,) = client.get_all_resource_usage(timeout=3).resource_usage_data.batch
        assert usage.node_id == ident.binary() and 0 <= usage.resources_available["CPU"] <= 2
        assert client.check_alive([ident, bytes(28), NodeID(bytes(28))]) == [True, False, False]
        assert client.get_draining_nodes(timeout=3) == state.get_draining_nodes() == {}


class Plain:
    pass


class TestSerializationContext:
    def test_values_as_bytes(self) -> None:
        context = global_worker.get_serialization_context()
        array = context.serialize(np.zeros(1000))
        assert array.total_bytes == len(array.to_bytes()) > 8000 and array.metadata
        assert context.serialize(1).total_bytes == len(context.serialize(1).to_bytes())

    def test_a_reducer_holds_for_values_and_for_cloudpickle(self) -> None:
        context = global_worker.get_serialization_context()
        context._register_cloudpickle_reducer(Plain, lambda value: (str, ("reduced",)))
        try:
            assert ray.get(ray.put(Plain())) == "reduced" == pickle.loads(cloudpickle.dumps(Plain()))
        finally:
            context._unregister_cloudpickle_reducer(Plain)
        assert type(ray.get(ray.put(Plain()))) is type(pickle.loads(cloudpickle.dumps(Plain()))) is Plain
        context._unregister_cloudpickle_reducer(Plain)  # as often as one likes


def test_the_process() -> None:
    core = global_worker.core_worker
    ref = ray.put(b"x" * 1000)
    assert core.get_local_memory_store_bytes_used() >= 1000 and ref is not None
    assert core.get_disable_job_level_lineage_reconstruction() is False
    context = ray.get_runtime_context()
    assert context.worker is global_worker and _mode() == global_worker.mode == 0
    global_worker._filter_logs_by_job = False
    assert ray.get(ray.remote(lambda: ray.get_runtime_context().worker.mode).remote()) == 1


def test_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    node = _GlobalNode(need_process())
    assert node.cluster_id.hex() == ray.get_runtime_context().get_node_id()
    assert os.path.isdir(node.get_logs_dir_path()) and os.access(node.get_logs_dir_path(), os.W_OK)
    assert (node.max_bytes, node.backup_count) == (512 << 20, 5)
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", "1000")
    monkeypatch.setenv("RAY_ROTATION_BACKUP_COUNT", "2")
    assert (node.max_bytes, node.backup_count) == (1000, 2)


def test_hooks_run_after_each_init(request: pytest.FixtureRequest) -> None:
    found: list[str] = []

    def hook() -> None:
        found.append(ray.get(ray.remote(lambda: "inside").remote(), timeout=PATIENCE))

    _post_init_hooks.append(hook)
    try:
        ray.shutdown()
        ray.init(**INIT)
        assert found == ["inside"]
    finally:
        _post_init_hooks.remove(hook)


def test_no_callback_of_on_completed_comes_at_shutdown(capfd: pytest.CaptureFixture[str]) -> None:
    @ray.remote
    def for_ever() -> None:
        threading.Event().wait()

    calls: list[Any] = []
    ref = for_ever.remote()
    ref._on_completed(calls.append)
    ref._on_ready(calls.append)
    future = ref.future()
    ray.shutdown()
    with pytest.raises(ray.exceptions.RayError):
        future.result(PATIENCE)
    assert calls == [] and "Traceback" not in capfd.readouterr().err
    ray.init(logging_level=logging.WARNING, **INIT)
