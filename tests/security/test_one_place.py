"""What a job keeps is made, opened for writing and unpickled from files by platform/private_files.py alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers.source_laws import Source, parse, tree

HOME = "platform/private_files.py"
ALLOWED = {
    "compat/__main__.py": "installs into site-packages",
    "compat/cluster_utils.py": "a directory with a random name (mkdtemp), and what is in it",
    "compat/distribution.py": "installs into site-packages",
    "compat/libraries.py": "installs Ray's libraries where the user says",
    "compat/tune.py": "the directory of a trial, where Ray's Tune keeps it",
    "compat/names/utils.py": "Ray's helpers: paths that the caller names",
    "cli/history.py": "a report and a timeline where the user says",
    "cli/site.py": "copies of examples where the user says",
    "cli/profile.py": "a report where the user says",
    "graphs/dag_node.py": "unpickles from memory what it has pickled",
    "platform/mpi_directory.py": "a directory with a random name, 0700, which mkdir makes anew",
    "runtime_env/env_broadcast.py": "unpacks into the session directory, where the caller has made a private place",
    "platform/direct_io.py": "files without a name (O_TMPFILE, or mkstemp and unlinked)",
    "platform/session_directory.py": "session directories, below a root that it locks and judges by its descriptor",
    "ray_api/app.py": "packages of clients, under random names (mkstemp) in a private directory",
    "runtime_env/runtime_env_setup.py": "packages, unpacked in a private directory of the session",
    "api/session.py": "the directory for spilled objects that the caller names; files in it have no name",
    "state/__init__.py": "a timeline where the user says",
}
_MAKERS = {"makedirs", "mkdir", "mkdtemp", "mkstemp", "write_text", "write_bytes", "touch", "symlink", "mkfifo"}
_MAKING_FLAGS = {"O_CREAT", "O_APPEND", "O_TRUNC"}


def writes(source: Source) -> Iterator[int]:
    """Lines that make or open something for writing, or that unpickle an open file."""
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if name in _MAKERS - {"symlink", "touch"}:
            yield node.lineno
        elif name == "open" and owner == "os":
            if {getattr(inner, "attr", "") for inner in ast.walk(node)} & _MAKING_FLAGS:
                yield node.lineno
        elif name == "open" and isinstance(node.func, ast.Name):
            modes = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "mode")]
            if any(isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes):
                yield node.lineno
        elif (owner, name) in (("pickle", "load"), ("cloudpickle", "load")):
            yield node.lineno


def test_state_is_written_in_one_place() -> None:
    found = {source.path: list(writes(source)) for source in tree() if source.path != HOME}
    wrong = {path: lines for path, lines in found.items() if lines and path not in ALLOWED}
    assert wrong == {}, "hpcray.platform.private_files opens state; what is no state has its reason above"


def test_what_is_allowed_is_needed() -> None:
    found = {source.path for source in tree() if list(writes(source))}
    assert set(ALLOWED) <= found


def test_the_law_can_be_broken() -> None:
    for line in (
        "os.makedirs(path)",
        "Path(path).mkdir()",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "open(path, 'ab')",
        "open(path, mode='w')",
        "path.write_text('')",
        "tempfile.mkstemp()",
        "pickle.load(file)",
    ):
        assert list(writes(parse("x.py", line))) == [1], line
    for line in ("os.open(path, os.O_RDWR)", "open(path, 'rb')", "open(path)", "pickle.loads(data)"):
        assert list(writes(parse("x.py", line))) == [], line
