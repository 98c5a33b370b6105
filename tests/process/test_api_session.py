"""init and shutdown: once, twice, again, by itself."""

from __future__ import annotations

import os

import numpy as np
import pytest
from engine import PATIENCE, alive, eventually, exceptions, hpcray_only, ray, start


@ray.remote
def square(x):
    return x * x


@ray.remote
class Counter:
    def __init__(self):
        self.value = 0

    def add(self):
        self.value += 1
        return self.value

    def pid(self):
        return os.getpid()


@pytest.fixture(autouse=True)
def always_shut_down():
    assert not ray.is_initialized()
    yield
    ray.shutdown()


def test_functions_and_classes_are_used_in_session_after_session():
    for cycle in range(3):
        assert ray.is_initialized() is False
        start(num_cpus=2)
        assert ray.is_initialized() is True
        assert ray.get([square.remote(i) for i in range(20)]) == [i * i for i in range(20)]
        counter = Counter.remote()
        assert ray.get([counter.add.remote(), counter.add.remote()]) == [1, 2]
        assert ray.get(ray.put(np.full(200_000, cycle)))[0] == cycle
        ray.shutdown()


def test_twice():
    context = start(num_cpus=1)
    with pytest.raises(RuntimeError, match="ignore_reinit_error"):
        start(num_cpus=1)
    again = start(num_cpus=7, ignore_reinit_error=True)
    assert again.address_info["address"] == context.address_info["address"]
    assert ray.cluster_resources()["CPU"] == 1
    ray.shutdown()
    ray.shutdown()
    assert not ray.is_initialized()


def test_as_a_context_manager():
    with start(num_cpus=1) as context:
        assert ray.is_initialized()
        assert context.address_info["node_id"] == ray.get_runtime_context().get_node_id()
        assert ray.get(square.remote(3)) == 9
    assert not ray.is_initialized()


def test_no_worker_is_left():
    start(num_cpus=2)
    counter = Counter.remote()
    pids = [ray.get(counter.pid.remote()), ray.get(ray.remote(lambda: os.getpid()).remote())]
    ray.shutdown()
    eventually(lambda: not any(alive(pid) for pid in pids))


def test_options():
    start(
        num_cpus=3, num_gpus=0, resources={"special": 2}, object_store_memory=128 << 20, namespace="mine",
        log_to_driver=False, logging_level="warning", configure_logging=False,
        runtime_env={"env_vars": {"HPCRAY_A": "1"}},
    )  # fmt: skip
    total = ray.cluster_resources()
    assert (total["CPU"], total["special"]) == (3, 2)
    assert total["object_store_memory"] == 128 << 20
    assert ray.get_runtime_context().namespace == "mine"
    assert ray.get(ray.remote(lambda: os.environ["HPCRAY_A"]).remote()) == "1"
    assert ray.get(Counter.remote().__ray_call__.remote(lambda self: os.environ["HPCRAY_A"])) == "1"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_cpus": -1}, ValueError),
        ({"resources": {"CPU": 1}}, Exception),
        ({"bogus_argument": 1}, (TypeError, RuntimeError)),
    ],
    ids=str,
)
def test_bad_options(options, error):
    with pytest.raises(error):
        start(**options)
    ray.shutdown()
    assert not ray.is_initialized()


def test_nothing_to_attach_to():
    with pytest.raises(ConnectionError):
        ray.init(address="auto")
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    "use",
    [lambda: ray.get(ray.put(1)), lambda: ray.get(square.remote(1)), lambda: ray.get(Counter.remote().add.remote())],
    ids=["put", "task", "actor"],
)
def test_the_first_use_starts_a_session(use):
    assert use() == 1
    assert ray.is_initialized()


def test_dead_handles_and_refs_of_an_earlier_session():
    start(num_cpus=1)
    counter, ref, array = Counter.remote(), ray.put("old"), ray.get(ray.put(np.arange(200_000)))
    ray.get(counter.add.remote())
    ray.shutdown()
    assert array[-1] == 199_999  # still mapped
    assert ref.hex()
    start(num_cpus=1)
    with pytest.raises(Exception) as caught:
        ray.get(counter.add.remote(), timeout=PATIENCE)
    assert not isinstance(caught.value, exceptions.GetTimeoutError)
    assert ray.get(square.remote(2)) == 4
    del ref, counter, array


@hpcray_only
def test_refs_of_an_earlier_session_are_errors():
    start(num_cpus=1)
    ref = ray.put("old")
    ray.shutdown()
    start(num_cpus=1)
    with pytest.raises(exceptions.RayError) as caught:
        ray.get(ref, timeout=PATIENCE)
    assert not isinstance(caught.value, exceptions.GetTimeoutError)


@hpcray_only
def test_a_get_without_a_session():
    start(num_cpus=1)
    ref = ray.put(1)
    ray.shutdown()
    with pytest.raises(exceptions.RayError):
        ray.get(ref, timeout=PATIENCE)


@hpcray_only
def test_sessions_leave_no_descriptors():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def cycle():
        with start(num_cpus=1):
            assert ray.get(square.remote(2)) == 4

    cycle()
    before = descriptors()
    for _ in range(6):
        cycle()
    assert descriptors() <= before


def _working_directory_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    return FileNotFoundError, {}


def _hook_that_fails(monkeypatch, tmp_path):
    from hpcray.api import session

    monkeypatch.setattr(session, "post_init_hooks", [lambda: 1 / 0])
    return ZeroDivisionError, {}


def _no_such_tracing_hook(monkeypatch, tmp_path):
    return Exception, {"_tracing_startup_hook": "no_such_module_at_all:start"}


def _interrupted(monkeypatch, tmp_path):
    from hpcray.api import session

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "post_init_hooks", [interrupt])
    return KeyboardInterrupt, {}


def _not_connected(monkeypatch, tmp_path):
    from hpcray.runtime.core_worker import interruptions

    def fail(*_):
        raise ValueError("in the middle of the connection")

    monkeypatch.setattr(interruptions, "forward_to_raylet", fail)
    return ValueError, {}


@hpcray_only
@pytest.mark.parametrize(
    "spoil",
    [_working_directory_gone, _hook_that_fails, _no_such_tracing_hook, _interrupted, _not_connected],
    ids=lambda function: function.__name__.strip("_"),
)
def test_an_init_that_fails_half_way_leaves_no_session(spoil, monkeypatch, tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as spoiled:
        error, options = spoil(spoiled, tmp_path)
        with pytest.raises(error):
            start(num_cpus=1, **options)
    assert not ray.is_initialized()
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2  # those of the process, not of the session
    start(num_cpus=1)
    assert ray.get(square.remote(3)) == 9


@hpcray_only
def test_a_first_use_that_fails_half_way_leaves_no_session(monkeypatch):
    with monkeypatch.context() as spoiled:
        from hpcray.api import session

        spoiled.setattr(session, "post_init_hooks", [lambda: 1 / 0])
        with pytest.raises(ZeroDivisionError):
            ray.put(1)
    assert not ray.is_initialized()
    assert ray.get(ray.put(1)) == 1
