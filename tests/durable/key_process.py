"""Makes the keys of one side of the catalogue: each case in a directory of its own, imported as modules are.

Prints, as JSON, what became of each: its key, or why it has none; and whether a worker that gets the function sees the
same one (`unlike`: what differs there).
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from hpcray.durable.canonical import Canonical, NoCanonicalFormError, digest
from hpcray.durable.durable_tasks import Parameters, function_parts, make_key


def no_ref(ref: object) -> bytes:
    raise AssertionError("there is none")


def forget(before: set[str], directory: Path) -> None:
    """Drop the modules of one case, so that the next one imports its own."""
    for name in set(sys.modules) - before:
        path = directory.joinpath(*name.split("."))
        if path.with_suffix(".py").exists() or path.is_dir():
            del sys.modules[name]


def key_of(directory: Path, exported: Path) -> dict[str, Any]:
    before = set(sys.modules)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module("main")
        cloudpickle.register_pickle_by_value(module)  # as the module of a program travels
        try:
            try:
                parts = function_parts(module.f, no_ref)
                text = cloudpickle.dumps((module.f, parts))
            except TypeError as error:  # `singledispatch` travels by name alone
                if isinstance(error, NoCanonicalFormError):
                    raise
                text = b""
            finally:
                cloudpickle.unregister_pickle_by_value(module)
            if not text:
                parts = function_parts(module.f, no_ref)
                text = cloudpickle.dumps((module.f, parts))
            form = Parameters(module.f, (), Canonical())
            contents, marks = form.contents(no_ref, getattr(module, "ARGS", ()), getattr(module, "KWARGS", {}))
        except NoCanonicalFormError as error:
            return {"refused": str(error)}
        exported.write_bytes(text)
        base = digest(*(part for label, mark in parts for part in (label.encode(), mark)))
        return {"key": make_key(base, contents, marks).hex(), "parts": [label for label, _ in parts]}
    finally:
        sys.path.remove(str(directory))
        forget(before, directory)


def unlike(directory: Path, exported: Path) -> list[str]:
    """What a worker finds changed in a function that it has got."""
    before = set(sys.modules)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        function, parts = pickle.loads(exported.read_bytes())
        return sorted({label for label, _ in {*function_parts(function, no_ref)} ^ {*map(tuple, parts)}})
    finally:
        sys.path.remove(str(directory))
        forget(before, directory)


def main() -> None:
    root, exports, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.chdir(root)
    found: dict[str, Any] = {}
    for case in sorted(os.listdir(root)):
        exported = exports / f"{root.name}-{case}.pickle"
        if mode == "keys":
            found[case] = key_of(root / case, exported)
        elif exported.exists():
            found[case] = unlike(root / case, exported)
    print(json.dumps(found))


main()
