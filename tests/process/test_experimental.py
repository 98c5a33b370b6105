"""The job's key-value store, where objects are, serializers, progress bars."""

from __future__ import annotations

import numpy as np
import pytest
from engine import hpcray_only, ray

from hpcray.experimental import get_local_object_locations, get_object_locations, internal_kv
from hpcray.util import deregister_serializer, register_serializer

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2}


class TestKeyValue:
    def test_keys_are_stored_read_and_deleted(self):
        assert internal_kv._internal_kv_initialized()
        assert internal_kv._internal_kv_put("key", "one") is False
        assert internal_kv._internal_kv_put(b"key", b"two", overwrite=False) is True
        assert internal_kv._internal_kv_get("key") == b"one"
        assert internal_kv._internal_kv_put("key", b"three") is True
        assert internal_kv._internal_kv_get(b"key") == b"three"
        assert internal_kv._internal_kv_exists("key")
        assert internal_kv._internal_kv_del("key") == 1
        assert internal_kv._internal_kv_del("key") == 0
        assert internal_kv._internal_kv_get("key") is None

    def test_keys_are_listed_by_prefix_and_namespace(self):
        for name in ("a1", "a2", "b1"):
            internal_kv._internal_kv_put(name, name, namespace="space")
        assert internal_kv._internal_kv_list("a", namespace=b"space") == [b"a1", b"a2"]
        assert internal_kv._internal_kv_list("a") == []
        assert internal_kv._internal_kv_get("a1", namespace="other") is None
        assert internal_kv._internal_kv_del("a", del_by_prefix=True, namespace="space") == 2
        assert internal_kv._internal_kv_list("", namespace="space") == [b"b1"]

    def test_the_key_value_store_is_shared_by_the_job(self):
        ray.get(ray.remote(lambda: internal_kv._internal_kv_put("from a task", b"\0\xff")).remote())
        assert internal_kv._internal_kv_get("from a task") == b"\0\xff"

    def test_keys_and_values_of_other_types_are_refused(self):
        with pytest.raises(TypeError, match="bytes or str"):
            internal_kv._internal_kv_put("key", 3)


class TestLocations:
    def test_locations_of_large_and_small_objects(self):
        large, small = ray.put(np.zeros(100_000)), ray.put(1)
        made = ray.remote(lambda: np.zeros(100_000)).remote()
        ray.wait([made])
        found = get_object_locations([large, small, made])
        node = ray.get_runtime_context().get_node_id()
        assert found[large]["node_ids"] == found[made]["node_ids"] == [node]
        assert found[large]["object_size"] > 800_000
        assert found[small]["node_ids"] == [node] and found[small]["object_size"] < 100
        assert get_local_object_locations([large])[large]["node_ids"] == [node]


class Stubborn:
    def __init__(self, value):
        self.value, self.lock = value, None

    def __reduce__(self):
        raise TypeError("not me")


def test_registered_serializers_are_used_until_deregistered():
    with pytest.raises(TypeError, match="not me"):
        ray.put(Stubborn(1))
    register_serializer(Stubborn, serializer=lambda one: one.value, deserializer=lambda value: Stubborn(value + 1))
    try:
        assert ray.get(ray.put(Stubborn(1))).value == 2
        assert ray.get(ray.remote(lambda one: one.value).remote(Stubborn(2))) == 3
        assert ray.get(ray.remote(lambda rows: rows["a"][0].value).remote({"a": [Stubborn(3)]})) == 4
    finally:
        deregister_serializer(Stubborn)
    deregister_serializer(Stubborn)
    with pytest.raises(TypeError, match="not me"):
        ray.put(Stubborn(1))
