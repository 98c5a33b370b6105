"""Daft's Ray runner: a filter, a grouping, a join, a function of one's own and a repartition."""

import json

import daft
import ray

ray.init(num_cpus=4)
daft.set_runner_ray()
frame = daft.from_pydict({"a": list(range(1000)), "b": [i % 7 for i in range(1000)]}).into_partitions(4)


@daft.udf(return_dtype=daft.DataType.int64())
def doubled(column):
    return [2 * value for value in column.to_pylist()]


sums = frame.where(daft.col("a") >= 10).groupby("b").agg(daft.col("a").sum().alias("sum")).sort("b").to_pydict()
names = daft.from_pydict({"b": list(range(7)), "name": [f"n{i}" for i in range(7)]})
print(json.dumps({
    "ray": ray.__file__,
    "sums": sums["sum"],
    "names": frame.join(names, on="b").sort("a").limit(9).to_pydict()["name"],
    "doubled": frame.with_column("c", doubled(frame["a"])).sum("c").to_pydict()["c"],
    "repartitioned": len(frame.repartition(8, "b").collect()),
}))  # fmt: skip
