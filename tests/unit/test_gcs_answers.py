"""A question that changes something and is asked twice, because the head has moved, is done once."""

from __future__ import annotations

from typing import Any

import msgspec

from hpcray.base.config import Config
from hpcray.base.ids import make_proc
from hpcray.core.effects import Send
from hpcray.core.gcs.head import HeadCore
from hpcray.core.gcs.journal import Replica
from hpcray.wire import messages as m

ME, OTHER = make_proc(1, 5), make_proc(2, 6)


def head() -> HeadCore:
    core = HeadCore(Config())
    infos = [m.NodeInfo(n, f"id{n}", f"host{n}", f"10.0.0.{n}", 1, {"CPU": 10_000}, b"", "mpi", 0) for n in range(3)]
    core.cluster_up(0.0, "s", infos)
    return core


def ask(core: HeadCore, src: bytes, number: int, method: str, *args: Any) -> Any:
    (answer,) = core.handle(0.0, src, m.GcsCall(number, method, msgspec.msgpack.encode(args)))
    assert isinstance(answer, Send) and answer.dest == src and isinstance(answer.msg, m.GcsReply)
    assert answer.msg.req == number and answer.msg.ok
    return msgspec.msgpack.decode(answer.msg.value)


def test_the_same_question_has_the_same_answer_and_no_second_effect() -> None:
    core = head()
    assert ask(core, ME, 1, "kv_put", b"k", b"mine", True, "")
    assert not ask(core, OTHER, 1, "kv_put", b"k", b"theirs", True, "")
    assert ask(core, ME, 1, "kv_put", b"k", b"mine", True, "")
    assert ask(core, ME, 2, "kv_get", b"k", "") == b"theirs"
    assert ask(core, ME, 3, "kv_del", b"k", "") and ask(core, ME, 3, "kv_del", b"k", "")
    assert ask(core, ME, 2, "kv_get", b"k", "") is None, "what only reads is read each time"


def test_a_successor_knows_the_answers_and_forgets_who_is_dead() -> None:
    old = head()
    replica = Replica()
    assert ask(old, ME, 1, "kv_put", b"a", b"1", False, "")
    replica.take(old.journal.begin(), whole=True)
    assert ask(old, ME, 2, "kv_put", b"b", b"2", False, "")
    assert ask(old, OTHER, 1, "kv_put", b"c", b"3", False, "")
    old.process_died(0.0, OTHER, "killed")
    replica.take(old.journal.changes())
    new = HeadCore(Config())
    new.restore(0.0, replica)
    assert ask(new, ME, 1, "kv_put", b"a", b"1", False, "") and ask(new, ME, 2, "kv_put", b"b", b"2", False, "")
    assert not ask(new, ME, 3, "kv_put", b"b", b"2", False, "")
    assert not ask(new, OTHER, 1, "kv_put", b"c", b"3", False, ""), "it is dead, and its number another's"


def test_not_all_answers_are_kept_for_ever() -> None:
    core, replica = head(), Replica()
    core.journal.begin()
    for number in range(300):
        assert ask(core, ME, number, "kv_put", b"%d" % number, b"", False, "")
        replica.take(core.journal.changes())
    assert ask(core, ME, 299, "kv_put", b"299", b"", False, "")
    assert not ask(core, ME, 0, "kv_put", b"0", b"", False, "")
    kept = sum(1 for table, _ in replica.rows if table == 12)
    assert 64 <= kept <= 130, kept
