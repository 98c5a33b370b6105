"""Feast: its Ray offline store joins to each entity the features that it had at a point in time."""

import json
import os
import tempfile
from datetime import datetime, timedelta, timezone

import pandas as pd
import ray
from feast import Entity, FeatureStore, FeatureView, Field, RepoConfig, ValueType
from feast.infra.offline_stores.file_source import FileSource
from feast.types import Int64

place = tempfile.mkdtemp()
now = datetime(2026, 1, 10, tzinfo=timezone.utc)
rows = [
    {"driver": driver, "trips": 100 * driver + day, "event_timestamp": now - timedelta(days=day)}
    for driver in range(20)
    for day in range(5)
]
frame = pd.DataFrame(rows)
path = os.path.join(place, "drivers.parquet")
frame.to_parquet(path)

ray.init(num_cpus=2)
config = RepoConfig(
    project="drivers",
    provider="local",
    registry=os.path.join(place, "registry.db"),
    offline_store={"type": "ray", "storage_path": os.path.join(place, "ray")},
    batch_engine={"type": "ray.engine", "max_workers": 2},
    online_store={"type": "sqlite", "path": os.path.join(place, "online.db")},
    entity_key_serialization_version=3,
)
store = FeatureStore(config=config)
driver = Entity(name="driver", join_keys=["driver"], value_type=ValueType.INT64)
view = FeatureView(
    name="drivers",
    entities=[driver],
    ttl=timedelta(days=30),
    schema=[Field(name="trips", dtype=Int64)],
    source=FileSource(path=path, timestamp_field="event_timestamp"),
)
store.apply([driver, view])
asked = pd.DataFrame(
    {"driver": range(20), "event_timestamp": [now - timedelta(days=number % 4, hours=-1) for number in range(20)]}
)
history = store.get_historical_features(asked, features=["drivers:trips"]).to_df().sort_values("driver")
print(json.dumps({
    "ray": ray.__file__,
    "rows": len(history),
    "history": history["trips"].tolist() == [100 * number + number % 4 for number in range(20)],
}))  # fmt: skip
