"""Labels: what users may write, what it means, and that schedulers choose by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.api.options import TASK_RULES, TaskOptions
from hpcray.api.scheduling_strategies import DoesNotExist, Exists, In, NodeAffinitySchedulingStrategy, NotIn
from hpcray.api.scheduling_strategies import NodeLabelSchedulingStrategy as ByLabels
from hpcray.common.config import Config
from hpcray.common.labels import (
    NODE_ID,
    bound_to,
    conditions,
    from_strategy,
    labels_problem,
    labels_text,
    names_nodes,
    node_affinity,
    parse_labels,
    show_strategy,
    tier,
    to_strategy,
    with_conditions,
)
from hpcray.common.resources import ANY, CAPTURING, GROUP, names_in, to_units
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.protocol.messages import NodeInfo, Shape
from hpcray.runtime.node.options import NodeOptions

LABELS = [{"region": "us", "rack": "1"}, {"region": "us", "rack": "2"}, {"region": "eu"}, {}]


def matching(selector: dict[str, str]) -> list[int]:
    wanted = conditions(selector)
    return [index for index, labels in enumerate(LABELS) if tier([wanted], labels) == 0]


@pytest.mark.parametrize(
    ("selector", "nodes"),
    [
        ({"region": "us"}, [0, 1]),
        ({"region": "!us"}, [2, 3]),
        ({"region": "in(us,eu)"}, [0, 1, 2]),
        ({"region": "in(us, eu)", "rack": "!in(1, 3)"}, [1, 2]),
        ({"region": "!in(us,eu)"}, [3]),
        ({"region": "us", "rack": "2"}, [1]),
        ({"region": ""}, []),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_selectors_mean_what_ray_says(selector: dict[str, str], nodes: list[int]) -> None:
    assert TASK_RULES["label_selector"].value_constraint(selector) is None  # type: ignore[misc]
    assert matching(selector) == nodes


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ({"region": "-us"}, "Invalid label selector value `-us`"),
        ({"region": "in()"}, "Invalid label selector value"),
        ({"region": "in(us"}, "Invalid label selector value"),
        ({"region": "!!us"}, "Invalid label selector value"),
        ({"region": 3}, "Invalid label selector value"),
        ({"-region": "us"}, "Invalid label key name `-region`"),
        ({"a..b/region": "us"}, "Invalid label key prefix `a..b`"),
        ({"a" * 64: "us"}, "Invalid label key name"),
    ],
)
def test_bad_selectors_are_refused_in_rays_words(selector: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        TaskOptions({"label_selector": selector})


def test_bad_fallbacks_are_refused() -> None:
    for fallback, words in (
        ([3], "must be a dictionary"),
        ([{}], "Empty dictionary found"),
        ([{"num_cpus": 1}], "Unsupported option found: 'num_cpus'"),
        ([{"label_selector": {"a": "-"}}], "Invalid label selector value"),
    ):
        with pytest.raises(ValueError, match=words):
            TaskOptions({"label_selector": {"a": "b"}, "fallback_strategy": fallback})
    with pytest.raises(TypeError, match="label_selector"):
        TaskOptions({"label_selector": "a"})


def test_a_selector_with_a_node_means_that_node() -> None:
    node = "ab" * 28
    for soft, other in ((False, None), (True, 1)):
        strategy = NodeAffinitySchedulingStrategy(node, soft)
        text = TaskOptions({"label_selector": {"a": "b"}, "scheduling_strategy": strategy}).shape.strategy
        _, tiers = from_strategy(text)
        assert tier(tiers, {NODE_ID: node, "a": "b"}) == 0 and tier(tiers, {NODE_ID: node}) is None
        assert tier(tiers, {NODE_ID: "cd" * 28, "a": "b"}) == other and names_nodes(text) is not soft


def test_conditions_inside_of_a_group() -> None:
    labels = TaskOptions({"label_selector": {"a": "b"}}).shape.strategy
    for group in (GROUP, CAPTURING):
        text = with_conditions(group, labels)
        assert text.startswith(group) and from_strategy(text) == from_strategy(labels)
        assert node_affinity(text) is None and not names_nodes(text) and not bound_to(text, 0)
        assert with_conditions(group, "") == with_conditions(group, "SPREAD") == group


def test_labels_of_a_node_are_checked() -> None:
    assert parse_labels("region=us, rack=12") == {"region": "us", "rack": "12"} and parse_labels("") == {}
    for text in ("region", "a=b=c", "-a=b", "a=b$", "ray.io/node-id=x"):
        with pytest.raises(ValueError, match="labels"):
            parse_labels(text)
    assert labels_problem({"ray.io/accelerator-type": "A100"}) is None
    assert "must be a str" in str(labels_problem({"a": 1}))
    assert Config.from_env({"HPCRAY_LABELS": "a=b"}).labels == "a=b"
    with pytest.raises(ValueError, match="labels 'a'"):
        NodeOptions(config={"labels": "a"}).settings()


WORDS = st.sampled_from(["a", "b1", "c-d", "e.f_g"])


@given(st.dictionaries(WORDS, WORDS))
def test_labels_survive_writing_and_parsing(labels: dict[str, str]) -> None:
    assert parse_labels(labels_text(labels)) == labels


@given(
    st.lists(st.dictionaries(WORDS, st.sampled_from(["a", "!a", "in(a,b)", "!in(a, c)"])), max_size=4), st.booleans()
)
def test_conditions_survive_writing_and_parsing(selectors: list[dict[str, str]], spread: bool) -> None:
    wanted = list(dict.fromkeys(conditions(selector) for selector in selectors))
    text = to_strategy(wanted, spread)
    assert from_strategy(text) == (spread, tuple(wanted))
    assert show_strategy(text) is not None


def cluster(cpus: int = 2) -> ClusterResources:
    view = ClusterResources()
    view.nodes_joined(
        NodeInfo(n, f"id{n}", "h", "a", 1, to_units({"CPU": cpus}), b"", "mpi", 0, labels)
        for n, labels in enumerate(LABELS)
    )
    return view


def shape_of(**given: object) -> Shape:
    return TaskOptions(given).shape


def test_label_strategies_try_hard_and_soft_conditions_then_hard_ones() -> None:
    view = cluster()
    hard = shape_of(scheduling_strategy=ByLabels({"region": In("us"), "rack": Exists()}))
    assert view.feasible(hard) == [0, 1]
    assert view.feasible(shape_of(scheduling_strategy=ByLabels({"rack": DoesNotExist()}))) == [2, 3]
    assert view.feasible(shape_of(scheduling_strategy=ByLabels({"region": NotIn("us")}))) == [2, 3]
    soft = shape_of(scheduling_strategy=ByLabels(None, soft={"region": In("eu")}))
    assert view.feasible(soft) == [0, 1, 2, 3]
    assert view.choose(soft, 2) == [(2, 2)], "as long as there is room where it should be"
    assert view.choose(soft, 1) != [(2, 1)]
    both = shape_of(scheduling_strategy=ByLabels({"region": Exists()}, soft={"rack": In("2")}))
    assert view.choose(both, 3) == [(0, 1), (1, 2)]


def test_fallbacks_are_tried_in_their_order() -> None:
    fallback = [{"label_selector": {"region": "eu"}}, {"label_selector": {}}]
    shape = shape_of(label_selector={"rack": "2"}, fallback_strategy=fallback)
    assert cluster(1).choose(shape, 2) == [(1, 1), (2, 1)]
    assert cluster(1).choose(shape, 9) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    nowhere = shape_of(label_selector={"region": "moon"})
    assert cluster().feasible(nowhere) == []
    text = cluster().why_infeasible(nowhere, "a task")
    assert "region in (moon)" in text and "rack=2" in text


def test_selectors_may_name_default_labels() -> None:
    assert cluster().feasible(shape_of(label_selector={"ray.io/node-id": "id2"})) == [2]


def test_equal_conditions_share_leases() -> None:
    one = shape_of(label_selector={"a": "in(x,y)", "b": "c"})
    assert one == shape_of(label_selector={"b": "c", "a": "in( y, x )"})


def test_a_selector_chooses_among_the_nodes_of_a_group() -> None:
    group, cpu = "ab" * 13, to_units({"CPU": 1})
    cluster = ClusterResources()
    cluster.nodes_joined(
        NodeInfo(n, f"{n:02x}" * 28, f"h{n}", "", 0, to_units({"CPU": 4}), b"", "", 0, {"region": region})
        for n, region in enumerate(["us", "eu", "eu"])
    )

    def inside(region: str) -> Shape:
        wanted = to_strategy([conditions({"region": region})])
        return Shape(tuple(names_in(group, ANY, cpu).items()), with_conditions(CAPTURING, wanted))

    assert not cluster.is_decided(inside("mars"))
    for node in (0, 1):
        cluster.bundle_came(node, group, node, cpu)
    assert [cluster.feasible(inside(region)) for region in ("us", "eu", "mars")] == [[0], [1], []]
    assert cluster.choose(inside("eu"), 2) == [(1, 1)] and cluster.is_decided(inside("mars"))
    assert "in a placement group" in cluster.why_infeasible(inside("mars"), "a task")


def test_nodes_that_are_about_to_leave_serve_what_no_other_can() -> None:
    cluster = ClusterResources()
    cluster.nodes_joined(
        NodeInfo(n, f"{n:02x}" * 28, f"h{n}", "", 0, to_units({"CPU": 4, f"only{n}": 1}), b"", "", 0) for n in range(3)
    )
    any_node, that_node = (Shape(tuple(to_units(need).items())) for need in ({"CPU": 1}, {"CPU": 1, "only1": 1}))
    assert cluster.feasible(any_node) == [0, 1, 2]
    cluster.set_draining({0, 1})
    assert cluster.feasible(any_node) == [2] and cluster.choose(any_node, 3) == [(2, 3)]
    assert cluster.feasible(that_node) == [1]
    cluster.set_draining(())
    assert cluster.feasible(any_node) == [0, 1, 2]
