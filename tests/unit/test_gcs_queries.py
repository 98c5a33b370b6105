"""Answers of the GCS."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.config import Config
from hpcray.common.ids import make_proc, raylet_of
from hpcray.common.resources import to_units
from hpcray.core.effects import Send
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.query_service import KeyValueStore
from hpcray.core.gcs.state_log import DirtyRows
from hpcray.protocol import messages as m

ME = make_proc(0, 5)
NUMBERS = itertools.count(1)
CPU1 = m.Shape((("CPU", 10_000),))


class QueryFailed(Exception):
    pass


def head(*cpus: float) -> Gcs:
    core = Gcs(Config())
    core.cluster_up(
        0.0,
        "s",
        [
            m.NodeInfo(
                n, f"id{n}", f"host{n}", f"10.0.0.{n}", 1, to_units({"CPU": c, "memory": 2.0**30}), b"", "mpi", 0
            )
            for n, c in enumerate(cpus)
        ],
    )
    return core


def ask(core: Gcs, method: str, *args: Any) -> Any:
    number = next(NUMBERS)
    (effect,) = core.handle(0.0, ME, m.GcsCall(number, method, msgspec.msgpack.encode(args)))
    assert isinstance(effect, Send) and effect.dest == ME
    reply = effect.msg
    assert isinstance(reply, m.GcsReply) and reply.req == number
    if not reply.ok:
        raise QueryFailed(reply.value.decode())
    return msgspec.msgpack.decode(reply.value)


def create(core: Gcs, number: int, name: str, namespace: str = "ns") -> bytes:
    actor = ME + number.to_bytes(5, "big")
    spec = m.ActorSpec(
        actor, "Counter", b"c", b"", [], CPU1, m.Shape(()), name, namespace, False, 0, 2, 4, {"inc": {"num_returns": 2}}
    )
    core.handle(0.0, ME, m.CreateActor(1, spec))
    return actor


def test_the_nodes_query_answers_in_the_form_of_ray_nodes() -> None:
    core = head(2, 4)
    core.node_died(0.0, 1, "power")
    alive, dead = ask(core, "nodes")
    assert alive["NodeID"] == "id0" and alive["Alive"] and alive["Index"] == 0
    assert alive["NodeManagerAddress"] == alive["NodeName"] == "10.0.0.0" and alive["NodeManagerHostname"] == "host0"
    assert alive["Resources"] == {
        "CPU": 2.0,
        "memory": 2.0**30,
        "node:10.0.0.0": 1.0,
        "node:__internal_head__": 1.0,
    }
    assert not dead["Alive"] and dead["Resources"] == {} and dead["DeathReason"] == "power"
    assert set(alive) == set(dead) >= {"NodeManagerPort", "ObjectManagerPort", "Labels", "MetricsExportPort"}


def test_resources_are_summed_over_living_nodes_and_never_negative() -> None:
    core = head(2, 4, 8)
    core.node_died(0.0, 2, "power")
    core.handle(0.0, raylet_of(0), m.NodeView(0, 1, {"CPU": -10_000}))
    core.handle(0.0, raylet_of(1), m.NodeView(1, 1, {"CPU": 15_000}))
    assert ask(core, "cluster_resources")["CPU"] == 6.0
    assert ask(core, "available_resources")["CPU"] == 1.5
    assert ask(core, "available_resources")["node:10.0.0.1"] == 1.0


def test_views_that_come_before_the_table_count() -> None:
    core = Gcs(Config())
    core.handle(0.0, raylet_of(0), m.NodeView(0, 3, {"CPU": 10_000}))
    info = m.NodeInfo(0, "id", "h", "a", 1, to_units({"CPU": 4}), b"", "mpi", 0)
    core.cluster_up(0.0, "s", [info])
    assert ask(core, "available_resources")["CPU"] == 1.0


def test_named_actors_are_found_and_listed() -> None:
    core = head(4)
    actor = create(core, 1, "counter")
    create(core, 2, "other", "elsewhere")
    create(core, 3, "")
    found = ask(core, "named_actor", "counter", "ns")
    assert found["actor"] == actor and found["methods"] == {"inc": {"num_returns": 2}}
    assert (found["class_name"], found["max_concurrency"], found["max_task_retries"]) == ("Counter", 4, 2)
    with pytest.raises(QueryFailed, match="no actor named 'counter' in namespace 'elsewhere'"):
        ask(core, "named_actor", "counter", "elsewhere")
    assert ask(core, "list_named_actors", False, "ns") == [{"name": "counter", "namespace": "ns"}]
    assert [row["name"] for row in ask(core, "list_named_actors", True, "")] == ["other", "counter"]
    core.handle(0.0, ME, m.KillActor(actor, True, "over"))
    with pytest.raises(QueryFailed, match="no actor"):
        ask(core, "named_actor", "counter", "ns")
    rows = {row["actor"]: row for row in ask(core, "actors")}
    assert rows[actor]["state"] == "DEAD" and rows[actor]["reason"].startswith("over") and len(rows) == 3


def test_the_status_query_shows_unmet_requests_and_free_resources() -> None:
    core = head(1)
    core.handle(0.0, raylet_of(0), m.UnmetLeaseRequest(ME, 0, m.Shape((("GPU", 10_000),)), 3))
    create(core, 1, "")
    status = ask(core, "status")
    assert status["unmet"] == [{"resources": {"GPU": 1.0}, "strategy": "", "count": 3, "holders": 1, "feasible": False}]
    assert status["actors"] == {"PENDING": 1} and status["waiting_actors"] == []
    assert status["nodes"][0]["total"]["CPU"] == 1.0


def test_the_key_value_queries_put_get_list_and_delete() -> None:
    core = head(1)
    assert ask(core, "kv_get", b"k", "ns") is None
    assert ask(core, "kv_put", b"k", b"1", False, "ns") is True
    assert ask(core, "kv_put", b"k", b"2", False, "ns") is False
    assert ask(core, "kv_get", b"k", "ns") == b"1"
    assert ask(core, "kv_put", b"k", b"3", True, "ns") is False
    assert ask(core, "kv_get", b"k", "ns") == b"3" and ask(core, "kv_get", b"k", "other") is None
    ask(core, "kv_put", b"kk", b"", True, "ns")
    assert ask(core, "kv_keys", b"k", "ns") == [b"k", b"kk"]
    assert (
        ask(core, "kv_exists", b"k", "ns") and ask(core, "kv_del", b"k", "ns") and not ask(core, "kv_del", b"k", "ns")
    )
    assert not ask(core, "kv_exists", b"k", "ns")


def test_wrong_queries_say_what_is_wrong() -> None:
    core = head(1)
    with pytest.raises(QueryFailed, match="unknown query 'nope'; hint: one of nodes"):
        ask(core, "nope")
    with pytest.raises(QueryFailed, match="'kv_get' got wrong arguments"):
        ask(core, "kv_get", b"k")


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "overwrite", "del"]), st.binary(max_size=1), st.sampled_from(["", "n"]))
)


@given(OPERATIONS)
def test_the_store_is_a_dictionary_per_namespace(operations: list[tuple[str, bytes, str]]) -> None:
    store, model = KeyValueStore(DirtyRows()), {"": dict[bytes, bytes](), "n": dict[bytes, bytes]()}
    for step, (what, key, space) in enumerate(operations):
        value = str(step).encode()
        if what == "del":
            assert store.delete(key, space) == (model[space].pop(key, None) is not None)
        else:
            assert store.put(key, value, what == "overwrite", space) == (key not in model[space])
            if what == "overwrite" or key not in model[space]:
                model[space][key] = value
        for name, expected in model.items():
            assert {key: store.get(key, name) for key in store.keys(b"", name)} == expected
