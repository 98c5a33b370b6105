"""Dagster: the steps of a job are tasks of Ray, by dagster-ray's executor, and its resource starts Ray in a step."""

import json
import os

import dagster as dg
import ray
from dagster_ray import RayIOManager, ray_executor


@dg.op(out=dg.DynamicOut(int))
def numbers():
    for number in range(4):
        yield dg.DynamicOutput(number, mapping_key=str(number))


@dg.op
def square(number: int) -> list:
    return [number * number, os.getpid()]


@dg.op
def collect(found: list) -> dict:
    return {"sum": sum(number for number, _ in found), "pids": len({pid for _, pid in found})}


@dg.job(executor_def=ray_executor, resource_defs={"io_manager": RayIOManager()})
def squares():
    collect(numbers().map(square).collect())


if __name__ == "__main__":
    ray.init(num_cpus=2)
    with dg.DagsterInstance.local_temp() as instance, dg.execute_job(dg.reconstructable(squares), instance) as result:
        print(json.dumps({"ray": ray.__file__, "success": result.success, "found": result.output_for_node("collect")}))
