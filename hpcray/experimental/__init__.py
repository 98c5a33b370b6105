"""`ray.experimental`: the job's key-value store, where objects are, progress bars of workers."""

from hpcray.experimental import internal_kv, tqdm_ray
from hpcray.experimental.locations import get_local_object_locations, get_object_locations

__all__ = ["get_local_object_locations", "get_object_locations", "internal_kv", "tqdm_ray"]
