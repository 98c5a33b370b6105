"""`util.inspect_serializability`."""

from __future__ import annotations

import io
import threading

import pytest
from engine import NAME, hpcray_only

check = pytest.importorskip(f"{NAME}.util.check_serialize")


def blamed(value, **options):
    report = io.StringIO()
    good, failures = check.inspect_serializability(value, print_file=report, **options)
    return good, {failure.name: failure for failure in failures}, report.getvalue()


def test_a_value_that_pickles_has_no_failures():
    assert blamed({"a": [1, 2]})[:2] == (True, {})
    assert blamed(lambda x: x + 1)[:2] == (True, {})


def test_an_attribute_that_does_not_pickle_is_found():
    class Holder:
        def __init__(self):
            self.fine = 1
            self.guard = threading.Lock()

    holder = Holder()
    good, found, report = blamed(holder, name="the holder")
    assert not good
    assert found["guard"].obj is holder.guard
    assert found["guard"].parent is holder
    assert "the holder" in report
    assert "guard" in report


def test_a_closure_variable_that_does_not_pickle_is_found():
    guard = threading.Lock()

    def uses():
        return guard

    good, found, _ = blamed(uses)
    assert (good, list(found)) == (False, ["guard"])
    assert found["guard"].parent is uses


@hpcray_only
def test_a_nested_item_that_does_not_pickle_is_found():
    guard = threading.Lock()
    value = {"outer": [1, (2, guard)]}
    good, found, _ = blamed(value)
    assert (good, list(found)) == (False, ["[1]"])
    assert found["[1]"].obj is guard
    shallow = blamed(value, depth=1)[1]
    assert list(shallow) == ["'outer'"]


@hpcray_only
def test_the_search_in_a_value_that_refers_to_itself_ends():
    value = [threading.Lock()]
    value.append(value)
    assert not blamed(value, depth=50)[0]


@hpcray_only
def test_the_report_goes_to_standard_output(capsys):
    assert check.inspect_serializability(threading.Lock())[0] is False
    assert "was found to be non-serializable" in capsys.readouterr().out
