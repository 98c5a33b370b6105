"""smallpond: a Parquet file is partitioned by hash, and each part queried by DuckDB in a task."""

import json
import os
import tempfile

import pandas
import ray
import smallpond

if __name__ == "__main__":
    place = tempfile.mkdtemp()
    path = os.path.join(place, "prices.parquet")
    pandas.DataFrame({"ticker": ["a", "b", "c", "d"] * 25, "price": range(100)}).to_parquet(path)
    session = smallpond.init(data_root=os.path.join(place, "root"))
    frame = session.read_parquet(path).repartition(3, hash_by="ticker")
    frame = session.partial_sql("SELECT ticker, min(price) low, max(price) high FROM {0} GROUP BY ticker", frame)
    found = frame.to_pandas().sort_values("ticker")
    print(json.dumps({"ray": ray.__file__, "rows": found.values.tolist()}))
