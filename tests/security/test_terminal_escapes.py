"""Names and errors of a job command no terminal that looks at it. The names are the program's, and so anybody's."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck
from helpers.strangers import UID

import hpcray as ray
from hpcray.attach import near_end
from hpcray.cli import job as job_command
from hpcray.cli.__main__ import main as hpcray_command
from hpcray.common.terminal_text import plain, plain_line
from hpcray.diagnostics.wait_graph import WaitReason, show_lines
from hpcray.jobs import submitted_job

NAME = "\x1b]0;TITLE\x07\x1b[31mRED\x9b31mC1\x9d0;T\x9c\x08\x08\r\nFORGED\u2028\u202eRTL\u2066[bold red]markup[/]\u200b"
EVIL = NAME + "\ud83d"  # half of a character: no name may have it
PASSED_ON = {
    "a title": b"\x1b]0;",
    "a colour": b"\x1b[31mRED",
    "C1": b"\xc2\x9b",
    "C1, OSC": b"\xc2\x9d",
    "backspace": b"\x08\x08",
    "bell": b"\x07",
    "an override of direction": "\u202e".encode(),
    "an isolate": "\u2066".encode(),
    "a line": b"\nFORGED",
    "a separator of lines": "\u2028".encode(),
}
COMMANDS = (
    "list actors", "list actors --detail", "list tasks", "list tasks --detail", "list placement-groups", "list workers",
    "list jobs", "list nodes --detail", "list objects", "list cluster-events", "summary tasks", "summary actors",
    "summary objects", "status", "stack", "why", "why named", "memory", "metrics", "top --once", "debug --list",
    "worker-logs", "output",
)  # fmt: skip
RUN = """\
import sys
from hpcray.cli.__main__ import main
for words in sys.argv[2:]:
    print("COMMAND", words, flush=True)
    try:
        main([*words.split(), "--job", sys.argv[1]], prog_name="hpcray", standalone_mode=False)
    except (Exception, SystemExit) as error:
        print("ENDED", type(error).__name__)
print("COMMAND end", flush=True)
"""


def at_terminal(*line: str) -> bytes:
    """What a command writes to a terminal of 200 columns."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="200", LINES="50", PYTHONIOENCODING="utf-8:backslashreplace")
        os.execv(line[0], line)
    termios.tcsetwinsize(fd, (50, 200)) if hasattr(termios, "tcsetwinsize") else None
    said, end = b"", time.monotonic() + 120
    with contextlib.suppress(OSError):  # its end
        while time.monotonic() < end:
            if select.select([fd], [], [], 1.0)[0]:
                said += os.read(fd, 1 << 16)
    os.close(fd)
    os.waitpid(pid, 0)
    return said


@pytest.fixture
def job(leak_check: LeakCheck, capfd: pytest.CaptureFixture[str], home: Path) -> Iterator[str]:
    """A job in which everything has such a name."""
    ray.init(num_cpus=4, resources={f"res {NAME}": 1}, log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Actor:
        def fine(self) -> None:
            print(NAME)

        def fail(self) -> None:
            raise ValueError(NAME)

        def sleep(self) -> None:
            time.sleep(1000)

    @ray.remote(num_cpus=0)
    class Dead:
        def __init__(self) -> None:
            raise RuntimeError(NAME)

    def function(seconds: float) -> None:
        time.sleep(seconds)

    function.__name__ = function.__qualname__ = f"function {NAME}"
    actor = Actor.options(name=f"actor {NAME}").remote()
    ray.get(actor.fine.remote())
    with contextlib.suppress(ValueError):
        ray.get(actor.fail.remote())
    dead = Dead.options(name=f"dead {NAME}").remote()
    with contextlib.suppress(ray.exceptions.RayActorError):
        ray.get(dead.__ray_ready__.remote(), timeout=60)
    held = [
        ray.remote(function).remote(1000.0),
        ray.remote(lambda: time.sleep(1000)).options(name=f"named {NAME}").remote(),
        ray.remote(function).options(resources={"none": 1.0}, name=f"unmet {NAME}").remote(0.0),
        actor.sleep.remote(),
    ]
    ray.util.placement_group([{"CPU": 100}], name=f"group {NAME}")
    yield str(leak_check.sessions()[0])
    del held
    ray.shutdown()


def test_commands_pass_no_escape_of_a_name_on_to_the_terminal(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    warned = capfd.readouterr().err
    assert "\\x1b]0;TITLE" in warned and not [what for what, text in PASSED_ON.items() if text.decode() in warned]
    said = at_terminal(sys.executable, "-c", RUN, job, *COMMANDS)
    parts = said.split(b"COMMAND ")[1:]
    assert len(parts) == len(COMMANDS) + 1, said[-2000:].decode(errors="replace")
    found = {
        words: [what for what, text in PASSED_ON.items() if text in part]
        for words, part in zip(COMMANDS, parts, strict=False)
    }
    # What the program prints is its own: `worker-logs` and `output` show it as it is, but for names.
    assert {words: what for words, what in found.items() if what and words not in ("worker-logs", "output")} == {}
    for words in ("list actors", "summary tasks", "status", "why", "top --once"):
        assert b"\\x1b]0;TITLE" in parts[COMMANDS.index(words)], f"{words} shows the names, escaped"


@pytest.mark.parametrize("text", [EVIL, EVIL.encode("utf-8", "surrogatepass").decode("latin-1")])
def test_plain_text_is_what_a_terminal_shows(text: str) -> None:
    shown = plain(text)
    assert all(one.isprintable() or one == "\xa0" for one in shown) and shown.encode() and plain(shown) == shown
    assert "\n" not in shown and plain("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"
    assert plain("Zürich 日本 naïve") == "Zürich 日本 naïve" and plain(3.5) == "3.5"
    assert plain_line("one\ntwo") == plain_line(plain_line("one\ntwo")) == "one\n        two"


def test_what_a_program_is_told_of_its_waits_and_its_line_has_no_escape(capsys: pytest.CaptureFixture[str]) -> None:
    """Names that reach standard error by other ways than a command's: warnings of waits, ends of jobs that hang."""
    near_end._say(f"node of {EVIL} has ended")
    print("\n".join(show_lines([WaitReason(1, f"task {EVIL} waits")])))
    with click.Context(click.Command("job")):
        job_command._say(f"Status message: {EVIL}")
    said = "".join(capsys.readouterr())
    # Lines of a message stay lines.
    assert [what for what, text in PASSED_ON.items() if text.decode() in said and what != "a line"] == []
    assert said.count("\\x1b]0;TITLE") == 3 and said.count("\nFORGED") == 1, "of a command that prints several lines"


@pytest.mark.parametrize(
    "words",
    ["jobs", "submit --dry-run program.py", "cancel 1", "durable ls --dir {}", "list actors --job {}", "join {}/token"],
)
def test_messages_about_a_directory_of_another_user_do_not_repeat_its_name_raw(
    words: str, shared: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who owns the directory has chosen its name."""
    theirs = shared / NAME.replace("/", "")
    theirs.mkdir()
    os.chown(theirs, UID, UID)
    monkeypatch.chdir(theirs)
    monkeypatch.setattr(submitted_job, "_told", set())
    (shared / "program.py").touch()
    with contextlib.suppress(SystemExit):
        hpcray_command([word.format(theirs) for word in words.split()], prog_name="hpcray")
    said = "".join(capfd.readouterr())
    assert "\\x1b]0;TITLE" in said, said
    # Lines of a message stay lines, and are indented.
    assert [what for what, text in PASSED_ON.items() if text.decode() in said] == []


@pytest.mark.parametrize("variable", ["HPCRAY_CHECKPOINT_DIR", "HPCRAY_TOPOLOGY"])
def test_what_a_job_says_of_a_directory_of_another_user_has_no_escape(
    variable: str, shared: Path, home: Path, leak_check: LeakCheck
) -> None:
    theirs = shared / NAME.replace("/", "")
    theirs.mkdir()
    os.chown(theirs, UID, UID)
    line = [sys.executable, "-m", "hpcray", "-c", "import hpcray; hpcray.init()"]
    with Job(line, {variable: str(theirs / "name")}) as job:
        said = job.wait().err
    assert "\\x1b]0;TITLE" in said, said
    assert [what for what, text in PASSED_ON.items() if text.decode() in said] == []
