"""`hpcray top` and the tables of `hpcray list` in a real terminal, beside a job that runs."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from engine import Marks, eventually, hpcray_only, ray
from helpers.terminal import Terminal

from hpcray.util.state import list_actors

pytest.importorskip("textual")
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 3}


@ray.remote
def sleeper(marks):
    print("it sleeps")
    marks.add("asleep")
    time.sleep(600)


@ray.remote
def quick(number):
    return number


@ray.remote(num_cpus=0)
class Victim:
    def pid(self):
        return os.getpid()


def hpcray(*args: str) -> list[str]:
    address = ray.init(ignore_reinit_error=True)["address"]
    return [sys.executable, "-m", "hpcray.cli", *args, "--job", address]


def test_top_shows_the_job_and_its_keys_lead_down_and_back(marks: Marks):
    victim = Victim.remote()
    os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)
    ray.get([quick.remote(number) for number in range(300)])
    ref = sleeper.remote(marks)
    eventually(marks.lines)
    with Terminal(hpcray("top", "--interval", "0.5")) as terminal:
        text = terminal.shows("quick", "sleeper", "300", "q Quit", "it sleeps")
        assert "1 node" in text and max(map(len, text.splitlines())) <= 80
        terminal.press("\t\x1b[B")
        terminal.press("\r")
        # The footer is drawn last. Above it, lines of the page before may still stand.
        terminal.shows("run times of", "esc Back")
        terminal.press("\x1b")
        terminal.shows("functions by total time")
        terminal.press("a")
        terminal.shows("Victim", "DEAD", time.strftime("%H:"))
        terminal.press("\r")
        terminal.shows("signal 9")
        terminal.press("\x1b")
        terminal.shows("0 of them alive")
        terminal.press("\x1b")
        terminal.shows("functions by total time")
        terminal.press("\t\r")
        terminal.shows("process", "sleeper", "driver", "esc Back")
        terminal.press("\x1b")
        terminal.shows("functions by total time")
        terminal.press("q")
        assert terminal.ends() == 0
        assert terminal.left_alternate_screen
    ray.cancel(ref, force=True)


def test_ctrl_c_and_q_leave_the_terminal_as_it_was():
    with Terminal(hpcray("top", "--interval", "0.5")) as terminal:
        terminal.shows("functions by total time")
        terminal.press("\x03")
        terminal.press("q")
        terminal.ends()
        assert terminal.left_alternate_screen


def test_a_list_fits_the_terminal():
    victims = [Victim.options(name=f"a-long-name-of-an-actor-{i}").remote() for i in range(2)]
    ray.get([one.pid.remote() for one in victims])
    with Terminal(hpcray("list", "actors"), width=70) as terminal:
        terminal.shows(f"{len(list_actors())} actors", "…", "ALIVE")
        assert terminal.ends() == 0
        rows = [line for line in terminal.text.splitlines() if "Victim" in line]
        assert len(rows) >= 2 and all("ALIVE" in row or "DEAD" in row for row in rows), terminal.text
