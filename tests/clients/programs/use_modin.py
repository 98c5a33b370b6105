"""Modin on its Ray engine: real data are read, grouped and merged, and compared with what pandas makes of them."""

import json
import os
import tempfile

import modin.config
import pandas
import ray
from sklearn.datasets import load_breast_cancer

ray.init(num_cpus=2)
modin.config.Engine.put("ray")
modin.config.NPartitions.put(4)
import modin.pandas as pd  # noqa: E402

data = load_breast_cancer(as_frame=True)
known = data.frame.copy()
known["kind"] = known["target"].map(dict(enumerate(data.target_names)))
path = os.path.join(tempfile.mkdtemp(), "cells.csv")
known.to_csv(path, index=False)
known = pandas.read_csv(path)
frame = pd.read_csv(path)


def same(mine, theirs) -> bool:
    mine = mine._to_pandas() if hasattr(mine, "_to_pandas") else mine
    pandas.testing.assert_frame_equal(mine, theirs, check_dtype=False)
    return True


names = pandas.DataFrame({"target": [0, 1], "word": ["bad", "good"]})
wanted = known.merge(names, on="target").sort_values(["mean area", "mean radius"]).reset_index(drop=True)
got = frame.merge(pd.DataFrame(names), on="target").sort_values(["mean area", "mean radius"]).reset_index(drop=True)
numbers = ["mean radius", "mean area", "worst area"]
print(json.dumps({
    "ray": ray.__file__,
    "engine": modin.config.Engine.get(),
    "read": same(frame, known),
    "groupby": same(frame.groupby("kind")[numbers].mean(), known.groupby("kind")[numbers].mean()),
    "merge": same(got, wanted),
    "apply": same(frame[numbers].map(lambda x: x * 2), known[numbers].map(lambda x: x * 2)),
}))  # fmt: skip
