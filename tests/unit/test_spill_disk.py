"""What a store knows of its disk, and of what was read back from it, without the store."""

from __future__ import annotations

from hpcray.core.object_store.spill_manager import WRITE_RETRY_DELAY, RestoreFigures, SpillDisk


def test_a_disk_that_failed_is_left_alone_for_a_while() -> None:
    disk = SpillDisk()
    disk.write_ended(10.0, "no space")
    assert (disk.failure, disk.may_retry_at) == ("no space", 10.0 + WRITE_RETRY_DELAY)
    assert disk.last_progress < 0, "a failure is no progress"


def test_a_write_that_ends_well_is_progress_and_ends_a_failure() -> None:
    disk = SpillDisk()
    disk.write_ended(10.0, "no space")
    disk.write_ended(16.0, None)
    assert (disk.failure, disk.last_progress) == ("", 16.0)


def test_a_disk_is_stalled_while_a_write_or_a_read_is() -> None:
    disk = SpillDisk()
    for write, read in ((True, False), (False, True), (True, True)):
        disk.set_stall(write, read, "it has not answered")
        assert disk.stalled and disk.stall_reason == "it has not answered"
    disk.set_stall(False, False, "")
    assert not disk.stalled


def test_reads_that_overlap_count_their_seconds_once() -> None:
    meter = RestoreFigures()
    meter.began(1.0)
    meter.began(2.0)
    meter.ended(3.0, 100, None)
    meter.ended(5.0, 50, None)
    meter.began(10.0)
    meter.ended(11.0, 25, None)
    assert (meter.seconds, meter.count, meter.size) == (5.0, 3, 175)


def test_a_read_that_fails_took_time_and_brought_nothing() -> None:
    meter = RestoreFigures()
    meter.began(1.0)
    meter.ended(4.0, 100, "input/output error")
    assert (meter.seconds, meter.count, meter.size) == (3.0, 0, 0)
