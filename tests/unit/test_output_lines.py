"""The output of workers: lines put together from pieces, and what is shown of lines that come several times."""

from __future__ import annotations

import random

from hpcray.core.core_worker.output_lines import LONGEST_LINE, LogBatch, LogDeduplicator, OutputLines
from hpcray.protocol.messages import WorkerOutput

W1, W2 = b"worker-1", b"worker-2"


def piece(data: bytes, worker: bytes = W1, error: bool = False, last: bool = False) -> WorkerOutput:
    return WorkerOutput(worker, 7, "1.2.3.4", error, data, last)


def shown(batches: list[LogBatch]) -> list[tuple[str, str]]:
    return [(one["actor_name"] or one["task_name"] or "", line) for one in batches for line in one["lines"]]


def test_lines_have_the_name_that_stood_before_them_wherever_the_pieces_are_cut() -> None:
    text = b":job_id:02000000\nfree\n:task_name:f\na\n\nb\n:actor_name:Me\n\xc3\xa9\n" * 3
    expected = [("", "free"), ("f", "a"), ("f", ""), ("f", "b"), ("Me", "\u00e9")]
    expected += [("Me", "free"), *expected[1:]] * 2
    for seed in range(50):
        rng, lines, got, place = random.Random(seed), OutputLines(), [], 0
        while place < len(text):
            size = rng.randint(1, 20)
            batches = lines.feed(0.0, piece(text[place : place + size]))
            assert all(one["job"] == "02000000" for one in batches)
            got += shown(batches)
            place += size
        assert got == expected


def test_outputs_of_two_workers_do_not_mix() -> None:
    lines = OutputLines()
    assert shown(lines.feed(0.0, piece(b":task_name:f\nhal"))) == []
    assert shown(lines.feed(0.0, piece(b"x\n", worker=W2))) == [("", "x")]
    assert shown(lines.feed(0.0, piece(b"y\n", error=True))) == [("f", "y")], "as a child process of the task prints it"
    assert shown(lines.feed(0.0, piece(b"f\n"))) == [("f", "half")]


def test_a_line_without_end_is_shown_after_a_while_and_when_it_is_very_long_and_at_the_end_of_its_worker() -> None:
    lines = OutputLines()
    assert lines.feed(5.0, piece(b"?")) == [] and lines.overdue(5.25) == [] and lines.next_overdue() == 5.5
    assert shown(lines.overdue(5.5)) == [("", "?")]
    assert lines.next_overdue() is None
    assert len(shown(lines.feed(6.0, piece(b"x" * LONGEST_LINE)))[0][1]) == LONGEST_LINE
    assert shown(lines.feed(6.0, piece(b"!", last=True))) == [("", "!")]
    assert shown(lines.feed(6.0, piece(b"no bytes \xff\n"))) == [("", "no bytes \ufffd")]


def test_of_a_bar_drawn_over_and_over_its_last_state_is_shown() -> None:
    assert shown(OutputLines().feed(0.0, piece(b"\r 1%\r 50%\r100%\r\n"))) == [("", "100%")]


def batch(line: str, pid: int, **more: object) -> LogBatch:
    return {"ip": "h", "pid": pid, "is_err": False, "lines": [line], **more}


def texts(batches: list[LogBatch]) -> list[str]:
    return [line for one in batches for line in one["lines"]]


def test_repeated_lines_are_counted_by_what_they_say_beside_numbers() -> None:
    one = LogDeduplicator(5.0, lambda line: "keep" in line, lambda line: "drop" in line)
    assert texts(one.deduplicate(0.0, batch("step 1 done", 1))) == ["step 1 done"]
    assert texts(one.deduplicate(0.0, batch("step 2 done", 1))) == ["step 2 done"], "of one worker all are shown"
    assert texts(one.deduplicate(1.0, batch("step 3 done", 2))) == []
    assert texts(one.deduplicate(1.0, batch("step 0x4 done", 3))) == []
    for line, seen in (("keep", True), ("keep drop", True), ("drop", False), ("17", True), ("", True)):
        assert [bool(one.deduplicate(2.0, batch(line, pid))) for pid in (1, 2)] == [seen, seen], line
    assert one.next_expiry() == 5.0 and one.expired(4.9) == []
    (counted,) = one.expired(5.0)
    assert counted["pid"] == 3 and counted["lines"][0].startswith("step 0x4 done [repeated 2x across cluster] (Ray")
    assert one.deduplicate(6.0, batch("step 5 done", 4)) == [], "it is counted on"
    assert texts(one.expired(10.0)) == ["step 5 done"], "one line is shown as it is"
    assert one.next_expiry() is None
    one.deduplicate(20.0, batch("again", 1))
    one.deduplicate(20.0, batch("again", 2))
    one.deduplicate(20.0, batch("again", 2))
    assert texts(one.flush()) == ["again [repeated 2x across cluster]"], "explained once"
    assert one.flush() == []
