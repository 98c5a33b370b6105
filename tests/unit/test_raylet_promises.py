"""What the GCS has counted as taken when it granted leases, and the node's views of a large cluster."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from raylet_kit import CPU1, FAR, Node

from hpcray.common.ids import HEAD
from hpcray.common.resources import to_units
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.core.raylet.head_reporter import DECREASE_REPORT_DELAY, REPORT_INTERVAL_PER_NODE, SMALL_CLUSTER
from hpcray.protocol import messages as m

LARGE = 2 * SMALL_CLUSTER
QUEUED = m.Shape(CPU1.resources, "node:0")


class Pair:
    """A node of a large cluster and what the head knows of it; messages wait until they are delivered."""

    def __init__(self, cpus: int = 4) -> None:
        self.node = Node(cpus, LARGE)
        self.head = ClusterResources()
        self.head.nodes_joined([m.NodeInfo(0, "id", "host", "a", 1, to_units({"CPU": cpus}), b"", "", 0)])
        self.driver = self.node.driver()
        self.grants: deque[m.GrantLeases] = deque()
        self.leases: list[tuple[bytes, bytes]] = []
        self.asked = 0
        self.views_delivered()

    def decide(self, count: int) -> None:
        for _, part in self.head.choose(CPU1, count):
            self.grants.append(m.GrantLeases(FAR, 0, CPU1, part))

    def grant_delivered(self) -> None:
        if self.grants:
            self.node.handle(HEAD, self.grants.popleft())

    def views_delivered(self) -> int:
        views = self.node.take(m.NodeView)
        for view in views:
            self.head.apply_view(view)
        return len(views)

    def work_here(self) -> None:
        self.asked += 1
        self.node.handle(self.driver, m.RequestLeases(1, CPU1, self.asked))

    def give_back(self) -> None:
        for holder in (FAR, self.driver):
            self.leases += [(holder, one.lease) for one in self.node.take(m.LeaseGranted, holder)]
        if self.leases:
            holder, lease = self.leases.pop(0)
            self.node.handle(holder, m.ReturnLease(lease))

    def known(self) -> int:
        return self.head.nodes[0].available["CPU"]

    def free(self) -> int:
        return self.node.core.available()["CPU"]


def test_a_node_of_a_large_cluster_that_grants_what_was_promised_sends_no_view() -> None:
    pair = Pair()
    pair.decide(3)
    pair.grant_delivered()
    assert pair.views_delivered() == 0
    assert pair.known() == pair.free() == 10_000
    pair.node.tick(DECREASE_REPORT_DELAY)
    assert pair.views_delivered() == 1, "a view may have crossed the grant"


def test_a_node_of_a_small_cluster_sends_a_view_for_each_grant() -> None:
    node = Node(4, SMALL_CLUSTER)
    node.take(m.NodeView)
    node.handle(HEAD, m.GrantLeases(FAR, 0, CPU1, 1))
    assert [view.available for view in node.take(m.NodeView)] == [{"CPU": 30_000}]


def test_a_grant_that_may_queue_and_its_withdrawal_are_no_reason_for_a_view() -> None:
    pair = Pair(1)
    pair.node.handle(HEAD, m.GrantLeases(FAR, 0, QUEUED, 2))
    pair.node.handle(HEAD, m.GrantLeases(FAR, 0, QUEUED, 0))
    refused = pair.node.take(m.GrantLeasesRefused)
    assert [one.count for one in refused] == [1]
    assert pair.views_delivered() == 1, "with the refusal: else the head would send the same again"


def test_a_promise_that_a_view_undid_is_known_again_soon() -> None:
    pair = Pair()
    pair.decide(1)
    pair.node.now = 2 * DECREASE_REPORT_DELAY
    pair.work_here()
    pair.views_delivered()
    assert pair.known() == 30_000, "it was sent before the node knew of the grant"
    pair.grant_delivered()
    assert pair.free() == 20_000
    pair.node.tick(4 * DECREASE_REPORT_DELAY)
    pair.views_delivered()
    assert pair.known() == 20_000


def test_what_requests_wait_for_is_reported_ten_times_sooner() -> None:
    pair = Pair()
    pair.work_here()
    pair.node.tick(1.0)
    pair.views_delivered()
    interval = REPORT_INTERVAL_PER_NODE * LARGE
    pair.node.now = 1.0 + 0.2 * interval
    pair.node.handle(HEAD, m.ResourceContention(["memory"]))
    pair.give_back()
    assert pair.views_delivered() == 0, "nobody waits for CPUs"
    pair.node.handle(HEAD, m.ResourceContention(["CPU"]))
    assert pair.views_delivered() == 1 and pair.known() == pair.free() == 40_000
    pair.work_here()
    pair.node.tick(3.0)
    pair.views_delivered()
    pair.node.now = 3.0 + 0.05 * interval
    pair.give_back()
    assert pair.views_delivered() == 0, "but not each of them"
    pair.node.now = 3.0 + 0.2 * interval
    pair.node.handle(HEAD, m.ResourceContention())
    assert pair.views_delivered() == 0, "nobody waits any more"


@given(st.lists(st.sampled_from(["one", "three", "grant", "views", "here", "back", "later"]), max_size=60))
def test_whatever_crosses_the_head_knows_what_is_free_when_all_has_arrived(events: list[str]) -> None:
    pair = Pair()
    for event in events:
        if event == "one":
            pair.decide(1)
        elif event == "three":
            pair.decide(3)
        elif event == "grant":
            pair.grant_delivered()
        elif event == "views":
            pair.views_delivered()
        elif event == "here":
            pair.work_here()
        elif event == "back":
            pair.give_back()
        else:
            pair.node.now += DECREASE_REPORT_DELAY / 3
    while pair.grants:
        pair.grant_delivered()
    pair.node.tick(pair.node.now + DECREASE_REPORT_DELAY)
    pair.views_delivered()
    assert pair.known() == pair.free()
