"""Code that is pickled by value keeps the name of its file, whatever the version of cloudpickle."""

from __future__ import annotations

import pickle
import types

import cloudpickle
import pytest

from hpcray.protocol import out_of_band, serialization

NAMES = ("/home/someone/a script.py", "<ipython-input-3>", "<dynamic-code>")


def made(filename: str):
    scope = {"__name__": "__main__"}
    exec(
        compile(
            "def outer():\n    def inner():\n        return outer\n    return inner, lambda: 5\n", filename, "exec"
        ),
        scope,
    )
    return scope["outer"]


@pytest.mark.parametrize("filename", NAMES)
@pytest.mark.parametrize(
    "dumps", [cloudpickle.dumps, lambda value: serialization.serialize(value)[0]], ids=["cloudpickle", "task"]
)
def test_the_file_of_a_function_and_of_those_inside_it(filename, dumps):
    blob = dumps(made(filename))
    copy = pickle.loads(blob) if dumps is cloudpickle.dumps else serialization.deserialize(blob)
    assert copy.__code__.co_filename == filename
    assert {one.__code__.co_filename for one in copy()} == {filename}
    assert copy()[0]() is copy
    assert copy()[1]() == 5


def test_a_version_of_cloudpickle_that_drops_the_name(monkeypatch):
    def drops(code: types.CodeType):
        return types.CodeType, tuple("<dynamic-code>" if one == code.co_filename else one for one in kept(code)[1])

    kept = out_of_band._reduce_function
    table = dict(cloudpickle.Pickler.dispatch_table)
    monkeypatch.setattr(cloudpickle.Pickler, "dispatch_table", table)
    monkeypatch.setattr(out_of_band, "_reduce_function", drops)
    out_of_band.keep_file_names()
    assert table[types.CodeType] is out_of_band.reduce_code
    assert pickle.loads(cloudpickle.dumps(made(NAMES[0]))).__code__.co_filename == NAMES[0]


def test_a_version_that_keeps_the_name_is_left_alone(monkeypatch):
    def keeps(code: types.CodeType):
        return types.CodeType, ("argument", code.co_filename)

    table = {types.CodeType: keeps}
    monkeypatch.setattr(cloudpickle.Pickler, "dispatch_table", table)
    monkeypatch.setattr(out_of_band, "_reduce_function", keeps)
    out_of_band.keep_file_names()
    assert table[types.CodeType] is keeps
