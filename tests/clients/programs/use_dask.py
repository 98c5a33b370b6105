"""An array computation of Dask on Ray's scheduler."""

import json
import os

import dask
import dask.array as da
import numpy as np
import ray
from ray.util.dask import enable_dask_on_ray, ray_dask_get

ray.init(num_cpus=2)
a = da.random.default_rng(1).random((1200, 400), chunks=(300, 200))
known = np.asarray(a.compute(scheduler="synchronous"))
with enable_dask_on_ray():
    covariance = da.cov(a, rowvar=False)
    q, r = da.linalg.qr(a.rechunk((300, 400)))
    got, again, mean = dask.compute(covariance, q @ r, (a - a.mean(axis=0)).std())
error = max(
    abs(got - np.cov(known, rowvar=False)).max(), abs(again - known).max(), abs(mean - (known - known.mean(0)).std())
)
where = dask.delayed(os.getpid)().compute(scheduler=ray_dask_get)
print(json.dumps({"ray": ray.__file__, "error": float(error), "tasks_elsewhere": where != os.getpid()}))
