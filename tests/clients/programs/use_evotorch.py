"""EvoTorch: a distributed search whose solutions two actors evaluate."""

import json

import ray
import torch
from evotorch import Problem
from evotorch.algorithms import SNES


def sphere(values):
    return torch.sum(values.pow(2.0), dim=-1)


if __name__ == "__main__":
    torch.manual_seed(1)
    problem = Problem("min", sphere, solution_length=10, initial_bounds=(-1, 1), vectorized=True, num_actors=2)
    searcher = SNES(problem, stdev_init=1.0, popsize=40)
    searcher.run(1)
    first = float(searcher.status["best_eval"])
    searcher.run(40)
    print(json.dumps({"ray": ray.__file__, "first": first, "last": float(searcher.status["best_eval"])}))
