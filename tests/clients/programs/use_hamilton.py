"""Hamilton: a dataflow whose nodes are tasks of Ray, with a part for each of several items."""

import importlib
import json
import os
import sys
import tempfile

import ray
from hamilton import driver
from hamilton.execution import executors
from hamilton.plugins import h_ray

FLOW = """
from hamilton.htypes import Collect, Parallelizable

def number(count: int) -> Parallelizable[int]:
    yield from range(count)

def tenfold(number: int) -> int:
    return 10 * number

def total(tenfold: Collect[int]) -> int:
    return sum(tenfold)
"""
place = tempfile.mkdtemp()
with open(os.path.join(place, "flow_of_numbers.py"), "w") as file:
    file.write(FLOW)
sys.path.insert(0, place)
built = (
    driver.Builder()
    .enable_dynamic_execution(allow_experimental_mode=True)
    .with_modules(importlib.import_module("flow_of_numbers"))
    .with_local_executor(executors.SynchronousLocalTaskExecutor())
    .with_remote_executor(h_ray.RayTaskExecutor(num_cpus=2))
    .with_config({"count": 5})
    .build()
)
print(json.dumps({"ray": ray.__file__, "total": built.execute(["total"])["total"]}))
