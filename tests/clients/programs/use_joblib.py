"""A grid search of scikit-learn on joblib's backend "ray"."""

import json
import os

import joblib
import ray
from ray.util.joblib import register_ray
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC

images, labels = load_digits(return_X_y=True)
grid = {"C": [0.1, 1.0, 10.0], "gamma": [1e-4, 1e-3]}

ray.init(num_cpus=2)
register_ray()
search = GridSearchCV(SVC(), grid, cv=3, n_jobs=2)
with joblib.parallel_backend("ray", n_jobs=2):
    search.fit(images, labels)
    pids = set(joblib.Parallel()(joblib.delayed(os.getpid)() for _ in range(20)))
serial = GridSearchCV(SVC(), grid, cv=3).fit(images, labels)
print(json.dumps({
    "ray": ray.__file__, "best": search.best_params_, "serial_best": serial.best_params_,
    "score": search.best_score_, "serial_score": serial.best_score_, "pids": len(pids - {os.getpid()}),
}))  # fmt: skip
