"""Everybody answers while busy: owners that compute, sleep or wait for something else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from engine import PATIENCE, Marks, alive, eventually, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "object_store_memory": 128 << 20}


@ray.remote
def resolve(box):
    return ray.get(box[0])


@ray.remote
def resolve_and_mark(box, marks):
    ray.get(box[0])
    marks.add()


@ray.remote
class Owner:
    def put(self, value):
        return ray.put(value)

    def sleep(self, seconds):
        time.sleep(seconds)

    def spin(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def pid(self):
        return os.getpid()


class TestBusyOwners:
    def test_a_driver_that_computes(self, marks: Marks):
        """Workers ask it for a small value that it owns, while its main thread does something else."""
        ref = resolve_and_mark.remote([ray.put("small")], marks)
        eventually(marks.lines)
        ray.get(ref)

    def test_a_driver_that_only_submits(self, marks: Marks):
        """Nobody waits for these tasks, and they run all the same."""
        for _ in range(100):
            resolve_and_mark.remote([ray.put("small")], marks)
        eventually(lambda: len(marks.lines()) == 100)

    @pytest.mark.parametrize("work", ["sleep", "spin"])
    @pytest.mark.parametrize("value", ["small", np.arange(200_000)], ids=["small", "large"])
    def test_an_actor_in_a_call(self, work, value):
        owner = Owner.remote()
        ref = ray.get(owner.put.remote(value))
        busy = getattr(owner, work).remote(2 * PATIENCE)
        assert np.array_equal(ray.get(resolve.remote([ref]), timeout=PATIENCE), value)
        assert np.array_equal(ray.get(ref, timeout=PATIENCE), value)
        assert ray.wait([busy], timeout=0) == ([], [busy])
        ray.kill(owner)

    def test_a_task_that_waits(self):
        """It owns what another task needs before it can answer."""

        @ray.remote
        def outer():
            return ray.get(resolve.remote([ray.put("inner")]))

        assert ray.get([outer.remote() for _ in range(8)]) == ["inner"] * 8


class TestChildren:
    """Tasks that start processes of their own, as data loaders do."""

    def test_subprocess(self):
        @ray.remote
        def run():
            return subprocess.run(
                [sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True
            ).stdout

        assert ray.get([run.remote() for _ in range(2)]) == ["42\n"] * 2

    def test_exit_code(self):
        run = ray.remote(lambda: subprocess.call([sys.executable, "-c", "raise SystemExit(3)"]))
        assert ray.get(run.remote()) == 3

    def test_fork(self):
        @ray.remote
        def fork():
            pid = os.fork()
            if pid == 0:
                os._exit(5)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        assert ray.get(fork.remote()) == 5

    def test_a_child_ends_by_a_signal_that_comes_as_it_begins(self):
        @ray.remote
        def end_children():
            statuses = []
            for _ in range(20):
                pid = os.fork()
                if pid == 0:
                    time.sleep(2.0)
                    os._exit(5)
                os.kill(pid, signal.SIGTERM)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return statuses

        assert ray.get(end_children.remote()) == [-signal.SIGTERM] * 20

    def test_multiprocessing_in_an_actor(self):
        @ray.remote
        class Loader:
            def load(self):
                with multiprocessing.get_context("fork").Pool(2) as pool:
                    return pool.map(abs, [-1, -2, -3])

        loader = Loader.remote()
        assert ray.get([loader.load.remote(), loader.load.remote()]) == [[1, 2, 3]] * 2

    def test_multiprocessing_in_the_driver(self):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        assert ray.get(resolve.remote([ray.put("still here")])) == "still here"


class TestDeaths:
    def test_a_reader_dies_with_views_of_a_large_object(self):
        @ray.remote
        class Reader:
            def read(self, array):
                self.array = array
                return os.getpid()

        refs = [ray.put(np.full(1 << 20, i)) for i in range(4)]
        readers = [Reader.remote() for _ in range(2)]
        pids = [ray.get(reader.read.remote(ref)) for reader, ref in zip(readers, refs, strict=False)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(alive(pid) for pid in pids))
        assert [int(array[-1]) for array in ray.get(refs)] == [0, 1, 2, 3]
        del refs
        for i in range(60):  # all of its room is there again
            assert ray.get(ray.put(np.full(4 << 20, i)))[-1] == i

    @hpcray_only
    def test_a_writer_dies(self):
        """Half-written objects are taken out of the store."""

        @ray.remote(max_retries=0)
        def write():
            os.kill(os.getppid(), 0)
            ray.put(np.ones(4 << 20))
            os._exit(1)

        for _ in range(8):
            ray.wait([write.remote()])
        for i in range(30):
            assert ray.get(ray.put(np.full(4 << 20, i)))[-1] == i
