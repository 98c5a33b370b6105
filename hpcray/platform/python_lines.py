"""Command lines of Python that hpcray composes: they do not search the working directory for modules.

`python -m MODULE` and `python -c CODE` put the working directory first on `sys.path`. In a directory that several users
share, any of them could have left a `msgspec.py`, and it would run as the job's user, whose program lies elsewhere. A
program of the user is started as the user says, with the `sys.path` that `python program.py` has.

Python 3.11 has the option -P for this; it is not handed down to what the process starts, unlike PYTHONSAFEPATH. Before,
and where hpcray is in the working directory and nowhere else, a line of code does the same before anything is imported.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_HAS_OPTION = sys.version_info >= (3, 11)
_WITHOUT_DIRECTORY = "import sys; sys.path[0:1] = []; "
_RUN = "from runpy import run_module; run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def module_line(module: str, *words: str, python: str = "") -> list[str]:
    """`python -m MODULE WORD...`, which does not search the working directory.

    Args:
        module: its name. words: its arguments.
        python: the interpreter, of this Python's version; "" for this one.
    """
    if _HAS_OPTION and not _needs_root():
        return [python or sys.executable, "-P", "-m", module, *words]
    return [python or sys.executable, "-c", _prelude() + _RUN, module, *words]


def code_line(code: str, *words: str, python: str = "") -> list[str]:
    """`python -c CODE WORD...`, which does not search the working directory. Arguments: as for `module_line`."""
    return [python or sys.executable, "-c", _prelude() + code, *words]


def _needs_root() -> bool:
    """True if this process finds hpcray in a directory of its own only, as in a checkout that is not installed."""
    if _ROOT in sys.path[1:] or os.path.realpath(sys.path[0] or ".") != os.path.realpath(_ROOT):
        return False
    others = [finder for finder in sys.meta_path if finder is not PathFinder]  # of an editable installation
    return not any(finder.find_spec("hpcray", None) for finder in others)


def _prelude() -> str:
    return f"{_WITHOUT_DIRECTORY}sys.path.append({_ROOT!r}); " if _needs_root() else _WITHOUT_DIRECTORY
