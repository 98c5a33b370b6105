"""The house's law: who may import whom, and that the cores are pure. Read from the syntax trees, nothing is run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcray

PACKAGE = Path(hpcray.__file__).parent

# cli → {api, state, cluster} → runtime → {core, transport, host} → wire → base: down only, and never sideways.
LEVEL = {
    "base": 0,
    "wire": 1,
    "core": 2,
    "transport": 2,
    "host": 2,
    "runtime": 3,
    "api": 4,
    "state": 4,
    "cluster": 4,
    "cli": 5,
}
# Everything else at the top (`hpcray` itself, `__main__`, `exceptions`, `util`, ...) only re-exports or starts: it may
# import anything, and no layer imports it.

CORE_MAY_IMPORT = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "collections.abc",
    "contextlib",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "operator",
    "random",
    "struct",
    "typing",
}
CORE_MAY_NOT_CALL = {"open", "print", "input", "exec", "eval", "breakpoint", "__import__"}


def layer_of(module: str) -> str:
    """`hpcray.core.store.table` → `core`; the package itself → `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path) -> str:
    parts = ["hpcray", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports_of(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(line, absolute module, imported names) of every import, wherever it stands; names () for `import x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            target = node.module or ""
            if node.level:
                parts = module.split(".")
                anchor = parts[: len(parts) - node.level + (1 if is_package else 0)]
                target = ".".join([*anchor, *([target] if target else [])])
            yield node.lineno, target, tuple(alias.name for alias in node.names)


def is_module(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def internal_layers(target: str, names: tuple[str, ...]) -> set[str]:
    """The layers that an import reaches. `from hpcray import util` reaches `util`, not the package's own names."""
    if target == "hpcray":
        return {
            name if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists() else "__init__" for name in names
        }
    return {layer_of(target)} if target.startswith("hpcray.") else set()


def violations(module: str, tree: ast.AST, is_package: bool) -> list[str]:
    own = layer_of(module)
    if own not in LEVEL:
        return []
    found = []
    for line, target, names in imports_of(tree, module, is_package):
        for layer in internal_layers(target, names):
            if layer != own and LEVEL.get(layer, 99) >= LEVEL[own]:
                found.append(f"{module}:{line} ({own}) imports {target} ({layer})")
    return found


def sources(*below: str) -> list[tuple[str, ast.Module, bool]]:
    files = sorted(PACKAGE.joinpath(*below).rglob("*.py"))
    assert files
    return [(module_of(path), ast.parse(path.read_text(), str(path)), path.name == "__init__.py") for path in files]


def test_imports_go_down_only() -> None:
    found = [text for source in sources() for text in violations(*source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "code", "bad"),
    [
        ("hpcray.base.x", "import hpcray.wire.frames", True),
        ("hpcray.core.x", "from hpcray.host.arena import Arena", True),
        ("hpcray.core.x", "from ..transport import base", True),
        ("hpcray.host.x", "def f():\n    from hpcray.runtime.process import Process", True),
        ("hpcray.api.x", "from hpcray.cluster.launch import compose", True),
        ("hpcray.wire.x", "from hpcray import exceptions", True),
        ("hpcray.runtime.x", "from hpcray import get", True),
        (
            "hpcray.runtime.x",
            "import hpcray.core.raylet\nfrom hpcray.base import ids\nfrom .refs import ObjectRef",
            False,
        ),
        ("hpcray.util.x", "from hpcray.host.address import node_ip_address", False),
        ("hpcray.core.x", "import hpcrayish", False),
    ],
)
def test_the_law_is_seen_to_be_broken(module: str, code: str, bad: bool) -> None:
    assert bool(violations(module, ast.parse(code), False)) is bad


def impurities(module: str, tree: ast.AST, is_package: bool) -> list[str]:
    found = []
    for line, target, names in imports_of(tree, module, is_package):
        if target.startswith("hpcray."):
            continue
        if target not in CORE_MAY_IMPORT:
            found.append(f"{module}:{line} imports {target}")
        if target == "random" and names != ("Random",):
            found.append(f"{module}:{line} uses the random module; only a seeded random.Random may be passed in")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CORE_MAY_NOT_CALL:
            found.append(f"{module}:{node.lineno} calls {node.func.id}")
    return found


def test_cores_are_pure() -> None:
    found = [text for source in sources("core") for text in impurities(*source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    ["import time", "from os import path", "import random", "from random import choice", "print(1)", "open('x')"],
)
def test_impurity_is_seen(code: str) -> None:
    assert impurities("hpcray.core.x", ast.parse(code), False)


def test_base_needs_the_standard_library_only() -> None:
    found = [
        f"{module}:{line} imports {target}"
        for module, tree, is_package in sources("base")
        for line, target, _ in imports_of(tree, module, is_package)
        if target.partition(".")[0] not in sys.stdlib_module_names | {"hpcray"}
    ]
    assert not found, "\n".join(found)


def test_the_package_holds_public_names_and_nothing_else() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        assert isinstance(node, ast.Assign | ast.AnnAssign), f"line {node.lineno}: {ast.unparse(node)[:60]}"
    hidden = {name for name in imported if not name.startswith("_")} - {"annotations"} - set(hpcray.__all__)
    assert not hidden, f"imported but not public: {sorted(hidden)}"
    missing = [name for name in hpcray.__all__ if not hasattr(hpcray, name)]
    assert not missing


def test_import_loads_neither_mpi_nor_ucx_nor_the_command_line() -> None:
    heavy = ["mpi4py", "ucxx", "ucp", "click", "rich", "submitit"]
    code = f"import sys, hpcray; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_no_two_test_files_have_one_name() -> None:
    """pytest refuses to collect the second one, and only where both are asked for."""
    names = [path.name for path in Path(__file__).parent.parent.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
