"""sktime: forecasts of many series and of many windows on its backend "ray", compared with those of one process."""

import json

import numpy as np
import pandas as pd
import ray
from sklearn.linear_model import LinearRegression
from sktime.forecasting.compose import make_reduction
from sktime.forecasting.model_evaluation import evaluate
from sktime.forecasting.naive import NaiveForecaster
from sktime.performance_metrics.forecasting import MeanAbsoluteError
from sktime.split import ExpandingWindowSplitter

steps = np.arange(48)
one = pd.Series(steps + 5 * np.sin(steps), index=pd.period_range("2020-01", periods=48, freq="M"))
many = pd.concat({name: (one * factor).to_frame("y") for name, factor in (("a", 1), ("b", 2), ("c", 3))})


def windows(**backend):
    found = evaluate(
        make_reduction(LinearRegression(), window_length=6),
        ExpandingWindowSplitter(initial_window=36, step_length=3, fh=[1, 2]),
        one,
        scoring=MeanAbsoluteError(),
        **backend,
    )
    return found["test_MeanAbsoluteError"].to_numpy()


def panel(backend):
    forecaster = NaiveForecaster(strategy="drift").set_config(**backend)
    return forecaster.fit(many, fh=[1, 2, 3]).predict().to_numpy()


ray.init(num_cpus=2)
on_ray = {"backend": "ray", "backend_params": {"shutdown_ray": False}}
found = windows(**on_ray), panel({"backend:parallel": "ray", "backend:parallel:params": {"shutdown_ray": False}})
right = windows(), panel({})
print(json.dumps({
    "ray": ray.__file__,
    "windows": len(found[0]),
    "same_windows": bool(np.allclose(found[0], right[0])),
    "forecasts": found[1].size,
    "same_forecasts": bool(np.allclose(found[1], right[1])),
}))  # fmt: skip
