"""What goes into the keys of a function beside its code: options, environment, Python and packages."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcray.durable import DurableOptions, durable_tasks
from hpcray.durable.durable_tasks import DurableFunction


def base(
    function: Any, options: DurableOptions | None = None, num_returns: int = 1, env: Mapping[str, Any] | None = None
) -> bytes:
    """What all keys of a function have in common."""
    extension: Any = types.SimpleNamespace(content_key=None)
    made = DurableFunction(
        extension, function, options or DurableOptions(), num_returns, env or {}, lambda kept: types.SimpleNamespace()
    )
    return made.base


def add(x: int, y: int = 1) -> int:
    return x + y


@pytest.mark.parametrize(
    "given",
    [
        {"options": DurableOptions(name="other")},
        {"options": DurableOptions(version=1)},
        {"options": DurableOptions(version="1")},
        {"options": DurableOptions(ignore=["y"])},
        {"num_returns": 2},
        {"env": {"env_vars": {"A": "1"}}},
        {"env": {"pip": ["requests"]}},
        {"env": {"working_dir": "gcs://_ray_pkg_1.zip"}},
    ],
    ids=str,
)
def test_each_option_is_part_of_the_key(given: dict[str, Any]) -> None:
    assert base(add, **given) != base(add)
    assert base(add, **given) == base(add, **given)


@pytest.mark.parametrize(
    "given",
    [DurableOptions(errors=True), DurableOptions(expires=60)],
    ids=str,
)
def test_options_that_change_no_result_are_no_part_of_the_key(given: DurableOptions) -> None:
    assert base(add, given) == base(add)


def test_another_python_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = base(add)
    newer = types.SimpleNamespace(major=3, minor=99)
    monkeypatch.setattr(
        durable_tasks, "sys", types.SimpleNamespace(version_info=newer, implementation=sys.implementation)
    )
    assert base(add) != before


def test_files_that_the_function_reads_are_part_of_the_key(tmp_path: Path) -> None:
    table = tmp_path / "inputs" / "table"
    table.parent.mkdir()
    table.write_text("1")
    for inputs in ([table], [str(table.parent)]):
        before = base(add, DurableOptions(inputs=inputs))
        table.write_text("2")
        assert base(add, DurableOptions(inputs=inputs)) != before
        table.write_text("1")
        assert base(add, DurableOptions(inputs=inputs)) == before
    (table.parent / "new").touch()
    assert base(add, DurableOptions(inputs=[table.parent])) != before
    with pytest.raises(FileNotFoundError):
        base(add, DurableOptions(inputs=[tmp_path / "missing"]))


PROGRAM = """\
import sys
sys.path[:0] = sys.argv[1:]
import made_up
from hpcray.durable.canonical import Canonical


def f(x):
    return made_up.g(x)


print(Canonical().digest_of(f).hex())
"""


def key_with(tmp_path: Path, place: str, version: str, body: str) -> str:
    """The digest of a function that names a package, in a process of its own."""
    site = tmp_path / f"{place}-{version}-{len(body)}" / place
    package = site / "made_up"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(body)
    if place == "site-packages":
        record = site / f"made_up-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made_up\nVersion: {version}\n")
        (record / "RECORD").write_text("made_up/__init__.py,,\n")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, str(script), str(site)], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_another_version_of_an_installed_package_has_another_key(tmp_path: Path) -> None:
    body = "def g(x):\n    return x\n"
    first = key_with(tmp_path, "site-packages", "1.0", body)
    assert key_with(tmp_path / "again", "site-packages", "1.0", body) == first
    assert key_with(tmp_path, "site-packages", "1.1", body) != first


def test_a_package_of_the_users_own_goes_by_its_content(tmp_path: Path) -> None:
    body = "def g(x):\n    return x\n"
    first = key_with(tmp_path, "src", "1.0", body)
    assert key_with(tmp_path / "again", "src", "1.0", body) == first
    assert key_with(tmp_path, "src", "1.0", body.replace("return x", "return -x")) != first


@pytest.mark.parametrize(
    "given",
    [
        {"name": 1},
        {"version": 1.5},
        {"inputs": "table"},
        {"ignore": "x"},
        {"errors": 1},
        {"expires": 0},
        {"expires": -1},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="DurableOptions"):
        DurableOptions(**given)
