"""DeepHyper: the evaluator whose jobs are tasks of Ray; the search's objectives are known from its parameters."""

import json
import os

import ray
from deephyper.evaluator import Evaluator
from deephyper.hpo import HpProblem, RandomSearch


def run(job):
    return {"objective": 3 * job["x"] - job["y"], "metadata": {"pid": os.getpid()}}


if __name__ == "__main__":
    problem = HpProblem()
    problem.add((0, 10), "x")
    problem.add((0.0, 1.0), "y")
    evaluator = Evaluator.create(run, method="ray", method_kwargs={"num_cpus": 2, "num_cpus_per_task": 1})
    found = RandomSearch(problem, random_state=1, log_dir="deephyper").search(evaluator, max_evals=12)
    right = 3 * found["p:x"] - found["p:y"]
    print(json.dumps({
        "ray": ray.__file__,
        "rows": len(found),
        "error": float((found["objective"] - right).abs().max()),
        "elsewhere": os.getpid() not in set(found["m:pid"]),
    }))  # fmt: skip
