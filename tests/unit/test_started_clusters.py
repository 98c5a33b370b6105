"""Which cluster a name means, which nodes `ray stop` ends, and the order in which `init()` looks."""

from __future__ import annotations

from typing import Any

import pytest

from hpcray.ray_start.clusters import (
    Asker,
    SeveralClustersError,
    StartedCluster,
    StartedNode,
    clusters_named,
    nodes_to_stop,
    parse_cluster_name,
)
from hpcray.ray_start.order import Asked, Join, NoStartedCluster, Refuse, Seen, Step, Wait, next_step
from hpcray.ray_start.registry import FAILED, STARTING, UP, StartCall

N1 = ("n1", "10.99.0.1", "10.88.0.1")
N2 = ("n2", "10.99.0.2")


def cluster(ident: str, allocation: str = "slurm-7", names: tuple[str, ...] = N1, **more: Any) -> StartedCluster:
    fields = {"session": f"s-{ident}", "host": names[0], "names": names, "address": names[1], "port": 6379}
    return StartedCluster(ident=ident, allocation=allocation, **{**fields, **more})


def node(of: StartedCluster, allocation: str = "", head: bool = False) -> StartedNode:
    return StartedNode(
        cluster=of,
        session_dir=f"/tmp/{of.ident}",
        allocation=allocation or of.allocation,
        keeper=1,
        started=1,
        head=head,
    )


def call(state: str = STARTING, **more: Any) -> StartCall:
    fields = {
        "ident": "c",
        "command": "ray start --head",
        "allocation": "slurm-7",
        "host": "n1",
        "pid": 1,
        "started": 1,
    }
    return StartCall(**{**fields, "machine": "", "begun": 0.0, "state": state, **more})


def asker(allocation: str = "slurm-7", names: tuple[str, ...] = N1, resolved: tuple[str, ...] = ()) -> Asker:
    return Asker(allocation, frozenset(names), frozenset(resolved))


def named(text: str, *known: StartedCluster, by: Asker | None = None) -> list[str]:
    name = parse_cluster_name(text)
    assert name is not None
    return [found.ident for found in clusters_named(name, known, by or asker())]


@pytest.mark.parametrize("text", ["10.99.0.1:6379", "10.88.0.1:6379", "n1:6379", "N1.site.org:6379", "localhost:6379"])
def test_every_name_and_address_of_the_heads_host_means_its_cluster(text: str) -> None:
    assert named(text, cluster("a")) == ["a"]


def test_a_name_that_only_the_system_knows_is_resolved_by_who_asks() -> None:
    assert named("n1-ib0:6379", cluster("a")) == []
    assert named("n1-ib0:6379", cluster("a"), by=asker(resolved=("10.88.0.1",))) == ["a"]


def test_the_loopback_means_the_host_of_who_asks() -> None:
    assert named("127.0.0.1:6379", cluster("a"), by=asker(names=N2)) == []
    assert named("127.0.0.1:6379", cluster("a"), cluster("b", names=N2), by=asker(names=N2)) == ["b"]


def test_a_port_is_part_of_the_name_and_those_of_urls_choose_only_among_several() -> None:
    red, blue = cluster("red", dashboard_port=8265), cluster("blue", port=6380, dashboard_port=8266, client_port=10002)
    assert named("n1:6379", red, blue) == ["red"] and named("n1:6380", red, blue) == ["blue"]
    assert named("n1:7000", red, blue) == []
    assert named("http://n1:8266", red, blue) == ["blue"] and named("ray://n1:10002", red, blue) == ["blue"]
    assert named("http://n1:9999", red) == ["red"] and named("ray://n1", red) == ["red"]
    assert sorted(named("http://n1:9999", red, blue)) == ["blue", "red"]


def test_the_own_allocation_comes_before_others_and_a_later_cluster_before_an_earlier() -> None:
    old, new = cluster("old", started=1.0), cluster("new", started=2.0)
    other = cluster("other", allocation="slurm-8", started=3.0)
    assert named("n1:6379", old, other, new) == ["new", "old"]
    assert named("n1:6379", old, other, by=asker("slurm-9")) == ["other", "old"]
    assert named("n1:6379", old, other, by=asker("")) == ["other", "old"]


def test_ray_stop_ends_nodes_of_its_allocation_only() -> None:
    seven, eight, outside = node(cluster("a")), node(cluster("b", "slurm-8")), node(cluster("c", ""))
    assert nodes_to_stop([seven, eight, outside], "slurm-7") == ([seven], [])
    assert nodes_to_stop([seven, eight], "slurm-9") == ([], [])


def test_ray_stop_of_a_shell_without_an_allocation() -> None:
    seven, eight, outside = node(cluster("a")), node(cluster("b", "slurm-8")), node(cluster("c", ""))
    assert nodes_to_stop([seven], "") == ([seven], [])
    assert nodes_to_stop([seven, eight], "") == ([], ["slurm-7", "slurm-8"])
    assert nodes_to_stop([seven, outside], "") == ([outside], [])
    assert nodes_to_stop([], "") == ([], [])


def step(address: str = "", *nodes: StartedNode, by: Asker | None = None, **more: Any) -> Step:
    asked = {name: more.pop(name) for name in ("ray_address", "hpcray_address", "session") if name in more}
    return next_step(Asked(address=address, **asked), Seen(asker=by or asker(), nodes=nodes, **more))


def test_init_without_an_address_joins_the_cluster_of_its_allocation_and_no_other() -> None:
    a, b = node(cluster("a")), node(cluster("b", "slurm-8"))
    assert step("", a, b) == Join("/tmp/a") == step("auto", a, b)
    assert step("", b) == NoStartedCluster()
    assert step("", node(cluster("a"), allocation="slurm-9")) == Join("/tmp/a")  # a node of another job


def test_where_an_allocation_is_not_known_the_only_started_cluster_here_is_meant() -> None:
    a, b = node(cluster("a")), node(cluster("b", "slurm-8"))
    assert step("", a, by=asker("")) == Join("/tmp/a")
    assert step("", node(cluster("c", ""))) == Join("/tmp/c")  # started by ssh
    with pytest.raises(SeveralClustersError, match=r"more than one cluster:\n.*slurm-7.*\n.*slurm-8"):
        step("", a, b, by=asker(""))


def test_an_address_comes_before_the_environment_and_that_before_a_started_cluster() -> None:
    red, blue = node(cluster("red")), node(cluster("blue", port=6380))
    assert step("n1:6380", red, blue) == Join("/tmp/blue")
    assert step("auto", red, blue, ray_address="n1:6380") == Join("/tmp/blue")
    assert step("", red, hpcray_address="/tmp/launched") == NoStartedCluster()
    assert step("auto", red, session="/tmp/own") == NoStartedCluster()
    assert step("/tmp/hpcray-0/12345678", red) == NoStartedCluster() == step("local", red)


def test_no_call_of_ray_start_leaves_init_as_it_was() -> None:
    assert step("") == NoStartedCluster() == step("auto")


def test_init_waits_for_a_node_that_is_on_its_way_and_says_what_it_saw() -> None:
    found = step("", calls=[call()])
    assert isinstance(found, Wait) and "`ray start --head` on n1 is starting" in found.reason
    assert isinstance(step("auto", calls=[call(UP)]), Wait)
    assert found.reason.count(";") >= 3 and "init(address='local')" in found.reason  # three ways out


def test_outside_of_an_allocation_only_a_node_that_starts_on_this_host_is_waited_for() -> None:
    outside = asker("")
    for past in (call(UP), call(FAILED, reason="no such port"), call()):
        assert step("", calls=[past], by=outside, machine="another") == NoStartedCluster()
    assert step("", calls=[call(UP)], by=outside, gone=frozenset("c")) == NoStartedCluster()
    assert isinstance(step("", calls=[call()], by=outside, machine=call().machine), Wait)


def test_a_command_that_failed_in_the_background_is_named() -> None:
    found = step("", calls=[call(FAILED, reason="No such option: --porti")])
    assert isinstance(found, Refuse) and "No such option: --porti" in found.reason
    named = step("n1:6379", calls=[call(FAILED, reason="no such port")])
    assert isinstance(named, Refuse) and "no such port" in named.reason


def test_a_node_that_was_killed_with_its_step_is_named_with_block() -> None:
    found = step("", calls=[call(UP)], gone=frozenset("c"))
    assert isinstance(found, Refuse) and "was killed" in found.reason and "--block" in found.reason


def test_a_cluster_without_a_node_here_is_waited_for_and_named() -> None:
    found = step("n2:6379", known=[cluster("b", names=N2)])
    assert isinstance(found, Wait) and "no node of it is on this host" in found.reason


def test_a_url_of_ray_client_from_outside_says_that_it_cannot_be() -> None:
    found = step("ray://n2:10001", by=asker(""))
    assert isinstance(found, Refuse) and "outside of the job" in found.reason
    assert step("ray://n1:10001", node(cluster("a"))) == Join("/tmp/a")


def test_where_another_job_has_that_name_here_the_own_cluster_is_waited_for() -> None:
    asked, other = Asked(address="n1:6379"), node(cluster("a", "slurm-8"))
    assert isinstance(next_step(asked, Seen(asker=asker(), nodes=[other], calls=[call()])), Wait)
    assert isinstance(next_step(asked, Seen(asker=asker(), nodes=[other])), Join)
    worker = node(cluster("a", "slurm-8"), allocation="slurm-7")  # the head is in a job of its own
    assert isinstance(next_step(asked, Seen(asker=asker(), nodes=[worker], calls=[call(UP)])), Join)
