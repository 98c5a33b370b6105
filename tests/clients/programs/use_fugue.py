"""Fugue's Ray engine: a transformation by parts, an aggregation and a join, compared with pandas."""

import json

import fugue.api as fa
import pandas as pd
import ray


def ranked(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(rank=frame["value"].rank(method="first").astype(int))


def rows(frame: pd.DataFrame, last: str) -> list:
    return sorted(map(tuple, frame[["key", "value", last]].values.tolist()))


if __name__ == "__main__":
    ray.init(num_cpus=2)
    frame = pd.DataFrame(
        {"key": [number % 5 for number in range(200)], "value": [number * 37 % 101 for number in range(200)]}
    )
    names = pd.DataFrame({"key": range(5), "name": list("abcde")})
    with fa.engine_context("ray"):
        parts = fa.transform(frame, ranked, schema="*,rank:long", partition="key", engine="ray", as_local=True)
        joined = fa.as_pandas(fa.inner_join(fa.as_fugue_df(frame), fa.as_fugue_df(names)))
    right = frame.assign(rank=frame.groupby("key")["value"].rank(method="first").astype(int))
    print(json.dumps({
        "ray": ray.__file__,
        "ranks": rows(fa.as_pandas(parts), "rank") == rows(right, "rank"),
        "joined": rows(joined, "name") == rows(frame.merge(names), "name"),
    }))  # fmt: skip
