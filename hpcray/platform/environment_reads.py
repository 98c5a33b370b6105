"""The environment variables that modules read while the fork server imports them.

A module that reads a variable when it is imported keeps what it read: in a worker that is forked later, a variable of
its `runtime_env` comes too late for such a module. So the fork server notes what is read during its imports, and a
worker that is to have another value becomes a fresh process, which imports again (`worker_runtime_env`).

Noted is what goes through `os.environ`. Libraries in C read on their own: `runtime_env.read_at_start` lists theirs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class EnvironmentReads:
    """Notes which variables are read through `os.environ`.

    Attributes:
        values: what each variable was at its first read; None: it was not set.
    """

    def __init__(self) -> None:
        self.values: dict[str, str | None] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager: note all reads inside."""
        environ = os.environ
        encode = environ.encodekey
        known = environ.copy()

        def note(name: Any) -> Any:
            if isinstance(name, str):
                self.values.setdefault(name, known.get(name))
            return encode(name)

        environ.encodekey = note
        try:
            yield
        finally:
            environ.encodekey = encode

    def differ(self, variables: Mapping[str, str]) -> bool:
        """Return True if a module has read one of these variables when it was another, or was not set."""
        return any(name in variables and variables[name] != text for name, text in self.values.items())

    def differ_at_all(self, variables: Mapping[str, str]) -> bool:
        """Return True if a module has read something that is not so in these variables, all that a process has."""
        return any(variables.get(name) != text for name, text in self.values.items())


of_imports = EnvironmentReads()
"""The reads during the imports of the fork server. Forked workers inherit it; elsewhere it is empty."""
