"""The catalogue of hangs: programs that hang, with their cause, and healthy ones that only look so.

Each program prints `MARK` when its last useful step is over. Its docstring is its header: a title, then fields.

    kind: certain (a HangError) or likely (the job ends with exit code 79)
    cause: why it never ends; of a healthy one: why it does
    remedy: what to do instead
    names: a text that the report names
    run: options of hpcray-launch beside -n 1 (may be missing)
    path: a directory of modules for it (may be missing)
    start: python, where the program starts its job itself (may be missing)
    needs: packages (may be missing)
    input: open, for a pipe into which nothing is written, in place of an empty input (may be missing)
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "how-to" / "hangs.md"
BEGIN, END = (
    "<!-- The catalogue, from tests/hangs; a test fails when it is stale. -->",
    "<!-- End of the catalogue. -->",
)


@dataclass
class Program:
    """One program. fields: of its header."""

    path: Path
    title: str
    fields: dict[str, str]

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass
class Run:
    """How a program went. after: seconds from the mark to the end; -1.0: it was still there."""

    code: int
    after: float
    err: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.err)


def programs(directory: str) -> list[Program]:
    """The programs of `planted` or `healthy`, in order of their names."""
    return [_read(path) for path in sorted((HERE / directory).glob("*.py"))]


def _read(path: Path) -> Program:
    title, _, rest = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")
    fields = dict(line.split(": ", 1) for line in rest.strip().splitlines())
    return Program(path, title, fields)


def run(program: Program, seconds: float, longest: float, environ: dict[str, str] | None = None) -> Run:
    """Run a program under `--end-hangs`, for so long after its mark; then it is ended."""
    options = program.fields.get("run", "").split()
    if place := program.fields.get("path"):
        environ = {**(environ or os.environ)}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE / place), environ.get("PYTHONPATH")]))
    if program.fields.get("start") == "python":
        environ = {**(environ or os.environ), "HPCRAY_END_HANGS": f"{seconds:g}"}
        words = [str(program.path)]
    else:
        words = ["-m", "hpcray.cli.launch", "-n", "1", *options, "--end-hangs", f"{seconds:g}", str(program.path)]
    given = subprocess.PIPE if program.fields.get("input") else subprocess.DEVNULL
    child = subprocess.Popen(
        [sys.executable, *words], stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environ, start_new_session=True,
    )  # fmt: skip
    found = Run(0, -1.0)
    assert child.stdout is not None and child.stderr is not None
    reader = threading.Thread(target=lambda: found.err.extend(child.stderr or ()), daemon=True)
    reader.start()
    try:
        for line in child.stdout:
            if line.strip() == "MARK":
                break
        marked = time.monotonic()
        threading.Thread(target=child.stdout.read, daemon=True).start()
        try:
            found.code = child.wait(longest)
            found.after = time.monotonic() - marked
        except subprocess.TimeoutExpired:
            found.code = -1
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        reader.join(10)
    return found


def page_section() -> str:
    """The part of docs/how-to/hangs.md that shows the catalogue."""
    rows = [BEGIN, "", "| program | cause | what ends it | instead |", "| --- | --- | --- | --- |"]
    for one in programs("planted"):
        ends = "`HangError`" if one.fields["kind"] == "certain" else "exit code 79"
        link = f"[{one.name}](../../tests/hangs/planted/{one.name}.py)"
        rows.append(f"| {link}: {one.title.rstrip('.')} | {one.fields['cause']} | {ends} | {one.fields['remedy']} |")
    healthy = programs("healthy")
    if healthy:
        rows += ["", "These look hung, and are left alone:", "", "| program | why it is healthy |", "| --- | --- |"]
        for one in healthy:
            link = f"[{one.name}](../../tests/hangs/healthy/{one.name}.py)"
            rows.append(f"| {link}: {one.title.rstrip('.')} | {one.fields['cause']} |")
    return "\n".join([*rows, "", END])


if __name__ == "__main__":
    text = PAGE.read_text()
    start, rest = text.split(BEGIN, 1)
    PAGE.write_text(start + page_section() + rest.split(END, 1)[1])
