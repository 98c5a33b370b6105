"""mypy accepts right programs, infers what it should, and refuses wrong lines, with the plugin and without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.documents import blocks

from hpcray.compat.finder import STANDIN

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLES = ("right.py", "wrong.py", "classes.py", "as_ray.py")
MODES = ("plain", "plugin")
_SAID = re.compile(r"^(.*?):(\d+): error: .*\[([a-z-]+)\]$", re.MULTILINE)
_MARK = re.compile(r"# (error|plain|plugin): ([a-z-]+(?: [a-z-]+)?(?:, [a-z-]+ [a-z-]+)*)$")


def wanted_of(path: Path, mode: str) -> set[tuple[str, int, str]]:
    """The marked lines: `# plugin: code` in one mode, `# error: code` in both, `# error: plugin code, plain other`."""
    found = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if mark := _MARK.search(line):
            kind, text = mark.groups()
            for part in text.split(", "):
                only, _, code = part.rpartition(" ")
                if (only or kind) in (mode, "error"):
                    found.add((path.name, number, code))
    return found


def said_by_mypy(tmp_path: Path, mode: str, *samples: Path) -> tuple[set[tuple[str, int, str]], str]:
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n" + ("plugins = hpcray.mypy_plugin\n" if mode == "plugin" else ""))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-error-summary", "--hide-error-context"]
    command += ["--cache-dir", str(tmp_path / "cache"), *map(str, samples)]
    paths = os.pathsep.join([str(ROOT), STANDIN])  # as in an environment with the package `ray` that is hpcray
    env = {**os.environ, "MYPYPATH": paths, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=280)
    said = [(Path(path), int(line), code) for path, line, code in _SAID.findall(done.stdout)]
    ours = {(ROOT / path).parent for path in samples}
    return {
        (path.name, line, code) for path, line, code in said if (ROOT / path).parent in ours
    }, done.stdout + done.stderr


@pytest.mark.slow  # mypy reads all of hpcray: half a minute, without its cache
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_mypy_accepts_right_programs_and_rejects_wrong_ones(tmp_path: Path, mode: str) -> None:
    samples = [HERE / name for name in SAMPLES]
    wanted = set().union(*(wanted_of(path, mode) for path in samples))
    assert len(wanted) > 15
    for _ in range(2):  # the second time from mypy's cache
        found, output = said_by_mypy(tmp_path, mode, *samples)
        assert found == wanted, output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_about_types_says_what_mypy_says(tmp_path: Path) -> None:
    programs = [block for block in blocks() if block.page == "docs/how-to/typing.md" and block.language == "python"]
    samples = [tmp_path / f"program_{index}.py" for index in range(len(programs))]
    for path, block in zip(samples, programs, strict=True):
        path.write_text(block.text)
    wanted = set().union(*(wanted_of(path, "plugin") for path in samples))
    assert len(wanted) == 5
    found, output = said_by_mypy(tmp_path, "plugin", *samples)
    assert found == wanted, output


@pytest.mark.clients  # pyright fetches a Node.js for itself
@pytest.mark.timeout(600)
def test_pyright_refuses_the_same_lines_as_mypy_without_the_plugin() -> None:
    pytest.importorskip("pyright")
    samples = [str(HERE / name) for name in ("right.py", "wrong.py")]
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *samples]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
    said = json.loads(done.stdout)["generalDiagnostics"]
    found = {(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in said}
    assert found == {(name, line) for name, line, _ in wanted_of(HERE / "wrong.py", "plain")}, done.stdout
