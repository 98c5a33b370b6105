"""Collections that have to wait (`runtime/core_worker/interruptions.py`)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.runtime.core_worker.interruptions import _HandlerContext


def _context() -> _HandlerContext:
    return _HandlerContext(SimpleNamespace(pending_calls=[]), lambda frame: False)  # type: ignore[arg-type]


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_tuples_that_are_being_made_meanwhile_are_made(generation: int) -> None:
    context = _context()

    def items() -> Iterator[int]:
        for number in range(1000):
            if number == 5:
                context.keep_all(generation)
            yield number

    assert tuple(items()) == tuple(range(1000)), "a tuple that somebody else refers to cannot be resized"


def test_a_collection_finds_no_circle_until_it_is_due() -> None:
    class Circle:
        pass

    def circle() -> Any:
        one = Circle()
        one.back = ((one,),)  # type: ignore[attr-defined]
        return weakref.ref(one)

    context = _context()
    gc.disable()
    try:
        refs = [circle() for _ in range(100)]
        context.keep_all(2)
        gc.collect()
        assert all(ref() is not None for ref in refs)
        context.held = None
        context.collect()
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()
