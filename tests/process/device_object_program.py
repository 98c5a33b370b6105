"""One random program of device objects, in which processes are killed at random. Every value that is read is right.

    python device_object_program.py 7 8 9        embedded: each seed in a process of its own, one after the other
    mpirun -n 2 python device_object_program.py --nodes 7

Prints a line for each seed: the number of values read and of processes killed. In an embedded program the raylet may be
killed too; then the rest of the program fails with errors that say so. On several nodes it is that of another node, and
everything goes on. With made-up devices (`helpers.made_up_devices`) the tensors are on them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

import hpcray as ray
from hpcray.actor import exit_actor
from hpcray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError
from hpcray.platform.process_control import become_subreaper
from hpcray.platform.process_tree import descendants
from hpcray.platform.session_directory import live_sessions
from hpcray.tensors.device_memory import find_driver

LENGTHS = (4, 60_000)
"""Elements of a tensor: some in a message, some in the store."""
PATIENCE = 90.0
AGAIN = {"max_retries": -1, "tensor_transport": "auto"}


def values(number: int, length: int) -> dict[str, Any]:
    driver: Any = find_driver()
    tensor = torch.full((length,), float(number)) if driver is None else driver.tensor(length, float(number))
    return {"tensor": tensor, "same": [tensor], "rest": np.full(3, number), "number": number}


def check(value: Any, number: int) -> None:
    tensor = value["tensor"]
    assert value["same"][0] is tensor, "one tensor became two"
    assert value["number"] == number, (value["number"], number)
    assert bool((tensor == number).all()), (number, tensor.min(), tensor.max())
    assert (value["rest"] == number).all(), (value["rest"], number)


@ray.remote(**AGAIN)
def make(number: int, length: int) -> Any:
    return values(number, length)


@ray.remote(**AGAIN)
def plus(value: Any, more: int) -> Any:
    check(value, value["number"])
    return values(value["number"] + more, len(value["tensor"]))


@ray.remote(num_returns=2, **AGAIN)
def two(value: Any) -> Any:
    number, length = value["number"], len(value["tensor"])
    return values(number + 1, length), values(number + 2, length)


@ray.remote(num_returns="streaming", **AGAIN)
def stream(number: int, length: int) -> Any:
    for place in range(3):
        yield values(number + place, length)


@ray.remote(max_retries=-1)
def total(*found: Any) -> int:
    return sum(int(value["tensor"][-1]) for value in found)


@ray.remote(max_retries=-1)
def nested_total(refs: list[Any]) -> int:
    return sum(int(value["tensor"][-1]) for value in ray.get(refs))


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class Holder:
    """Makes, keeps and reads device objects."""

    def __init__(self) -> None:
        self.last: Any = None

    @ray.method(tensor_transport="auto")
    def make(self, number: int, length: int) -> Any:
        self.last = values(number, length)
        return self.last

    @ray.method(tensor_transport="auto")
    def plus(self, value: Any, more: int) -> Any:
        return values(value["number"] + more, len(value["tensor"]))

    def total(self, *found: Any) -> int:
        return sum(int(value["tensor"][-1]) for value in found)


@ray.remote(num_cpus=0)
class Leaver:
    """Makes device objects and ends in order: they outlive it, unless it was killed."""

    @ray.method(tensor_transport="auto")
    def make(self, number: int, length: int) -> Any:
        return values(number, length)

    def leave(self) -> None:
        exit_actor()


class Killer(threading.Thread):
    """Kills processes of the job.

    Attributes:
        killed: their number. raylet_killed: whether a raylet is among them.
    """

    def __init__(self, source: random.Random, raylets: list[int], kills: int) -> None:
        super().__init__(daemon=True)
        self.killed, self.raylet_killed = 0, False
        self._random, self._raylets, self._kills = source, raylets, kills
        self._end = threading.Event()

    def run(self) -> None:
        with_raylet = self._random.randrange(self._kills) if self._random.random() < 0.25 else -1
        while self.killed < self._kills and not self._end.wait(self._random.uniform(0.02, 0.35)):
            pid = self._raylet() if self.killed == with_raylet else self._worker()
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.killed += 1

    def stop(self) -> None:
        self._end.set()
        self.join()

    def _raylet(self) -> int:
        if not self._raylets:
            return self._worker()
        self.raylet_killed = True
        return self._random.choice(self._raylets)

    def _worker(self) -> int:
        pids = workers()
        return self._random.choice(pids) if pids else 0


def workers() -> list[int]:
    """Pids of the workers of this job, which have the mark of its test in their environment, as the driver has."""
    mark = f"LEAK_CHECK_ID={os.environ['LEAK_CHECK_ID']}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/comm") as comm:
                if comm.read().strip() == "hpcray-worker":
                    with open(f"/proc/{name}/environ", "rb") as file:
                        if mark in file.read().split(b"\0"):
                            found.append(int(name))
    return sorted(found)


class Program:
    """Refs with the numbers that their values must hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.holders = [Holder.remote() for _ in range(2)]
        self.held: list[tuple[Any, int, bool]] = []  # the ref, its number, whether it can be lost for good
        self.reads = 0

    def step(self) -> None:
        steps = [self.make, self.make, self.plus, self.plus, self.two, self.stream, self.put, self.leave, self.total]
        self.random.choice([*steps, self.nested, self.read, self.read, self.drop])()

    def some(self, most: int = 3) -> list[tuple[Any, int, bool]]:
        return self.random.sample(self.held, min(len(self.held), self.random.randint(1, most)))

    def new(self) -> tuple[int, int]:
        return self.random.randint(0, 1000), self.random.choice(LENGTHS)

    def make(self) -> None:
        number, length = self.new()
        maker = self.random.choice([make, *(holder.make for holder in self.holders)])
        self.held.append((maker.remote(number, length), number, False))

    def plus(self) -> None:
        for ref, number, lossy in self.some():
            adder = self.random.choice([plus, *(holder.plus for holder in self.holders)])
            self.held.append((adder.remote(ref, 5), number + 5, lossy))

    def two(self) -> None:
        for ref, number, lossy in self.some(1):
            first, second = two.remote(ref)
            self.held += [(first, number + 1, lossy), (second, number + 2, lossy)]

    def stream(self) -> None:
        number, length = self.new()
        refs = stream.remote(number, length)
        self.held += [(ref, number + place, False) for place, ref in enumerate(refs)]

    def put(self) -> None:
        number, length = self.new()
        self.held.append((ray.put(values(number, length), _tensor_transport="auto"), number, False))

    def leave(self) -> None:
        number, length = self.new()
        leaver = Leaver.remote()
        self.held.append((leaver.make.remote(number, length), number, True))
        leaver.leave.remote()

    def total(self) -> None:
        self._sum(self.some(), self.random.choice([total, *(holder.total for holder in self.holders)]).remote)

    def nested(self) -> None:
        self._sum(self.some(), lambda *refs: nested_total.remote(list(refs)))

    def _sum(self, found: list[tuple[Any, int, bool]], call: Any) -> None:
        with self.losses(any(lossy for *_, lossy in found)):
            got = ray.get(call(*(ref for ref, *_ in found)), timeout=PATIENCE)
            assert got == sum(number for _, number, _ in found), (got, found)
            self.reads += len(found)

    def read(self) -> None:
        for ref, number, lossy in self.some():
            with self.losses(lossy):
                check(ray.get(ref, timeout=PATIENCE, _use_object_store=self.random.random() < 0.3), number)
                self.reads += 1

    def drop(self) -> None:
        self.random.shuffle(self.held)
        del self.held[self.random.randint(0, 10) :]
        if self.random.random() < 0.3:
            gc.collect()

    @contextlib.contextmanager
    def losses(self, allowed: bool) -> Any:
        """What an actor without restarts has made goes with it, where it is killed before it has moved it."""
        try:
            yield
        except GetTimeoutError:
            raise
        except (ObjectLostError, RayActorError):
            if not allowed:
                raise


def run(seed: int, nodes: bool) -> None:
    """Run one program."""
    if "MADE_UP_DEVICES" in os.environ:
        from helpers.made_up_devices import use_made_up_devices

        use_made_up_devices()
    faulthandler.dump_traceback_later(4 * PATIENCE, exit=True)
    ray.init(include_dashboard=False, **({} if nodes else {"num_cpus": 2, "object_store_memory": 128 << 20}))
    source = random.Random(f"kills of {seed}")
    raylets = [info.pid for info in live_sessions() if bool(info.node) == nodes]
    program = Program(seed)
    killer = Killer(source, raylets, source.randint(1, 5))
    killer.start()
    try:
        for number in range(200):
            if number >= 30 and not killer.is_alive():
                break
            program.step()
        killer.stop()
        for _ in range(3):
            program.read()
    except GetTimeoutError:
        raise
    except RayError as error:
        if not killer.raylet_killed or nodes:
            raise
        print(f"seed {seed}: the raylet was killed: {type(error).__name__}", flush=True)
    killer.stop()
    ray.shutdown()
    print(f"seed {seed}: {program.reads} values read, {killer.killed} processes killed", flush=True)
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Run the programs of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("seeds", nargs="+", type=int)
    options = parser.parse_args()
    if options.nodes:
        run(options.seeds[0], True)
        return
    become_subreaper()
    failed = []
    for seed in options.seeds:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                run(seed, False)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status:
            failed.append(seed)
            print(f"seed {seed}: failed, {status}", flush=True)
        deadline = time.monotonic() + 30
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.02)
        if left:
            failed.append(seed)
            print(f"seed {seed}: left behind: {left}", flush=True)
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
