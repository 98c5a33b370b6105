"""What a job keeps is made, opened and unpickled from files by platform/private_files.py alone, and what hpcray starts
does not take code from the working directory."""

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
    "cli/__init__.py": "a pipe or a device of this user's or root's, that the user names",
    "cli/history.py": "a directory of reports where the user says",
    "cli/site.py": "copies of examples where the user says",
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
READ_ELSEWHERE = {
    "attach/far_end.py": "a file of the job's own by its descriptor in /proc",
    "attach/near_end.py": "a file without a name, by its descriptor in /proc",
    "attach/starter.py": "has nothing but the standard library; judges what it has opened, by descriptors",
    "autoscaler/node_provider.py": "the log of a node beside the join token, for an error",
    "cli/jobs.py": "the output of a job in its folder, for the terminal",
    "cli/site.py": "what the package ships",
    "cli/__init__.py": "a pipe or a device of this user's or root's, that the user names",
    "cli/attach.py": "source of hpcray",
    "cli/history.py": "log files, for the terminal",
    "common/ray_version.py": "the program",
    "compat/__main__.py": "installs into site-packages",
    "compat/cluster_utils.py": "a directory with a random name (mkdtemp), and what is in it",
    "compat/finder.py": "an installed package",
    "compat/names/serve_submission.py": "a file that the user names",
    "compat/names/utils.py": "Ray's helpers: paths that the caller names",
    "dashboard/report.py": "source of hpcray",
    "diagnostics/node_figures.py": "the kernel's files",
    "diagnostics/process_activity.py": "the kernel's files",
    "durable/canonical.py": "an extension module that the program has loaded",
    "durable/durable_tasks.py": "files of the user's that a result depends on",
    "jobs/added_nodes.py": "the log of a node beside the join token, for an error",
    "launch/launch_line.py": "the file of hosts that the user or the batch system names",
    "mpi/nested_job.py": "a pipe",
    "platform/accelerators.py": "the kernel's files",
    "platform/allocation.py": "the file of hosts that the batch system names",
    "platform/arena.py": "shared memory without a name, by its descriptor in /proc",
    "platform/checkpoints.py": "has what was just written on the disk",
    "platform/config_files.py": "files of the site's and the user's: /etc, ~/.config, or where the user says",
    "platform/console.py": "a directory, so that a network file system looks again",
    "platform/direct_io.py": "files without a name",
    "platform/launcher_environment.py": "what pip says of an installed package",
    "platform/mpi_directory.py": "a directory that it judges once it is open; files and libraries of Open MPI",
    "platform/numa_binding.py": "the kernel's files",
    "platform/resource_limits.py": "the kernel's files",
    "platform/session_directory.py": "the root of sessions, which it judges once it is open, to lock it",
    "platform/sockets.py": "the kernel's files",
    "platform/spill_files.py": "the kernel's files",
    "platform/stacks.py": "the kernel's files",
    "processes/running_jobs.py": "a descriptor from private_files",
    "ray_api/app.py": "packages of clients, under random names (mkstemp) in a private directory",
    "ray_start/allocation_watch.py": "the kernel's files",
    "ray_start/flags.py": "a file that the user names",
    "ray_start/head_search.py": "the kernel's files",
    "ray_start/presence.py": "the kernel's files",
    "ray_start/start.py": "a pipe",
    "ray_start/surroundings.py": "the kernel's files",
    "runtime/node/options.py": "a file that the user names",
    "runtime_env/env_broadcast.py": "the environment that this Python runs in",
    "runtime_env/runtime_env.py": "files that the user names",
    "runtime_env/runtime_env_setup.py": "the working_dir of the user's that is packed",
    "runtime_env/submitted_runtime_env.py": "the working_dir of the user's that is packed",
    "state/__init__.py": "a timeline where the user says",
    "state/doctor.py": "the kernel's files; what pip says of an installed package",
    "state/recordings.py": "a recording that the user names, perhaps a colleague's: data, of which nothing is run",
    "tensors/device_driver.py": "the kernel's files",
    "topology/node_labels.py": "a file that the user or the site names",
    "transport/startup.py": "the kernel's files; the working directory, to come back to it",
}
_KERNELS = ("/proc/", "/sys/", "/dev/")
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


def start_of(path: ast.expr) -> str:
    """What a path begins with, as far as the source says it."""
    if isinstance(path, ast.Constant):
        return str(path.value)
    if isinstance(path, ast.JoinedStr) and path.values:
        return start_of(path.values[0])
    if isinstance(path, ast.BinOp):
        return start_of(path.left)
    if isinstance(path, ast.Call) and path.args and getattr(path.func, "id", getattr(path.func, "attr", "")) == "Path":
        return start_of(path.args[0])
    return "/dev/null" if isinstance(path, ast.Attribute) and path.attr == "devnull" else ""


def reads(source: Source) -> Iterator[int]:
    """Lines that open a file, but for those of the kernel by a path that the line shows."""
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if name in ("read_text", "read_bytes") and isinstance(node.func, ast.Attribute):
            path = node.func.value
        elif name == "open" and node.args and (isinstance(node.func, ast.Name) or owner in ("os", "io")):
            path = node.args[0]
        else:
            continue
        if not f"{start_of(path)}/".startswith(_KERNELS):
            yield node.lineno


def test_state_is_read_in_one_place() -> None:
    found = {source.path: list(reads(source)) for source in tree() if source.path != HOME}
    wrong = {path: lines for path, lines in found.items() if lines and path not in READ_ELSEWHERE}
    assert wrong == {}, "hpcray.platform.private_files opens state; what is no state has its reason above"


COMPOSED = {
    "attach/starter.py": "its code begins with a line that takes the working directory away",
    "cli/attach.py": "a shell; `code_line` has made what it passes to a Python",
    "platform/process_control.py": "the place where such lines are made",
    "processes/bootstrap.py": "its code begins with a line that takes the working directory away",
    "runtime_env/runtime_env_plugin.py": "a shell",
    "runtime_env/runtime_env_setup.py": "a shell; the code for a Python takes the working directory away",
}


def python_lines(source: Source) -> Iterator[int]:
    """Lines that compose a command of Python with -m or -c."""
    for node in source.nodes:
        if not isinstance(node, ast.List):
            continue
        words = [word.value for word in node.elts if isinstance(word, ast.Constant)]
        pythons = [word for word in node.elts if "python" in ast.unparse(word) or "executable" in ast.unparse(word)]
        if pythons and {"-m", "-c"} & set(map(str, words)):
            yield node.lineno


def test_commands_of_python_are_composed_where_the_working_directory_is_left_out() -> None:
    found = {source.path for source in tree() if list(python_lines(source))}
    assert found == set(COMPOSED), "hpcray.platform.process_control: module_line and code_line"


def test_what_is_allowed_is_needed() -> None:
    assert set(ALLOWED) <= {source.path for source in tree() if list(writes(source))}
    assert set(READ_ELSEWHERE) <= {source.path for source in tree() if list(reads(source))}


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
    for line in ("os.open(path, os.O_RDWR)", "open(path, 'rb')", "open(path)", "Path(path).read_bytes()"):
        assert list(writes(parse("x.py", line))) == [], line
        assert list(reads(parse("x.py", line))) == [1], line
    for line in ("open(f'/proc/{pid}/stat')", "Path('/sys', name).read_text()", "os.open(os.devnull, 0)", "x.open()"):
        assert list(reads(parse("x.py", line))) == [], line
    for line in ("[sys.executable, '-m', 'hpcray']", "run([python, '-c', code, *words])"):
        assert list(python_lines(parse("x.py", line))) == [1], line
