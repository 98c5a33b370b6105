"""`hpcray.progress`: refs as they become ready, any other iteration, and how both are shown."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

import pytest
from engine import ROOT, Marks, eventually, exceptions, hpcray_only, ray
from helpers.terminal import Terminal

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 3}


@ray.remote(num_cpus=0)
def later(seconds, value):
    time.sleep(seconds)
    if value < 0:
        raise ValueError(f"{value} is negative")
    return value


@ray.remote(num_cpus=1)
def square(number):
    return number * number


def test_refs_come_as_they_become_ready_and_failures_are_counted(capsys):
    refs = [later.remote(seconds, value) for seconds, value in ((0.9, 0), (0.0, 1), (0.4, -2))]
    shown = ray.progress(refs, desc="numbers")
    assert [refs.index(ref) for ref in shown] == [1, 2, 0]
    assert (shown.done, shown.failed, shown.total) == (3, 1, 3)
    with pytest.raises(ValueError, match="negative"):
        ray.get(refs[2])
    text = capsys.readouterr().err
    assert "numbers: 3 of 3 (100%), 1 failed" in text and "first error: ValueError: -2 is negative" in text


def test_get_and_wait_keep_the_order_of_the_refs():
    refs = [later.remote(seconds, value) for seconds, value in ((0.3, 1), (0.0, 2), (0.1, 3))]
    assert ray.get(ray.progress(refs)) == [1, 2, 3]
    assert ray.progress(refs).wait() == refs
    assert ray.get(ray.progress(square.remote(i) for i in range(4))) == [0, 1, 4, 9]
    assert list(ray.progress([])) == [] and ray.progress([]).wait() == []
    slow = later.remote(5, 1)
    with pytest.raises(exceptions.GetTimeoutError):
        ray.progress([slow]).wait(0.05)
    ray.cancel(slow, force=True)


def test_other_items_are_counted_as_they_come(capsys):
    def numbers():
        yield from range(3)

    assert list(ray.progress(range(5), desc="five")) == [0, 1, 2, 3, 4]
    assert list(ray.progress(numbers())) == [0, 1, 2]
    text = capsys.readouterr().err
    assert "five: 5 of 5 (100%)" in text and text.splitlines()[-1].startswith("3, 0:00")
    with pytest.raises(TypeError):
        ray.progress([ray.put(1), 2])
    assert [ray.get(ref) for ref in ray.progress(stream.remote())] == [0, 1, 2]


@ray.remote(num_returns="streaming")
def stream():
    yield from range(3)


def test_breaking_off_leaves_nothing_behind():
    from hpcray.runtime.core_worker.core_worker import need_process

    slow = [later.remote(60, 1) for _ in range(3)]
    for _ in ray.progress([ray.put(1), *slow]):
        break
    assert not need_process().reader.ready_queues
    with need_process().engine.lock:
        assert not any(need_process().table.entries[ref.binary()].ready_waiters for ref in slow)
    for ref in slow:
        ray.cancel(ref, force=True)


def test_a_task_that_waits_in_progress_lends_its_cpu():
    @ray.remote(num_cpus=3)
    def outer():
        return sum(ray.get(ref) for ref in ray.progress([square.remote(i) for i in range(4)]))

    assert ray.get(outer.remote(), timeout=30) == 14


def test_what_it_waits_for_is_found_by_hpcray_why(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import time, hpcray as ray\nray.init(num_cpus=1)\n"
        "@ray.remote\ndef sleeper():\n    time.sleep(60)\n"
        "print(ray.init(ignore_reinit_error=True)['address'], flush=True)\n"
        "list(ray.progress([sleeper.remote()]))\n"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as running:
        address = running.stdout.readline().strip()
        command = [sys.executable, "-m", "hpcray.cli", "why", "--job", address]
        try:
            eventually(lambda: "runs sleeper" in subprocess.run(command, capture_output=True, text=True).stdout)
        finally:
            running.kill()


def test_a_hundred_thousand_refs_cost_their_own_share_only():
    ready = [ray.put(None) for _ in range(100_000)]
    gates = [later.remote(0.2 * number, number) for number in range(5)]
    began = time.monotonic()
    seen = 0
    times = []
    for _ in ray.progress(ready + gates):
        seen += 1
        times.append(time.monotonic())
    assert seen == 100_005
    assert times[-1] - began < 20
    waiting = [later.options(resources={"never": 1}).remote(0, 0) for _ in range(2_000)]
    ray.wait(waiting, timeout=0.5)  # until they are sent: that is not of the wait
    gc.disable()  # a collection goes through all that the tests before this one have left
    try:
        began, spent = time.monotonic(), time.process_time()
        with pytest.raises(exceptions.GetTimeoutError):
            ray.progress(waiting).wait(1.0)
    finally:
        gc.enable()
    assert time.process_time() - spent < 0.8 and time.monotonic() - began < 5, "it sleeps while nothing is ready"


BAR = """
import sys, time
import hpcray as ray
from hpcray.experimental import tqdm_ray

ray.init(num_cpus=2)

@ray.remote
def work(number):
    if number == 0:
        for _ in tqdm_ray.tqdm(range(10), desc="inner", flush_interval_s=0.05):
            time.sleep(0.1)
    time.sleep(0.05)
    print("line of", number)
    if number == 7:
        raise KeyError("seven")

print("ready")
for ref in ray.progress([work.remote(i) for i in range(int(sys.argv[1]))], desc="outer"):
    pass
print("over")
ray.get(ref)
"""


def test_the_bar_moves_on_a_terminal_beside_lines_and_bars_of_workers(tmp_path):
    pytest.importorskip("tqdm")
    program = tmp_path / "program.py"
    program.write_text(BAR)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Terminal([sys.executable, str(program), "20"], environ, width=100, height=50) as terminal:
        terminal.shows("outer", "%|")
        assert terminal.ends() == 0
        text = terminal.text
        assert "outer (1 failed): 100%" in text and "first error: KeyError: 'seven'" in text and "inner: 100%" in text
        assert all(f") line of {number}\n" in text + "\n" for number in (3, 7, 19)), text


def test_ctrl_c_ends_the_wait_and_the_terminal_is_whole(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BAR.replace("time.sleep(0.05)", "time.sleep(60)"))
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Terminal([sys.executable, str(program), "4"], environ, width=120, height=50) as terminal:
        terminal.shows("outer", "0/4")
        time.sleep(0.3)
        began = time.monotonic()
        terminal.press("\x03")
        assert terminal.ends() == -2 or terminal.code == 1 or terminal.code == 130
        assert time.monotonic() - began < 10
        lines = terminal.text.splitlines()
        assert "KeyboardInterrupt" in terminal.text
        assert any(line.startswith("Traceback") for line in lines), terminal.text


def test_ctrl_c_ends_an_iterator_of_the_programs(tmp_path, marks: Marks):
    program = tmp_path / "program.py"
    program.write_text(
        "import time, hpcray as ray\nray.init(num_cpus=1)\n"
        "def slow():\n    print('ready', flush=True)\n    time.sleep(60)\n    yield 1\n"
        "try:\n    list(ray.progress(slow()))\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Terminal([sys.executable, str(program)], environ) as terminal:
        terminal.shows("ready")
        terminal.press("\x03")
        terminal.shows("interrupted", timeout=10)
        assert terminal.ends() == 0


def test_on_a_dumb_terminal_there_are_lines(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import time, hpcray as ray\n"
        "for _ in ray.progress(range(10), desc='steps', interval=0.2):\n    time.sleep(0.1)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    done = subprocess.run([sys.executable, str(program)], env=environ, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert 3 <= len(lines) <= 7 and all(line.startswith("steps: ") for line in lines), done.stderr
    assert lines[-1].startswith("steps: 10 of 10 (100%), 0:01") and "\r" not in done.stderr
