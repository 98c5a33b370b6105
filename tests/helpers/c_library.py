"""Shared libraries in C that stand for those of a vendor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compile_library(directory: Path, name: str, source: str) -> Path:
    """Compile a source into the shared library of this name, and return its path. Skips the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    text, made = directory / f"{name}.c", directory / name
    text.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, text], check=True)
    return made
