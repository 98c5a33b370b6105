"""What the laws of the house measure in the source: arrows between modules that only strings show, functions put on
other objects, attributes a class, short files, and lines of code a room.

    python tests/helpers/house_laws.py            show where the source and tests/helpers/house_figures.py differ
    python tests/helpers/house_laws.py --lower    rewrite that file: what fell is lowered, what is gone is deleted

`--lower` raises and adds nothing. A conflict in the figures is settled by taking either side and running it.
Each function takes parsed files, so that a test can break its law.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.source_laws import Source, import_contracts, last_name, tree

KERNEL = ("common", "protocol", "core", "transport", "platform", "runtime", "api")
ATTRIBUTES, SHORT_FILE = 25, 40
FIGURES = Path(__file__).with_name("house_figures.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: str) -> str:
    """`hpcray.api.actor` of api/actor.py, `hpcray.api` of api/__init__.py."""
    return ".".join(["hpcray", *path.removesuffix(".py").split("/")]).removesuffix(".__init__")


def room(path: str) -> str:
    """The top-level package of a file; "top" for a module beside the packages."""
    return path.split("/")[0] if "/" in path else "top"


def _string_statements(source: Source) -> Iterator[ast.Constant]:
    """Docstrings, those of attributes and constants too."""
    for node in source.of_kind(ast.Expr):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement in the body of a node, those of nested functions too, but not those of nested classes."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt):
                yield child
            if not isinstance(child, ast.ClassDef):
                yield from statements(child)


# ------------------------------------------------------------ arrows in strings

Arrow = tuple[str, str]
"""(importer, imported), both as full names of modules."""
_MODULE = re.compile(r"hpcray(\.\w+)+")
_IMPORT_IN_TEXT = re.compile(r"\b(?:from|import)\s+(hpcray(?:\.\w+)+)(?:\s+import\s+(\w+))?")
_IMPORTERS = frozenset({"import_module", "__import__", "find_spec"})


class _Folder:
    """Strings that a module puts together from constants: `f"{_NAMES}.actor"`, `"hpcray." + "util"`, `__name__`."""

    def __init__(self, source: Source) -> None:
        name = module_name(source.path)
        package = name if source.path.endswith("__init__.py") else name.rpartition(".")[0]
        self._known = {"__name__": name, "__package__": package}
        for node in source.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                text, whole = self.text(node.value)
                if whole:
                    self._known[node.targets[0].id] = text

    def text(self, node: ast.expr) -> tuple[str, bool]:
        """What is known of the beginning of a string, and whether that is all of it."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value, True
        if isinstance(node, ast.Name) and node.id in self._known:
            return self._known[node.id], True
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
            return self.text(node.value)
        parts: list[ast.expr] = []
        if isinstance(node, ast.JoinedStr):
            parts = node.values
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [node.left, node.right]
        begin = ""
        for part in parts:
            text, whole = self.text(part)
            begin += text
            if not whole:
                return begin, False
        return begin, bool(parts)


def _named(text: str, whole: bool, modules: set[str]) -> Iterator[str]:
    """The modules that a string names: alone, before an attribute (`hpcray.api.actor:ActorClass`, or with a dot), or in
    a text of code that imports them. Of a string whose end is not known, the package that its beginning names."""
    if not whole:
        text = text.rpartition(".")[0]
    head = text.partition(":")[0]
    if _MODULE.fullmatch(head):
        while head not in modules:
            head = head.rpartition(".")[0]
        if head != "hpcray":
            yield head
    elif whole:
        for package, name in _IMPORT_IN_TEXT.findall(text):
            yield f"{package}.{name}" if f"{package}.{name}" in modules else package


def string_arrows(sources: Iterable[Source]) -> set[Arrow]:
    """Each module of hpcray that a string of another module names, wherever the string stands: in a call, a constant, a
    table. What imports nothing does not count: docstrings, names of loggers, what is compared with, the program after
    `-m` in a command line (`module_line`), and the packages that hold the module."""
    sources = list(sources)
    modules = {module_name(source.path) for source in sources} | {"hpcray"}
    found: set[Arrow] = set()
    for source in sources:
        importer, folder = module_name(source.path), _Folder(source)
        skipped: set[int] = {id(node) for node in _string_statements(source)}
        names: list[str] = []
        for node in source.of_kind(ast.Compare):
            skipped.update(map(id, ast.walk(node)))
        for node in source.of_kind(ast.List, ast.Tuple):
            for option, program in pairwise(node.elts):
                if isinstance(option, ast.Constant) and option.value == "-m":
                    skipped.add(id(program))
        for node in source.of_kind(ast.Call):
            called = last_name(node.func)
            if called == "getLogger":
                skipped.update(map(id, node.args))
            elif called == "module_line":  # of platform/process_control.py: `python -m PROGRAM`
                skipped.update(map(id, node.args[:1]))
            elif called in _IMPORTERS and node.args:
                text, whole = folder.text(node.args[0])
                if text.startswith("."):  # relative to the package that the second argument names
                    package = folder.text(node.args[1])[0] if len(node.args) > 1 else ""
                    up = len(text) - len(text.lstrip("."))
                    base = package.rsplit(".", up - 1)[0] if up > 1 else package
                    names += _named(f"{base}.{text.lstrip('.')}", whole, modules)
                elif text == "hpcray" and whole:
                    names.append(text)
                elif not whole:
                    names += _named(text, whole, modules)
        for node in source.of_kind(ast.BinOp, ast.JoinedStr, ast.Constant):
            if id(node) in skipped or (isinstance(node, ast.Constant) and "hpcray" not in str(node.value)):
                continue
            text, whole = folder.text(node)
            if "hpcray" in text and whole:
                skipped.update(map(id, ast.walk(node)))
                names += _named(text, whole, modules)
        found |= {(importer, name) for name in names if not f"{importer}.".startswith(f"{name}.")}
    return found


def import_arrows(sources: Iterable[Source]) -> set[Arrow]:
    """Each import of a module of hpcray by another one, inside functions and under TYPE_CHECKING too."""
    sources = list(sources)
    modules = {module_name(source.path) for source in sources} | {"hpcray"}
    found: set[Arrow] = set()
    for source in sources:
        importer = module_name(source.path)
        package = importer if source.path.endswith("__init__.py") else importer.rpartition(".")[0]
        for node in source.of_kind(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import):
                found |= {(importer, alias.name) for alias in node.names if alias.name in modules}
            else:
                base = node.module or ""
                if node.level:
                    base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *base.split(".")])
                    base = base.rstrip(".")
                for alias in node.names:
                    named = [name for name in (f"{base}.{alias.name}", base) if name in modules]
                    found |= {(importer, name) for name in named[:1]}
    return {(importer, imported) for importer, imported in found if importer != imported}


def layers() -> list[tuple[str, dict[str, int]]]:
    """(package, layer of each of its children, the lowest with the smallest number) of each contract on layers."""
    found = []
    for contract in import_contracts():
        if contract["type"] == "layers":
            ranks = {
                name.strip(" ()"): rank
                for rank, line in enumerate(reversed(contract["layers"]))
                for name in line.split("|")
            }
            found += [(container, ranks) for container in contract["containers"]]
    return found


def looks_up(arrow: Arrow, contracts: Iterable[tuple[str, Mapping[str, int]]]) -> bool:
    """Whether a contract on layers forbids an import: its target is above, or beside in the same layer."""
    for container, ranks in contracts:
        ends = [name.removeprefix(f"{container}.").split(".")[0] for name in arrow if name.startswith(f"{container}.")]
        if len(ends) == 2 and ends[0] != ends[1] and ranks.get(ends[0], -1) <= ranks.get(ends[1], -1):
            return True
    return False


def circles(arrows: Iterable[Arrow]) -> list[list[str]]:
    """Each set of modules that reach each other, sorted (Tarjan's algorithm)."""
    after: dict[str, list[str]] = {}
    for importer, imported in sorted(arrows):
        after.setdefault(importer, []).append(imported)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    open_ones: set[str] = set()
    found: list[list[str]] = []
    for root in after:
        if root in index:
            continue
        todo = [(root, iter(after[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        open_ones.add(root)
        while todo:
            node, rest = todo[-1]
            for child in rest:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    open_ones.add(child)
                    todo.append((child, iter(after.get(child, ()))))
                    break
                if child in open_ones:
                    low[node] = min(low[node], index[child])
            else:
                todo.pop()
                if todo:
                    low[todo[-1][0]] = min(low[todo[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    found.append(sorted(stack[at:]))
                    open_ones.difference_update(stack[at:])
                    del stack[at:]
    return [circle for circle in found if len(circle) > 1]


# ------------------------------------------------------------ functions put on other objects


@dataclass
class Declared:
    """What the classes and modules of some files declare, by bare names."""

    aliases: set[str] = field(default_factory=lambda: {"Callable"})
    """Names that mean a function in an annotation: `Callable`, aliases of it, protocols with `__call__`."""
    hooks: set[str] = field(default_factory=set)
    """Attributes that some class declares as a function, and none as something else."""
    methods: set[str] = field(default_factory=set)
    """Methods, but for names that are an attribute or a property elsewhere."""
    functions: set[str] = field(default_factory=set)
    """Functions at the top of a module."""
    classes: dict[str, set[str]] = field(default_factory=dict)
    """The methods and hooks of each class, for a parameter whose annotation names it."""
    makers: set[str] = field(default_factory=set)
    """Functions and methods that return a function, as their annotation says."""

    def means_function(self, node: ast.expr | None) -> bool:
        """Whether an annotation is that of a function, or of a function or None."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return False
        if isinstance(node, ast.BinOp):
            return self.means_function(node.left) or self.means_function(node.right)
        if isinstance(node, ast.Subscript):
            if last_name(node.value) in ("Optional", "Final", "ClassVar"):
                return self.means_function(node.slice)
            node = node.value
        return isinstance(node, ast.Name | ast.Attribute) and last_name(node) in self.aliases


def parameters(function: Function) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def declared(sources: Iterable[Source]) -> Declared:
    sources = list(sources)
    found = Declared()
    for _ in range(2):  # an alias of an alias
        for source in sources:
            for node in source.tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
                    if found.means_function(node.value) and isinstance(node.targets[0], ast.Name):
                        found.aliases.add(node.targets[0].id)
                elif isinstance(node, ast.ClassDef) and "Protocol" in map(_base_name, node.bases):
                    found.aliases |= {node.name} if "__call__" in _methods(node) else set()
    data: set[str] = set()
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, Function):
                found.functions.add(node.name)
        for node in source.of_kind(ast.FunctionDef, ast.AsyncFunctionDef):
            if found.means_function(node.returns):
                found.makers.add(node.name)
        for node in source.classes():
            found.classes[node.name] = _methods(node)
            for child in node.body:
                if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                    if found.means_function(child.annotation):
                        found.hooks.add(child.target.id)
                        found.classes[node.name].add(child.target.id)
                    else:
                        data.add(child.target.id)
                elif isinstance(child, Function):
                    marks = set(map(last_name, child.decorator_list))
                    (data if marks & {"property", "cached_property", "setter"} else found.methods).add(child.name)
                    hooks, others = _read_stores(child, found)
                    found.hooks |= hooks
                    found.classes[node.name] |= hooks
                    data |= others
    found.hooks -= data
    found.methods -= data | found.hooks
    return found


def _base_name(node: ast.expr) -> str:
    return last_name(node.value if isinstance(node, ast.Subscript) else node)


def _read_stores(method: Function, found: Declared) -> tuple[set[str], set[str]]:
    """The attributes that hold a function, and the others, as `self.x: Callable[...] = ...` and `self.x = parameter`
    show."""
    hooks: set[str] = set()
    data: set[str] = set()
    given = {arg.arg: found.means_function(arg.annotation) for arg in parameters(method)}
    for node in statements(method):
        if isinstance(node, ast.AnnAssign) and is_own(node.target):
            (hooks if found.means_function(node.annotation) else data).add(last_name(node.target))
        elif isinstance(node, ast.Assign):
            for target, value in pairs(node):
                if not is_own(target) or (isinstance(value, ast.Constant) and value.value is None):
                    continue
                if isinstance(value, ast.Name) and value.id in given:
                    (hooks if given[value.id] else data).add(last_name(target))
                elif not isinstance(value, ast.Name | ast.Attribute | ast.Call | ast.Lambda | ast.IfExp | ast.BoolOp):
                    data.add(last_name(target))
    return hooks, data


def is_own(target: ast.expr) -> bool:
    """Whether a target is `self.x` or `cls.x`."""
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in OWN


OWN = ("self", "cls")


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """(target, value) of each target of an assignment; the value is None where a tuple is taken apart unseen."""
    for target in node.targets:
        if not isinstance(target, ast.Tuple | ast.List):
            yield target, node.value
        elif isinstance(node.value, ast.Tuple | ast.List) and len(node.value.elts) == len(target.elts):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield from ((each, None) for each in target.elts)


class _Injections:
    """Finds, in one file, what `injections` describes."""

    def __init__(self, source: Source, known: Declared) -> None:
        self.known, self.found = known, Counter[str]()
        self._scopes: list[set[str]] = [set()]
        """The names that hold a function, in each function around this one, the module's first."""
        self._types: list[dict[str, str]] = []
        """By name of a parameter the class that its annotation names, in each function around this one."""
        self._where: list[str] = []
        self._class: list[ast.ClassDef] = []
        self._method: Function | None = None
        self._foreign: set[str] = set()
        self._calls: list[ast.Call] = []
        """The calls that may store: few, so that expressions need not be gone through for them."""
        self._seen: set[int] = set()
        if any(word in source.text for word in ("setattr", "__dict__", "vars(")):
            for call in source.of_kind(ast.Call):
                if last_name(call.func) in ("setattr", "__setattr__", "update"):
                    self._calls.append(call)
        for node in source.of_kind(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import):
                self._foreign |= {
                    alias.asname or alias.name.partition(".")[0]
                    for alias in node.names
                    if alias.name.partition(".")[0] != "hpcray"
                }
            else:
                ours = node.level or (node.module or "").partition(".")[0] == "hpcray"
                for alias in node.names:
                    name = alias.asname or alias.name
                    if not ours:
                        self._foreign.add(name)
                    elif alias.name in known.functions:
                        self._scopes[0].add(name)
        for child in source.tree.body:
            if isinstance(child, Function):
                self._scopes[0].add(child.name)

    def visit(self, node: ast.AST) -> None:
        """Look at every statement in the body of a node."""
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            for child in getattr(node, name, ()):
                if isinstance(child, ast.ClassDef):
                    self._visit_class(child)
                elif isinstance(child, Function):
                    self._visit_function(child)
                else:
                    self._visit_statement(child)
                    self.visit(child)

    def _visit_class(self, node: ast.ClassDef) -> None:
        self._where.append(node.name)
        self._class.append(node)
        method, self._method = self._method, None
        self.visit(node)
        self._method = method
        self._class.pop()
        self._where.pop()

    def _visit_function(self, node: Function) -> None:
        names = {arg.arg for arg in parameters(node) if self.known.means_function(arg.annotation)}
        self._scopes.append(names | {child.name for child in statements(node) if isinstance(child, Function)})
        self._types.append({arg.arg: last_name(arg.annotation) for arg in parameters(node) if arg.annotation})
        self._where.append(node.name)
        foreign = self._foreign
        self._foreign = foreign | {
            arg.arg for arg in parameters(node) if arg.annotation and last_name(arg.annotation) == "ModuleType"
        }
        method = self._method
        if method is None and self._class:
            self._method = node
        self.visit(node)
        self._method = method
        self._foreign = foreign
        self._where.pop()
        self._types.pop()
        self._scopes.pop()

    def _visit_statement(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target, value in pairs(node):
                self._store(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._store(node.target, node.value)
        if self._calls and isinstance(node, ast.stmt):
            for call in self._calls:
                is_whole = not any(isinstance(child, ast.stmt) for child in ast.iter_child_nodes(node))
                if is_whole and node.lineno <= call.lineno <= (node.end_lineno or 0) and id(call) not in self._seen:
                    self._seen.add(id(call))
                    self._visit_call(call)

    def _visit_call(self, node: ast.Call) -> None:
        name = last_name(node.func)
        if name in ("setattr", "__setattr__") and len(node.args) >= 3:
            whose, key, value = node.args[-3:]
            literal = key.value if isinstance(key, ast.Constant) else None
            if self._is_others(whose) and (self.is_function(value) or literal in self.known.hooks):
                self._note(f"{ast.unparse(whose)}.{literal or '*'}")
        elif name == "update" and isinstance(node.func, ast.Attribute):
            whose_dict = self._whose_dict(node.func.value)
            values = [keyword.value for keyword in node.keywords]
            for argument in node.args:
                values += argument.values if isinstance(argument, ast.Dict) else []
            if whose_dict is not None and self._is_others(whose_dict) and any(map(self.is_function, values)):
                self._note(f"{ast.unparse(whose_dict)}.*")

    def _store(self, target: ast.expr, value: ast.expr | None) -> None:
        is_function = value is not None and self.is_function(value)
        if isinstance(target, ast.Name):
            self._scopes[-1] |= {target.id} if is_function else set()
        elif isinstance(target, ast.Subscript) and is_function:
            if (whose := self._whose_dict(target.value)) is not None:
                key = target.slice.value if isinstance(target.slice, ast.Constant) else "*"
                if self._is_others(whose):
                    self._note(f"{ast.unparse(whose)}.{key}")
            elif isinstance(target.value, ast.Attribute) and self._is_others(target.value.value):
                self._note(f"{ast.unparse(target.value)}[]")
        elif isinstance(target, ast.Attribute) and not re.fullmatch(r"__\w+__", target.attr):
            if self._is_others(target.value):
                stored = is_function or target.attr in self.known.hooks or self._is_of_parameter(target)
            else:
                replaces = is_own(target) and bool(self._class) and target.attr in _methods(self._class[-1])
                stored = replaces or (is_function and self._stores_parameter(value))
            if stored:
                self._note(ast.unparse(target))

    def _stores_parameter(self, value: ast.expr | None) -> bool:
        """Whether the method is no constructor, and the value one of its parameters that are functions."""
        if self._method is None or self._method.name in CONSTRUCTORS or value is None:
            return False
        given = {arg.arg for arg in parameters(self._method) if self.known.means_function(arg.annotation)}
        return any(isinstance(node, ast.Name) and node.id in given for node in ast.walk(value))

    def _is_of_parameter(self, node: ast.Attribute) -> bool:
        """Whether an attribute is a method or hook of the class that a parameter's annotation names."""
        if not isinstance(node.value, ast.Name):
            return False
        types = next((types for types in reversed(self._types) if node.value.id in types), {})
        return node.attr in self.known.classes.get(types.get(node.value.id, ""), ())

    def _note(self, target: str) -> None:
        self.found[f"{'.'.join(self._where)}: {target}"] += 1

    def _whose_dict(self, node: ast.expr) -> ast.expr | None:
        """The object of `x.__dict__` or `vars(x)`."""
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            return node.value
        if isinstance(node, ast.Call) and last_name(node.func) == "vars" and node.args:
            return node.args[0]
        return None

    def _is_others(self, node: ast.expr) -> bool:
        """Whether an expression is another object than `self` and `cls`, and no module or class of another package."""
        root = node
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root.id in self._foreign:
            return False
        made = self._method is not None and self._method.name == "__new__"
        return not (isinstance(node, ast.Name) and (made or node.id in OWN))

    def is_function(self, node: ast.expr) -> bool:
        """Whether an expression is seen to be a function."""
        if isinstance(node, ast.Lambda):
            return True
        if isinstance(node, ast.IfExp):
            return self.is_function(node.body) or self.is_function(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(self.is_function, node.values))
        if isinstance(node, ast.Name):
            return any(node.id in names for names in self._scopes)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in self._foreign:
                return False
            if is_own(node) and self._class and node.attr in _methods(self._class[-1]):
                return True
            known = node.attr in self.known.methods or node.attr in self.known.hooks
            return known or self._is_of_parameter(node)
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if isinstance(node.func, ast.Call):  # wraps(f)(g)
                return last_name(node.func.func) == "wraps"
            return name in ("partial", "partialmethod", "MethodType") or name in self.known.makers
        return False


CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__", "__init_subclass__", "__set_name__"})


def _methods(node: ast.ClassDef) -> set[str]:
    functions = [child for child in node.body if isinstance(child, Function)]
    properties = {"property", "cached_property"}
    return {child.name for child in functions if not properties & set(map(last_name, child.decorator_list))}


def injections(sources: Iterable[Source], known: Declared | None = None) -> Counter[str]:
    """How often each function puts a function where another object, or another method, will call it, as
    `Class.method: target`. Seen are

    - a store to an attribute of anything but `self` and `cls`, by assignment, `setattr`, `__dict__` or `vars`, or to an
      element of such an attribute, of a value that is seen to be a function: a lambda, a `partial`, a function, a
      method, a parameter or attribute annotated as a function, a name bound to one, or a call of what returns one;
    - a store of anything to such an attribute that a class declares as a function, of None too;
    - a store to `self` that replaces a method of the class;
    - a store to `self`, in a method that is no constructor, of a parameter that is annotated as a function: the setters
      `use_x`, `set_x`, `attach`.

    Attributes with two underscores on both sides are those of functions and classes, and do not count. Nor do modules
    and classes of other packages. What is not seen: a function in a variable whose annotation is Any, and a dictionary
    of another object that has first been given a name."""
    sources = list(sources)
    known = known or declared(sources)
    found = Counter[str]()
    for source in sources:
        visitor = _Injections(source, known)
        visitor.visit(source.tree)
        found += visitor.found
    return found


# ------------------------------------------------------------ attributes a class


def _is_record(node: ast.ClassDef, records: set[str]) -> bool:
    if records & set(map(_base_name, node.bases)):
        return not _has_identity(node)
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and last_name(mark.func) == "dataclass":
            return any(
                keyword.arg == "frozen" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                for keyword in mark.keywords
            )
    return False


def _has_identity(node: ast.ClassDef) -> bool:
    """Return True for a `Struct` with `eq=False`: not a record, but an object with a life of its own."""
    return any(
        keyword.arg == "eq" and isinstance(keyword.value, ast.Constant) and not keyword.value.value
        for keyword in node.keywords
    )


def attributes(sources: Iterable[Source]) -> dict[str, int]:
    """The attributes of each class that has any: names that its methods assign on `self`, names of `__slots__`, and
    fields of a dataclass or a struct; those of its bases in hpcray too. Records do not count: a `msgspec.Struct` that
    is compared by its fields, a frozen dataclass, a named tuple, a protocol."""
    classes: dict[str, ast.ClassDef] = {}
    for source in sources:
        for node in source.classes():
            classes[node.name] = node
    records = {"Struct", "NamedTuple", "TypedDict", "Enum", "IntEnum", "Protocol"}
    while more := {name for name, node in classes.items() if name not in records and _is_record(node, records)}:
        records |= more
    own = {name: _own_attributes(node) for name, node in classes.items() if name not in records}

    def of(name: str, seen: tuple[str, ...]) -> set[str]:
        bases = [base for base in map(_base_name, classes[name].bases) if base in own and base not in seen]
        return own[name].union(*(of(base, (*seen, base)) for base in bases))

    return {name: len(found) for name in own if (found := of(name, (name,)))}


def _own_attributes(node: ast.ClassDef) -> set[str]:
    found: set[str] = set()
    marks = [last_name(mark.func if isinstance(mark, ast.Call) else mark) for mark in node.decorator_list]
    has_fields = "dataclass" in marks or _has_identity(node)
    for child in node.body:
        if has_fields and isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            if _base_name(child.annotation) != "ClassVar":
                found.add(child.target.id)
        elif isinstance(child, ast.Assign) and last_name(child.targets[0]) == "__slots__":
            found |= {
                each.value
                for each in ast.walk(child.value)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
        elif isinstance(child, Function):
            for each in statements(child):
                targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
                targets += [item.optional_vars for item in getattr(each, "items", ())]
                while targets:
                    target = targets.pop()
                    if isinstance(target, ast.Tuple | ast.List):
                        targets += target.elts
                    elif isinstance(target, ast.Starred):
                        targets.append(target.value)
                    elif isinstance(target, ast.Attribute) and last_name(target.value) == "self":
                        found.add(target.attr)
    return found - {"__weakref__", "__dict__"}


# ------------------------------------------------------------ files and lines


def short_files(sources: Iterable[Source]) -> list[str]:
    """Files of fewer than `SHORT_FILE` lines, but for `__init__.py` and the modules that stand for Ray's."""
    short = [source.path for source in sources if source.text.count("\n") < SHORT_FILE]
    return [path for path in short if not path.endswith("__init__.py") and room(path) != "compat"]


def code_lines(source: Source) -> int:
    """Lines of code: neither blank, nor a comment alone, nor of a docstring. Every line of another string counts."""
    documented: set[int] = set()
    quoted: set[int] = set()
    for text in _string_statements(source):
        documented |= set(range(text.lineno, (text.end_lineno or 0) + 1))
    for node in source.of_kind(ast.JoinedStr, ast.Constant):
        is_text = isinstance(node, ast.JoinedStr) or isinstance(node.value, str)
        if is_text and node.end_lineno != node.lineno and node.lineno not in documented:
            quoted |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    count = 0
    for number, line in enumerate(source.text.splitlines(), 1):
        line = line.strip()
        count += number not in documented and (number in quoted or (line != "" and not line.startswith("#")))
    return count


def lines_by_room(sources: Iterable[Source]) -> dict[str, int]:
    """Lines of code of each room, and of the `kernel`."""
    found = Counter[str]()
    for source in sources:
        lines = code_lines(source)
        found[room(source.path)] += lines
        if room(source.path) in KERNEL:
            found["kernel"] += lines
    return dict(found)


# ------------------------------------------------------------ the figures

LAZY_TABLES = (
    "hpcray.cluster", "hpcray.util", "hpcray.dag",
    "hpcray.compat.finder", "hpcray.compat.finder", "hpcray.compat.table",
)  # fmt: skip
"""Modules that load public names when they are first asked for: `import hpcray` is short thanks to them. Their strings
close no circle; they may not look up either."""


def wrong_strings(sources: Sequence[Source]) -> list[str]:
    """Arrows in strings that look up, past a contract on layers, or without which there would be no circle."""
    contracts = layers()
    strings = string_arrows(sources)
    eager = {arrow for arrow in strings if arrow[0] not in LAZY_TABLES}
    circle = {name: number for number, names in enumerate(circles(import_arrows(sources) | eager)) for name in names}
    return [
        f"{importer} -> {imported}"
        for importer, imported in sorted(strings)
        if looks_up((importer, imported), contracts)
        or ((importer, imported) in eager and importer in circle and circle[importer] == circle.get(imported))
    ]


def today() -> dict[str, dict[str, int]]:
    """Each table of tests/helpers/house_figures.py, as the source is now; 1 for what has no figure."""
    sources = tree()
    return {
        "STRINGS": dict.fromkeys(wrong_strings(sources), 1),
        "INJECTED": dict(sorted(injections(sources).items())),
        "ATTRIBUTES": {name: count for name, count in sorted(attributes(sources).items()) if count > ATTRIBUTES},
        "SHORT_FILES": dict.fromkeys(short_files(sources), 1),
        "LINES_OF_CODE": dict(sorted(lines_by_room(sources).items())),
        "FILES": {"whole": len(sources)},
    }


def ceiling(lines: int) -> int:
    """The most that a table allows where the source has some lines: so much that a small repair needs no new figure."""
    return lines + lines * 3 // 1000


def lowered(text: str, found: Mapping[str, Mapping[str, int]]) -> str:
    """The text of the figures, each entry `"name": figure,` or `"name": "reason",` on a line of its own, with figures
    lowered to what is found, and without the entries of what is found no more."""
    table, lines = "", []
    for line in text.splitlines(keepends=True):
        if start := re.match(r"(\w+)\b.*= \{$", line):
            table = start[1]
        entry = re.match(r'    "([^"]+)": (\d+|".*"),', line)
        if entry and table in found:
            name, figure = entry.groups()
            today = found[table].get(name)
            if today is None:
                continue
            if figure.isdigit():
                today = ceiling(today) if table == "LINES_OF_CODE" else today
                line = line.replace(f'": {figure},', f'": {min(int(figure), today)},')
        lines.append(line)
    return "".join(lines)


def main() -> None:
    """Show the differences, or lower the figures."""
    found = today()
    if sys.argv[1:] == ["--lower"]:
        FIGURES.write_text(lowered(FIGURES.read_text(), found))
    from helpers import house_figures

    for name, entries in found.items():
        known = dict(getattr(house_figures, name))
        if name == "SHORT_FILES":
            known |= house_figures.SHORT_WITH_REASON
        elif name == "INJECTED":
            known |= house_figures.FOREIGN
        print(f"{name}:")
        for key in sorted({*entries, *known}):
            before, now = known.get(key), entries.get(key, 0)
            allowed = ceiling(now) if name == "LINES_OF_CODE" else now
            if before is None or now == 0 or (isinstance(before, int) and not now <= before <= allowed):
                print(
                    f'    "{key}": {allowed},  # {"not in the table" if before is None else f"{before} in the table"}'
                )


if __name__ == "__main__":
    main()
