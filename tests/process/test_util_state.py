"""The state API, and the timeline: what there is, what runs, what has run."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
import time

import numpy as np
import pytest
from engine import IS_HPCRAY, NAME, PATIENCE, Marks, eventually, hpcray_only, ray

if IS_HPCRAY:
    from click.testing import CliRunner

    from hpcray.cli.__main__ import main
    from hpcray.state.schemas import SummaryApiOptions, SummaryResource
    from hpcray.util import state
    from hpcray.util.state import RayStateApiException
else:
    from ray.util import state
    from ray.util.state.exception import RayStateApiException

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2}


@ray.remote
class Counter:
    def pid(self):
        return os.getpid()

    def fail(self):
        raise ValueError("as the test wants it")

    def wait(self, marks):
        marks.add()
        time.sleep(600)


@ray.remote
def work(seconds, marks=None):
    if marks is not None:
        marks.add()
    time.sleep(seconds)


@ray.remote
def after(value):
    return value


def states_of(refs, name):
    rows = {row.task_id: row.state for row in state.list_tasks(limit=10_000) if row.name == name}
    return [rows.get(ref.task_id().hex()) for ref in refs]


def test_actors_are_listed_by_state():
    counter = Counter.options(name="one", num_cpus=0).remote()
    pid = ray.get(counter.pid.remote())
    ident = counter._actor_id.hex()
    row = state.get_actor(ident)
    assert (row.actor_id, row.class_name, row.state, row.name, row.pid) == (ident, "Counter", "ALIVE", "one", pid)
    assert row.node_id == ray.get_runtime_context().get_node_id() and row["state"] == "ALIVE"
    assert row.job_id == ray.get_runtime_context().get_job_id()
    assert [one.actor_id for one in state.list_actors(filters=[("name", "=", "one")])] == [ident]
    assert ident not in [one.actor_id for one in state.list_actors(filters=[("actor_id", "!=", ident)])]
    assert state.list_actors(filters=[("state", "=", "alive"), ("name", "=", "one")]), (
        "the case of letters is no matter"
    )
    assert state.list_actors()[0].death_cause is None
    ray.kill(counter)
    eventually(lambda: state.get_actor(ident).state == "DEAD")
    context = state.get_actor(ident).death_cause["actor_died_error_context"]
    assert "kill" in context["error_message"] and context["ray_namespace"] == row.ray_namespace
    assert (context["class_name"], context["actor_id"], context["name"]) == ("Counter", ident, "one")
    assert state.list_actors(filters=[("name", "=", "one"), ("state", "=", "ALIVE")]) == []
    assert state.get_actor("00" * 13) is None


def test_limits_and_wrong_filters_of_the_state_api(monkeypatch: pytest.MonkeyPatch):
    counters = [Counter.options(num_cpus=0).remote() for _ in range(3)]
    ray.get([counter.pid.remote() for counter in counters])
    assert len(state.list_actors(limit=2)) == 2
    listed = [row.actor_id for row in state.list_actors()]
    assert listed == sorted(listed)
    for wrong in ([("state", ">", "ALIVE")], ["state"]):
        with pytest.raises(ValueError):
            state.list_actors(filters=wrong)
    for options in ({"filters": [("nothing", "=", "x")]}, {"filters": [("is_detached", "=", 1)]}, {"limit": 1 << 30}):
        with pytest.raises(RayStateApiException):
            state.list_actors(**options)
    assert state.list_actors(limit=0) == []
    with pytest.raises(RayStateApiException, match="limit 40000 exceeds the supported limit 10000"):
        state.list_actors(limit=40_000)
    monkeypatch.setenv("RAY_MAX_LIMIT_FROM_API_SERVER", "40000")  # as programs do between their imports and `init`
    assert len(state.list_actors(limit=40_000)) >= 2
    with pytest.warns(UserWarning, match="multiple '=' filters"):
        assert state.list_actors(filters=[("state", "=", "ALIVE"), ("state", "=", "DEAD")]) == []
    assert state.list_nodes(filters=[("is_head_node", "=", "true")]) == state.list_nodes(
        filters=[("STATE", "=", "alive")]
    )
    del counters


@hpcray_only
def test_each_attempt_of_a_task_is_a_row(tmp_path):
    @ray.remote(max_retries=2, retry_exceptions=True)
    def flaky():
        (tmp_path / str(time.time_ns())).touch()
        if len(list(tmp_path.iterdir())) < 3:
            raise ValueError("not yet")

    ref = flaky.remote()
    ray.get(ref)
    attempts = state.get_task(ref)
    assert [(row.attempt_number, row.state) for row in attempts] == [(0, "FAILED"), (1, "FAILED"), (2, "FINISHED")]
    assert attempts[0].error_type == "TASK_EXECUTION_EXCEPTION" and "not yet" in attempts[0].error_message
    assert [event["state"] for event in attempts[2].events] == ["RUNNING", "FINISHED"]
    assert attempts[2].error_message is None
    assert state.list_tasks(filters=[("task_id", "=", attempts[0].task_id)])[0].error_message is None, "a detail"


@hpcray_only
def test_each_attempt_that_died_with_its_worker_is_a_row(tmp_path):
    def dies_twice():
        (tmp_path / f"{os.getpid()}").touch()
        if len(list(tmp_path.iterdir())) < 3:
            os._exit(1)

    ref = ray.remote(max_retries=2)(dies_twice).remote()
    ray.get(ref)
    attempts = state.get_task(ref)
    assert [(row.attempt_number, row.state) for row in attempts] == [(0, "FAILED"), (1, "FAILED"), (2, "FINISHED")]
    assert [row.error_type for row in attempts] == ["WORKER_DIED", "WORKER_DIED", None]
    assert "exit code 1" in attempts[0].error_message
    assert str(attempts[0].worker_pid) != str(attempts[1].worker_pid)

    @ray.remote(num_cpus=0, max_restarts=2, max_task_retries=-1)
    class Dies:
        def twice(self):
            if len(list(tmp_path.iterdir())) < 5:
                (tmp_path / f"{time.time_ns()}").touch()
                os._exit(1)

    actor = Dies.remote()
    call = actor.twice.remote()
    ray.get(call)
    attempts = state.get_task(call)
    assert [(row.attempt_number, row.state) for row in attempts] == [(0, "FAILED"), (1, "FAILED"), (2, "FINISHED")]
    assert [row.error_type for row in attempts] == ["ACTOR_DIED", "ACTOR_DIED", None]


@hpcray_only
def test_tasks_of_workers_that_have_ended_are_listed():
    @ray.remote(max_calls=1)
    def once():
        return os.getpid()

    @ray.remote(num_cpus=0)
    class Leaves:
        def works(self):
            return os.getpid()

        def fails(self):
            raise ValueError("on purpose")

        def leaves(self):
            ray.actor.exit_actor()

    actor = Leaves.remote()
    refs = [once.remote(), actor.works.remote(), actor.fails.remote()]
    pids = [ray.get(ref) for ref in refs[:2]]
    ray.wait([actor.leaves.remote(), refs[2]], num_returns=2)
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    rows = [state.get_task(ref) for ref in refs]
    assert [row.state for row in rows] == ["FINISHED", "FINISHED", "FAILED"]
    assert [row.worker_pid for row in rows] == [*pids, pids[1]]
    assert [row.actor_id is None for row in rows] == [True, False, False]
    assert "on purpose" in rows[2].error_message and rows[0].start_time_ms <= rows[0].end_time_ms


@hpcray_only
def test_tasks_whose_worker_died_have_failed():
    @ray.remote(max_retries=0, num_cpus=0)
    def crash():
        os._exit(1)

    crashed = crash.remote()
    counter = Counter.options(num_cpus=0).remote()
    ray.get(counter.pid.remote())
    ray.kill(counter)
    late = counter.pid.remote()
    cancelled = after.options(num_cpus=1000).remote(1)
    ray.cancel(cancelled)
    ray.wait([crashed, late, cancelled], num_returns=3)
    rows = [state.get_task(ref) for ref in (crashed, late, cancelled)]
    assert [row.state for row in rows] == ["FAILED"] * 3
    assert [row.error_type for row in rows] == ["WORKER_DIED", "ACTOR_DIED", "TASK_CANCELLED"]
    assert "crash" in rows[0].error_message

    @ray.remote(num_cpus=0)
    def passes():
        return 0

    ray.get(passes.remote())
    ref = passes.remote()  # it is at its worker when it is cancelled, or has run
    ray.cancel(ref)
    ray.wait([ref])
    assert state.get_task(ref).state in ("FINISHED", "FAILED")
    assert (rows[1].name, rows[1].type, rows[1].actor_id) == ("Counter.pid", "ACTOR_TASK", counter._actor_id.hex())


@hpcray_only
def test_the_creation_of_an_actor_is_a_task(marks: Marks):
    @ray.remote(num_cpus=0, max_concurrency=2)
    class Made:
        def __init__(self, wrong=False):
            if wrong:
                raise ValueError("as the test wants it")

        def wait(self, marks):
            marks.add()
            time.sleep(600)

    good, bad, never = Made.remote(), Made.remote(True), Made.options(num_cpus=1000).remote()
    calls = [good.wait.remote(marks) for _ in range(4)]
    eventually(lambda: len(marks.lines()) == 2)
    eventually(lambda: state.get_actor(bad._actor_id.hex()).state == "DEAD")
    rows = {row.actor_id: row for row in state.list_tasks(filters=[("name", "=", "Made.__init__")], detail=True)}
    found = [rows[actor._actor_id.hex()] for actor in (good, bad, never)]
    assert [row.state for row in found] == ["FINISHED", "FAILED", "PENDING_NODE_ASSIGNMENT"]
    assert {row.type for row in found} == {"ACTOR_CREATION_TASK"}
    assert "constructor" in found[1].error_message and found[2].required_resources == {"CPU": 1000}
    states = [row.state for row in state.list_tasks(filters=[("name", "=", "Made.wait")])]
    assert sorted(states) == ["PENDING_ACTOR_TASK_ORDERING_OR_CONCURRENCY"] * 2 + ["RUNNING"] * 2
    (row,) = state.get_objects(calls[3].hex())
    assert row.task_status == "PENDING_ACTOR_TASK_ORDERING_OR_CONCURRENCY"
    ray.kill(good)
    eventually(lambda: state.get_actor(good._actor_id.hex()).state == "DEAD")
    assert state.get_task(good._actor_id.hex()).state == "FINISHED"
    del never


@hpcray_only
def test_tasks_know_the_task_that_started_them():
    @ray.remote(num_cpus=0)
    def child():
        return ray.get_runtime_context().get_task_id()

    @ray.remote(num_cpus=0)
    def parent():
        return ray.get_runtime_context().get_task_id(), ray.get(child.remote())

    mine, childs = ray.get(parent.remote())
    eventually(lambda: state.get_task(childs) is not None)
    assert state.get_task(childs).parent_task_id == mine
    assert state.get_task(mine).parent_task_id.startswith("f" * 40)
    by_lineage = SummaryApiOptions(summary_by="lineage")
    summary = state.StateApiClient().summary(SummaryResource.TASKS, options=by_lineage)["cluster"]["summary"]
    assert any([one["key"] for one in group["children"]] == [childs] for group in summary if group["key"] == mine)


def test_nodes_workers_jobs_and_placement_groups_are_listed():
    (node,) = state.list_nodes()
    assert node.state == "ALIVE" and node.is_head_node and node.resources_total["CPU"] == 2
    assert state.get_node(node.node_id).node_ip == node.node_ip
    pid = ray.get(ray.remote(os.getpid).remote())
    workers = {row.pid: row for row in state.list_workers(limit=1000)}
    assert workers[pid].worker_type == "WORKER" and workers[pid].node_id == node.node_id
    assert workers[os.getpid()].worker_type == "DRIVER"
    assert state.get_worker(workers[pid].worker_id).pid == pid
    (job,) = state.list_jobs()
    assert job.job_id == ray.get_runtime_context().get_job_id() and job.status == "RUNNING"
    assert job.driver_info["pid"] == str(os.getpid()) and job.entrypoint == " ".join(sys.orig_argv)
    assert node.node_name == ray.nodes()[0]["NodeName"]
    group = ray.util.placement_group([{"CPU": 1}], name="g")
    assert group.wait(PATIENCE)
    row = state.get_placement_group(group.id.hex())
    assert (row.name, row.state) == ("g", "CREATED") and row.bundles[0]["unit_resources"]["CPU"] == 1
    ray.util.remove_placement_group(group)


@hpcray_only
def test_tasks_have_states_from_submission_to_end(marks: Marks):
    running = [work.remote(600, marks), work.remote(600, marks)]
    eventually(lambda: len(marks.lines()) == 2)
    queued, waiting = work.remote(0), after.remote(running[0])
    eventually(lambda: states_of(running, "work") == ["RUNNING"] * 2)
    assert states_of([queued], "work") == ["PENDING_NODE_ASSIGNMENT"]
    assert states_of([waiting], "after") == ["PENDING_ARGS_AVAIL"]
    row = state.get_task(running[0].task_id().hex())
    assert row.type == "NORMAL_TASK" and row.worker_pid and row.required_resources == {"CPU": 1.0}
    assert abs(row.start_time_ms / 1000 - time.time()) < PATIENCE
    for ref in (*running, queued, waiting):
        ray.cancel(ref)
    counter = Counter.options(num_cpus=0).remote()
    good, bad = counter.pid.remote(), counter.fail.remote()
    ray.wait([good, bad], num_returns=2)
    eventually(lambda: states_of([good], "Counter.pid") == ["FINISHED"])
    assert states_of([bad], "Counter.fail") == ["FAILED"]
    row = state.get_task(bad.task_id().hex())
    assert row.type == "ACTOR_TASK" and row.error_type and row.end_time_ms >= row.start_time_ms
    call = counter.wait.remote(marks)
    eventually(lambda: states_of([call], "Counter.wait") == ["RUNNING"])
    summary = state.summarize_tasks()["cluster"]["summary"]
    assert summary["Counter.wait"]["state_counts"] == {"RUNNING": 1}
    ray.kill(counter)


def test_objects_are_listed_with_size_and_type():
    small, large = ray.put(b"x"), ray.put(np.ones(1 << 20))
    rows = {row.object_id: row for row in state.list_objects(limit=10_000)}
    assert rows[large.hex()].object_size >= 8 << 20 and rows[large.hex()].pid == os.getpid()
    assert rows[large.hex()].type.upper() == "DRIVER"
    (row,) = state.get_objects(small.hex())
    assert row.reference_type == "LOCAL_REFERENCE"
    assert state.summarize_objects()["cluster"]["total_objects"] >= 2


def test_actors_are_counted_by_class_and_state():
    counters = [Counter.options(num_cpus=0).remote() for _ in range(2)]
    ray.get([counter.pid.remote() for counter in counters])
    known = state.summarize_actors()["cluster"]["summary"]["Counter"]
    assert known["class_name"] == "Counter" and known["state_counts"]["ALIVE"] >= 2
    del counters


def test_the_timeline_has_a_span_per_task(tmp_path):
    start = time.time()
    ray.get([work.options(name="named").remote(0.05) for _ in range(6)])

    def spans():
        return [event for event in ray.timeline() if event.get("ph") == "X" and "named" in event["name"]]

    if not IS_HPCRAY:
        eventually(lambda: len(spans()) >= 6)
        return
    found = spans()
    assert len(found) == 6
    for event in found:
        assert 0.05e6 <= event["dur"] < PATIENCE * 1e6
        assert start - 1 <= event["ts"] / 1e6 <= time.time() + 1
    busy = sum(event["dur"] for event in found) / 1e6
    assert busy >= 0.3
    ends: dict[str, float] = {}
    for event in sorted(found, key=lambda event: event["ts"]):
        assert event["ts"] >= ends.get(event["tid"], 0.0), "two at once are shown in two rows"
        ends[event["tid"]] = event["ts"] + event["dur"]
    assert ray.timeline(str(tmp_path / "trace.json")) is None
    assert len(json.loads((tmp_path / "trace.json").read_text())) >= 6


@hpcray_only
def test_the_timeline_shows_running_tasks(marks: Marks):
    ref = work.options(name="endless").remote(600, marks)
    eventually(marks.lines)
    (event,) = eventually(lambda: [e for e in ray.timeline() if e["name"] == "endless"])
    assert event["args"]["running"]
    ray.cancel(ref)


@hpcray_only
def test_list_summary_and_timeline_print_the_state_api(tmp_path):
    counter = Counter.options(name="shown", num_cpus=0).remote()
    ray.get(counter.pid.remote())

    def run(*args):
        shown = CliRunner().invoke(main, list(args))
        assert shown.exit_code == 0, shown.output
        return shown.output

    text = run("list", "actors", "--filter", "name=shown")
    assert "class_name" in text and "shown" in text and text.splitlines()[-1].startswith("1 of")
    assert json.loads(run("list", "actors", "-f", "name=shown", "--json"))[0]["state"] == "ALIVE"
    assert "Counter" in run("summary", "actors")
    run("timeline", str(tmp_path / "t.json"))
    assert json.loads((tmp_path / "t.json").read_text())
    ray.kill(counter)


def test_a_call_that_ends_its_actor_on_purpose_has_finished():
    @ray.remote(num_cpus=0)
    class Mortal:
        def leave(self):
            ray.actor.exit_actor()

        def exit(self, code):
            sys.exit(code)

        def ask(self, refs):
            ray.get(refs[0])

    @ray.remote(num_cpus=0)
    class AsyncMortal:
        async def leave(self):
            ray.actor.exit_actor()

    def run(name, method, *args):
        with pytest.raises(ray.exceptions.RayError):
            ray.get(method.options(name=name).remote(*args))

    run("leave plainly", Mortal.remote().leave)
    run("leave in a coroutine", AsyncMortal.remote().leave)
    run("exit with 0", Mortal.remote().exit, 0)
    run("exit with 3", Mortal.remote().exit, 3)
    run("ask one that leaves", Mortal.remote().ask, [Mortal.remote().leave.remote()])

    def states():
        rows = {row.name: row for row in state.list_tasks(detail=True, limit=10_000)}
        names = ("leave plainly", "leave in a coroutine", "exit with 0", "exit with 3", "ask one that leaves")
        return [(rows[name].state, rows[name].error_type) for name in names]

    finished, died = ("FINISHED", None), ("FAILED", "ACTOR_DIED")
    eventually(lambda: states() == [finished, finished, finished, died, ("FAILED", "TASK_EXECUTION_EXCEPTION")])


def test_workers_that_have_ended_say_how():
    @ray.remote(num_cpus=0, max_retries=0)
    def crash(number):
        os.kill(os.getpid(), number)

    @ray.remote(num_cpus=0)
    class Mortal:
        def __init__(self, fail=False):
            if fail:
                raise ValueError("not this time")

        def worker(self):
            return ray.get_runtime_context().get_worker_id()

        def leave(self):
            ray.actor.exit_actor()

    def ended(worker):
        row = state.get_worker(worker)
        return row if row is not None and not row.is_alive else None

    ref = crash.options(name="crash by signal").remote(signal.SIGKILL)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(ref)
    (task,) = state.list_tasks(filters=[("name", "=", "crash by signal")])
    assert task.state == "FAILED"
    worker = eventually(lambda: ended(task.worker_id))
    assert worker.exit_type == "SYSTEM_ERROR" and "SIGKILL" in worker.exit_detail and worker.pid == task.worker_pid
    for end, kind, detail in (
        (lambda actor: actor.leave.remote(), "INTENDED_USER_EXIT", "exit_actor"),
        (ray.kill, "INTENDED_SYSTEM_EXIT", "ray.kill"),
    ):
        actor = Mortal.remote()
        ident = ray.get(actor.worker.remote())
        end(actor)
        worker = eventually(lambda ident=ident: ended(ident))
        assert worker.exit_type == kind and detail in worker.exit_detail
    endless = ray.remote(num_cpus=0)(lambda: time.sleep(600)).options(name="endless").remote()
    task = eventually(lambda: state.list_tasks(filters=[("name", "=", "endless"), ("state", "=", "RUNNING")]))[0]
    ray.cancel(endless, force=True)
    worker = eventually(lambda: ended(task.worker_id))
    assert worker.exit_type == "INTENDED_USER_EXIT" and "ray.cancel" in worker.exit_detail
    failed = Mortal.remote(fail=True)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(failed.worker.remote())
    eventually(lambda: [one for one in state.list_workers(limit=1000) if one.exit_type == "USER_ERROR"])


@hpcray_only
def test_calls_of_an_async_actor_that_wait_for_their_turn_are_not_running():
    @ray.remote(max_concurrency=1, num_cpus=0)
    class Narrow:
        async def first_call(self):
            await asyncio.sleep(60)

        async def next_call(self):
            return "ran"

    narrow = Narrow.remote()
    first = narrow.first_call.remote()
    waiting = [narrow.next_call.remote() for _ in range(3)]

    def states(name):
        return [row.state for row in state.list_tasks(filters=[("name", "=", f"Narrow.{name}")])]

    eventually(lambda: states("first_call") == ["RUNNING"])
    assert states("next_call") == ["PENDING_ACTOR_TASK_ORDERING_OR_CONCURRENCY"] * 3
    ray.cancel(waiting[0])
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(waiting[0])
    assert sorted(states("next_call")) == ["FAILED", *["PENDING_ACTOR_TASK_ORDERING_OR_CONCURRENCY"] * 2]
    ray.cancel(first)
    assert ray.get(waiting[1:]) == ["ran", "ran"]


@hpcray_only  # which tells the group of actors alone
def test_rows_tell_the_placement_group():
    groups = importlib.import_module(f"{NAME}.util.placement_group")
    strategies = importlib.import_module(f"{NAME}.util.scheduling_strategies")
    group = groups.placement_group([{"CPU": 2}])
    inside = {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group), "num_cpus": 1}
    actor, outside = Counter.options(**inside).remote(), Counter.remote()
    running = work.options(name="of the group", **inside).remote(600)
    ray.get([actor.pid.remote(), outside.pid.remote()])
    ident = group.id.hex()
    found = {row.actor_id: row.placement_group_id for row in state.list_actors(detail=True)}
    assert (found[actor._actor_id.hex()], found[outside._actor_id.hex()]) == (ident, None)

    def of_the_group():
        return [row.placement_group_id for row in state.list_tasks(detail=True) if row.name == "of the group"]

    eventually(lambda: of_the_group() == [ident])
    ray.cancel(running, force=True)
    groups.remove_placement_group(group)


def test_workers_say_when_they_started():
    before = time.time() * 1000
    actor = ray.remote(num_cpus=0)(_Started).remote()
    pid = ray.get(actor.pid.remote())
    (row,) = [one for one in state.list_workers(detail=True, limit=1000) if one.pid == pid]
    assert before - 60_000 < row.start_time_ms <= time.time() * 1000 + 1000
    assert row.worker_launch_time_ms == row.worker_launched_time_ms == row.start_time_ms and row.end_time_ms == 0


class _Started:
    def pid(self):
        return os.getpid()


def test_a_limit_below_zero_is_refused():
    with pytest.raises(state.RayStateApiException, match="limit -1"):
        state.list_tasks(limit=-1)


def test_actors_are_listed_by_what_their_class_says_of_them():
    class Plain:
        async def ready(self):
            return True

    class Named(Plain):
        def __init__(self, name):
            self.name = name

        def __repr__(self):
            return self.name

    class Broken(Plain):
        def __repr__(self):
            raise ValueError("no repr today")

    made = [
        (ray.remote(Plain).remote(), ""),
        (ray.remote(Named).remote("first"), "first"),
        (ray.remote(Named).remote("odd \ud800"), "odd \\ud800"),
        (ray.remote(Named).remote("x" * 2000), "x" * 1000),
        (ray.remote(Broken).remote(), ""),
    ]
    ray.get([actor.ready.remote() for actor, _ in made])
    for actor, name in made:
        assert state.get_actor(id=actor._actor_id.hex()).repr_name == name
