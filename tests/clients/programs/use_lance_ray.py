"""lance-ray: a Lance dataset written, read, filtered and widened by a column, with Ray Data; compared with pandas."""

import json
import os
import tempfile

import lance
import lance_ray
import pandas
import pyarrow
import ray

ray.init(num_cpus=2)
place = os.path.join(tempfile.mkdtemp(), "numbers.lance")
frame = pandas.DataFrame({"id": range(1000), "value": [number * number % 97 for number in range(1000)]})
lance_ray.write_lance(ray.data.from_pandas(frame).repartition(4), place, min_rows_per_file=100, max_rows_per_file=250)


def doubled(batch):
    return pyarrow.record_batch([[2 * value for value in batch["value"].to_pylist()]], names=["doubled"])


lance_ray.add_columns(place, transform=doubled, read_columns=["value"], concurrency=2)
read = lance_ray.read_lance(place, columns=["id", "doubled"], filter="value < 10").to_pandas().sort_values("id")
right = frame[frame["value"] < 10]
print(json.dumps({
    "ray": ray.__file__,
    "fragments": len(lance.dataset(place).get_fragments()),
    "rows": lance.dataset(place).count_rows(),
    "same_ids": read["id"].tolist() == right["id"].tolist(),
    "same_values": read["doubled"].tolist() == (2 * right["value"]).tolist(),
}))  # fmt: skip
