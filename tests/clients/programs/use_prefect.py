"""A flow of Prefect whose tasks prefect-ray submits; one of them fails."""

import json

import ray
from prefect import flow, task
from prefect_ray import RayTaskRunner


@task
def square(number):
    return number * number


@task
def fail():
    raise ValueError("on purpose")


@flow(task_runner=RayTaskRunner(init_kwargs={"num_cpus": 2}))
def squares():
    chained = square.submit(square.submit(3))
    failed = fail.submit()
    failed.wait()
    return [future.result() for future in square.map(range(4))], chained.result(), failed.state.is_failed()


if __name__ == "__main__":
    print(json.dumps({"ray": ray.__file__, "found": squares()}))
