"""A get that timed out says for what it waited, and what is known of it."""

from __future__ import annotations

import re
import time

import pytest
from engine import PATIENCE, Marks, eventually, exceptions, exit_actor, hpcray_only, ray

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 1}


@ray.remote
def sleeper(seconds, marks=None):
    if marks is not None:
        marks.add()
    time.sleep(seconds)


@ray.remote
def echo(value):
    return value


@ray.remote(num_cpus=0)
class Slow:
    def __init__(self, seconds=0.0):
        time.sleep(seconds)

    def sleep(self, seconds):
        time.sleep(seconds)

    def ask(self, box):
        try:
            ray.get(box, timeout=0.1)
        except exceptions.GetTimeoutError as error:
            return str(error)

    def leave(self):
        exit_actor()


def told(refs, timeout=0.2):
    with pytest.raises(exceptions.GetTimeoutError) as caught:
        ray.get(refs, timeout=timeout)
    assert isinstance(caught.value, TimeoutError)
    return str(caught.value)


def test_tasks_that_run_wait_for_a_worker_or_for_arguments(marks: Marks):
    running = sleeper.remote(60, marks)
    eventually(marks.lines)
    waiting, dependent = sleeper.remote(0), echo.remote(running)
    text = told([running, waiting, dependent, ray.put(1)])
    assert "after 0.2 s: 3 objects are not available" in text
    assert re.search(rf"{running.hex()} \(owner process 0\.\d+\): task sleeper was sent to process 0\.\d+ and", text)
    assert re.search(rf"{waiting.hex()} .*: task sleeper waits for a worker with {{'CPU': 1.*}}, behind 0 others", text)
    assert re.search(rf"{dependent.hex()} .*: task echo waits for its arguments: {running.hex()} .* is not ready", text)
    asker = Slow.remote()
    assert "is the return of a task of its owner" in ray.get(asker.ask.remote([running]))
    for ref in (dependent, waiting, running):
        ray.cancel(ref)
    assert "and 2 more" in told([Slow.remote(60).sleep.remote(i) for i in range(5)])


def test_what_never_fits_is_told():
    ref = sleeper.options(resources={"nowhere": 1}).remote(0)
    eventually(lambda: "nowhere" in told(ref).partition("}")[2])  # the cluster's own words, after ours
    ray.cancel(ref)


def test_calls():
    slow = Slow.remote()
    ray.get(slow.__ray_ready__.remote())
    argument = sleeper.remote(60)
    running, blocked = slow.sleep.remote(60), slow.sleep.remote(argument)
    behind = slow.sleep.remote(0)
    text = told([running, blocked, behind])
    actor = slow._actor_id.hex()
    assert f"call Slow.sleep was sent to its actor {actor} in process 0." in text
    assert "call Slow.sleep waits for its arguments" in text
    assert f"call Slow.sleep waits until the calls before it were sent to its actor {actor}" in text
    ray.kill(slow)
    ray.cancel(argument)


def test_an_actor_that_is_not_up_yet():
    slow = Slow.remote(60)
    text = told(slow.sleep.remote(0))
    assert f"call Slow.sleep waits for its actor {slow._actor_id.hex()}, which is PENDING" in text
    ray.kill(slow)


def test_exit_actor_names_the_class():
    with pytest.raises(exceptions.ActorDiedError) as caught:
        ray.get(Slow.options(name="leaver").remote().leave.remote(), timeout=PATIENCE)
    assert "class_name: Slow" in str(caught.value)
    assert "name: leaver" in str(caught.value)
    assert "exit_actor" in str(caught.value)


def test_a_placement_group_for_which_others_leave_no_room():
    holder = ray.util.placement_group([{"CPU": 1}])
    ray.get(holder.ready())
    group = ray.util.placement_group([{"CPU": 1}])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    pending = f"placement group {group.id.hex()}{{}} PENDING (not each of its bundles has a node yet)"
    inside = echo.options(scheduling_strategy=strategy).remote(1)
    assert pending.format(" waits; the group is") in told(group.ready())
    assert f"task echo waits for a worker with {{'CPU': 1.0}} in {pending.format(', which is')}" in told(inside)
    ray.util.remove_placement_group(holder)
    assert ray.get(inside) == 1
    ray.util.remove_placement_group(group)


def test_a_placement_group_that_never_fits_is_told():
    group = ray.util.placement_group([{"CPU": 7}])
    eventually(
        lambda: f"{group.id.hex()} waits: placement group {group.id.hex()} asks for {{CPU: 7}}" in told(group.ready())
    )
    ray.util.remove_placement_group(group)
