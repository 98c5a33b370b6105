"""`list_logs` and `get_log`: the log files of the nodes."""

from __future__ import annotations

import itertools
import os
import sys
import time

import pytest
from click.testing import CliRunner

import hpcray as ray
from hpcray.cli.__main__ import main
from hpcray.util.state import RayStateApiException, get_log, list_logs

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 1}


@ray.remote
class Speaker:
    def speak(self, text: str) -> int:
        print(text)
        return os.getpid()


@ray.remote(retry_exceptions=True, max_retries=2)
def speak(name: str) -> int:
    print(f"{name} é of {os.getpid()}")
    print(f"{name} went wrong", file=sys.stderr)
    if name == "again":
        raise ValueError(name)
    return os.getpid()


def node() -> str:
    return ray.get_runtime_context().get_node_id()


def text(**of: object) -> str:
    return "".join(get_log(**of))  # type: ignore[arg-type]


def test_a_task_has_what_it_wrote_and_no_more() -> None:
    refs = [speak.remote(name) for name in ("one", "two")]
    pid = ray.get(refs)[0]
    for name, ref in zip(("one", "two"), refs, strict=True):
        task = ref.task_id().hex()
        assert text(task_id=task) == f"{name} é of {pid}\n"
        assert text(task_id=task, suffix="err") == f"{name} went wrong\n"
    again = speak.remote("again")
    with pytest.raises(ValueError):
        ray.get(again)
    for attempt in range(3):
        assert text(task_id=again.task_id().hex(), attempt_number=attempt, suffix="err") == "again went wrong\n"
    with pytest.raises(RayStateApiException, match="Could not find log file for task attempt"):
        text(task_id=again.task_id().hex(), attempt_number=3)
    with pytest.raises(RayStateApiException, match="Could not find log file for task: 00"):
        text(task_id="00")


def test_an_actor_has_its_file_after_its_death_too(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Speaker.remote()
    ident = actor._actor_id.hex()
    call = actor.speak.remote("\x1b[31mred\x1b[0m")
    ray.get(call)
    # The process may have run tasks before: its file is older than the actor.
    assert text(actor_id=ident).endswith(":actor_name:Speaker\n\x1b[31mred\x1b[0m\n")
    assert text(actor_id=ident, tail=1, filter_ansi_code=True) == "red\n"
    with pytest.raises(RayStateApiException, match="For actor task, please query actor log for actor"):
        text(task_id=call.task_id().hex())
    monkeypatch.setenv("RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING", "1")
    assert text(task_id=call.task_id().hex()) == "\x1b[31mred\x1b[0m\n"
    ray.kill(actor)
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"pid: \d+\n.*\n?\tip: "):
        ray.get(actor.speak.remote(""))
    assert text(actor_id=ident).endswith("red\x1b[0m\n")


def test_files_are_listed_read_from_their_end_and_followed() -> None:
    actor = Speaker.remote()
    pid = ray.get(actor.speak.remote("x" * 300_000 + "\nlast but one\nlast"))
    names = list_logs(node_id=node(), glob_filter=f"*-{pid}.*")
    assert [name.split("-")[-1] for group in ("worker_out", "worker_err") for name in names[group]] == [
        f"{pid}.out", f"{pid}.err",
    ]  # fmt: skip
    (name,) = names["worker_out"]
    whole = text(filename=name, node_id=node())
    assert len(whole) > 300_000 and whole == text(pid=pid, node_ip=ray.util.get_node_ip_address())
    assert text(filename=name, node_id=node(), tail=2) == "last but one\nlast\n"
    assert text(filename=name, node_id=node(), tail=10_000) == whole
    assert b"".join(get_log(filename=name, node_id=node(), encoding=None)) == whole.encode()
    following = get_log(filename=name, node_id=node(), follow=True, tail=1, _interval=0.05)
    assert next(following) == "last\n"
    ray.get(actor.speak.remote("more"))
    assert "".join(itertools.islice(following, 1)) == "more\n"


def test_the_command_line_lists_and_prints_them() -> None:
    actor = Speaker.remote()
    pid = ray.get(actor.speak.remote("first\nsecond"))
    time.sleep(0.5)  # the driver has printed this
    listed = CliRunner().invoke(main, ["worker-logs", f"*{pid}*"])
    names = [line for line in listed.output.splitlines() if line.startswith("worker-")]  # beside what the driver prints
    assert sorted(name.split("-")[-1] for name in names) == [f"{pid}.err", f"{pid}.out"], listed.output
    last = CliRunner().invoke(main, ["worker-logs", "--pid", str(pid), "--tail", "1"]).output
    assert "second\n" in last and "first" not in last
    assert "first\nsecond\n" in CliRunner().invoke(main, ["worker-logs", "--actor-id", actor._actor_id.hex()]).output
    wrong = CliRunner().invoke(main, ["worker-logs", "none.out"])
    assert wrong.exit_code == 1 and "A file is not found at" in wrong.output


@pytest.mark.parametrize(
    ("of", "match"),
    [
        ({"filename": "none.out"}, "A file is not found at"),
        ({"filename": "../lock"}, "lock not in"),
        ({"pid": 1}, "Could not find a log file"),
        ({"actor_id": "00"}, "not found"),
    ],
)
def test_what_is_not_there_is_an_error(of: dict[str, object], match: str) -> None:
    with pytest.raises(RayStateApiException, match=match):
        text(node_id=node(), **of)


def test_what_names_no_log_is_refused() -> None:
    with pytest.raises(RayStateApiException, match="doesn't exist"):
        list_logs(node_id="00")
    with pytest.raises(RayStateApiException, match="Invalid glob filter"):
        list_logs(node_id=node(), glob_filter="../*")
    with pytest.raises(ValueError, match="At least one of them is required"):
        text(node_id=node())
    with pytest.raises(ValueError, match="Invalid suffix"):
        text(node_id=node(), pid=1, suffix="log")
