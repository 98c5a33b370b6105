"""The template imports what workers import again and again, where a trial shows that it may."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers.jobs import Job, embedded
from helpers.leaks import LeakCheck
from test_fork_server import Template, make  # noqa: F401 — a fixture

from hpcray.platform.fork_server import WorkerMain

HEAVY = "import time\ntime.sleep(0.4)\n"
MODULES = {
    "calm": HEAVY,
    "light": "",
    "threaded": f"{HEAVY}import threading\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    "forking": f"{HEAVY}import subprocess\nchild = subprocess.Popen(['sleep', '600'])\n",
    "broken": f"{HEAVY}raise ImportError('no')\n",
    "deadly": f"{HEAVY}import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "looks": f"{HEAVY}import os\nvalue = os.environ.get('OF_THE_JOB')\n",
}


def listing() -> WorkerMain:
    """A worker that writes down which of the modules it has from the template."""

    def run(session_dir: str, number: int, arena_fd: int) -> NoReturn:
        found = [name for name in MODULES if name in sys.modules]
        looks = getattr(sys.modules.get("looks"), "value", None)
        Path(session_dir, f"{number}.found").write_text(
            " ".join([*found, str(looks), str(os.environ.get("OF_THE_JOB"))])
        )
        os._exit(0)

    return run


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda name: str(tmp_path / f"{name}.py")


def test_only_what_leaves_nothing_behind_is_imported(
    make: Callable[[Callable[[], WorkerMain]], Template],  # noqa: F811
    modules: Callable[[str], str],
) -> None:
    template = make(listing)
    template.wait_for("ready")
    for name in MODULES:
        template.link.learn(name, modules(name), [("OF_THE_JOB", "set")])
        template.link.learn(name, modules(name))  # once is enough
    said = {name: template.wait_for("learned", name)[1] for name in MODULES}
    template.link.learn("json", "/elsewhere/json.py")
    assert "another file" in template.wait_for("learned", "json")[1]
    assert said["calm"] == said["looks"] == ""
    assert "little time" in said["light"] and "threads" in said["threaded"] and "processes" in said["forking"]
    assert "cannot be imported" in said["broken"] and "-9" in said["deadly"]
    template.link.fork(1, ())
    template.wait_for("exited", 1)
    assert Path(template.session.path, "1.found").read_text().split() == ["calm", "looks", "set", "None"]
    assert len([report for report in template.seen if report[0] == "learned"]) == len(MODULES) + 1
    assert not any(name in sys.modules for name in MODULES), "the raylet has imported nothing"


PROGRAM = """
import sys, time
import hpcray as ray

ray.init(num_cpus=2)

@ray.remote(num_cpus=0)
class User:
    def __init__(self):
        self.had = "large_package" in sys.modules
        import large_package
        self.name = large_package.__name__
    def found(self):
        return self.had

first = User.remote()
had = [ray.get(first.found.remote())]
deadline = time.monotonic() + 60
while not had[-1] and time.monotonic() < deadline:
    time.sleep(0.3)
    user = User.remote()
    had.append(ray.get(user.found.remote()))
    del user
from functools import partial
from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import need_process
process = need_process()
raylet = raylet_of(process.node)
(node,) = process.gcs.ask_many({raylet: partial(m.Introspect, what="node")}, 30.0).values()
print(had[0], had[-1], node["learned"].get("large_package"))
ray.shutdown()
"""


@pytest.mark.parametrize("on", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_later_worker_has_what_an_earlier_one_has_imported(leak_check: LeakCheck, tmp_path: Path, on: str) -> None:
    package = tmp_path / "site" / "large_package"
    package.mkdir(parents=True)
    for number in range(120):
        (package / f"part{number}.py").write_text("")
    lines = [f"from . import part{number}" for number in range(120)]
    (package / "__init__.py").write_text("\n".join(["import time", "time.sleep(0.4)", *lines]))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM if on == "1" else PROGRAM.replace("+ 60", "+ 3"))
    environ: dict[str, Any] = {"PYTHONPATH": str(package.parent), "HPCRAY_LEARN_IMPORTS": on}
    began = time.monotonic()
    with Job(embedded(program), environ) as job:
        ended = job.wait(120)
    assert ended.code == 0, ended.err
    expected = "False True " if on == "1" else "False False None"
    assert ended.out.strip("\n") == expected, (ended.out, ended.err, time.monotonic() - began)
    assert "large_package" not in ended.err
