"""The catalogue of changes between two runs: what was before, what is after, and whether the result may be used again.

A case is a function `f` in `main.py`, its arguments in `ARGS`, and further files.
"""

# ruff: noqa: E501  # the cases are read as a table

from __future__ import annotations

from typing import NamedTuple

AGAIN, FOUND, REFUSED = "again", "found", "refused"


class Change(NamedTuple):
    """One change.

    before, after: files by name; `main.py` defines `f` and may define `ARGS` and `KWARGS`. answer: whether the second
    run may use the result of the first. needless: why it is computed again though nothing has changed.
    """

    name: str
    before: dict[str, str]
    after: dict[str, str]
    answer: str
    needless: str = ""


def main(before: str, after: str) -> tuple[dict[str, str], dict[str, str]]:
    return {"main.py": before}, {"main.py": after}


def _change(name: str, before: str, after: str, answer: str, needless: str = "") -> Change:
    return Change(name, *main(before, after), answer, needless)


PLAIN = "def f(x=1):\n    return x + 1\n"
HELPED = "def helper(x):\n    return x + 1\n\n\ndef f():\n    return helper(1)\n"
OTHER = {"main.py": "import other\n\n\ndef f():\n    return other.helper(1)\n"}
FROM_OTHER = {"main.py": "from other import helper\n\n\ndef f():\n    return helper(1)\n"}
LATE_OTHER = {"main.py": "def f():\n    from other import helper\n    return helper(1)\n"}
HELPER = {"other.py": "def helper(x):\n    return x + 1\n\n\ndef unrelated():\n    return 1\n"}
HELPER_2 = {"other.py": HELPER["other.py"].replace("x + 1", "x + 2")}
HELPER_3 = {"other.py": HELPER["other.py"].replace("return 1\n", "return 2\n")}
DEEP = {
    "main.py": "from middle import g\n\n\ndef f():\n    return g()\n",
    "middle.py": "import other\n\n\ndef g():\n    return other.helper(3)\n",
}
PACKAGE = {"main.py": "import pack.inner\n\n\ndef f():\n    return pack.inner.helper(1)\n", "pack/__init__.py": ""}
CLASS = "class A:\n    LIMIT = 3\n\n    def m(self):\n        return 1\n\n    @staticmethod\n    def s():\n        return 2\n\n    @property\n    def p(self):\n        return 3\n\n\ndef f():\n    return A().m()\n"
BASE = "class B:\n    def m(self):\n        return 1\n\n\nclass A(B):\n    pass\n\n\ndef f():\n    return A().m()\n"
DATA = "import dataclasses\n\n\n@dataclasses.dataclass\nclass P:\n    x: int\n    y: int = 2\n\n\ndef f(p):\n    return p.x\n\n\nARGS = (P(1),)\n"
ENUM = "import enum\n\n\nclass C(enum.Enum):\n    RED = 1\n    BLUE = 2\n\n\ndef f(c):\n    return c\n\n\nARGS = (C.RED,)\n"
CLOSURE = "def make(n):\n    def f(x=1):\n        return x + n\n    return f\n\n\nf = make(1)\n"
DECORATED = "import functools\n\n\ndef twice(g):\n    @functools.wraps(g)\n    def call(*args):\n        return 2 * g(*args)\n    return call\n\n\n@twice\ndef f():\n    return 1\n"
GLOBAL = "LIMIT = 3\nOTHER = 4\n\n\ndef f():\n    return LIMIT\n"
TABLE = "TABLE = {'a': [1, 2], 'b': 3}\n\n\ndef f():\n    return TABLE['a']\n"
SET = "def f(x='b'):\n    return x in {'a', 'b', 'c', 'd'}\n"
CONFIG = {"main.py": "import config\n\n\ndef f():\n    return config.LIMIT\n", "config.py": "LIMIT = 1\nNAME = 'a'\n"}
ARRAY = "import numpy as np\n\n\ndef f(a):\n    return a.sum()\n\n\nARGS = ({},)\n"
FRAME = "import pandas as pd\n\n\ndef f(t):\n    return t\n\n\nARGS = (pd.DataFrame({}),)\n"
TENSOR = "import torch\n\n\ndef f(t):\n    return t\n\n\nARGS = ({},)\n"
ARGUMENT = "def f(x, y=0):\n    return x\n\n\nARGS = ({},)\n"
PARTIAL = "import functools\n\n\ndef g(a, b):\n    return a + b\n\n\nf = functools.partial(g, 1, b=2)\n"
CACHED = (
    "import functools\n\n\n@functools.cache\ndef helper(x):\n    return x + 1\n\n\ndef f():\n    return helper(1)\n"
)
DISPATCH = "import functools\n\n\n@functools.singledispatch\ndef g(x):\n    return 1\n\n\n@g.register\ndef _(x: str):\n    return 2\n\n\ndef f():\n    return g('a')\n"
NAMED = "import collections\n\nP = collections.namedtuple('P', 'x y')\n\n\ndef f(p):\n    return p.x\n\n\nARGS = (P(1, 2),)\n"
RECURSIVE = "def even(n):\n    return n == 0 or odd(n - 1)\n\n\ndef odd(n):\n    return n != 0 and even(n - 1)\n\n\ndef f():\n    return even(4)\n"
GENERATOR = "def f(n=3):\n    for i in range(n):\n        yield i\n"
NESTED = (
    "def f():\n    def inner(x):\n        return x + LIMIT\n    return [inner(i) for i in range(3)]\n\n\nLIMIT = 1\n"
)
CALLABLE = "class F:\n    def __init__(self, n):\n        self.n = n\n\n    def __call__(self):\n        return self.n\n\n\nf = F(1)\n"
META = "class M(type):\n    def size(cls):\n        return 1\n\n\nclass A(metaclass=M):\n    pass\n\n\ndef f():\n    return A.size()\n"
SLOTS = "class A:\n    __slots__ = ('x',)\n\n    def __init__(self, x):\n        self.x = x\n\n\ndef f(a):\n    return a.x\n\n\nARGS = (A(1),)\n"


def _arguments(name: str, one: str, other: str, answer: str, needless: str = "") -> Change:
    return _change(f"argument: {name}", ARGUMENT.format(one), ARGUMENT.format(other), answer, needless)


def _arrays(name: str, one: str, other: str, answer: str) -> Change:
    return _change(f"array: {name}", ARRAY.format(one), ARRAY.format(other), answer)


CHANGES = [
    # the function itself
    _change("nothing", PLAIN, PLAIN, FOUND),
    _change("the function", PLAIN, PLAIN.replace("+ 1", "+ 2"), AGAIN),
    _change("the function's operator", PLAIN, PLAIN.replace("x + 1", "x - 1"), AGAIN),
    _change("a default", PLAIN, PLAIN.replace("x=1", "x=2"), AGAIN),
    _change("a default becomes a float", PLAIN, PLAIN.replace("x=1", "x=1.0"), AGAIN),
    _change("a keyword-only default", "def f(*, x=1):\n    return x\n", "def f(*, x=2):\n    return x\n", AGAIN),
    _change("a constant becomes a float", PLAIN, PLAIN.replace("+ 1", "+ 1.0"), AGAIN),
    _change("a comment", PLAIN, PLAIN.replace("    return", "    # adds one\n    return"), FOUND),
    _change("a comment behind the line", PLAIN, PLAIN.replace("x + 1", "x + 1  # one more"), FOUND),
    _change(
        "an unrelated edit above it", PLAIN, "import os\n\n\ndef g():\n    return os.getpid()\n\n\n" + PLAIN, FOUND
    ),
    _change("an unrelated edit below it", PLAIN, PLAIN + "\n\ndef g():\n    return 1\n", FOUND),
    _change("layout", PLAIN, PLAIN.replace("x + 1", "(\n        x\n        + 1\n    )"), FOUND),
    _change(
        "a docstring",
        PLAIN,
        PLAIN.replace("    return", '    """Adds one."""\n    return'),
        FOUND,
    ),
    _change(
        "the text of a docstring",
        PLAIN.replace("    return", '    """Adds one."""\n    return'),
        PLAIN.replace("    return", '    """Adds 1."""\n    return'),
        FOUND,
    ),
    _change(
        "a docstring that the function reads",
        'def f():\n    """One."""\n    return f.__doc__\n',
        'def f():\n    """Two."""\n    return f.__doc__\n',
        AGAIN,
    ),
    _change("a constant in a set", SET, SET.replace("'c'", "'z'"), AGAIN),
    _change("a set constant in another order", SET, SET.replace("'a', 'b'", "'b', 'a'"), FOUND),
    _change("it becomes a generator", PLAIN, PLAIN.replace("return", "yield"), AGAIN),
    _change("a generator", GENERATOR, GENERATOR.replace("yield i", "yield i + 1"), AGAIN),
    _change(
        "an exception handler",
        "def f():\n    try:\n        return 1\n    except ValueError:\n        return 2\n",
        "def f():\n    try:\n        return 1\n    except KeyError:\n        return 2\n",
        AGAIN,
    ),
    _change(
        "a comprehension",
        "def f():\n    return [i for i in range(3)]\n",
        "def f():\n    return [i for i in range(4)]\n",
        AGAIN,
    ),
    _change("a lambda", "f = lambda: 1\n", "f = lambda: 2\n", AGAIN),
    _change("the same lambda on another line", "f = lambda: 1\n", "\n\n\nf = lambda: 1\n", FOUND),
    _change("an inner function", NESTED, NESTED.replace("x + LIMIT", "x - LIMIT"), AGAIN),
    _change("a global of an inner function", NESTED, NESTED.replace("LIMIT = 1", "LIMIT = 2"), AGAIN),
    # what it names
    _change("a helper in the same file", HELPED, HELPED.replace("x + 1", "x + 2"), AGAIN),
    _change(
        "a helper moves within the file",
        HELPED,
        "def f():\n    return helper(1)\n\n\ndef helper(x):\n    return x + 1\n",
        FOUND,
    ),
    Change("a helper in another module", OTHER | HELPER, OTHER | HELPER_2, AGAIN),
    Change("an unrelated function of that module", OTHER | HELPER, OTHER | HELPER_3, FOUND),
    Change("a helper imported by name", FROM_OTHER | HELPER, FROM_OTHER | HELPER_2, AGAIN),
    Change("an unrelated function beside one imported by name", FROM_OTHER | HELPER, FROM_OTHER | HELPER_3, FOUND),
    Change("a helper imported inside of the function", LATE_OTHER | HELPER, LATE_OTHER | HELPER_2, AGAIN),
    Change("an unrelated one beside it", LATE_OTHER | HELPER, LATE_OTHER | HELPER_3, FOUND),
    Change("a helper two modules away", DEEP | HELPER, DEEP | HELPER_2, AGAIN),
    Change(
        "a helper in a package",
        PACKAGE | {"pack/inner.py": HELPER["other.py"]},
        PACKAGE | {"pack/inner.py": HELPER_2["other.py"]},
        AGAIN,
    ),
    Change(
        "a renamed file",
        OTHER | HELPER,
        {"main.py": OTHER["main.py"].replace("other", "others"), "others.py": HELPER["other.py"]},
        AGAIN,
        "the name by which the function reaches it is another",
    ),
    Change("the file of the function is in another directory", {"main.py": PLAIN}, {"sub/../main.py": PLAIN}, FOUND),
    _change("a function that calls back", RECURSIVE, RECURSIVE.replace("n != 0 and", "n > 0 and"), AGAIN),
    _change("functions that call each other", RECURSIVE, RECURSIVE, FOUND),
    _change("a decorator", DECORATED, DECORATED.replace("2 * g", "3 * g"), AGAIN),
    _change("a decorated function", DECORATED, DECORATED.replace("return 1", "return 5"), AGAIN),
    _change("a decorator goes", DECORATED, DECORATED.replace("@twice\ndef f", "def f"), AGAIN),
    _change("a closure", CLOSURE, CLOSURE.replace("make(1)", "make(2)"), AGAIN),
    _change("a closure, the same", CLOSURE, CLOSURE, FOUND),
    _change("a global", GLOBAL, GLOBAL.replace("LIMIT = 3", "LIMIT = 5"), AGAIN),
    _change("another global", GLOBAL, GLOBAL.replace("OTHER = 4", "OTHER = 5"), FOUND),
    _change("inside of a global dict", TABLE, TABLE.replace("[1, 2]", "[1, 3]"), AGAIN),
    _change(
        "the order of a global dict",
        TABLE,
        "TABLE = {'b': 3, 'a': [1, 2]}\n\n\ndef f():\n    return TABLE['a']\n",
        AGAIN,
    ),
    _change(
        "a global becomes a builtin",
        "sum = max\n\n\ndef f():\n    return sum([1, 2])\n",
        "def f():\n    return sum([1, 2])\n",
        AGAIN,
    ),
    Change("a global of another module", CONFIG, CONFIG | {"config.py": "LIMIT = 2\nNAME = 'a'\n"}, AGAIN),
    Change("another global of that module", CONFIG, CONFIG | {"config.py": "LIMIT = 1\nNAME = 'b'\n"}, FOUND),
    _change("a cached helper", CACHED, CACHED.replace("x + 1", "x + 2"), AGAIN),
    _change("a cached helper that was called", CACHED, CACHED + "\n\nhelper(5)\n", FOUND),
    _change("a registered function", DISPATCH, DISPATCH.replace("return 2", "return 3"), AGAIN),
    _change("a registered function that was called", DISPATCH, DISPATCH + "\n\ng('b')\n", FOUND),
    # classes
    _change("a method", CLASS, CLASS.replace("return 1", "return 4"), AGAIN),
    _change("a static method", CLASS, CLASS.replace("return 2", "return 4"), AGAIN),
    _change("a property", CLASS, CLASS.replace("return 3", "return 4"), AGAIN),
    _change("an attribute of a class", CLASS, CLASS.replace("LIMIT = 3", "LIMIT = 4"), AGAIN),
    _change("a base class", BASE, BASE.replace("return 1", "return 2"), AGAIN),
    _change("another base class", BASE, BASE.replace("class A(B)", "class A"), AGAIN),
    _change("a metaclass", META, META.replace("return 1", "return 2"), AGAIN),
    _change(
        "a class' docstring",
        BASE,
        BASE.replace("class A(B):\n    pass", 'class A(B):\n    """New."""'),
        AGAIN,
        "libraries read docstrings",
    ),
    _change("a dataclass' field", DATA, DATA.replace("y: int = 2", "y: int = 3"), AGAIN),
    _change("a dataclass' value", DATA, DATA.replace("P(1)", "P(2)"), AGAIN),
    _change("a dataclass, the same", DATA, DATA, FOUND),
    _change("an enum's member", ENUM, ENUM.replace("(C.RED,)", "(C.BLUE,)"), AGAIN),
    _change("an enum's value", ENUM, ENUM.replace("BLUE = 2", "BLUE = 3"), AGAIN),
    _change("an enum, the same", ENUM, ENUM, FOUND),
    _change("a named tuple's value", NAMED, NAMED.replace("P(1, 2)", "P(1, 3)"), AGAIN),
    _change("a named tuple, the same", NAMED, NAMED, FOUND),
    _change("a class with slots", SLOTS, SLOTS.replace("A(1)", "A(2)"), AGAIN),
    _change("a class with slots, the same", SLOTS, SLOTS, FOUND),
    _change("a callable object", CALLABLE, CALLABLE.replace("F(1)", "F(2)"), AGAIN),
    _change("the class of a callable object", CALLABLE, CALLABLE.replace("return self.n", "return -self.n"), AGAIN),
    _change("a partial", PARTIAL, PARTIAL.replace("b=2", "b=3"), AGAIN),
    _change("the function of a partial", PARTIAL, PARTIAL.replace("a + b", "a - b"), AGAIN),
    _change("a partial, the same", PARTIAL, PARTIAL, FOUND),
    # arguments
    _arguments("a number", "1", "2", AGAIN),
    _arguments("True for 1", "1", "True", AGAIN),
    _arguments("1.0 for 1", "1", "1.0", AGAIN),
    _arguments("-0.0 for 0.0", "0.0", "-0.0", AGAIN),
    _arguments("NaN, the same", "float('nan')", "float('nan')", FOUND),
    _arguments("NaN with the other sign", "float('nan')", "-float('nan')", AGAIN),
    _arguments("a list of -0.0", "[0.0, 1.0]", "[-0.0, 1.0]", AGAIN),
    _arguments("a tuple for a list", "[1, 2]", "(1, 2)", AGAIN),
    _arguments("text for bytes", "'a'", "b'a'", AGAIN),
    _arguments("the order of a dict", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}", AGAIN),
    _arguments("a set in another order", "{'a', 'b', 'c', 1}", "{1, 'c', 'b', 'a'}", FOUND),
    _arguments("a set", "{'a', 'b'}", "{'a', 'c'}", AGAIN),
    _arguments("a frozenset for a set", "{'a', 'b'}", "frozenset({'a', 'b'})", AGAIN),
    _arguments("one list twice for two lists", "[[1]] * 2", "[[1], [1]]", AGAIN),
    _arguments("a default that is given", "1", "1, 0", FOUND),
    _arguments("a deep change", "{'a': [{'b': (1, [2])}]}", "{'a': [{'b': (1, [3])}]}", AGAIN),
    _arguments("an open file", "open(__file__)", "open(__file__)", REFUSED),
    _arguments("a lock", "[__import__('threading').Lock()]", "[__import__('threading').Lock()]", REFUSED),
    _arguments("a generator", "(i for i in [1])", "(i for i in [1])", REFUSED),
    _arguments("a large text", "'a' * 100_000", "'a' * 99_999 + 'b'", AGAIN),
    # arrays
    _arrays("the same", "np.arange(6.0)", "np.arange(6.0)", FOUND),
    _arrays("a value", "np.arange(6.0)", "np.arange(6.0) + 1", AGAIN),
    _arrays("dtype", "np.arange(6)", "np.arange(6, dtype='i4')", AGAIN),
    _arrays("byte order", "np.arange(6, dtype='<i4')", "np.arange(6, dtype='>i4')", AGAIN),
    _arrays("shape", "np.arange(6)", "np.arange(6).reshape(2, 3)", AGAIN),
    _arrays("order", "np.ones((2, 3))", "np.ones((2, 3), order='F')", AGAIN),
    _arrays("strides", "np.arange(6)[::2]", "np.arange(6)[::2].copy()", FOUND),
    _arrays("NaN", "np.array([1, np.nan])", "np.array([1, np.nan])", FOUND),
    _arrays("-0.0", "np.array([0.0])", "np.array([-0.0])", AGAIN),
    _arrays("objects", "np.array([1, 'a'], dtype=object)", "np.array([1, 'b'], dtype=object)", AGAIN),
    _arrays("a record's field", "np.zeros(2, [('a', 'f4')])", "np.zeros(2, [('b', 'f4')])", AGAIN),
    _arrays("dates", "np.array(['2020-01-01'], 'M8[D]')", "np.array(['2020-01-01'], 'M8[s]')", AGAIN),
    _arrays("a large one", "np.zeros(1 << 18)", "np.r_[np.zeros((1 << 18) - 1), 1]", AGAIN),
]
FRAMES = [
    _change(
        "DataFrame: the same",
        FRAME.format("{'a': [1, 2], 'b': ['x', 'y']}"),
        FRAME.format("{'a': [1, 2], 'b': ['x', 'y']}"),
        FOUND,
    ),
    _change("DataFrame: a value", FRAME.format("{'a': [1, 2]}"), FRAME.format("{'a': [1, 3]}"), AGAIN),
    _change("DataFrame: a text", FRAME.format("{'b': ['x', 'y']}"), FRAME.format("{'b': ['x', 'z']}"), AGAIN),
    _change(
        "DataFrame: the index",
        FRAME.format("{'a': [1, 2]}, index=[0, 1]"),
        FRAME.format("{'a': [1, 2]}, index=[0, 2]"),
        AGAIN,
    ),
    _change("DataFrame: a column's name", FRAME.format("{'a': [1, 2]}"), FRAME.format("{'b': [1, 2]}"), AGAIN),
]
TENSORS = [
    _change("tensor: the same", TENSOR.format("torch.ones(3)"), TENSOR.format("torch.ones(3)"), FOUND),
    _change("tensor: a value", TENSOR.format("torch.ones(3)"), TENSOR.format("torch.zeros(3)"), AGAIN),
    _change(
        "tensor: dtype", TENSOR.format("torch.ones(3)"), TENSOR.format("torch.ones(3, dtype=torch.float64)"), AGAIN
    ),
    _change("tensor: shape", TENSOR.format("torch.ones(6)"), TENSOR.format("torch.ones(2, 3)"), AGAIN),
    _change(
        "tensor: a gradient", TENSOR.format("torch.ones(3)"), TENSOR.format("torch.ones(3, requires_grad=True)"), AGAIN
    ),
]
