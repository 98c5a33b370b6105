"""`hpcray debug`: the tasks that wait at a breakpoint, and a terminal at one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

import click

from hpcray.cli import json_option, print_json
from hpcray.cli.job_option import job, job_option
from hpcray.common.terminal_text import plain
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.breakpoints import ENDED, GONE, PROMPT, RUNS, TAKEN, Breakpoint, BreakpointClient
from hpcray.state.breakpoints import list_breakpoints as list_all
from hpcray.state.reports import format_duration, print_table

_WATCH_PERIOD = 1.0
"""Seconds between two looks whether a breakpoint that waits for a line is still there."""
_COMPLETED = " \t\n`@#$%^&*()=+[{]}\\|;:'\",<>?"
_INTERRUPTED = 130


@click.command()
@job_option
@click.argument("breakpoint_", metavar="[BREAKPOINT]", required=False)
@click.option("--list", "only_list", is_flag=True, help="List what waits, and end.")
@json_option("a list of what waits, and no terminal is attached")
@click.option("-v", "--verbose", is_flag=True, help="With ids.")
def debug(address: str, breakpoint_: str | None, only_list: bool, as_json: bool, verbose: bool) -> None:
    """List the tasks and actors that wait at a `breakpoint()`, and attach this terminal to one: pdb, on any node.

    BREAKPOINT is a number of the list, or an id. At the prompt: c lets the task go on, Ctrl-D leaves it waiting.
    With RAY_DEBUG_POST_MORTEM=1 in the job's environment tasks that raise an error wait too.
    """
    with job(address) as process:
        if as_json:
            print_json([asdict(one) for one in list_all(process)])
        elif breakpoint_ is not None:
            found = list_all(process)
            if (chosen := _choose(found, breakpoint_)) is None:
                _print_list(found, verbose)
                raise click.ClickException(f"no breakpoint {breakpoint_} waits")
            _attach(process, chosen)
        elif only_list or not sys.stdin.isatty():
            _print_list(list_all(process), verbose)
        else:
            _choose_and_attach(process, verbose)


def _choose_and_attach(process: CoreWorker, verbose: bool) -> None:
    """The list, and what is chosen of it, again and again."""
    while True:
        found = list_all(process)
        _print_list(found, verbose)
        try:
            text = input("Enter breakpoint index or press enter to refresh: ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if text in ("q", "quit", "exit"):
            return
        chosen = _choose(found, text) if text else None
        if chosen is not None:
            _attach(process, chosen)
        elif text:
            click.echo(f"no breakpoint {text} waits; Ctrl-D ends this")


def _choose(found: Sequence[Breakpoint], text: str) -> Breakpoint | None:
    if text.isdecimal() and int(text) < len(found):
        return found[int(text)]
    return next((one for one in found if one.token == text), None)


def _print_list(found: Sequence[Breakpoint], verbose: bool) -> None:
    click.echo("Active breakpoints:" if found else "no task waits at a breakpoint")
    names = ["index", "task", "filename:lineno", "waits", "node", "pid"]
    ids = ["id", "task id", "worker id", "actor id", "node id"] if verbose else []
    rows: list[list[Any]] = []
    now = time.time()
    for place, one in enumerate(found):
        file = one.file if verbose else "/".join(PurePath(one.file).parts[-2:])
        row = [
            place,
            one.name,
            f"{file}:{one.line}",
            format_duration(max(0.0, now - one.since)),
            f"node {one.node}",
            one.pid,
        ]
        more = [one.token, one.task_id, one.worker_id, one.actor_id, one.node_id] if verbose else []
        rows.append([*row, *more])
    print_table([*names, *ids], rows)
    for place, one in enumerate(found):
        if one.error:
            click.echo(plain(f"{place}: {one.error.strip().splitlines()[-1]}"))


def _attach(process: CoreWorker, breakpoint_: Breakpoint) -> None:
    """Be the terminal of a breakpoint until it is left, or the task goes on without one."""
    client = BreakpointClient(process, breakpoint_)
    client.attach()
    with _completion(client):
        _Terminal(client).run()


class _Terminal:
    """Prints what a debugger writes, and sends what is typed at its prompt."""

    def __init__(self, client: BreakpointClient) -> None:
        self._client = client
        self._line = ""  # what stands on the last line: the prompt
        self._lost = ""

    def run(self) -> None:
        """Until the end of the task, or of the input."""
        while True:
            try:
                self._print(self._client.poll())
                state = self._client.state
                if state in (ENDED, GONE, TAKEN):
                    self._say({ENDED: "the task goes on", GONE: "its process has ended", TAKEN: _TAKEN}[state])
                    return
                if state == RUNS and not sys.stdin.isatty():
                    return
                if state == PROMPT and self._client.answered and not self._type():
                    self._say(f"detached; it waits on: hpcray debug {self._client.token}")
                    return
            except KeyboardInterrupt:
                if self._client.state == RUNS:
                    self._say("detached; the task runs")
                    return
                self._client.interrupt()

    def _type(self) -> bool:
        """Send one line. Returns False at the end of the input."""
        try:
            with self._watched():
                prompt, self._line = self._line, ""
                if sys.stdin.isatty():
                    sys.stdout.write("\r")
                    text = input(prompt)
                else:
                    if not (text := sys.stdin.readline()):
                        return False
                    click.echo(text, nl=not text.endswith("\n"))
        except EOFError:
            return False
        except KeyboardInterrupt:  # typed, or of `_watched`: `run` finds out
            click.echo()
            if not self._lost:
                self._print(prompt)
                return True
            return True
        self._client.send(text.rstrip("\n"))
        return True

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Interrupt what reads a line when its breakpoint is gone."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_WATCH_PERIOD):
                state = self._client.look()
                if state != PROMPT and not done.is_set():
                    self._lost = state
                    os.kill(os.getpid(), signal.SIGINT)
                    return

        thread = threading.Thread(target=watch, name="hpcray-debug-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _print(self, text: str) -> None:
        text = plain(text, lines=True)
        click.echo(text, nl=False)
        self._line = (self._line + text).rpartition("\n")[2]

    def _say(self, text: str) -> None:
        if self._line:
            click.echo()
        click.echo(plain(f"hpcray: {text}"), err=True)


_TAKEN = "another terminal has taken this breakpoint"


@contextlib.contextmanager
def _completion(client: BreakpointClient) -> Iterator[None]:
    """Tab completes by what the task knows."""
    try:
        import readline
    except ImportError:
        yield
        return
    matches: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if not state:
            line = readline.get_line_buffer()
            skipped = len(line) - len(line.lstrip())
            begin, end = readline.get_begidx() - skipped, readline.get_endidx() - skipped
            matches[:] = client.completions(text, line.lstrip(), begin, end)
        return matches[state] if state < len(matches) else None

    before, delimiters = readline.get_completer(), readline.get_completer_delims()
    readline.set_completer(complete)
    readline.set_completer_delims(_COMPLETED)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before)
        readline.set_completer_delims(delimiters)
