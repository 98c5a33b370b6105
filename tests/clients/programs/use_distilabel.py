"""A pipeline of distilabel whose steps are actors."""

import json

import ray
from distilabel.pipeline import RayPipeline
from distilabel.steps import LoadDataFromDicts, StepInput, step


@step(inputs=["instruction"], outputs=["length"])
def Count(inputs: StepInput):
    for row in inputs:
        row["length"] = len(row["instruction"])
    yield inputs


if __name__ == "__main__":
    with RayPipeline(name="lengths", ray_init_kwargs={"num_cpus": 4}) as pipeline:
        LoadDataFromDicts(data=[{"instruction": "x" * length} for length in range(20)]) >> Count(name="count")
    found = pipeline.run(use_cache=False)
    print(json.dumps({"ray": ray.__file__, "lengths": list(found["default"]["train"]["length"])}))
