"""What the workers of several drivers of one job print comes to the terminal of the driver that they work for."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from engine import ROOT
from helpers.leaks import LeakCheck
from helpers.terminal import Terminal

ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}
ENVIRON.pop("HPCRAY_LOG_TO_DRIVER", None)
PROGRAM = """
import os, subprocess, sys, time
import hpcray as ray

name, address = sys.argv[1:3]
ray.init(num_cpus=4) if address == "own" else ray.init(address)

@ray.remote
def work(number):
    print(f"{name} {number} prints")
    subprocess.run(["sh", "-c", f"echo {name} {number} child; echo {name} {number} err >&2"])
    return inner.remote(number)

@ray.remote
def inner(number):
    print(f"{name} {number} nested")

@ray.remote
class Dying:
    def die(self):
        print(f"{name} last words")
        os._exit(3)

for number in range(5):
    ray.get(ray.get(work.remote(number)))
try:
    ray.get(Dying.remote().die.remote())
except ray.exceptions.RayActorError:
    pass
address = ray.init(ignore_reinit_error=True)["address"]
sys.stdout.write(f"{name} waits at {address}\\n")  # one write, so that no line of a worker stands in its middle
sys.stdout.flush()
sys.stdin.readline()
ray.get(ray.get(work.remote(9)))
"""
KINDS = ("prints", "child", "err", "nested")


@pytest.fixture
def program(tmp_path: Path, leak_check: LeakCheck) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def run(program: str, name: str, address: str) -> Terminal:
    return Terminal([sys.executable, program, name, address], ENVIRON, width=150, height=60)


def check(text: str, name: str, other: str) -> None:
    for number in range(5):
        for kind in KINDS:
            of = "inner" if kind == "nested" else "work"
            line = rf"\({of} pid=\d+\) {name} {number} {kind}$"
            assert len(re.findall(line, text, re.MULTILINE)) == 1, f"{line}\n{text}"
    assert re.search(rf"\(Dying pid=\d+\) {name} last words$", text, re.MULTILINE), text
    assert f"{other} " not in text


def test_each_driver_sees_its_own_workers_and_no_others(program: str) -> None:
    with run(program, "first", "own") as first:
        address = re.findall(r"first waits at (\S+)", first.shows("first waits at /"))[0]
        with run(program, "second", address) as second, run(program, "third", address) as third:
            for one, name in ((second, "second"), (third, "third")):
                one.shows(f"{name} waits at", f"{name} last words", f"{name} 4 nested", f"{name} 4 err")
                one.press("\n")
            assert second.ends() == third.ends() == 0
            check(second.text, "second", "third")
            check(third.text, "third", "second")
            for text in (first.text, third.text):
                assert "second " not in text
            assert "second 9 child" in second.text and "third 9 nested" in third.text
        first.press("\n")
        assert first.ends() == 0
        check(first.text, "first", "second")
