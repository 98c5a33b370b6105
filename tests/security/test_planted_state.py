"""Another user was there first: planted checkpoints, jobs, tokens, log files, traces, modules. See docs/security.md."""

from __future__ import annotations

import errno
import json
import os
import pdb
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from helpers.jobs import ROOT, Job
from helpers.leaks import LeakCheck
from helpers.strangers import UID, as_stranger, stranger_says

import hpcray as ray
from hpcray.attach import starter
from hpcray.cli import write_named
from hpcray.cli.site import copy_shipped
from hpcray.common.config import Config
from hpcray.diagnostics.debugger import _read_settings as read_debugger_settings
from hpcray.jobs.submitted_job import jobs_folder, list_jobs, make_folder
from hpcray.launch.launch_line import EPILOG
from hpcray.platform import checkpoints
from hpcray.platform.launcher_environment import set_mpi_variables, strip_launcher_variables
from hpcray.platform.private_files import append_private_file, make_private_directory
from hpcray.platform.process_control import code_line, module_line
from hpcray.platform.session_directory import SessionDirectory, SessionError, keep_logs, node_logs
from hpcray.ray_start import allocation_watch, challenge
from hpcray.ray_start.session_files import SessionFiles, sweep_files
from hpcray.runtime.node.join_token import join_token_path, write_join_token
from hpcray.runtime.node.slurm_job import checkpoint_directory
from hpcray.runtime_env.runtime_env_setup import set_up_python
from hpcray.state import node_metrics
from hpcray.state.node_metrics import _write as write_metrics_file
from hpcray.transport.startup import without_planted_settings

BOMB = """\
import os, pickle, sys
class Bomb:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[1]}/boom",)
"""


LOADED = ("pickle", "ctypes", "select")


def boom(place: Path) -> bool:
    """Whether the code of the other user has run."""
    return (place / "boom").exists()


# ---------------------------------------------------------------- checkpoints

PLANT_CHECKPOINT = (
    BOMB
    + """
os.umask(0)
os.makedirs(sys.argv[2])
with open(sys.argv[2] + "/state.pkl", "wb") as file:
    file.write(pickle.dumps(Bomb()))
"""
)


@pytest.mark.parametrize("by", ["default", "setting"])
def test_planted_checkpoint_is_not_restored_and_the_job_has_its_own(
    shared: Path, home: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    place = shared / "hpcray-checkpoints" / "4242"
    stranger_says(PLANT_CHECKPOINT, shared, place / "trainer" / "000007", load=LOADED)
    environ = {"SLURM_JOB_ID": "4242", "SLURM_SUBMIT_DIR": str(shared)}
    root = checkpoint_directory(Config(checkpoint_dir=str(place) if by == "setting" else ""), environ, announce=True)
    assert root.startswith(f"{home}/.hpcray/checkpoints/")
    said = capsys.readouterr().err
    assert f"{shared}/hpcray-checkpoints belongs to uid {UID}" in said and "HPCRAY_SAFE_DIRECTORIES=" in said
    assert checkpoints.latest(root, "trainer") is None
    with checkpoints.writing(root, "trainer") as directory:
        Path(directory, "state").write_text("mine")
    found = checkpoints.latest(root, "trainer")
    assert found is not None and Path(found, "state").read_text() == "mine"
    assert checkpoint_directory(Config(), environ) == checkpoint_directory(Config(), environ), "in the next run too"


def test_checkpoint_planted_among_those_of_this_user_is_passed_over(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shared / "mine"
    root.mkdir()
    with checkpoints.writing(str(root), "trainer") as directory:
        Path(directory, "state").write_text("mine")
    # A group that the other user is in may write there.
    os.chown(root / "trainer", -1, UID)
    (root / "trainer").chmod(0o770)
    root.chmod(0o755)
    stranger_says(PLANT_CHECKPOINT, shared, root / "trainer" / "000009", load=LOADED)
    stranger_says("import os, sys; os.symlink('/etc', sys.argv[1])", root / "trainer" / "000010")
    found = checkpoints.latest(str(root), "trainer")
    assert found == str(root / "trainer" / "000001") and Path(found, "state").read_text() == "mine"
    assert f"belongs to uid {UID}" in capsys.readouterr().err


def test_checkpoint_with_a_file_that_all_may_write_is_passed_over(shared: Path) -> None:
    root = shared / "mine"
    root.mkdir()
    for mode in (0o700, 0o755):
        with checkpoints.writing(str(root), "trainer") as directory:
            Path(directory, "state").write_text("mine")
            Path(directory, "state").chmod(0o666)
        Path(root, "trainer").chmod(0o755)
        newest = sorted(Path(root, "trainer").glob("0*"))[-1]
        newest.chmod(mode)
        assert (checkpoints.latest(str(root), "trainer") == str(newest)) == (mode == 0o700), oct(mode)


# ---------------------------------------------------------------- submitted jobs

PLANT_JOB = (
    BOMB
    + """
import json
place, good = sys.argv[2:4]
os.umask(0)
folder = place + "/evil/20250101-000000-train-abcdef"
os.makedirs(folder)
json.dump(dict(job_id="4711", name="train", executor="slurm", nodes=1, submitted=1.0, time_limit=None, started=0,
               command=["train"], requeues=0), open(folder + "/job.json", "w"))
open(folder + "/4711_0_result.pkl", "wb").write(pickle.dumps(Bomb()))
os.symlink(good, place + "/other")
os.symlink("evil", place + "/.hpcray-jobs")
print("planted", flush=True)
import ctypes, select
libc = ctypes.CDLL(None)
a, b = os.fsencode(place + "/.hpcray-jobs"), os.fsencode(place + "/other")
while not select.select([0], [], [], 0)[0]:
    libc.renameat2(-100, a, -100, b, 2)
"""
)


def test_jobs_that_another_user_flips_in_and_out_are_never_unpickled(
    shared: Path, theirs: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = shared / "good"
    good.mkdir(0o755)
    child = as_stranger(PLANT_JOB, shared, theirs, good, load=LOADED)
    assert child.stdin is not None and child.stdout is not None and child.stdout.readline() == "planted\n"
    monkeypatch.chdir(theirs)
    try:
        for _ in range(200):
            assert [job.state for job in list_jobs()] == []
    finally:
        child.communicate("\n", timeout=60)
    assert not boom(shared)


def test_jobs_submitted_in_a_directory_of_another_user_are_kept_at_home(
    theirs: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(theirs)
    for given in (None, str(theirs / "mine"), str(theirs / "mine" / "deeper")):
        folder = make_folder(jobs_folder(given), "train")
        assert str(folder).startswith(f"{home}/.hpcray/jobs/") and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert f"{theirs} belongs to uid {UID}" in capsys.readouterr().err
    assert list(theirs.iterdir()) == []


# ---------------------------------------------------------------- the join secret


def test_join_token_is_not_written_where_another_user_was_first(
    shared: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger_says("import os, sys; os.umask(0); os.makedirs(sys.argv[1])", shared / "jobs" / "join-tokens")
    monkeypatch.setenv("HPCRAY_JOBS", str(shared / "jobs"))
    path = join_token_path("0123456789abcdef")
    assert path == f"{home}/.hpcray/join-tokens/0123456789abcdef.join-token"
    assert f"belongs to uid {UID}" in capsys.readouterr().err
    write_join_token(path, b"secret")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(OSError, match=f"belongs to uid {UID}"):
        write_join_token(str(shared / "jobs" / "join-tokens" / "x.join-token"), b"secret")
    assert not [path for path in shared.rglob("*") if path.is_file()]


def test_no_name_that_another_user_can_take_gets_the_secret(shared: Path) -> None:
    """Its own files come from names that nobody can guess, and never from those that are there."""
    (shared / "jobs").mkdir(0o700)
    tokens = shared / "jobs" / "join-tokens"
    write_join_token(str(tokens / "x.join-token"), b"secret")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tokens, *tokens.iterdir())] == [0o700, 0o600]
    tokens.chmod(0o777)
    (shared / "jobs").chmod(0o755)
    code = "import os, sys; os.umask(0); [open(f'{sys.argv[1]}.{n}.new', 'w') for n in range(*map(int, sys.argv[2:]))]"
    stranger_says(code, tokens / "x.join-token", os.getpid() - 5, os.getpid() + 200)
    with pytest.raises(OSError, match="can be written by everybody.*hint: chmod o-w"):
        write_join_token(str(tokens / "x.join-token"), b"secret")


# ---------------------------------------------------------------- what is appended to

PLANT_LINKS = """\
import os, sys
place, target = sys.argv[1:3]
os.umask(0)
os.makedirs(place, exist_ok=True)
for name in sys.argv[3:]:
    os.symlink(target, place + "/" + name)
"""


def test_log_directory_that_another_user_made_is_not_used(shared: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    profile.write_text("precious\n")
    stranger_says(PLANT_LINKS, shared / "logs" / "node-0", profile, "worker-1.out")
    problem = keep_logs(str(tmp_path / "logs"), node_logs(str(shared / "logs"), 0))
    assert f"belongs to uid {UID}" in problem and "hint: HPCRAY_LOG_DIR" in problem
    assert not (tmp_path / "logs").exists(), "the node makes its own"


def test_workers_follow_no_links_to_their_log_files(
    shared: Path, tmp_path: Path, home: Path, leak_check: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who owns the directory above exchanges it while the job runs."""
    above = shared / "above"
    above.mkdir()
    os.chown(above, UID, UID)
    (above / "logs").mkdir()
    profile = tmp_path / "profile"
    profile.write_text("precious\n")
    monkeypatch.setenv("HPCRAY_LOG_DIR", str(above / "logs"))
    ray.init(num_cpus=1)
    try:

        @ray.remote
        class Printer:
            def say(self) -> int:
                print("printed by the job")
                return os.getpid()

        first = Printer.options(num_cpus=0).remote()
        pid = ray.get(first.say.remote())
        kept = above / "logs" / "node-0"
        (name,) = [path.name for path in kept.glob("*.out") if path.name.endswith(f"-{pid}.out")]
        node, number, run, job = name[7:11], int(name[11:19], 16), name[19:23], name.split("-")[2]
        names = [
            f"worker-{node}{k:08x}{run}-{job}-{p}.{kind}"
            for k in range(number + 1, number + 4)
            for p in range(pid + 1, pid + 400)
            for kind in ("out", "err")
        ]
        code = "import os, sys; os.rename(sys.argv[1], sys.argv[1] + '.old')"
        stranger_says(code, above / "logs")
        stranger_says(PLANT_LINKS, kept, profile, *names[: len(names) // 2])
        stranger_says(PLANT_LINKS, kept, profile, *names[len(names) // 2 :])
        others = [Printer.options(num_cpus=0).remote() for _ in range(2)]
        assert len(set(ray.get([other.say.remote() for other in others], timeout=60))) == 2, "no task fails for it"
    finally:
        ray.shutdown()
    assert profile.read_text() == "precious\n"


def test_a_link_of_another_user_does_not_choose_where_logs_are_kept(shared: Path, home: Path, tmp_path: Path) -> None:
    """Many shells run each file in a directory such as ~/.bashrc.d, and what a task prints would be in one."""
    precious = home / ".bashrc.d"
    precious.mkdir(0o700)
    stranger_says(PLANT_LINKS, shared / "logs", precious, "node-0", "worker")
    problem = keep_logs(str(tmp_path / "logs"), node_logs(str(shared / "logs"), 0))
    assert f"is a link of uid {UID}" in problem
    with pytest.raises(OSError, match=f"is a link of uid {UID}"):
        os.close(append_private_file(str(shared / "logs" / "worker" / "1.out")))
    with pytest.raises(OSError, match=f"is a link of uid {UID}"):
        make_private_directory(str(shared / "logs" / "worker"))
    assert list(precious.iterdir()) == []
    # A link of this user's is followed, wherever it is.
    (shared / "mine").symlink_to(precious)
    os.close(append_private_file(str(shared / "mine" / "1.out")))
    assert [path.name for path in precious.iterdir()] == ["1.out"]


def test_rays_temporary_directory_is_none_that_another_user_has_linked(shared: Path, home: Path) -> None:
    precious = home / "precious"
    precious.mkdir(0o700)
    (precious / "ray_current_cluster").write_text("precious")
    stranger_says("import os, sys; os.symlink(*sys.argv[1:3])", precious, shared / "ray")
    files = SessionFiles(str(shared / "ray"), keep=False)
    assert files.top == f"{shared}/ray-{os.getuid()}" and f"is a link of uid {UID}" in files.note
    with files.open_log():
        files.point_here("127.0.0.1:6379")
        assert os.readlink(f"{files.top}/session_latest") == files.log.split("/")[-3]
    files.close()
    assert [path.name for path in precious.iterdir()] == ["ray_current_cluster"]
    (precious / "session_latest").symlink_to("gone")
    sweep_files({"RAY_TMPDIR": "", "TMPDIR": str(shared)})
    assert (precious / "ray_current_cluster").read_text() == "precious", "ray stop does not tidy up there either"


def ends(call: Callable[[], object]) -> bool:
    """Whether a call returns, and does not wait for another user."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20.0)
    return not thread.is_alive()


def test_a_pipe_of_another_user_in_rays_temporary_directory_is_not_waited_for(shared: Path, home: Path) -> None:
    files = SessionFiles(str(shared), keep=True)  # ray start --temp-dir=/tmp
    code = "import os, sys; os.mkfifo(sys.argv[1]); os.symlink(sys.argv[3], sys.argv[2])"
    name = files.logs.split("/")[-2]
    stranger_says(code, shared / "ray_current_cluster", shared / "session_latest", name)
    assert ends(files.close)


def test_text_file_with_metrics_follows_no_planted_link(shared: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    names = [f"hpcray-x-0.prom.{os.getpid()}", "hpcray-x-0.prom.new"]
    stranger_says(PLANT_LINKS, shared, precious, *names)
    write_metrics_file(shared / "hpcray-x-0.prom", "ray_x 1\n")
    assert precious.read_text() == "precious"
    assert stat.S_IMODE((shared / "hpcray-x-0.prom").stat().st_mode) == 0o644, "a collector is another user"


# ---------------------------------------------------------------- files and copies where the user says


def test_a_report_goes_into_no_link_and_waits_for_no_pipe_of_another_user(
    shared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its name in the directory of --report is that of the job, which all users can know before it ends."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    stranger_says(PLANT_LINKS, shared, precious, "4711.html")
    stranger_says("import os, sys; os.mkfifo(sys.argv[1])", shared / "4712.html")
    for name in ("4711.html", "4712.html"):
        with pytest.raises(click.ClickException, match=f"{name} is a link or a pipe of uid {UID}"):
            write_named(shared / name, "report")
    assert precious.read_text() == "precious"
    (shared / "mine.html").symlink_to(precious)
    before = os.umask(0o027)
    try:
        for name in ("4713.html", "4713.html", "mine.html", "/dev/stdout"):
            write_named(shared / name, "report")
    finally:
        os.umask(before)
    assert precious.read_text() == "report" and capfd.readouterr().out == "report", "links of this user's and root's"
    assert stat.S_IMODE((shared / "4713.html").stat().st_mode) == 0o640
    assert (shared / "4713.html").read_text() == "report"


def test_examples_are_not_copied_where_another_user_can_exchange_them(
    shared: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are programs and batch scripts, which the user starts next."""
    precious = home / "bin"
    precious.mkdir()
    stranger_says(PLANT_LINKS, shared, precious, "digits")
    stranger_says("import os, sys; os.umask(0); os.mkdir(sys.argv[1])", shared / "slurm")
    monkeypatch.chdir(shared)
    for words, why in ((["digits"], f"is a link of uid {UID}"), (["slurm"], f"belongs to uid {UID}")):
        done = CliRunner().invoke(copy_shipped, words)
        assert done.exit_code == 1 and why in done.output, done.output
    assert list(precious.iterdir()) == list((shared / "slurm").iterdir()) == []
    assert CliRunner().invoke(copy_shipped, ["slurm", "mine"]).exit_code == 0
    assert CliRunner().invoke(copy_shipped, ["digits", "."]).exit_code == 0, "as in /tmp"


# ---------------------------------------------------------------- the working directory

PROGRAM = """\
import json, sys
import hpcray as ray
ray.init()
where = ray.get(ray.remote(lambda: __import__("sys").path).remote())
print(json.dumps([sys.path, where]), flush=True)
"""
UCX_PROGRAM = """\
import os
import hpcray as ray
ray.init()
ray.get([ray.remote(os.getpid).options(scheduling_strategy="SPREAD").remote() for _ in range(4)])
print(os.getcwd())
"""
MPI_PROGRAM = """\
import os
import hpcray as ray
ray.init()
print(*set(ray.mpi.run(lambda comm: os.getcwd(), ranks=2, cpus_per_rank=0.5)))
"""
MODULES = ("msgspec", "numpy", "json", "runpy", "mpi4py", "hpcray", "selectors", "cloudpickle")


def test_modules_in_the_working_directory_are_not_imported_by_what_hpcray_starts(
    shared: Path, theirs: Path, home: Path, leak_check: LeakCheck
) -> None:
    code = "import os, sys; os.umask(0); [open(f'{sys.argv[1]}/{n}.py', 'w').write(sys.argv[2]) for n in sys.argv[3:]]"
    stranger_says(code, theirs, f"open('{shared}/boom', 'w')", *MODULES)
    elsewhere = shared / "mine"
    elsewhere.mkdir(0o755)
    program = elsewhere / "program.py"
    program.write_text(PROGRAM)
    launcher = str(Path(sys.executable).with_name("hpcray-launch"))
    found = {}
    for name, line in {"ranks": [launcher, "-n", "2", str(program)], "one": [sys.executable, str(program)]}.items():
        with Job(line, cwd=theirs) as job:
            ended = job.wait()
            assert ended.code == 0, ended.err
            found[name] = json.loads(ended.out.splitlines()[-1])
        assert not boom(shared), name
    for name, line in {
        "the question to a cluster": [*challenge.command(str(elsewhere / "none"))],
        "the way into a job": module_line("hpcray.cli", "bridge", "--session", str(elsewhere)),
    }.items():
        with Job(line, cwd=theirs) as job:
            assert job.wait().code == 1, name
        assert not boom(shared), name
    plain = elsewhere / "plain.py"
    plain.write_text("import json, sys; print(json.dumps(sys.path))")
    with Job([sys.executable, str(plain)], cwd=theirs) as job:
        path = json.loads(job.wait().out)
    assert found["ranks"][0] == found["one"][0] == path, "the program's path is the plain one"
    assert str(elsewhere) in found["ranks"][1] and str(theirs) not in found["ranks"][1]


def planted(path: Path, text: str) -> None:
    """The other user writes a file, for all to read."""
    stranger_says("import os, sys; os.umask(0o022); open(sys.argv[1], 'w').write(sys.argv[2])", path, text)


DEBUGGED = """\
import os, sys, time
import hpcray as ray
from hpcray.diagnostics.debugger import set_trace
def stop():
    set_trace(sys._getframe())
    return 1
ray.init(num_cpus=1)
if sys.argv[1] == "driver":
    stop()
stopped, end = ray.remote(stop).remote(), time.monotonic() + 30
while not os.path.exists(sys.argv[2]) and time.monotonic() < end:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("where", ["driver", "task"])
def test_commands_for_the_debugger_in_the_working_directory_are_not_run(
    shared: Path, theirs: Path, home: Path, leak_check: LeakCheck, where: str
) -> None:
    """`.pdbrc` there is code that runs at the first `breakpoint()`, and the home's is this user's."""
    planted(theirs / ".pdbrc", f"!open('{shared}/boom', 'w')\n")
    (home / ".pdbrc").write_text(f"!open('{home}/mine', 'w')\n")
    program = shared / "debugged.py"
    program.write_text(DEBUGGED)
    with Job([sys.executable, str(program), where, str(home / "mine")], cwd=theirs) as job:
        ended = job.wait()
    assert (home / "mine").exists(), ended.err
    assert not boom(shared)


def test_a_debugger_runs_this_users_commands_in_the_working_directory(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".pdbrc").write_text("alias here p 1\n")
    (tmp_path / "dotfiles").write_text("alias home p 1\n")
    (home / ".pdbrc").symlink_to(tmp_path / "dotfiles")
    monkeypatch.chdir(tmp_path)
    debugger = pdb.Pdb(readrc=False)
    read_debugger_settings(debugger)
    assert debugger.rcLines == ["alias home p 1\n", "alias here p 1\n"]


@pytest.mark.parametrize("own", [False, True])
def test_an_attached_session_imports_nothing_from_a_directory_of_another_user(
    shared: Path, theirs: Path, home: Path, own: bool
) -> None:
    """IPython searches the working directory first, for modules of its own too."""
    pytest.importorskip("IPython")
    where = home if own else theirs
    (planted if not own else Path.write_text)(where / "jedi_of_mine.py", f"open('{shared}/boom', 'w')")
    line = code_line("from hpcray.cli.attach import _interact; _interact({})")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, input="import jedi_of_mine\n", cwd=where, env=env, text=True, capture_output=True)
    assert boom(shared) == own, done
    assert ("modules in the working directory are not imported" in done.stderr) != own


@pytest.mark.parametrize("what", ["ranks", "mpi.run"])
def test_settings_of_ucx_in_a_directory_of_another_user_are_not_read(
    shared: Path, theirs: Path, home: Path, leak_check: LeakCheck, what: str
) -> None:
    """UCX looks for `ucx.conf` in the working directory: UCX_MODULE_DIR there has it load libraries of anybody."""
    code = "import sys; open(sys.argv[1], 'w').write(f'UCX_LOG_FILE={sys.argv[2]}\\nUCX_LOG_LEVEL=info\\n')"
    stranger_says(code, theirs / "ucx.conf", shared / "boom")
    program = shared / "program.py"
    program.write_text(UCX_PROGRAM if what == "ranks" else MPI_PROGRAM)
    launcher = str(Path(sys.executable).with_name("hpcray-launch"))
    with Job([launcher, "-n", "2", "--cpus-per-node", "2", str(program)], cwd=theirs) as job:
        ended = job.wait()
    assert (ended.code, ended.out) == (0, f"{theirs}\n"), ended.err
    assert not boom(shared)


def test_settings_of_ucx_count_where_no_other_user_could_have_put_them(
    stranger: None, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = shared / "mine"
    place.mkdir(0o755)
    monkeypatch.chdir(place)
    settings = place / "ucx.conf"

    def directory() -> str:
        with without_planted_settings():
            return os.getcwd()

    found = [directory()]
    for mode in (0o644, 0o664, 0o646):
        settings.write_text("UCX_LOG_LEVEL=warn\n")
        settings.chmod(mode)
        found.append(directory())
        settings.unlink()
    for mode in (0o775, 0o777, 0o1777):
        place.chmod(mode)
        found.append(directory())
    place.chmod(0o755)
    os.chown(place, UID, UID)
    found.append(directory())
    assert found == [str(place), str(place), "/", "/", str(place), "/", "/", "/"]
    assert os.getcwd() == str(place)


def test_mpi_looks_for_no_settings_where_all_may_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has a user without a name and a home. Open MPI and UCX load libraries of HOME, or named there."""

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    environ: dict[str, str] = {}
    set_mpi_variables(environ, False)
    assert (os.stat(environ["HOME"]).st_uid, os.stat(environ["HOME"]).st_mode & 0o022) == (0, 0), environ
    strip_launcher_variables(environ)


SESSIONS = """\
import os, sys
root, evil = sys.argv[1:]
os.umask(0)
os.rename(root, root + ".old")
os.rename(evil, root)
"""


def test_the_way_into_a_job_believes_no_session_of_another_user(
    shared: Path, theirs: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it finds there names the Python that it becomes. Who owns a directory above exchanges what is below."""
    monkeypatch.setenv("HPCRAY_SAFE_DIRECTORIES", str(theirs))
    monkeypatch.setattr(starter, "_roots", lambda: {f"{theirs}/hpcray-{os.getuid()}"})
    session = SessionDirectory.create({"HPCRAY_TMPDIR": str(theirs)})
    try:
        session.publish("0123456789abcdef", 0, "node")
        assert [info["path"] for info in starter._sessions("")] == [session.path], "with what is this user's"
        root = Path(session.path).parent
        evil = theirs / "evil"
        code = "import os, sys; os.umask(0); os.makedirs(sys.argv[1])"
        code += "; [open(f'{sys.argv[1]}/{name}', 'w') for name in ('lock', 'info.json')]"
        stranger_says(code, evil / "0badc0de")
        stranger_says(SESSIONS, root, evil)
        assert starter._sessions("") == [], "the whole of it"
        root.rename(evil)
        root.with_name(root.name + ".old").rename(root)
        assert len(starter._sessions("")) == 1
        for name in ("lock", "info.json"):
            os.chown(Path(session.path, name), UID, UID)
            assert starter._sessions("") == [], name
            os.chown(Path(session.path, name), 0, 0)
        Path(session.path).rename(theirs / "real")
        Path(session.path).symlink_to(theirs / "real")
        assert starter._sessions("") == [], "a link"
        Path(session.path).unlink()
        (theirs / "real").rename(session.path)
    finally:
        session.remove()


UV = """\
#!/bin/sh
echo "$UV_CONFIG_FILE,$UV_NO_CONFIG" >> "$(dirname "$0")/said"
"""


def test_uv_takes_no_index_of_packages_from_a_directory_of_another_user(
    shared: Path, theirs: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for `uv.toml` from the working directory upwards."""
    uv = home / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(UV)
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    for name in ("UV_CONFIG_FILE", "UV_NO_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    (theirs / "mine").mkdir()
    (shared / "own").mkdir()
    (shared / "own" / "uv.toml").touch()
    session = shared / "session"
    session.mkdir(0o700)
    mine = home / ".config" / "uv" / "uv.toml"

    def install(number: int) -> str:
        set_up_python(str(session), {"uv": {"packages": [f"package{number}"]}}, 60)
        return (uv.parent / "said").read_text().splitlines()[-1]

    monkeypatch.chdir(theirs / "mine")  # theirs/uv.toml may come at any time
    assert install(1) == ",1"
    monkeypatch.chdir(shared)
    assert install(2) == ",1"
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert install(3) == f"{mine},", "the user's, which counts in addition elsewhere"
    monkeypatch.chdir(shared / "own")
    assert install(4) == ",", "this user's is the nearest one"
    monkeypatch.chdir("/usr")
    assert install(5) == ","


def test_a_session_directory_that_was_removed_is_not_made_in_a_place_of_another_user(shared: Path) -> None:
    """A cleaner of temporary files has been there, and then somebody else."""
    session = SessionDirectory.create({"HPCRAY_TMPDIR": str(shared)})
    root = Path(session.path).parent
    shutil.rmtree(root)
    root.mkdir()
    os.chown(root, UID, UID)
    root.chmod(0o777)
    assert session.missing() == [session.path]
    with pytest.raises(SessionError, match=f"{root} belongs to uid {UID}"):
        session.restore()
    assert list(root.iterdir()) == []
    root.rmdir()
    root.symlink_to(shared / "elsewhere")
    with pytest.raises(SessionError, match="cannot use"):
        session.restore()
    root.unlink()
    session.restore()
    assert session.missing() == [f"{session.path}/r.s"], "the raylet makes that"
    session.remove()


LOCK = """\
import fcntl, os, sys
os.mkdir(sys.argv[1], 0o755)
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_node_ends_though_another_user_has_taken_the_place_of_its_session_and_locked_it(shared: Path) -> None:
    session = SessionDirectory.create({"HPCRAY_TMPDIR": str(shared)})
    root = Path(session.path).parent
    shutil.rmtree(root)
    child = as_stranger(LOCK, root)
    assert child.stdin is not None and child.stdout is not None and child.stdout.readline() == "locked\n"
    try:
        assert ends(session.remove)
    finally:
        child.communicate("\n", timeout=60)
    assert root.is_dir()


TAKE = "import os, sys; os.makedirs(sys.argv[1]); print(end='')"


def test_the_guard_of_a_started_node_ends_though_another_user_has_taken_the_place_of_its_session(
    shared: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm waits for its step at the end of a job."""
    session = SessionDirectory.create({"HPCRAY_TMPDIR": str(shared)})
    os.close(session.lock_fd)
    shutil.rmtree(Path(session.path).parent)
    stranger_says(TAKE, session.path)
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(allocation_watch, "set_process_name", lambda name: None)
    assert ends(lambda: allocation_watch.guard(session.path, "", str(os.getpid()), "1"))
    assert os.path.isdir(session.path)


def test_the_cleanup_after_a_step_removes_nothing_below_a_directory_of_another_user(
    shared: Path, theirs: Path, home: Path
) -> None:
    """Who owns it has the script look at one directory, and remove what is in another."""
    name = f"hpcray-{os.getuid()}"
    for place in (shared, theirs):
        session = place / name / "0badc0de"
        session.mkdir(parents=True, mode=0o700)
        (session / "lock").touch(0o600)
    environ = {"PATH": os.environ["PATH"], "HPCRAY_TMPDIR": str(theirs), "TMPDIR": str(shared)}
    subprocess.run([EPILOG], env=environ, check=True, timeout=60)
    assert (theirs / name / "0badc0de" / "lock").exists() and not (shared / name).exists()


def test_metrics_are_written_again_when_a_full_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = SimpleNamespace(dead=None, place=SimpleNamespace(session_dir=str(tmp_path / "gone")), node=0)
    answers = [None, errno.ENOSPC, errno.ENOSPC, None]
    written = []

    def write(path: Path, text: str) -> None:
        answer = answers.pop(0)
        process.dead = None if answers else "it has ended"
        if answer is not None:
            raise OSError(answer, os.strerror(answer))
        written.append(text)

    for name, value in {"_write": write, "_text": lambda _: "ray_x 1\n", "common_labels": lambda _: {}}.items():
        monkeypatch.setattr(node_metrics, name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    node_metrics.export_metrics(process, tmp_path, 0.001)  # type: ignore[arg-type]
    assert written == ["ray_x 1\n"] * 2 and capsys.readouterr().err.count("No space left on device") == 1
    process.dead, answers = None, [errno.ENOSPC]
    with pytest.raises(OSError, match="No space left"):
        node_metrics.export_metrics(process, tmp_path, 0.001)  # type: ignore[arg-type]
