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


def key_of(directory: Path, exported: Path) -> dict[str, Any]:
    before = set(sys.modules)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module("main")
        try:
            parts = function_parts(module.f, no_ref)
            form = Parameters(module.f, (), Canonical())
            contents, marks = form.contents(no_ref, getattr(module, "ARGS", ()), getattr(module, "KWARGS", {}))
        except NoCanonicalFormError as error:
            return {"refused": str(error)}
        cloudpickle.register_pickle_by_value(module)  # as the modules of a program travel that are no files elsewhere
        try:
            text = cloudpickle.dumps((module.f, parts))
        except TypeError:  # `singledispatch` travels by name alone
            text = b""
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        exported.write_bytes(text or cloudpickle.dumps((module.f, parts)))
        base = digest(*(part for label, mark in parts for part in (label.encode(), mark)))
        return {"key": make_key(base, contents, marks).hex(), "parts": [label for label, _ in parts]}
    finally:
        sys.path.remove(str(directory))
        for name in set(sys.modules) - before:
            if str(directory) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


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
        for name in set(sys.modules) - before:
            if str(directory) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


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
