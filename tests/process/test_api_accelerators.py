"""Accelerators that are no GPUs: made-up ones, so only ids and variables say who got which. All holds for Ray, too."""

from __future__ import annotations

import os

import pytest
from engine import ray, run_script

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "resources": {"neuron_cores": 4, "NPU": 2, "TPU": 4}}


@ray.remote
def look(*variables):
    return ray.get_runtime_context().get_accelerator_ids(), [os.environ.get(name) for name in variables]


@ray.remote
class Model:
    def look(self, *variables):
        return (
            ray.get(look.remote()),
            ray.get_runtime_context().get_accelerator_ids(),
            [*map(os.environ.get, variables)],
        )


def test_a_task_sees_the_devices_that_it_got_in_the_variable_of_their_kind():
    ids, (neuron, npu) = ray.get(
        look.options(resources={"neuron_cores": 2}).remote("NEURON_RT_VISIBLE_CORES", "ASCEND_RT_VISIBLE_DEVICES")
    )
    assert len(ids["neuron_cores"]) == 2 and neuron == ",".join(ids["neuron_cores"])
    assert ids["NPU"] == ids["GPU"] == [] and npu is None


def test_actors_share_a_device_and_do_not_share_whole_ones():
    halves = [Model.options(resources={"NPU": 0.5}).remote() for _ in range(2)]
    whole = Model.options(resources={"NPU": 1}).remote()
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    looks = ray.get([actor.look.remote(variable) for actor in (*halves, whole)])
    first, second, third = (own["NPU"] for _, own, _ in looks)
    assert first == second != third and len(third) == 1
    assert [variables for _, _, variables in looks] == [first, second, third]
    assert looks[0][0][0]["NPU"] == [], "a task that an actor submits has devices of its own, here none"


def test_a_tpu_task_is_confined_to_its_chips():
    names = "TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS"
    ids, (chips, bounds, hosts) = ray.get(look.options(resources={"TPU": 2}).remote(*names))
    assert (chips, bounds, hosts) == (",".join(ids["TPU"]), "1,2,1", "1,1,1")


def test_two_kinds_at_once():
    ids, _ = ray.get(look.options(resources={"neuron_cores": 1, "NPU": 1}).remote())
    assert len(ids["neuron_cores"]) == len(ids["NPU"]) == 1


@pytest.mark.parametrize("resources", [{"TPU": 3}, {"neuron_cores": 0.5}, {"HPU": 1.5}])
def test_amounts_that_no_device_can_give_are_refused(resources):
    with pytest.raises(ValueError, match=next(iter(resources))):
        look.options(resources=resources).remote()


def test_a_node_may_have_a_number_of_chips_that_no_task_can_ask_for(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import engine_under_test as ray
ray.init(num_cpus=1, resources={"TPU": 3, "HPU": 2})
print(ray.cluster_resources()["TPU"])
@ray.remote(resources={"TPU": 1})
def look():
    return ray.get_runtime_context().get_accelerator_ids()["TPU"]
print(len(ray.get(look.remote())))
""")
    ran = run_script(script)
    assert ran.stdout.split() == ["3.0", "1"], ran.stderr


def test_gpus_may_be_given_by_names_of_any_kind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "first,second"
import engine_under_test as ray
ray.init(num_cpus=1, num_gpus=1)
@ray.remote(num_gpus=1)
def look():
    return ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]
print(ray.get(look.remote()))
""")
    ran = run_script(script)
    assert "(['first'], 'first')" in ran.stdout, ran.stderr


def test_ids_that_were_given_before_the_start_are_the_ids(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import os
import engine_under_test as ray
ray.init(num_cpus=1, resources={"HPU": 2})
@ray.remote(resources={"HPU": 1})
def look():
    return ray.get_runtime_context().get_accelerator_ids()["HPU"], os.environ["HABANA_VISIBLE_MODULES"]
@ray.remote(resources={"HPU": 1}, runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES": "1"}})
def keep():
    return os.environ["HABANA_VISIBLE_MODULES"]
print(ray.get(look.remote()), ray.get(keep.remote()))
""")
    done = run_script(script, HABANA_VISIBLE_MODULES="5,7")
    assert done.stdout.splitlines()[-1] in ("(['5'], '5') 5,7", "(['7'], '7') 5,7"), done.stdout + done.stderr
