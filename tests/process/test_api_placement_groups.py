"""Placement groups on one node. Each promise but those marked holds for Ray too."""

from __future__ import annotations

import importlib
import os
import pickle
import time

import pytest
from engine import NAME, PATIENCE, eventually, exceptions, hpcray_only, ray

groups = importlib.import_module(f"{NAME}.util.placement_group")
strategies = importlib.import_module(f"{NAME}.util.scheduling_strategies")
In = strategies.PlacementGroupSchedulingStrategy
placement_group, remove_placement_group = groups.placement_group, groups.remove_placement_group

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "num_gpus": 2, "resources": {"custom": 1}, "labels": {"region": "us"}}


@ray.remote
def look():
    context = ray.get_runtime_context()
    return context.get_placement_group_id(), ray.get_gpu_ids(), os.getpid()


@ray.remote
def child():
    return ray.get_runtime_context().get_placement_group_id()


@ray.remote
def parent():
    context = ray.get_runtime_context()
    alone = child.options(scheduling_strategy=In(None))
    return context.should_capture_child_tasks_in_placement_group, ray.get([child.remote(), alone.remote()])


@ray.remote
class Actor:
    def look(self):
        return ray.get_runtime_context().get_placement_group_id(), ray.get_gpu_ids(), os.getpid()

    def sleep(self):
        time.sleep(3600)

    def children(self):
        return ray.get(parent.remote())

    def current(self):
        return groups.get_current_placement_group()


def free(name="CPU"):
    return ray.available_resources().get(name, 0)


@pytest.fixture(autouse=True)
def all_free():
    eventually(lambda: (free(), free("GPU"), free("custom")) == (4, 2, 1), "all free before the test")
    yield


@pytest.fixture
def group():
    """Makes groups and removes them."""
    made = []

    def make(*bundles, **options):
        made.append(placement_group(list(bundles), **options))
        return made[-1]

    yield make
    for one in made:
        remove_placement_group(one)


class TestReserving:
    def test_ready_and_wait_return_when_a_group_is_reserved(self, group):
        one = group({"CPU": 1}, {"CPU": 2})
        assert ray.get(one.ready(), timeout=PATIENCE) == one
        assert one.wait(timeout_seconds=0) is True
        eventually(lambda: free() == 1, "three CPUs reserved")
        assert ray.cluster_resources()["CPU"] == 4

    def test_bundles_are_reserved_all_or_none(self, group):
        held = group({"CPU": 3})
        assert held.wait(PATIENCE)
        waits = group({"CPU": 1}, {"CPU": 1})
        assert waits.wait(0.3) is False
        assert ray.wait([waits.ready()], timeout=0.1)[0] == []
        assert free() == 1
        remove_placement_group(held)
        assert waits.wait(PATIENCE)
        eventually(lambda: free() == 2, "two CPUs reserved")

    def test_a_task_that_ends_makes_room(self, group):
        @ray.remote(num_cpus=4)
        def hold(until):
            while not os.path.exists(until):
                time.sleep(0.01)

        path = f"/tmp/group-room-{os.getpid()}"
        task = hold.remote(path)
        eventually(lambda: free() == 0, "the task runs")
        one = group({"CPU": 4})
        assert one.wait(0.2) is False
        try:
            open(path, "w").close()
            assert one.wait(PATIENCE)
            ray.get(task, timeout=PATIENCE)
        finally:
            os.unlink(path)

    def test_a_group_has_the_specs_of_its_bundles(self, group):
        one = group({"CPU": 1}, {"GPU": 0.5, "custom": 0.25})
        assert one.bundle_specs == [{"CPU": 1.0}, {"GPU": 0.5, "custom": 0.25}]
        assert one.bundle_count == 2 and not one.is_empty
        again = pickle.loads(pickle.dumps(one))
        assert again == one and again.id.hex() == one.id.hex() and again.bundle_specs == one.bundle_specs
        nothing = groups.PlacementGroup.empty()
        assert nothing.is_empty and nothing.bundle_count == 0 and nothing.id.is_nil()

    def test_the_table_has_a_row_for_each_placement_group(self, group):
        one = group({"CPU": 1}, {"CPU": 0.5}, name="seen", strategy="SPREAD")
        assert one.wait(PATIENCE)
        row = groups.placement_group_table(one)
        node = ray.nodes()[0]["NodeID"]
        assert row["placement_group_id"] == one.id.hex()
        assert (row["name"], row["strategy"], row["state"]) == ("seen", "SPREAD", "CREATED")
        assert row["bundles"] == {0: {"CPU": 1.0}, 1: {"CPU": 0.5}}
        assert row["bundles_to_node_id"] == {0: node, 1: node}
        assert groups.placement_group_table()[one.id.hex()] == row
        remove_placement_group(one)
        eventually(lambda: groups.placement_group_table(one)["state"] == "REMOVED", "it is removed")

    def test_placement_groups_are_found_by_name(self, group):
        one = group({"CPU": 1}, name="mine")
        assert one.wait(PATIENCE)
        found = groups.get_placement_group("mine")
        assert found.id == one.id and found.bundle_specs == one.bundle_specs
        remove_placement_group(one)

        def gone():
            try:
                groups.get_placement_group("mine")
            except ValueError as error:
                return "Failed to look up placement group with name: mine" in str(error)

        eventually(gone, "the name is free again")
        with pytest.raises(ValueError, match="Please supply a non-empty value to get_placement_group"):
            groups.get_placement_group("")

    @pytest.mark.parametrize("kind", [exceptions.RaySystemError, pytest.param(ValueError, marks=hpcray_only)])
    def test_a_second_group_of_the_same_name_is_refused(self, group, kind):
        group({"CPU": 1}, name="once")
        with pytest.raises(kind, match="once"):
            group({"CPU": 1}, name="once")

    @hpcray_only
    def test_tasks_may_hold_a_group_and_wait_for_it(self, group):
        held = group({"CPU": 3})
        one = group({"CPU": 2})

        @ray.remote(num_cpus=0)
        def wait(handle):
            return handle[0].wait(60), ray.get(handle[0].ready(), timeout=60) == handle[0]

        task = wait.remote([one])
        assert held.wait(PATIENCE) and ray.wait([task], timeout=0.2)[0] == []
        remove_placement_group(held)
        assert ray.get(task, timeout=PATIENCE) == (True, True)

    def test_all_resources_of_many_groups_come_back(self):
        for _ in range(3):
            made = [placement_group([{"custom": 0.01}]) for _ in range(50)]
            assert all(one.wait(PATIENCE) for one in made)
            for one in made:
                remove_placement_group(one)
        eventually(lambda: free("custom") == 1, "all is free again")


class TestRunningInside:
    def test_tasks_run_in_their_bundle_and_leave_the_rest_alone(self, group):
        one = group({"CPU": 1}, {"CPU": 2})
        inside = look.options(scheduling_strategy=In(one, 1), num_cpus=2)
        assert ray.get(inside.remote(), timeout=PATIENCE)[0] == one.id.hex()
        assert ray.get(look.remote(), timeout=PATIENCE)[0] is None
        found = ray.get([look.options(scheduling_strategy=In(one)).remote() for _ in range(30)], timeout=PATIENCE)
        assert {row[0] for row in found} == {one.id.hex()}

    def test_the_legacy_options_place_tasks_in_a_bundle(self, group):
        one = group({"CPU": 1})
        old = {"placement_group": one, "placement_group_bundle_index": 0}
        assert ray.get(look.options(**old).remote(), timeout=PATIENCE)[0] == one.id.hex()
        actor = Actor.options(**old).remote()
        assert ray.get(actor.look.remote(), timeout=PATIENCE)[0] == one.id.hex()

    def test_tasks_wait_until_their_group_is_reserved(self, group):
        held = group({"CPU": 4})
        assert held.wait(PATIENCE)
        one = group({"CPU": 2})
        task = look.options(scheduling_strategy=In(one)).remote()
        actor = Actor.options(scheduling_strategy=In(one)).remote()
        call = actor.look.remote()
        assert ray.wait([task, call], timeout=0.3)[0] == []
        remove_placement_group(held)
        assert [row[0] for row in ray.get([task, call], timeout=PATIENCE)] == [one.id.hex()] * 2

    def test_a_bundle_is_never_used_twice(self, group, tmp_path):
        one = group({"CPU": 1}, {"CPU": 1})

        @ray.remote(num_cpus=1)
        def alone(index):
            mine = tmp_path / f"bundle-{index}"
            mine.mkdir()  # fails if another task is in the same bundle
            time.sleep(0.02)
            mine.rmdir()

        tasks = [alone.options(scheduling_strategy=In(one, i % 2)).remote(i % 2) for i in range(10)]
        ray.get(tasks, timeout=PATIENCE)

    def test_gpus_of_a_bundle_are_its_own(self, group):
        one = group({"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1})
        whole = look.options(scheduling_strategy=In(one, 0), num_gpus=1)
        first = ray.get([whole.remote() for _ in range(3)], timeout=PATIENCE)
        other = ray.get(look.options(scheduling_strategy=In(one, 1), num_gpus=1).remote(), timeout=PATIENCE)
        assert len({tuple(ids) for _, ids, _ in first}) == 1
        assert sorted(first[0][1] + other[1]) == [0, 1]

    def test_fractions_share_the_devices_of_a_bundle(self, group):
        one = group({"GPU": 1, "CPU": 1})
        quarter = Actor.options(scheduling_strategy=In(one, 0), num_gpus=0.25, num_cpus=0.25)
        models = [quarter.remote() for _ in range(4)]
        found = ray.get([model.look.remote() for model in models], timeout=PATIENCE)
        assert len({tuple(ids) for _, ids, _ in found}) == 1 and len({pid for _, _, pid in found}) == 4
        fifth = quarter.remote()
        call = fifth.look.remote()
        assert ray.wait([call], timeout=0.3)[0] == []
        ray.kill(models[0])
        assert ray.get(call, timeout=PATIENCE)[1] == found[0][1]

    def test_a_third_of_a_gpu_in_a_bundle_of_a_third(self, group):
        one = group({"GPU": 1 / 3}, {"GPU": 1 / 3})
        pick = look.options(num_gpus=1 / 3, num_cpus=0)
        found = [ray.get(pick.options(scheduling_strategy=In(one, i)).remote(), timeout=PATIENCE) for i in (0, 1)]
        assert [len(ids) for _, ids, _ in found] == [1, 1]

    def test_child_tasks_are_captured_if_the_strategy_captures(self, group):
        one = group({"CPU": 3})
        inside = parent.options(scheduling_strategy=In(one, placement_group_capture_child_tasks=True))
        assert ray.get(inside.remote(), timeout=PATIENCE) == (True, [one.id.hex(), None])
        outside = parent.options(scheduling_strategy=In(one))
        assert ray.get(outside.remote(), timeout=PATIENCE) == (False, [None, None])
        assert ray.get(parent.remote(), timeout=PATIENCE) == (False, [None, None])
        assert ray.get(inside.remote(), timeout=PATIENCE) == (True, [one.id.hex(), None])

    def test_children_of_captured_tasks_are_captured(self, group):
        one = group({"CPU": 3})
        actor = Actor.options(scheduling_strategy=In(one, 0, True)).remote()
        assert ray.get(actor.children.remote(), timeout=PATIENCE) == (True, [one.id.hex(), None])
        assert ray.get(actor.current.remote(), timeout=PATIENCE).id == one.id
        assert groups.get_current_placement_group() is None

    def test_a_waiting_task_lends_the_cpu_of_its_bundle_only(self, group):
        one = group({"CPU": 1})

        @ray.remote(num_cpus=1)
        def nested(depth):
            return ray.get(nested.remote(depth - 1)) + 1 if depth else 0

        inside = nested.options(scheduling_strategy=In(one, 0, True))
        assert ray.get(inside.remote(3), timeout=PATIENCE) == 3


class TestRemoving:
    def test_removing_a_group_kills_running_and_fails_waiting_tasks(self, group):
        one = group({"CPU": 2})
        actor = Actor.options(scheduling_strategy=In(one), num_cpus=1).remote()
        pid = ray.get(actor.look.remote(), timeout=PATIENCE)[2]

        @ray.remote(num_cpus=1)
        def forever():
            time.sleep(3600)

        running = forever.options(scheduling_strategy=In(one)).remote()
        waiting = forever.options(scheduling_strategy=In(one)).remote()
        assert ray.wait([running], timeout=0.3)[0] == []
        remove_placement_group(one)
        ended = actor.sleep.remote()
        with pytest.raises(exceptions.RayActorError):
            ray.get(ended, timeout=PATIENCE)
        for task in (running, waiting):
            with pytest.raises((exceptions.TaskPlacementGroupRemoved, exceptions.WorkerCrashedError)):
                ray.get(task, timeout=PATIENCE)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"), "the actor's process is gone")
        eventually(lambda: (free(), free("GPU")) == (4, 2), "all is free")

    def test_tasks_of_a_removed_group_fail(self, group):
        one = group({"CPU": 1})
        assert one.wait(PATIENCE)
        remove_placement_group(one)
        with pytest.raises(exceptions.TaskPlacementGroupRemoved):
            ray.get(look.options(scheduling_strategy=In(one)).remote(), timeout=PATIENCE)
        actor = Actor.options(scheduling_strategy=In(one)).remote()
        with pytest.raises(exceptions.RayActorError):
            ray.get(actor.look.remote(), timeout=PATIENCE)

    def test_a_group_can_be_removed_before_it_is_ready(self, group):
        one = group({"CPU": 400})
        ready = one.ready()
        task = look.options(scheduling_strategy=In(one)).remote()
        remove_placement_group(one)
        for ref in (ready, task):
            with pytest.raises(exceptions.TaskPlacementGroupRemoved):
                ray.get(ref, timeout=PATIENCE)

    @hpcray_only
    def test_waiting_for_a_removed_group_raises(self, group):
        one = group({"CPU": 1})
        remove_placement_group(one)
        with pytest.raises(ValueError, match="does not exist"):
            one.wait(PATIENCE)

    def test_a_group_can_be_removed_twice(self, group):
        one = group({"CPU": 1})
        remove_placement_group(one)
        remove_placement_group(one)

    @hpcray_only
    def test_a_group_ends_with_the_actor_that_created_it(self):
        @ray.remote(num_cpus=0)
        class Maker:
            def make(self, lifetime):
                one = placement_group([{"CPU": 1}], lifetime=lifetime)
                one.wait(60)
                return one

        maker = Maker.remote()
        mine, lasting = ray.get([maker.make.remote(None), maker.make.remote("detached")], timeout=PATIENCE)
        ray.kill(maker)
        eventually(lambda: groups.placement_group_table(mine)["state"] == "REMOVED", "the actor's group is removed")
        assert groups.placement_group_table(lasting)["state"] == "CREATED"
        remove_placement_group(lasting)


class TestWrongUse:
    @pytest.mark.parametrize(
        ("bundles", "text"),
        [
            ({"CPU": 1}, "must be a list"),
            ([], "empty list instead"),
            (["CPU"], "must be a non-empty list of resource dictionaries"),
            ([{"CPU": "1"}], "must be a non-empty list of resource dictionaries"),
            ([{"CPU": 1}, {}], r"only 0 values. Bundles: \[{.CPU.: 1}, {}\]"),
            ([{"CPU": 0}], "cannot be an empty dictionary or resources with only 0 values"),
        ],
    )
    def test_invalid_bundles_are_refused(self, bundles, text):
        with pytest.raises(ValueError, match=text):
            placement_group(bundles)

    def test_invalid_arguments_of_placement_group_are_refused(self):
        with pytest.raises(ValueError, match="Invalid placement group strategy TIGHT"):
            placement_group([{"CPU": 1}], strategy="TIGHT")
        with pytest.raises(ValueError, match="lifetime"):
            placement_group([{"CPU": 1}], lifetime="long")

    def test_arguments_about_nodes_are_checked(self):
        with pytest.raises(ValueError, match="only works with STRICT_PACK but got PACK"):
            placement_group([{"CPU": 1}], _soft_target_node_id="ab" * 28)
        for topology in ({"rack": "PACK"}, {"a": "STRICT_PACK", "b": "STRICT_PACK"}, "rack", {"": "STRICT_PACK"}):
            with pytest.raises(ValueError, match="[Tt]opology"):
                placement_group([{"CPU": 1}], topology_strategy=topology)
        with pytest.raises(ValueError, match="cannot both be specified"):
            placement_group([{"CPU": 1}], strategy="PACK", topology_strategy={"rack": "STRICT_PACK"})
        with pytest.raises(ValueError, match="requires all bundles"):
            placement_group([{"CPU": 1}] * 2, bundle_label_selector=[{"ray.io/accelerator-type": "GB200"}, {}])

    @hpcray_only
    def test_bundles_of_parts_of_several_gpus_are_refused(self):
        with pytest.raises(ValueError, match="must be whole numbers"):
            placement_group([{"GPU": 1.5}])

    def test_requests_that_fit_no_bundle_are_refused(self, group):
        one = group({"CPU": 1}, {"GPU": 1})
        for index in (2, -2):
            with pytest.raises(ValueError, match=f"placement group bundle index {index} is invalid"):
                look.options(scheduling_strategy=In(one, index)).remote()
        with pytest.raises(ValueError, match="cannot fit into any bundles"):
            look.options(scheduling_strategy=In(one), num_cpus=2).remote()
        with pytest.raises(ValueError, match="If placement group is not set, the value of bundle index must be -1"):
            look.options(scheduling_strategy=In(None, 0)).remote()
        only_gpu = group({"GPU": 1})
        with pytest.raises(ValueError, match="requires 1 CPU for creation"):
            Actor.options(scheduling_strategy=In(only_gpu)).remote()


class TestLabelSelectors:
    def test_they_hold_inside_of_a_group_and_are_captured(self):
        group = placement_group([{"CPU": 2}])
        inside = In(group, placement_group_capture_child_tasks=True)
        here = {"scheduling_strategy": inside, "label_selector": {"region": "in(us, eu)"}}

        @ray.remote(num_cpus=1)
        def selecting():
            chosen = child.options(label_selector={"region": "us"}).remote()
            return ray.get_runtime_context().get_placement_group_id(), ray.get(chosen)

        ident = group.id.hex()
        assert ray.get(selecting.options(**here).remote(), timeout=PATIENCE) == (ident, ident)
        actor = Actor.options(num_cpus=1, **here).remote()
        assert ray.get(actor.look.remote(), timeout=PATIENCE)[0] == ident
        assert ray.get(actor.children.remote(), timeout=PATIENCE) == (True, [ident, None])
        ray.kill(actor)
        remove_placement_group(group)

    def test_where_no_node_of_the_group_has_the_label_the_task_waits(self):
        group = placement_group([{"CPU": 1}])
        ray.get(group.ready(), timeout=PATIENCE)
        waiting = child.options(scheduling_strategy=In(group), label_selector={"region": "mars"}).remote()
        assert ray.wait([waiting], timeout=0.5)[0] == []
        assert ray.get(child.options(scheduling_strategy=In(group)).remote(), timeout=PATIENCE) == group.id.hex()
        remove_placement_group(group)
        with pytest.raises(exceptions.TaskPlacementGroupRemoved):
            ray.get(waiting, timeout=PATIENCE)

    def test_a_node_that_does_not_exist_fails_the_actor_once_the_group_is_there(self):
        group = placement_group([{"CPU": 1}])
        actor = Actor.options(
            num_cpus=1, scheduling_strategy=In(group), label_selector={"ray.io/node-id": "ab" * 28}
        ).remote()
        with pytest.raises(exceptions.ActorUnschedulableError):
            ray.get(actor.look.remote(), timeout=PATIENCE)
        remove_placement_group(group)


def test_the_option_placement_group_is_deprecated():
    group = ray.util.placement_group([{"CPU": 1}])
    with pytest.warns(DeprecationWarning, match="placement_group parameter is deprecated.*docs.ray.io/en/releases-2"):
        placed = ray.remote(os.getpid).options(placement_group=group)
    assert ray.get(placed.remote()) > 0
    ray.util.remove_placement_group(group)
