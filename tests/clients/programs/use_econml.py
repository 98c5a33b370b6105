"""EconML: the folds of a double machine learning estimate are tasks of Ray; the effect is that without Ray."""

import json

import numpy as np
import ray
from econml.dml import LinearDML
from sklearn.linear_model import LassoCV

generator = np.random.default_rng(0)
features, controls = generator.normal(size=(500, 2)), generator.normal(size=(500, 3))
treatment = controls[:, 0] + generator.normal(size=500)
outcome = (2 + features[:, 0]) * treatment + controls[:, 0] + generator.normal(scale=0.1, size=500)


def effects(use_ray):
    options = {"use_ray": True, "ray_remote_func_options": {"num_cpus": 1}} if use_ray else {}
    model = LinearDML(model_y=LassoCV(), model_t=LassoCV(), cv=3, random_state=0, **options)
    return model.fit(outcome, treatment, X=features, W=controls).effect(features)


ray.init(num_cpus=2)
found = effects(True)
print(json.dumps({
    "ray": ray.__file__,
    "same": bool(np.allclose(found, effects(False))),
    "error": float(np.abs(found - (2 + features[:, 0])).mean()),
}))  # fmt: skip
