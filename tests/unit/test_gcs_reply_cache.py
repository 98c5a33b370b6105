"""A question that changes something and is asked twice, because the head has moved, is done once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from invariants_kit import GCS_EVENTS, check_after

from hpcray.common.config import Config
from hpcray.common.ids import make_proc
from hpcray.core.effects import Send
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.state_log import TableSnapshot
from hpcray.protocol import messages as m

ME, OTHER = make_proc(1, 5), make_proc(2, 6)


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, Gcs, GCS_EVENTS)


def head() -> Gcs:
    core = Gcs(Config())
    infos = [m.NodeInfo(n, f"id{n}", f"host{n}", f"10.0.0.{n}", 1, {"CPU": 10_000}, b"", "mpi", 0) for n in range(3)]
    core.cluster_up(0.0, "s", infos)
    return core


def ask(core: Gcs, src: bytes, number: int, method: str, *args: Any) -> Any:
    (answer,) = core.handle(0.0, src, m.GcsCall(number, method, msgspec.msgpack.encode(args)))
    assert isinstance(answer, Send) and answer.dest == src and isinstance(answer.msg, m.GcsReply)
    assert answer.msg.req == number and answer.msg.ok
    return msgspec.msgpack.decode(answer.msg.value)


def test_a_call_sent_twice_gets_the_same_reply_and_has_one_effect() -> None:
    core = head()
    assert ask(core, ME, 1, "kv_put", b"k", b"mine", True, "")
    assert not ask(core, OTHER, 1, "kv_put", b"k", b"theirs", True, "")
    assert ask(core, ME, 1, "kv_put", b"k", b"mine", True, "")
    assert ask(core, ME, 2, "kv_get", b"k", "") == b"theirs"
    assert ask(core, ME, 3, "kv_del", b"k", "") and ask(core, ME, 3, "kv_del", b"k", "")
    assert ask(core, ME, 2, "kv_get", b"k", "") is None, "what only reads is read each time"


def test_a_restored_reply_cache_has_the_replies_of_living_processes() -> None:
    old = head()
    snapshot = TableSnapshot()
    assert ask(old, ME, 1, "kv_put", b"a", b"1", False, "")
    snapshot.apply(old.log.snapshot_rows(), whole=True)
    assert ask(old, ME, 2, "kv_put", b"b", b"2", False, "")
    assert ask(old, OTHER, 1, "kv_put", b"c", b"3", False, "")
    old.process_died(0.0, OTHER, "killed")
    snapshot.apply(old.log.changed_rows())
    new = Gcs(Config())
    new.restore(0.0, snapshot)
    assert ask(new, ME, 1, "kv_put", b"a", b"1", False, "") and ask(new, ME, 2, "kv_put", b"b", b"2", False, "")
    assert not ask(new, ME, 3, "kv_put", b"b", b"2", False, "")
    assert not ask(new, OTHER, 1, "kv_put", b"c", b"3", False, ""), "it is dead, and its number another's"


def test_a_reply_cache_keeps_the_last_replies_of_a_process() -> None:
    core, snapshot = head(), TableSnapshot()
    core.log.snapshot_rows()
    for number in range(300):
        assert ask(core, ME, number, "kv_put", b"%d" % number, b"", False, "")
        snapshot.apply(core.log.changed_rows())
    assert ask(core, ME, 299, "kv_put", b"299", b"", False, "")
    assert not ask(core, ME, 0, "kv_put", b"0", b"", False, "")
    kept = sum(1 for table, _ in snapshot.rows if table == 12)
    assert 64 <= kept <= 130, kept
