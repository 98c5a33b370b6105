"""Extensions: features of programs behind the door that hpcray's own features use."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from helpers.documents import blocks
from helpers.jobs import Ended, Job, embedded
from helpers.leaks import LeakCheck

from hpcray.common.config import Config
from hpcray.runtime.core_worker.extensions import Extension, read_extensions

PAGE = "docs/how-to/extensions.md"
GREETER = """
import msgspec
from typing import Union
from hpcray.runtime.core_worker.extensions import Extension

class Hello(msgspec.Struct, tag=0):
    text: str

class Goodbye(msgspec.Struct, tag=1):
    text: str

class Greeter(Extension):
    name = "greeter"
    messages = Union[Hello, Goodbye]

    def __init__(self, process):
        super().__init__(process)
        self.heard, self.dead, self.ended = [], [], []

    def on_message(self, source, message):
        self.heard.append(message.text)
        if isinstance(message, Hello):
            self.send(source, Goodbye(f"{message.text} yourself"))
            self.process.engine.flush()

    def process_died(self, proc):
        self.dead.append(proc)

    def disconnected(self):
        self.ended.append("disconnected")

    def close(self):
        self.ended.append("closed")
"""


@pytest.fixture
def place(leak_check: LeakCheck, tmp_path: Path) -> Path:
    return tmp_path


def run(place: Path, program: str, **environ: str) -> Ended:
    (place / "program.py").write_text(textwrap.dedent(program))
    with Job(embedded(place / "program.py"), {"PYTHONPATH": str(place), **environ}) as job:
        return job.wait(60)


def test_the_examples_of_the_page_run(place: Path) -> None:
    module, program, greeter = (block.text for block in blocks() if block.page == PAGE)
    (place / "file_transport.py").write_text(module)
    compile(greeter, "greeter.py", "exec")
    shared = place / "shared"
    shared.mkdir()
    ended = run(place, program, SHARED_DIRECTORY=str(shared))
    assert (ended.code, ended.out.strip()) == (0, "1000000"), ended.err
    assert len(list(shared.iterdir())) == 1, "the value went through a file"


def test_an_extension_that_no_process_has_used_gets_its_messages(place: Path) -> None:
    (place / "greeter.py").write_text(GREETER)
    ended = run(
        place,
        """
        import sys, time
        import hpcray as ray
        from hpcray.runtime.core_worker.core_worker import need_process

        ray.init(num_cpus=1, extensions="greeter=greeter:Greeter")

        @ray.remote
        class Actor:
            def proc(self):
                return need_process().me, "greeter" in sys.modules
            def heard(self):
                return need_process().extensions.find("greeter").heard

        actor = Actor.remote()
        proc, imported = ray.get(actor.proc.remote())
        from greeter import Greeter, Hello
        process = need_process()
        greeter = Greeter.of(process)
        assert greeter is Greeter.of(process) and not imported
        with process.engine.lock:
            greeter.send_all([proc], Hello("hello"))
            process.engine.flush()
        deadline = time.monotonic() + 20
        while not greeter.heard and time.monotonic() < deadline:
            time.sleep(0.01)
        print(greeter.heard, ray.get(actor.heard.remote()))
        ray.kill(actor)
        while not greeter.dead and time.monotonic() < deadline:
            time.sleep(0.01)
        print(greeter.dead == [proc])
        ray.shutdown()
        print(greeter.ended)
        """,
    )
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["['hello yourself'] ['hello']", "True", "['disconnected', 'closed']"]


def test_an_unknown_extension_is_an_error_that_names_the_setting(place: Path) -> None:
    ended = run(
        place,
        """
        import hpcray as ray
        from hpcray.runtime.core_worker.core_worker import need_process
        ray.init(num_cpus=1)
        try:
            need_process().extensions.get("missing")
        except LookupError as error:
            print(error)
        try:
            ray.remote(tensor_transport="missing")(print)
        except ValueError as error:
            print(error)
        """,
    )
    assert ended.code == 0, ended.err
    first, second = ended.out.splitlines()
    assert "hint: HPCRAY_EXTENSIONS=missing=module:Class" in first
    assert second.startswith("Invalid tensor transport: MISSING.")


@pytest.mark.parametrize("text", ["file", "file=module", "file=:Class", "a b=module:Class", "=module:Class"])
def test_a_setting_that_is_no_list_of_extensions_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"extensions: .* is not of the form name=module:Class"):
        read_extensions(text)


def test_a_class_that_is_no_extension_of_that_name_is_refused() -> None:
    assert Config(extensions="a=b:C").extensions == "a=b:C"
    for text in ("path=pathlib:Path", "other=hpcray.runtime.core_worker.extensions:Extension"):
        (load,) = read_extensions(text).values()
        with pytest.raises((TypeError, AttributeError)):
            load()
    assert issubclass(read_extensions("graphs=hpcray.graphs.compiled_graphs:CompiledGraphs")["graphs"](), Extension)
