"""When garbage is collected: not too often, and no request is forgotten."""

from __future__ import annotations

from hpcray.core.gcs.garbage_collection import PATIENCE, GlobalGarbageCollection, Throttler


def test_a_request_that_comes_too_early_is_kept_until_it_may_be_done():
    throttler = Throttler(10.0)
    assert not throttler.due(0.0)
    throttler.request()
    assert throttler.due(0.0)
    throttler.request()
    assert [now for now in (1.0, 9.9, 10.0, 10.1, 30.0) if throttler.due(now)] == [10.0]


def test_without_requests_it_is_due_once_an_interval():
    throttler = Throttler(1.0, interval=5.0, now=100.0)
    assert [now for now in range(100, 118) if throttler.due(now)] == [105, 110, 115]


def test_the_longer_requests_wait_for_resources_the_rarer_is_garbage_collected():
    garbage = GlobalGarbageCollection(10.0)
    assert not garbage.due(0.0, PATIENCE / 2)
    when = [now for now in range(1, 400) if garbage.due(now, now)]
    assert when == [2, 12, 32, 72, 152, 312]
    assert garbage.due(2000.0, PATIENCE), "a new wait after a long time without"
    assert garbage.due(2010.0, PATIENCE)
