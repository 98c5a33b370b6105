"""Laws of the source that a syntax tree shows. Each function takes parsed files, so that a test can break its law."""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from helpers.jobs import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PUBLIC_METHODS, FUNCTION_LINES = 30, 60
FIRST_WORDS = frozenset(
    {"It", "Who", "Of", "As", "Nobody", "Somebody", "That", "So", "Do", "Whether", "What", "Up", "From"}
)
CONVERSATIONAL = re.compile(
    r"\b(tells?|told|telling|somebody|nobody|anybody|everybody|whoever|crowd|knock|hurry|the news)\b", re.IGNORECASE
)
"""Words that technical English has a better one for."""
CORE_NAMES = frozenset({"core", "entry", "gcs", "head", "lease_manager", "leases", "membership", "store", "table"})
"""Variables and attributes that hold a core, or a record of one, everywhere in hpcray."""
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One module. path: relative to hpcray/."""

    path: str
    text: str
    tree: ast.Module

    @property
    def component(self) -> str:
        """`core.gcs` of core/gcs/drain.py, `api` of api/actor.py, "" of a module at the top."""
        parts = self.path.split("/")[:-1]
        return ".".join(parts[:2] if parts[:1] in (["core"], ["runtime"]) else parts[:1])

    @property
    def is_core(self) -> bool:
        """True for a state machine: those of the kernel, and those that the contract on purity names in features."""
        return self.path.startswith("core/") or self.path in _cores_of_features()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of the tree, outer ones first, without `Load` and `Store`."""
        found: list[ast.AST] = [self.tree]
        for node in found:
            for name in node._fields:
                child = getattr(node, name, None)
                if isinstance(child, list):
                    found += [each for each in child if isinstance(each, ast.AST)]
                elif isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    found.append(child)
        return found

    @cached_property
    def _by_kind(self) -> dict[type[ast.AST], list[Any]]:
        found: dict[type[ast.AST], list[Any]] = defaultdict(list)
        for node in self.nodes:
            found[type(node)].append(node)
        return found

    def of_kind(self, *kinds: type[ast.AST]) -> list[Any]:
        """The nodes of some kinds, those of one kind after the other, and outer ones before what is in them."""
        return [node for kind in kinds for node in self._by_kind.get(kind, ())]

    def classes(self) -> Iterator[ast.ClassDef]:
        return iter(self.of_kind(ast.ClassDef))


@cache
def import_contracts() -> list[dict[str, Any]]:
    """The import contracts of pyproject.toml."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return list(options["contracts"])


@cache
def _cores_of_features() -> frozenset[str]:
    (purity,) = (contract for contract in import_contracts() if contract["id"] == "purity")
    names = [name.removeprefix("hpcray.") for name in purity["source_modules"]]
    return frozenset(f"{name.replace('.', '/')}.py" for name in names if name != "core")


def parse(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, path))


@cache
def tree() -> tuple[Source, ...]:
    """Every module of hpcray."""
    package = ROOT / "hpcray"
    paths = [path for path in sorted(package.rglob("*.py")) if "standin" not in path.parts]
    assert paths
    collects = gc.isenabled()
    gc.disable()  # it would go through all trees again and again, and find nothing
    try:
        return tuple(parse(path.relative_to(package).as_posix(), path.read_text()) for path in paths)
    finally:
        if collects:
            gc.enable()


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Function, ast.ClassDef | None]]:
    """(qualified name, function, its class or None) of every function, nested ones too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if isinstance(child, _Function):
                yield name, child, node if isinstance(node, ast.ClassDef) else None
            yield from functions(child, f"{name}.")
        else:
            yield from functions(child, prefix)


# ------------------------------------------------------------ who writes a core's fields


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _stored(target: ast.expr) -> Iterator[ast.Attribute]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _stored(element)
    elif isinstance(target, ast.Starred | ast.Subscript):
        yield from _stored(target.value)
    elif isinstance(target, ast.Attribute):
        yield target


def _stores(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement stores to, those whose element it stores to, and the target of a `setattr`."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        targets = [node.target]
    elif isinstance(node, ast.Call) and last_name(node.func) in ("setattr", "__setattr__") and len(node.args) > 1:
        targets = [ast.Attribute(node.args[0], ast.unparse(node.args[1]))]
    else:
        targets = []
    for target in targets:
        yield from _stored(target)


def core_writes(source: Source) -> Iterator[str]:
    """Stores, outside the cores, to a field of what a variable or attribute of `CORE_NAMES` holds."""
    if source.is_core:
        return
    for node in source.nodes:
        for attribute in _stores(node):
            if last_name(attribute.value).lstrip("_") in CORE_NAMES:
                yield f"{source.path}:{node.lineno} {ast.unparse(attribute)}"


# ------------------------------------------------------------ names and bases


def shared_class_names(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Public class names that several modules define, with the modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(source.path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def _base_names(node: ast.ClassDef) -> list[str]:
    return [last_name(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]


def _is_abstract(node: ast.ClassDef) -> bool:
    if {"ABC", "Protocol"} & set(_base_names(node)):
        return True
    return any(
        last_name(mark) == "abstractmethod" for _, function, _ in functions(node) for mark in function.decorator_list
    )


def concrete_bases(sources: Iterable[Source]) -> dict[str, str]:
    """Class to base, where both are in one component and the base is neither abstract nor an exception."""
    classes: dict[tuple[str, str], ast.ClassDef] = {}
    for source in sources:
        for node in source.classes():
            classes[source.component, node.name] = node

    def is_exception(component: str, name: str) -> bool:
        if name.endswith(("Error", "Exception", "Warning", "Interrupt")):
            return True
        node = classes.get((component, name))
        return node is not None and any(is_exception(component, base) for base in _base_names(node) if base != name)

    return {
        name: base
        for (component, name), node in classes.items()
        for base in _base_names(node)
        if (found := classes.get((component, base))) is not None
        and found is not node
        and not _is_abstract(found)
        and not is_exception(component, base)
    }


# ------------------------------------------------------------ sizes


def sizes(sources: Iterable[Source]) -> dict[str, int]:
    """What is over its limit: `class NAME` in public methods, `function QUALIFIED.NAME` in lines of
    its body without the docstring."""
    over: dict[str, int] = {}
    for source in sources:
        for node in source.classes():
            public = {child.name for child in node.body if isinstance(child, _Function) and child.name[0] != "_"}
            if len(public) > PUBLIC_METHODS:
                over[f"class {node.name}"] = len(public)
        for name, function, _ in functions(source.tree):
            lines = (function.end_lineno or 0) - function.body[0].lineno + 1
            if ast.get_docstring(function) is not None:
                lines = (function.end_lineno or 0) - (function.body[0].end_lineno or 0)
            if lines > FUNCTION_LINES:
                over[f"function {name}"] = lines
    return over


def grown(found: Mapping[str, int], known: Mapping[str, int]) -> dict[str, int]:
    """What is over its limit and not in `known`, or larger than there."""
    return {what: size for what, size in found.items() if size > known.get(what, 0)}


# ------------------------------------------------------------ prose


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, those of attributes and constants too."""
    for node in source.nodes:
        for child in getattr(node, "body", []) if isinstance(node, ast.Module | ast.ClassDef | _Function) else []:
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value


def vague_docstrings(source: Source) -> Iterator[str]:
    """Docstrings that begin with one of `FIRST_WORDS`, whose antecedent a reader would have to guess."""
    for line, text in docstrings(source):
        word = re.match(r"\w+", text)
        if word and word[0] in FIRST_WORDS:
            yield f"{source.path}:{line} {text.splitlines()[0]}"


def conversational_docstrings(source: Source) -> Iterator[str]:
    """Docstrings with one of the words of `CONVERSATIONAL`."""
    for line, text in docstrings(source):
        if found := CONVERSATIONAL.search(text):
            yield f"{source.path}:{line} {found[0]}"


def exported(sources: Iterable[Source]) -> set[str]:
    """The names in every `__all__`."""
    lists = [
        node.value
        for source in sources
        for node in source.tree.body
        if isinstance(node, ast.Assign) and last_name(node.targets[0]) == "__all__"
    ]
    return {str(node.value) for value in lists for node in ast.walk(value) if isinstance(node, ast.Constant)}


def undocumented(sources: Iterable[Source], public: set[str]) -> Iterator[str]:
    """Classes and functions without a docstring, and methods of `public` classes that have no base: overrides need
    none, and neither do the further signatures of an overloaded function."""
    for source in sources:
        for node in source.tree.body:
            methods = node.body if isinstance(node, ast.ClassDef) and not node.bases and node.name in public else []
            for child in [node, *methods]:
                if not isinstance(child, ast.ClassDef | _Function) or child.name[0] == "_" or ast.get_docstring(child):
                    continue
                if not any(last_name(mark) in ("overload", "setter") for mark in child.decorator_list):
                    yield f"{source.path}: {child.name}" + ("" if child is node else f" of {getattr(node, 'name', '')}")


def words(name: str) -> list[str]:
    """`GcsTables` → gcs, tables."""
    return [word.lower() for word in _WORD.findall(name)]


def unknown_words(sources: Iterable[Source], known: set[str]) -> dict[str, list[str]]:
    """Words of class names that are not known, with the classes. `leases`, `leased` and `leasing` are `lease`."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for node in source.classes():
            for word in words(node.name):
                if not stems(word) & known:
                    found[word].append(node.name)
    return found


def stems(word: str) -> set[str]:
    """The word, and what it may be a plural, a past tense or a gerund of."""
    cut = {word.removesuffix(end) for end in ("s", "es", "d", "ed", "ing")}
    return {word} | cut | {f"{stem}e" for stem in cut if word.endswith("ing")}
