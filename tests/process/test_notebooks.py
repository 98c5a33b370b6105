"""Notebooks: a real kernel that runs cells of hpcray."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import ROOT, eventually
from helpers.leaks import LeakCheck

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

PATIENCE = 60.0


class Notebook:
    """A kernel, and what its cells have shown."""

    def __init__(self, place: Path) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "IPYTHONDIR": str(place / "ipython")}
        environ.pop("HPCRAY_LOG_TO_DRIVER", None)
        self.kernel = manager.KernelManager(kernel_name="python3")
        self.kernel.start_kernel(env=environ, cwd=str(place), stderr=subprocess.DEVNULL)
        self.client = self.kernel.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        self.messages: list[Any] = []

    def send(self, code: str) -> str:
        """Begin to run a cell. Returns its id."""
        return str(self.client.execute(code))

    def run(self, code: str) -> str:
        """Run a cell to its end. Returns its id."""
        cell = self.send(code)
        self.until(lambda: self.is_over(cell))
        return cell

    def interrupted(self, code: str) -> str:
        """Interrupt a cell while it runs. Returns the error that ends it."""
        cell = self.send(code)
        self.until(lambda: self.of(cell, "status"))
        time.sleep(0.5)
        self.kernel.interrupt_kernel()
        self.until(lambda: self.is_over(cell))
        return self.error(cell)

    def is_over(self, cell: str) -> bool:
        return any(one["content"].get("execution_state") == "idle" for one in self.of(cell, "status"))

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.messages[-20:]
            try:
                self.messages.append(self.client.get_iopub_msg(timeout=0.2))
            except Exception:  # queue.Empty
                continue

    def of(self, cell: str, *kinds: str) -> list[Any]:
        return [
            one
            for one in self.messages
            if one["parent_header"].get("msg_id") == cell and one["header"]["msg_type"] in kinds
        ]

    def text(self, cell: str) -> str:
        """What a cell has printed, without colors."""
        text = "".join(one["content"]["text"] for one in self.of(cell, "stream"))
        return re.sub(r"\x1b\[\d*m", "", text)

    def error(self, cell: str) -> str:
        return "".join(one["content"]["ename"] for one in self.of(cell, "error"))

    def data(self, cell: str) -> dict[str, Any]:
        """The result of a cell, by media type."""
        return dict(self.of(cell, "execute_result", "display_data")[-1]["content"]["data"])

    def close(self) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=False)


@pytest.fixture(scope="module")
def event_loop() -> None:
    """The loop of jupyter_client in this process stays: it is no leak of a job."""
    importlib.import_module("jupyter_core.utils").ensure_event_loop()


@pytest.fixture
def notebook(tmp_path: Path, event_loop: None, leak_check: LeakCheck) -> Iterator[Notebook]:
    found = Notebook(tmp_path)
    yield found
    found.close()


SETUP = """
import os, time
import hpcray as ray
context = ray.init(num_cpus=2)
@ray.remote
def say(text, seconds=0.0):
    time.sleep(seconds)
    print(text)
    return text
@ray.remote
class Speaker:
    def say(self, text):
        print(text)
        return os.getpid()
"""


@pytest.mark.slow
def test_a_notebook_from_its_start_to_its_restart(notebook: Notebook) -> None:
    """One kernel for all: each takes seconds to start."""
    setup = notebook.run(SETUP)
    assert not notebook.error(setup)

    # Output goes to the cell that has started the task, also when another one has run since.
    early = notebook.run("late = say.remote('from the early cell', 1.0); speaker = Speaker.remote()")
    middle = notebook.run("ray.get(speaker.say.remote('from the middle cell'))")
    last = notebook.run("ray.get(late); ray.get(say.remote('from the last cell'))")
    notebook.until(lambda: "from the last cell" in notebook.text(last) and "from the early" in notebook.text(early))
    assert re.fullmatch(r"\(say pid=\d+\) from the early cell\n", notebook.text(early))
    assert re.fullmatch(r"\(Speaker pid=\d+\) from the middle cell\n", notebook.text(middle))
    assert re.fullmatch(r"\(say pid=\d+\) from the last cell\n", notebook.text(last))

    # What a cell shows of hpcray's objects; nothing is waited for.
    began = time.monotonic()
    pending = notebook.data(notebook.run("slow = say.remote('slow', 600); slow"))
    assert (
        "not ready" in pending["text/html"] and "say" in pending["text/html"] and "ObjectRef(" in pending["text/plain"]
    )
    assert time.monotonic() - began < 10
    assert ">ready<" in notebook.data(notebook.run("late"))["text/html"]
    assert "ALIVE" in notebook.data(notebook.run("speaker"))["text/html"]
    assert "say(text, seconds=0.0)" in notebook.data(notebook.run("say"))["text/html"]
    assert "Actor class Speaker" in notebook.data(notebook.run("Speaker"))["text/html"]
    shown = notebook.data(notebook.run("context"))
    assert "namespace" in shown["text/html"]

    # Ctrl-C in `get`, and once more: the handler is set in each cell.
    for _ in range(2):
        assert notebook.interrupted("ray.get(slow)") == "KeyboardInterrupt"
    assert (
        notebook.data(notebook.run("ray.cancel(slow, force=True); ray.get(say.remote('on'))"))["text/plain"] == "'on'"
    )
    handler = notebook.data(notebook.run("import signal; signal.getsignal(signal.SIGINT).__module__"))["text/plain"]
    assert "interruptions" in handler

    progress = notebook.run("for ref in ray.progress([say.remote(i) for i in range(5)], desc='cells'): pass")
    html = notebook.of(progress, "display_data", "update_display_data")[-1]["content"]["data"]["text/html"]
    assert "cells: 5 of 5 (100%)" in html and "<progress value=5 max=5>" in html

    # A command in a cell finds the kernel's own job.
    status = notebook.run(f"!{sys.executable} -m hpcray.cli status")
    session = notebook.data(notebook.run("context['session_dir']"))["text/plain"].strip("'")
    assert "node 0" in notebook.text(status) and "CPU: " in notebook.text(status)
    assert not notebook.error(notebook.run("ray.shutdown(); context = ray.init(num_cpus=1)"))
    assert session not in notebook.data(notebook.run("context['session_dir']"))["text/plain"]
    assert notebook.data(notebook.run("ray.get(say.remote('again'))"))["text/plain"] == "'again'"

    # A restart kills the kernel, and leaves nothing of the job.
    session = notebook.data(notebook.run("context['session_dir']"))["text/plain"].strip("'")
    assert os.path.isdir(session)
    notebook.kernel.restart_kernel(now=True)
    eventually(lambda: not os.path.exists(session), "the session directory is removed")
    notebook.client.wait_for_ready(timeout=PATIENCE)
    setup = notebook.run(SETUP)
    assert not notebook.error(setup)
    assert notebook.data(notebook.run("ray.get(say.remote('after'))"))["text/plain"] == "'after'"


@pytest.mark.slow
def test_the_live_widget_shows_the_job(notebook: Notebook) -> None:
    pytest.importorskip("anywidget")
    notebook.run(SETUP)
    cell = notebook.run("ray.get([say.remote(str(i)) for i in range(3)]); context")
    data = notebook.data(cell)
    assert "application/vnd.jupyter.widget-view+json" in data and "text/html" in data
    states = [one for one in notebook.messages if one["header"]["msg_type"] in ("comm_open", "comm_msg")]
    notebook.until(lambda: any("say" in str(one["content"]) for one in notebook.messages if "comm" in one["msg_type"]))
    assert states
    assert not notebook.error(notebook.run("ray.shutdown()"))


JOB = """
import time
import hpcray as ray
ray.init(namespace="shared")
@ray.remote(num_cpus=0)
class Store:
    def get(self):
        return 42
store = Store.options(name="store").remote()
ray.get(store.get.remote())
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_notebook_attaches_to_a_job_that_runs(notebook: Notebook, tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(JOB)
    command = [sys.executable, "-m", "hpcray", "--num-cpus", "1", str(program)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as job:
        assert job.stdout is not None and job.stdout.readline() == "up\n"
        cell = notebook.run(
            "import hpcray as ray\nray.init('auto', namespace='shared')\n"
            "@ray.remote\ndef hello():\n    print('hello')\n    return 1\n"
            "ray.get(hello.remote()), ray.get(ray.get_actor('store').get.remote())"
        )
        assert notebook.data(cell)["text/plain"] == "(1, 42)"
        notebook.until(lambda: ") hello" in notebook.text(cell))
        status = notebook.run(f"!{sys.executable} -m hpcray.cli status")
        assert "node 0" in notebook.text(status)
        assert not notebook.error(notebook.run("ray.shutdown()"))
        job.terminate()
        assert "hello" not in job.stdout.read()
