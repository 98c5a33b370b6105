"""pymoo: each individual of a generation is evaluated by a task; the front is that of a search without Ray."""

import json
import os

import numpy as np
import ray
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.core.problem import ElementwiseProblem
from pymoo.optimize import minimize
from pymoo.parallelization.ray import RayParallelization


class Parabolas(ElementwiseProblem):
    """Nearest to two points at once."""

    def __init__(self, **options):
        super().__init__(n_var=2, n_obj=3, xl=-2, xu=2, **options)

    def _evaluate(self, x, out, *args, **kwargs):
        out["F"] = [((x - 1) ** 2).sum(), ((x + 1) ** 2).sum(), 0 * os.getpid()]


def front(**options):
    found = minimize(Parabolas(**options), NSGA2(pop_size=12), ("n_gen", 5), seed=1)
    return found.F[np.lexsort(found.F.T)]


ray.init(num_cpus=2)
parallel, serial = front(elementwise_runner=RayParallelization()), front()
print(json.dumps({"ray": ray.__file__, "points": len(parallel), "same": bool(np.array_equal(parallel, serial))}))
