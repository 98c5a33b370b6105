"""Cubed: the chunks of an array in bounded memory are tasks of its executor "ray"; compared with NumPy."""

import json
import tempfile

import cubed
import cubed.array_api as xp
import numpy as np
import ray
from cubed.runtime.create import create_executor

ray.init(num_cpus=2)
spec = cubed.Spec(tempfile.mkdtemp(), allowed_mem="200MB", executor=create_executor("ray"))
numbers = np.arange(10_000.0).reshape(100, 100)
left, right = (
    cubed.from_array(numbers, chunks=(40, 40), spec=spec),
    cubed.from_array(numbers.T.copy(), chunks=(40, 40), spec=spec),
)
product = xp.matmul(left, right)
found, mean = product.compute(), xp.mean(left + 1, axis=0).compute()
print(json.dumps({
    "ray": ray.__file__,
    "product": bool(np.allclose(found, numbers @ numbers.T)),
    "mean": bool(np.allclose(mean, (numbers + 1).mean(axis=0))),
}))  # fmt: skip
