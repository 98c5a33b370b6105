"""What goes into the keys of a function beside its code: options, environment, Python and packages."""

from __future__ import annotations

import copyreg
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcray.durable import DurableOptions, durable_tasks
from hpcray.durable.durable_tasks import DurableFunction


def made(
    function: Any, options: DurableOptions | None = None, num_returns: int = 1, env: Mapping[str, Any] | None = None
) -> DurableFunction:
    """A durable function in a submitter of its own."""
    extension: Any = types.SimpleNamespace(content_key=None)
    return DurableFunction(
        extension,
        function,
        options or DurableOptions(),
        num_returns,
        env or {},
        lambda kept, light: types.SimpleNamespace(),
    )


def base(*given: Any, **more: Any) -> bytes:
    """What all keys of a function have in common."""
    return made(*given, **more).base


def key(function: DurableFunction, *args: Any, **kwargs: Any) -> bytes:
    """The key of a call."""
    files = function.files_of(args, kwargs)
    return function.key_of(lambda ref: b"", args, kwargs, files[1])[0]


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
        function = made(add, DurableOptions(inputs=inputs))
        before = key(function, 1)
        table.write_text("2")
        assert key(function, 1) != before
        table.write_text("1")
        assert key(function, 1) == before == key(made(add, DurableOptions(inputs=inputs)), 1)
    (table.parent / "new").touch()
    assert key(function, 1) != before
    with pytest.raises(FileNotFoundError):
        key(made(add, DurableOptions(inputs=[tmp_path / "missing"])), 1)


CLASS = """
import abc
LIMIT = 1

def helper():
    return LIMIT

class Base:
    pass

class Other:
    pass

class A(Base):
    x = 1
    def m(self, y=1, *, z=1):
        return helper()
    def n(self):
        return later()

class Abstract(abc.ABC):
    pass
"""
CHANGES = {
    "an attribute": "A.x = 2",
    "an attribute that is equal": "A.x = True",
    "an attribute that is new": "A.y = 1",
    "an attribute of another name": "A.w = A.n; del A.n",
    "a method": "A.m = lambda self: 1",
    "its code": "A.m.__code__ = (lambda self, y=1, *, z=1: 2).__code__",
    "its default": "A.m.__defaults__ = (2,)",
    "its keyword-only default": "A.m.__kwdefaults__['z'] = 2",
    "its docstring": "A.m.__doc__ = 'New.'",
    "an attribute of a method": "A.m.limit = 1",
    "a base class": "A.__bases__ = (Other,)",
    "an attribute of a base class": "Base.y = 1",
    "its name": "A.__qualname__ = 'B'",
    "a global of a helper of a method": "LIMIT = 2",
    "a helper of a method": "helper = lambda: 2",
    "a helper that was missing": "def later(): return 1",
    "a class that an abstract one has registered": "Abstract.register(Other)",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_class_of_an_argument_between_two_calls_is_noticed(change: str) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(CLASS, scope)
    call = made(add)
    kinds = [scope["Abstract" if "Abstract" in change else "A"]()] * 2
    before = key(call, *kinds)
    assert key(call, *kinds) == before
    exec(change, scope)
    assert key(call, *kinds) != before
    assert key(call, *kinds) == key(made(add), *kinds)


def test_a_class_that_holds_what_can_change_unseen_is_described_each_time() -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("class A:\n    table = {'a': [1]}\n", scope)
    call, value = made(add), scope["A"]()
    before = key(call, value)
    scope["A"].table["a"].append(2)
    assert key(call, value) != before


def read(path: object, more: Any = "") -> object:
    return path


def test_the_content_of_a_file_that_an_argument_names_is_part_of_the_key(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("1")
    function = made(read, DurableOptions(inputs=["path"]))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((str(one),), {}), ((), {"path": one}), (([str(other), str(one)],), {}), ((one, "x"), {}),
    ]  # fmt: skip
    before = [key(function, *args, **kwargs) for args, kwargs in calls]
    assert len(set(before)) == 4
    assert [key(function, *args, **kwargs) for args, kwargs in calls] == before
    one.write_text("2")
    assert {key(function, *args, **kwargs) for args, kwargs in calls}.isdisjoint(before)
    one.write_text("1")
    assert [key(function, *args, **kwargs) for args, kwargs in calls] == before
    assert key(function, None) != key(function, str(one))
    with pytest.raises(TypeError, match="the parameter path"):
        key(function, 5)
    nameless = made(read, DurableOptions(inputs=["path"], ignore=["path"]))
    assert key(nameless, str(tmp_path / "one")) == key(nameless, one)


def test_a_file_that_is_written_twice_within_a_tick_of_the_clock_is_read_again(tmp_path: Path) -> None:
    table = tmp_path / "table"
    table.write_text("1")
    function = made(add, DurableOptions(inputs=[table]))
    before, state = key(function, 1), table.stat()
    table.write_text("2")
    os.utime(table, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert key(function, 1) != before


PROGRAM = """\
import sys
import sysconfig
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


@pytest.mark.parametrize("name", ["__getstate__", "__reduce__", "__getattribute__"])
def test_a_class_that_begins_to_pickle_itself_is_noticed(name: str) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("class A:\n    def __init__(self, x):\n        self.x = x\n", scope)
    call, value = made(add), scope["A"](1)
    before = key(call, value)
    assert key(call, scope["A"](2)) != before
    exec(
        {
            "__getstate__": "A.__getstate__ = lambda self: {'y': 1}",
            "__reduce__": "A.__reduce__ = lambda self: (A, (1,))",
            "__getattribute__": "A.__getattribute__ = lambda self, name: object.__getattribute__(self, name)",
        }[name],
        scope,
    )
    assert key(call, value) != before
    assert key(call, value) == key(made(add), value)


def test_a_reducer_that_is_registered_later_is_used() -> None:
    class A:
        pass

    call, value = made(add), A()
    before = key(call, value)
    copyreg.pickle(A, lambda value: (A, (1,)))
    try:
        assert key(call, value) != before
    finally:
        del copyreg.dispatch_table[A]
    assert key(call, value) == before


EXTENSION = """\
#include <Python.h>
static PyObject *g(PyObject *self, PyObject *x) { return PyLong_FromLong(VALUE); }
static PyMethodDef methods[] = {{"g", g, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "made_up", NULL, -1, methods};
PyMODINIT_FUNC PyInit_made_up(void) { return PyModule_Create(&module); }
"""


def test_a_compiled_module_goes_by_its_version_or_if_it_is_the_users_own_by_its_content(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        pytest.skip("needs a C compiler and the headers of Python")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    built = {}
    for value in (1, 2):
        source = tmp_path / f"made_up_{value}.c"
        source.write_text(EXTENSION.replace("VALUE", str(value)))
        built[value] = tmp_path / f"made_up_{value}.so"
        include = sysconfig.get_paths()["include"]
        subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", source, "-o", built[value]], check=True)

    def key_of(directory: str, value: int, version: str = "") -> str:
        place = tmp_path / directory / ("site-packages" if version else "src")
        place.mkdir(parents=True)
        shutil.copy(built[value], place / "made_up.so")
        if version:
            record = place / f"made_up-{version}.dist-info"
            record.mkdir()
            (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made_up\nVersion: {version}\n")
            (record / "RECORD").write_text("made_up.so,,\n")
        return subprocess.run(
            [sys.executable, str(script), str(place)], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    own = key_of("own", 1)
    assert key_of("own again", 1) == own != key_of("own, edited", 2)
    installed = key_of("installed", 1, "1.0")
    assert key_of("installed again", 1, "1.0") == installed != own
    assert key_of("upgraded", 1, "1.1") != installed
