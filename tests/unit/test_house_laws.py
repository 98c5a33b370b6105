"""Laws of the house, with the figures of today, which may only fall (tests/helpers/house_figures.py).

After a change that lowers a figure, or in a conflict: `python tests/helpers/house_laws.py --lower`. Without the option
it shows what has changed. A figure is raised by hand, in a commit whose message says why.
Each law has a test that breaks it; tests/helpers/house_laws.py says what exactly is counted.
"""

from __future__ import annotations

import io
import textwrap
import tokenize
from collections.abc import Mapping

import pytest
from helpers import house_figures as figures
from helpers import house_laws as laws
from helpers.source_laws import Source, parse, tree

LOWER = "run: python tests/helpers/house_laws.py --lower"


def check(found: Mapping[str, int], known: Mapping[str, int]) -> None:
    """Fail for what is new or grown, and for what is known and has fallen or gone."""
    grown = {name: count for name, count in found.items() if count > known.get(name, 0)}
    assert not grown
    fallen = {name: count for name, count in known.items() if count > found.get(name, 0)}
    assert not fallen, LOWER


@pytest.mark.parametrize(
    ("found", "known"), [({"a": 1}, {}), ({"a": 2}, {"a": 1}), ({"a": 1}, {"a": 2}), ({}, {"a": 1})]
)
def test_a_figure_that_differs_is_seen(found: dict[str, int], known: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        check(found, known)


def code(path: str, text: str) -> Source:
    return parse(path, textwrap.dedent(text))


# ------------------------------------------------------------ arrows in strings


def test_no_string_names_a_module_above_or_closes_a_circle() -> None:
    check(dict.fromkeys(laws.wrong_strings(tree()), 1), dict.fromkeys(figures.STRINGS, 1))


MODULES = [parse("api/x.py", ""), parse("util/queue.py", ""), parse("util/__init__.py", "")]


@pytest.mark.parametrize(
    "text",
    [
        "import_module('hpcray.util.queue')",
        "def f():\n    return importlib.import_module('hpcray.util.queue').Queue",
        "__import__('hpcray.util.queue')",
        "find_spec('..util.queue', __package__)",
        "NAME = 'hpcray.util.queue'",
        "TABLE = {'q': ('hpcray.util.queue:Queue', 3)}",
        "NAME = 'hpcray.util.queue.Queue'",
        "ROOM = 'hpcray.util'\nNAME = f'{ROOM}.queue'",
        "ROOM = 'hpcray.util'\ndef f():\n    return ROOM + '.queue'",
        "COMMAND = [python, '-c', 'import sys; from hpcray.util.queue import Queue; Queue()']",
        "COMMAND = [python, '-c', 'from hpcray.util import queue']",
        "sys.modules.get('hpcray.util.queue')",
    ],
)
def test_a_string_that_names_a_module_is_an_arrow(text: str) -> None:
    arrows = laws.string_arrows([*MODULES, parse("platform/y.py", text)])
    assert ("hpcray.platform.y", "hpcray.util.queue") in arrows
    assert laws.wrong_strings([*MODULES, parse("platform/y.py", text)])


def test_a_string_whose_end_is_not_known_names_the_package() -> None:
    arrows = laws.string_arrows([*MODULES, parse("platform/y.py", "import_module(f'hpcray.util.{name}')")])
    assert arrows == {("hpcray.platform.y", "hpcray.util")}


@pytest.mark.parametrize(
    "text",
    [
        "'''Like hpcray.util.queue.'''",
        "'hpcray.util.queue'",
        "logger = logging.getLogger('hpcray.util.queue')",
        "command = [python, '-m', 'hpcray.util.queue', directory]",
        "called = sys.argv[0] == 'hpcray.util.queue'",
        "import hpcray.util.queue",
        "name = 'hpcray.utils'",
        "hint = 'call hpcray.util.queue.Queue()'",
    ],
)
def test_other_strings_are_no_arrows(text: str) -> None:
    assert not laws.string_arrows([*MODULES, parse("platform/y.py", text)])


def test_strings_downwards_are_no_breach() -> None:
    assert not laws.wrong_strings([*MODULES, parse("util/z.py", "import_module('hpcray.api.x')")])


def test_a_string_that_closes_a_circle_is_seen_but_in_a_lazy_table() -> None:
    user = parse("util/a.py", "from hpcray.util import b")
    assert laws.wrong_strings([user, parse("util/b.py", "NAME = 'hpcray.util.a'")]) == [
        "hpcray.util.b -> hpcray.util.a"
    ]
    table = parse("compat/table.py", "NAME = 'hpcray.compat.a'")
    assert not laws.wrong_strings([parse("compat/a.py", "from hpcray.compat import table"), table])


def test_imports_are_arrows_wherever_they_stand() -> None:
    text = """
        from . import queue
        from ..api import x
        def f():
            import hpcray.util
        if TYPE_CHECKING:
            from hpcray.api.x import name
    """
    assert laws.import_arrows([*MODULES, code("util/y.py", text)]) == {
        ("hpcray.util.y", "hpcray.util.queue"),
        ("hpcray.util.y", "hpcray.api.x"),
        ("hpcray.util.y", "hpcray.util"),
    }


def test_circles_are_found_with_all_that_is_in_them() -> None:
    arrows = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("f", "e"), ("e", "f"), ("g", "a")]
    assert sorted(laws.circles(arrows)) == [["a", "b", "c"], ["e", "f"]]


# ------------------------------------------------------------ functions put on other objects


def test_no_function_is_put_on_another_object() -> None:
    found = laws.injections(tree())
    assert not set(figures.FOREIGN) - set(found), LOWER
    check({place: count for place, count in found.items() if place not in figures.FOREIGN}, figures.INJECTED)


def injected(text: str) -> list[str]:
    return sorted(laws.injections([code("runtime/x.py", text)]))


@pytest.mark.parametrize(
    "text",
    [
        "def f(x): x.on_exit = lambda: None",
        "def f(x): x.on_exit = partial(print, 3)",
        "def end(): pass\ndef f(x): x.on_exit = end",
        "def f(x):\n    def end(): pass\n    x.part.on_exit = end",
        "def f(x, end: Callable[[], None] | None): x.on_exit = end",
        "Handler = Callable[[], None]\ndef f(x, end: 'Handler'): x.on_exit = end",
        "class Handler(Protocol):\n    def __call__(self): pass\ndef f(x, end: Handler): x.on_exit = end",
        "def make() -> Callable[[], None]: pass\ndef f(x): x.on_exit = make()",
        "def f(x):\n    end = lambda: None\n    x.on_exit = end",
        "def f(x): x.on_exit, y = (lambda: None), 3",
        "def f(x): x.on_exit = None if y else lambda: None",
        "def f(x): x.on_exit: Any = lambda: None",
        "def f(x): x.handlers['on_exit'] = lambda: None",
        "def f(x): setattr(x, 'on_exit', lambda: None)",
        "def f(x):\n    if x:\n        with y:\n            object.__setattr__(x, 'on_exit', lambda: None)",
        "def f(x): x.__dict__['on_exit'] = lambda: None",
        "def f(x): vars(x)['on_exit'] = lambda: None",
        "def f(x): x.__dict__.update(on_exit=lambda: None)",
        "def f(x): vars(x).update({'on_exit': lambda: None})",
        "class A:\n    def end(self): pass\n    def __init__(self, x): x.on_exit = self.end",
        "class A:\n    def __init__(self): self.part.on_exit = lambda: None",
        "class A:\n    def end(self): pass\ndef f(x, a: A): x.on_exit = a.end",
        "class A:\n    on_exit: Callable[[], None] | None = None\ndef f(x): x.on_exit = None",
        "class A:\n    end: Callable[[], None]\nclass B:\n    end: int\ndef f(x: A): x.end = None",
        "class A:\n    def __init__(self, end: Callable[[], None]): self.on_exit = end\ndef f(x, y): x.on_exit = y.end",
        "class A:\n    def end(self): pass\n    def f(self): self.end = self.other",
        "class A:\n    def use_end(self, end: Callable[[], None]): self.on_exit = end",
        "class A:\n    def use_end(self, end: Callable[[], None]): self.on_exit = partial(end, 3)",
        "from hpcray.api import x\nx.on_exit = lambda: None",
    ],
)
def test_a_function_put_on_another_object_is_seen(text: str) -> None:
    assert len(injected(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __init__(self, end: Callable[[], None]): self.on_exit = end",
        "class A:\n    def f(self): self.on_exit = lambda: None",
        "class A:\n    @classmethod\n    def f(cls): cls.on_exit = lambda: None",
        "class A:\n    def __new__(cls, end: Callable[[], None]):\n        a = cls.made()\n        a.end = end",
        "class A:\n    def listen(self, end: Callable[[], None]): self.listeners.append(end)",
        "class A:\n    def f(self, entry): entry.count = self.count",
        "class A:\n    end: int\n    def f(self, x): x.end = self.y.end\nclass B:\n    def end(self): pass",
        "def f(x): x.limit = 3",
        "def wrap(f):\n    def g(): pass\n    g.__wrapped__ = f\n    g.__doc__ = f.__doc__",
        "import sys\nsys.excepthook = lambda *_: None",
        "def amend(module: ModuleType): module.run = lambda: None",
        "def f():\n    handlers = {}\n    handlers['end'] = lambda: None",
    ],
)
def test_other_stores_are_none(text: str) -> None:
    assert not injected(text)


def test_each_place_is_named_and_counted() -> None:
    text = """
        class A:
            def f(self, x):
                x.on_exit = lambda: None
                x.on_exit = lambda: 3
    """
    assert laws.injections([code("runtime/x.py", text)]) == {"A.f: x.on_exit": 2}


# ------------------------------------------------------------ attributes


def test_no_class_has_more_attributes_than_its_limit() -> None:
    check({name: n for name, n in laws.attributes(tree()).items() if n > laws.ATTRIBUTES}, figures.ATTRIBUTES)


def test_few_classes_may_keep_more_attributes() -> None:
    assert figures.ATTRIBUTES_REASONS.keys() <= figures.ATTRIBUTES.keys(), LOWER
    assert len(figures.ATTRIBUTES_REASONS) <= 2 and not {"CoreWorker", "IoEngine"} & figures.ATTRIBUTES_REASONS.keys()


def test_attributes_are_counted_wherever_they_are_assigned() -> None:
    text = """
        class Base:
            __slots__ = ("a", "__weakref__")
        class A(Base):
            constant = 3
            def __init__(self, x):
                self.b = self.c = x
                self.d: int
                self.e, (self.f, *self.g) = x
                self.part.other = x
            def later(self):
                if x:
                    for self.h in x: self.i += 1
                with x as self.j: pass
                def inner(): self.k = 1
        @dataclass(slots=True)
        class Fields:
            a: int
            b: ClassVar[int] = 3
    """
    assert laws.attributes([code("x.py", text)]) == {"Base": 1, "A": 11, "Fields": 1}


@pytest.mark.parametrize(
    "head",
    [
        "class A(msgspec.Struct):",
        "@dataclass(frozen=True)\nclass A:",
        "class B(Struct): pass\nclass A(B, frozen=True):",
    ],
)
def test_records_have_as_many_fields_as_they_need(head: str) -> None:
    assert "A" not in laws.attributes([parse("x.py", f"{head}\n    a: int\n    def f(self): self.b = 1")])


# ------------------------------------------------------------ files and lines of code


def test_no_further_file_is_short() -> None:
    found = laws.short_files(tree())
    assert not set(figures.SHORT_WITH_REASON) - set(found), LOWER
    assert len(figures.SHORT_WITH_REASON) <= 10
    check({path: 1 for path in found if path not in figures.SHORT_WITH_REASON}, figures.SHORT_FILES)


def test_a_short_file_is_seen_but_for_packages_and_modules_of_ray() -> None:
    short, long = "x = 1\n" * 39, "x = 1\n" * 40
    paths = ["api/a.py", "api/__init__.py", "compat/names/a.py", "a.py"]
    sources = [*(parse(path, short) for path in paths), parse("api/b.py", long)]
    assert laws.short_files(sources) == ["api/a.py", "a.py"]


def test_no_room_has_more_lines_of_code_than_its_ceiling() -> None:
    found = laws.lines_by_room(tree())
    assert set(found) == set(figures.LINES_OF_CODE), "each room has a ceiling"
    over = {room: lines for room, lines in found.items() if lines > figures.LINES_OF_CODE[room]}
    assert not over, f"more than {figures.LINES_OF_CODE}: shorten, or raise the figures and say why in the message"


def test_no_ceiling_is_far_above_its_room() -> None:
    found = laws.lines_by_room(tree())
    assert not {room for room, lines in found.items() if figures.LINES_OF_CODE[room] > lines * 1.05 + 20}, LOWER


def test_the_package_has_no_more_files_than_its_ceiling() -> None:
    assert len(tree()) <= figures.FILES["whole"]


def test_lines_of_a_room_are_added_up() -> None:
    sources = [parse("api/a.py", "x = 1"), parse("core/gcs/b.py", "x = 1\ny = 2"), parse("c.py", "x = 1")]
    assert laws.lines_by_room(sources) == {"api": 1, "core": 2, "top": 1, "kernel": 3}


EVERY_LINE = '''
"""Docstring
of a module."""

# A comment.
x = 1  # code
"""Docstring of a constant."""
TEXT = """a string

# no comment
"""
def f(
    a,  # one
    # nothing
    b,
):
    """Docstring."""
    return f"""
    {a}

    """ \\
        + b
'''


def by_tokens(source: Source) -> int:
    """The lines of code, counted in another way."""
    spaces = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in spaces:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            if {part.type for part in statement} != {tokenize.STRING}:
                for part in statement:
                    lines |= set(range(part.start[0], part.end[0] + 1))
            statement = []
    return len(lines)


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    source = parse("x.py", EVERY_LINE)
    assert laws.code_lines(source) == by_tokens(source) == 14
    for source in tree()[:: len(tree()) // 20]:
        assert laws.code_lines(source) == by_tokens(source), source.path


# ------------------------------------------------------------ the command


def test_the_command_lowers_and_deletes_and_never_raises() -> None:
    text = '''
ATTRIBUTES = {
    "A": 30,
    "B": 40,
    "C": 28,
}
"""Classes."""
STRINGS = {
    "a -> b": "why",
    "c -> d": "why",
}
LINES_OF_CODE = {
    "api": 3000,
    "core": 900,
}
'''
    found = {
        "ATTRIBUTES": {"A": 31, "B": 27, "D": 50},
        "STRINGS": {"a -> b": 1},
        "LINES_OF_CODE": {"api": 2000, "core": 950},
    }
    assert (
        laws.lowered(text, found)
        == '''
ATTRIBUTES = {
    "A": 30,
    "B": 27,
}
"""Classes."""
STRINGS = {
    "a -> b": "why",
}
LINES_OF_CODE = {
    "api": 2006,
    "core": 900,
}
'''
    )
