"""RuntimeContext answers as Ray's does, in a driver, a task and an actor."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from hpcray.api.runtime_context import ContextSource, RunningActor, RunningTask, RuntimeContext
from hpcray.common.ids import make_proc
from hpcray.common.resources import UNIT, Resources
from hpcray.protocol.messages import JobInfo


@dataclass
class Source:
    kind: str = "driver"
    me: bytes = field(default_factory=lambda: make_proc(1, 2))
    node_id: str = "ab" * 14
    job: JobInfo | None = field(default_factory=lambda: JobInfo("01000000", "space", (), "/"))
    session_dir: str = "/tmp/base/0123abcd"
    task: RunningTask | None = None
    actor: RunningActor | None = None
    held: Resources = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    devices: dict[str, list[str]] = field(default_factory=dict)
    group: tuple[str, bool] = ("", False)

    def running_task(self) -> RunningTask | None:
        return self.task

    def running_actor(self) -> RunningActor | None:
        return self.actor

    def held_resources(self) -> Resources:
        return self.held

    def environment(self) -> Mapping[str, Any]:
        return {"env_vars": self.env} if self.env else {}

    def accelerator_ids(self) -> Mapping[str, list[str]]:
        return self.devices

    def node_labels(self) -> Mapping[str, str]:
        return {"zone": "a"}

    def placement_group(self) -> tuple[str, bool]:
        return self.group


def context(source: ContextSource | None) -> RuntimeContext:
    return RuntimeContext(lambda: source)


TASK = RunningTask(b"\x07" * 13, "my name", "module.f")
ACTOR = RunningActor(b"\x08" * 13, "", 0, False, lambda: "handle")


def test_the_placement_group_is_that_of_the_process() -> None:
    asked = RuntimeContext(lambda: Source(group=("ab" * 13, True)))
    assert asked.get_placement_group_id() == "ab" * 13
    assert asked.should_capture_child_tasks_in_placement_group is True


def test_the_context_of_a_driver_has_no_task(caplog: pytest.LogCaptureFixture) -> None:
    asked = context(Source())
    assert asked.get_node_id() == "ab" * 14
    assert asked.get_worker_id() == make_proc(1, 2).hex()
    assert (asked.get_job_id(), asked.namespace, asked.gcs_address) == ("01000000", "space", "/tmp/base/0123abcd")
    assert asked.get_temp_dir() == "/tmp/base"
    assert asked.get_node_labels() == {"ray.io/node-id": "ab" * 14, "zone": "a"}
    assert (asked.get_actor_id(), asked.get_actor_name(), asked.get_placement_group_id()) == (None, None, None)
    assert (asked.runtime_env, asked.get_runtime_env_string()) == ({}, "{}")
    assert asked.should_capture_child_tasks_in_placement_group is False
    with caplog.at_level(logging.WARNING):
        assert asked.get_task_id() is None
    assert "only available in tasks and actors" in caplog.text
    with pytest.raises(AssertionError):
        asked.get_assigned_resources()
    with pytest.raises(AssertionError):
        _ = asked.was_current_actor_reconstructed
    with pytest.raises(RuntimeError, match="only available in an actor"):
        _ = asked.current_actor
    with pytest.raises(RuntimeError, match="driver"):
        asked.is_canceled()


def test_the_context_of_a_task_names_the_task() -> None:
    source = Source("worker", task=TASK, held={"CPU": UNIT, "GPU": UNIT // 2}, devices={"GPU": ["3"], "odd": ["x"]})
    source.env = {"A": "1"}
    asked = context(source)
    assert asked.get_task_id() == TASK.id.hex()
    assert (asked.get_task_name(), asked.get_task_function_name()) == ("my name", "module.f")
    assert asked.get_assigned_resources() == {"CPU": 1.0, "GPU": 0.5}
    ids = asked.get_accelerator_ids()
    assert (ids["GPU"], ids["TPU"], ids["odd"]) == (["3"], [], ["x"])
    assert json.loads(asked.get_runtime_env_string()) == asked.runtime_env == {"env_vars": {"A": "1"}}
    assert asked.is_canceled() is False
    source.task = RunningTask(TASK.id, "n", "f", cancelled=True)
    assert asked.is_canceled() is True
    assert asked.get_actor_id() is None


def test_the_context_of_an_actor_names_the_actor() -> None:
    asked = context(Source("worker", task=TASK, actor=ACTOR))
    assert (asked.get_actor_id(), asked.get_actor_name()) == (ACTOR.id.hex(), "")
    assert asked.current_actor == "handle"
    assert asked.was_current_actor_reconstructed is False
    assert asked.get_assigned_resources() == {}
    restarted = RunningActor(ACTOR.id, "n", 2, True, lambda: None)
    asked = context(Source("worker", task=TASK, actor=restarted))
    assert asked.was_current_actor_reconstructed is True
    with pytest.raises(RuntimeError, match="async actor"):
        asked.is_canceled()


def test_the_context_without_a_session_raises() -> None:
    asked = context(None)
    for call in (asked.get_node_id, asked.get_job_id, asked.get_task_id, asked.get_actor_id, asked.get_accelerator_ids):
        with pytest.raises(RuntimeError, match=r"not been initialized; hint: call init\(\)"):
            call()


def test_deprecated_names_still_answer() -> None:
    asked = context(Source("worker", task=TASK, actor=ACTOR))
    with pytest.warns(DeprecationWarning, match=r"job_id is deprecated. Use get_job_id\(\)"):
        assert asked.job_id == asked.job_id.hex() == "01000000"
    with pytest.warns(DeprecationWarning):
        task, actor, node = asked.task_id, asked.actor_id, asked.node_id
    assert task is not None
    assert actor is not None
    assert (task.binary(), actor.binary(), node.is_nil()) == (TASK.id, ACTOR.id, False)
    with pytest.warns(DeprecationWarning):
        found = asked.get()
    assert found == {"job_id": "01000000", "node_id": node, "namespace": "space", "task_id": task, "actor_id": actor}
    with pytest.warns(DeprecationWarning):
        assert asked.get_resource_ids() == asked.get_accelerator_ids()
    with pytest.warns(DeprecationWarning):
        assert asked.current_placement_group_id is None
