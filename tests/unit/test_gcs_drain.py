"""The announced end of a job: who is waited for, deadlines, exit codes; settings of a run; checkpoint directories."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from invariants_kit import check_after
from raylet_kit import CPU1, FAR, Node, spec

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, make_proc
from hpcray.common.resources import to_units
from hpcray.core.effects import Send
from hpcray.core.gcs.drain import (
    NOTICE,
    OVER,
    RUNNING,
    SAVED,
    SAVING,
    AllSaved,
    Announce,
    DrainCore,
    EndJob,
    StartSaving,
)
from hpcray.core.gcs.gcs import Gcs
from hpcray.platform import checkpoints
from hpcray.protocol import messages as m
from hpcray.protocol.messages import SaveActor
from hpcray.runtime.node.slurm_job import checkpoint_directory, drain_signals, drain_start, read_run, wants_requeue
from hpcray.transport.startup import Launch

A, B = b"\0\0\0\0\0\0\0\1", b"\0\1\0\0\0\0\0\2"
CODE = 75


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, DrainCore, ("begin", "driver_ready", "save", "saved", "driver_ended", "tick"))


def begun(seconds: float = 20.0) -> DrainCore:
    core = DrainCore(CODE)
    assert core.begin(100.0, "SIGUSR1", seconds) == [Announce("SIGUSR1", seconds)]
    return core


def saving(actors: dict[bytes, str]) -> DrainCore:
    core = begun()
    assert core.driver_ready(101.0) == [StartSaving()]
    core.save(101.0, actors)
    return core


def test_a_drain_goes_from_notice_over_saving_and_saved_to_its_end() -> None:
    core = begun()
    assert (core.state, core.deadline) == (NOTICE, 120.0)
    assert core.driver_ready(101.0) == [StartSaving()]
    assert core.save(101.0, {A: "actor A", B: "actor B"}) == [Send(A, SaveActor()), Send(B, SaveActor())]
    assert core.state == SAVING
    assert core.saved(102.0, A, "/c/a", "") == []
    assert core.saved(103.0, B, "", "") == [AllSaved(("/c/a",), ())]
    assert core.state == SAVED
    assert core.tick(104.0, [A, B]) == []
    assert core.driver_ended(105.0, CODE) == [EndJob(CODE, True, False)]
    assert core.state == OVER


def test_a_driver_that_is_done_needs_no_other_run() -> None:
    core = saving({})
    assert core.driver_ended(105.0, 0) == [EndJob(0, False, False)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, CODE), (signal.SIGTERM, 143)])
def test_a_driver_that_the_signal_itself_has_ended_has_work_left(number: int, code: int) -> None:
    """It was still starting, and had no handler yet."""
    core = DrainCore(CODE, (signal.SIGUSR1, signal.SIGTERM))
    core.begin(100.0, "a signal", 20.0)
    assert core.driver_ended(101.0, 128 + number) == [StartSaving()]
    assert core.save(101.0, {}) == [AllSaved((), ()), EndJob(code, True, False)]
    other = begun()
    other.driver_ready(101.0)
    other.save(101.0, {})
    assert other.driver_ended(102.0, 128 + number) == [EndJob(128 + number, False, False)], "it announces nothing here"


def test_a_driver_that_ends_early_waits_for_the_checkpoints() -> None:
    core = begun()
    assert core.driver_ended(101.0, CODE) == [StartSaving()]
    core.save(101.0, {A: "actor A"})
    assert core.saved(102.0, A, "/c/a", "") == [AllSaved(("/c/a",), ()), EndJob(CODE, True, False)]


def test_slow_callbacks_leave_half_of_the_time_to_the_actors() -> None:
    core = begun(20.0)
    assert core.tick(109.9, []) == []
    assert core.tick(110.0, []) == [StartSaving()]
    assert core.driver_ready(111.0) == [], "it is too late to be waited for"


def test_an_actor_that_dies_or_fails_holds_up_nobody() -> None:
    core = saving({A: "actor A", B: "actor B"})
    assert core.saved(102.0, A, "", "OSError: disk full") == []
    (event,) = core.tick(103.0, [A])
    assert isinstance(event, AllSaved)
    assert event.failed == ("OSError: disk full", "actor B: it died before its checkpoint was written")


def test_an_actor_that_leaves_by_itself_is_not_asked_again() -> None:
    core = begun()
    assert core.saved(101.0, A, "/c/a", "") == []
    core.driver_ready(102.0)
    assert core.save(102.0, {A: "actor A"}) == [AllSaved(("/c/a",), ())]


def test_a_drain_ends_at_its_deadline_whatever_it_waits_for() -> None:
    core = saving({A: "actor A"})
    saved, end = core.tick(120.0, [A])
    assert saved == AllSaved((), ("actor A: it was busy until the time was up",))
    assert end == EndJob(CODE, True, True)
    assert core.tick(121.0, [A]) == []
    assert core.driver_ended(121.0, 1) == []


def test_a_later_drain_request_can_only_shorten_the_time() -> None:
    core = begun(60.0)
    assert core.begin(110.0, "SIGTERM", 60.0) == []
    assert core.begin(111.0, "SIGTERM", 20.0) == [Announce("SIGUSR1", 20.0)]
    assert core.deadline == 131.0
    assert core.begin(111.1, "SIGTERM on node 2", 20.0) == []


def test_a_sigterm_ends_a_program_at_once_that_knows_of_no_drain() -> None:
    core = DrainCore(CODE)
    core.begin(100.0, "SIGTERM", 20.0, brisk=True)
    core.driver_ready(100.1, interested=False)
    assert core.save(100.1, {}) == [AllSaved((), ()), EndJob(143, True, False)]


@pytest.mark.parametrize(("interested", "actors"), [(True, {}), (False, {A: "actor A"})])
def test_a_sigterm_leaves_time_to_programs_that_take_part_in_the_drain(
    interested: bool, actors: dict[bytes, str]
) -> None:
    core = DrainCore(CODE)
    core.begin(100.0, "SIGTERM", 20.0, brisk=True)
    core.driver_ready(100.1, interested)
    core.save(100.1, actors)
    core.saved(100.2, A, "/c/a", "")
    assert core.state == SAVED
    assert core.tick(119.9, [A]) == []
    assert core.tick(120.0, [A]) == [EndJob(CODE, True, True)]


def test_a_driver_may_end_freely_before_a_drain_begins() -> None:
    core = DrainCore(CODE)
    assert core.state == RUNNING
    assert core.driver_ready(1.0) == core.tick(1.0, []) == core.saved(1.0, A, "", "") == []


# ---------------------------------------------------------------- nothing new is started


def test_a_raylet_that_drains_grants_nothing_and_starts_no_actor() -> None:
    node = Node(cpus=2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    (lease,) = node.take(m.LeaseGranted, driver)
    node.do(node.core.drain(0.0))
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    node.handle(driver, m.ReturnLease(lease.lease))
    assert not node.take(m.LeaseGranted)
    node.handle(HEAD, m.GrantLeases(FAR, 3, CPU1, 2))
    assert [refused.count for refused in node.take(m.GrantLeasesRefused)] == [2]
    node.handle(HEAD, m.StartActor(spec(), 0))
    assert len(node.take(m.StartActorRefused)) == 1
    for second in range(10):
        node.tick(float(second))
    assert not node.take(m.LeaseGranted)


def test_actors_refused_by_the_admission_are_dead_with_its_error() -> None:
    head = Gcs(Config())
    total = to_units({"CPU": 1})
    head.cluster_up(0.0, "s", [m.NodeInfo(0, "id", "host", "10.0.0.1", 1, total, b"", "mpi", 0)])
    owner = make_proc(0, 5)
    waiting = spec(1, place=m.Shape((("CPU", 20_000),)))
    assert head.actors.register_actor(0.0, owner, m.CreateActor(1, waiting))
    assert len(head.actors.waiting_actors()) == 1
    head.actors.admissions.append(lambda now, spec: ("too late", b"error"))
    states = [effect.msg for effect in head.actors.recheck_waiting(1.0) if isinstance(effect.msg, m.ActorStateUpdate)]
    states += [
        e.msg
        for e in head.actors.register_actor(2.0, owner, m.CreateActor(2, spec(2)))
        if isinstance(e.msg, m.ActorStateUpdate)
    ]
    assert [(state.state, state.reason, state.error) for state in states] == [("DEAD", "too late", b"error")] * 2
    assert not head.actors.waiting_actors()
    assert not head.actors.living_workers()


# ---------------------------------------------------------------- what holds for a run


def test_signals_announce_the_end_only_where_slurm_does() -> None:
    slurm = {"SLURM_JOB_ID": "7"}
    both = (signal.SIGUSR1, signal.SIGTERM)
    assert drain_signals(Config(), Launch(), {}) == ()
    assert drain_signals(Config(), Launch("srun", 0, 4), slurm) == both
    assert drain_signals(Config(), Launch(), slurm) == both
    assert drain_signals(Config(), Launch("mpirun", 0, 4), slurm) == (signal.SIGUSR1,), "mpirun kills a second later"
    assert drain_signals(Config(drain_signals="none"), Launch("srun"), slurm) == ()
    assert drain_signals(Config(drain_signals="term, SIGUSR1"), Launch(), {}) == (signal.SIGTERM, signal.SIGUSR1)
    with pytest.raises(ValueError, match="drain_signals='HUP'.*hint"):
        drain_signals(Config(drain_signals="HUP"), Launch(), {})


def test_when_a_job_begins_to_drain() -> None:
    assert drain_start(10_000.0, 0.0, 60.0) == 9_940.0
    assert drain_start(60.0, 0.0, 60.0) == 45.0, "a job of a minute works for three quarters of it"
    assert drain_start(60.0, 100.0, 60.0) == 60.0
    assert drain_start(0.0, 100.0, 60.0) == drain_start(60.0, 0.0, 0.0) == 0.0


def test_checkpoints_are_the_jobs_in_all_its_runs() -> None:
    environ = {"SLURM_JOB_ID": "12", "SLURM_SUBMIT_DIR": "/home/me/run", "SLURM_RESTART_COUNT": "2"}
    assert checkpoint_directory(Config(), environ) == "/home/me/run/hpcray-checkpoints/12"
    assert checkpoint_directory(Config(checkpoint_dir="/big"), environ) == "/big"
    assert checkpoint_directory(Config(), {}) == ""
    run = read_run(Config(end_time=5e9, drain_margin=100.0), Launch("srun", 0, 2), environ)
    assert (run.end, run.drain_at, run.restarts) == (5e9, 5e9 - 100.0, 2)


@pytest.mark.parametrize("wrong", [{"requeue": "always"}, {"drain_exit_code": 256}])
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        read_run(Config(**wrong), Launch(), {})


@pytest.mark.parametrize(
    ("shown", "auto", "always"),
    [
        ("JobId=7 JobState=RUNNING Requeue=1 PreemptEligibleTime=2026-11-21T20:00:00 PreemptTime=None", False, True),
        ("JobId=7 JobState=RUNNING Requeue=1 PreemptTime=2026-11-21T20:01:00", True, True),
        ("JobId=7 JobState=RUNNING Requeue=0 PreemptTime=2026-11-21T20:01:00", False, True),
        ("JobId=7 JobState=SIGNALING Requeue=1 PreemptTime=None", False, True),
        ("JobId=7 JobState=CANCELLED Requeue=1 PreemptTime=None", False, False),
        ("JobId=7 JobState=TIMEOUT Requeue=1 PreemptTime=None", False, False),
        ("", False, False),
    ],
)
def test_which_jobs_are_put_back_into_the_queue(shown: str, auto: bool, always: bool) -> None:
    assert wants_requeue("auto", shown) is auto
    assert wants_requeue("scontrol", shown) is always


# ---------------------------------------------------------------- checkpoint directories


def write(root: Path, name: str, text: str) -> None:
    with checkpoints.writing(str(root), name) as directory:
        Path(directory, "state").write_text(text)


def test_the_latest_complete_checkpoint_counts_and_two_are_kept(tmp_path: Path) -> None:
    assert checkpoints.latest(str(tmp_path), "model") is None
    for text in "abc":
        write(tmp_path, "model", text)
    found = checkpoints.latest(str(tmp_path), "model")
    assert found is not None
    assert Path(found, "state").read_text() == "c"
    assert sorted(os.listdir(tmp_path / "model")) == ["000002", "000003"]


def test_a_writer_that_fails_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "model", "a")
    with pytest.raises(RuntimeError), checkpoints.writing(str(tmp_path), "model") as directory:
        Path(directory, "state").write_text("half")
        raise RuntimeError
    assert os.listdir(tmp_path / "model") == ["000001"]


def test_what_a_dead_writer_left_is_no_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / "model" / ".new-000001-host-1"
    left.mkdir(parents=True)
    assert checkpoints.latest(str(tmp_path), "model") is None
    write(tmp_path, "model", "a")
    write(tmp_path, "model", "b")
    assert sorted(os.listdir(tmp_path / "model")) == ["000001", "000002"]


def test_two_writers_of_one_name_both_get_a_number(tmp_path: Path) -> None:
    with checkpoints.writing(str(tmp_path), "model"):
        (tmp_path / "model" / "000001").mkdir()
        (tmp_path / "model" / "000001" / "state").touch()
    assert sorted(os.listdir(tmp_path / "model")) == ["000001", "000002"]


def test_names_are_directories_of_one_level() -> None:
    names = ["a", "a/b", "..", ".hidden", "a%2Fb", "ä", "a b"]
    made = [checkpoints.directory_name(name) for name in names]
    assert len(set(made)) == len(names)
    assert not [name for name in made if "/" in name or name.startswith(".")]
    assert checkpoints.directory_name("a", "x") != checkpoints.directory_name("x:a")
