"""`tqdm_ray`: the bars of workers move in the driver's terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from engine import ROOT

pytest.importorskip("tqdm")

PROGRAM = """
import time
import hpcray as ray
from hpcray.experimental import tqdm_ray

ray.init("local", num_cpus=2)

@ray.remote
def work(name, seconds):
    bar = tqdm_ray.tqdm(total=10, desc=name, unit="rows", flush_interval_s=0.05)
    for step in range(10):
        time.sleep(seconds)
        bar.update()
        if step == 5:
            print("halfway of", name)
    bar.close()

refs = [work.remote("first", 0.1), work.remote("second", 0.2)]
for _ in tqdm_ray.tqdm(range(5), desc="mine"):
    time.sleep(0.1)
print("my own line")
ray.get(refs)
ray.shutdown()
"""


def run_in_a_terminal(program: str) -> str:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=slave, stderr=slave, env=env) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(master, 65536):
                shown += data
    os.close(master)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


def test_bars_of_several_workers_and_the_driver_move_and_lines_stay_whole() -> None:
    shown = run_in_a_terminal(PROGRAM)
    for name in ("first", "second"):
        counts = {int(count) for count in re.findall(rf"{name}: +(\d+)%", shown)}
        assert 100 in counts and len(counts) >= 4, shown
        assert re.search(rf"\(work pid=\d+\)(\x1b\[0m)? halfway of {name}\r\n", shown), shown
    assert "mine: 100%" in shown and "\x1b[A" in shown, "bars are below each other"
    assert "my own line\r\n" in shown and "__ray_tqdm_magic_token__" not in shown
