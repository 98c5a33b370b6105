"""Actor handles: passed around, stored, copied; the actor ends with its last handle."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time

import pytest
from engine import alive, eventually, exceptions, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
class Cell:
    def __init__(self, value=None):
        self.value = value

    def set(self, value):
        self.value = value

    def get(self):
        return self.value

    def pid(self):
        return os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)
        return "slept"


@ray.remote
class Owner:
    """Makes and keeps handles."""

    def __init__(self):
        self.cells = []

    def make(self, value):
        self.cells.append(Cell.remote(value))
        return self.cells[-1]

    def keep(self, *cells):
        self.cells += cells

    def read(self):
        return ray.get([cell.get.remote() for cell in self.cells])

    def drop(self):
        self.cells.clear()
        gc.collect()


def pid_of(cell):
    return ray.get(cell.pid.remote())


class TestPassing:
    def test_to_a_task(self):
        cell = Cell.remote()

        @ray.remote
        def write(cell, value):
            ray.get(cell.set.remote(value))
            return "done"

        assert ray.get(write.remote(cell, 5)) == "done"
        assert ray.get(cell.get.remote()) == 5

    def test_inside_containers_closures_and_objects(self):
        cell = Cell.remote("v")

        @ray.remote
        def read(box):
            return ray.get([box["cells"][0].get.remote(), cell.get.remote()])

        assert ray.get(read.remote({"cells": [cell]})) == ["v", "v"]
        assert ray.get(ray.get(ray.put([cell]))[0].get.remote()) == "v"

    def test_many_tasks_write_through_one_handle(self):
        @ray.remote
        class Sum:
            def __init__(self):
                self.total = 0

            def add(self, x):
                self.total += x

            def read(self):
                return self.total

        total = Sum.remote()
        add = ray.remote(lambda actor, x: ray.get(actor.add.remote(x)))
        ray.get([add.remote(total, i) for i in range(50)])
        assert ray.get(total.read.remote()) == 1225

    def test_before_the_arguments_of_its_constructor_are_ready(self):
        @ray.remote
        def ask(cell):
            return ray.get(cell.get.remote())

        slow = ray.remote(lambda: time.sleep(0.5) or "late")
        cell = Cell.remote(slow.remote())
        assert ray.get([ask.remote(cell), cell.get.remote()]) == ["late", "late"]

    def test_right_after_it_was_made(self):
        """Whoever gets the handle may ask for the actor before the news of it has arrived everywhere."""
        ask = ray.remote(lambda box: ray.get(box[0].get.remote()))
        ray.get([ask.remote([Cell.remote(-1)]) for _ in range(4)])
        for _ in range(5):
            assert ray.get([ask.remote([Cell.options(num_cpus=0).remote(i)]) for i in range(4)]) == [0, 1, 2, 3]

    def test_as_a_result(self):
        @ray.remote
        def make(value):
            return Cell.remote(value)

        cell = ray.get(make.remote(3))
        assert ray.get(cell.get.remote()) == 3

    def test_of_an_actor_made_by_an_actor(self):
        owner = Owner.remote()
        cell = ray.get(owner.make.remote("inner"))
        assert ray.get(cell.get.remote()) == "inner"
        ray.get(cell.set.remote("changed"))
        assert ray.get(owner.read.remote()) == ["changed"]

    def test_kept_by_another_actor(self):
        owner = Owner.remote()
        ray.get(owner.keep.remote(Cell.remote(1), Cell.remote(2)))
        gc.collect()
        time.sleep(0.3)
        assert ray.get(owner.read.remote()) == [1, 2]

    def test_actors_that_call_each_other(self):
        @ray.remote
        class Player:
            def __init__(self):
                self.peer = None

            def meet(self, peer):
                self.peer = peer

            def play(self, ball):
                return ball if ball == 0 else ["hit", self.peer.play.remote(ball - 1)]

        ping, pong = Player.remote(), Player.remote()
        ray.get([ping.meet.remote(pong), pong.meet.remote(ping)])
        hits, got = 0, ray.get(ping.play.remote(6))
        while got != 0:
            hits += 1
            got = ray.get(got[1])
        assert hits == 6


class TestIdentity:
    def test_equality_and_hash(self):
        cell, other = Cell.remote(), Cell.remote()
        (again,) = ray.get(ray.put([cell]))
        assert again == cell
        assert hash(again) == hash(cell)
        assert cell != other
        assert len({cell, other, again}) == 2
        assert again._actor_id == cell._actor_id
        assert cell._actor_id != other._actor_id

    def test_repr_names_class_and_id(self):
        cell = Cell.remote()
        assert repr(cell) == f"Actor(Cell, {cell._actor_id.hex()})"

    def test_copies(self):
        cell = Cell.remote("c")
        holder = {"cell": cell, "list": [cell]}
        for other in (copy.copy(cell), copy.deepcopy(cell), copy.deepcopy(holder)["list"][0]):
            assert other == cell
            assert ray.get(other.get.remote()) == "c"

    def test_by_the_pickle_of_ray_inside_a_value(self):
        cell = Cell.remote("p")
        blob = ray.get(ray.remote(lambda box: box).remote([cell]))
        assert ray.get(blob[0].get.remote()) == "p"


class TestScope:
    def test_the_last_handle_ends_the_actor(self):
        cell = Cell.remote()
        pid = pid_of(cell)
        assert alive(pid)
        del cell
        gc.collect()
        eventually(lambda: not alive(pid), "the end of an actor without handles")

    def test_calls_in_flight_are_finished_first(self):
        ref = Cell.remote().sleep.remote(0.5)
        gc.collect()
        assert ray.get(ref) == "slept"

    def test_many_calls_and_no_handle(self, marks):
        @ray.remote
        class Noter:
            def note(self):
                return marks.add()

        def run():
            noter = Noter.remote()
            return [noter.note.remote() for _ in range(50)]

        assert ray.get(run()) == list(range(1, 51))

    def test_a_handle_in_an_actor_keeps_it(self):
        owner = Owner.remote()
        cell = Cell.remote("kept")
        pid = pid_of(cell)
        ray.get(owner.keep.remote(cell))
        del cell
        gc.collect()
        time.sleep(0.5)
        assert alive(pid)
        assert ray.get(owner.read.remote()) == ["kept"]
        ray.get(owner.drop.remote())
        eventually(lambda: not alive(pid), "the end of an actor whose keeper let go")

    def test_a_handle_in_an_object_keeps_it(self):
        cell = Cell.remote("boxed")
        pid = pid_of(cell)
        box = ray.put([cell])
        del cell
        gc.collect()
        time.sleep(0.5)
        assert ray.get(ray.get(box)[0].get.remote()) == "boxed"
        del box
        gc.collect()
        eventually(lambda: not alive(pid), "the end of an actor whose box is gone")

    def test_a_handle_in_a_pending_task_keeps_it(self):
        @ray.remote
        def later(box, _):
            return ray.get(box[0].get.remote())

        cell = Cell.remote("needed")
        ref = later.remote([cell], ray.remote(lambda: time.sleep(0.5)).remote())
        del cell
        gc.collect()
        assert ray.get(ref) == "needed"

    def test_made_in_a_task_that_returned_nothing(self):
        @ray.remote
        def make():
            return pid_of(Cell.remote())

        pid = ray.get(make.remote())
        eventually(lambda: not alive(pid), "the end of an actor that nobody knows")

    def test_the_maker_dies(self):
        """An actor that is not detached goes with the process that created it, as in Ray."""
        owner = Owner.remote()
        cell = ray.get(owner.make.remote("orphan"))
        pid = pid_of(cell)
        ray.kill(owner)
        eventually(lambda: not alive(pid), "the end of an actor whose creator is dead")
        with pytest.raises(exceptions.RayActorError):
            ray.get(cell.get.remote())

    def test_pickled_by_somebody_else(self):
        cell = Cell.remote("foreign")
        try:
            blob = pickle.dumps(cell)
        except Exception as error:
            pytest.skip(f"{type(error).__name__}")
        assert ray.get(pickle.loads(blob).get.remote()) == "foreign"
        pid = pid_of(cell)
        del cell
        eventually(lambda: not alive(pid), "the end of an actor of which only such a copy is left")
        with pytest.raises(exceptions.RayActorError):
            ray.get(pickle.loads(blob).get.remote())
