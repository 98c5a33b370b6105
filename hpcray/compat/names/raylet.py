"""`ray._raylet`: ids, refs, generators and the keys of labels."""

from __future__ import annotations

from hpcray.compat.names.ids import (
    ActorClassID,
    ActorID,
    BaseID,
    ClusterID,
    FunctionID,
    JobID,
    NodeID,
    PlacementGroupID,
    TaskID,
    UniqueID,
    WorkerID,
)
from hpcray.runtime.refs import ObjectRef
from hpcray.runtime.streams import DynamicObjectRefGenerator, ObjectRefGenerator

ObjectID = ObjectRef
StreamingObjectRefGenerator = ObjectRefGenerator

RAY_NODE_ID_KEY = "ray.io/node-id"
RAY_NODE_ACCELERATOR_TYPE_KEY = "ray.io/accelerator-type"
RAY_NODE_MARKET_TYPE_KEY = "ray.io/market-type"
RAY_NODE_REGION_KEY = "ray.io/availability-region"
RAY_NODE_ZONE_KEY = "ray.io/availability-zone"
RAY_NODE_GROUP_KEY = "ray.io/node-group"

__all__ = [
    "RAY_NODE_ACCELERATOR_TYPE_KEY",
    "RAY_NODE_GROUP_KEY",
    "RAY_NODE_ID_KEY",
    "RAY_NODE_MARKET_TYPE_KEY",
    "RAY_NODE_REGION_KEY",
    "RAY_NODE_ZONE_KEY",
    "ActorClassID",
    "ActorID",
    "BaseID",
    "ClusterID",
    "DynamicObjectRefGenerator",
    "FunctionID",
    "JobID",
    "NodeID",
    "ObjectID",
    "ObjectRef",
    "ObjectRefGenerator",
    "PlacementGroupID",
    "StreamingObjectRefGenerator",
    "TaskID",
    "UniqueID",
    "WorkerID",
]
