"""Mistakes that newcomers make: each error keeps Ray's words, and says what to do."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest

import hpcray as ray


@ray.remote
def _one() -> int:
    return 1


@ray.remote
class _Actor:
    def compute(self) -> int:
        return 1


def _plain() -> int:
    return 1


@pytest.mark.parametrize(
    ("what", "hint"),
    [
        (lambda: _one, r"has not been called: its \.remote\(\.\.\.\) returns a ref"),
        (lambda: _plain, "@ray.remote makes a remote function of it"),
        (lambda: _Actor, "of an actor class makes an actor"),
        (lambda: _Actor.remote(), r"handle\.method\.remote\(\.\.\.\)"),
        (lambda: _Actor.remote().compute, "has not been called"),
        (lambda: {"a": _one.remote()}, re.escape("dict(zip(d, ray.get(list(d.values()))))")),
        (lambda: (_one.remote(),), re.escape("ray.get(list(...))")),
        (lambda: {_one.remote()}, re.escape("ray.get(list(...))")),
        (lambda: (_one.remote() for _ in range(2)), re.escape("ray.get(list(...))")),
        (lambda: 3, "this is the value itself"),
    ],
)  # fmt: skip
def test_get_of_what_is_no_ref_says_what_to_get(session: None, what: Any, hint: str) -> None:
    with pytest.raises(ValueError, match=f"^Invalid type of object refs.*a list of ObjectRefs. hint: .*{hint}"):
        ray.get(what())


@pytest.mark.parametrize(
    ("what", "hint"),
    [
        (lambda: [[_one.remote()]], "a list of lists needs a `get` for each"),
        (lambda: [{"a": _one.remote()}], re.escape("dict(zip(d, ")),
        (lambda: [_one.remote(), _one], "has not been called"),
    ],
)
def test_get_of_a_list_that_holds_no_ref_says_what_to_get(session: None, what: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=f"^Attempting to call `get` on the value .*ObjectRef. hint: .*{hint}"):
        ray.get(what())


def test_a_method_with_a_slip_of_the_pen_is_named(session: None) -> None:
    with pytest.raises(AttributeError, match=r"no method of this name\. Did you mean compute\?"):
        _Actor.remote().comptue  # type: ignore[attr-defined]  # noqa: B018


def test_a_mistyped_field_of_the_runtime_env_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ray.runtime_env.RuntimeEnv(envvars={"A": "1"}, nothing_like_it=1)
    assert "['envvars', 'nothing_like_it']. Did you mean env_vars?" in caplog.text


def test_a_task_that_returns_a_generator_expression_is_told_that_values_are_lost(
    session: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ray.get(ray.remote(lambda: (i for i in range(3))).remote()) == 0
    seen, deadline = "", time.monotonic() + 30
    while "write the task itself with `yield`" not in seen and time.monotonic() < deadline:
        seen += "".join(capfd.readouterr())
        time.sleep(0.05)
    assert "yields more than num_returns=1 values, which are lost; hint: return a list" in seen


@pytest.mark.parametrize("line", ["from hpcray import tune", "import hpcray.data", "import hpcray.serve as serve"])
def test_the_import_of_one_of_rays_libraries_says_where_it_is(line: str) -> None:
    with pytest.raises(ImportError, match="it is Ray's own; hint: .*--as-ray.*from ray import (tune|data|serve)"):
        exec(line)
    assert not hasattr(ray, "tune")
    with pytest.raises(ModuleNotFoundError, match="No module named 'hpcray.tun'"):
        exec("import hpcray.tun")
