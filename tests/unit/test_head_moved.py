"""What a raylet and a process tell a new head, and what they ask it again."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from raylet_kit import CPU1, CPU2, FAR, UNIT, Node, spec

from hpcray.common.exceptions import LocalRayletDiedError
from hpcray.common.ids import HEAD, make_proc
from hpcray.platform.console import (
    EXIT_FILE_VARIABLE,
    ExitFile,
    ExitReport,
    take_exit_file_path,
    write_exit_report,
)
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.gcs_client import GcsClient

OLD = NEW = make_proc(1, 0)
GROUP = FAR + (9).to_bytes(5, "big")


def move(node: Node) -> list[m.Message]:
    """What the new head is told, in order."""
    node.sent.clear()
    node.do(node.core.head_moved(node.now))
    return [sent.msg for sent in node.sent if sent.dest == HEAD]


def test_a_new_head_is_told_what_has_begun_then_what_is_free_then_what_lacks() -> None:
    node = Node(cpus=4)
    driver = node.driver()
    node.handle(OLD, m.StartActor(spec(1), 2))
    node.handle(OLD, m.PrepareBundles(GROUP, 1, {0: {"CPU": UNIT}}, True))
    node.handle(OLD, m.PrepareBundles(FAR + (8).to_bytes(5, "big"), 1, {3: {"CPU": UNIT}}, False))
    node.handle(driver, m.RequestLeases(0, m.Shape((("CPU", 9 * UNIT),)), 3))
    held, view, unmet = move(node)
    assert isinstance(held, m.NodeInventory) and held.node == 0
    ((actor, worker, restarts),) = held.actors
    assert actor == spec(1).actor and worker and restarts == 2
    assert held.bundles == [(GROUP, 0, True), (FAR + (8).to_bytes(5, "big"), 3, False)]
    assert isinstance(view, m.NodeView) and view.available["CPU"] == UNIT
    assert view.lasting["CPU"] == 3 * UNIT and any(GROUP.hex() in name for name in view.bundles)
    assert isinstance(unmet, m.UnmetLeaseRequest) and (unmet.holder, unmet.count) == (driver, 3)
    assert move(node)[2] == unmet, "and the next one too"


def test_what_only_the_old_head_wanted_is_forgotten() -> None:
    node = Node(cpus=2)
    here = m.Shape(CPU2.resources, "node:0")
    node.handle(OLD, m.StartActor(spec(1, hold=CPU2, place=here), 0))
    node.handle(OLD, m.StartActor(spec(2, hold=CPU2, place=here), 0))
    node.handle(OLD, m.GrantLeases(FAR, 0, here, 2))
    node.handle(OLD, m.PrepareBundles(GROUP, 1, {0: {"CPU": 2 * UNIT}}, True, 9.0))
    held, *rest = move(node)
    assert isinstance(held, m.NodeInventory)
    assert [actor for actor, _, _ in held.actors] == [spec(1).actor] and held.bundles == []
    assert [type(msg) for msg in rest] == [m.NodeView], "nothing is refused that the new head never asked for"
    node.sent.clear()
    node.handle(NEW, m.KillActor(spec(1).actor, True, "room"))
    node.do(node.core.process_died(1.0, held.actors[0][1], "killed"))
    node.tick(60.0)
    assert node.take(m.BecomeActor) == [] and node.take(m.LeaseGranted) == [] and node.take(m.BundlesPrepared) == []
    node.handle(NEW, m.StartActor(spec(2, hold=CPU1, place=CPU1), 0))
    assert [become.spec.actor for become in node.take(m.BecomeActor)] == [spec(2).actor], "it may be sent here again"


# ------------------------------------------------------------ questions of processes


class Asking:
    """A process whose waits are steps of a test."""

    def __init__(self) -> None:
        self.engine: Any = self
        self.lock = threading.RLock()
        self.sent: list[tuple[bytes, m.Message]] = []
        self.dead: str | None = None
        self.steps: list[Any] = []
        self.client = GcsClient(self)  # type: ignore[arg-type]

    def send(self, proc: bytes, msg: m.Message) -> None:
        self.sent.append((proc, msg))

    def check_alive(self) -> None: ...

    def notify(self, waiter: Any) -> None: ...

    def block(self, waiter: Any, deadline: float | None) -> bool:
        for step in self.steps:
            step()
        return True


def test_a_question_is_asked_again_with_its_number_and_answered_once() -> None:
    asking = Asking()
    reply = m.GcsReply(1, True, msgspec.msgpack.encode(["names"]))
    asking.steps = [asking.client.head_moved, lambda: asking.client.on_reply(reply)]
    asking.steps.append(lambda: asking.client.on_reply(m.GcsReply(1, False, b"said twice")))
    assert asking.client.call("kv_keys", "a") == ["names"]
    assert [dest for dest, _ in asking.sent] == [HEAD, HEAD] and asking.sent[0] == asking.sent[1]
    asking.client.head_moved()
    assert len(asking.sent) == 2, "what is answered is asked no more"


def test_questions_of_several_threads_keep_their_order() -> None:
    asking = Asking()
    answers = [lambda: asking.client.on_reply(m.GcsReply(2, True, b"\x02"))]

    def inner() -> None:
        asking.steps = [asking.client.head_moved, *answers]
        assert asking.client.call("second") == 2
        asking.client.on_reply(m.GcsReply(1, True, b"\x01"))

    asking.steps = [inner]
    assert asking.client.call("first") == 1
    assert [msg.req for _, msg in asking.sent if isinstance(msg, m.GcsCall)] == [1, 2, 1, 2]


def test_without_a_raylet_there_is_no_answer() -> None:
    asking = Asking()
    asking.dead, asking.steps = "it is gone", [asking.client.fail]
    with pytest.raises(LocalRayletDiedError):
        asking.client.call("nodes")
    asking.client.head_moved()
    assert len(asking.sent) == 1


# ------------------------------------------------------------ the exit code of a job whose rank 0 is dead


def test_an_exit_code_is_told_in_a_file_that_nobody_else_can_make(tmp_path: Any) -> None:
    launcher = ExitFile(str(tmp_path))
    environ = {EXIT_FILE_VARIABLE: launcher.path}
    assert launcher.report() is None and launcher.take() is None
    write_exit_report(take_exit_file_path(environ), ExitReport(2, 0, 3))
    assert environ == {} and launcher.report() == ExitReport(2, 0, 3)
    assert launcher.take() == 3 and list(tmp_path.iterdir()) == []
    (tmp_path / "other").write_text('{"node":0,"epoch":9,"code":9}')
    (tmp_path / launcher.path.rpartition("/")[2]).symlink_to(tmp_path / "other")
    assert launcher.take() is None and "9" in (tmp_path / "other").read_text()
    write_exit_report(str(tmp_path / "no" / "such"), ExitReport(2, 0, 5))


def test_a_head_that_was_cut_off_does_not_say_how_the_program_has_ended(tmp_path: Any) -> None:
    """The old head takes the program's node for dead, and its directory stays within reach."""
    launcher = ExitFile(str(tmp_path))
    write_exit_report(launcher.path, ExitReport(0, 0, 137, 16.0), believed=True)
    assert launcher.report() == ExitReport(0, 0, 137, 16.0), "until somebody knows better"
    write_exit_report(launcher.path, ExitReport(2, 1, None))
    assert launcher.report() == ExitReport(2, 1, None), "the program runs on, and its node is the head"
    write_exit_report(launcher.path, ExitReport(0, 0, 137, 16.0), believed=True)
    assert launcher.report() == ExitReport(2, 1, None)
    write_exit_report(launcher.path, ExitReport(2, 1, 5))
    assert launcher.take() == 5 and list(tmp_path.iterdir()) == []


def test_in_one_epoch_the_programs_node_knows_best(tmp_path: Any) -> None:
    launcher = ExitFile(str(tmp_path))
    write_exit_report(launcher.path, ExitReport(0, 0, 137, 16.0), believed=True)
    write_exit_report(launcher.path, ExitReport(2, 0, 1))
    assert launcher.take() == 1


def test_a_program_that_never_ended_has_no_code(tmp_path: Any) -> None:
    launcher = ExitFile(str(tmp_path))
    write_exit_report(launcher.path, ExitReport(2, 1, None))
    assert launcher.take() is None and list(tmp_path.iterdir()) == []
