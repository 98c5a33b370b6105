"""GPUs: made-up ones, so only the environment tells who got which. Each promise but those marked holds for Ray too."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

import pytest
from engine import NAME, eventually, hpcray_only, ray, run_script

accelerators = importlib.import_module(f"{NAME}.util.accelerators")
pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "num_gpus": 2, "resources": {f"accelerator_type:{accelerators.NVIDIA_H100}": 1}}

# Real programs say it inside the function, before they import their GPU library.
VISIBLE = "CUDA_VISIBLE_DEVICES"


@ray.remote
def look():
    return ray.get_gpu_ids(), os.environ.get(VISIBLE), os.getpid()


@ray.remote(num_cpus=0)
class Model:
    def look(self):
        return ray.get_gpu_ids(), os.environ.get(VISIBLE), os.getpid()

    def context(self):
        context = ray.get_runtime_context()
        return context.get_accelerator_ids(), context.get_assigned_resources()


@pytest.fixture(autouse=True)
def all_free():
    eventually(lambda: ray.available_resources().get("GPU") == 2, "GPUs free before the test")
    yield


def free_gpus():
    return ray.available_resources().get("GPU", 0)


class TestTasks:
    def test_a_task_without_sees_what_the_node_sees(self):
        ids, visible, _ = ray.get(look.remote())
        assert ids == [] and visible == os.environ.get(VISIBLE)

    def test_ids_are_numbers_and_the_variable_agrees(self):
        ids, visible, _ = ray.get(look.options(num_gpus=1).remote())
        assert ids in ([0], [1]) and visible == str(ids[0])
        ids, visible, _ = ray.get(look.options(num_gpus=2).remote())
        assert sorted(ids) == [0, 1] and sorted(visible.split(",")) == ["0", "1"]

    def test_two_at_once_have_different_ones(self):
        @ray.remote(num_gpus=1)
        def meet(mine, other):
            open(mine, "w").close()
            while not os.path.exists(other):
                time.sleep(0.01)
            return ray.get_gpu_ids()

        folder = ray.get_runtime_context().get_temp_dir()
        a, b = f"{folder}/{os.getpid()}-a", f"{folder}/{os.getpid()}-b"
        assert sorted(ray.get([meet.remote(a, b), meet.remote(b, a)])) == [[0], [1]]
        os.remove(a)
        os.remove(b)

    def test_a_worker_serves_one_gpu_task(self):
        @ray.remote(num_gpus=1)
        def once():
            return os.getpid()

        assert len({ray.get(once.remote()) for _ in range(3)}) == 3, "or its memory on the device would stay"

    @hpcray_only
    def test_a_worker_that_goes_on_keeps_its_device(self):
        @ray.remote(num_gpus=1, max_calls=0)
        def seen():
            seen.all = [*getattr(seen, "all", []), tuple(ray.get_gpu_ids())]
            return set(seen.all)

        for _ in range(20):
            for devices in ray.get([seen.remote() for _ in range(2)]):
                assert len(devices) == 1

    @hpcray_only  # Ray does not end an idle worker for what it may still have in the memory of its device
    def test_an_idle_worker_that_owns_objects_stays_when_its_device_goes_to_another_one(self):
        @ray.remote(num_gpus=1, max_calls=0)
        def own(value):
            return [ray.put(value)], os.getpid()

        (kept,), owner = ray.get(own.remote("kept"))
        both = look.options(num_gpus=2, runtime_env={"env_vars": {"OTHER": "1"}})
        assert ray.get(both.remote())[2] != owner
        assert ray.get(kept) == "kept"
        del kept
        ray.get(look.options(num_gpus=2, runtime_env={"env_vars": {"OTHER": "2"}}).remote())
        eventually(lambda: not os.path.exists(f"/proc/{owner}"), "the idle worker has left")

    def test_the_variables_of_a_task_do_not_undo_it(self):
        mine = look.options(num_gpus=1, runtime_env={"env_vars": {VISIBLE: "1,0"}})
        visible = ray.get(mine.remote())[1]
        assert visible in ("0", "1")

    def test_noset(self):
        noset = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        ids, visible, _ = ray.get(look.options(num_gpus=1, runtime_env={"env_vars": noset}).remote())
        assert len(ids) == 1 and visible == os.environ.get(VISIBLE)

    def test_override_on_zero(self):
        zero = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
        assert ray.get(look.options(runtime_env={"env_vars": zero}).remote())[1] == ""

    def test_more_than_one_is_whole(self):
        with pytest.raises(ValueError, match="GPU resource quantities >1 must"):
            look.options(num_gpus=1.5).remote()

    def test_a_child_has_none_of_its_parents(self):
        @ray.remote(num_gpus=1)
        def parent():
            return ray.get_gpu_ids(), ray.get(look.remote())[0]

        own, childs = ray.get(parent.remote())
        assert len(own) == 1 and childs == []

    def test_the_driver_has_none(self):
        assert ray.get_gpu_ids() == []


class TestActors:
    def test_quarters_share_two_devices(self):
        models = [Model.options(num_gpus=0.25).remote() for _ in range(8)]
        ids = [ray.get(model.look.remote())[0] for model in models]
        assert sorted(ids) == [[0]] * 4 + [[1]] * 4
        eventually(lambda: free_gpus() == 0, "nothing free")

    def test_an_actor_keeps_it_for_life_and_kill_frees_it(self):
        model, other = Model.options(num_gpus=1).remote(), Model.options(num_gpus=1).remote()
        mine = ray.get(model.look.remote())[0]
        assert ray.get(other.look.remote())[0] != mine and ray.get(model.look.remote())[0] == mine
        ray.kill(model)
        third = Model.options(num_gpus=1).remote()
        assert ray.get(third.look.remote())[0] == mine

    def test_a_restarted_actor_has_one_again(self):
        model = Model.options(num_gpus=1, max_restarts=1, max_task_retries=-1).remote()
        first = ray.get(model.look.remote())
        ray.kill(model, no_restart=False)
        eventually(lambda: ray.get(model.look.remote())[2] != first[2], "another process")
        assert len(ray.get(model.look.remote())[0]) == 1
        eventually(lambda: free_gpus() == 1, "one held")

    def test_context(self):
        model = Model.options(num_gpus=0.5).remote()
        ids, resources = ray.get(model.context.remote())
        assert ids["GPU"] in (["0"], ["1"]) and ids["TPU"] == []
        assert resources["GPU"] == 0.5

    def test_whole_and_fraction_never_share(self):
        whole = Model.options(num_gpus=1).remote()
        halves = [Model.options(num_gpus=0.5).remote() for _ in range(2)]
        ids = ray.get([half.look.remote() for half in halves])
        assert ids[0][0] == ids[1][0] != ray.get(whole.look.remote())[0]


class TestType:
    def test_accelerator_type(self):
        here = look.options(accelerator_type=accelerators.NVIDIA_H100)
        assert ray.get(here.remote())[0] == []
        elsewhere = look.options(accelerator_type=accelerators.NVIDIA_TESLA_V100).remote()
        assert ray.wait([elsewhere], timeout=0.3)[0] == []
        ray.cancel(elsewhere)

    @hpcray_only
    def test_the_nodes_say_it(self):
        (node,) = ray.nodes()
        assert node["Resources"]["GPU"] == 2.0 and node["Labels"]["ray.io/accelerator-type"] == "H100"
        assert ray.cluster_resources()["GPU"] == 2.0
        assert ray.get_runtime_context().get_node_labels()["ray.io/accelerator-type"] == "H100"


class TestThreads:
    def test_omp_num_threads(self):
        @ray.remote
        def threads():
            return os.environ.get("OMP_NUM_THREADS")

        assert ray.get([threads.options(num_cpus=cpus).remote() for cpus in (0.5, 1, 3, 1)]) == ["1", "1", "3", "1"]
        assert ray.get(threads.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "5"}}).remote()) == "5"

        @ray.remote
        class Threads:
            def count(self):
                return os.environ.get("OMP_NUM_THREADS")

        assert ray.get(Threads.remote().count.remote()) == "1"
        assert ray.get(Threads.options(num_cpus=2).remote().count.remote()) == "2"

    @hpcray_only
    def test_libraries_that_were_loaded_before_know_too(self):
        @ray.remote
        def threads():
            import threadpoolctl

            return [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]

        for cpus in (1, 2, 1):
            assert set(ray.get(threads.options(num_cpus=cpus).remote())) <= {cpus}


NAMED = """\
import os
import engine_under_test as ray
ray.init(num_cpus=2)
@ray.remote(num_gpus=1)
def look():
    return ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]
print(ray.cluster_resources()["GPU"], sorted(ray.get([look.remote() for _ in range(4)]))[0])
@ray.remote
def without():
    return ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]
print(ray.get(without.remote()))
"""


class TestNodesOfTheirOwn:
    @pytest.fixture(autouse=True)
    def all_free(self):
        """These have sessions of their own."""

    @hpcray_only
    def test_names_out_of_the_variable_stay_what_they_are(self, tmp_path: Path):
        script = tmp_path / "named.py"
        script.write_text(NAMED)
        ended = run_script(script, CUDA_VISIBLE_DEVICES="GPU-77aa,GPU-88bb")
        assert ended.stdout.splitlines() == ["2.0 (['GPU-77aa'], 'GPU-77aa')", "([], 'GPU-77aa,GPU-88bb')"], (
            ended.stderr
        )

    @hpcray_only
    def test_more_gpus_than_the_node_was_given(self, tmp_path: Path):
        script = tmp_path / "many.py"
        script.write_text("import engine_under_test as ray\nray.init(num_gpus=3)\n")
        ended = run_script(script, CUDA_VISIBLE_DEVICES="0,1")
        assert ended.returncode == 1 and "shall have 3 GPUs, but it was given 2" in ended.stderr

    @hpcray_only
    @pytest.mark.slow
    def test_who_waits_for_others_is_told_once(self, tmp_path: Path):
        script = tmp_path / "waits.py"
        script.write_text(WAITS)
        ended = run_script(script)
        assert ended.returncode == 0, ended.stderr
        reports = [line for line in ended.stderr.splitlines() if "has waited for 10 s" in line]
        task = [line for line in reports if "task train asks for {CPU: 1, GPU: 1}" in line]
        actor = [line for line in reports if "actor Late asks for {CPU: 1, GPU: 1}" in line]
        assert len(reports) == 2 and len(task) == 1 and len(actor) == 1, ended.stderr
        assert "GPU: 0} of {CPU: 4, GPU: 1}" in task[0] and "hint: " in task[0]


WAITS = """\
import time
import engine_under_test as ray
ray.init(num_cpus=4, num_gpus=1)
@ray.remote(num_gpus=1)
class Holder:
    def ping(self):
        return 1
@ray.remote(num_gpus=1)
class Late:
    def ping(self):
        return 1
@ray.remote(num_gpus=1)
def train():
    return 2
@ray.remote(num_cpus=3)
def sleep():
    time.sleep(6)
holder = Holder.remote()
ray.get(holder.ping.remote())
waiting, late = train.remote(), Late.remote()
own = [sleep.remote() for _ in range(4)]  # these wait for each other, which is no news
ray.get(own)
ray.kill(holder)
ray.get([waiting, late.ping.remote()])
"""
