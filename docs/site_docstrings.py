"""A griffe extension: an entry of a docstring that is about several parameters at once, `a, b: text`, becomes an entry
for each of them, as their types differ."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_SHARED = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.+(?:\n\1 +.+)*)", re.MULTILINE)
_SECTION = re.compile(r"^( *)Args:\n(?:\1 +.*\n?)+", re.MULTILINE)


def single_entries(text: str) -> str:
    """The docstring with one entry for each parameter; from the second one on they repeat the text."""
    return _SECTION.sub(lambda section: _SHARED.sub(_entry_of_each, section[0]), text)


def _entry_of_each(found: re.Match[str]) -> str:
    indent, names, text = found.groups()
    return "\n".join(f"{indent}{name}: {text}" for name in names.split(", "))


class SharedEntries(Extension):
    """Applies `single_entries` to every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = single_entries(obj.docstring.value)
