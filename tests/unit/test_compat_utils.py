"""Helpers of `ray._common`, `ray._raylet` and `ray.util` that Ray's libraries call."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcray.api.placement_group import check_request
from hpcray.compat.names import autoscaler, ray_constants, raylet, util, utils
from hpcray.compat.names.util import _test_some_code_for_memory_leaks


class Point(NamedTuple):
    timestamp: float
    value: float


def test_what_a_text_names_is_imported() -> None:
    assert utils.import_attr("json.dumps") is utils.import_attr("json:dumps") is json.dumps
    assert utils.import_module_and_attr("os.path:join")[0].__name__ == "posixpath"
    assert utils.load_class("json.decoder.JSONDecoder") is json.JSONDecoder
    with pytest.raises(ValueError, match="at most one colon"):
        utils.import_attr("a:b:c")
    with pytest.raises(ValueError, match="valid path"):
        utils.load_class("nothing")


def test_resources_are_read_from_options() -> None:
    options = {"num_cpus": 2, "memory": 1e6, "resources": {"disk": 1}, "accelerator_type": "A100"}
    assert utils.resources_from_ray_options(options) == {
        "CPU": 2, "memory": 1_000_000, "disk": 1, "accelerator_type:A100": 0.001,
    }  # fmt: skip
    for wrong in ("CPU", "memory", "bundle"):
        with pytest.raises(ValueError, match=r"must not contain|should not include"):
            utils.resources_from_ray_options({"resources": {wrong: 1}})


def test_a_directory_is_made_for_its_user_alone_and_one_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    utils.try_to_create_directory(str(tmp_path / "above" / "results"))
    assert stat.S_IMODE((tmp_path / "above" / "results").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    utils.try_to_create_directory(str(tmp_path / "shared"))
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o750


def test_a_background_task_ends_though_nobody_holds_it() -> None:
    done = []

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.append(1)

    async def main() -> None:
        utils.run_background_task(work())
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert done == [1]


def test_variables_that_are_no_numbers_give_the_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_constants.logger, "propagate", True)
    monkeypatch.setenv("A", " 7 ")
    monkeypatch.setenv("B", "seven")
    assert (ray_constants.env_integer("A", 1), ray_constants.env_integer("B", 2)) == (7, 2)
    assert (ray_constants.env_float("A", 1), ray_constants.env_float("C", 0.5)) == (7.0, 0.5)
    assert "Found B in environment, but value must be an integer. Got: seven" in caplog.text


def test_step_functions_are_added_and_averaged() -> None:
    series = [[Point(0.0, 1.0), Point(1.004, 1.0), Point(2.0, 3.0)], [Point(1.0, 2.0), Point(2.001, 0.0)]]
    assert raylet.merge_instantaneous_total_cython(series) == [(0.0, 1.0), (1.0, 3.0), (2.0, 3.0)]
    unset = float("-inf")
    average: Callable[..., Any] = raylet.time_weighted_average_cython
    steps = [Point(10.0, 1.0), Point(12.0, 4.0)]
    assert average(steps, unset, unset, 1.0) == pytest.approx((2 * 1 + 1 * 4) / 3)
    assert average(steps, 11.0, 14.0, 1.0) == pytest.approx((1 * 1 + 2 * 4) / 3)
    assert average(steps, 8.0, 12.0, 1.0) == pytest.approx(2 * 1 / 4)
    assert average(steps, 20.0, unset, 1.0) is None
    assert average([], unset, unset, 1.0) is None


def test_labels_are_compared_with_a_selector() -> None:
    labels = {"region": "us", "kind": "big"}
    assert raylet.node_labels_match_selector(labels, {"region": "in(us,eu)", "kind": "!small"})
    assert not raylet.node_labels_match_selector(labels, {"region": "!in(us,eu)"})
    assert not raylet.node_labels_match_selector({}, {"region": "us"})


def test_requests_for_groups_and_nodes_are_checked() -> None:
    assert check_request([{"CPU": 1}], None, None, None, None, None)[1] == "PACK"
    util.validate_placement_group([{"CPU": 1}], "SPREAD", "detached")
    with pytest.raises(ValueError, match="Invalid placement group strategy"):
        util.validate_placement_group([{"CPU": 1}], "ANYWHERE")
    with pytest.raises(ValueError, match="lifetime"):
        util.validate_placement_group([{"CPU": 1}], lifetime="ever")
    assert util._valid_resource_shape({"CPU": 2, "bundle": 0.001}, [{"CPU": 1}, {"CPU": 2}])
    assert not util._valid_resource_shape({"CPU": 2, "GPU": 1}, [{"CPU": 2}, {"GPU": 1}])
    with pytest.raises(TypeError, match="number"):
        autoscaler.request_resources(bundles=[{"CPU": True}])
    with pytest.raises(ValueError, match="must be provided"):
        autoscaler.request_resources(bundle_label_selectors=[{}])


@pytest.mark.slow
def test_code_that_keeps_memory_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[bytes] = []
    suspects = _test_some_code_for_memory_leaks("keeps", None, lambda: kept.append(bytes(5000)), repeats=8)
    assert suspects
    assert suspects[0].memory_increase >= 7 * 5000
    assert suspects[0].slope == pytest.approx(5033, rel=0.1)
    assert _test_some_code_for_memory_leaks("keeps nothing", None, lambda: bytes(5000), 8, 2, 10_000) == []


def test_values_travel_as_messagepack() -> None:
    kept: list[Any] = []
    data = raylet.MessagePackSerializer.dumps({"a": [1, b"x", 1 + 2j]}, lambda value: kept.append(value) or 0)
    assert raylet.MessagePackSerializer.loads(data, kept.__getitem__) == {"a": [1, b"x", 1 + 2j]}
    with pytest.raises(TypeError, match="complex"):
        raylet.MessagePackSerializer.dumps(1j)


def test_store_memory_of_a_bundle_warns_that_it_reserves_nothing() -> None:
    with pytest.warns(DeprecationWarning, match="Setting 'object_store_memory' for bundles is deprecated"):
        check_request([{"CPU": 1}, {"object_store_memory": 1}], "PACK", None, None, None, None)
