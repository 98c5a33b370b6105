"""Pure helpers of `ray._private` and `ray._common` that other packages call."""

from __future__ import annotations

import pytest

from hpcray.compat.names import label_utils, path_utils, retry
from hpcray.compat.names import nested_dicts as dicts
from hpcray.compat.names.util import convert_string_to_type


def test_a_uri_is_no_path():
    assert path_utils.is_path("/a/b.zip") and path_utils.is_path("a/b") and not path_utils.is_path("s3://bucket/a")
    with pytest.raises(TypeError, match="must be a string"):
        path_utils.is_path(b"/a")


def test_dicts_are_merged_flattened_and_made_again():
    nested = {"a": {"b": 1, "c": {"d": 2}}, "e": [3, {"f": 4}]}
    merged = dicts.merge_dicts(nested, {"a": {"c": {"d": 5}}, "g": 6})
    assert merged == {"a": {"b": 1, "c": {"d": 5}}, "e": [3, {"f": 4}], "g": 6} and nested["a"]["c"] == {"d": 2}
    flat = dicts.flatten_dict(nested)
    assert flat == {"a/b": 1, "a/c/d": 2, "e": [3, {"f": 4}]}
    assert dicts.unflatten_dict(flat) == nested
    assert dicts.flatten_dict(nested, flatten_list=True)["e/1/f"] == dicts.unflattened_lookup("e/1/f", nested) == 4
    with pytest.raises(Exception, match="Unknown config parameter `z`"):
        dicts.deep_update({"a": 1}, {"z": 1})
    kinds = dicts.deep_update({"a": {"type": 1, "b": 2}}, {"a": {"type": 3}}, override_all_if_type_changes=["a"])
    assert kinds == {"a": {"type": 3}}


def test_a_call_is_tried_again_for_errors_that_match(monkeypatch):
    monkeypatch.setattr(retry.time, "sleep", lambda _: None)
    calls = []

    @retry.retry("count", match=["not yet", r"busy \d"], max_attempts=3)
    def fail(*texts):
        calls.append(1)
        if len(calls) <= len(texts):
            raise ValueError(texts[len(calls) - 1])
        return "done"

    assert fail("not yet", "busy 7") == "done"
    calls.clear()
    with pytest.raises(ValueError, match="other"):
        fail("other")
    assert len(calls) == 1
    calls.clear()
    with pytest.raises(ValueError, match="not yet"):
        fail(*["not yet"] * 5)
    assert len(calls) == 3


def test_labels_are_read_and_refused():
    assert label_utils.parse_node_labels_string('"a=b, x.y/c = "') == {"a": "b", "x.y/c": ""}
    assert label_utils.parse_node_labels_json('{"a": "b"}') == {"a": "b"}
    for wrong in ("a", "a=b=c", "-a=b", "a=b_"):
        with pytest.raises(ValueError):
            label_utils.parse_node_labels_string(wrong)
    with pytest.raises(ValueError, match="reserved"):
        label_utils.parse_node_labels_json('{"ray.io/node": "b"}')
    assert label_utils.validate_label_selector({"a": "!in(b, c)", "d": "!e"}) is None
    assert "Invalid label selector value" in label_utils.validate_label_selector({"a": "in()"})
    assert "Unsupported option" in label_utils.validate_fallback_strategy([{"soft": True}])


def test_texts_become_numbers_and_truth_values():
    assert convert_string_to_type("3", int) == 3 and convert_string_to_type("false", bool) is False
    with pytest.raises(ValueError, match="Failed to convert"):
        convert_string_to_type("maybe", bool)
