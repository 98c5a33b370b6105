"""`breakpoint()` in tasks and actors, and `hpcray debug` in a terminal of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from engine import PATIENCE, alive, eventually, exceptions, hpcray_only, ray
from helpers.terminal import Terminal

from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.state.breakpoints import Breakpoint, BreakpointClient, list_breakpoints
from hpcray.util.state import list_tasks, list_workers

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 3}
STOPS_AT = "-> breakpoint()" if sys.version_info >= (3, 13) else "-> return doubled"
"""Until Python 3.13 pdb stopped at the next line."""


@ray.remote(max_retries=0)
def stops(number):
    doubled = 2 * number
    breakpoint()
    return doubled


@ray.remote(max_retries=0)
def stops_twice(number):
    breakpoint()
    number += 1
    breakpoint()
    return number


@ray.remote(max_retries=0)
def fails(number):
    secret = number + 1
    raise ValueError(f"not {secret}")


@ray.remote
def plain(number):
    number += 1
    return number


@ray.remote(num_cpus=0)
class Sync:
    def __init__(self):
        self.state = "mine"

    def stops(self):
        breakpoint()
        return self.state


@ray.remote(num_cpus=0)
class Async:
    async def stops(self, number):
        import hpcray.compat.ray  # noqa: F401, I001
        from ray.util import pdb  # Ray has no module ray.util.pdb to import

        pdb.set_trace()
        return number


def command(*words: str) -> list[str]:
    address = ray.init(ignore_reinit_error=True)["address"]
    return [sys.executable, "-m", "hpcray.cli", "debug", *words, "--job", address]


def typed(lines: str, *words: str) -> str:
    """What `hpcray debug` says to these lines of a pipe."""
    done = subprocess.run(command(*words), input=lines, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.stdout + done.stderr


def waiting(count: int = 1) -> list[Breakpoint]:
    return eventually(lambda: found if len(found := list_breakpoints(need_process())) == count else None)


@pytest.fixture(autouse=True)
def none_waits_on():
    """What a test that has failed leaves at its breakpoint goes on."""
    yield
    for one in list_breakpoints(need_process()):
        os.kill(one.pid, signal.SIGKILL)


def prompts(terminal: Terminal, count: int) -> None:
    """Wait until the terminal has prompted so often, and waits for a line."""
    eventually(
        lambda: (terminal.read(), terminal.text.count("(Pdb)") >= count and terminal.text.rstrip().endswith("(Pdb)"))[1]
    )


def value(ref):
    return ray.get(ref, timeout=PATIENCE)


def test_a_terminal_attaches_to_a_breakpoint_looks_and_lets_the_task_go_on():
    ref = stops.remote(21)
    (one,) = waiting()
    assert (one.name, one.file, one.error) == ("stops", __file__, "") and alive(one.pid)
    with Terminal(command(), height=40) as terminal:
        terminal.shows("Active breakpoints", "stops", "test_debugger.py:", "Enter breakpoint index")
        assert max(map(len, terminal.text.splitlines())) <= 80
        terminal.press("0\r")
        terminal.shows(STOPS_AT, "(Pdb)")
        terminal.press("p doubled + 100\r")
        terminal.shows("142")
        prompts(terminal, 2)
        terminal.press("dou\t")
        terminal.shows("(Pdb) doubled")
        terminal.press("\x03")
        prompts(terminal, 3)
        terminal.press("w\r")
        terminal.shows("(Pdb) w", ".py(", "stops()")
        prompts(terminal, 4)
        terminal.press("doubled = 43\r")
        prompts(terminal, 5)
        terminal.press("c\r")
        terminal.shows("the task goes on", "no task waits")
        terminal.press("\x04")
        assert terminal.ends() == 0
    assert value(ref) == 43
    assert not list_breakpoints(need_process())


def test_lines_may_come_from_a_pipe():
    ref = stops.remote(3)
    (one,) = waiting()
    assert "no breakpoint 7 waits" in typed("", "7")
    listed = json.loads(typed("", "--json"))
    assert [row["token"] for row in listed] == [one.token]
    assert re.search(r"stops .* node 0 ", typed("", "--list")) and one.task_id in typed("", "--list", "-v")
    text = typed("p 'it is', doubled\nc\n", one.token)
    assert "('it is', 6)" in text
    assert value(ref) == 6


@pytest.mark.slow
def test_several_breakpoints_wait_at_once_in_tasks_and_actors():
    sync, coroutines = Sync.remote(), Async.remote()
    refs = [stops.remote(1), stops.remote(2), sync.stops.remote(), coroutines.stops.remote(4)]
    found = waiting(4)
    assert sorted(one.name for one in found) == ["Async.stops", "Sync.stops", "stops", "stops"]
    tasks = {one.task_id for one in list_tasks(detail=True, limit=1000) if one.is_debugger_paused}
    assert tasks == {one.task_id for one in found}
    assert sum(one.num_paused_threads for one in list_workers(detail=True) if one.is_alive) == 4
    for one in found:
        shown = {"Async.stops": "number", "Sync.stops": "self.state", "stops": "doubled"}[one.name]
        assert shown in typed(f"pp {shown}\nl\nc\n", one.token)
    assert value(refs) == [2, 4, "mine", 4]
    assert not list_breakpoints(need_process())
    assert not any(one.num_paused_threads for one in list_workers(detail=True) if one.is_alive)


def test_threads_that_wait_in_another_debugger_are_listed():
    @ray.remote
    class Gate:
        opened = False

        def open(self):
            self.opened = True

        def is_open(self):
            return self.opened

    @ray.remote
    def task(gate, count):
        import hpcray.compat.ray  # noqa: F401, I001
        from ray._private.worker import global_worker

        def wait():
            with global_worker.worker_paused_by_debugger():
                while not ray.get(gate.is_open.remote()):
                    time.sleep(0.05)

        threads = [threading.Thread(target=wait) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count

    gate = Gate.options(num_cpus=0).remote()
    ref = task.remote(gate, 3)

    def counts():
        return sorted(one.num_paused_threads for one in list_workers(detail=True) if one.is_alive)

    eventually(lambda: counts()[-1] == 3)
    assert counts()[:-1] == [0] * (len(counts()) - 1)
    ray.get(gate.open.remote())
    assert value(ref) == 3
    assert counts()[-1] == 0


@pytest.mark.slow
def test_a_terminal_that_leaves_keeps_the_task_waiting_and_another_one_takes_it():
    ref = stops.remote(5)
    (one,) = waiting()
    with Terminal(command("0")) as first:
        first.shows("(Pdb)")
        first.press("\x04")
        first.shows("detached")
        assert first.ends() == 0
    time.sleep(0.2)
    assert waiting()[0].token == one.token and not ray.wait([ref], timeout=0)[0]
    with Terminal(command("0")) as first:
        first.shows("(Pdb)")
        with Terminal(command("0")) as second:
            second.shows("(Pdb)")
            first.shows("another terminal has taken this breakpoint")
            first.ends()
            second.press("p doubled\r")
            second.shows("10")
            second.press("c\r")
            second.ends()
    assert value(ref) == 10


def test_a_task_that_waits_can_be_cancelled_and_its_terminal_hears_of_it():
    ref = stops.remote(5)
    waiting()
    with Terminal(command("0")) as terminal:
        terminal.shows("(Pdb)")
        ray.cancel(ref)
        with pytest.raises(exceptions.TaskCancelledError):
            value(ref)
        terminal.shows("the task goes on")
        assert terminal.ends() == 0
    assert not list_breakpoints(need_process())
    ref = stops.remote(5)
    waiting()
    ray.cancel(ref, force=True)
    with pytest.raises((exceptions.TaskCancelledError, exceptions.WorkerCrashedError)):
        value(ref)
    eventually(lambda: not list_breakpoints(need_process()))


@pytest.mark.slow
def test_an_actor_that_is_killed_at_its_breakpoint_is_no_longer_listed():
    actor = Sync.remote()
    ref = actor.stops.remote()
    waiting()
    with Terminal(command("0")) as terminal:
        terminal.shows("(Pdb)")
        ray.kill(actor)
        terminal.shows("hpcray:", "ended")
        assert terminal.ends() == 0
    with pytest.raises(exceptions.ActorDiedError):
        value(ref)
    eventually(lambda: not list_breakpoints(need_process()))


@pytest.mark.slow
def test_one_terminal_stays_for_all_stops_of_a_task():
    ref = stops_twice.remote(7)
    waiting()
    text = typed("c\np number * 100\nc\n", "0")
    if "800" not in text:  # a pipe that ends while the task runs leaves
        text += typed("p number * 100\nc\n", waiting()[0].token)
    assert "800" in text
    assert value(ref) == 8


@pytest.mark.slow
def test_steps_end_with_the_task_and_the_next_one_does_not_stop():
    for _ in range(2):
        ref = stops.remote(4)
        waiting()
        with Terminal(command("0"), height=40) as terminal:
            terminal.shows(STOPS_AT)
            if sys.version_info >= (3, 13):
                terminal.press("n\r")
                terminal.shows("-> return doubled")
            terminal.press("n\r")
            terminal.shows("--Return--")
            terminal.press("n\r")
            terminal.shows("the task goes on")
            terminal.ends()
        assert value(ref) == 8
        assert value([plain.remote(number) for number in range(8)]) == list(range(1, 9))


@pytest.mark.slow
def test_quit_fails_the_task():
    ref = stops.remote(4)
    waiting()
    typed("q\n", "0")
    with pytest.raises(exceptions.RayTaskError, match="BdbQuit"):
        value(ref)


@pytest.mark.slow
def test_ctrl_c_interrupts_a_command_at_the_prompt_not_the_task():
    ref = stops.remote(4)
    waiting()
    with Terminal(command("0")) as terminal:
        terminal.shows("(Pdb)")
        terminal.press("[0 for _ in iter(int, 1)]\r")
        time.sleep(1.0)
        terminal.press("\x03")
        terminal.shows("KeyboardInterrupt", "(Pdb)")
        terminal.press("p doubled - 1\r")
        terminal.shows("7")
        terminal.press("c\r")
        terminal.ends()
    assert value(ref) == 8


@pytest.mark.slow
def test_an_interpreter_at_the_prompt_writes_to_the_terminal():
    ref = stops.remote(4)
    waiting()
    text = typed("interact\nfor i in range(2): print('line', i + doubled)\n\nexit()\nc\n", "0")
    assert "line 8" in text and "line 9" in text
    assert value(ref) == 8


def test_a_task_that_fails_waits_where_it_did_if_it_is_asked_to():
    env = {"env_vars": {"RAY_DEBUG_POST_MORTEM": "1"}}
    ref = fails.options(runtime_env=env).remote(1)
    (one,) = waiting()
    assert "ValueError: not 2" in one.error and one.file == __file__
    assert "not 2" in typed("", "--list")
    assert "(2, 1)" in typed("p secret, number\nc\n", "0")
    with pytest.raises(ValueError, match="not 2"):
        value(ref)
    with pytest.raises(ValueError, match="not 3"):
        value(fails.remote(2))


@pytest.mark.slow
def test_breakpoints_can_be_switched_off():
    assert value(stops.options(runtime_env={"env_vars": {"PYTHONBREAKPOINT": "0"}}).remote(1)) == 2
    assert value(stops.options(runtime_env={"env_vars": {"RAY_DEBUG": "0"}}).remote(1)) == 2


@pytest.mark.slow
def test_a_client_completes_and_an_unknown_breakpoint_has_ended():
    ref = stops.remote(4)
    (one,) = waiting()
    client = BreakpointClient(need_process(), one)
    client.attach()
    eventually(lambda: (client.poll(), client.state == "prompt")[1])
    assert "doubled" in client.completions("dou", "dou", 0, 3)
    assert client.completions("doubled.bit_l", "p doubled.bit_l", 2, 15) == ["doubled.bit_length"]
    client.send("c")
    assert value(ref) == 8
    eventually(lambda: (client.poll(), client.state == "ended")[1])
    assert os.listdir(ray.init(ignore_reinit_error=True)["address"]) and not list_breakpoints(need_process())
