"""Laws of the source that its syntax trees show; tests/unit/test_import_contracts.py holds those of the imports,
tests/unit/test_house_laws.py those that have figures.

Each law has a test that breaks it. A list of exceptions names classes and functions, not files: those move.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from helpers import source_laws as laws
from helpers.source_laws import Source, parse, tree

import hpcray

# ------------------------------------------------------------ purity

CORE_MAY_IMPORT = {
    "__future__", "abc", "bisect", "collections", "collections.abc", "contextlib", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "hmac", "itertools", "math", "msgspec", "operator", "struct", "typing", "weakref",
}  # fmt: skip
CORE_MAY_NOT_CALL = {"open", "print", "input", "exec", "eval", "breakpoint", "__import__"}


def external_imports(source: Source) -> list[tuple[int, str]]:
    """(line, module) of every import of another package than hpcray."""
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append((node.lineno, node.module or ""))
    return [(line, name) for line, name in found if name.partition(".")[0] != "hpcray"]


def impurities(source: Source) -> list[str]:
    found = [f"{source.path}:{line} imports {name}" for line, name in external_imports(source)]
    found = [text for text in found if text.rpartition(" ")[2] not in CORE_MAY_IMPORT]
    for node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CORE_MAY_NOT_CALL:
            found.append(f"{source.path}:{node.lineno} calls {node.func.id}")
    return found


def test_cores_import_and_call_only_what_is_pure() -> None:
    found = [text for source in tree() if source.is_core for text in impurities(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    ["import time", "from os import path", "import random", "from random import choice", "print(1)", "open('x')"],
)
def test_an_impure_import_or_call_in_a_core_is_seen(code: str) -> None:
    assert impurities(parse("core/x.py", f"def f():\n    {code}"))


def needed_packages(sources: list[Source]) -> set[str]:
    """The packages beside hpcray and the standard library that some modules import."""
    names = {name.partition(".")[0] for source in sources for _, name in external_imports(source)}
    return names - sys.stdlib_module_names


def test_common_needs_only_the_standard_library_and_msgspec() -> None:
    assert needed_packages([source for source in tree() if source.path.startswith("common/")]) == {"msgspec"}


def test_a_needed_package_is_seen() -> None:
    code = "import os.path, numpy.random\ndef f():\n    from click import echo\n    from hpcray import get"
    assert needed_packages([parse("common/x.py", code)]) == {"numpy", "click"}


# ------------------------------------------------------------ who writes a core's fields


def test_only_a_core_writes_the_fields_of_a_core() -> None:
    found = [text for source in tree() for text in laws.core_writes(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "table.entries = {}",
        "self.table.limit += 1",
        "self._gcs.nodes[3] = None",
        "core, store.room = None, 0",
        "del process.lease_manager.classes[0]",
        "for entry.state in range(3): pass",
        "setattr(table, 'limit', 3)",
    ],
)
def test_a_write_to_the_field_of_a_core_is_seen(code: str) -> None:
    assert list(laws.core_writes(parse("runtime/x.py", code)))
    assert not list(laws.core_writes(parse("core/x.py", code)))


@pytest.mark.parametrize("code", ["self.table = table", "store = table.store", "table.put(3)", "limit = table.limit"])
def test_reads_of_a_core_and_calls_of_it_are_no_writes(code: str) -> None:
    assert not list(laws.core_writes(parse("runtime/x.py", code)))


# ------------------------------------------------------------ names and bases

SHARED_NAMES_ALLOWED = {
    "ActorID": "Ray's id class, beside the id functions of common",
    "JobID": "Ray's id class, beside the id functions of common",
    "TaskID": "Ray's id class, beside the id functions of common",
    "PlacementGroupID": "Ray's id class, beside the one of the API",
    "PlacementGroup": "Ray's handle, and the GCS's record of the group",
    "ActorState": "Ray's row of `list_actors`, and the message that announces a state",
    "JobInfo": "Ray's record of a submitted job, and the message that describes a driver's",
}
"""Names of Ray's API that hpcray must have twice."""


def test_no_two_public_classes_share_a_name() -> None:
    found = laws.shared_class_names(tree())
    assert not {name: paths for name, paths in found.items() if name not in SHARED_NAMES_ALLOWED}


def test_two_public_classes_of_one_name_are_seen() -> None:
    named = [
        parse(f"{at}/x.py", f"class {name}: pass") for at, name in [("a", "X"), ("b", "X"), ("c", "_Y"), ("d", "_Y")]
    ]
    assert laws.shared_class_names(named) == {"X": ["a/x.py", "b/x.py"]}


CONCRETE_BASES_ALLOWED = {
    "ActorMethod": "`method.options(...)` is a method with options of its own",
    "BaseID": "Ray's hierarchy of id classes",
    "IMapIterator": "the iterators of multiprocessing.pool, as the standard library has them",
    "LiveScreen": "never made itself",
    "RayDaskCallback": "Ray's base of callbacks of Dask graphs, which programs extend",
    "Metric": "Ray's base of Counter, Gauge and Histogram",
    "ObjectStoreWriter": "Ray's base of the writers of a shuffle, which programs extend too",
    "RemoteFunction": "`function.options(...)` is a function with options of its own",
    "Rule": "the kinds of rule for an option; `Rule` is the simplest of them",
    "SpinWindow": "never made itself",
    "StateSchema": "Ray's base of the rows of the state API",
    "UniqueID": "Ray's hierarchy of id classes",
    "_Formatter": "never made itself",
    "_GpuManager": "never made itself",
    "_KindManager": "never made itself",
    "_Result": "never made itself",
    "_Model": "never made itself",
    "_OptionsBase": "never made itself",
    "_ValuesOperator": "never made itself",
}
"""Concrete classes that others of their component may extend. There is none in core/ and runtime/."""


def test_no_class_extends_a_concrete_class_of_its_component() -> None:
    found = laws.concrete_bases(tree())
    assert not {name: base for name, base in found.items() if base not in CONCRETE_BASES_ALLOWED}


def test_no_class_of_a_core_or_a_shell_extends_a_concrete_class_of_its_component() -> None:
    assert not laws.concrete_bases(source for source in tree() if source.path.startswith(("core/", "runtime/")))


def test_a_concrete_base_in_the_same_component_is_seen() -> None:
    base = parse("core/gcs/a.py", "class Table: pass\nclass Port(Protocol): pass\nclass Lost(Exception): pass")
    same = parse("core/gcs/b.py", "class Wide(Table): pass\nclass Wire(Port): pass\nclass LostTwice(Lost): pass")
    elsewhere = parse("core/raylet/c.py", "class Narrow(Table): pass")
    assert laws.concrete_bases([base, same, elsewhere]) == {"Wide": "Table"}


# ------------------------------------------------------------ sizes

OVER_LIMIT = {"function _serve": 100}
"""What is larger than its limit today. It may shrink; nothing may be added."""


def test_no_class_or_function_is_larger_than_its_limit() -> None:
    assert not laws.grown(laws.sizes(tree()), OVER_LIMIT)


def test_what_is_too_large_is_seen() -> None:
    methods = "".join(f"    def m{number}(self): pass\n" for number in range(laws.PUBLIC_METHODS + 1))
    body = "    x = 1\n" * (laws.FUNCTION_LINES + 1)
    wide, long = parse("x.py", f"class Wide:\n{methods}"), parse("y.py", f"def long():\n    '''Doc.'''\n{body}")
    found = laws.sizes([wide, long])
    assert found == {"class Wide": 31, "function long": 61}
    assert laws.grown(found, {"class Wide": 31, "function long": 60}) == {"function long": 61}


def test_what_is_as_large_as_its_limit_passes() -> None:
    methods = "".join(f"    def m{number}(self): pass\n" for number in range(laws.PUBLIC_METHODS))
    assert not laws.sizes([parse("x.py", f"class Wide:\n{methods}    def _private(self): pass\n")])


# ------------------------------------------------------------ docstrings

VAGUE_TODAY = 45
"""Docstrings that still begin with one of `FIRST_WORDS`. The number may fall."""
CONVERSATIONAL_TODAY = 23
"""Docstrings that still have one of the words of `CONVERSATIONAL`. The number may fall."""
DOCUMENTED = ("api/", "cli/", "experimental/", "jobs/", "launch/", "mpi/", "state/", "util/")
"""What programs use, and people at a shell; so do the modules at the top. Ray documents the names of compat/."""


def test_docstrings_begin_with_what_they_are_about() -> None:
    found = [text for source in tree() for text in laws.vague_docstrings(source)]
    assert len(found) <= VAGUE_TODAY, "\n".join(found)


def test_docstrings_use_technical_english() -> None:
    found = [text for source in tree() for text in laws.conversational_docstrings(source)]
    assert len(found) <= CONVERSATIONAL_TODAY, "\n".join(found)


def test_a_conversational_word_in_a_docstring_is_seen() -> None:
    code = 'def f():\n    """Return what somebody told."""\n    # nobody\n    told = "crowd"'
    assert list(laws.conversational_docstrings(parse("x.py", code))) == ["x.py:2 somebody"]


@pytest.mark.parametrize(
    "code",
    ['"""Who waits."""', 'class A:\n    """What it is."""', 'def f():\n    """So it ends."""', 'x = 1\n"""Of x."""'],
)
def test_a_docstring_that_begins_with_a_vague_word_is_seen(code: str) -> None:
    assert list(laws.vague_docstrings(parse("x.py", code)))


@pytest.mark.parametrize("code", ['"""Whole."""', 'def f():\n    """Return it."""', 'x = "Who"', "def f(): pass"])
def test_other_docstrings_and_strings_pass(code: str) -> None:
    assert not list(laws.vague_docstrings(parse("x.py", code)))


def test_what_programs_use_has_docstrings() -> None:
    sources = [source for source in tree() if source.path.startswith(DOCUMENTED) or "/" not in source.path]
    assert not list(laws.undocumented(sources, laws.exported(sources)))


def test_a_missing_docstring_is_seen_and_overrides_need_none() -> None:
    code = "def f(): pass\n"
    code += "class A:\n    'A.'\n    def g(self): pass\n"
    code += "class B(A):\n    'B.'\n    def g(self): pass\n"
    source = parse("x.py", f"__all__ = ['A', 'B']\n{code}class C:\n    'C.'\n    def g(self): pass\n")
    assert list(laws.undocumented([source], laws.exported([source]))) == ["x.py: f", "x.py: g of A"]


# ------------------------------------------------------------ the package


def hidden_names(module: ast.Module, public: list[str]) -> set[str]:
    """What the module imports by a public name without having it in `__all__`."""
    imported: set[str] = set()
    # One `if` may be around all of them: a node's process does without.
    body = [inner for node in module.body for inner in (node.body if isinstance(node, ast.If) else [node])]
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"):
            continue  # names that are imported at their first use
        assert isinstance(node, ast.Assign | ast.AnnAssign), f"line {node.lineno}: {ast.unparse(node)[:60]}"
    return {name for name in imported if not name.startswith("_")} - {"annotations"} - set(public)


def test_the_package_holds_public_names_and_nothing_else() -> None:
    source = next(source for source in tree() if source.path == "__init__.py")
    assert not hidden_names(source.tree, hpcray.__all__)
    assert not [name for name in hpcray.__all__ if not hasattr(hpcray, name)]


def test_an_imported_name_that_is_not_public_is_seen() -> None:
    assert hidden_names(ast.parse("from a import b, _c\nfrom d import e"), ["e"]) == {"b"}
    with pytest.raises(AssertionError, match="line 1: def f"):
        hidden_names(ast.parse("def f(): pass"), [])


def loaded(statement: str, modules: list[str]) -> list[str]:
    """Those of some modules that a statement loads in a fresh interpreter."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {modules} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return found.stdout.split()


def test_importing_hpcray_loads_neither_mpi_nor_ucx_nor_the_command_line() -> None:
    assert loaded("import hpcray", ["mpi4py", "ucxx", "ucp", "click", "rich", "submitit"]) == []


def test_importing_hpcray_loads_nothing_that_few_programs_use() -> None:
    """Each of these takes a millisecond or more of every start."""
    rare = ["hpcray.experimental", "hpcray.mpi", "hpcray.progress_bars", "hpcray.util.executor", "hashlib", "html"]
    assert loaded("import hpcray", rare) == []
    for name in ("Executor", "cluster", "experimental", "internal", "mpi", "progress", "timeline"):
        assert loaded(f"import hpcray\nhpcray.{name}\nassert {name!r} in dir(hpcray)", ["hpcray"]) == ["hpcray"]


def test_a_raylet_starts_without_the_autoscaler_and_the_recorder() -> None:
    parts = "hpcray.autoscaler.node_autoscaling, hpcray.diagnostics.raylet_introspection, hpcray.runtime.node.node"
    rare = ["hpcray.autoscaler.autoscaler", "hpcray.autoscaler.autoscaler_runner", "hpcray.diagnostics.record_replay"]
    assert loaded(f"import hpcray.processes.raylet_main, {parts}", rare) == []


def test_a_module_that_an_import_loads_is_seen() -> None:
    assert loaded("import colorsys", ["colorsys", "chunk"]) == ["colorsys"]


def repeated(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_no_two_test_files_share_a_name() -> None:
    """Pytest refuses to collect the second one, and only where both are collected together."""
    assert not repeated(path.name for path in Path(__file__).parent.parent.rglob("test_*.py"))


def test_a_repeated_name_is_seen() -> None:
    assert repeated(["test_a.py", "test_b.py", "test_a.py"]) == {"test_a.py"}
