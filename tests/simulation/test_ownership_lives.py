"""The oracle and the world of the ownership simulation know what the earlier lives of a lost object held."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from ownership_oracle import checked_states
from ownership_process import Process
from ownership_world import World

from hpcray.core.core_worker.object_table import INLINE, LINEAGE_ONLY


@pytest.fixture(autouse=True, scope="module")
def states() -> Iterator[None]:
    with checked_states():
        yield


def lose(world: World, oid: bytes) -> None:
    """Every copy vanishes."""
    world.lost_copies.add(oid)
    world.vanished.add(oid)
    for store in world.stores:
        store.free(oid)


def submit(world: World, owner: Process, worker: Process, args: slice, retries: int) -> None:
    world.draw_retries = lambda: retries  # type: ignore[method-assign]
    owner.submit(owner.frames[-1], worker.id, owner.frames[-1].vars[args], [])
    world.settle()


def finish(world: World, process: Process, returned: slice) -> None:
    """The last task of a process ends, with a large result that holds these of its refs."""
    frame = process.frames[-1]
    process.finish(frame, frame.vars[returned], True, False)
    process.turn()
    world.settle()


def test_an_error_that_lineage_remembers_holds_nothing_of_the_value_that_was_lost() -> None:
    world = World(Random(0).randrange, 2, 2)
    owner, worker = world.living
    refs = owner.state.vars
    owner.put(owner.state, [], False)
    submit(world, owner, worker, slice(1), 0)
    finish(world, worker, slice(1))
    submit(world, owner, worker, slice(1, 2), -1)
    finish(world, worker, slice(0))
    held, lost, again = [ref.id for ref in refs]
    lose(world, lost)
    owner.get(owner.state, refs[1])
    world.settle()
    assert world.verdicts["RETRIES_DISABLED"] == 1, "it is an error from now on"
    del refs[1]
    owner.turn()
    assert lost in owner.table.entries, "it may be asked for again"
    lose(world, again)
    owner.get(owner.state, refs[1])
    world.settle()
    assert owner.table.entries[lost].local, "it is asked for again"
    del refs[0]
    owner.turn()
    world.oracle.after_step()
    assert held not in owner.table.entries
    world.end()


def test_a_value_that_is_here_can_be_read_though_its_owner_remembers_nothing_but_how_to_make_it() -> None:
    """It was freed because its protector died, and its reader had not heard of that yet."""
    world = World(Random(0).randrange, 3, 2)
    owner, protector, reader = world.living
    owner.put(owner.state, [], False)
    submit(world, owner, reader, slice(1), -1)
    finish(world, reader, slice(1))
    submit(world, owner, protector, slice(1, 2), -1)
    submit(world, protector, reader, slice(1), -1)
    frame = reader.frames[-1]
    outer = frame.vars[0].id
    reader.get(frame, frame.vars[0])
    world.settle()
    finish(world, protector, slice(0))
    del owner.state.vars[1]
    owner.turn()
    world.kill(protector)
    world.told(protector.id, owner.id)
    assert owner.table.entries[outer].state == LINEAGE_ONLY
    reader.get(frame, frame.vars[0])
    assert reader.reads == 2
    del frame
    world.end()


def test_what_is_read_out_of_a_value_of_the_dead_may_be_remembered_only() -> None:
    """Who held it died with what it had put it into, so it was freed; a task that still has that value finds it there,
    and relies on its submitter, whom nobody counts."""
    world = World(Random(0).randrange, 4, 2)
    owner, worker, holder, reader = world.living
    refs = owner.state.vars
    submit(world, owner, worker, slice(0), -1)
    finish(world, worker, slice(0))
    submit(world, owner, worker, slice(1), -1)
    finish(world, worker, slice(0))
    submit(world, holder, owner, slice(0), 0)
    owner.frames[-1].vars.append(refs.pop(0))
    freed = owner.frames[-1].vars[0].id
    finish(world, owner, slice(1))
    holder.get(holder.state, holder.state.vars[0])
    world.settle()
    assert owner.table.entries[freed].borrowers == {holder.id: 1}
    holder.put(holder.state, [ref for ref in holder.state.vars if ref.id == freed], False)
    submit(world, holder, worker, slice(2, 3), 0)
    (outer,) = worker.frames[-1].vars
    worker.submit(worker.frames[-1], reader.id, [outer], [])
    world.settle()
    del outer
    frame = reader.frames[-1]
    reader.get(frame, frame.vars[0])
    world.settle()
    frame.vars.pop()
    reader.turn()
    world.settle()
    world.kill(holder)
    world.settle()
    assert owner.table.entries[freed].state == LINEAGE_ONLY and freed in owner.table.lineage.remembered
    reader.get(frame, frame.vars[0])
    world.settle()
    assert frame.vars[1].id == freed and freed in reader.table.refs._unregistered
    world.oracle.at_rest()
    owner.state.vars.clear()
    finish(world, reader, slice(0))
    assert freed not in owner.table.entries, "nor is it kept when nothing can be made from it any more"
    del frame
    world.end()


def test_what_is_an_error_since_its_owner_freed_it_holds_nothing() -> None:
    """Its protector died; then its owner itself reads it out of a value that it still has."""
    world = World(Random(0).randrange, 3, 1)
    owner, worker, protector = world.living
    submit(world, owner, worker, slice(0), 0)
    submit(world, protector, owner, slice(0), 0)
    owner.frames[-1].vars.append(owner.state.vars.pop())
    finish(world, owner, slice(1))
    submit(world, protector, owner, slice(1), 0)
    frame = owner.frames[-1]
    owner.get(frame, frame.vars[0])
    world.settle()
    freed = frame.vars.pop().id
    owner.turn()
    world.kill(protector)
    world.told(protector.id, owner.id)
    worker.put(worker.frames[-1], [], False)
    worker.state.vars.append(worker.frames[-1].vars[0])
    finish(world, worker, slice(1))
    assert freed not in owner.table.entries
    owner.get(frame, frame.vars[0])
    assert owner.table.entries[freed].state == INLINE, "an error"
    worker.state.vars.clear()
    worker.turn()
    world.settle()
    assert not worker.table.entries
    del frame
    world.end()


def test_what_is_read_out_of_a_copy_that_was_freed_may_be_lost() -> None:
    """A view keeps the copy: who comes to hold the object again gets it, while others get the one made since."""
    world = World(Random(0).randrange, 2, 2)
    owner, worker = world.living
    refs = owner.state.vars
    submit(world, owner, worker, slice(0), -1)
    worker.put(worker.frames[-1], [], False)
    finish(world, worker, slice(1))
    submit(world, owner, worker, slice(1), -1)
    finish(world, worker, slice(0))
    outer, again = [ref.id for ref in refs]
    owner.get(owner.state, refs[0])
    world.settle()
    del refs[2], refs[0]
    owner.turn()
    world.settle()
    assert owner.table.entries[outer].state == LINEAGE_ONLY and outer in owner.table.pins.views_without_entry
    lose(world, again)
    owner.get(owner.state, refs[0])
    world.settle()
    worker.frames.sort(key=lambda frame: frame.task == outer[:-3])  # the one that the other waits for ends first
    worker.put(worker.frames[-1], [], False)
    finish(world, worker, slice(1))
    finish(world, worker, slice(1))
    assert refs[-1].id == outer
    owner.get(owner.state, refs[-1])
    world.settle()
    inner = refs[-1].id
    owner.get(owner.state, refs[-1])
    world.settle()
    assert b"already freed" in owner.table.entries[inner].value
    world.end()


def test_no_circle_is_made_through_an_earlier_life() -> None:
    """Which counting cannot free, as no other."""
    world = World(Random(0).randrange, 3, 2)
    owner, second, third = world.living
    submit(world, owner, second, slice(0), -1)
    submit(world, second, third, slice(0), -1)
    finish(world, second, slice(1))
    (outer,) = [ref.id for ref in owner.state.vars]
    (inner,) = world.values[outer]
    lose(world, outer)
    owner.get(owner.state, owner.state.vars[0])
    world.settle()
    finish(world, next(process for process in (second, third) if process.frames[-1].task == outer[:-3]), slice(0))
    assert world.values[outer] == () and owner.reads == 1
    assert world.contains(outer, inner), "the task of the inner one must not return the outer one now"
    world.end()
